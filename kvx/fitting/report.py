"""What a fit did: one line a target layer, to print, and plain JSON to keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvx.mappers.base import COMPONENTS, EntryReport

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table


@dataclasses.dataclass(frozen=True)
class FitReport:
    """How a map was fitted.

    Explained variance (R^2) is a diagnostic, never a verdict: it ranks maps in another order than their answers do.

    Attributes:
        method: settings, as text.
        rows: tokens fitted in the end, the held-out ones included; held_out_rows: tokens that chose settings.
        sequences: sequences read; held_out_sequences: of which held out.
        features: widest input of an entry.
        entries: one for each block of outputs; empty for methods without any.
        seconds: wall time of ``pairs`` (both models), ``moments`` and ``solve``, and of ``weighted``, the whole second
            pass of a weighted fit; compilation included.
        map_bytes: size of the parameters; moment_bytes: of the sums.
        pairs: digest of what was fitted on; facts: settings behind it.
    """

    method: str
    rows: int
    held_out_rows: int
    sequences: int
    held_out_sequences: int
    features: int
    entries: tuple[EntryReport, ...]
    seconds: Mapping[str, float]
    map_bytes: int
    moment_bytes: int
    pairs: str
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def r2_held_out(self) -> float:
        """Mean held-out explained variance over layers, heads, keys and values; NaN without held-out rows."""
        found = [np.mean(entry.r2_held_out) for entry in self.entries if entry.r2_held_out]
        return float(np.mean(found)) if found else float("nan")

    @property
    def condition(self) -> float:
        """Largest condition estimate of a solve."""
        return max((entry.condition for entry in self.entries), default=float("nan"))

    @property
    def escalations(self) -> int:
        """Solves whose ridge had to be raised."""
        return sum(entry.escalations > 0 for entry in self.entries)

    @property
    def widened(self) -> int:
        """Target heads (or blocks of them) that read more than one head of a source layer, of a map that tells."""
        return sum(len(entry.source_heads) > len(entry.source_layers) for entry in self.entries)

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain JSON types."""
        plain = dataclasses.asdict(self)
        plain["entries"] = [dataclasses.asdict(entry) for entry in self.entries]
        return {**plain, "r2_held_out": self.r2_held_out, "condition": self.condition}

    def table(self) -> Table:
        """One row a target layer."""
        from rich.table import Table

        table = Table(title=self.summary, title_justify="left", title_style="")
        table.add_column("target layer", justify="right")
        table.add_column("source layers")
        for component in COMPONENTS:
            table.add_column(f"ridge {component}", justify="right")
            table.add_column(f"R2 {component} held out", justify="right")
        table.add_column("condition", justify="right")
        if any(entry.alpha is not None for entry in self.entries):
            table.add_column("alpha", justify="right")
            table.add_column("effective rows", justify="right")
        for layer in sorted({entry.target for entry in self.entries}):
            table.add_row(*self._row([entry for entry in self.entries if entry.target == layer]))
        return table

    def _row(self, entries: list[EntryReport]) -> list[str]:
        layers = sorted({i for entry in entries for i in entry.source_layers})
        row = [str(entries[0].target), _ranges(layers)]
        for component in COMPONENTS:
            ours = [entry for entry in entries if entry.component == component]
            held = [r2 for entry in ours for r2 in entry.r2_held_out]
            ridges = sorted({entry.ridge for entry in ours})
            row += [", ".join(f"{ridge:.0e}" for ridge in ridges), f"{np.mean(held):.3f}" if held else "-"]
        row.append(f"{max(entry.condition for entry in entries):.0e}")
        alphas = [entry.alpha for entry in entries if entry.alpha is not None]
        rows = [entry.effective_rows for entry in entries if entry.effective_rows is not None]
        if alphas and rows:
            row += [f"{min(alphas):.2f}-{max(alphas):.2f}", f"{min(rows):,.0f}"]
        return row

    @property
    def summary(self) -> str:
        """The fit in one sentence."""
        seconds = ", ".join(f"{name} {value:.0f} s" for name, value in self.seconds.items())
        wide = f", {self.widened} of {len(self.entries)} target heads read several heads of a source layer"
        return (
            f"{self.method}: {self.rows:,} tokens of {self.sequences} sequences, {self.features:,} features, "
            f"held-out R2 {self.r2_held_out:.3f}{wide if self.widened else ''}, "
            f"{self.map_bytes / 1e6:,.0f} MB ({seconds})"
        )

    def __str__(self) -> str:
        return self.summary

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.table()


def _ranges(layers: list[int]) -> str:
    """Runs of consecutive numbers, shortened.

    Example:
        >>> from kvx.fitting.report import _ranges
        >>> _ranges([0, 1, 2, 5, 7, 8])
        '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
