"""Which sums a fit needs: widths of the source and target layers, and which of them ever meet in one map."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvx.cache.geometry import CacheGeometry, LayerGeometry
from kvx.errors import KvxError


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static layout of the moments of one pair of models.

    The features of a token are its source layers in order, each as its keys ``[K,D]`` then its values ``[K,Dv]``,
    flattened; its outputs are the target layers, likewise. Only sums that one map can use are kept.

    Attributes:
        sources: widths ``(keys, values)`` of each source layer; more or fewer blocks are allowed.
        targets: the same of each target layer.
        gram_from: for each source layer ``i``: the first layer ``j <= i`` whose products with ``i`` are kept; all
            layers from there to ``i`` are.
        cross: for each source layer: ``(first, stop)`` of the target layers whose products with it are kept.
        source, target: geometries of the caches, when the plan was made for a pair of them.
    """

    sources: tuple[tuple[int, ...], ...]
    targets: tuple[tuple[int, ...], ...]
    gram_from: tuple[int, ...]
    cross: tuple[tuple[int, int], ...]
    source: CacheGeometry | None = None
    target: CacheGeometry | None = None

    @classmethod
    def create(
        cls,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        reach: Sequence[Sequence[int]] | None = None,
    ) -> Plan:
        """Keep what the maps of ``reach`` can use.

        Args:
            sources: block widths of each source layer.
            targets: block widths of each target layer.
            reach: for each target layer, the source layers that may feed it; ``None``: all of them.

        Raises:
            KvxError: no layers, or a reach that names others.

        Example:
            >>> from kvx.fitting.plan import Plan
            >>> plan = Plan.create([(2, 2)] * 4, [(3, 3)] * 2, reach=[(0, 1), (2, 3)])
            >>> plan.gram_from, plan.cross
            ((0, 0, 2, 2), ((0, 1), (0, 1), (1, 2), (1, 2)))
        """
        count = len(sources)
        everything = tuple(range(count))
        reach = [tuple(layers) for layers in reach] if reach is not None else [everything] * len(targets)
        if not count or len(reach) != len(targets) or any(not set(layers) <= set(everything) for layers in reach):
            raise KvxError(
                f"moments need source layers for each of {len(targets)} target layers, out of {count} source layers; "
                f"got {reach}."
            )
        first = list(range(count))
        users: list[list[int]] = [[] for _ in everything]
        for target, layers in enumerate(reach):
            for layer in layers:
                first[layer] = min(first[layer], *layers)
                users[layer].append(target)
        cross = tuple((min(u), max(u) + 1) if u else (0, 0) for u in users)
        as_widths = [tuple(tuple(int(w) for w in layer) for layer in side) for side in (sources, targets)]
        return cls(as_widths[0], as_widths[1], tuple(first), cross)

    @classmethod
    def of(
        cls,
        source: CacheGeometry,
        target: CacheGeometry,
        reach: Sequence[Sequence[int]] | None = None,
        *,
        by_head: bool = False,
    ) -> Plan:
        """The plan of a pair of cache geometries.

        Args:
            source, target: geometries.
            reach: as in :meth:`create`.
            by_head: every source head is a block of its own, which maps that read single heads get at faster; else all
                heads of a layer's keys are one block, and of its values, which conditions maps that read them all.

        Example:
            >>> from kvx.cache.geometry import CacheGeometry, LayerGeometry
            >>> from kvx.fitting.plan import Plan
            >>> geometry = CacheGeometry((LayerGeometry(2, 4, 4),) * 3)
            >>> Plan.of(geometry, geometry).numbers
            4224
        """
        sources, targets = ([widths(layer) for layer in side.layers] for side in (source, target))
        heads = [(g.key_dim,) * g.kv_heads + (g.value_dim,) * g.kv_heads for g in source.layers]
        plan = cls.create(heads if by_head else sources, targets, reach)
        return dataclasses.replace(plan, source=source, target=target)

    @property
    def x_starts(self) -> tuple[int, ...]:
        """Where each source layer's features start; the last entry is the feature count ``P``."""
        return _starts(self.sources)

    @property
    def y_starts(self) -> tuple[int, ...]:
        """Where each target layer's outputs start; the last entry is the output count ``Q``."""
        return _starts(self.targets)

    @property
    def numbers(self) -> int:
        """Numbers in the three second-moment sums; each takes 8 bytes (an fp32 total and its correction)."""
        x, y = self.x_starts, self.y_starts
        gram = sum((x[i + 1] - x[i]) * (x[i + 1] - x[first]) for i, first in enumerate(self.gram_from))
        cross = sum((x[i + 1] - x[i]) * (y[b] - y[a]) for i, (a, b) in enumerate(self.cross))
        return gram + cross + sum(w * w for layer in self.targets for w in layer)


def widths(layer: LayerGeometry) -> tuple[int, int]:
    """Features of one token in one layer: ``(K D, K Dv)``."""
    return layer.kv_heads * layer.key_dim, layer.kv_heads * layer.value_dim


def _starts(layers: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    starts = [0]
    for layer in layers:
        starts.append(starts[-1] + sum(layer))
    return tuple(starts)
