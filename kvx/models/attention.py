"""Attention over positions: one softmax over a cache and the present chunk, without joining them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvx.cache.cache import LayerView
from kvx.typing import typed

BLOCK = 128  # queries at a time, twice as many over up to WIDE slots
WIDE = 4096
SEGMENTS = 8
_HEADS = 8  # CPUs take up to this many kv heads one by one
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
    NaN in one is never read. Many queries are taken block by block, and on CPUs kv head by kv head (12 % faster at
    512 tokens, 3 kv heads x 64).

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
    kv_heads, value_dim = parts[0].k.shape[1], parts[0].v.shape[-1]
    parts = [_prepared(part, q.dtype, clean) for part in parts if part.k.shape[2]]
    if not parts:
        return jnp.zeros((batch, heads, tokens, value_dim), q.dtype)
    q = q.reshape(batch, kv_heads, heads // kv_heads, tokens, q.shape[-1])
    block = partial(_attend_block, scale=scale, window=window, softcap=softcap)
    size = BLOCK if sum(part.k.shape[2] for part in parts) > WIDE else 2 * BLOCK
    if tokens > BLOCK and 1 < kv_heads <= _HEADS:
        block = partial(_by_platform, block)
    out = block(q, parts, pos) if tokens <= size else _by_blocks(block, q, parts, pos, ordered, size)
    return out.reshape(batch, heads, tokens, -1)


def _by_platform(block: Callable[..., Array], q: Array, parts: Sequence[LayerView], pos: Array) -> Array:
    """One small product for each kv head where it stays in a CPU's cache, one large one elsewhere."""

    def one_by_one(q: Array, parts: Sequence[LayerView], pos: Array) -> Array:
        return jnp.concatenate([block(q[:, h : h + 1], _head(parts, h), pos) for h in range(q.shape[1])], axis=1)

    return jax.lax.platform_dependent(q, parts, pos, cpu=one_by_one, default=block)


def _head(parts: Sequence[LayerView], h: int) -> list[LayerView]:
    def cut(x: Array) -> Array:
        return x if x.shape[1] == 1 else x[:, h : h + 1]

    return [jax.tree.map(cut, part) for part in parts]


def _prepared(part: LayerView, dtype: jnp.dtype, clean: bool) -> LayerView:
    """The part in the queries' dtype, with zeros in its empty slots."""
    k, v = part.k.astype(dtype), part.v.astype(dtype)
    if clean:
        return LayerView(k, v, part.pos)
    filled = (part.pos >= 0)[..., None]
    zero = jnp.zeros((), dtype)
    return LayerView(jnp.where(filled, k, zero), jnp.where(filled, v, zero), part.pos)


def _by_blocks(
    block: Callable[..., Array], q: Array, parts: Sequence[LayerView], pos: Array, ordered: bool, width: int
) -> Array:
    """Blocks of queries, in segments that leave out the chunk's keys behind them when the chunk is in order."""
    tokens = q.shape[3]
    blocks = -(-tokens // width)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, blocks * width - tokens), (0, 0)))
    pos = jnp.pad(pos, ((0, 0), (0, blocks * width - tokens)), constant_values=-1)
    size = -(-blocks // SEGMENTS) if ordered else blocks
    outs = []
    for first in range(0, blocks, size):
        start, stop = first * width, min(first + size, blocks) * width
        seen = [*parts[:-1], _first_slots(parts[-1], stop)] if ordered else list(parts)
        outs.append(_segment(block, width, q[:, :, :, start:stop], seen, pos[:, start:stop]))
    return jnp.concatenate(outs, axis=3)[:, :, :, :tokens]


def _first_slots(part: LayerView, stop: int) -> LayerView:
    return LayerView(part.k[:, :, :stop], part.v[:, :, :stop], part.pos[..., :stop])


def _segment(block: Callable[..., Array], width: int, q: Array, parts: Sequence[LayerView], pos: Array) -> Array:
    """One block directly, several one after the other; scores are recomputed for the gradient, never kept."""
    count = q.shape[3] // width
    block = jax.checkpoint(block)
    if count == 1:
        return block(q, parts, pos)
    rows = jnp.moveaxis(q.reshape(*q.shape[:3], count, width, q.shape[-1]), 3, 0)
    starts = jnp.moveaxis(pos.reshape(pos.shape[0], count, width), 1, 0)
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

    Hidden slots get ``_LOW`` added to their score, an operation that compilers fuse with the product, the maximum and
    the exponential. A row with nothing to read averages values that are finite, and is then replaced by zero.
    """
    visible = [_visible(pos, part.pos, window) for part in parts]
    scores = [
        _scores(q, part, scale, softcap) + _rows(jnp.where(seen, jnp.float32(0), jnp.float32(_LOW)), q)
        for part, seen in zip(parts, visible, strict=True)
    ]
    top = jax.lax.stop_gradient(reduce(jnp.maximum, [score.max(axis=-1, keepdims=True) for score in scores]))
    weights = [jnp.exp(score - top) for score in scores]
    total = reduce(jnp.add, [weight.sum(axis=-1, keepdims=True) for weight in weights])
    read = [_product(weight.astype(q.dtype), part.v, contract=1) for weight, part in zip(weights, parts, strict=True)]
    out = (reduce(jnp.add, read) / total).reshape(*q.shape[:-1], -1)
    some = reduce(jnp.logical_or, [seen.any(axis=-1, keepdims=True) for seen in visible])
    return jnp.where(some, out, 0.0).astype(q.dtype)


def _rows(bias: Array, q: Array) -> Array:
    """``[B,K|1,1,T,S]`` as the rows of :func:`_product`: ``[B K, G T, S]``, or ``[1, G T, S]`` when all share it."""
    batch, kv_heads, groups, tokens, _ = q.shape
    lead = (1, 1) if bias.shape[:2] == (1, 1) else (batch, kv_heads)
    wide = jnp.broadcast_to(bias, (*lead, groups, tokens, bias.shape[-1]))
    return wide.reshape(lead[0] * lead[1], groups * tokens, -1)


def _scores(q: Array, part: LayerView, scale: float, softcap: float | None) -> Array:
    batch, kv_heads, groups, tokens, width = q.shape
    score = _product(q.reshape(batch * kv_heads, groups * tokens, width), part.k, contract=2) * jnp.float32(scale)
    return score if softcap is None else jnp.float32(softcap) * jnp.tanh(score / jnp.float32(softcap))


def _visible(pos: Array, slots: Array, window: int | Array | None) -> Array:
    """Which slots ``[B,K|1,S]`` the queries at ``pos [B,T]`` read: ``[B,K|1,1,T,S]``."""
    query, key = pos[:, None, None, :, None], slots[:, :, None, None, :]
    mask = (key >= 0) & (key <= query)
    return mask if window is None else mask & (key > query - jnp.asarray(window, jnp.int32))


def _product(rows: Array, slots: Array, contract: int) -> Array:
    """Rows ``[B K, G T, X]`` times slots ``[B,K,S,D]`` over their axis D (``contract=2``) or S (1).

    One matrix product per kv head, which CPUs run faster than one per query head. Products of fp32 operands are fp32
    on every backend, and so are all sums.
    """
    precision = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        rows,
        slots.reshape(-1, *slots.shape[2:]),
        (((2,), (contract,)), ((0,), (0,))),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
