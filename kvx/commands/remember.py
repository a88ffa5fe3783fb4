"""Finished fits and evaluations of the demo, kept in the cache folder under a hash of all that they depend on."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvx import __version__
from kvx.errors import KvxError

if TYPE_CHECKING:
    from kvx.commands.common import Output
    from kvx.mappers.base import CacheMap

FORMAT = 1


def key_of(kind: str, *facts: Any) -> str:
    """Name of what depends on these facts and on this version of kvx.

    Example:
        >>> key_of("fit", "a", 1) == key_of("fit", "a", 1), key_of("fit", "a", 1) == key_of("fit", "a", 2)
        (True, False)
    """
    text = json.dumps([FORMAT, __version__, kind, facts], default=str)
    return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def _home(key: str) -> Path:
    from kvx.models.disk_cache import cache_dir

    return cache_dir() / "demo" / key


def remembered_fit(
    key: str, make: Callable[[], tuple[CacheMap, dict[str, Any]]], *, again: bool = False
) -> tuple[CacheMap, dict[str, Any], bool]:
    """A mapper and its report: the kept ones, or those that ``make`` gives, which are then kept.

    Args:
        key: from :func:`key_of`.
        make: fits.
        again: fit even when something is kept.

    Returns:
        Mapper, report, and whether they were kept ones. A damaged one is fitted anew.
    """
    import kvx
    from kvx.models.disk_cache import build_folder

    home = _home(key)
    if not again and home.is_dir():
        try:
            return kvx.load(home / "mapper"), json.loads((home / "report.json").read_text()), True
        except (KvxError, OSError, ValueError):
            pass  # damaged: made anew below
    shutil.rmtree(home, ignore_errors=True)
    mapper, report = make()

    def fill(folder: Path) -> None:
        kvx.save(folder / "mapper", mapper)
        (folder / "report.json").write_text(json.dumps(report, default=str))

    build_folder(home, fill)
    return mapper, report, False


def remembered_evaluation(
    key: str, make: Callable[[], tuple[dict[str, Any], Any]], out: Output, *, again: bool = False
) -> tuple[dict[str, Any], Any]:
    """Figures and tables of an evaluation: the kept ones, or those that ``make`` gives, which are then kept.

    Args:
        key: from :func:`key_of`.
        make: measures; gives figures as plain JSON and something that rich prints.
        out: says that the result is a kept one.
        again: measure even when something is kept.

    Returns:
        Figures, and what to print.
    """
    from rich.console import Console
    from rich.text import Text

    from kvx.models.disk_cache import build_folder

    home = _home(key)
    if not again and home.is_dir():
        figures = json.loads((home / "figures.json").read_text(encoding="utf-8"))
        out.say(f"kept from an earlier run, which took {figures['seconds']:.0f} s:")
        return figures, Text.from_ansi((home / "table.ansi").read_text(encoding="utf-8"))
    shutil.rmtree(home, ignore_errors=True)
    figures, table = make()

    def fill(folder: Path) -> None:
        (folder / "figures.json").write_text(json.dumps(figures), encoding="utf-8")
        with (folder / "table.ansi").open("w", encoding="utf-8") as file:
            Console(file=file, force_terminal=True, width=110).print(table)

    build_folder(home, fill)
    return figures, table
