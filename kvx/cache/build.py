"""Build and check caches: ``from_arrays``, ``empty`` and ``check``. Validation lives here, never in the pytrees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvx.cache.cache import CacheGroup, KVCache
from kvx.cache.geometry import CacheGeometry
from kvx.errors import KvxError

Keep = Literal["all", "window"]


def concrete(x: Any) -> np.ndarray | None:
    """The host value of an array; ``None`` while it is traced or lives partly on other hosts."""
    if isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True):
        return None
    return np.asarray(x)


def from_arrays(
    keys: Array | np.ndarray | Sequence[Any],
    values: Array | np.ndarray | Sequence[Any],
    positions: Array | np.ndarray | Sequence[Any],
    geometry: CacheGeometry,
    *,
    rotated: bool = False,
) -> KVCache:
    """Cache from arrays in kvx's own layout (others: :mod:`kvx.cache.layouts`).

    Layers that share heads, widths and slot count are stacked into one group.

    Args:
        keys: one array ``[L,B,K,T,D]``, or one ``[B,K,T,D]`` per layer (slot counts may differ).
        values: the same with ``Dv``.
        positions: int positions in tokens, -1 for empty slots: ``[T]`` or ``[B,T]`` for all layers,
            ``[L|1,B,K|1,T]``, or a sequence with one ``[T]``, ``[B,T]`` or ``[B,K|1,T]`` per layer.
        geometry: what each layer must look like.
        rotated: whether ``keys`` already carry RoPE.

    Returns:
        the cache; empty slots are zeroed and ``next`` points behind the last filled slot.

    Raises:
        KvxError: shapes that disagree with the geometry or one another, positions below -1, or one held twice.

    Example:
        >>> from kvx.cache.geometry import LayerGeometry, RopeSpec
        >>> geometry = CacheGeometry((LayerGeometry(2, 4, 4, rope=RopeSpec.create(dim=4)),) * 3)
        >>> k = jnp.ones((3, 1, 2, 5, 4))
        >>> cache = from_arrays(k, k, jnp.array([0, 1, 2, -1, -1]), geometry)
        >>> cache.next_position().tolist(), cache.groups[0].next.tolist(), float(cache.keys(0)[0, 0, 4, 0])
        ([3], [3], 0.0)
    """
    count = check_geometry(geometry).num_layers
    for name, given in (("keys", keys), ("values", values)):
        if len(given) != count:
            raise KvxError(f"{name} hold {len(given)} layers but the geometry has {count}; give one array per layer.")
    shared = not isinstance(positions, (list, tuple))
    layer_pos = [jnp.asarray(p) for p in positions] if not shared else _split_positions(jnp.asarray(positions), count)
    if len(layer_pos) != count:
        raise KvxError(
            f"positions hold {len(layer_pos)} layers but the geometry has {count}; give one array per layer."
        )
    batch = jnp.shape(keys[0])[0] if jnp.ndim(keys[0]) == 4 else 1
    members: dict[tuple[int, ...], list[int]] = {}
    for i, layer in enumerate(geometry.layers):
        members.setdefault((*layer.shapes, *jnp.shape(keys[i])[2:3]), []).append(i)
    groups = []
    for layers in members.values():
        k, v = _stack("keys", keys, layers), _stack("values", values, layers)
        same = all(layer_pos[i] is layer_pos[layers[0]] for i in layers)
        pos = jnp.stack([_layer_positions(layer_pos[i], batch) for i in (layers[:1] if same else layers)])
        groups.append(CacheGroup(k, v, _collapse(pos), last_filled(pos), tuple(layers)))
    return blank(check(KVCache(tuple(groups), rotated, geometry)))


def _stack(what: str, arrays: Any, layers: list[int]) -> Array:
    """``[L,...]`` of some layers; an array that is stacked already is used as it is."""
    if not isinstance(arrays, (list, tuple)) and layers == list(range(len(arrays))):
        return jnp.asarray(arrays)
    shapes = {jnp.shape(arrays[i]) for i in layers}
    if len(shapes) > 1:
        raise KvxError(f"{what} of layers {layers} have shapes {sorted(shapes)}; expected one shape [B,K,T,D].")
    return jnp.stack([jnp.asarray(arrays[i]) for i in layers])


def _split_positions(pos: Array, count: int) -> list[Array]:
    if pos.ndim == 4 and pos.shape[0] == count > 1:
        return list(pos)
    if pos.ndim == 4 and pos.shape[0] != 1:
        raise KvxError(f"positions [L|1,B,K|1,T] hold {pos.shape[0]} layers; expected 1 or {count}.")
    return [pos[0] if pos.ndim == 4 else pos] * count


def _layer_positions(pos: Array, batch: int) -> Array:
    """``[T]``, ``[B,T]`` or ``[B,K|1,T]`` to int32 ``[B,K|1,T]``."""
    if pos.ndim not in (1, 2, 3) or not jnp.issubdtype(pos.dtype, jnp.integer):
        raise KvxError(f"positions of one layer are integers [T], [B,T] or [B,K,T]; got {pos.dtype}{list(pos.shape)}.")
    pos = pos.astype(jnp.int32)
    if pos.ndim < 3:
        pos = pos[..., None, :]
    return jnp.broadcast_to(pos[None], (batch, *pos.shape)) if pos.ndim == 2 else pos


def _collapse(pos: Array) -> Array:
    """One shared row when all layers hold the same positions (seen only on concrete arrays)."""
    seen = concrete(pos) if pos.shape[0] > 1 else None
    return pos[:1] if seen is not None and (seen == seen[:1]).all() else pos


def last_filled(pos: Array) -> Array:
    """Slots up to and including the last filled one, int32 ``[B]``, from positions ``[L|1,B,K|1,T]``."""
    filled = jnp.where(pos >= 0, jnp.arange(1, pos.shape[-1] + 1, dtype=jnp.int32).reshape(1, 1, 1, -1), 0)
    return filled.max(axis=(0, 2, 3), initial=0).astype(jnp.int32)


def blank(cache: KVCache) -> KVCache:
    """The cache with finite zeros in every empty slot, whatever stood there (NaN included).

    Example:
        >>> from kvx.cache.geometry import LayerGeometry
        >>> bad = jnp.full((1, 1, 1, 2, 2), jnp.nan)
        >>> group = CacheGroup(bad, bad, jnp.array([[[[-1, -1]]]]), jnp.array([0]), (0,))
        >>> blank(KVCache((group,), geometry=CacheGeometry((LayerGeometry(1, 2, 2),)))).keys(0).tolist()
        [[[[0.0, 0.0], [0.0, 0.0]]]]
    """
    return KVCache(tuple(blank_group(g) for g in cache.groups), cache.rotated, cache.geometry)


@jax.jit
def blank_group(group: CacheGroup) -> CacheGroup:
    """One group with zeros in its empty slots."""
    filled = (group.pos >= 0)[..., None]
    k = jnp.where(filled, group.k, jnp.zeros((), group.k.dtype))
    v = jnp.where(filled, group.v, jnp.zeros((), group.v.dtype))
    return CacheGroup(k, v, group.pos, group.next, group.layers, group.ring)


def empty(geometry: CacheGeometry, batch: int, slots: int, dtype: Any = jnp.float32, *, keep: Keep = "all") -> KVCache:
    """A cache without tokens.

    Args:
        geometry: layers of the model.
        batch: sequences ``B``.
        slots: room in tokens.
        dtype: of keys and values.
        keep: ``"window"`` gives each sliding-window layer a ring of only its window (where that is fewer slots);
            ``"all"`` gives every layer all slots, as the source of a hand-off needs.

    Raises:
        KvxError: negative sizes or an unknown ``keep``.

    Example:
        >>> from kvx.cache.geometry import LayerGeometry
        >>> geometry = CacheGeometry((LayerGeometry(1, 4, 4, window=8), LayerGeometry(1, 4, 4)))
        >>> [(g.layers, g.slots, g.ring) for g in empty(geometry, 2, 32, keep="window").groups]
        [((0,), 8, True), ((1,), 32, False)]
        >>> [(g.layers, g.slots) for g in empty(geometry, 2, 32).groups]
        [((0, 1), 32)]
    """
    check_geometry(geometry)
    if keep not in ("all", "window"):
        raise KvxError(f"keep is {keep!r}; expected 'all' or 'window'.")
    if batch < 1 or slots < 0:
        raise KvxError(f"a cache needs at least one row and no negative slot count; got batch {batch}, slots {slots}.")
    members: dict[tuple[tuple[int, int, int], int, bool], list[int]] = {}
    for i, layer in enumerate(geometry.layers):
        ring = keep == "window" and layer.window is not None and layer.window < slots
        size = layer.window if ring and layer.window is not None else slots
        members.setdefault((layer.shapes, size, ring), []).append(i)
    groups = []
    for ((heads, key_dim, value_dim), size, ring), layers in members.items():
        shape = (len(layers), batch, heads, size)
        k, v = jnp.zeros((*shape, key_dim), dtype), jnp.zeros((*shape, value_dim), dtype)
        pos = jnp.full((1, batch, 1, size), -1, jnp.int32)
        groups.append(CacheGroup(k, v, pos, jnp.zeros((batch,), jnp.int32), tuple(layers), ring))
    return KVCache(tuple(groups), False, geometry)


def check(cache: KVCache) -> KVCache:
    """Return the cache if it is well formed; positions are examined only when they are concrete.

    Raises:
        KvxError: naming the first layer and fact that is wrong.

    Example:
        >>> from kvx.cache.geometry import LayerGeometry
        >>> check(empty(CacheGeometry((LayerGeometry(1, 4, 4),)), 1, 3)).batch
        1
    """
    held = sorted(i for group in cache.groups for i in group.layers)
    if held != list(range(cache.num_layers)):
        raise KvxError(f"groups hold layers {held}; expected each of the geometry's {cache.num_layers} layers once.")
    for group in cache.groups:
        _check_group(group, cache.geometry, cache.groups[0].k.shape[1] if cache.groups[0].k.ndim == 5 else 0)
        check_positions(group.pos, f"layers {group.layers}")
    return cache


def check_geometry(geometry: CacheGeometry) -> CacheGeometry:
    """Return the geometry if it can be part of a compiled program: plain numbers and tuples all the way down.

    Raises:
        KvxError: it is not hashable (an array or a list in it: the second jitted call would fail).
    """
    try:
        hash(geometry)
    except TypeError as error:
        raise KvxError(
            f"the geometry is not hashable ({error}); expected plain numbers and tuples: convert arrays with int() or "
            "float(), lists with tuple()."
        ) from None
    return geometry


def _check_group(group: CacheGroup, geometry: CacheGeometry, batch: int) -> None:
    name, slots = f"layers {group.layers}", group.k.shape[3] if group.k.ndim == 5 else 0
    for i in group.layers:
        heads, key_dim, value_dim = geometry.layers[i].shapes
        for what, x, width in (("keys", group.k, key_dim), ("values", group.v, value_dim)):
            expected = (len(group.layers), batch, heads, slots, width)
            if x.shape != expected:
                raise KvxError(
                    f"{what} of layer {i} are stacked as {x.shape}; expected [L,B,K,T,D] = {expected} by the geometry; "
                    "convert other layouts with kvx.cache.layouts."
                )
            if not jnp.issubdtype(x.dtype, jnp.floating):
                raise KvxError(f"{what} of layer {i} have dtype {x.dtype}; expected a floating type.")
    layers, heads = len(group.layers), group.k.shape[2]
    wanted = [(a, batch, b, slots) for a in (1, layers) for b in (1, heads)]
    if group.pos.shape not in wanted or group.pos.dtype != jnp.int32:
        raise KvxError(f"positions of {name} are {group.pos.dtype}{group.pos.shape}; expected int32, one of {wanted}.")
    if group.next.shape != (batch,) or group.next.dtype != jnp.int32:
        raise KvxError(f"next of {name} is {group.next.dtype}{group.next.shape}; expected int32[{batch}].")


def check_positions(pos: Array, name: str) -> None:
    """Raise when a row of concrete positions holds a number below -1, or one position twice."""
    seen = concrete(pos)
    if seen is None or not seen.size:
        return
    if seen.min() < -1:
        raise KvxError(f"positions of {name} go down to {seen.min()}; expected -1 (empty) or more.")
    rows = np.sort(seen.reshape(-1, seen.shape[-1]), axis=-1)
    twice = (rows[:, 1:] == rows[:, :-1]) & (rows[:, 1:] >= 0)
    if twice.any():
        row, slot = np.argwhere(twice)[0]
        raise KvxError(
            f"position {rows[row, slot]} is held twice in {name}; a cache holds each position once: shift one part "
            "with kvx.cache.ops.shift_positions, or drop it with crop."
        )
