"""The result of an injection sweep: figures of every start with their intervals, as JSON and as a table."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvx.evaluation.flops import MapCost
from kvx.evaluation.metrics import Bootstrap, Estimate

if TYPE_CHECKING:
    from rich.table import Table

BASELINES = {"native": "native", "translated": "no replay", "none": "no context"}  # "translated": in all layers
FIGURES = ("propagated_shift", "last_state_shift", "loss", "over_native")
Figures = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Injection:
    """One window of target layers that read translated keys and values in the replay.

    Attributes:
        start, stop: first layer and the one after the last; equal: no layer.
        flops: floating-point operations of the replay of one context of the mean length.
        items: ``propagated_shift`` and ``last_state_shift`` (relative), ``loss`` (nats per token), float ``[n]`` each.
    """

    start: int
    stop: int
    flops: int
    items: Figures

    def __str__(self) -> str:
        """The window in words, such as ``layers 3-17``."""
        if self.stop - self.start < 2:
            return f"layer {self.start}" if self.stop > self.start else "no layer"
        return f"layers {self.start}-{self.stop - 1}"


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Figures of every injection start, with intervals, on the same items.

    Attributes:
        pair: ``"source -> target"``, for people.
        layers: of the target.
        injections: one for each start, ascending.
        baselines: ``native``, ``translated`` (no replay) and ``none`` -> figures, float ``[n]`` each.
        tokens: int ``[n]``: scored tokens of each item.
        contexts: how many different contexts.
        cost: of the translation and of a native prefill, at the mean length of a context.
        hashes: SHA-256 digests of weights, mapper, items and settings.
        settings: what the sweep was asked to do.
        seconds: wall time.
        bootstrap: how intervals are drawn.
    """

    pair: str
    layers: int
    injections: tuple[Injection, ...]
    baselines: Mapping[str, Figures]
    tokens: np.ndarray
    contexts: int
    cost: MapCost
    hashes: Mapping[str, str]
    settings: Mapping[str, Any]
    seconds: float
    bootstrap: Bootstrap = Bootstrap()

    @functools.cached_property
    def estimates(self) -> dict[str | int, dict[str, Estimate]]:
        """Baseline or start -> figure -> mean over items with its interval.

        ``over_native`` and ``over_translated`` are paired differences of the loss: above zero is worse than the
        native cache, or than the translated cache without a replay.
        """
        native, plain = (self.baselines[arm]["loss"] for arm in ("native", "translated"))
        rows: dict[str | int, Figures] = dict(self.baselines.items())
        rows |= {one.start: one.items for one in self.injections}
        columns = {(row, name): values for row, items in rows.items() for name, values in items.items()}
        for row, items in rows.items():
            columns[row, "over_native"] = items["loss"] - native
            columns[row, "over_translated"] = items["loss"] - plain
        found: dict[str | int, dict[str, Estimate]] = {row: {} for row in rows}
        for (row, name), estimate in self.bootstrap.columns(columns).items():
            found[row][name] = estimate
        return found

    @property
    def best(self) -> int:
        """The start of lowest mean loss among those that inject; the number of layers where none does."""
        starts = [one.start for one in self.injections if one.stop > one.start]
        return min(starts, key=lambda start: self.estimates[start]["loss"].value or 0.0, default=self.layers)

    def to_json(self, *, per_item: bool = False) -> dict[str, Any]:
        """Plain numbers, strings and lists, ready for ``json.dumps``.

        Args:
            per_item: also every item's figures.

        Returns:
            ``injections``: for each start ``start``, ``stop``, ``flops`` and the figures ``propagated_shift``,
            ``last_state_shift``, ``loss``, ``over_native``, ``over_translated``, each with ``_low`` and ``_high``;
            ``baselines``: the same by name; ``best``, ``items``, ``contexts``, ``tokens_scored``, ``cost``,
            ``hashes``, ``settings``, ``bootstrap``, ``seconds``.
        """
        rows: list[dict[str, Any]] = [
            {"start": one.start, "stop": one.stop, "flops": one.flops, **_flat(self.estimates[one.start])}
            for one in self.injections
        ]
        out: dict[str, Any] = {
            "sweep": "injection",
            "pair": self.pair,
            "layers": self.layers,
            "injections": rows,
            "baselines": {arm: _flat(self.estimates[arm]) for arm in self.baselines},
            "best": self.best,
            "items": len(self.tokens),
            "contexts": self.contexts,
            "tokens_scored": int(self.tokens.sum()),
            "cost": self.cost.to_json(),
            "hashes": dict(self.hashes),
            "settings": dict(self.settings),
            "bootstrap": dataclasses.asdict(self.bootstrap),
            "seconds": self.seconds,
        }
        if per_item:
            for row, one in zip(rows, self.injections, strict=True):
                row["per_item"] = _lists(one.items)
            out["per_item"] = {arm: _lists(items) for arm, items in self.baselines.items()}
            out["per_item"]["tokens"] = self.tokens.tolist()
        return out

    def table(self) -> Table:
        """One row for each baseline and each start, for a rich console."""
        from rich import box
        from rich.table import Table

        title = f"{self.pair}: {len(self.tokens)} passages, {int(self.tokens.sum())} scored tokens"
        cost = self.cost
        caption = (
            f"95 % paired bootstrap over items; GFLOP: of the replay, at {cost.tokens} tokens, where the translation "
            f"costs {cost.translate / 1e9:,.3f}, a native prefill {cost.native / 1e9:,.3f}; lowest loss of a replay: "
            f"from layer {self.best}"
        )
        shape: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False}
        shape |= {"title_justify": "left", "title_style": "bold", "caption_justify": "left"}
        table = Table(title=title, caption=caption, **shape)
        table.add_column("injected", no_wrap=True)
        for column in ("propagated shift", "last-state shift", "loss (nats/token)", "loss - native", "GFLOP"):
            table.add_column(column, justify="right", no_wrap=True)
        for arm, label in BASELINES.items():
            table.add_row(label, *self._cells(arm), "-")
        for one in self.injections:
            style = "bold" if one.start == self.best else None
            table.add_row(str(one), *self._cells(one.start), f"{one.flops / 1e9:,.3f}", style=style)
        return table

    def _cells(self, row: str | int) -> list[str]:
        """The figures of one row; a dash where there is none."""
        found = self.estimates[row]
        return [str(found[name]) if name in found else "-" for name in FIGURES]

    def __repr__(self) -> str:
        lines = [f"{one}: loss {self.estimates[one.start]['loss']}" for one in self.injections]
        return "\n".join([f"{self.pair}: native loss {self.estimates['native']['loss']}", *lines])


def _flat(found: Mapping[str, Estimate]) -> dict[str, float | None]:
    """Each figure with its ends."""
    return {
        f"{name}{end}": value
        for name, one in found.items()
        for end, value in (("", one.value), ("_low", one.low), ("_high", one.high))
    }


def _lists(items: Figures) -> dict[str, list[float]]:
    return {name: values.tolist() for name, values in items.items()}
