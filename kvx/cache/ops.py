"""Everything one does with a cache, as pure functions: join, cut, shift, pad, rotate.

Building (``build``), writing (``write``) and joining (``join``) are defined in their own files and re-exported here.
All functions work under ``jit`` and ``vmap``; what can only be checked on concrete positions is checked then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvx.cache.build import blank, blank_group, check, concrete, empty, from_arrays
from kvx.cache.cache import CacheGroup, KVCache
from kvx.cache.geometry import RopeSpec
from kvx.cache.join import compact, concatenate, select_batch
from kvx.cache.rope import rotate, unrotate
from kvx.cache.write import WritePlan, append, append_group, plan_write, write_positions, write_slots
from kvx.errors import KvxError

__all__ = [
    "WritePlan",
    "append",
    "append_group",
    "blank",
    "check",
    "compact",
    "concatenate",
    "crop",
    "empty",
    "from_arrays",
    "pad_to",
    "plan_write",
    "reserve",
    "rotate_keys",
    "select_batch",
    "shift_positions",
    "slice_positions",
    "slice_slots",
    "unrotate_keys",
    "write_positions",
    "write_slots",
]

_FAR = np.iinfo(np.int32).max  # a position or an age beyond any other


def _rebuild(cache: KVCache, change: Callable[[CacheGroup], CacheGroup], rotated: bool | None = None) -> KVCache:
    groups = tuple(blank_group(change(group)) for group in cache.groups)
    return KVCache(groups, cache.rotated if rotated is None else rotated, cache.geometry)


def slice_slots(cache: KVCache, start: int, stop: int) -> KVCache:
    """Slots ``start <= slot < stop`` of every layer; positions stay what they are.

    Args:
        cache: all layers must have the same slot count, and no rings (their slot order is not token order).
        start, stop: slot range within ``0..T``.

    Raises:
        KvxError: rings, unequal slot counts, or a range outside the cache.

    Example:
        >>> from kvx.cache.geometry import CacheGeometry, LayerGeometry
        >>> k = jnp.ones((1, 1, 1, 4, 2))
        >>> cache = from_arrays(k, k, jnp.array([5, 6, 7, 8]), CacheGeometry((LayerGeometry(1, 2, 2),)))
        >>> slice_slots(cache, 1, 3).groups[0].pos.ravel().tolist()
        [6, 7]
    """
    counts = sorted({group.slots for group in cache.groups})
    if len(counts) > 1 or any(group.ring for group in cache.groups):
        raise KvxError(
            f"slots mean different tokens in different layers here (slot counts {counts}, rings or imported windows); "
            "cut by position with slice_positions or crop."
        )
    if not 0 <= start <= stop <= counts[0]:
        raise KvxError(f"slots {start}..{stop} are not inside this cache of {counts[0]} slots.")

    def cut(group: CacheGroup) -> CacheGroup:
        next = jnp.clip(group.next - start, 0, stop - start)
        k, v, pos = group.k[..., start:stop, :], group.v[..., start:stop, :], group.pos[..., start:stop]
        return dataclasses.replace(group, k=k, v=v, pos=pos, next=next)

    return _rebuild(cache, cut)


def slice_positions(cache: KVCache, start: int | Array, stop: int | Array) -> KVCache:
    """Keep tokens at positions ``start <= p < stop``; the other slots become empty. Shapes do not change.

    Writing continues over the dropped tokens that were written last. A ring that has wrapped has forgotten what came
    before its window, so it cannot go back: dropping its newest tokens would leave later queries a shortened window.

    Args:
        cache: any cache.
        start, stop: positions in tokens, one number or int ``[B]``.

    Raises:
        KvxError: when concrete, a ring that would have to go back further than it remembers.

    Example:
        >>> from kvx.cache.geometry import CacheGeometry, LayerGeometry
        >>> k = jnp.ones((1, 1, 1, 4, 2))
        >>> cache = from_arrays(k, k, jnp.array([0, 1, 2, 3]), CacheGeometry((LayerGeometry(1, 2, 2),)))
        >>> part = slice_positions(cache, 1, 3).groups[0]
        >>> part.pos.ravel().tolist(), part.next.tolist()
        ([-1, 1, 2, -1], [3])
    """
    low, high = _per_row(start), _per_row(stop)

    def keep(group: CacheGroup) -> CacheGroup:
        _check_ring(group, cache, high)
        pos = jnp.where((group.pos >= low) & (group.pos < high), group.pos, -1)
        return dataclasses.replace(group, pos=pos, next=_written(group, pos))

    return _rebuild(cache, keep)


def _per_row(x: int | Array) -> Array:
    x = jnp.asarray(x, jnp.int32)
    return x.reshape(1, -1, 1, 1)


def _written(group: CacheGroup, pos: Array) -> Array:
    """``next`` after dropping: back over the tokens written last that are gone (works in rings too)."""
    slots = group.slots
    if slots == 0:
        return group.next
    age = (group.next[None, :, None, None] - 1 - jnp.arange(slots, dtype=jnp.int32).reshape(1, 1, 1, -1)) % slots
    youngest = jnp.where(pos >= 0, age, _FAR).min(axis=(0, 2, 3))
    return jnp.where(youngest == _FAR, 0, group.next - youngest).astype(jnp.int32)


def _check_ring(group: CacheGroup, cache: KVCache, stop: Array) -> None:
    pos, next, high = concrete(group.pos), concrete(group.next), concrete(stop)
    if not group.ring or pos is None or next is None or high is None:
        return
    window = cache.geometry.layers[group.layers[0]].window or group.slots
    held = np.where(pos >= 0, pos, _FAR)
    oldest, newest = held.min(axis=(0, 2, 3)), pos.max(axis=(0, 2, 3))
    limit = np.broadcast_to(high.reshape(-1), oldest.shape)
    lost = (next > group.slots) & (newest >= limit) & (oldest > limit - window + 1)
    if lost.any():
        row = int(np.argmax(lost))
        raise KvxError(
            f"cannot go back to position {limit[row]}: the windows of layers {group.layers} have forgotten what lies "
            f'before position {oldest[row]}; prefill with keep="all" if the cache is to be cropped.'
        )


def crop(cache: KVCache, keep_tokens: int | Array) -> KVCache:
    """Drop every token at position ``keep_tokens`` or later (one number, or int ``[B]``); shapes do not change.

    Raises:
        KvxError: as :func:`slice_positions`, or a negative number (transformers' ``Cache.crop`` takes the number of
            tokens to remove, negated; kvx takes the number to keep).

    Example:
        >>> from kvx.cache.geometry import CacheGeometry, LayerGeometry
        >>> k = jnp.ones((1, 1, 1, 4, 2))
        >>> cache = from_arrays(k, k, jnp.array([0, 1, 2, 3]), CacheGeometry((LayerGeometry(1, 2, 2),)))
        >>> crop(cache, 2).groups[0].pos.ravel().tolist()
        [0, 1, -1, -1]
    """
    seen = concrete(keep_tokens)
    if seen is not None and (seen < 0).any():
        raise KvxError(f"crop keeps the tokens before a position, got {seen}; expected 0 or more.")
    return slice_positions(cache, 0, keep_tokens)


def shift_positions(cache: KVCache, delta: int | Array) -> KVCache:
    """Move every token by ``delta`` positions (one number, or int ``[B]``); rotated keys turn along.

    Un-rotated keys do not change at all. Tokens that would land before position 0 are dropped under tracing.

    Raises:
        KvxError: learned positions (GPT-2, OPT: baked into keys and values); when concrete, a negative position.

    Example:
        >>> from kvx.cache.geometry import CacheGeometry, LayerGeometry, RopeSpec
        >>> k = jnp.ones((1, 1, 1, 3, 2))
        >>> geometry = CacheGeometry((LayerGeometry(1, 2, 2, rope=RopeSpec.create(dim=2)),))
        >>> shift_positions(from_arrays(k, k, jnp.array([0, 1, -1]), geometry), 5).groups[0].pos.ravel().tolist()
        [5, 6, -1]
    """
    by = concrete(delta)
    if by is not None and not by.any():
        return cache
    if cache.geometry.learned_positions:
        raise KvxError(
            "positions of this cache cannot be shifted: its model has learned position embeddings (GPT-2, OPT), which "
            "are part of every key and value; prefill at the wanted positions instead."
        )
    if cache.rotated:
        return rotate_keys(shift_positions(unrotate_keys(cache), delta))
    for group in cache.groups:
        pos = concrete(group.pos)
        if pos is not None and by is not None and (np.where(pos >= 0, pos + by.reshape(1, -1, 1, 1), 0) < 0).any():
            raise KvxError(f"shifting by {by.tolist()} moves layers {group.layers} before position 0; shift by less.")

    def move(group: CacheGroup) -> CacheGroup:
        moved = group.pos + _per_row(delta)
        return dataclasses.replace(group, pos=jnp.where((group.pos >= 0) & (moved >= 0), moved, -1))

    return _rebuild(cache, move)


def pad_to(cache: KVCache, slots: int) -> KVCache:
    """At least ``slots`` slots in every layer that is no ring; new slots are empty. Larger groups stay as they are.

    Example:
        >>> from kvx.cache.geometry import CacheGeometry, LayerGeometry
        >>> k = jnp.ones((1, 1, 1, 2, 2))
        >>> cache = from_arrays(k, k, jnp.array([0, 1]), CacheGeometry((LayerGeometry(1, 2, 2),)))
        >>> pad_to(cache, 4).groups[0].pos.ravel().tolist()
        [0, 1, -1, -1]
    """

    def grow(group: CacheGroup) -> CacheGroup:
        more = max(slots - group.slots, 0)
        return group if group.ring or not more else _add_slots(group, more)

    return _rebuild(cache, grow)


def reserve(cache: KVCache, tokens: int) -> KVCache:
    """Room for ``tokens`` more tokens in every row: grows each group that is no ring by what is missing.

    With a concrete cache existing free slots count; under tracing every group grows by ``tokens``.

    Example:
        >>> from kvx.cache.geometry import CacheGeometry, LayerGeometry
        >>> cache = empty(CacheGeometry((LayerGeometry(1, 2, 2),)), 1, 4)
        >>> reserve(cache, 3).groups[0].slots, reserve(cache, 6).groups[0].slots
        (4, 6)
    """

    def grow(group: CacheGroup) -> CacheGroup:
        written = concrete(group.next)
        more = tokens if written is None else int(written.max(initial=0)) + tokens - group.slots
        return group if group.ring or more <= 0 else _add_slots(group, more)

    return _rebuild(cache, grow)


def _add_slots(group: CacheGroup, more: int) -> CacheGroup:
    room = [(0, 0)] * 3 + [(0, more)]
    k, v = jnp.pad(group.k, [*room, (0, 0)]), jnp.pad(group.v, [*room, (0, 0)])
    return dataclasses.replace(group, k=k, v=v, pos=jnp.pad(group.pos, room, constant_values=-1))


def rotate_keys(cache: KVCache) -> KVCache:
    """The cache with RoPE applied to its keys, layer by layer as the geometry says; no-op when rotated already.

    Example:
        >>> from kvx.cache.geometry import CacheGeometry, LayerGeometry, RopeSpec
        >>> k = jnp.ones((1, 1, 1, 2, 2))
        >>> geometry = CacheGeometry((LayerGeometry(1, 2, 2, rope=RopeSpec.create(dim=2)),))
        >>> cache = from_arrays(k, k, jnp.array([0, 1]), geometry)
        >>> back = unrotate_keys(rotate_keys(cache))
        >>> bool(jnp.allclose(back.keys(0), cache.keys(0), atol=1e-6))
        True
    """
    return cache if cache.rotated else _turn(cache, rotate, True)


def unrotate_keys(cache: KVCache) -> KVCache:
    """Undo :func:`rotate_keys`; no-op when un-rotated already."""
    return _turn(cache, unrotate, False) if cache.rotated else cache


def _turn(cache: KVCache, function: Callable[[Array, Array, RopeSpec], Array], rotated: bool) -> KVCache:
    def turn(group: CacheGroup) -> CacheGroup:
        k = group.k
        by_spec: dict[RopeSpec | None, list[int]] = {}
        for i, layer in enumerate(group.layers):
            by_spec.setdefault(cache.geometry.layers[layer].rope, []).append(i)
        for spec, at in by_spec.items():
            if spec is None:
                continue
            if len(at) == len(group.layers):
                k = function(k, group.pos, spec)
                continue
            index = np.array(at)
            pos = group.pos[index] if group.pos.shape[0] > 1 else group.pos
            k = k.at[index].set(function(group.k[index], pos, spec))
        return dataclasses.replace(group, k=k)

    return _rebuild(cache, turn, rotated)
