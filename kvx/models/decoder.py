"""The decoder: tokens and a cache in, hidden states and the longer cache out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvx.cache.build import Keep, empty
from kvx.cache.cache import CacheGroup, KVCache, LayerView
from kvx.cache.geometry import RopeSpec
from kvx.cache.rope import cos_sin, frequencies
from kvx.cache.write import append
from kvx.models.attention import attend
from kvx.models.config import ModelConfig
from kvx.models.layers import Angles, Weights, embed, enter, leave, norm, turn
from kvx.models.model import Model
from kvx.models.request import Request, grown, request
from kvx.typing import pytree

Stack = Array | Sequence[Array]  # one array per layer, or all stacked [L,...]
_UNLIMITED = 1 << 30  # a window that no context reaches


@pytree
class Forward:
    """What one pass over a chunk of tokens gives.

    Attributes:
        hidden: ``[B,T,M]`` after the final norm; what stands at padding is finite and means nothing.
        cache: the cache with the chunk appended.
        queries: rotated ``[L,B,H,T,D]``, or ``None`` when not collected.
    """

    hidden: Float[Array, "B T M"]
    cache: KVCache
    queries: Array | None = None


def forward(
    model: Model,
    tokens: Int[Array, "B T"] | np.ndarray,
    cache: KVCache | None = None,
    *,
    positions: Int[Array, "B T"] | np.ndarray | None = None,
    keep: Keep = "all",
    capacity: int | None = None,
    collect_queries: bool = False,
    remat: bool = False,
) -> Forward:
    """Run the decoder over a chunk of tokens that continues a cache.

    Every token attends to the cache and to the chunk's tokens at its own position or before; then the chunk is
    written. Differentiable with respect to the model and the cache. Lengths are taken as they are (no buckets).

    Args:
        model: the decoder.
        tokens: int ``[B,T]``; -1 (anywhere) is padding.
        cache: what came before, or ``None``.
        positions: int ``[B,T]``, -1 at padding; by default real tokens are counted on after ``cache.next_position()``.
        keep: for a new cache: ``"all"`` tokens, or ``"window"``: window layers keep only their window (a ring).
        capacity: slots of the returned cache (rings aside); by default as many as are needed, and no fewer than the
            given cache has. A traced cache grows by ``T``, since nobody can see how full it is.
        collect_queries: return every layer's queries.
        remat: keep only what enters each layer for the gradient, and compute the rest again.

    Returns:
        hidden states, cache and queries.

    Raises:
        KvxError: shapes, batch, geometry or token ids that do not fit the model, or no room within ``capacity``.

    Example:
        >>> import jax.numpy as jnp
        >>> from kvx.models.random_model import random_model
        >>> out = forward(random_model(), jnp.array([[5, 6, -1], [7, 8, 9]]), collect_queries=True)
        >>> out.hidden.shape, out.cache.next_position().tolist(), out.queries.shape
        ((2, 3, 32), [2, 3], (2, 2, 4, 3, 8))
    """
    made = request(model, tokens, cache, positions, keep=keep, capacity=capacity, bucketed=False)
    return run(model, made, collect_queries=collect_queries, remat=remat)


@partial(jax.jit, static_argnames=("collect_queries", "remat"))
def run(model: Model, made: Request, *, collect_queries: bool = False, remat: bool = False) -> Forward:
    """:func:`forward` of a checked request, compiled."""
    c, cache = model.config, grown(made)
    pos = resolve_positions(made)
    x = embed(c, model.params, made.tokens, pos)
    layers = _scanned if model.stacked and scannable(c, cache) else _unrolled
    x, keys, values, queries = layers(model, x, pos, cache, made.ordered, remat)
    hidden = norm(c, model.params["final_norm"], x)
    after = _start(c, made, pos, keys, values) if cache is None else _append(cache, keys, values, pos)
    return Forward(hidden, after, stacked(queries) if collect_queries else None)


def resolve_positions(made: Request) -> Int[Array, "B T"]:
    """The request's positions, or real tokens counted on after the cache; -1 at padding.

    They are kept as an array of their own: without the barrier, compilers count again inside every layer's kernels.
    """
    real = made.tokens >= 0
    if made.positions is not None:
        return jax.lax.optimization_barrier(jnp.where(real, made.positions, -1))
    start = jnp.zeros((made.tokens.shape[0],), jnp.int32) if made.cache is None else made.cache.next_position()
    counted = start[:, None] + jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1
    return jax.lax.optimization_barrier(jnp.where(real, counted, -1))


def read(
    c: ModelConfig,
    q: Array,
    parts: Sequence[LayerView],
    pos: Array,
    window: int | Array | None,
    *,
    ordered: bool = False,
    clean: bool = False,
) -> Float[Array, "B H T D"]:
    """:func:`kvx.models.attention.attend` with the model's own score scale and soft cap."""
    scale, softcap = c.score_scale, c.attn_softcap
    return attend(q, parts, pos, scale=scale, window=window, softcap=softcap, ordered=ordered, clean=clean)


