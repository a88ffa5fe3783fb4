"""Second moments on a GPU (Hopper): bfloat16 blocks, products of float32 values on the tensor cores.

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

from pallas_kernels.moments import reference
from pallas_kernels.moments.reference import Sums

ROWS = 64  # a step's


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
        NotImplementedError: blocks or outputs that are not bfloat16, features or outputs that are no multiple of 64, a
            GPU other than Hopper, or no Mosaic GPU.
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
    run = functools.partial(_kernel().call, tile=tile, features=features, k=k, interpret=interpret)
    flat, root = gather.reshape(-1), jnp.sqrt(jnp.where(weight > 0, weight, 0.0))
    gram = run(lower, flat, root, blocks, mean, blocks, mean, gathered=True, width=k * features)
    low = jnp.tril(jnp.ones((tiles, tiles), bool)).repeat(tile, 0).repeat(tile, 1)
    xx = jnp.where(low[None], gram, jnp.swapaxes(gram, 1, 2))
    return xx, run(cross, flat, root, blocks, mean, y, y_mean, gathered=False, width=outputs)


def _kernel() -> Any:
    """The kernel's module; Mosaic GPU needs packages that JAX alone does not bring."""
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", "9.0") if device.platform == "gpu" else "9.0"
    if str(capability) != "9.0":
        raise NotImplementedError(
            f"moments on a GPU uses Hopper's warp-group products; {device.device_kind} has capability {capability}."
        )
    try:
        from pallas_kernels.moments import gpu_kernel
    except ImportError as error:
        raise NotImplementedError(f"moments on a GPU needs Mosaic GPU, which cannot be imported: {error}.") from error
    return gpu_kernel
