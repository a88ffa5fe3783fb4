"""Keys and values that a model makes of one chunk of tokens, taken out of the cache that the chunk continued."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int32

from kvx.cache.build import blank_group, last_filled
from kvx.cache.cache import CacheGroup, KVCache
from kvx.cache.ops import unrotate_keys


def trail(tokens: Int32[Array, "B U"], before: KVCache, after: KVCache) -> KVCache:
    """The chunk's own part of a cache, in the order of the chunk, wherever each row's tokens were written.

    Args:
        tokens: the chunk; -1 (anywhere) is padding.
        before: the cache that it continued, without rings.
        after: the cache with it, as :func:`kvx.models.decoder.forward` returns it.

    Returns:
        A cache of U slots, keys ``[L,B,K,U,D]`` un-rotated; zeros and position -1 at padding.

    Example:
        >>> import kvx
        >>> from kvx.fitting.training.trail import trail
        >>> from kvx.models.decoder import forward
        >>> from kvx.models.random_model import random_model
        >>> model, chunk = random_model(), jnp.array([[8, 9, -1]])
        >>> before = kvx.prefill(model, jnp.array([[5, 6, 7, -1]]), capacity=4)
        >>> trail(chunk, before, forward(model, chunk, before).cache).groups[0].pos.ravel().tolist()
        [3, 4, -1]
    """
    real = tokens >= 0
    rank = jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1

    def pick(old: CacheGroup, group: CacheGroup) -> CacheGroup:
        slot = jnp.maximum(old.next[:, None] + rank, 0)[None, :, None]
        k, v = (jnp.take_along_axis(x, slot[..., None], axis=3) for x in (group.k, group.v))
        pos = jnp.where(real[None, :, None], jnp.take_along_axis(group.pos, slot, axis=3), -1)
        return blank_group(CacheGroup(k, v, pos, last_filled(pos), group.layers))

    groups = tuple(pick(old, group) for old, group in zip(before.groups, after.groups, strict=True))
    made = dataclasses.replace(after, groups=groups)
    return unrotate_keys(made) if made.rotated else made
