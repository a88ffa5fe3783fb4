"""Weighted sums of all heads of a target layer in one call: blocks whitened once, gathered by each head."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvx.fitting.moments import HIGHEST
from kvx.mappers.base import Entry
from kvx.typing import pytree
from pallas_kernels.moments import moments

Part = tuple[int, int, int]


@pytree
class EntrySums:
    """Sums over rows with the weights r of one entry, in its frame; of several entries: stacked.

    Attributes:
        weight, weight2: ``sum r``, ``sum r^2``.
        x: ``sum r z`` ``[P]``; y: ``sum r u``, yy: ``sum r u^2`` ``[q]``.
        xx: ``sum r z z'`` ``[P,P]``; xy: ``sum r z u'`` ``[P,q]``.
    """

    weight: Array
    weight2: Array
    x: Array
    y: Array
    yy: Array
    xx: Array
    xy: Array


@pytree
class Pool:
    """Source blocks of one width.

    Attributes:
        mean: float32 ``[U,w]``; white: float32 ``[U,w,w]`` upper triangular.
        starts: int32 ``[U]``, first column of each among all features.
    """

    mean: Array
    white: Array
    starts: Array


@pytree
class Heads:
    """Entries of one target layer and component.

    Attributes:
        gather: int32 ``[H,k]``, blocks of the pool that each reads.
        start: int32 ``[H]``, first column of each among all outputs; heads: int32 ``[H,n]``, columns of their
            sensitivities.
        mean, scale: float32 ``[H,q]``, of the outputs.
    """

    gather: Array
    start: Array
    heads: Array
    mean: Array
    scale: Array


def grouped(entries: Sequence[Entry]) -> dict[int, list[list[int]]]:
    """Entries that are summed together: by the width of their blocks, those of each target layer and component.

    Entries read blocks of one width each and as many as the others, and there are at least two; what is left out is
    summed entry by entry.
    """
    found: dict[tuple[int, ...], list[int]] = {}
    for i, entry in enumerate(entries):
        widths = {stop - first for _, first, stop in entry.parts}
        if len(widths) == 1:
            outputs = entry.columns.stop - entry.columns.start
            heads = entry.heads[1] - entry.heads[0]
            key = (*widths, entry.target, entry.component, len(entry.parts), outputs, heads)
            found.setdefault(key, []).append(i)
    groups: dict[int, list[list[int]]] = {}
    for (width, *_), members in found.items():
        if len(members) > 1:
            groups.setdefault(width, []).append(members)
    return groups


def pooled(parts: Sequence[Part], blocks: Mapping[Part, tuple[Array, Array, Array]]) -> Pool:
    """Blocks stacked; each comes with its mean, whitening and first column."""
    mean, white, starts = (jnp.stack(part) for part in zip(*(blocks[part] for part in parts), strict=True))
    return Pool(mean, white, starts)


@dataclasses.dataclass(eq=False)
class HeadSums:
    """Running sums of several groups over one pool.

    Attributes:
        pool: the blocks.
        groups: what their entries read and write; members: the entries' numbers.
        totals: of each group and side, the fp32 sums and what their rounding has lost; ``None`` where not asked for.
    """

    pool: Pool
    groups: list[Heads]
    members: list[list[int]]
    totals: list[list[tuple[EntrySums, EntrySums] | None]]

    @classmethod
    def zeros(cls, pool: Pool, groups: list[Heads], members: list[list[int]], sides: Sequence[int]) -> HeadSums:
        """Nothing summed yet, for the given sides."""
        totals = [[_zeros(pool, heads) if side in sides else None for side in (0, 1)] for heads in groups]
        return cls(pool, groups, members, totals)

    def take(self, side: int, x: Array, y: Array, weight: Array) -> None:
        """Add a block of rows to every group."""
        z = _whitened(self.pool, x, weight)
        for i, heads in enumerate(self.groups):
            found = self.totals[i][side]
            if found is not None:
                self.totals[i][side] = _add(*found, z, y, weight, heads)

    def of(self, entry: int) -> list[tuple[EntrySums, EntrySums] | None]:
        """One entry's sums, for each side."""
        group = next(i for i, members in enumerate(self.members) if entry in members)
        at = self.members[group].index(entry)
        own: Callable[[Array], Array] = lambda a: a[at]  # noqa: E731
        return [None if sums is None else jax.tree.map(own, sums) for sums in self.totals[group]]


def _zeros(pool: Pool, heads: Heads) -> tuple[EntrySums, EntrySums]:
    (count, k), width, outputs = heads.gather.shape, pool.mean.shape[1], heads.mean.shape[1]
    wide = k * width

    def make() -> EntrySums:
        shapes = ((), (), (wide,), (outputs,), (outputs,), (wide, wide), (wide, outputs))
        return EntrySums(*(jnp.zeros((count, *shape), jnp.float32) for shape in shapes))

    return make(), make()


@jax.jit
def _whitened(pool: Pool, x: Array, weight: Array) -> Array:
    """Rows of every block in pivot coordinates ``[U,N,w]``; zero where the weight is (``where`` before the product)."""
    keep, width = (weight > 0)[:, None], pool.mean.shape[1]

    def block(own: Pool) -> Array:
        rows = jax.lax.dynamic_slice_in_dim(x, own.starts, width, axis=1)
        return jnp.dot(jnp.where(keep, rows - own.mean[None], 0.0), own.white, precision=HIGHEST)

    return jax.lax.map(block, pool)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _add(
    total: EntrySums, error: EntrySums, z: Array, y: Array, weight: Array, heads: Heads
) -> tuple[EntrySums, EntrySums]:
    """One block's sums of all heads, added with Knuth's two-sum."""
    r = jnp.where((weight > 0)[None], y[:, heads.heads].mean(axis=2).T * weight[None], 0.0)
    own = jax.vmap(lambda at: jax.lax.dynamic_slice_in_dim(y, at, heads.mean.shape[1], axis=1))(heads.start)
    found = moments(z, own, heads.gather, r, jnp.zeros(z.shape[::2], jnp.float32), heads.mean)
    block = EntrySums(
        found.weight,
        found.weight2,
        found.x,
        found.y * heads.scale,
        found.yy * heads.scale**2,
        found.xx,
        found.xy * heads.scale[:, None],
    )
    return two_sum(total, error, block)


def two_sum(total: EntrySums, error: EntrySums, block: EntrySums) -> tuple[EntrySums, EntrySums]:
    """``total + block``, and the running sum of what its rounding loses (Knuth, TAOCP 2, 4.2.2)."""
    new = jax.tree.map(jnp.add, total, block)
    return new, jax.tree.map(jnp.add, error, jax.tree.map(_lost, total, new, block))


def _lost(total: Array, new: Array, block: Array) -> Array:
    virtual = new - total
    return (total - (new - virtual)) + (block - virtual)


def heads_of(entries: Sequence[Entry], at: Mapping[Part, int], outputs: Sequence[tuple[Array, ...]]) -> Heads:
    """A group's table; ``outputs`` holds each entry's start, heads, mean and scale."""
    gather = np.array([[at[part] for part in entry.parts] for entry in entries], np.int32)
    start, heads, mean, scale = (jnp.stack(part) for part in zip(*outputs, strict=True))
    return Heads(jnp.asarray(gather), start, heads, mean, scale)
