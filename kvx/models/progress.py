"""One way to show how far a long step is: a bar on a terminal or in a notebook, a hook for programs, or nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

Hook = Callable[[str, int, int], Any]


@contextlib.contextmanager
def reporting(progress: Hook | bool | None, title: str, unit: str = "bytes") -> Iterator[Hook]:
    """A function ``(what, done, total)`` to call while work goes on.

    Args:
        progress: a hook of the caller's; ``True`` or ``None``: a bar on standard error when that is a terminal or a
            notebook; ``False``: silence.
        title: shown before the bar.
        unit: ``"bytes"`` or a plural noun.

    Yields:
        The function.

    Example:
        >>> from kvx.models.progress import reporting
        >>> with reporting(lambda what, done, total: print(what, done, total), "reading") as report:
        ...     report("a.bin", 1, 2)
        a.bin 1 2
    """
    if callable(progress):
        yield progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    amount = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        amount,
        TimeRemainingColumn(),
        TextColumn("{task.fields[what]}"),
    )
    hidden = progress is False or not (console.is_terminal or console.is_jupyter)
    with Progress(*columns, console=console, disable=hidden, transient=True) as bar:
        task = bar.add_task(title, total=None, what="")
        yield lambda what, done, total: bar.update(task, completed=done, total=total, what=what)
