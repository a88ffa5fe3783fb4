"""Parameters of maps with a shared state: what is read becomes R numbers a token, from which every layer is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvx.alignment import Alignment, resample
from kvx.cache.cache import KVCache
from kvx.cache.geometry import CacheGeometry
from kvx.mappers.base import EntryReport, context_cache, groups_of
from kvx.mappers.controls import scrambling
from kvx.mappers.embeddings import features_of
from kvx.typing import host, pytree, static

HIGHEST = jax.lax.Precision.HIGHEST


@pytree
class Reads:
    """What a shared state is made of.

    Attributes:
        center: ``[P]`` mean of the features.
        weight: ``[P,R]``: the state is ``(x - center) weight``.
        layers: source layers, keys before values in each.
        embeddings: tokens whose target embeddings are read too; dim: channels of one.
    """

    center: Array
    weight: Array
    layers: tuple[int, ...] = static()
    embeddings: int = static(default=0)
    dim: int = static(default=0)


@pytree
class Writes:
    """Keys or values of the target layers of one group.

    Attributes:
        up: ``[L,R,K,D]``; mean: ``[L,K,D]``: an output is ``mean + state up``.
        covariance: ``[L,K,D,D]`` of the outputs on the rows of the fit, for controls.
        component: 0 keys, 1 values; layers: the L target layers, ascending.
    """

    up: Array
    mean: Array
    covariance: Array
    component: int = static()
    layers: tuple[int, ...] = static()


@pytree
class LowRankParams:
    """Parameters of :func:`kvx.mappers.low_rank`.

    Attributes:
        reads: features and how the state is made of them.
        writes: for each group of target layers (:func:`kvx.mappers.base.groups_of`) keys, then values.
        target: geometry of the caches it makes; dtype: of them.
        report: host only: how each output was fitted.
    """

    reads: Reads
    writes: tuple[Writes, ...]
    target: CacheGeometry = static()
    dtype: str = static(default="float32")
    report: tuple[EntryReport, ...] | None = host(default=None)

    @property
    def embeddings(self) -> int:
        """Tokens whose target embeddings are read."""
        return self.reads.embeddings

    @property
    def rank(self) -> int:
        """Numbers in the state of a token."""
        return int(self.reads.weight.shape[1])

    @property
    def stored(self) -> int:
        """Bytes that a translation reads: everything but the covariances."""
        arrays = [self.reads.center, self.reads.weight, *(x for w in self.writes for x in (w.up, w.mean))]
        return sum(a.size * a.dtype.itemsize for a in arrays)

    @property
    def parameters(self) -> int:
        """Fitted numbers that a translation reads."""
        return self.reads.center.size + self.reads.weight.size + sum(w.up.size + w.mean.size for w in self.writes)

    def flops(self, tokens: int) -> int:
        """Operations of translating so many tokens: a product and a sum a coefficient."""
        return 2 * tokens * (self.reads.weight.size + sum(w.up.size for w in self.writes))

    def silenced(self, key: Array) -> LowRankParams:
        """The constant control: every token gets the mean output."""
        writes = [
            dataclasses.replace(w, up=jnp.zeros_like(w.up), covariance=jnp.zeros_like(w.covariance))
            for w in self.writes
        ]
        return dataclasses.replace(self, writes=tuple(writes), report=None)

    def scrambled(self, key: Array) -> LowRankParams:
        """The random control: outputs times a random matrix that keeps each channel's variance."""
        keys = jax.random.split(key, len(self.writes))
        writes = tuple(_scramble(w, k) for w, k in zip(self.writes, keys, strict=True))
        return dataclasses.replace(self, writes=writes, report=None)


def _scramble(one: Writes, key: Array) -> Writes:
    draw = scrambling(one.covariance, key)
    up = jnp.einsum("lrkd,lkdf->lrkf", one.up.astype(jnp.float32), draw, precision=HIGHEST)
    covariance = jnp.einsum("lkde,lkdf,lkfg->lkeg", draw, one.covariance, draw, precision=HIGHEST)
    return dataclasses.replace(one, up=up.astype(one.up.dtype), covariance=covariance)


@jax.jit
def apply_low_rank(params: LowRankParams, cache: KVCache, alignment: Alignment) -> KVCache:
    """Map an un-rotated source cache onto the target's tokens.

    Args:
        params: the map.
        cache: source cache, all tokens kept.
        alignment: ``[B,T,R]``, with embeddings where the map reads them.

    Returns:
        The target's cache of the context: T slots, positions of the alignment, zeros where nothing is fed.
    """
    x = read_features(params.reads, cache, alignment) - params.reads.center.astype(jnp.float32)[None, None]
    state = _product("btp,pr->btr", x, params.reads.weight)
    dtype = jnp.dtype(params.dtype)
    made = []
    for one in params.writes:
        y = _product("btr,lrkd->lbktd", state, one.up) + one.mean.astype(jnp.float32)[:, None, :, None]
        made.append(y.astype(dtype))
    return written(params.writes, made, alignment, params.target)


def written(writes: Sequence[Any], made: Sequence[Array], alignment: Alignment, target: CacheGeometry) -> KVCache:
    """The context's cache of outputs ``[L,B,K,T,D]``, one for each of ``writes``, which name component and layers."""
    sides: tuple[list[Array], list[Array]] = ([], [])
    for layers in groups_of(target):
        for component in (0, 1):
            at = next(n for n, w in enumerate(writes) if (w.layers, w.component) == (layers, component))
            sides[component].append(made[at])
    return context_cache(sides[0], sides[1], alignment, target)


def read_features(reads: Reads, cache: KVCache, alignment: Alignment) -> Float[Array, "B T P"]:
    """Features of every target token, float32; those of tokens that nothing feeds are zero but for embeddings.

    Raises:
        KvxError: an alignment without the embeddings that are read.
    """
    sides = [side for layer in reads.layers for side in (cache.keys(layer), cache.values(layer))]
    parts = [_flat(resample(alignment, side.astype(jnp.float32))) for side in sides]
    if reads.embeddings:
        parts.append(features_of(alignment, reads.embeddings, reads.dim))
    return jnp.concatenate(parts, axis=-1)


def _flat(side: Array) -> Array:
    """``[B,K,T,D]`` to ``[B,T,K*D]``."""
    return side.swapaxes(1, 2).reshape(side.shape[0], side.shape[2], -1)


def _product(spec: str, x: Array, w: Array) -> Array:
    return jnp.einsum(spec, x.astype(w.dtype), w, precision=HIGHEST, preferred_element_type=jnp.float32)
