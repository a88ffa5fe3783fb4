"""Checked, padded input of one forward pass: what is worth knowing before tracing is settled here, on the host."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvx.cache.build import Keep, concrete
from kvx.cache.cache import CacheGroup, KVCache
from kvx.errors import KvxError
from kvx.models.buckets import bucket_length
from kvx.models.config import ModelConfig
from kvx.models.model import Model
from kvx.typing import pytree, static


@pytree
class Request:
    """Tokens that continue a cache; build with :func:`request`, which validates.

    Attributes:
        tokens: int32 ``[B,T]``, -1 for padding.
        positions: int32 ``[B,T]``, or ``None``: counted on after the cache.
        cache: what came before, or ``None``.
        keep: how a new cache treats window layers.
        capacity: slots of a new cache.
        grow: slots to add to each group of the given cache.
        packed: padding stands on the right only, so that a new cache needs no closing up.
        ordered: positions rise along each row, so that keys behind a query's block need no look.
    """

    tokens: Array
    positions: Array | None
    cache: KVCache | None
    keep: Keep = static(default="all")
    capacity: int = static(default=0)
    grow: tuple[int, ...] = static(default=())
    packed: bool = static(default=False)
    ordered: bool = static(default=True)


def request(
    model: Model,
    tokens: Any,
    cache: KVCache | None = None,
    positions: Any = None,
    *,
    keep: Keep = "all",
    capacity: int | None = None,
    extra: int = 0,
    bucketed: bool = True,
) -> Request:
    """Check the input and, when it is concrete, pad it to its bucket.

    Args:
        model: the decoder.
        tokens: int ``[B,T]``; -1 is padding.
        cache: what came before.
        positions: int ``[B,T]``, -1 at padding.
        keep: ``"all"`` or ``"window"``, for a new cache.
        capacity: slots the cache shall have afterwards, ``None``: what is needed.
        extra: room for that many tokens more.
        bucketed: pad concrete tokens to :func:`bucket_length`.

    Returns:
        The request.

    Raises:
        KvxError: anything that does not fit the model.
    """
    c = model.config
    tokens, positions = _integers("tokens", tokens), None if positions is None else _integers("positions", positions)
    check_fit(c, tokens, cache, positions)
    seen, at = concrete(tokens), None if positions is None else concrete(positions)
    if keep not in ("all", "window"):
        raise KvxError(f"keep is {keep!r}; expected 'all' or 'window'.")
    real = tokens.shape[1] if seen is None else int((seen >= 0).sum(axis=1).max(initial=0))
    if seen is not None:
        _check_ids(c, seen, at)
        _check_reach(c, cache, real, at)
    length = bucket_length(tokens.shape[1]) if bucketed and seen is not None else tokens.shape[1]
    tokens = _pad(tokens, length)
    ordered = positions is None or (at is not None and bool(_rising(at)))
    positions = None if positions is None else _pad(positions, length)
    bucketed = bucketed and seen is not None
    if cache is not None:
        grow = tuple(_growth(group, capacity, real + extra, bucketed) for group in cache.groups)
        return Request(tokens, positions, cache, keep, grow=grow, ordered=ordered)
    slots = _new_slots(capacity, real + extra, length if not extra else 0, bucketed)
    packed = seen is not None and bool((np.diff((seen >= 0).astype(np.int8), axis=1) <= 0).all())
    return Request(tokens, positions, None, keep, slots, packed=packed, ordered=ordered)


def grown(made: Request) -> KVCache | None:
    """The request's cache with room for all that is to be written."""
    if made.cache is None or not any(made.grow):
        return made.cache
    pairs = zip(made.cache.groups, made.grow, strict=True)
    groups = tuple(_add_slots(group, more) if more else group for group, more in pairs)
    return dataclasses.replace(made.cache, groups=groups)


def _add_slots(group: CacheGroup, more: int) -> CacheGroup:
    room = [(0, 0)] * 3 + [(0, more)]
    k, v = jnp.pad(group.k, [*room, (0, 0)]), jnp.pad(group.v, [*room, (0, 0)])
    return dataclasses.replace(group, k=k, v=v, pos=jnp.pad(group.pos, room, constant_values=-1))


def _integers(name: str, x: Any) -> Array:
    x = _on_host(x) if hasattr(x, "dtype") else np.asarray(x)
    if x.ndim != 2 or not jnp.issubdtype(x.dtype, jnp.integer) or x.shape[1] == 0:
        raise KvxError(f"{name} are {x.dtype}{tuple(x.shape)}; expected integers [batch, tokens], at least one token.")
    return x.astype(np.int32)


