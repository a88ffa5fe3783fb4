"""Which source heads feed which target heads: scored on held-out moments, widened where one head does not do."""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING

import numpy as np

from kvx.cache.geometry import CacheGeometry
from kvx.mappers.base import COMPONENTS, Entry
from kvx.mappers.linear import block_widths
from kvx.mappers.support import RANKING_RIDGE, head_entry

if TYPE_CHECKING:
    from kvx.fitting.moments import Moments

GAIN = 0.1  # held-out explained variance that doubling the heads must add
Side = tuple[int, int]


class Table:
    """A support table in the making: which source blocks each target head may read, and how well each does alone.

    A side is ``(target layer, component)``: the keys (0) or the values (1) of a target layer.

    Args:
        source, target: geometries.
        near: for each target layer, the source layers that may feed it.
        count: source layers that each target head reads in the end.
        inputs: as in :class:`kvx.mappers.linear.LinearParams`.
        heads: ``"learned"``: any source head may be read; ``"index"``: the one of the same (proportional) index.

    Attributes:
        scores: for each side, for each source layer ``[target heads, source heads]``: explained variance of a block
            alone; zero before :meth:`score`, minus infinity for heads that may not be read.
        widths: heads that each side reads in a source layer.

    Example:
        >>> from kvx.fitting.synthetic import SOURCE, TARGET
        >>> from kvx.mappers.matching import Table
        >>> table = Table(SOURCE, TARGET, ((0, 1), (1, 2)), count=2, inputs="both", heads="index")
        >>> [entry.blocks for entry in table.all_entries()][::2], table.decided
        ([((0, 0), (1, 0)), ((1, 0), (2, 0))], True)
    """

    def __init__(
        self,
        source: CacheGeometry,
        target: CacheGeometry,
        near: tuple[tuple[int, ...], ...],
        *,
        count: int,
        inputs: str,
        heads: str,
    ) -> None:
        self.source, self.target, self.count, self.inputs, self.heads = source, target, count, inputs, heads
        self.scores = {
            (layer, component): {i: np.where(self._allowed(layer, i), 0.0, -np.inf) for i in layers}
            for layer, layers in enumerate(near)
            for component in (0, 1)
        }
        self.widths = dict.fromkeys(self.scores, 1)

    @property
    def decided(self) -> bool:
        """Whether nothing is left to choose by score."""
        tables = [found for by_layer in self.scores.values() for found in by_layer.values()]
        free = any((np.isfinite(found).sum(axis=1) > 1).any() for found in tables)
        return not free and all(len(by_layer) <= self.count for by_layer in self.scores.values())

    def score(self, moments: Moments, held_out: Moments) -> None:
        """Held-out explained variance of every block that may be read, by a ridge fit on that block alone."""
        singles = [
            self._entry(side, run, [(i, head)])
            for i in range(self.source.num_layers)
            for head in range(self.source.layers[i].kv_heads)
            for side, by_layer in self.scores.items()
            if i in by_layer
            for run in _runs(np.isfinite(by_layer[i][:, head]))
        ]
        for entry, found in zip(singles, moments.scores(held_out, singles, RANKING_RIDGE), strict=True):
            (i, head), (first, stop) = entry.blocks[0], entry.heads
            self.scores[entry.target, entry.component][i][first:stop, head] = found

    def _allowed(self, layer: int, source_layer: int) -> np.ndarray:
        """Which source heads each target head may read, bool ``[target heads, source heads]``."""
        ours, theirs = self.target.layers[layer].kv_heads, self.source.layers[source_layer].kv_heads
        if self.heads == "learned":
            return np.ones((ours, theirs), bool)
        index = np.arange(ours) * theirs // ours
        return np.asarray(index[:, None] == np.arange(theirs)[None])

    def widen(self, moments: Moments, held_out: Moments, budget: int | None) -> None:
        """Double the heads of sides that gain by it, largest gain first, within a budget; announce it in a warning."""
        most = max(layer.kv_heads for layer in self.source.layers)
        left = np.inf if budget is None else budget - sum(self._bytes(side, 1) for side in self.scores)
        r2: dict[Side, np.ndarray] = {}
        first: dict[Side, np.ndarray] = {}
        candidates = list(self.scores)
        while candidates := [side for side in candidates if self.widths[side] < most and self._price(side) <= left]:
            r2 |= self._explained(moments, held_out, [side for side in candidates if side not in r2], 1)
            wider = self._explained(moments, held_out, candidates, 2)
            gains = {side: float((wider[side] - r2[side]).max()) for side in candidates}
            candidates = []
            for side in sorted(gains, key=lambda side: -gains[side]):
                if gains[side] > GAIN and self._price(side) <= left:
                    left -= self._price(side)
                    first.setdefault(side, r2[side])
                    self.widths[side], r2[side] = 2 * self.widths[side], wider[side]
                    candidates.append(side)
        if first:
            _announce({side: (self.widths[side], first[side], r2[side]) for side in sorted(first)}, len(self.scores))

    def _explained(self, moments: Moments, held_out: Moments, sides: list[Side], times: int) -> dict[Side, np.ndarray]:
        """Held-out explained variance per target head with a multiple of the present heads; zero where it is less."""
        tables = {side: self.entries(side, times * self.widths[side]) for side in sides}
        flat = [entry for entries in tables.values() for entry in entries]
        found = iter(moments.scores(held_out, flat, RANKING_RIDGE))
        return {side: np.concatenate([next(found) for _ in entries]).clip(0.0) for side, entries in tables.items()}

    def all_entries(self) -> list[Entry]:
        """The table as it stands: for each target layer keys then values, head by head."""
        return [entry for side, width in self.widths.items() for entry in self.entries(side, width)]

    def entries(self, side: Side, width: int) -> list[Entry]:
        """Entries of one side, one a target head, with a number of heads a source layer."""
        heads = range(self.target.layers[side[0]].kv_heads)
        return [self._entry(side, (h, h + 1), self._reads(side, h, width)) for h in heads]

    def _reads(self, side: Side, head: int, width: int) -> list[tuple[int, int]]:
        """Blocks of one target head: in each of its best source layers its best heads, in ascending order."""
        scores = {i: found[head] for i, found in self.scores[side].items()}
        layers = sorted(sorted(scores, key=lambda i: -scores[i].max())[: self.count])
        best = {i: np.argsort(-scores[i], kind="stable")[:width] for i in layers}
        return [(i, int(one)) for i in layers for one in sorted(best[i])]

    def _entry(self, side: Side, heads: tuple[int, int], blocks: list[tuple[int, int]]) -> Entry:
        return head_entry(self.source, self.target, *side, heads, blocks, self.inputs)

    def _price(self, side: Side) -> int:
        """Bytes that doubling the heads of a side adds."""
        return self._bytes(side, 2 * self.widths[side]) - self._bytes(side, self.widths[side])

    def _bytes(self, side: Side, width: int) -> int:
        blocks = max(len(entry.blocks) for entry in self.entries(side, width))
        return _side_bytes(self.source, self.target, self.inputs, *side, blocks)


