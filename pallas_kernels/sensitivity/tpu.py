"""TPU kernel of sensitivity: a block of keys and values stays in VMEM while the queries that see it stream past."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.launch import LANES, Launch, Operand, tile_bytes
from pallas_kernels.sensitivity import reference
from pallas_kernels.sensitivity.layout import (
    FACTS,
    KEYS,
    LSE,
    OFFSET,
    POSITION,
    SPLIT,
    VALUES,
    Shape,
    Tiles,
    facts_of,
    row_positions,
    rows_of,
    shape_of,
    up,
)
from pallas_kernels.tiles import tuned

CHUNK = 512  # slots that are worked on at a time
ROWS = 256  # queries in a block, when they do not all fit into one
ONE_BLOCK = 512  # up to so many queries of a kv head are one block
STREAMED = 4 << 20  # bytes of a block of keys and values that streams past
SHARE = 0.6  # of VMEM, for all blocks
VMEM = {"TPU v5 lite": 128 << 20, "TPU v5": 64 << 20, "TPU v5p": 64 << 20, "TPU v6 lite": 128 << 20}
LEAST_VMEM = 64 << 20


def tiles(shape: Shape, vmem: int | None = None) -> Tiles:
    """Measured tiles of this kind of device, or else: all queries as one block while slots stream past, two buffers
    each; or, when the queries are too many, as many slots as fit into ``SHARE`` of ``vmem`` bytes, in one buffer.
    """
    found = tuned("sensitivity", q=str(jnp.dtype(shape.q)), head_dim=shape.dim, one_block=shape.rows <= ONE_BLOCK)
    if found:
        return Tiles(**found)
    vmem = VMEM.get(jax.devices()[0].device_kind, LEAST_VMEM) if vmem is None else vmem
    rows = min(ROWS, up(shape.queries, LANES))
    chunk = min(CHUNK, up(shape.slots, LANES))
    whole = up(shape.slots, chunk)
    one = tile_bytes((chunk, shape.dim), shape.k) + tile_bytes((chunk, shape.value_dim), shape.v)
    if shape.rows <= ONE_BLOCK:
        return Tiles(up(shape.rows, 16), min(whole, max(STREAMED // one, 1) * chunk), chunk, 2)
    beside = 2 * tile_bytes((8, chunk), jnp.float32)  # positions and results
    empty = launch(shape, Tiles(rows, 0, chunk, 1)).vmem_bytes
    fit = int(vmem * SHARE - empty) // (one + beside)
    return Tiles(rows, min(whole, max(fit, 1) * chunk), chunk, 1)


def launch(shape: Shape, tiles: Tiles) -> Launch:
    """Grid (B, K, blocks of slots, sections, blocks of rows) and what moves in it.

    A block of keys, values and results stays while rows stream. Rows that see nothing of it, and blocks of slots that
    nobody sees, are not fetched: their index repeats the one before. So

    * when all rows are one block, everything is read once;
    * else keys and values are read once, in n blocks of the size that VMEM holds, and each row is read once for each
      block with a slot that it sees: causal rows ``sum_j (1 - j M / N)`` times, where ``N`` bytes of slots come in
      blocks of M. See :func:`bound` for the least that sets of slots of at most M bytes allow.

    The scalars, from :func:`plan`: what each chunk and each row block spans, and which rows each block of slots meets.
    """
    sections, _, row_blocks = tiles.sections(shape)
    slot_blocks = -(-shape.slots // max(tiles.slots, 1))
    rows, slots = sections * row_blocks * tiles.rows, slot_blocks * tiles.slots
    split = SPLIT if shape.v == jnp.bfloat16 else 1
    lead = (shape.batch, shape.kv_heads)

    def span(b: Any, h: Any, t: Any, spans: Any, which: int) -> Any:
        head = b * shape.pos_heads + (h if shape.pos_heads > 1 else 0)
        return spans[(head * slot_blocks + t) * 3 + which]

    def row(b: Any, h: Any, t: Any, g: Any, r: Any, chunks: Any, bounds: Any, spans: Any) -> Any:
        return g * row_blocks + _clip(r, span(b, h, t, spans, 0), span(b, h, t, spans, 1))

    def slot(b: Any, h: Any, t: Any, g: Any, r: Any, chunks: Any, bounds: Any, spans: Any) -> Any:
        return span(b, h, t, spans, 2)

    def queries(name: str, tail: tuple[int, ...], block: tuple[int | None, ...], dtype: Any) -> Operand:
        def index(*at: Any) -> tuple[Any, ...]:
            inner = [0] * len(tail)
            inner[-1 if name == "facts" else -2] = row(*at)
            return (at[0], at[1], *inner)

        return Operand(name, (*lead, *tail), dtype, (None, None, *block), index)

    def keys(name: str, dim: int, dtype: Any) -> Operand:
        index = lambda *at: (at[0], at[1], slot(*at), 0)  # noqa: E731
        return Operand(name, (*lead, shape.slots, dim), dtype, (None, None, tiles.slots, dim), index, tiles.buffers)

    def position(*at: Any) -> tuple[Any, ...]:
        return at[0], at[1] if shape.pos_heads > 1 else 0, 0, slot(*at)

    def line(name: str, shape: tuple[int, ...], dtype: Any, index: Any) -> Operand:
        return Operand(name, shape, dtype, (None, None, shape[2], tiles.slots), index, tiles.buffers)

    lanes = up(tiles.rows, LANES)
    o_dtype = jnp.bfloat16 if split > 1 else jnp.float32
    return Launch(
        grid=(*lead, slot_blocks, sections, row_blocks),
        inputs=(
            queries("q", (rows, shape.dim), (tiles.rows, shape.dim), shape.q),
            queries("o", (split, rows, shape.value_dim), (split, tiles.rows, shape.value_dim), o_dtype),
            queries("facts", (FACTS, sections * row_blocks * lanes), (FACTS, lanes), jnp.int32),
            Operand("centre", (*lead, 1, shape.value_dim), jnp.float32, (None, None, 1, shape.value_dim), _centre),
            keys("k", shape.dim, shape.k),
            keys("v", shape.value_dim, shape.v),
            line("pos", (shape.batch, shape.pos_heads, 1, slots), jnp.int32, position),
        ),
        outputs=(line("r", (*lead, 2, shape.slots), jnp.float32, _result),),
        scalars=3,
        parallel=3,
    )


def _clip(x: Any, low: Any, high: Any) -> Any:
    """On traced indices, or on the arrays that traffic is counted from."""
    return np.clip(x, low, high) if isinstance(x, np.ndarray) else jnp.clip(x, low, high)


def _centre(b: Any, h: Any, *_: Any) -> tuple[Any, ...]:
    return b, h, 0, 0


def _result(b: Any, h: Any, t: Any, *_: Any) -> tuple[Any, ...]:
    return b, h, 0, t


def bound(shape: Shape, held: int) -> int:
    """Least bytes for causal rows, as many positions as slots, when at most ``held`` bytes of slots stay in VMEM.

    Keys, values and results move once. Sets of slots of at most that size take turns, and each row meets every set
    that has a slot before it: least when the sets are full and only the last one is not. VMEM holds whole lanes, so
    that a head of 64 takes as much of it as one of 128.
    """
    count = 1024  # of slots, whole tiles in every dtype
    kept = tile_bytes((count, shape.dim), shape.k) + tile_bytes((count, shape.value_dim), shape.v)
    whole = shape.slots * kept / count
    slot = shape.dim * jnp.dtype(shape.k).itemsize + shape.value_dim * jnp.dtype(shape.v).itemsize
    split = SPLIT * 2 if shape.v == jnp.bfloat16 else 4
    row = shape.dim * jnp.dtype(shape.q).itemsize + shape.value_dim * split + FACTS * 4
    rows = sum(shape.rows * (1 - j * held / whole) for j in range(math.ceil(whole / held)))
    heads = shape.batch * shape.kv_heads
    return heads * int(shape.slots * (slot + 8) + rows * row) + shape.batch * shape.slots * 4


def plan(shape: Shape, tiles: Tiles, row_pos: Array, key_pos: Array, window: int | None) -> tuple[Array, Array, Array]:
    """The scalars of :func:`launch`.

    Args:
        row_pos: int32 ``[B,N]``, positions of the rows of one section, -1 for none, N whole blocks.
        key_pos: int32 ``[B,K|1,T]``, T whole blocks.

    Returns:
        int32, flat: lowest and highest position of each chunk of slots; of each block of rows; and for each block of
        slots the first and the last block of rows that sees it and the block to fetch.
    """
    chunks = _bounds(key_pos.reshape(*key_pos.shape[:2], -1, tiles.chunk))
    blocks = _bounds(key_pos.reshape(*key_pos.shape[:2], -1, tiles.slots))
    rows = _bounds(row_pos.reshape(row_pos.shape[0], -1, tiles.rows))
    early, late = (rows[:, None, None, :, i] for i in (0, 1))
    low, high = (blocks[..., None, i] for i in (0, 1))
    met = _meet(early, late, low, high, window)
    some = met.any(axis=-1)
    first = jnp.argmax(met, axis=-1).astype(jnp.int32)
    last = (met.shape[-1] - 1 - jnp.argmax(met[..., ::-1], axis=-1)).astype(jnp.int32)
    at = jnp.broadcast_to(jnp.arange(met.shape[2], dtype=jnp.int32), some.shape)
    source = jax.lax.cummax(jnp.where(some, at, -1), axis=2)
    source = jnp.where(source < 0, jnp.argmax(some, axis=2, keepdims=True).astype(jnp.int32), source)
    stay = jnp.take_along_axis(jnp.where(source <= at, last, first), source, axis=2)
    spans = jnp.stack([jnp.where(some, first, stay), jnp.where(some, last, stay), source], axis=-1)
    return chunks.ravel(), rows.ravel(), spans.ravel()


def _bounds(pos: Array) -> Array:
    """Lowest and highest position along the last axis, which it replaces; padding left out."""
    low = jnp.where(pos >= 0, pos, jnp.iinfo(jnp.int32).max).min(axis=-1)
    return jnp.stack([low, pos.max(axis=-1)], axis=-1)


def _meet(early: Any, late: Any, low: Any, high: Any, window: int | None) -> Any:
    """Whether rows at positions ``early`` to ``late`` may see slots at ``low`` to ``high``."""
    met = (low <= late) & (high >= 0)
    return met if window is None else met & (early < high + window) & (late >= 0)


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
    vmem: int | None = None,
    tile: Tiles | None = None,
    interpret: Any = False,
) -> Array:
    """See :func:`pallas_kernels.sensitivity.sensitivity`; ``vmem`` bytes of the chip or tiles, if not the default."""
    _check(q, k, v)
    queries = reference.clean_queries(q, query_pos, lse, o, weights, k.shape[1])
    centre = reference.centre_of(queries)
    shape = shape_of(q, k, v, key_pos)
    tile = tiles(shape, vmem) if tile is None else tile
    found = launch(shape, tile)
    queries = jax.tree.map(lambda x: rows_of(x, shape, tile), queries._replace(pos=None))
    pos = row_positions(query_pos, shape, tile)
    key_pos = jnp.pad(key_pos, ((0, 0), (0, 0), (0, -shape.slots % tile.slots)), constant_values=-1)
    scalars = plan(shape, tile, pos, key_pos, window)
    facts, outputs = facts_of(
        queries._replace(pos=jnp.tile(pos, (1, tile.sections(shape)[0]))), centre, shape, tile, scale
    )
    kernel = functools.partial(_kernel, shape=shape, tile=tile, scale=scale, window=window, softcap=softcap)
    flops = 2 * shape.batch * shape.kv_heads * shape.rows * shape.slots * (shape.dim + shape.value_dim)
    call = found.call(kernel, name="sensitivity", interpret=interpret, flops=flops)
    arrays = (queries.q.astype(shape.q), outputs, facts, centre, k, v, key_pos[:, :, None])
    return jnp.swapaxes(call(*scalars, *arrays)[0], 2, 3)


def _check(q: Array, k: Array, v: Array) -> None:
    kinds = {str(x.dtype) for x in (q, k, v)}
    if not kinds <= {"float32", "bfloat16"}:
        raise NotImplementedError(f"q, k and v must be float32 or bfloat16, got {', '.join(sorted(kinds))}.")
    if not (q.shape[2] and k.shape[2]):
        raise NotImplementedError("at least one query and one slot.")


def _kernel(
    chunks: Any,
    bounds: Any,
    spans: Any,
    q_ref: Any,
    o_ref: Any,
    facts_ref: Any,
    centre_ref: Any,
    k_ref: Any,
    v_ref: Any,
    pos_ref: Any,
    r_ref: Any,
    *,
    shape: Shape,
    tile: Tiles,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """Add what one block of rows has to say about one block of slots, a chunk of slots at a time."""
    b, h, t, g, r = (pl.program_id(axis) for axis in range(5))
    row_blocks = tile.sections(shape)[2]
    per_block, slot_blocks = tile.slots // tile.chunk, -(-shape.slots // tile.slots)
    head = b * shape.pos_heads + (h if shape.pos_heads > 1 else 0)

    @pl.when((g == 0) & (r == 0))
    def _start() -> None:
        r_ref[...] = jnp.zeros_like(r_ref)

    early, late = (bounds[(b * row_blocks + r) * 2 + i] for i in (0, 1))

    def step(c: Any, _: None) -> None:
        low, high = (chunks[((head * slot_blocks + t) * per_block + c) * 2 + i] for i in (0, 1))

        @pl.when(_meet(early, late, low, high, window))
        def _add() -> None:
            at = pl.ds(pl.multiple_of(c * tile.chunk, tile.chunk), tile.chunk)
            facts = facts_ref[...].T[: tile.rows]
            column = lambda i: jax.lax.bitcast_convert_type(facts[:, i : i + 1], jnp.float32)  # noqa: E731
            score = _dot(q_ref[...], k_ref[at, :].astype(shape.q)) * scale
            bend = None
            if softcap is not None:
                capped = jnp.tanh(score / softcap)
                score, bend = softcap * capped, 1 - capped**2
            query, key = facts[:, POSITION : POSITION + 1], pos_ref[:, at]
            seen = (key >= 0) & (key <= query)
            if window is not None:
                seen = seen & (key > query - window)
            weight = jnp.exp(jnp.where(seen, score - column(LSE), reference.LOW))
            squared = weight * weight
            away = _away(o_ref, v_ref[at, :], centre_ref[...], column(OFFSET))
            keys = squared * away * column(KEYS)
            if bend is not None:
                keys = keys * bend * bend
            # Slots past the end hold anything, even NaN; each stays in its own column until it is left out here.
            r_ref[0:1, at] += jnp.where(seen, keys, 0.0).sum(axis=0, keepdims=True)
            r_ref[1:2, at] += (squared * column(VALUES)).sum(axis=0, keepdims=True)

    jax.lax.fori_loop(0, per_block, step, None)


def _away(o_ref: Any, v: Array, centre: Array, offset: Array) -> Array:
    """``|v - o|^2``, rows by slots."""
    wide = v.astype(jnp.float32) - centre
    between = _dot(o_ref[0], wide) if o_ref.shape[0] == 1 else _dot(o_ref[0], v) + _dot(o_ref[1], v)
    length = _dot(jnp.ones((8, wide.shape[1]), jnp.float32), wide * wide)[0:1]
    return jnp.maximum(length + offset - 2 * between, 0.0)


def _dot(a: Array, b: Array) -> Array:
    """``a b'`` in fp32, of fp32 at full precision."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    contract = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)
