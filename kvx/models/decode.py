"""One-token steps against a frozen, already rotated past: what generation spends its time in."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvx.cache.build import blank
from kvx.cache.cache import KVCache, LayerView
from kvx.cache.write import append
from kvx.models.decoder import (
    layer,
    layer_facts,
    layer_weights,
    rope_angles,
    rotated_view,
    scannable,
    scanned_angles,
    stacked,
)
from kvx.models.layers import Angles, Weights, embed, norm
from kvx.models.model import Model
from kvx.typing import pytree

Column = Array | tuple[Array, ...]  # per layer [B,K,N,D], or all layers stacked [L,B,K,N,D]


@pytree
class Fresh:
    """Keys and values of the tokens generated so far, in step order; step i writes column i of every row.

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


Past = LayerView | tuple[LayerView, ...]


def freeze(model: Model, cache: KVCache) -> Past:
    """A cache laid out for decoding: keys rotated, once; empty slots zero; the model's dtype.

    It is read at every step and never written, so nothing of it is copied from step to step.

    Args:
        model: the decoder.
        cache: what generation starts from.

    Returns:
        One view per layer, or (scanned layers) a single view whose arrays are stacked ``[L,...]``.
    """
    c, cache = model.config, blank(cache)
    memo: dict[Any, Angles] = {}
    views = [rotated_view(cache, i, rope, memo) for i, rope in enumerate(c.ropes)]
    views = [LayerView(view.k.astype(model.dtype), view.v.astype(model.dtype), view.pos) for view in views]
    if not (model.stacked and scannable(c, cache)):
        return tuple(views)
    k, v = jnp.stack([view.k for view in views]), jnp.stack([view.v for view in views])
    return LayerView(k, v, cache.groups[0].pos)


def room(model: Model, cache: KVCache, past: Past, steps: int) -> Fresh:
    """Empty :class:`Fresh` for ``steps`` tokens after ``cache``, laid out as ``past`` is."""
    c = model.config

    def zeros(width: int) -> Column:
        shape = (cache.batch, c.kv_heads, steps, width)
        if isinstance(past, LayerView):
            return jnp.zeros((c.num_layers, *shape), model.dtype)
        return tuple(jnp.zeros(shape, model.dtype) for _ in range(c.num_layers))

    same = c.learned_positions or cache.rotated
    pos = jnp.full((cache.batch, steps), -1, jnp.int32)
    return Fresh(zeros(c.head_dim), None if same else zeros(c.head_dim), zeros(c.head_dim), pos)


def decode_step(
    model: Model, past: Past, fresh: Fresh, step: Int[Array, ""], tokens: Int[Array, B], pos: Int[Array, B]
) -> tuple[Float[Array, "B M"], Fresh]:
    """Run one token per row.

    Args:
        model: the decoder.
        past: what was there before generation began.
        fresh: what the steps before this one have written.
        step: number of this step: the column to write.
        tokens, pos: int32 ``[B]``; -1 for rows that have stopped.

    Returns:
        hidden states ``[B,M]`` after the final norm, and ``fresh`` with this step's column.
    """
    at = pos[:, None]
    x = embed(model.config, model.params, tokens[:, None], at)
    run = _scanned_step if isinstance(past, LayerView) else _unrolled_step
    x, k, turned, v = run(model, past, fresh, x, at)

    def put(buffer: Column, column: Column) -> Column:
        return jax.tree.map(lambda b, c: _put(b, c, step), buffer, column)

    turned = None if fresh.turned is None else put(fresh.turned, turned)
    where = jax.lax.dynamic_update_slice(fresh.pos, at, (jnp.int32(0), step))
    hidden = norm(model.config, model.params["final_norm"], x)[:, 0]
    return hidden, Fresh(put(fresh.k, k), turned, put(fresh.v, v), where)


def _put(buffer: Array, column: Array, step: Array) -> Array:
    """Write one column ``[...,1,D]`` of ``[...,N,D]``, in place inside a loop."""
    zero = jnp.int32(0)
    return jax.lax.dynamic_update_slice(buffer, column, (*(zero,) * (buffer.ndim - 2), step, zero))


def _unrolled_step(
    model: Model, past: tuple[LayerView, ...], fresh: Fresh, x: Array, pos: Array
) -> tuple[Array, Column, Column, Column]:
    c = model.config
    memo = {rope: rope_angles(rope, pos[:, None]) for rope in set(c.ropes)}
    columns: list[tuple[Array, Array, Array]] = []
    for i, w in enumerate(layer_weights(model)):
        rope = c.ropes[i]
        own = LayerView(fresh.rotated[i], fresh.v[i], fresh.pos[:, None])
        interleaved = rope is not None and rope.interleaved
        x, k, turned, v, _ = layer(
            c, w, x, pos, [past[i], own], memo[rope], window=c.windows[i], interleaved=interleaved, clean=True
        )
        columns.append((turned if fresh.turned is None else k, turned, v))
    k, turned, v = (tuple(column) for column in zip(*columns, strict=True))
    return x, k, turned, v


def _scanned_step(
    model: Model, past: LayerView, fresh: Fresh, x: Array, pos: Array
) -> tuple[Array, Column, Column, Column]:
    c = model.config
    interleaved = c.ropes[0] is not None and c.ropes[0].interleaved
    shared = past.pos.shape[0] == 1

    def step(x: Array, scanned: tuple[Weights, dict[str, Array], tuple[Array, ...]]) -> tuple[Array, tuple]:
        w, facts, (k, v, turned, values, *own) = scanned
        parts = [LayerView(k, v, past.pos[0] if shared else own[0]), LayerView(turned, values, fresh.pos[:, None])]
        x, k, turned, v, _ = layer(
            c,
            w,
            x,
            pos,
            parts,
            scanned_angles(facts, pos[:, None]),
            window=facts.get("window"),
            interleaved=interleaved,
            clean=True,
        )
        return x, (turned if fresh.turned is None else k, turned, v)

    own = (past.k, past.v, fresh.rotated, fresh.v) if shared else (past.k, past.v, fresh.rotated, fresh.v, past.pos)
    facts = {name: jnp.asarray(value) for name, value in layer_facts(c).items()}
    x, columns = jax.lax.scan(step, x, (model.params["layers"], facts, own))
    return x, *columns


def thaw(cache: KVCache, fresh: Fresh) -> KVCache:
    """The cache with everything generated appended (it must have the room)."""
    layers = [group.layers for group in cache.groups]
    k, v = ([stacked(column, own) for own in layers] for column in (fresh.k, fresh.v))
    return append(cache, k, v, fresh.pos)