def layer_weights(model: Model) -> Sequence[Weights]:
    """Weights of each layer, whichever way they are kept."""
    layers = model.params["layers"]
    if not model.stacked:
        return layers
    return [jax.tree.map(lambda leaf, i=i: leaf[i], layers) for i in range(model.config.num_layers)]


def rope_angles(rope: RopeSpec | None, pos: Int[Array, "B K T"]) -> Angles:
    """Cosines and sines of one layer's rotation at the given positions."""
    if rope is None:
        return None
    return jax.lax.optimization_barrier(cos_sin(pos, frequencies(rope), rope.attention_factor))


def rotated_view(cache: KVCache, index: int, rope: RopeSpec | None, memo: dict[Any, Angles]) -> LayerView:
    """One layer of a cache with rotated keys; ``memo`` keeps angles that layers share."""
    view = cache.layer(index)
    if cache.rotated or rope is None:
        return view
    group, at = cache.locate(index)
    key = (group, rope, at if cache.groups[group].pos.shape[0] > 1 else 0)
    if key not in memo:
        memo[key] = rope_angles(rope, view.pos)
    return LayerView(turn(view.k, memo[key], rope.interleaved), view.v, view.pos)


def _unrolled(
    model: Model, x: Array, pos: Array, cache: KVCache | None, ordered: bool, remat: bool
) -> tuple[Array, Stack, Stack, Stack]:
    """A Python loop over layers: any mixture of groups, shapes and RoPE kinds."""
    c = model.config
    memo: dict[Any, Angles] = {}
    keys, values, queries = [], [], []
    for i, w in enumerate(layer_weights(model)):
        rope = c.ropes[i]
        if rope not in memo:
            memo[rope] = rope_angles(rope, pos[:, None])
        past = [] if cache is None else [rotated_view(cache, i, rope, memo)]

        def layer(
            x: Array, past: list[LayerView], w: Weights = w, rope: RopeSpec | None = rope, i: int = i
        ) -> tuple[Array, Array, Array, Array, Array]:
            q, k, turned, v = enter(c, w, x, memo[rope], rope is not None and rope.interleaved)
            parts = [*past, LayerView(turned, v, pos[:, None])]
            return leave(c, w, x, read(c, q, parts, pos, c.windows[i], ordered=ordered)), q, k, turned, v

        x, q, k, turned, v = (jax.checkpoint(layer) if remat else layer)(x, past)
        keys.append(turned if cache is not None and cache.rotated else k)
        values.append(v)
        queries.append(q)
    return x, keys, values, queries


def scannable(c: ModelConfig, cache: KVCache | None) -> bool:
    """One compiled layer serves all: one group, and RoPE of one shape."""
    shapes = {None if rope is None else (rope.dim, rope.interleaved) for rope in c.ropes}
    return len(shapes) == 1 and (cache is None or len(cache.groups) == 1)


def layer_facts(c: ModelConfig) -> dict[str, np.ndarray]:
    """Per-layer numbers that a scan over layers feeds in: windows, frequencies, attention factors (absent: unused)."""
    facts = {}
    if any(c.windows):
        facts["window"] = np.array([w or _UNLIMITED for w in c.windows], np.int32)
    ropes = [rope for rope in c.ropes if rope is not None]
    if ropes:
        facts["inv_freq"] = np.stack([frequencies(rope) for rope in ropes])
        facts["factor"] = np.array([rope.attention_factor for rope in ropes], np.float32)
    return facts


