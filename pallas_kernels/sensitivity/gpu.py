"""Hopper kernel of sensitivity: each block reads 64 keys and values once and goes through all queries."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.sensitivity import layout, reference

plgpu: Any
try:
    from jax.experimental.pallas import mosaic_gpu as plgpu
except ImportError:  # it needs absl-py, which jax itself does not install
    plgpu = None

SLOTS = 64  # of a block: one warpgroup's rows
ROWS = 64  # queries at a time
SMEM = 227 << 10


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
) -> Array:
    """See :func:`pallas_kernels.sensitivity.sensitivity`; bfloat16 q, k and v on Hopper.

    Raises:
        NotImplementedError: other dtypes, head dims that are no multiple of 16 or too large for shared memory, other
            GPUs.
    """
    _check(q, k, v)
    queries = reference.clean_queries(q, query_pos, lse, o, weights, k.shape[1])
    centre = reference.centre_of(queries)
    shape = layout.shape_of(q, k, v, key_pos)
    tile = layout.Tiles(layout.up(shape.rows, ROWS), SLOTS, SLOTS, 1)
    queries = jax.tree.map(lambda x: layout.rows_of(x, shape, tile), queries._replace(pos=None))
    pos = layout.row_positions(query_pos, shape, tile)
    bits, outputs = layout.facts_of(queries._replace(pos=pos), centre, shape, tile, scale)
    facts = jax.lax.bitcast_convert_type(bits[:, :, layout.LSE : layout.VALUES + 1, : tile.rows], jnp.float32)
    key_pos = jnp.pad(key_pos, ((0, 0), (0, 0), (0, -shape.slots % SLOTS)), constant_values=-1)
    k, v = (_whole_tiles(x) for x in (k, v))
    body = functools.partial(_kernel, shape=shape, rows=tile.rows, scale=scale, window=window, softcap=softcap)
    result = jax.ShapeDtypeStruct((shape.batch, shape.kv_heads, 2, key_pos.shape[-1]), jnp.float32)
    grid = (key_pos.shape[-1] // SLOTS, shape.kv_heads, shape.batch)
    call = plgpu.kernel(body, grid=grid, grid_names=("t", "h", "b"), **_memory(shape, result))
    rows = (queries.q, outputs[:, :, 0], outputs[:, :, 1], facts, bits[:, :, layout.POSITION])
    found = call(*rows, centre[:, :, 0], k, v, key_pos)
    return jnp.swapaxes(found[..., : shape.slots], 2, 3)


def _check(q: Array, k: Array, v: Array) -> None:
    if plgpu is None:
        raise NotImplementedError("Pallas for GPUs cannot be imported here: install absl-py.")
    if any(x.dtype != jnp.bfloat16 for x in (q, k, v)):
        raise NotImplementedError(
            "q, k and v must be bfloat16: tensor cores do not multiply float32 at full precision."
        )
    if any(x.shape[-1] % 16 for x in (k, v)):
        raise NotImplementedError(f"head dims must be multiples of 16, got {k.shape[-1]} and {v.shape[-1]}.")
    if not (q.shape[2] and k.shape[2]):
        raise NotImplementedError("at least one query and one slot.")
    if _bytes(k.shape[-1], v.shape[-1]) > SMEM:
        raise NotImplementedError(f"head dims {k.shape[-1]} and {v.shape[-1]} do not fit into shared memory.")
    for device in jax.devices():
        if device.platform == "gpu" and str(getattr(device, "compute_capability", "9.0")) != "9.0":
            raise NotImplementedError(f"wgmma needs compute capability 9.0, not {device.compute_capability}.")


def _whole_tiles(x: Array) -> Array:
    """Copies fetch tiles of 8 slots: a length that is no multiple of 8 costs one copy of keys and values."""
    room = -x.shape[2] % 8
    return jnp.pad(x, ((0, 0), (0, 0), (0, room), (0, 0))) if room else x


def _bytes(dim: int, value_dim: int) -> int:
    blocks = 2 * (SLOTS * (dim + value_dim) + ROWS * (dim + 2 * value_dim))
    return blocks + 4 * (5 * ROWS + 3 * SLOTS) + 12 * 1024  # each buffer starts at a whole KiB


def _memory(shape: layout.Shape, result: jax.ShapeDtypeStruct) -> dict[str, Any]:
    """The result, shared memory and barriers, under the names that this release of JAX knows."""

    def matrix(rows: int, dim: int) -> Any:
        swizzle = plgpu.find_swizzle(dim * 16)
        tiling = plgpu.TilingTransform((8, swizzle // 2))
        return plgpu.SMEM((rows, dim), jnp.bfloat16, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))

    def vector(size: int, dtype: Any = jnp.float32) -> Any:
        return plgpu.SMEM((size,), dtype)

    buffers = [
        matrix(SLOTS, shape.dim),
        matrix(SLOTS, shape.value_dim),
        vector(SLOTS, jnp.int32),
        matrix(ROWS, shape.dim),
        matrix(ROWS, shape.value_dim),
        matrix(ROWS, shape.value_dim),
        *(vector(ROWS) for _ in range(4)),
        vector(ROWS, jnp.int32),
        vector(SLOTS),
        vector(SLOTS),
        plgpu.Barrier(num_arrivals=3),
        plgpu.Barrier(num_arrivals=8),
    ]
    known = inspect.signature(plgpu.kernel).parameters
    kind = "type" if "out_type" in known else "shape"
    return {f"out_{kind}": result, f"scratch_{kind}s": buffers}


def _kernel(
    q: Any,
    high: Any,
    low: Any,
    facts: Any,
    positions: Any,
    centre: Any,
    k: Any,
    v: Any,
    pos: Any,
    result: Any,
    k_block: Any,
    v_block: Any,
    pos_block: Any,
    q_block: Any,
    high_block: Any,
    low_block: Any,
    lse_block: Any,
    offset_block: Any,
    keys_block: Any,
    values_block: Any,
    position_block: Any,
    keys_out: Any,
    values_out: Any,
    slots_ready: Any,
    rows_ready: Any,
    *,
    shape: layout.Shape,
    rows: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """One warpgroup: slots down, queries across; a slot's sums stay in registers while queries pass."""
    t, h, b = (jax.lax.axis_index(name) for name in ("t", "h", "b"))
    at = pl.ds(t * SLOTS, SLOTS)
    matrix, down, across = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
    plgpu.copy_gmem_to_smem(k.at[b, h, at], k_block, slots_ready)
    plgpu.copy_gmem_to_smem(v.at[b, h, at], v_block, slots_ready)
    plgpu.copy_gmem_to_smem(pos.at[b, h if shape.pos_heads > 1 else 0, at], pos_block, slots_ready)
    plgpu.barrier_wait(slots_ready)
    middle = plgpu.load(centre.at[b, h], (), layout=across, optimized=False)
    wide = plgpu.load(v_block, (), layout=matrix).astype(jnp.float32)
    wide = wide - jax.lax.broadcast_in_dim(middle, wide.shape, [1])
    length = jax.lax.broadcast_in_dim((wide * wide).sum(axis=1), (SLOTS, ROWS), [0])
    key = jax.lax.broadcast_in_dim(plgpu.load(pos_block, (), layout=down), (SLOTS, ROWS), [0])

    def column(block: Any) -> Array:
        return jax.lax.broadcast_in_dim(plgpu.load(block, (), layout=across), (SLOTS, ROWS), [1])

    def step(r: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        span = pl.ds(r * ROWS, ROWS)
        for source, block in ((q, q_block), (high, high_block), (low, low_block)):
            plgpu.copy_gmem_to_smem(source.at[b, h, span], block, rows_ready)
        for i, block in enumerate((lse_block, offset_block, keys_block, values_block)):
            plgpu.copy_gmem_to_smem(facts.at[b, h, i, span], block, rows_ready)
        plgpu.copy_gmem_to_smem(positions.at[b, h, span], position_block, rows_ready)
        plgpu.barrier_wait(rows_ready)
        score = _product((k_block, q_block)) * jnp.float32(scale)
        between = _product((v_block, high_block), (v_block, low_block))
        bend = None
        if softcap is not None:
            capped = jnp.tanh(score / jnp.float32(softcap))
            score, bend = jnp.float32(softcap) * capped, 1.0 - capped * capped
        query = column(position_block)
        seen = (key >= 0) & (key <= query)
        if window is not None:
            seen = seen & (key > query - jnp.int32(window))
        weight = jnp.exp(jnp.where(seen, score - column(lse_block), jnp.float32(reference.LOW)))
        squared = weight * weight
        away = jnp.maximum(length + column(offset_block) - 2.0 * between, 0.0)
        keys = squared * away * column(keys_block)
        if bend is not None:
            keys = keys * bend * bend
        keys = jnp.where(seen, keys, jnp.float32(0))
        sums = sums[0] + keys.sum(axis=1), sums[1] + (squared * column(values_block)).sum(axis=1)
        plgpu.commit_smem()  # all warps have read these queries before the next ones overwrite them
        return sums

    zero = plgpu.layout_cast(jnp.zeros((SLOTS,), jnp.float32), down)
    keys_out[...], values_out[...] = jax.lax.fori_loop(0, rows // ROWS, step, (zero, zero))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(keys_out, result.at[b, h, 0, at])
    plgpu.copy_smem_to_gmem(values_out, result.at[b, h, 1, at])
    plgpu.wait_smem_to_gmem(0)


def _product(*pairs: tuple[Any, Any]) -> Array:
    """Sum of ``a b'`` over pairs of blocks, in fp32."""

    def run(total: Any) -> Array:
        for a, b in pairs:
            plgpu.wgmma(total, a, plgpu.transpose_ref(b, (1, 0)))
        return total[...]

    return pl.run_scoped(run, plgpu.ACC((SLOTS, ROWS), jnp.float32))
