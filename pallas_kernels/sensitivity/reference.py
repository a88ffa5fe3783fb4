"""Column sums of squared attention Jacobians in plain XLA: what the kernels must equal, blocks of queries and slots."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

BLOCK = 64  # queries of each head at a time
WIDTH = 4096  # slots at a time
HIGHEST = jax.lax.Precision.HIGHEST
LOW = -1e30


class Queries(NamedTuple):
    """Queries of each kv head, ``[B,K,G,U,...]`` each but ``pos [B,U]``; of a call or of a block of it."""

    q: Any
    pos: Any
    lse: Any = None
    o: Any = None
    weights: Any = None


class Slots(NamedTuple):
    """Keys ``[B,K,T,D]``, values ``[B,K,T,Dv]`` and positions ``[B,K|1,T]``; of a call or of a block of it."""

    k: Array
    v: Array
    pos: Array


class Scores(NamedTuple):
    """How scores are made: ``scale q.k`` capped at ``softcap``, seen up to ``window`` tokens back."""

    scale: float
    window: int | None
    softcap: float | None


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
    block: int = BLOCK,
    width: int = WIDTH,
) -> Array:
    """See :func:`pallas_kernels.sensitivity.sensitivity`; ``block`` queries meet ``width`` slots at a time."""
    queries = clean_queries(q, query_pos, lse, o, weights, k.shape[1])
    centre = centre_of(queries)
    scores = Scores(scale, window, softcap)

    @jax.checkpoint
    def column(slots: Slots) -> Array:
        @jax.checkpoint
        def row(total: Array, rows: Queries) -> tuple[Array, None]:
            keys, values = _squares(rows, slots, centre, scores)
            weighted = rows.weights.reshape(*keys.shape[:3], 2)
            sums = [(weighted[..., i, None] * x).sum(axis=2) for i, x in enumerate((keys, values))]
            return total + jnp.stack(sums, axis=-1), None

        return jax.lax.scan(row, jnp.zeros((*slots.k.shape[:3], 2)), _query_blocks(queries, block))[0]

    found = jax.lax.map(column, _slot_blocks(Slots(k, v, key_pos), width))
    return jnp.moveaxis(found, 0, 2).reshape(*k.shape[:2], -1, 2)[:, :, : k.shape[2]]


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
    block: int = BLOCK,
    width: int = WIDTH,
) -> tuple[Array, Array]:
    """See :func:`pallas_kernels.sensitivity.statistics`: an online softmax, ``block`` queries by ``width`` slots."""
    kv_heads, value_dim = k.shape[1], v.shape[-1]
    live = (query_pos >= 0)[:, None, None, :, None]
    queries = Queries(jnp.where(live, grouped(q, kv_heads), jnp.zeros((), q.dtype)), query_pos)
    scores = Scores(scale, window, softcap)
    blocks = _slot_blocks(Slots(k, v, key_pos), width)

    def row(rows: Queries) -> tuple[Array, Array]:
        shape = (*rows.q.shape[:2], rows.q.shape[2] * rows.q.shape[3])

        @jax.checkpoint
        def step(carry: tuple[Array, Array, Array], slots: Slots) -> tuple[tuple[Array, Array, Array], None]:
            top, mass, total = carry
            slots = _clean_slots(slots)
            score, _, seen = _scores(rows, slots, scores)
            peak = jax.lax.stop_gradient(jnp.maximum(top, jnp.where(seen, score, LOW).max(axis=-1)))
            shrink = jnp.exp(top - peak)
            weight = jnp.exp(jnp.where(seen, score - peak[..., None], LOW))
            more = product("bkrt,bktd->bkrd", weight, slots.v)
            return (peak, mass * shrink + weight.sum(axis=-1), total * shrink[..., None] + more), None

        start = (jnp.full(shape, LOW), jnp.zeros(shape), jnp.zeros((*shape, value_dim)))
        top, mass, total = jax.lax.scan(step, start, blocks)[0]
        lse = jnp.where(mass > 0, top + jnp.log(_positive(mass)), -jnp.inf)
        return lse, total / _positive(mass)[..., None]

    lse, o = jax.lax.map(row, _query_blocks(queries, block))
    return _joined(lse[..., None], q.shape)[..., 0], _joined(o, q.shape)


def masses(
    q: Array,
    k: Array,
    v: Array,
    query_pos: Array,
    key_pos: Array,
    lse: Array,
    o: Array,
    first: Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    block: int = BLOCK,
    width: int = WIDTH,
) -> Array:
    """See :func:`pallas_kernels.sensitivity.masses`."""
    ones = jnp.ones((*q.shape[:3], 2))
    queries = clean_queries(q, query_pos, lse, o, ones, k.shape[1])
    centre = centre_of(queries)
    scores = Scores(scale, window, softcap)
    blocks = _slot_blocks(Slots(k, v, key_pos), width)

    def row(rows: Queries) -> Array:
        @jax.checkpoint
        def step(total: Array, slots: Slots) -> tuple[Array, None]:
            counted = (slots.pos >= first)[:, :, None]
            found = [jnp.where(counted, x, 0.0).sum(axis=-1) for x in _squares(rows, slots, centre, scores)]
            return total + jnp.stack(found, axis=-1), None

        shape = (*rows.q.shape[:2], rows.q.shape[2] * rows.q.shape[3], 2)
        return jax.lax.scan(step, jnp.zeros(shape), blocks)[0]

    found = _joined(jax.lax.map(row, _query_blocks(queries, block)), q.shape)
    return grouped(found, k.shape[1]).sum(axis=2)


def grouped(x: Array, kv_heads: int) -> Array:
    """``[B,H,U,...]`` by kv head, ``[B,K,G,U,...]``; query head h reads kv head ``h // G``."""
    return x.reshape(x.shape[0], kv_heads, x.shape[1] // kv_heads, *x.shape[2:])


def clean_queries(q: Array, pos: Array, lse: Array, o: Array, weights: Array, kv_heads: int) -> Queries:
    """Queries by kv head, statistics in fp32, zeros in rows that do not count (padding, weight 0)."""
    by_head = grouped(weights.astype(jnp.float32), kv_heads)
    by_head = jnp.broadcast_to(by_head, (*by_head.shape[:2], q.shape[1] // kv_heads, *by_head.shape[3:]))
    live = (pos >= 0)[:, None, None] & (by_head != 0).any(axis=-1)
    keep = lambda x: jnp.where(live[..., None], x, jnp.zeros((), x.dtype))  # noqa: E731
    lse, o = (grouped(x.astype(jnp.float32), kv_heads) for x in (lse, o))
    return Queries(keep(grouped(q, kv_heads)), pos, jnp.where(live, lse, 0.0), keep(o), keep(by_head))


def centre_of(queries: Queries) -> Array:
    """A point amid each head's values, ``[B,K,1,Dv]``: the mean output of the queries that count.

    ``|v - o|^2 = |v|^2 + |o|^2 - 2 v.o`` cancels where values lie far from zero; about this point it does not. The
    result does not depend on it, hence no gradient.
    """
    live = (queries.weights != 0).any(axis=-1)
    count = jnp.maximum(live.sum(axis=(2, 3)), 1).astype(jnp.float32)
    return jax.lax.stop_gradient(queries.o.sum(axis=(2, 3)) / count[..., None])[:, :, None]


def product(equation: str, a: Array, b: Array) -> Array:
    """An einsum in fp32 at full precision."""
    return jnp.einsum(equation, a.astype(jnp.float32), b.astype(jnp.float32), precision=HIGHEST)


def _squares(rows: Queries, slots: Slots, centre: Array, settings: Scores) -> tuple[Array, Array]:
    """``c^2 a^2 |v - o|^2 |q|^2`` and ``a^2`` of a block of queries and one of slots, each ``[B,K,R,T]``."""
    slots = _clean_slots(slots)
    score, slope, seen = _scores(rows, slots, settings)
    flat = lambda x: x.reshape(*score.shape[:3], *x.shape[4:])  # noqa: E731
    weight = jnp.exp(jnp.where(seen, score - flat(rows.lse)[..., None], LOW))
    o, v = flat(rows.o) - centre, slots.v.astype(jnp.float32) - centre
    away = (v**2).sum(axis=-1)[:, :, None] + (o**2).sum(axis=-1)[..., None] - 2 * product("bkrd,bktd->bkrt", o, v)
    power = (flat(rows.q).astype(jnp.float32) ** 2).sum(axis=-1)[..., None]
    return (weight * slope) ** 2 * jnp.maximum(away, 0.0) * power, weight**2


def _scores(rows: Queries, slots: Slots, settings: Scores) -> tuple[Array, Array | float, Array]:
    """Scores of a block ``[B,K,R,T]``, their derivative by ``q.k``, and which slots each query sees."""
    batch, kv_heads, groups, count, dim = rows.q.shape
    score = product("bkrd,bktd->bkrt", rows.q.reshape(batch, kv_heads, groups * count, dim), slots.k)
    score = score * jnp.float32(settings.scale)
    slope: Array | float = settings.scale
    if settings.softcap is not None:
        capped = jnp.tanh(score / jnp.float32(settings.softcap))
        score, slope = jnp.float32(settings.softcap) * capped, jnp.float32(settings.scale) * (1 - capped**2)
    query, key = jnp.tile(rows.pos, (1, groups))[:, None, :, None], slots.pos[:, :, None]
    seen = (key >= 0) & (key <= query)
    if settings.window is not None:
        seen = seen & (key > query - settings.window)
    return score, slope, jnp.broadcast_to(seen, score.shape)


def _clean_slots(slots: Slots) -> Slots:
    """Zeros in empty slots, before any product reads them."""
    filled = (slots.pos >= 0)[..., None]
    k, v = (jnp.where(filled, x, jnp.zeros((), x.dtype)) for x in (slots.k, slots.v))
    return Slots(k, v, slots.pos)


def _query_blocks(queries: Queries, block: int) -> Queries:
    """Blocks of queries on a new first axis, the last one filled up with padding."""
    size = max(min(block, queries.pos.shape[1]), 1)
    cut = lambda x, axis, fill=0: None if x is None else _cut(x, axis, size, fill)  # noqa: E731
    rest = [cut(x, 3) for x in (queries.lse, queries.o, queries.weights)]
    return Queries(cut(queries.q, 3), cut(queries.pos, 1, -1), *rest)


def _slot_blocks(slots: Slots, width: int) -> Slots:
    size = max(min(width, slots.k.shape[2]), 1)
    return Slots(_cut(slots.k, 2, size), _cut(slots.v, 2, size), _cut(slots.pos, 2, size, -1))


def _cut(x: Array, axis: int, size: int, fill: int = 0) -> Array:
    count = -(-x.shape[axis] // size)
    room = [(0, 0)] * x.ndim
    room[axis] = (0, count * size - x.shape[axis])
    x = jnp.pad(x, room, constant_values=fill)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :]), axis, 0)


def _joined(blocks: Array, shape: tuple[int, ...]) -> Array:
    """Blocks ``[N,B,K,G W,...]`` of queries back to ``[B,H,U,...]``, given the shape of q."""
    count, batch, kv_heads, rows, last = blocks.shape
    groups = shape[1] // kv_heads
    x = blocks.reshape(count, batch, kv_heads, groups, rows // groups, last)
    x = jnp.moveaxis(x, 0, 3).reshape(batch, shape[1], -1, last)
    return x[:, :, : shape[2]]


def _positive(x: Any) -> Any:
    """Divisors that are never zero; what they divide is zero where they were."""
    return jnp.where(x > 0, x, 1.0)
