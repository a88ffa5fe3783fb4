"""Second moments on a GPU (Mosaic GPU, Hopper): bfloat16 blocks, products of float32 values on the tensor cores.

Centred and weighted rows are float32. Tensor cores multiply bfloat16: each value is split into three bfloat16 terms
that add up to it, and the six products that matter are summed in float32, as a TPU does at highest precision. One
thread block multiplies one pair of tiles, on or below the diagonal, over all rows; tiles are read through the L2 cache.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.moments import reference
from pallas_kernels.moments.reference import Sums

ROWS = 64  # a step's
TERMS = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))  # the small ones first
SWIZZLE = 128  # bytes


def moments(
    blocks: jax.Array,
    y: jax.Array,
    gather: jax.Array,
    weight: jax.Array,
    x_mean: jax.Array,
    y_mean: jax.Array,
    *,
    interpret: Any = None,
) -> Sums:
    """See :func:`pallas_kernels.moments.moments`; the last rows, fewer than 64, are the reference's.

    Args:
        blocks, y, gather, weight, x_mean, y_mean: see there.
        interpret: parameters of the Mosaic GPU interpreter.

    Raises:
        NotImplementedError: blocks or outputs that are not bfloat16, or features or outputs that are no multiple of 64.
    """
    for name, array in (("blocks", blocks), ("y", y)):
        if array.dtype != jnp.bfloat16:
            raise NotImplementedError(
                f"moments on a GPU reads bfloat16; {name} is {array.dtype}, whose products XLA multiplies at full rate."
            )
        if array.shape[2] % 64:
            raise NotImplementedError(f"moments on a GPU needs widths in multiples of 64; {name} has {array.shape[2]}.")
    whole = blocks.shape[1] // ROWS * ROWS
    if not whole:
        return reference.moments(blocks, y, gather, weight, x_mean, y_mean)
    vectors = _vectors(blocks, y, gather, weight, x_mean, y_mean)
    xx, xy = _products(blocks, y, gather, weight, x_mean, y_mean, interpret)
    if whole < blocks.shape[1]:
        rest = reference.moments(blocks[:, whole:], y[:, whole:], gather, weight[:, whole:], x_mean, y_mean)
        xx, xy = xx + rest.xx, xy + rest.xy
    w, w2, x, y_sum, yy = vectors
    return Sums(w, w2, x, y_sum, yy, xx, xy)


def _vectors(
    blocks: jax.Array, y: jax.Array, gather: jax.Array, weight: jax.Array, x_mean: jax.Array, y_mean: jax.Array
) -> tuple[jax.Array, ...]:
    """The sums that are no products, in one fused reduction a block."""
    w = jnp.where(weight > 0, weight, 0.0)

    def centred(rows: jax.Array, mean: jax.Array, own: jax.Array) -> jax.Array:
        return jnp.where((own > 0)[:, None], rows.astype(jnp.float32) - mean[None], 0.0)

    def block(at: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows, mean = (lax.dynamic_index_in_dim(a, at[0], keepdims=False) for a in (blocks, x_mean))
        return (centred(rows, mean, at[1]) * at[1][:, None]).sum(axis=0)

    def outputs(at: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        u = centred(at[0], at[1], at[2])
        return (u * at[2][:, None]).sum(axis=0), (u * u * at[2][:, None]).sum(axis=0)

    heads, k = gather.shape
    x = lax.map(lambda at: lax.map(lambda i: block((i, at[1])), at[0]), (gather, w))
    y_sum, yy = lax.map(outputs, (y, y_mean, w))
    return w.sum(axis=1), (w * w).sum(axis=1), x.reshape(heads, k * blocks.shape[2]), y_sum, yy


def _products(
    blocks: jax.Array,
    y: jax.Array,
    gather: jax.Array,
    weight: jax.Array,
    x_mean: jax.Array,
    y_mean: jax.Array,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    (heads, k), features, outputs = gather.shape, blocks.shape[2], y.shape[2]
    tile = 128 if features % 128 == 0 and outputs % 128 == 0 else 64
    tiles, mean = k * features // tile, jnp.take(x_mean, gather, axis=0, mode="clip").reshape(heads, k * features)
    lower = np.array([(a, b) for a in range(tiles) for b in range(a + 1)], np.int32)
    cross = np.array([(a, b) for a in range(tiles) for b in range(outputs // tile)], np.int32)
    run = functools.partial(_call, tile=tile, features=features, k=k, interpret=interpret)
    flat, root = gather.reshape(-1), jnp.sqrt(jnp.where(weight > 0, weight, 0.0))
    gram = run(lower, flat, root, blocks, mean, blocks, mean, gathered=True, width=k * features)
    low = jnp.tril(jnp.ones((tiles, tiles), bool)).repeat(tile, 0).repeat(tile, 1)
    xx = jnp.where(low[None], gram, jnp.swapaxes(gram, 1, 2))
    return xx, run(cross, flat, root, blocks, mean, y, y_mean, gathered=False, width=outputs)


def _call(
    pairs: np.ndarray,
    gather: jax.Array,
    root: jax.Array,
    left: jax.Array,
    left_mean: jax.Array,
    right: jax.Array,
    right_mean: jax.Array,
    *,
    tile: int,
    features: int,
    k: int,
    gathered: bool,
    width: int,
    interpret: Any,
) -> jax.Array:
    """``sum_n root^2 z_a z_b'`` for pairs of tiles ``[H,kF,width]``; other tiles of the result are not written."""
    heads, steps, per = root.shape[0], root.shape[1] // ROWS, features // tile
    transforms = (plgpu.TilingTransform((8, SWIZZLE // 2)), plgpu.SwizzleTransform(SWIZZLE))
    spec = plgpu.BlockSpec((ROWS, tile), lambda n: (n, 0), transforms=transforms)

    def body(rows: Any, columns: Any, table: Any, w: Any, a: Any, a_mean: Any, b: Any, b_mean: Any, out: Any) -> None:
        h, p = lax.axis_index("head"), lax.axis_index("pair")
        i, j = rows[p], columns[p]
        at_a = table[h * k + lax.div(i, per)]
        at_b = table[h * k + lax.div(j, per)] if gathered else h
        from_a = lax.rem(i, per) * tile
        from_b = (lax.rem(j, per) if gathered else j) * tile

        def inner(a_terms: Any, b_terms: Any, means: Any, barrier: Any) -> None:
            plgpu.copy_gmem_to_smem(a_mean.at[h, pl.ds(i * tile, tile)], means.at[0], barrier)
            plgpu.barrier_wait(barrier)
            plgpu.copy_gmem_to_smem(b_mean.at[h, pl.ds(j * tile, tile)], means.at[1], barrier)
            plgpu.barrier_wait(barrier)

            def accumulate(acc: Any) -> jax.Array:
                def step(_: Any, a_rows: Any, b_rows: Any, w_rows: Any) -> None:
                    _split(a_rows, means.at[0], w_rows, a_terms)
                    _split(b_rows, means.at[1], w_rows, b_terms)
                    plgpu.commit_smem()
                    for s, t in TERMS:
                        plgpu.wgmma(acc, plgpu.transpose_ref(a_terms.at[s], (1, 0)), b_terms.at[t])
                    plgpu.wgmma_wait(0)

                plgpu.emit_pipeline(
                    step,
                    grid=(steps,),
                    in_specs=[spec, spec, plgpu.BlockSpec((ROWS,), lambda n: (n,))],
                    max_concurrent_steps=2,
                )(a.at[at_a, :, pl.ds(from_a, tile)], b.at[at_b, :, pl.ds(from_b, tile)], w.at[h])
                return acc[...]

            found = pl.run_scoped(accumulate, plgpu.ACC((tile, tile)))
            pl.run_scoped(
                functools.partial(_store, found, out.at[h, pl.ds(i * tile, tile), pl.ds(j * tile, tile)]),
                plgpu.SMEM(
                    (tile, tile),
                    jnp.float32,
                    transforms=(plgpu.TilingTransform((8, SWIZZLE // 4)), plgpu.SwizzleTransform(SWIZZLE)),
                ),
            )

        terms = plgpu.SMEM((3, ROWS, tile), jnp.bfloat16, transforms=transforms)
        pl.run_scoped(inner, terms, terms, plgpu.SMEM((2, tile), jnp.float32), plgpu.Barrier())

    call = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((heads, left_mean.shape[1], width), jnp.float32),
        grid=(heads, len(pairs)),
        grid_names=("head", "pair"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )
    first, second = (jnp.asarray(pairs[:, side]) for side in (0, 1))
    found: jax.Array = call(first, second, gather, root, left, left_mean, right, right_mean)
    return found


def _split(rows: Any, mean: Any, root: Any, terms: Any) -> None:
    """Centre a step's rows, times the roots of their weights, and write them as three bfloat16 terms."""
    w = lax.broadcast_in_dim(root[...], rows.shape, (0,))
    own = rows[...].astype(jnp.float32) - lax.broadcast_in_dim(mean[...], rows.shape, (1,))
    left = jnp.where(w > 0, own, 0.0) * w
    for term in range(3):
        part = left.astype(jnp.bfloat16)
        terms[term] = part
        left = left - part.astype(jnp.float32)


def _store(found: jax.Array, out: Any, staging: Any) -> None:
    staging[...] = found
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staging, out)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
