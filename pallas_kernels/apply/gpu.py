"""``apply`` on a GPU (Mosaic GPU, Hopper): one thread block a target head and tile of target rows.

XLA gathers the source blocks onto the target's rows first. The kernel then sums over a head's blocks on the tensor
cores, up to four steps of 64 features in flight, and adds the bias and turns keys before the one write.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.apply import reference
from pallas_kernels.apply.reference import Linear, Rotation, Settings

Array = jax.Array
DEPTH = 64  # features of a step
SHARED = 224 << 10  # bytes of shared memory for blocks
WIDEST = 256


def project(
    sources: tuple[Array, ...],
    maps: tuple[Linear, ...],
    index: Array | None,
    weight: Array,
    rotation: Rotation | None,
    *,
    settings: Settings,
) -> tuple[Array, ...]:
    """:func:`pallas_kernels.apply.reference.project`, a launch a map.

    Raises:
        NotImplementedError: dtypes or widths that the kernel does not take; the message names the rule.
    """
    check(sources, maps, rotation, settings)
    fed = (weight != 0).any(axis=1).astype(jnp.float32)
    rows = max(_rows(m.bias.shape[2]) for m in maps)
    extra = -len(weight) % rows
    blocks = _gathered(sources, index, weight)
    if extra:
        blocks, fed = jnp.pad(blocks, ((0, 0), (0, extra), (0, 0))), jnp.pad(fed, (0, extra))
    made = []
    for n, one in enumerate(maps):
        turns = None
        if n == 0 and rotation is not None:
            turns = tuple(jnp.pad(t, ((0, 0), (0, extra), (0, 0))) for t in (rotation.cos, rotation.sin))
            turns = (*turns, reference.groups_of(rotation, one.bias.shape[0]))
        made.append(_call(blocks, one, fed, turns, settings.dtype)[:, :, : len(weight)])
    return tuple(made)


def check(sources: tuple[Array, ...], maps: tuple[Linear, ...], rotation: Rotation | None, settings: Settings) -> None:
    """What the kernel takes.

    Raises:
        NotImplementedError: naming the rule.
    """
    kinds = {a.dtype.name for a in (*sources, *(m.coefficients for m in maps))} | {settings.dtype}
    if kinds != {"bfloat16"}:
        raise NotImplementedError(
            f"apply on a GPU multiplies bfloat16 on the tensor cores, sources, coefficients and outputs alike; got "
            f"{sorted(kinds)}, whose products XLA makes at full precision."
        )
    width = sum(s.shape[2] for s in sources)
    channels = [m.bias.shape[2] for m in maps]
    if width % DEPTH or any(d % 64 or d > WIDEST for d in channels):
        raise NotImplementedError(
            f"apply on a GPU needs blocks and outputs in multiples of 64 features, outputs of at most {WIDEST}; got "
            f"{width} and {channels}."
        )
    if rotation is not None and (settings.interleaved or rotation.cos.shape[2] % 32):
        raise NotImplementedError(
            f"apply on a GPU turns halves of a multiple of 32 channels; got {rotation.cos.shape[2]}"
            f"{', interleaved' if settings.interleaved else ''}."
        )


def _rows(channels: int) -> int:
    """Target rows of a tile: accumulators of 128 registers a thread."""
    return 128 if channels <= 128 else 64


def _stages(rows: int, channels: int, half: int) -> int:
    """Steps in flight: as many as shared memory holds beside the outputs and the rotation."""
    rest = rows * (4 * channels + max(2 * channels, 8 * half))
    return max(2, min(4, (SHARED - rest) // (2 * DEPTH * (rows + channels))))


def _gathered(sources: tuple[Array, ...], index: Array | None, weight: Array) -> Array:
    """All blocks on the target's rows ``[U,T,F]``, features side by side."""
    numbers = jnp.arange(len(sources[0]))
    each = [lax.map(lambda u, s=s: reference.gathered(s, u, index, weight).astype(s.dtype), numbers) for s in sources]
    return each[0] if len(each) == 1 else jnp.concatenate(each, axis=2)


