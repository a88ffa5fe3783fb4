"""What every command shares: its common flags, where it writes, and what it hands back."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from kvx.models.model import Model
    from kvx.models.progress import Hook

OK, FAILED, USAGE, REPREFILL = 0, 1, 2, 3
LOG_WIDTH = 118  # of tables in files and pipes, which have no width of their own


@dataclasses.dataclass(frozen=True)
class Common:
    """Flags of every command."""

    config: Path | None = None
    """YAML file of settings, named like the flags; flags given on the command line win."""
    json: bool = False
    """Print one JSON object on stdout; everything else goes to stderr."""


class UsageError(Exception):
    """The command line or its config file cannot be understood, or lacks something: exit code 2."""


def require(settings: Common, *names: str) -> None:
    """Refuse settings that lack one of ``names``.

    Raises:
        UsageError: naming all that are missing.
    """
    missing = [f"--{name.replace('_', '-')}" for name in names if getattr(settings, name) is None]
    if missing:
        command = type(settings).__name__.lower()
        raise UsageError(
            f"kvx {command} needs {' and '.join(missing)}; see kvx {command} --help, or use --config FILE.yaml."
        )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a command found.

    Attributes:
        figures: what ``--json`` prints.
        code: the exit code, 0 or 3 (``REPREFILL``); failures raise instead.
    """

    figures: Mapping[str, Any]
    code: int = OK


class Output:
    """Where a command writes: results to stdout for people, or one JSON object there and everything else to stderr.

    Attributes:
        console: results (tables, answers); stderr when ``as_json``.
        progress: progress and remarks; always stderr.
    """

    def __init__(self, as_json: bool = False) -> None:
        from rich.console import Console

        self.as_json = as_json
        self.progress: Console = Console(stderr=True, highlight=False)
        self.console: Console = self.progress if as_json else Console(highlight=False)
        for console in (self.progress, self.console):
            if not console.is_terminal and not console.is_jupyter:
                console.width = LOG_WIDTH

    def say(self, text: str) -> None:
        """One remark for people, outside the result; plain text, no markup."""
        self.progress.print(text, markup=False, soft_wrap=True)

    def piece(self, text: str) -> None:
        """Part of a streamed answer: written at once, without a line break."""
        self.console.file.write(text)
        self.console.file.flush()

    def watch(self, title: str) -> Hook | bool:
        """What long functions take as ``progress``: a bar on a terminal or in a notebook, else a line now and then."""
        if self.progress.is_terminal or self.progress.is_jupyter:
            return True
        return Lines(self, title)

    def finish(self, figures: Mapping[str, Any]) -> None:
        """Print the figures as the one JSON object, when asked for."""
        if self.as_json:
            json.dump(jsonable(figures), sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
            sys.stdout.write("\n")
            sys.stdout.flush()


class Lines:
    """Progress for logs: a line with the time left every few seconds.

    Example:
        >>> class Log:
        ...     say = staticmethod(print)
        >>> lines = Lines(Log(), "fitting", every=0.0)
        >>> lines("tokens", 0, 10)
        fitting: tokens, 0 %
        >>> lines("tokens", 10, 10)
        fitting: tokens, 100 %, about 0 s left
    """

    def __init__(self, out: Any, title: str, every: float = 10.0) -> None:
        self.out, self.title, self.every = out, title, every
        self.said, self.began, self.first, self.last, self.total = time.monotonic(), 0.0, 0, -1, -1

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if total != self.total or done < self.last:
            self.began, self.first, self.total = now, done, total
        self.last = done
        if now - self.said < self.every or not total:
            return
        self.said = now
        moved = done - self.first
        tail = f", about {(now - self.began) * (total - done) / moved:.0f} s left" if moved else ""
        self.out.say(f"{self.title}: {what}, {100 * done / total:.0f} %{tail}")


def prepare_jax() -> None:
    """Keep compiled programs in kvx's cache folder, so that the next run of a command starts at once.

    An entry point's choice, made before the first computation; a folder set through JAX's own variable wins.
    """
    import jax

    from kvx.models.disk_cache import cache_dir

    if not getattr(jax.config, "jax_compilation_cache_dir", None):
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def load(name: str, dtype: str, progress: Hook | bool) -> Model:
    """A model with scanned layers: commands compile many programs and run each a few times.

    ``mini:NAME`` is one of the small models that ship with kvx.
    """
    import kvx

    if name.startswith("mini:"):
        from kvx.testing.minis import load_mini

        return load_mini(name.removeprefix("mini:"), dtype=dtype, stacked=True)
    return kvx.load_model(name, dtype=dtype, stacked=True, progress=progress)


def jsonable(value: Any) -> Any:
    """Plain JSON types: numpy numbers and arrays unpacked, paths as text, NaN and infinity as ``null``.

    Example:
        >>> import numpy as np
        >>> jsonable({"loss": np.float32(0.5), "gap": float("nan"), "ids": np.arange(2)})
        {'loss': 0.5, 'gap': None, 'ids': [0, 1]}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(v) for v in value]
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    return value if isinstance(value, str | int | bool | None) else str(value)
