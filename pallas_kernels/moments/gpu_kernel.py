"""The Mosaic GPU kernel of the moments: sums of products over rows for pairs of tiles; see ``gpu.py``."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.moments.gpu import ROWS

TERMS = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))  # the small ones first
SWIZZLE = 128  # bytes


def call(
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

    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((heads, left_mean.shape[1], width), jnp.float32),
        grid=(heads, len(pairs)),
        grid_names=("head", "pair"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )
    first, second = (jnp.asarray(pairs[:, side]) for side in (0, 1))
    found: jax.Array = run(first, second, gather, root, left, left_mean, right, right_mean)
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
