"""Attention over positions: one softmax over a cache and the present chunk, without joining them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvx.cache.cache import LayerView
from kvx.typing import typed

BLOCK = 128
SEGMENTS = 8
_LOW = -1e30


@typed
def attend(
    q: Float[Array, "B H T D"],
    parts: Sequence[LayerView],
    pos: Int[Array, "B T"],
    *,
    scale: float,
    window: int | Array | None = None,
    softcap: float | None = None,
    ordered: bool = False,
    clean: bool = False,
) -> Float[Array, "B H T Dv"]:
    """Causal attention of queries over several sets of (key, value, position) triples.

    ``o = sum_i softmax_i(cap(scale q.k_i)) v_i`` over all slots i of all parts whose position p_i satisfies
    ``0 <= p_i <= p`` and, with a window w, ``p - w < p_i``. Order of slots does not matter. Softmax in fp32. A query
    that may read nothing gets zero, with finite gradients. Empty slots are replaced before the product, so that a
    NaN in one is never read. More than ``BLOCK`` queries are taken block by block.

    Args:
        q: ``[B,H,T,D]`` rotated queries; query head h reads kv head ``h // (H/K)``.
        parts: rotated keys ``[B,K,S,D]``, values ``[B,K,S,Dv]``, positions int32 ``[B,K|1,S]`` (-1: empty).
        pos: int32 ``[B,T]`` positions of the queries; -1 for padding.
        scale: multiplier of the scores.
        window: width in tokens, an int, a traced scalar, or ``None`` for unlimited.
        softcap: ``cap(s) = softcap tanh(s / softcap)``.
        ordered: the last part is the queries' own chunk, token for token in order of position, so that keys behind a
            block of queries can be skipped unseen.
        clean: empty slots of all parts are known to be finite.

    Returns:
        ``[B,H,T,Dv]`` in the dtype of ``q``.

    Example:
        >>> import jax.numpy as jnp
        >>> from kvx.cache.cache import LayerView
        >>> q = jnp.ones((1, 2, 1, 4))
        >>> k, v = jnp.ones((1, 1, 3, 4)), jnp.array([[[[1.0], [3.0], [jnp.nan]]]])
        >>> part = LayerView(k, v, jnp.array([[[0, 1, -1]]]))
        >>> attend(q, [part], jnp.array([[1]]), scale=0.5).ravel().tolist()
        [2.0, 2.0]
    """
    batch, heads, tokens, _ = q.shape
    kv_heads = parts[0].k.shape[1]
    parts = [_prepared(part, q.dtype, clean) for part in parts]
    q = q.reshape(batch, kv_heads, heads // kv_heads, tokens, q.shape[-1])
    block = partial(_attend_block, scale=scale, window=window, softcap=softcap)
    out = block(q, parts, pos) if tokens <= BLOCK else _by_blocks(block, q, parts, pos, ordered)
    return out.reshape(batch, heads, tokens, -1)


def _prepared(part: LayerView, dtype: jnp.dtype, clean: bool) -> LayerView:
    """The part in the queries' dtype, with zeros in its empty slots."""
    k, v = part.k.astype(dtype), part.v.astype(dtype)
    if clean:
        return LayerView(k, v, part.pos)
    filled = (part.pos >= 0)[..., None]
    zero = jnp.zeros((), dtype)
    return LayerView(jnp.where(filled, k, zero), jnp.where(filled, v, zero), part.pos)


