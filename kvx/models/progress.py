"""One way to show how far a long step is: a bar on a terminal or in a notebook, a hook for programs, or nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

Hook = Callable[[str, int, int], Any]
EVERY = 20.0  # seconds between two lines where no bar can be drawn


@contextlib.contextmanager
def reporting(progress: Hook | bool | None, title: str, unit: str = "bytes") -> Iterator[Hook]:
    """A function ``(what, done, total)`` to call while work goes on.

    Args:
        progress: a hook of the caller's; ``True`` or ``None``: a bar on standard error when that is a terminal or a
            notebook, else a plain line there every 20 seconds (log files); ``False``: silence.
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
    if progress is not False and not (console.is_terminal or console.is_jupyter):
        yield lines(title, lambda text: console.print(text, highlight=False, soft_wrap=True))
        return
    with Progress(*columns, console=console, disable=progress is False, transient=True) as bar:
        task = bar.add_task(title, total=None, what="")
        yield lambda what, done, total: bar.update(task, completed=done, total=total, what=what)


def lines(title: str, write: Callable[[str], Any], clock: Callable[[], float] = time.monotonic) -> Hook:
    """A hook that writes a line with the time left, at most one every 20 seconds.

    Args:
        title: starts each line.
        write: takes a line.
        clock: seconds.

    Returns:
        The hook.

    Example:
        >>> from kvx.models.progress import lines
        >>> now = iter([0.0, 5.0, 30.0])
        >>> hook = lines("fitting", print, lambda: next(now))
        >>> hook("layer 1", 1, 12), hook("layer 6", 6, 12)
        fitting: 6 of 12, layer 6, 30 s gone, about 30 s left
        (None, None)
    """
    start = last = clock()

    def hook(what: str, done: int, total: int) -> None:
        nonlocal last
        now = clock()
        if now - last < EVERY:
            return
        last = now
        gone = now - start
        left = f", about {gone * (total - done) / done:.0f} s left" if done and total else ""
        write(f"{title}: {done:,} of {total:,}, {what}, {gone:.0f} s gone{left}")

    return hook
