"""Join caches and reorder them: ``concatenate``, ``select_batch``, ``compact``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvx.cache.build import blank_group, check_positions, concrete, last_filled
from kvx.cache.cache import CacheGroup, KVCache
from kvx.errors import KvxError


def concatenate(*caches: KVCache) -> KVCache:
    """One cache that holds the tokens of all, slots side by side in the given order; positions stay what they are.

    Groups may be cut differently (windows here, all tokens there): layers that go together everywhere stay together.
    A cache of one row joins a batch of any size (a common prefix).

    Args:
        caches: at least one; same geometry, dtype and rotation.

    Returns:
        a cache without rings; ``next`` points behind the last filled slot.

    Raises:
        KvxError: caches that do not fit together, or (when concrete) one position in two of them.

    Example:
        >>> from kvx.cache.build import empty, from_arrays
        >>> from kvx.cache.geometry import CacheGeometry, LayerGeometry
        >>> k = jnp.ones((1, 1, 1, 2, 2))
        >>> geometry = CacheGeometry((LayerGeometry(1, 2, 2),))
        >>> a, b = (from_arrays(k, k, jnp.array(p), geometry) for p in ([0, -1], [1, 2]))
        >>> joined = concatenate(a, b).groups[0]
        >>> joined.pos.ravel().tolist(), joined.next.tolist()
        ([0, -1, 1, 2], [4])
    """
    if not caches:
        raise KvxError("concatenate needs at least one cache.")
    _check_together(caches)
    batch = max(cache.batch for cache in caches)
    caches = tuple(select_batch(c, [0] * batch) if c.batch < batch else c for c in caches)
    members: dict[tuple[int, ...], list[int]] = {}
    for i in range(caches[0].num_layers):
        members.setdefault(tuple(cache.locate(i)[0] for cache in caches), []).append(i)
    groups = []
    for places, layers in members.items():
        parts = [_pick_layers(cache.groups[g], layers) for cache, g in zip(caches, places, strict=True)]
        k, v = (jnp.concatenate([getattr(p, name) for p in parts], axis=3) for name in ("k", "v"))
        lead = [max(p.pos.shape[axis] for p in parts) for axis in (0, 2)]
        pos = [jnp.broadcast_to(p.pos, (lead[0], batch, lead[1], p.slots)) for p in parts]
        joined = jnp.concatenate(pos, axis=3)
        check_positions(joined, f"layers {tuple(layers)}")
        groups.append(blank_group(CacheGroup(k, v, joined, last_filled(joined), tuple(layers))))
    return KVCache(tuple(groups), caches[0].rotated, caches[0].geometry)


def _check_together(caches: tuple[KVCache, ...]) -> None:
    first = caches[0]
    batch = max(cache.batch for cache in caches)
    for n, cache in enumerate(caches):
        facts = {
            "geometry": (cache.geometry, first.geometry),
            "rotated": (cache.rotated, first.rotated),
            "dtype": (cache.groups[0].k.dtype, first.groups[0].k.dtype),
            "batch": (cache.batch if cache.batch != 1 else batch, batch),
        }
        for name, (have, want) in facts.items():
            if have != want:
                raise KvxError(
                    f"cache {n} does not fit cache 0: {name} is {have}, expected {want}; convert one of them."
                )


def _pick_layers(group: CacheGroup, layers: list[int]) -> CacheGroup:
    if tuple(layers) == group.layers:
        return group
    at = np.array([group.layers.index(i) for i in layers])
    pos = group.pos[at] if group.pos.shape[0] > 1 else group.pos
    return dataclasses.replace(group, k=group.k[at], v=group.v[at], pos=pos, layers=tuple(layers))


def select_batch(cache: KVCache, rows: Sequence[int] | np.ndarray | Array) -> KVCache:
    """The given rows of the batch, in that order; a row may come several times (``[0] * n`` repeats one sequence).

    Example:
        >>> from kvx.cache.build import empty, from_arrays
        >>> from kvx.cache.geometry import CacheGeometry, LayerGeometry
        >>> select_batch(empty(CacheGeometry((LayerGeometry(1, 2, 2),)), 1, 4), [0, 0, 0]).batch
        3
    """
    index = jnp.asarray(rows, jnp.int32)
    seen = concrete(index)
    if seen is not None and seen.size and (seen.min() < 0 or seen.max() >= cache.batch):
        raise KvxError(f"rows {seen.tolist()} are not all in 0..{cache.batch - 1}, the rows of this cache.")

    def pick(group: CacheGroup) -> CacheGroup:
        k, v, pos = (jnp.take(x, index, axis=1) for x in (group.k, group.v, group.pos))
        return dataclasses.replace(group, k=k, v=v, pos=pos, next=jnp.take(group.next, index))

    return KVCache(tuple(pick(group) for group in cache.groups), cache.rotated, cache.geometry)


def compact(cache: KVCache) -> KVCache:
    """Tokens in order of position, without gaps, empty slots last; rings become plain groups of the same size.

    Example:
        >>> from kvx.cache.build import empty, from_arrays
        >>> from kvx.cache.geometry import CacheGeometry, LayerGeometry
        >>> k = jnp.ones((1, 1, 1, 4, 2))
        >>> cache = from_arrays(k, k, jnp.array([-1, 7, 3, -1]), CacheGeometry((LayerGeometry(1, 2, 2),)))
        >>> compact(cache).groups[0].pos.ravel().tolist()
        [3, 7, -1, -1]
    """
    return dataclasses.replace(cache, groups=tuple(_sort(group) for group in cache.groups))


@jax.jit
def _sort(group: CacheGroup) -> CacheGroup:
    order = jnp.argsort(jnp.where(group.pos >= 0, group.pos, np.iinfo(np.int32).max), axis=-1, stable=True)
    pos = jnp.take_along_axis(group.pos, order, axis=-1)
    k, v = (jnp.take_along_axis(x, order[..., None], axis=-2) for x in (group.k, group.v))
    return blank_group(CacheGroup(k, v, pos, last_filled(pos), group.layers, False))