def _by_blocks(block: Callable[..., Array], q: Array, parts: Sequence[LayerView], pos: Array, ordered: bool) -> Array:
    """Blocks of queries, in segments that leave out the chunk's keys behind them when the chunk is in order."""
    tokens = q.shape[3]
    blocks = -(-tokens // BLOCK)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, blocks * BLOCK - tokens), (0, 0)))
    pos = jnp.pad(pos, ((0, 0), (0, blocks * BLOCK - tokens)), constant_values=-1)
    size = -(-blocks // SEGMENTS) if ordered else blocks
    outs = []
    for first in range(0, blocks, size):
        start, stop = first * BLOCK, min(first + size, blocks) * BLOCK
        seen = [*parts[:-1], _first_slots(parts[-1], stop)] if ordered else list(parts)
        outs.append(_segment(block, q[:, :, :, start:stop], seen, pos[:, start:stop]))
    return jnp.concatenate(outs, axis=3)[:, :, :, :tokens]


def _first_slots(part: LayerView, stop: int) -> LayerView:
    return LayerView(part.k[:, :, :stop], part.v[:, :, :stop], part.pos[..., :stop])


def _segment(block: Callable[..., Array], q: Array, parts: Sequence[LayerView], pos: Array) -> Array:
    """One block directly, several one after the other; scores are recomputed for the gradient, never kept."""
    count = q.shape[3] // BLOCK
    block = jax.checkpoint(block)
    if count == 1:
        return block(q, parts, pos)
    rows = jnp.moveaxis(q.reshape(*q.shape[:3], count, BLOCK, q.shape[-1]), 3, 0)
    starts = jnp.moveaxis(pos.reshape(pos.shape[0], count, BLOCK), 1, 0)
    out = jnp.moveaxis(jax.lax.map(lambda x: block(x[0], parts, x[1]), (rows, starts)), 0, 3)
    return out.reshape(*q.shape[:4], out.shape[-1])


def _attend_block(
    q: Array,
    parts: Sequence[LayerView],
    pos: Array,
    *,
    scale: float,
    window: int | Array | None,
    softcap: float | None,
) -> Array:
    """All scores at once: q ``[B,K,G,T,D]`` to ``[B,K,G,T,Dv]``.

    Hidden scores are ``_LOW`` and the maximum is at least half of it, so that their exponentials are exactly zero in
    every row, in one with nothing to read too; any other row sums to at least one.
    """
    scores = [
        jnp.where(_visible(pos, part.pos, window), _scores(q, part, scale, softcap), jnp.float32(_LOW))
        for part in parts
    ]
    tops = [score.max(axis=-1, keepdims=True, initial=_LOW / 2) for score in scores]
    top = jax.lax.stop_gradient(reduce(jnp.maximum, tops))
    weights = [jnp.exp(score - top) for score in scores]
    total = reduce(jnp.add, [weight.sum(axis=-1, keepdims=True) for weight in weights])
    read = [_product(weight.astype(q.dtype), part.v, contract=2) for weight, part in zip(weights, parts, strict=True)]
    return (reduce(jnp.add, read) / jnp.where(total > 0, total, 1.0)).astype(q.dtype)


def _scores(q: Array, part: LayerView, scale: float, softcap: float | None) -> Array:
    score = _product(q, part.k, contract=3) * jnp.float32(scale)
    return score if softcap is None else jnp.float32(softcap) * jnp.tanh(score / jnp.float32(softcap))


def _visible(pos: Array, slots: Array, window: int | Array | None) -> Array:
    """Which slots ``[B,K|1,S]`` the queries at ``pos [B,T]`` read: ``[B,K|1,1,T,S]``."""
    query, key = pos[:, None, None, :, None], slots[:, :, None, None, :]
    mask = (key >= 0) & (key <= query)
    return mask if window is None else mask & (key > query - jnp.asarray(window, jnp.int32))


def _product(rows: Array, slots: Array, contract: int) -> Array:
    """Rows ``[B,K,G,T,X]`` times slots ``[B,K,S,D]`` over slots' axis ``contract``: ``[B,K,G,T,S]`` or ``[B,K,G,T,D]``.

    Fused to one matrix product per kv head, which CPUs run faster than one per query head. Products of fp32 operands
    are fp32 on every backend, and so are all sums.
    """
    batch, kv_heads, groups, tokens, inner = rows.shape
    precision = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
    out = jax.lax.dot_general(
        rows.reshape(batch * kv_heads, groups * tokens, inner),
        slots.reshape(batch * kv_heads, *slots.shape[2:]),
        (((2,), (contract - 1,)), ((0,), (0,))),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return out.reshape(batch, kv_heads, groups, tokens, -1)