def _side_bytes(
    source: CacheGeometry, target: CacheGeometry, inputs: str, layer: int, component: int, blocks: int
) -> int:
    """Bytes of one target layer's keys or values: coefficients, centres, means and indices, in four bytes each."""
    shape, width = target.layers[layer], max(block_widths(source, inputs, component, by_head=True))
    channels = (shape.key_dim, shape.value_dim)[component]
    return 4 * shape.kv_heads * (blocks * width * (channels + 1) + channels + blocks)


def map_bytes(source: CacheGeometry, target: CacheGeometry, inputs: str, count: int) -> int:
    """Bytes of a map that reads one head of each of ``count`` source layers."""
    sides = itertools.product(range(target.num_layers), (0, 1))
    return sum(_side_bytes(source, target, inputs, layer, component, count) for layer, component in sides)


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """First and stop of every run of true entries.

    Example:
        >>> import numpy as np
        >>> from kvx.mappers.matching import _runs
        >>> _runs(np.array([True, True, False, True]))
        [(0, 2), (3, 4)]
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def _announce(widened: dict[Side, tuple[int, np.ndarray, np.ndarray]], sides: int) -> None:
    """Warn which sides read several heads a source layer now, and what that gained."""
    named = [
        f"target layer {layer} {COMPONENTS[component]} ({width} heads, R2 {before.mean():.2f} -> {after.mean():.2f})"
        for (layer, component), (width, before, after) in itertools.islice(widened.items(), 8)
    ]
    more = f" and {len(widened) - len(named)} more" if len(widened) > len(named) else ""
    warnings.warn(
        f"head_matched: one head a source layer does not carry {len(widened)} of {sides} sides on held-out rows; "
        f"widened: {', '.join(named)}{more}. Set a budget in bytes to limit the size of the map.",
        UserWarning,
        stacklevel=6,  # whoever called kvx.fit
    )