def _on_host(x: Any) -> Any:
    """Ids that lie whole on one device, as numpy: padding them on the device would compile once for every length."""
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array) or len(x.sharding.device_set) > 1:
        return x
    return np.asarray(x)


def check_fit(c: ModelConfig, tokens: Array, cache: KVCache | None, positions: Array | None) -> None:
    """Refuse positions or a cache that do not go with the tokens or the model.

    Raises:
        KvxError: saying which.
    """
    if positions is not None and positions.shape != tokens.shape:
        raise KvxError(f"positions {positions.shape} and tokens {tokens.shape} differ in shape; give one per token.")
    if any(rope is not None and rope.kind == "dynamic" and rope.length is None for rope in c.ropes):
        raise KvxError(
            "this model's dynamic NTK RoPE depends on the sequence length; record the longest length first: "
            "model = model.at_length(tokens)."
        )
    if cache is None:
        return
    if cache.batch != tokens.shape[0]:
        raise KvxError(f"the cache holds {cache.batch} sequences and the tokens {tokens.shape[0]}; expected as many.")
    mine, theirs = c.geometry, cache.geometry
    if [layer.shapes for layer in mine.layers] != [layer.shapes for layer in theirs.layers]:
        raise KvxError(
            f"this cache is not the model's: {theirs.num_layers} layers of (heads, key, value) {_kinds(theirs)}, not "
            f"{mine.num_layers} of {_kinds(mine)}; translate it first."
        )
    if cache.rotated and [layer.rope for layer in mine.layers] != [layer.rope for layer in theirs.layers]:
        raise KvxError("this cache holds keys rotated with other RoPE facts than the model's; un-rotate them first.")


def _kinds(geometry: Any) -> str:
    return ", ".join(str(kind) for kind in sorted({layer.shapes for layer in geometry.layers}))


def _check_ids(c: ModelConfig, seen: np.ndarray, at: np.ndarray | None) -> None:
    if seen.max() >= c.vocab_size or seen.min() < -1:
        raise KvxError(
            f"token ids run from {seen.min()} to {seen.max()}; this model knows 0..{c.vocab_size - 1} (-1: padding). "
            "Were they made by another model's tokenizer?"
        )
    if at is not None and ((at < 0) & (seen >= 0)).any():
        raise KvxError("a real token has a negative position; expected positions from 0, and -1 at padding only.")


def _check_reach(c: ModelConfig, cache: KVCache | None, real: int, at: np.ndarray | None) -> None:
    """Learned positions end with their table."""
    if not c.learned_positions:
        return
    start = None if cache is None else concrete(cache.groups[0].pos)
    if cache is not None and start is None:
        return
    last = int(at.max()) if at is not None else real - 1 + (0 if start is None else int(start.max(initial=-1)) + 1)
    if last >= c.max_positions:
        raise KvxError(
            f"position {last} is beyond this model's {c.max_positions} learned positions; shorten the context."
        )


def _rising(at: np.ndarray) -> np.bool_:
    """Whether positions rise from real token to real token in every row."""
    top = np.maximum.accumulate(np.where(at >= 0, at, -1), axis=1)
    return ((at[:, 1:] < 0) | (at[:, 1:] > top[:, :-1])).all()


def _pad(x: Array, length: int) -> Array:
    more = length - x.shape[1]
    pad = np.pad if isinstance(x, np.ndarray) else jnp.pad
    return jnp.asarray(pad(x, ((0, 0), (0, more)), constant_values=-1)) if more else jnp.asarray(x)


def _new_slots(capacity: int | None, need: int, length: int, bucketed: bool) -> int:
    """Slots of a new cache for ``need`` real tokens, in an array of ``length``."""
    if capacity is None:
        return max(length, bucket_length(need) if bucketed else need)
    return _enough(capacity, need)


def _growth(group: CacheGroup, capacity: int | None, tokens: int, bucketed: bool) -> int:
    """Slots to add to one group so that ``tokens`` more fit."""
    written = concrete(group.next)
    if group.ring:
        return 0
    if written is None:
        return tokens if capacity is None else max(capacity - group.slots, 0)
    need = int(written.max(initial=0)) + tokens
    if capacity is None:
        capacity = bucket_length(need) if bucketed and need > group.slots else need
    return max(_enough(capacity, need) - group.slots, 0)


def _enough(capacity: int, need: int) -> int:
    if capacity < need:
        raise KvxError(f"capacity {capacity} is too small for {need} tokens; give at least that.")
    return capacity
