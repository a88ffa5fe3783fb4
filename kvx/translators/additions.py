"""What methods share that add to the target's own cache: reading it layer by layer, controls, and their statistics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvx.alignment import Alignment
from kvx.cache.cache import KVCache
from kvx.cache.geometry import CacheGeometry
from kvx.errors import KvxError
from kvx.mappers.base import CacheMap, context_cache, groups_of
from kvx.mappers.controls import scrambling
from kvx.mappers.linear import HIGHEST
from kvx.translators.base import Sample
from kvx.typing import pytree

Added = list[tuple[Array, Array]]  # what is added to keys and values of each group of layers, float32 [L,B,K,T,D]


@pytree
class Control:
    """What the controls need of the additions to keys or values of L layers.

    Attributes:
        offset: ``[L,K,D]`` added in every case: zero but in controls.
        average, covariance: ``[L,K,D]`` and ``[L,K,D,D]`` of the additions, by :func:`calibrated`.
    """

    offset: Array
    average: Array
    covariance: Array

    @classmethod
    def blank(cls, layers: int, heads: int, width: int) -> Control:
        """Of a method that was not calibrated."""
        zero = jnp.zeros((layers, heads, width), jnp.float32)
        return cls(zero, zero, jnp.zeros((layers, heads, width, width), jnp.float32))

    def silence(self, weight: Array, bias: Array) -> tuple[Array, Array, Control]:
        """Last layer ``[L,P,K,D]`` and its bias of the constant control: every token gets the average addition."""
        made = dataclasses.replace(self, offset=self.average, covariance=jnp.zeros_like(self.covariance))
        return jnp.zeros_like(weight), jnp.zeros_like(bias), made

    def scramble(self, weight: Array, bias: Array, key: Array) -> tuple[Array, Array, Control]:
        """The same of the random control: additions times a random matrix that keeps each channel's variance."""
        draw = scrambling(self.covariance, key)
        turn = lambda x: jnp.einsum("lkd,lkdf->lkf", x, draw, precision=HIGHEST)  # noqa: E731
        mixed = jnp.einsum("lkde,lkdf,lkfg->lkeg", draw, self.covariance, draw, precision=HIGHEST)
        offset = self.average - turn(self.average)
        turned = jnp.einsum("lpkd,lkdf->lpkf", weight.astype(jnp.float32), draw, precision=HIGHEST)
        return turned.astype(weight.dtype), turn(bias), dataclasses.replace(self, offset=offset, covariance=mixed)


def check_start(name: str, start: CacheMap) -> tuple[CacheGeometry, CacheGeometry]:
    """Geometries of the source and the target of the map that training begins with.

    Raises:
        KvxError: a map that does not say which caches it reads and writes.
    """
    if not start.source.layers or not start.target.layers:
        raise KvxError(f"{name} needs the shapes of both caches; start from pairs, or from a fitted map of the pair.")
    return start.source, start.target


def last_with_last(sources: int, targets: int) -> list[int]:
    """For each target layer its source layer: the last ones together, and so on backwards, the first one repeated.

    Example:
        >>> from kvx.translators.additions import last_with_last
        >>> last_with_last(5, 3), last_with_last(2, 4)
        ([2, 3, 4], [0, 0, 0, 1])
    """
    return [min(max(layer + sources - targets, 0), sources - 1) for layer in range(targets)]


def own_sides(receiver: KVCache, layers: Sequence[int]) -> tuple[Array, Array]:
    """The receiver's keys and values of some layers, ``[L,B,K,T,D]``."""
    return jnp.stack([receiver.keys(i) for i in layers]), jnp.stack([receiver.values(i) for i in layers])


def fused_cache(receiver: KVCache, added: Added, alignment: Alignment, target: CacheGeometry) -> KVCache:
    """The receiver's rows plus what is added to them, at the positions of the alignment."""
    sides: tuple[list[Array], list[Array]] = ([], [])
    for layers, both in zip(groups_of(target), added, strict=True):
        for side, own, more in zip(sides, own_sides(receiver, layers), both, strict=True):
            side.append((own.astype(jnp.float32) + more).astype(own.dtype))
    return dataclasses.replace(context_cache(*sides, alignment, target), rotated=receiver.rotated)


def calibrated(sample: Sample, add: Callable[..., Added]) -> list[tuple[tuple[Array, Array], ...]] | None:
    """Average ``[L,K,D]`` and covariance ``[L,K,D,D]`` of the additions to keys and to values of each group.

    Args:
        sample: source caches, alignments and receivers' rows.
        add: makes the additions of one of them.

    Returns:
        For each group, for keys and values; ``None`` for an empty sample.
    """
    if not sample:
        return None
    count = jnp.maximum(sum((a.pos >= 0).sum() for _, a, _ in sample), 1).astype(jnp.float32)
    totals: Any = None
    for one in sample:
        found = _sums(add(*one), one[1], None)
        totals = found if totals is None else jax.tree.map(jnp.add, totals, found)
    means = jax.tree.map(lambda x: x / count, totals)
    seconds: Any = None
    for one in sample:
        found = _sums(add(*one), one[1], means)
        seconds = found if seconds is None else jax.tree.map(jnp.add, seconds, found)
    return [
        tuple((mean, square / count) for mean, square in zip(*group, strict=True))
        for group in zip(means, seconds, strict=True)
    ]


@jax.jit
def _sums(added: Added, alignment: Alignment, means: Any) -> Any:
    """Sums over tokens of the additions, or of the squares of their deviations from ``means``."""
    real = (alignment.pos >= 0)[None, :, None, :, None]
    if means is None:
        return [tuple(jnp.where(real, x, 0.0).sum(axis=(1, 3)) for x in both) for both in added]
    found = []
    for both, mean in zip(added, means, strict=True):
        rows = [jnp.where(real, x - m[:, None, :, None], 0.0) for x, m in zip(both, mean, strict=True)]
        found.append(tuple(jnp.einsum("lbktd,lbkte->lkde", x, x, precision=HIGHEST) for x in rows))
    return found


def uniform(key: Array, shape: tuple[int, ...], fan_in: int) -> Array:
    """Draws between ``-1/sqrt(fan_in)`` and its opposite, float32: the usual start of a linear layer."""
    bound = fan_in**-0.5
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound)


def matrices(params: Any) -> int:
    """Elements of all arrays whose name ends in ``weight``: products of one token."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return sum(x.size for path, x in leaves if jax.tree_util.keystr(path[-1:]).endswith("weight"))
