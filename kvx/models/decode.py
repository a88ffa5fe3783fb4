"""Steps against a frozen, already rotated past: what generation spends its time in."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvx.cache.cache import KVCache, LayerView
from kvx.cache.ops import append, blank, rotate_keys
from kvx.models.decoder import (
    layer_facts,
    layer_weights,
    read,
    rope_angles,
    scannable,
    scanned_angles,
    stacked,
)
from kvx.models.layers import Weights, embed, enter, leave, norm
from kvx.models.model import Model
from kvx.typing import pytree

Column = Any  # one array [B,K,N,D] per layer in a tuple, or all layers stacked [L,B,K,N,D]
Past = Any  # one LayerView per layer in a tuple, or a single one whose arrays are stacked [L,...]


@pytree
class Fresh:
    """Keys and values of everything read since generation began; column i of every row belongs to step i.

    Attributes:
        k: keys as the cache keeps them, per layer ``[B,K,N,D]`` or one array ``[L,B,K,N,D]``.
        turned: rotated keys, ``None`` where that is the same thing.
        v: values.
        pos: int32 ``[B,N]``, -1 where nothing stands.
    """

    k: Column
    turned: Column | None
    v: Column
    pos: Array

    @property
    def rotated(self) -> Column:
        """Keys to attend to."""
        return self.k if self.turned is None else self.turned


def freeze(model: Model, cache: KVCache) -> Past:
    """A cache laid out for decoding: keys rotated, once; empty slots zero; the model's dtype.

    It is read at every step and never written, so nothing of it is copied from step to step.

    Args:
        model: the decoder.
        cache: what generation starts from.

    Returns:
        One view per layer, or (scanned layers) a single view whose arrays are stacked ``[L,...]``.
    """
    cache = rotate_keys(blank(cache))
    cast = jax.tree.map(lambda x: x.astype(model.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, cache)
    if model.stacked and scannable(model.config, cache):
        group = cast.groups[0]
        return LayerView(group.k, group.v, group.pos)
    return tuple(cast.layer(i) for i in range(model.config.num_layers))


def room(model: Model, cache: KVCache | None, batch: int, columns: int) -> Fresh:
    """Empty :class:`Fresh` for that many tokens a row after ``cache``."""
    c = model.config
    shape = (batch, c.kv_heads, columns, c.head_dim)
    scanned = model.stacked and scannable(c, cache)

    def zeros() -> Column:
        if scanned:
            return jnp.zeros((c.num_layers, *shape), model.dtype)
        return tuple(jnp.zeros(shape, model.dtype) for _ in range(c.num_layers))

    same = c.learned_positions or (cache is not None and cache.rotated)
    return Fresh(zeros(), None if same else zeros(), zeros(), jnp.full((batch, columns), -1, jnp.int32))


def extend(
    model: Model,
    past: Past | None,
    fresh: Fresh,
    column: Int[Array, ""] | int,
    tokens: Int[Array, "B T"],
    pos: Int[Array, "B T"],
    *,
    first: bool = False,
    ordered: bool = False,
) -> tuple[Float[Array, "B T M"], Fresh]:
    """Run tokens through the decoder: write their columns of ``fresh``, attend to ``past`` and ``fresh``.

    Args:
        model: the decoder.
        past: the frozen cache, ``None`` when there is none.
        fresh: what was read since.
        column: where the first of the tokens goes.
        tokens, pos: int32 ``[B,T]``; -1 for padding and for rows that have stopped.
        first: ``fresh`` is still empty, so the tokens need only see themselves.
        ordered: positions rise (used with ``first``).

    Returns:
        hidden states ``[B,T,M]`` after the final norm, and ``fresh`` with the columns.
    """
    at = jax.lax.dynamic_update_slice(fresh.pos, pos, (jnp.int32(0), jnp.int32(column)))
    fresh = Fresh(fresh.k, fresh.turned, fresh.v, at)
    x = embed(model.config, model.params, tokens, pos)
    chunk = _Chunk(pos, jnp.int32(column), first, ordered and first)
    x, fresh = (_unrolled if isinstance(fresh.v, tuple) else _scanned)(model, past, fresh, chunk, x)
    return norm(model.config, model.params["final_norm"], x), fresh


class _Chunk(NamedTuple):
    """What all layers know about the tokens they run."""

    pos: Array
    column: Array
    first: bool
    ordered: bool


def _put(buffer: Array, columns: Array, at: Array) -> Array:
    """Write columns ``[...,T,D]`` into ``[...,N,D]``, in place inside a loop."""
    zero = jnp.int32(0)
    return jax.lax.dynamic_update_slice(buffer, columns, (*(zero,) * (buffer.ndim - 2), at, zero))


def _unrolled(
    model: Model, past: tuple[LayerView, ...] | None, fresh: Fresh, chunk: _Chunk, x: Array
) -> tuple[Array, Fresh]:
    c = model.config
    memo = {rope: rope_angles(rope, chunk.pos[:, None]) for rope in set(c.ropes)}
    ks, turns, vs = [], [], []
    for i, w in enumerate(layer_weights(model)):
        rope = c.ropes[i]
        q, k, turned, v = enter(c, w, x, memo[rope], rope is not None and rope.interleaved)
        turns.append(_put(fresh.rotated[i], turned, chunk.column))
        vs.append(_put(fresh.v[i], v, chunk.column))
        ks.append(turns[-1] if fresh.turned is None else _put(fresh.k[i], k, chunk.column))
        parts = [] if past is None else [past[i]]
        own = LayerView(turned, v, chunk.pos[:, None])
        parts.append(own if chunk.first else LayerView(turns[-1], vs[-1], fresh.pos[:, None]))
        x = leave(c, w, x, read(c, q, parts, chunk.pos, c.windows[i], ordered=chunk.ordered, clean=True))
    return x, Fresh(tuple(ks), None if fresh.turned is None else tuple(turns), tuple(vs), fresh.pos)


def _scanned(model: Model, past: LayerView | None, fresh: Fresh, chunk: _Chunk, x: Array) -> tuple[Array, Fresh]:
    """The scan reads each layer's buffers and gives back only the new columns, which are then written in one go."""
    c = model.config
    interleaved = c.ropes[0] is not None and c.ropes[0].interleaved
    own = {"turned": fresh.rotated, "v": fresh.v}
    if past is not None:
        own |= {"past_k": past.k, "past_v": past.v} | ({"past_pos": past.pos} if past.pos.shape[0] > 1 else {})

    def step(x: Array, scanned: tuple[Weights, dict[str, Array], dict[str, Array]]) -> tuple[Array, tuple[Array, ...]]:
        w, facts, mine = scanned
        q, k, turned, v = enter(c, w, x, scanned_angles(facts, chunk.pos[:, None]), interleaved)
        parts = [LayerView(turned, v, chunk.pos[:, None])]
        if not chunk.first:
            keys, values = _put(mine["turned"], turned, chunk.column), _put(mine["v"], v, chunk.column)
            parts = [LayerView(keys, values, fresh.pos[:, None])]
        if past is not None:
            parts = [LayerView(mine["past_k"], mine["past_v"], mine.get("past_pos", past.pos[0])), *parts]
        heads = read(c, q, parts, chunk.pos, facts.get("window"), ordered=chunk.ordered, clean=True)
        return leave(c, w, x, heads), (turned if fresh.turned is None else k, turned, v)

    facts: Any = {name: jnp.asarray(value) for name, value in layer_facts(c).items()}
    x, (k, turned, v) = jax.lax.scan(step, x, (model.params["layers"], facts, own))
    rotated = None if fresh.turned is None else _put(fresh.turned, turned, chunk.column)
    return x, Fresh(_put(fresh.k, k, chunk.column), rotated, _put(fresh.v, v, chunk.column), fresh.pos)


def thaw(cache: KVCache, fresh: Fresh) -> KVCache:
    """The cache with everything read since appended (it must have the room)."""
    layers = [group.layers for group in cache.groups]
    k, v = ([stacked(column, own) for own in layers] for column in (fresh.k, fresh.v))
    return append(cache, k, v, fresh.pos)
