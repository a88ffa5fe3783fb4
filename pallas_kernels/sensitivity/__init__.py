"""Sensitivity: how strongly an error in a cached key or value moves attention outputs, as column sums over queries."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.dispatch import dispatch
from pallas_kernels.sensitivity import reference

OP = "sensitivity"


def sensitivity(
    q: Array,
    k: Array,
    v: Array,
    query_pos: Array,
    key_pos: Array,
    lse: Array,
    o: Array,
    weights: Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    block: int = reference.BLOCK,
    implementation: str | None = None,
) -> Array:
    """Weighted column sums of the squared Jacobians of attention outputs, in one sweep over keys and values.

    With softmax weights ``a_ui = exp(s_ui - lse_u)`` of the scores ``s_ui = cap(scale q_u.k_i)`` and their slope
    ``c_ui = scale cap'(scale q_u.k_i)``, where ``cap(x) = softcap tanh(x / softcap)``:

    * keys: ``sum_u w_u0 c_ui^2 a_ui^2 |v_i - o_u|^2 |q_u|^2``, which is ``|do/dk_i|_F^2`` for weights one;
    * values: ``sum_u w_u1 a_ui^2``, which is ``|do/dv_i|_F^2 / Dv``.

    Query u at position p reads slot i at p_i where ``0 <= p_i <= p`` and, with a window, ``p - window < p_i``. Empty
    slots, and queries that are padding or have weight zero twice, are never read (they may hold NaN). No array of
    queries by slots exists. Gradients of every float argument are those of the reference, recomputed block by block.

    Args:
        q: rotated queries ``[B,H,U,D]``; query head h reads kv head ``h // (H/K)``; float32 or bfloat16, as k and v.
        k: rotated keys ``[B,K,T,D]``.
        v: values ``[B,K,T,Dv]``.
        query_pos: int32 ``[B,U]``; -1 for padding.
        key_pos: int32 ``[B,K|1,T]``; -1: empty.
        lse: float32 ``[B,H,U]``, log-sum-exp of the scores that each query sees.
        o: float32 ``[B,H,U,Dv]``, its attention output. Both from :func:`statistics`.
        weights: float32 ``[B,K,U,2]`` or ``[B,H,U,2]``, of each query for keys and for values.
        scale: multiplier of the scores; window: width in tokens; softcap: tanh cap of the scores.
        block: queries of each head that the reference takes at a time.
        implementation: ``"xla"``, ``"tpu"``, ``"gpu"``, ``"interpret"`` (the TPU kernel on any machine), or ``None``:
            by platform.

    Returns:
        float32 ``[B,K,T,2]``, keys then values; zero in empty slots.

    Raises:
        ValueError: shapes that do not belong together, or an unknown implementation.
        NotImplementedError: an implementation asked for by name cannot take these arguments (the message names the
            rule).

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels.sensitivity import sensitivity, statistics
        >>> q, k, v = jnp.ones((1, 2, 3, 4)), jnp.ones((1, 1, 3, 4)), jnp.arange(6.0).reshape(1, 1, 3, 2)
        >>> at = jnp.arange(3, dtype=jnp.int32)
        >>> lse, o = statistics(q, k, v, at[None], at[None, None], scale=0.5)
        >>> r = sensitivity(q, k, v, at[None], at[None, None], lse, o, jnp.ones((1, 1, 3, 2)), scale=0.5)
        >>> [round(1000 * float(x)) for x in r[0, 0, :, 1]]  # two heads of 1 + 1/4 + 1/9, 1/4 + 1/9, 1/9
        [2722, 722, 222]

    Reference: CacheBridge, arXiv 2609.00891.
    """
    _check(q, k, v, query_pos, key_pos)
    _check_queries(q, v, lse, o)
    heads = {k.shape[1], q.shape[1]}
    if weights.shape not in {(q.shape[0], h, q.shape[2], 2) for h in heads}:
        raise ValueError(f"weights must be [B,K,U,2] or [B,H,U,2] beside q {q.shape}, k {k.shape}: {weights.shape}.")
    settings = (float(scale), window, softcap, block, implementation)
    return _sensitivity(settings, q, k, v, query_pos, key_pos, lse, o, weights)


def statistics(
    q: Array,
    k: Array,
    v: Array,
    query_pos: Array,
    key_pos: Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    block: int = reference.BLOCK,
) -> tuple[Array, Array]:
    """Log-sum-exp of each query's scores and its attention output, which :func:`sensitivity` starts from.

    ``lse_u = log sum_i exp(s_ui)``, ``o_u = sum_i exp(s_ui - lse_u) v_i`` over the slots that query u sees. An online
    softmax over blocks of slots: memory is linear in T and in U.

    Args:
        q, k, v, query_pos, key_pos, scale, window, softcap, block: as :func:`sensitivity` takes them.

    Returns:
        float32 ``[B,H,U]`` and ``[B,H,U,Dv]``; minus infinity and zeros for a query that sees nothing.

    Raises:
        ValueError: shapes that do not belong together.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels.sensitivity import statistics
        >>> k, v = jnp.zeros((1, 1, 2, 4)), jnp.array([[[[1.0], [3.0]]]])
        >>> at = jnp.array([[0, 1]], jnp.int32)
        >>> lse, o = statistics(jnp.ones((1, 1, 2, 4)), k, v, at, at[:, None], scale=1.0)
        >>> jnp.exp(lse).round(4).tolist(), o.ravel().tolist()
        ([[[1.0, 2.0]]], [1.0, 2.0])

    Reference: Milakov and Gimelshein, arXiv 1805.02867, algorithm 3.
    """
    _check(q, k, v, query_pos, key_pos)
    settings: dict[str, Any] = {"scale": float(scale), "window": window, "softcap": softcap, "block": block}
    return reference.statistics(q, k, v, query_pos, key_pos, **settings)


def masses(
    q: Array,
    k: Array,
    v: Array,
    query_pos: Array,
    key_pos: Array,
    lse: Array,
    o: Array,
    *,
    first: int | Array = 0,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    block: int = reference.BLOCK,
) -> Array:
    """What each query adds to :func:`sensitivity`, summed over the slots that count and over its kv head's group.

    ``m_u0 = sum_i c_ui^2 a_ui^2 |v_i - o_u|^2 |q_u|^2`` and ``m_u1 = sum_i a_ui^2`` over slots at position ``first`` or
    later: weights ``1 / m`` give every query the same share of those slots. Memory is linear in T and in U.

    Args:
        q, k, v, query_pos, key_pos, lse, o, scale, window, softcap, block: as :func:`sensitivity` takes them.
        first: lowest position that counts.

    Returns:
        float32 ``[B,K,U,2]``.

    Raises:
        ValueError: shapes that do not belong together.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels.sensitivity import masses, statistics
        >>> q, k, v = jnp.ones((1, 2, 3, 4)), jnp.ones((1, 1, 3, 4)), jnp.arange(6.0).reshape(1, 1, 3, 2)
        >>> at = jnp.arange(3, dtype=jnp.int32)
        >>> lse, o = statistics(q, k, v, at[None], at[None, None], scale=0.5)
        >>> m = masses(q, k, v, at[None], at[None, None], lse, o, first=1, scale=0.5)
        >>> [round(1000 * float(x)) for x in m[0, 0, :, 1]]  # two heads of 0, 1/4, 2/9
        [0, 500, 444]

    Reference: CacheBridge, arXiv 2609.00891.
    """
    _check(q, k, v, query_pos, key_pos)
    _check_queries(q, v, lse, o)
    settings: dict[str, Any] = {"scale": float(scale), "window": window, "softcap": softcap, "block": block}
    lowest = jnp.asarray(first, jnp.int32)
    return reference.masses(q, k, v, query_pos, key_pos, lse, o, lowest, **settings)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sensitivity(settings: tuple[Any, ...], *arrays: Array) -> Array:
    from pallas_kernels.sensitivity import gpu, tpu

    scale, window, softcap, block, implementation = settings
    scores: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    implementations = {
        "xla": functools.partial(reference.sensitivity, **scores, block=block),
        "tpu": functools.partial(tpu.sensitivity, **scores),
        "gpu": functools.partial(gpu.sensitivity, **scores),
        "interpret": functools.partial(tpu.sensitivity, **scores, interpret=True),
    }
    return dispatch(OP, implementations, implementation, *arrays)


def _forward(settings: tuple[Any, ...], *arrays: Array) -> tuple[Array, tuple[Array, ...]]:
    return _sensitivity(settings, *arrays), arrays


def _backward(settings: tuple[Any, ...], arrays: tuple[Array, ...], cotangent: Array) -> tuple[Any, ...]:
    scale, window, softcap, block, _ = settings
    q, k, v, query_pos, key_pos, *rest = arrays

    def run(q: Array, k: Array, v: Array, *rest: Array) -> Array:
        scores: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "block": block}
        return reference.sensitivity(q, k, v, query_pos, key_pos, *rest, **scores)

    by_q, by_k, by_v, *by_rest = jax.vjp(run, q, k, v, *rest)[1](cotangent)
    none = [np.zeros(pos.shape, jax.dtypes.float0) for pos in (query_pos, key_pos)]
    return by_q, by_k, by_v, *none, *by_rest


_sensitivity.defvjp(_forward, _backward)


def _check(q: Array, k: Array, v: Array, query_pos: Array, key_pos: Array) -> None:
    if any(x.ndim != 4 for x in (q, k, v)) or query_pos.ndim != 2 or key_pos.ndim != 3:
        raise ValueError("q, k and v have four axes, query_pos two and key_pos three.")
    batch, kv_heads, slots, dim = k.shape
    agree = q.shape[0] == batch and q.shape[3] == dim and v.shape[:3] == k.shape[:3]
    if not agree or q.shape[1] % kv_heads:
        raise ValueError(f"q [B,H,U,D], k [B,K,T,D], v [B,K,T,Dv], H a multiple of K: {q.shape}, {k.shape}, {v.shape}.")
    if query_pos.shape != (batch, q.shape[2]) or key_pos.shape not in {(batch, n, slots) for n in (1, kv_heads)}:
        raise ValueError(
            f"positions are [B,U] and [B,K|1,T], got {query_pos.shape} and {key_pos.shape} beside q {q.shape} and "
            f"k {k.shape}."
        )


def _check_queries(q: Array, v: Array, lse: Array, o: Array) -> None:
    if lse.shape != q.shape[:3] or o.shape != (*q.shape[:3], v.shape[-1]):
        raise ValueError(f"lse is [B,H,U] and o [B,H,U,Dv], got {lse.shape} and {o.shape} beside q {q.shape}.")