def scanned_angles(facts: dict[str, Array], pos: Int[Array, "B K T"]) -> Angles:
    """Cosines and sines of the scanned layer's rotation."""
    return cos_sin(pos, facts["inv_freq"], facts["factor"]) if "inv_freq" in facts else None


def _scanned(
    model: Model, x: Array, pos: Array, cache: KVCache | None, ordered: bool, remat: bool
) -> tuple[Array, Stack, Stack, Stack]:
    """One layer compiled once and scanned over the stacked weights."""
    c = model.config
    interleaved = c.ropes[0] is not None and c.ropes[0].interleaved
    group = None if cache is None else cache.groups[0]
    rotated = cache is not None and cache.rotated

    def step(x: Array, scanned: tuple[Weights, dict[str, Array], Any]) -> tuple[Array, tuple[Array, Array, Array]]:
        w, facts, own = scanned
        past = []
        if group is not None:
            view = LayerView(own[0], own[1], own[2] if len(own) > 2 else group.pos[0])
            k = view.k if rotated else turn(view.k, scanned_angles(facts, view.pos), interleaved)
            past = [LayerView(k, view.v, view.pos)]
        q, k, turned, v = enter(c, w, x, scanned_angles(facts, pos[:, None]), interleaved)
        parts = [*past, LayerView(turned, v, pos[:, None])]
        x = leave(c, w, x, read(c, q, parts, pos, facts.get("window"), ordered=ordered))
        return x, (turned if rotated else k, v, q)

    facts = {name: jnp.asarray(value) for name, value in layer_facts(c).items()}
    if remat:
        step = jax.checkpoint(step, prevent_cse=False)
    x, (keys, values, queries) = jax.lax.scan(step, x, (model.params["layers"], facts, _own(group)))
    return x, keys, values, queries


def _own(group: CacheGroup | None) -> tuple[Array, ...]:
    """What each layer of a group does not share with the others."""
    if group is None:
        return ()
    return (group.k, group.v, group.pos) if group.pos.shape[0] > 1 else (group.k, group.v)


def stacked(arrays: Stack, layers: Sequence[int] | None = None) -> Array:
    """The given layers (all of them by default) stacked ``[L,...]``."""
    if isinstance(arrays, jax.Array):
        return arrays if layers is None or len(layers) == arrays.shape[0] else arrays[np.array(layers)]
    return jnp.stack([arrays[i] for i in (range(len(arrays)) if layers is None else layers)])


def _append(cache: KVCache, keys: Stack, values: Stack, pos: Array) -> KVCache:
    layers = [group.layers for group in cache.groups]
    return append(cache, [stacked(keys, own) for own in layers], [stacked(values, own) for own in layers], pos)


def _start(c: ModelConfig, made: Request, pos: Array, keys: Stack, values: Stack) -> KVCache:
    """A new cache from the first chunk."""
    dtype = keys[0].dtype
    cache = empty(c.geometry, made.tokens.shape[0], made.capacity, dtype, keep=made.keep)
    if not made.packed or any(group.ring for group in cache.groups):
        return _append(cache, keys, values, pos)
    size = made.capacity
    where = _fit(pos[:, None], size, 2, -1)[None]
    filled = (where >= 0)[..., None]
    count = (pos >= 0).sum(axis=1, dtype=jnp.int32)
    groups = []
    for group in cache.groups:
        k, v = (_fit(stacked(x, group.layers), size, 3, 0) for x in (keys, values))
        zero = jnp.zeros((), dtype)
        groups.append(CacheGroup(jnp.where(filled, k, zero), jnp.where(filled, v, zero), where, count, group.layers))
    return KVCache(tuple(groups), False, c.geometry)


def _fit(x: Array, size: int, axis: int, fill: int) -> Array:
    """Cut or pad one axis to ``size`` (a capacity below the bucket cuts only padding)."""
    x = jax.lax.slice_in_dim(x, 0, min(size, x.shape[axis]), axis=axis)
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, pad, constant_values=fill)
