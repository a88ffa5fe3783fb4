"""Shapes of sensitivity that the compile checks compile: probes and all queries, with and without a window."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.check import Case
from pallas_kernels.launch import Traffic
from pallas_kernels.sensitivity import gpu, layout, tpu

VMEM = {"v5e": 128 << 20, "v5p": 64 << 20, "v6e": 128 << 20}
DTYPES = ("bfloat16", "float32")
HEAD_DIMS = (64, 128, 256)
LENGTHS = (1000, 131072)
PROBES, GROUPS, KV_HEADS = 32, 3, 2


def cases(chip: str) -> list[Case]:
    """Probes over short and long contexts, and every query of a long one.

    Args:
        chip: "v5e", "v5p" or "v6e".
    """
    shapes = [(dtype, dim, length, PROBES) for dtype, dim, length in itertools.product(DTYPES, HEAD_DIMS, LENGTHS)]
    shapes += [(dtype, dim, max(LENGTHS), max(LENGTHS)) for dtype, dim in itertools.product(DTYPES, HEAD_DIMS)]
    return [_case(chip, *shape) for shape in shapes]


def gpu_cases() -> list[Case]:
    """Probes in bfloat16, for lowering."""
    found = []
    for dim in HEAD_DIMS:
        args = structs("bfloat16", dim, 4096, PROBES)
        found.append(Case("sensitivity", "bfloat16", dim, 4096, functools.partial(gpu.sensitivity, scale=0.1), args))
    return found


def structs(
    dtype: str, dim: int, length: int, queries: int, kv_heads: int = KV_HEADS
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Arguments of a call with one sequence."""
    heads = kv_heads * GROUPS
    shapes = [
        ((1, heads, queries, dim), dtype),
        ((1, kv_heads, length, dim), dtype),
        ((1, kv_heads, length, dim), dtype),
        ((1, queries), "int32"),
        ((1, 1, length), "int32"),
        ((1, heads, queries), "float32"),
        ((1, heads, queries, dim), "float32"),
        ((1, kv_heads, queries, 2), "float32"),
    ]
    return tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(kind)) for shape, kind in shapes)


def cost(chip: str, args: tuple[jax.ShapeDtypeStruct, ...], window: int | None = None) -> tuple[Traffic, int]:
    """HBM traffic and VMEM bytes on a chip of a call whose queries lie evenly over a context in order."""
    q, k, v, query_pos, key_pos = args[:5]
    shape = layout.shape_of(q, k, v, key_pos)
    tile = tpu.tiles(shape, VMEM[chip])
    found = tpu.launch(shape, tile)
    at = np.linspace(0, shape.slots - 1, query_pos.shape[1]).astype(np.int32)
    keys = np.pad(np.arange(shape.slots, dtype=np.int32), (0, -shape.slots % tile.slots), constant_values=-1)
    rows = layout.row_positions(jnp.asarray(at)[None], shape, tile)
    plan = jax.jit(tpu.plan, static_argnums=(0, 1, 4))
    scalars = plan(shape, tile, rows, jnp.asarray(keys)[None, None], window)
    return found.traffic(*(np.asarray(x) for x in scalars)), found.vmem_bytes


def _case(chip: str, dtype: str, dim: int, length: int, queries: int) -> Case:
    args = structs(dtype, dim, length, queries)
    run = functools.partial(tpu.sensitivity, scale=dim**-0.5, vmem=VMEM[chip])
    label = "every query" if queries > PROBES else f"{PROBES} probes"
    bound = functools.partial(least, chip, args) if queries > PROBES else None
    return Case("sensitivity", dtype, dim, length, run, args, functools.partial(cost, chip, args), bound, label)


def least(chip: str, args: tuple[jax.ShapeDtypeStruct, ...]) -> float:
    """Least ratio of traffic to its minimum for every query of a context, see :func:`tpu.bound`."""
    q, k, v, _, key_pos = args[:5]
    shape = layout.shape_of(q, k, v, key_pos)
    moved = tpu.bound(shape, int(VMEM[chip] * tpu.SHARE))
    return max(1.0, moved / cost(chip, args)[0].minimum)
