"""The receiver's part of a hand-off: the target's own cache of the context, for methods that fuse with it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvx.alignment import Alignment
from kvx.cache.build import blank_group, last_filled
from kvx.cache.cache import CacheGroup, KVCache


def reads_receiver(method: Any) -> bool:
    """Whether a method reads the target's own cache of the context beside the source's.

    Example:
        >>> import kvx
        >>> from kvx.mappers.receiver import reads_receiver
        >>> reads_receiver(kvx.translators.fuser()), reads_receiver(kvx.translators.residual())
        (True, False)
    """
    return "receiver" in getattr(method, "needs", ())


def context_start(prefix: KVCache | None) -> Int[Array, " _"]:
    """Position of the first context token: one number, or one a row of the prefix."""
    return jnp.zeros((1,), jnp.int32) if prefix is None else prefix.next_position()


def receiver_rows(receiver: KVCache, alignment: Alignment, start: Int[Array, " _"]) -> KVCache:
    """The receiver's tokens in the slots of an alignment, at their own positions.

    Args:
        receiver: the target's own cache of the context, with or without its prefix; slots in any order, all tokens
            kept, the same in all layers and heads.
        alignment: ``[B,T,R]``.
        start: position of the first context token, ``[1]`` or ``[B]``.

    Returns:
        T slots; slot t holds the token at position ``start + alignment.pos[:, t]``, or is empty where nothing feeds it.

    Example:
        >>> import jax.numpy as jnp
        >>> from kvx.alignment import Alignment
        >>> from kvx.cache.build import from_arrays
        >>> from kvx.cache.geometry import CacheGeometry, LayerGeometry
        >>> k = jnp.array([9.0, 1.0, 2.0, 3.0]).reshape(1, 1, 1, 4, 1)
        >>> own = from_arrays(k, k, jnp.arange(4), CacheGeometry((LayerGeometry(1, 1, 1),)))
        >>> aligned = Alignment(jnp.zeros((1, 3, 1), jnp.int32), jnp.ones((1, 3, 1)), jnp.array([[0, -1, 2]]))
        >>> rows = receiver_rows(own, aligned, jnp.array([1]))
        >>> rows.keys(0).ravel().tolist(), rows.groups[0].pos.ravel().tolist()
        ([1.0, 0.0, 3.0], [1, -1, 3])
    """
    batch, length = alignment.pos.shape
    start = jnp.broadcast_to(start, (batch,))

    def slots_of(held: Array, wanted: Array, first: Array) -> Array:
        """Slot of each wanted token of one row, -1 where it is not held."""
        place = jnp.where(held >= first, held - first, length)  # the prefix and empty slots lie outside
        slots = jnp.arange(held.shape[0], dtype=jnp.int32)
        table = jnp.full((length,), -1, jnp.int32).at[place].set(slots, mode="drop")
        return jnp.where(wanted >= 0, table[jnp.maximum(wanted, 0)], -1)

    def pick(group: CacheGroup) -> CacheGroup:
        at = jax.vmap(slots_of)(group.pos[0, :, 0], alignment.pos, start)
        rows = jax.vmap(lambda x, i: jnp.take(x, jnp.maximum(i, 0), axis=2), in_axes=(1, 0), out_axes=1)
        pos = jnp.where(at >= 0, alignment.pos + start[:, None], -1)[None, :, None]
        made = dataclasses.replace(group, k=rows(group.k, at), v=rows(group.v, at), pos=pos, next=last_filled(pos))
        return blank_group(made)

    return dataclasses.replace(receiver, groups=tuple(pick(group) for group in receiver.groups))


def laid_under(alignment: Alignment, cache: KVCache) -> Alignment:
    """The alignment of a context, reading another context's source cache in the place of its own.

    Each token reads the slot of the same number; past the other context's end, its last token.

    Args:
        alignment: of B contexts; cache: the source's cache of B others.

    Example:
        >>> import jax.numpy as jnp
        >>> from kvx.alignment import Alignment
        >>> from kvx.cache.build import from_arrays
        >>> from kvx.cache.geometry import CacheGeometry, LayerGeometry
        >>> k = jnp.ones((1, 1, 1, 4, 1))
        >>> other = from_arrays(k, k, jnp.array([0, 1, -1, -1]), CacheGeometry((LayerGeometry(1, 1, 1),)))
        >>> own = Alignment(jnp.array([[[0], [1], [2], [3]]]), jnp.ones((1, 4, 1)), jnp.array([[0, 1, 2, 3]]))
        >>> laid_under(own, other).index.ravel().tolist()
        [0, 1, 1, 1]
    """
    last = jnp.maximum((cache.groups[0].pos[0, :, 0] >= 0).sum(axis=1).astype(jnp.int32) - 1, 0)
    index = jnp.minimum(alignment.index, last[:, None, None])
    return dataclasses.replace(alignment, index=index, report=None)
