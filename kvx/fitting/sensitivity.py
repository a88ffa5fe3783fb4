"""Sensitivity: how strongly an error in one cached key or value moves the attention outputs of later queries.

To first order errors ``dv_i``, ``dk_i`` of cached tokens i move the output of query u by
``d o_u = sum_i a_ui dv_i + sum_i a_ui c_ui (q_u . dk_i) (v_i - o_u)``, with softmax weight a, and c the score scale
times the soft cap's derivative. The squared Frobenius norms of these two maps are what a fit should weigh tokens by.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from kvx.cache.cache import KVCache, LayerView
from kvx.cache.geometry import RopeSpec
from kvx.cache.rope import rotate
from kvx.errors import KvxError
from kvx.models.config import ModelConfig
from kvx.typing import typed
from pallas_kernels import sensitivity as kernel

MODES = ("probes", "all")
PROBES = 32
FIRST_PROBE = 12  # tokens of context before the first probe
BLOCK = 64  # queries at a time


@typed
def sensitivity(
    config: ModelConfig,
    queries: Float[Array, "L B H U D"],
    positions: Int[Array, "B U"],
    cache: KVCache,
    *,
    mode: str = "probes",
    first: int = 0,
) -> Float32[Array, "L B K T 2"]:
    """Sensitivity of every cached key and value of a context, with mean one in every sequence, layer and head.

    ``r_i^V = sum_u a_ui^2`` and ``r_i^K = sum_u c_ui^2 a_ui^2 |v_i - o_u|^2 |q_u|^2`` over the queries u of all query
    heads that read the kv head. ``"all"`` sums over every query at the token's position or after. ``"probes"`` takes
    the query at 32 positions, log-spaced from token 12 of the context to its end, brings each probe's share to unit
    mass and adds the probes equally, so that early and late readers count alike. Windows, grouped heads, score scale
    and soft cap are the model's. Queries are taken block by block: memory grows linearly with T.

    Args:
        config: of the model that owns the cache.
        queries: rotated, of the tokens in the cache (``forward(collect_queries=True)``).
        positions: int32 of those queries; -1 marks padding.
        cache: everything the queries read, all tokens kept, prefix included.
        mode: ``"probes"`` or ``"all"``.
        first: lowest position that counts (the number of prefix tokens). The prefix keeps its share of the attention.

    Returns:
        float32 ``[L,B,K,T,2]``, keys then values; 0 at the prefix and in empty slots.

    Raises:
        KvxError: an unknown mode, queries that do not fit the model, or a cache that has dropped tokens (rings).

    Example:
        >>> import jax.numpy as jnp
        >>> from kvx.fitting.sensitivity import sensitivity
        >>> from kvx.models.decoder import forward
        >>> from kvx.models.random_model import random_model
        >>> model, tokens = random_model(), jnp.arange(20)[None] % 7
        >>> out = forward(model, tokens, collect_queries=True)
        >>> r = sensitivity(model.config, out.queries, jnp.arange(20)[None], out.cache, first=1)
        >>> r.shape, bool(abs(r[..., 1:, :].mean(axis=3) - 1).max() < 1e-5), float(r[..., 0, :].max())
        ((2, 1, 2, 20, 2), True, 0.0)

    Reference: CacheBridge, arXiv 2609.00891.
    """
    check_mode(mode)
    wanted = (config.num_layers, cache.batch, config.heads)
    if queries.shape[:3] != wanted or positions.shape[1] != queries.shape[3]:
        raise KvxError(
            f"queries must be [L,B,H,U,D] with L,B,H = {wanted} and one position each, got {queries.shape} and "
            f"{positions.shape}; collect them with forward(collect_queries=True) over this cache."
        )
    if any(group.ring for group in cache.groups):
        raise KvxError("this cache keeps only the windows of its window layers; prefill it with keep='all'.")
    found = []
    for layer, geometry in enumerate(cache.geometry.layers):
        rope = None if cache.rotated else geometry.rope
        scores: dict[str, Any] = {"scale": config.score_scale, "window": geometry.window}
        scores["softcap"] = config.attn_softcap
        found.append(_layer(queries[layer], positions, cache.layer(layer), first, mode=mode, rope=rope, **scores))
    return jnp.stack(found)


def check_mode(mode: str) -> None:
    """Refuse modes that are not known."""
    if mode not in MODES:
        raise KvxError(f"sensitivity is {mode!r}; expected one of {', '.join(map(repr, MODES))}.")


@functools.partial(jax.jit, static_argnames=("scale", "window", "softcap"))
@typed
def column_sums(
    queries: Float[Array, "B H U D"],
    positions: Int[Array, "B U"],
    view: LayerView,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float32[Array, "B K T 2"]:
    """``r^K`` and ``r^V`` of one layer, summed over all given queries, neither normalised nor without the prefix.

    They equal ``|do/dk_i|_F^2`` and ``|do/dv_i|_F^2 / D_v`` of the attention output o, summed over its queries.

    Args:
        queries: rotated; query head h reads kv head ``h // G``.
        positions: int32; -1 for padding, which reads nothing.
        view: rotated keys ``[B,K,T,D]``, values ``[B,K,T,Dv]``, positions ``[B,K|1,T]`` (-1: empty, never read).
        scale: multiplier of the scores; window: width in tokens; softcap: tanh cap of the scores.

    Returns:
        float32 ``[B,K,T,2]``, keys then values.
    """
    ones = jnp.ones((queries.shape[0], view.k.shape[1], queries.shape[2], 2))
    settings: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "block": BLOCK}
    found = kernel.statistics(queries, view.k, view.v, positions, view.pos, **settings)
    return kernel.sensitivity(queries, view.k, view.v, positions, view.pos, *found, ones, **settings)


def probe_positions(length: Int[Array, " B"], first: int | Array) -> Int[Array, "B N"]:
    """Positions of the probes of contexts of ``length`` tokens that start at position ``first``; -1 for repeated ones.

    Example:
        >>> import jax.numpy as jnp
        >>> from kvx.fitting.sensitivity import probe_positions
        >>> found = probe_positions(jnp.array([400]), 1)[0].tolist()
        >>> found[:3], found[-1]
        ([13, 14, 16], 400)
    """
    last = jnp.maximum(length - 1, 0).astype(jnp.float32)[:, None]
    start = jnp.minimum(jnp.float32(FIRST_PROBE), last)
    steps = jnp.linspace(0.0, 1.0, PROBES)[None]
    at = jnp.round(jnp.exp((1 - steps) * jnp.log(jnp.maximum(start, 1.0)) + steps * jnp.log(jnp.maximum(last, 1.0))))
    at = jnp.minimum(at, last).astype(jnp.int32)
    new = jnp.pad(at[:, 1:] > at[:, :-1], ((0, 0), (1, 0)), constant_values=True) & (length > 0)[:, None]
    return jnp.where(new, at + jnp.asarray(first, jnp.int32), -1)


@jax.jit
def pick_probes(queries: Array, positions: Array, first: Array) -> tuple[Array, Array]:
    """Queries ``[L,B,H,N,D]`` at the probes of contexts that start at position ``first``, and their positions."""
    return _at(queries, positions, probe_positions((positions >= first).sum(axis=1, dtype=jnp.int32), first))


def _at(queries: Array, positions: Array, probes: Array) -> tuple[Array, Array]:
    """Queries of ``[L,B,H,U,D]`` at given positions ``[B,N]``, and these; -1 where there is none."""
    same = positions[:, None] == probes[..., None]
    at = jnp.where(same.any(axis=-1), probes, -1)
    return jnp.take_along_axis(queries, jnp.argmax(same, axis=-1)[None, :, None, :, None], axis=3), at


@functools.partial(jax.jit, static_argnames=("mode", "rope", "scale", "window", "softcap"))
def _layer(
    queries: Array,
    positions: Array,
    view: LayerView,
    first: int | Array,
    *,
    mode: str,
    rope: RopeSpec | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Array:
    """One layer's sensitivities, mean one over the slots that count."""
    k = jnp.where((view.pos >= 0)[..., None], view.k, jnp.zeros((), view.k.dtype)).astype(jnp.float32)
    view = LayerView(k if rope is None else rotate(k, view.pos, rope), view.v, view.pos)
    first = jnp.maximum(jnp.asarray(first, jnp.int32), 0)
    counted = (view.pos >= first)[..., None]
    if mode == "all":
        total = column_sums(queries, positions, view, scale=scale, window=window, softcap=softcap)
    else:
        length = (positions >= first).sum(axis=1, dtype=jnp.int32)
        probes = probe_positions(length, first)
        total = _probe_sums(queries, positions, view, probes, first, scale, window, softcap)
    total = jnp.where(counted, total, 0.0)
    count = counted.sum(axis=2, keepdims=True).astype(jnp.float32)
    return total * count / _positive(total.sum(axis=2, keepdims=True))


def _probe_sums(
    queries: Array,
    positions: Array,
    view: LayerView,
    probes: Array,
    first: Array,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Array:
    """Sum over the probes of each one's sensitivities, brought to unit mass on the slots at ``first`` or later."""
    picked, at = _at(queries[None], positions, probes)
    settings: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    arrays = (picked[0], view.k, view.v, at, view.pos)
    found = kernel.statistics(*arrays, **settings)
    mass = kernel.masses(*arrays, *found, first=first, **settings)
    weights = jnp.where(mass > 0, 1 / _positive(mass), 0.0)
    return kernel.sensitivity(*arrays, *found, weights, **settings)


def _positive(x: Array) -> Array:
    """Divisors that are never zero; what they divide is zero where they were."""
    return jnp.where(x > 0, x, 1.0)


def as_columns(found: Float[Array, "L B K T 2"]) -> Float[Array, "N R"]:
    """Sensitivities beside a batch's rows: row ``b T + t``, column ``(l K + k) 2 + component``."""
    return jnp.transpose(found, (1, 3, 0, 2, 4)).reshape(found.shape[1] * found.shape[3], -1)
