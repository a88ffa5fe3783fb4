"""Small caches for the tests of this folder."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvx.cache import CacheGeometry, KVCache, LayerGeometry, RopeSpec, from_arrays

ROPE = RopeSpec.create(dim=4)
LOCAL = RopeSpec.create(theta=100.0, dim=4, interleaved=True)


def geometry(
    windows: tuple[int | None, ...] = (None, None), rope: RopeSpec | None = ROPE, heads: int = 2
) -> CacheGeometry:
    """Layers of width 4 with one window each; windowed layers get another RoPE, as in Gemma 3."""
    ropes = [rope if w is None or rope is None else LOCAL for w in windows]
    return CacheGeometry(tuple(LayerGeometry(heads, 4, 4, w, r) for w, r in zip(windows, ropes, strict=True)))


def chunk(cache: KVCache, tokens: int, seed: int) -> tuple[list[jax.Array], list[jax.Array]]:
    """Random keys and values of a chunk, per group."""
    rng = np.random.default_rng(seed)

    def draw(x: jax.Array) -> jax.Array:
        return jnp.asarray(rng.standard_normal((*x.shape[:3], tokens, x.shape[4])), x.dtype)

    return [draw(g.k) for g in cache.groups], [draw(g.v) for g in cache.groups]


def filled(positions: Any, windows: tuple[int | None, ...] = (None, None), seed: int = 0, **kwargs: Any) -> KVCache:
    """A cache with random numbers at the given positions ``[B,T]``."""
    where = geometry(windows, **kwargs)
    pos, rng = np.atleast_2d(np.asarray(positions)), np.random.default_rng(seed)
    shape = (where.num_layers, pos.shape[0], where.layers[0].kv_heads, pos.shape[1], 4)
    k, v = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(2))
    return from_arrays(k, v, jnp.asarray(pos, jnp.int32), where)


def poison(cache: KVCache) -> KVCache:
    """The same cache with NaN in every empty slot."""

    def spoil(group: Any) -> Any:
        empty = (group.pos < 0)[..., None]
        return dataclasses.replace(group, k=jnp.where(empty, jnp.nan, group.k), v=jnp.where(empty, jnp.nan, group.v))

    return dataclasses.replace(cache, groups=tuple(spoil(g) for g in cache.groups))


def triples(cache: KVCache) -> list[list[dict[int, tuple[bytes, bytes]]]]:
    """What a cache means: per layer and row, position -> (key bytes, value bytes); slot order is forgotten."""
    out = []
    for i in range(cache.num_layers):
        view = cache.layer(i)
        k, v, pos = np.asarray(view.k), np.asarray(view.v), np.asarray(view.pos)
        rows = []
        for b in range(k.shape[0]):
            slots = [t for t in range(k.shape[2]) if pos[b, 0, t] >= 0]
            rows.append({int(pos[b, 0, t]): (k[b, :, t].tobytes(), v[b, :, t].tobytes()) for t in slots})
        out.append(rows)
    return out


def assert_clean(cache: KVCache) -> None:
    """Every empty slot holds zeros."""
    for group in cache.groups:
        empty = np.asarray((group.pos < 0)[..., None])
        for x in (group.k, group.v):
            assert not np.where(empty, np.asarray(x, np.float32), 0.0).any()
            assert np.isfinite(np.asarray(x, np.float32)).all()


def assert_same(a: KVCache, b: KVCache) -> None:
    """Equal in every number and every static fact."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
