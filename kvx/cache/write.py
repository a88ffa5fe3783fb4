"""Write new tokens into a cache: compact, ragged, wrapping around in rings."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvx.cache.build import blank_group, concrete
from kvx.cache.cache import CacheGroup, KVCache
from kvx.errors import KvxError
from kvx.typing import pytree


@pytree
class WritePlan:
    """Where the tokens of one chunk go in one group; computed once, used for every layer.

    Attributes:
        slot: int32 ``[B,t]`` slot of each token; the slot count for tokens that are not written.
        source: int32 ``[B,T]`` the chunk's token that lands in each slot; -1 where the slot keeps what it holds.
        next: int32 ``[B]`` the group's ``next`` after the write.
    """

    slot: Array
    source: Array
    next: Array


@functools.partial(jax.jit, static_argnums=(1, 2))
def plan_write(next: Array, slots: int, ring: bool, positions: Array) -> WritePlan:
    """Plan to write a chunk at ``next``: real tokens close up, padding is skipped.

    ``slot_j = next + #{real tokens before j}``, modulo T in a ring, where only the chunk's last T tokens survive.
    Tokens that find no slot in a group that is no ring are dropped (under tracing nothing can be raised).

    Args:
        next: int32 ``[B]``; slots: ``T``; ring: whether writes wrap around.
        positions: int32 ``[B,t]``, -1 anywhere for padding.

    Example:
        >>> plan = plan_write(jnp.array([3]), 4, True, jnp.array([[7, -1, 8]]))
        >>> plan.slot.tolist(), plan.source.tolist(), plan.next.tolist()
        ([[3, 4, 0]], [[2, -1, -1, 0]], [5])
    """
    valid = positions >= 0
    count = jnp.cumsum(valid, axis=1, dtype=jnp.int32)
    total = count[:, -1:] if count.shape[1] else jnp.zeros((count.shape[0], 1), jnp.int32)
    start, rank = next.astype(jnp.int32)[:, None], count - 1
    target = jnp.arange(slots, dtype=jnp.int32)[None]
    if ring:
        size = max(slots, 1)
        slot = jnp.where(valid & (rank >= total - slots), (start + rank) % size, slots)
        first = (target - start) % size
        wanted = jnp.where(first < total, first + (total - 1 - first) // size * size, -1)
    else:
        slot = jnp.where(valid, jnp.minimum(start + rank, slots), slots)
        wanted = jnp.where(target - start < total, target - start, -1)
    find = jax.vmap(lambda have, want: jnp.searchsorted(have, want, method="scan_unrolled"))
    source = jnp.where(wanted >= 0, find(count, jnp.maximum(wanted, 0) + 1).astype(jnp.int32), -1)
    return WritePlan(slot, source, next.astype(jnp.int32) + total[:, 0])


def write_slots(buffer: Array, chunk: Array, plan: WritePlan) -> Array:
    """Write a chunk's keys or values into their slots. Unwritten slots keep what they hold.

    Args:
        buffer: ``[...,B,K,T,D]``, one layer or a stack of them.
        chunk: ``[...,B,K,t,D]``, cast to the buffer's dtype.
        plan: from :func:`plan_write`.

    Returns:
        ``[...,B,K,T,D]``.

    Example:
        >>> plan = plan_write(jnp.array([1]), 3, False, jnp.array([[0]]))
        >>> write_slots(jnp.zeros((1, 1, 3, 1)), jnp.ones((1, 1, 1, 1)), plan).ravel().tolist()
        [0.0, 1.0, 0.0]
    """
    chunk = chunk.astype(buffer.dtype)
    tokens = chunk.shape[-2]
    if tokens == 0 or buffer.shape[-2] == 0:
        return buffer
    if tokens == 1:
        return _write_one(buffer, chunk, plan.slot[:, 0])
    lead = (1,) * (buffer.ndim - 4)
    source = plan.source.reshape(*lead, plan.source.shape[0], 1, -1, 1)
    moved = jnp.take_along_axis(chunk, jnp.maximum(source, 0), axis=-2)
    return jnp.where(source >= 0, moved, buffer)


def _write_one(buffer: Array, chunk: Array, slot: Array) -> Array:
    """One token per row: touch only its slot, in place where XLA may."""
    lead = buffer.ndim - 4
    rows = jnp.arange(buffer.shape[lead], dtype=jnp.int32)
    index = (slice(None),) * lead + (rows, slice(None), slot)
    update = jnp.moveaxis(chunk[..., 0, :], lead, 0)
    return buffer.at[index].set(update, mode="drop", unique_indices=True)


def write_positions(pos: Array, positions: Array, plan: WritePlan) -> Array:
    """Write a chunk's positions ``[B,t]`` into a group's ``[L|1,B,K|1,T]``."""
    chunk = jnp.broadcast_to(positions[None, :, None, :, None], (*pos.shape[:3], positions.shape[1], 1))
    return write_slots(pos[..., None], chunk, plan)[..., 0]


@jax.jit
def append_group(group: CacheGroup, keys: Array, values: Array, positions: Array) -> CacheGroup:
    """Append one chunk (``[L,B,K,t,D]``, ``[L,B,K,t,Dv]``, ``[B,t]``) to one group; empty slots are not blanked."""
    plan = plan_write(group.next, group.slots, group.ring, positions)
    k, v = write_slots(group.k, keys, plan), write_slots(group.v, values, plan)
    pos = write_positions(group.pos, positions, plan)
    return CacheGroup(k, v, pos, plan.next, group.layers, group.ring)


def append(cache: KVCache, keys: Array | Sequence[Array], values: Array | Sequence[Array], positions: Array) -> KVCache:
    """Add a chunk of tokens after the ones written so far. Attend over (cache, chunk) first, append second.

    Args:
        cache: the cache before the chunk.
        keys: per group ``[L,B,K,t,D]`` (one array when there is one group), rotated iff the cache is.
        values: per group ``[L,B,K,t,Dv]``.
        positions: int ``[B,t]``; -1 (anywhere in a row) marks padding, which is dropped.

    Returns:
        the cache with the chunk; in a ring the oldest tokens make room.

    Raises:
        KvxError: shapes that do not fit; or, when ``next`` is concrete, no room left in a group that is no ring.

    Example:
        >>> from kvx.cache.build import empty
        >>> from kvx.cache.geometry import CacheGeometry, LayerGeometry
        >>> cache = empty(CacheGeometry((LayerGeometry(1, 2, 2),)), 1, 4)
        >>> chunk = jnp.ones((1, 1, 1, 3, 2))
        >>> append(cache, chunk, chunk, jnp.array([[0, -1, 1]])).groups[0].pos.ravel().tolist()
        [0, 1, -1, -1]
    """
    keys, values = _per_group(keys), _per_group(values)
    if len(keys) != len(cache.groups) or len(values) != len(cache.groups):
        raise KvxError(
            f"got keys for {len(keys)} and values for {len(values)} groups; this cache has {len(cache.groups)}: give "
            "one array per group."
        )
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise KvxError(f"positions have dtype {positions.dtype}; expected an integer type.")
    positions = positions.astype(jnp.int32)
    groups = []
    for group, k, v in zip(cache.groups, keys, values, strict=True):
        _check_chunk(group, k, v, positions)
        groups.append(blank_group(append_group(group, k, v, positions)))
    return KVCache(tuple(groups), cache.rotated, cache.geometry)


def _per_group(x: Array | Sequence[Array]) -> tuple[Array, ...]:
    return (x,) if isinstance(x, (jax.Array, np.ndarray)) else tuple(x)


def _check_chunk(group: CacheGroup, k: Array, v: Array, positions: Array) -> None:
    layers, batch, heads, _, key_dim = group.k.shape
    tokens = positions.shape[-1]
    wanted = {"keys": (k, key_dim), "values": (v, group.v.shape[-1])}
    for what, (x, width) in wanted.items():
        if x.shape != (layers, batch, heads, tokens, width) or positions.shape != (batch, tokens):
            raise KvxError(
                f"{what} {x.shape} with positions {positions.shape} do not fit layers {group.layers}; expected "
                f"[L,B,K,t,D] = {(layers, batch, heads, tokens, width)} and [B,t] = {(batch, tokens)}."
            )
    start, seen = concrete(group.next), concrete(positions)
    if group.ring or start is None or seen is None:
        return
    need = int((start + (seen >= 0).sum(axis=1)).max()) if seen.size else 0
    if need > group.slots:
        raise KvxError(
            f"layers {group.layers} have {group.slots} slots but the longest row would need {need}; make room with "
            "kvx.cache.ops.reserve(cache, tokens) or pad_to(cache, slots)."
        )