def _call(blocks: Array, one: Linear, fed: Array, turns: tuple[Array, ...] | None, dtype: str) -> Array:
    """``[L,H,T,D]`` of one map; T a multiple of the tile's rows."""
    layers, heads, k = one.gather.shape
    tokens, features, channels = blocks.shape[1], blocks.shape[2], one.bias.shape[2]
    rows, per, half = _rows(channels), features // DEPTH, 0 if turns is None else turns[0].shape[2]
    steps, stages = k * per, _stages(rows, channels, half)

    def body(*refs: Any) -> None:
        table, x, w, bias, mask = refs[:5]
        cos, sin, groups = refs[5:8] if turns is not None else (None, None, None)
        out = refs[-1]
        at, tile = lax.axis_index("head"), lax.axis_index("tile")
        here = pl.ds(tile * rows, rows)

        def inner(a: Any, b: Any, found: Any, ready: Any, small: Any) -> None:
            def fetch(step: Any) -> None:
                slot = lax.rem(step, stages)
                block, part = table[at * k + lax.div(step, per)], lax.rem(step, per)
                left = x.at[block, here, pl.ds(part * DEPTH, DEPTH)]
                plgpu.copy_gmem_to_smem(left, a.at[slot], ready.at[slot])
                plgpu.copy_gmem_to_smem(w.at[at, pl.ds(step * DEPTH, DEPTH), :], b.at[slot], ready.at[slot])

            for step in range(min(stages - 1, steps)):
                fetch(jnp.int32(step))

            def accumulate(total: Any) -> Array:
                def multiply(step: Any, _: Any) -> Any:
                    slot = lax.rem(step, stages)
                    plgpu.barrier_wait(ready.at[slot])
                    plgpu.wgmma(total, a.at[slot], b.at[slot])
                    plgpu.wgmma_wait(1)  # the step before is done, and its slot free

                    @pl.when(step + stages - 1 < steps)
                    def ahead() -> None:
                        fetch(step + stages - 1)

                    return ()

                lax.fori_loop(0, steps, multiply, ())
                plgpu.wgmma_wait(0)
                return total[...]

            y = pl.run_scoped(accumulate, plgpu.ACC((rows, channels), jnp.float32))
            pl.run_scoped(
                lambda b, m: _add(found, y, bias.at[at], mask.at[here], b, m, small),
                plgpu.SMEM((channels,), jnp.float32),
                plgpu.SMEM((rows,), jnp.float32),
            )
            if turns is not None:
                group = groups[lax.div(at, heads)]
                pl.run_scoped(
                    lambda c, s: _turn(found, cos.at[group, here], sin.at[group, here], c, s, small, half),
                    _floats(rows, half),
                    _floats(rows, half),
                )
            pl.run_scoped(lambda last: _store(found, last, out.at[at, here]), _halves(rows, channels, dtype))

        pl.run_scoped(
            inner,
            _stage((stages, rows, DEPTH)),
            _stage((stages, DEPTH, channels)),
            _floats(rows, channels),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2),
        )

    call = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((layers * heads, tokens, channels), jnp.dtype(dtype)),
        grid=(layers * heads, tokens // rows),
        grid_names=("head", "tile"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    flat = reference.flat_heads(one)
    made: Array = call(
        flat.gather.reshape(-1), blocks, flat.coefficients, flat.bias.astype(jnp.float32), fed, *(turns or ())
    )
    return made.reshape(layers, heads, tokens, channels)


def _stage(shape: tuple[int, ...]) -> Any:
    """Operands of the tensor cores."""
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def _floats(rows: int, width: int) -> Any:
    """Float32 rows in shared memory."""
    transforms = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM((rows, width), jnp.float32, transforms=transforms)


def _halves(rows: int, width: int, dtype: str) -> Any:
    """Rows as they are written."""
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM((rows, width), jnp.dtype(dtype), transforms=transforms)


def _add(found: Any, y: Array, bias: Any, mask: Any, own_bias: Any, own_mask: Any, barrier: Any) -> None:
    """Sums and bias of the rows that something feeds."""
    plgpu.copy_gmem_to_smem(bias, own_bias, barrier)
    plgpu.copy_gmem_to_smem(mask, own_mask, barrier)
    plgpu.barrier_wait(barrier)
    b, m = (lax.broadcast_in_dim(v[...], y.shape, (axis,)) for v, axis in ((own_bias, 1), (own_mask, 0)))
    found[...] = y + b * m
    plgpu.commit_smem()


def _turn(found: Any, cos: Any, sin: Any, own_cos: Any, own_sin: Any, barrier: Any, half: int) -> None:
    """Rotate the halves in place."""
    plgpu.copy_gmem_to_smem(cos, own_cos, barrier)
    plgpu.copy_gmem_to_smem(sin, own_sin, barrier)
    plgpu.barrier_wait(barrier)
    c, s = own_cos[...], own_sin[...]
    low, high = found.at[:, pl.ds(0, half)], found.at[:, pl.ds(half, half)]
    a, b = low[...], high[...]
    low[...] = a * c - b * s
    high[...] = b * c + a * s
    plgpu.commit_smem()


def _store(found: Any, last: Any, out: Any) -> None:
    last[...] = found[...].astype(last.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(last, out)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
