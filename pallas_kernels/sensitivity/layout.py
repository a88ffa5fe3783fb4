"""How a call's arrays are laid out for its kernels: sizes, tiles, rows of queries and their facts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.launch import LANES
from pallas_kernels.sensitivity.reference import Queries

SPLIT = 2  # bfloat16 parts that stand for a float32 output beside bfloat16 values
POSITION, LSE, OFFSET, KEYS, VALUES, FACTS = 0, 1, 2, 3, 4, 8  # rows of a query's facts, filled up to one tile


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes and dtypes of a call.

    Attributes:
        batch, kv_heads, groups, queries, slots, dim, value_dim: ``B``, ``K``, ``G``, ``U``, ``T``, ``D``, ``Dv``.
        pos_heads: 1 when all kv heads share their slots' positions, else ``K``.
        q, k, v: dtypes; ``q`` is what scores are made in.
    """

    batch: int
    kv_heads: int
    groups: int
    queries: int
    slots: int
    dim: int
    value_dim: int
    pos_heads: int = 1
    q: Any = jnp.float32
    k: Any = jnp.float32
    v: Any = jnp.float32

    @property
    def rows(self) -> int:
        """Queries of one kv head, whose group's query heads follow each other."""
        return self.groups * self.queries


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Rows of queries in a block, slots in a block, slots at a time, and buffers of a block of slots."""

    rows: int
    slots: int
    chunk: int
    buffers: int

    def sections(self, shape: Shape) -> tuple[int, int, int]:
        """Sections that the rows of a kv head come in, rows of each, and blocks of each.

        One when all rows are one block, else one for each query head: a block's rows then follow each other in the
        context, and no row has to move.
        """
        count, rows = (1, shape.rows) if self.rows >= shape.rows else (shape.groups, shape.queries)
        return count, rows, -(-rows // self.rows)


def shape_of(q: Any, k: Any, v: Any, key_pos: Any) -> Shape:
    """Sizes of a call from its arrays, or their shapes and dtypes."""
    kv_heads = k.shape[1]
    made_in = q.dtype if q.dtype == k.dtype else jnp.float32
    dtypes = {"q": made_in, "k": k.dtype, "v": v.dtype}
    sizes = (
        k.shape[0],
        kv_heads,
        q.shape[1] // kv_heads,
        q.shape[2],
        k.shape[2],
        k.shape[3],
        v.shape[3],
        key_pos.shape[1],
    )
    return Shape(*sizes, **{name: jnp.dtype(dtype) for name, dtype in dtypes.items()})


def row_positions(query_pos: Array, shape: Shape, tile: Tiles) -> Array:
    """Positions ``[B,N]`` of the rows of one section, -1 where it is filled up to whole blocks."""
    _, rows, blocks = tile.sections(shape)
    pos = jnp.tile(query_pos, (1, rows // shape.queries))
    return jnp.pad(pos, ((0, 0), (0, blocks * tile.rows - rows)), constant_values=-1)


def rows_of(x: Array, shape: Shape, tile: Tiles) -> Array:
    """``[B,K,G,U,...]`` as rows ``[B,K,N,...]``, each section filled up to whole blocks."""
    sections, rows, blocks = tile.sections(shape)
    x = x.reshape(*x.shape[:2], sections, rows, *x.shape[4:])
    room = [(0, 0)] * x.ndim
    room[3] = (0, blocks * tile.rows - rows)
    return jnp.pad(x, room).reshape(*x.shape[:2], -1, *x.shape[4:])


def facts_of(rows: Queries, centre: Array, shape: Shape, tile: Tiles, scale: float) -> tuple[Array, Array]:
    """Facts of each row, as the bits of int32 ``[B,K,FACTS,N]``, and its centred output in parts ``[B,K,S,N,Dv]``.

    Beside bfloat16 values, which stay as they are, the offset takes up that they are not centred: ``|v - o|^2 =
    |v - c|^2 + (|o - c|^2 + 2 c.(o - c)) - 2 v.(o - c)``.
    """
    o = jnp.where((rows.weights != 0).any(axis=-1, keepdims=True), rows.o - centre, 0.0)
    offset = (o**2).sum(axis=-1)
    if shape.v == jnp.bfloat16:
        offset = offset + 2 * (o * centre).sum(axis=-1)
        high = jax.lax.reduce_precision(o, 8, 7)
        parts = jnp.stack([high, o - high], axis=2).astype(jnp.bfloat16)
    else:
        parts = o[:, :, None]
    power = (rows.q.astype(jnp.float32) ** 2).sum(axis=-1) * jnp.float32(scale**2)
    floats = (rows.lse, offset, power * rows.weights[..., 0], rows.weights[..., 1])
    live = (rows.weights != 0).any(axis=-1)
    position = jnp.where(live, rows.pos[:, None], -1)
    bits = [position, *(jax.lax.bitcast_convert_type(x, jnp.int32) for x in floats)]
    bits += [jnp.zeros_like(position)] * (FACTS - len(bits))
    facts = jnp.stack(bits, axis=2)
    lanes = facts.shape[-1] if facts.shape[-1] > tile.rows else up(tile.rows, LANES)
    return jnp.pad(facts, ((0, 0), (0, 0), (0, 0), (0, lanes - facts.shape[-1]))), parts


def up(x: int, to: int) -> int:
    return -(-x // to) * to
