"""What a training run did: figures to print and keep, and its log while it runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvx.errors import KvxError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

METRICS = "metrics.jsonl"
COLUMNS = ("step", "train", "loss", "mismatched", "content", "retained", "f1", "score")


@dataclasses.dataclass(frozen=True)
class TrainReport:
    """How a translator was trained.

    Attributes:
        method: settings, as text.
        steps: done; best_step: the one whose parameters were kept.
        stopped: ``"steps"``, ``"patience"`` or ``"minutes"``: what ended the run.
        examples: read, repeats counted; tokens: scored, repeats counted.
        trained: parameters changed; map_bytes: what a translation reads.
        seconds: wall time, earlier parts of a resumed run included.
        select: held-out figures whose mean chose the parameters.
        history: held-out figures of every evaluation, the closed form first (step 0).
        data: digests of the training data and of the start.
        extra: what the method tells of itself, such as how much each of its experts is used.
    """

    method: str
    steps: int
    best_step: int
    stopped: str
    examples: int
    tokens: int
    trained: int
    map_bytes: int
    seconds: float
    select: tuple[str, ...]
    history: tuple[Mapping[str, float], ...]
    data: Mapping[str, str]
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def first(self) -> Mapping[str, float]:
        """Held-out figures of the closed form; empty without held-out data."""
        return self.history[0] if self.history else {}

    @property
    def best(self) -> Mapping[str, float]:
        """Held-out figures of what was kept; empty without held-out data."""
        return next((row for row in self.history if row["step"] == self.best_step), {})

    @property
    def summary(self) -> str:
        """The run in one sentence."""
        told = ""
        if self.history:
            shown = [name for name in ("loss", "content", "retained", "f1") if name in self.best]
            told = "; held out " + ", ".join(f"{n} {self.first[n]:.3f} -> {self.best[n]:.3f}" for n in shown)
        used = [share for rows in self.extra.get("experts", {}).values() for row in rows for share in row]
        if used:
            told += f"; experts translate {min(used):.0%} to {max(used):.0%} of the tokens each"
        return (
            f"{self.method}: {self.steps:,} steps, {self.examples:,} examples, {self.tokens:,} scored tokens, "
            f"{self.trained / 1e6:,.1f} M parameters trained, {self.map_bytes / 1e6:,.0f} MB, {self.seconds:,.0f} s, "
            f"ended by {self.stopped}, best at step {self.best_step}{told}"
        )

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain JSON types."""
        return {**dataclasses.asdict(self), "first": dict(self.first), "best": dict(self.best)}

    def table(self) -> Table:
        """One row an evaluation."""
        from rich.table import Table

        table = Table(title=self.summary, title_justify="left", title_style="")
        names = [name for name in COLUMNS if any(name in row for row in self.history)]
        for name in names:
            table.add_column(name, justify="right")
        for row in self.history:
            mark = " *" if row["step"] == self.best_step else ""
            cells = [f"{row[n]:.4f}" if n in row else "-" for n in names[1:]]
            table.add_row(f"{int(row['step'])}{mark}", *cells)
        return table

    def __str__(self) -> str:
        return self.summary

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.table()


class Log:
    """Figures of every step as JSON lines in a folder, and to TensorBoard where that is wanted and installed."""

    def __init__(self, folder: Path | None, step: int, tensorboard: bool = False) -> None:
        self.file = None if folder is None else folder / METRICS
        self.board: Any = None
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            _cut(self.file, step)
        if tensorboard:
            self.board = _writer(folder)

    def write(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        """One line: ``{"step": ..., "kind": "train" | "held_out", ...}``."""
        if self.file is not None:
            plain = {name: value if abs(value) < float("inf") else None for name, value in figures.items()}
            with self.file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"step": step, "kind": kind, **plain}) + "\n")
        if self.board is not None:
            for name, value in figures.items():
                self.board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Flush TensorBoard's events."""
        if self.board is not None:
            self.board.close()


def _cut(file: Path, step: int) -> None:
    """Leave out what was logged after the step that a run goes on from."""
    if not file.is_file():
        return
    lines = file.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if step and json.loads(line)["step"] <= step]
    file.write_text("".join(line + "\n" for line in kept), encoding="utf-8")


def _writer(folder: Path | None) -> Any:
    """A TensorBoard writer.

    Raises:
        KvxError: no folder to write to, or tensorboardX is not installed.
    """
    if folder is None:
        raise KvxError("tensorboard=True needs folder=, where its events are written.")
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise KvxError("tensorboard=True needs tensorboardX: pip install tensorboardX, or leave it out.") from None
    return SummaryWriter(str(folder / "tensorboard"))
