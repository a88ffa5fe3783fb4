"""Gradients of the moments in plain XLA, a chunk of rows and a head at a time; rows are gathered again, not kept."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.moments.reference import HIGHEST, Sums

ROWS = 2048


def backward(inputs: tuple[jax.Array, ...], bar: Sums) -> tuple[Any, ...]:
    """Cotangents of blocks, y, gather (none), weight and both means.

    With ``S = A_bar + A_bar'``: ``z_bar = w (S z + B_bar u + x_bar)``, ``u_bar = w (B_bar' z + y_bar + 2 yy_bar u)``,
    ``w_bar = z' A_bar z + z' B_bar u + x_bar z + y_bar u + yy_bar u^2 + weight_bar + 2 w weight2_bar``.
    """
    blocks, y, gather, weight, x_mean, y_mean = inputs
    total = weight.shape[1]
    size = min(ROWS, total)
    chunks = -(-total // size)
    means = jnp.take(x_mean, gather, axis=0, mode="clip").reshape(len(gather), -1)

    def chunk(carry: tuple[jax.Array, ...], at: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        first = jnp.minimum(at * size, total - size)  # the last chunk steps back; rows seen before count once
        fresh = jnp.arange(size, dtype=jnp.int32) + first >= at * size

        def head(carry: tuple[jax.Array, ...], h: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
            return _head(carry, h, first, fresh, blocks, y, gather, weight, means, y_mean, bar), None

        return lax.scan(head, carry, jnp.arange(len(gather), dtype=jnp.int32))

    start = tuple(jnp.zeros(a.shape, jnp.float32) for a in (blocks, y, weight, x_mean, y_mean))
    found, _ = lax.scan(chunk, start, jnp.arange(chunks, dtype=jnp.int32))
    x_bar, y_bar, weight_bar, x_mean_bar, y_mean_bar = found
    return x_bar.astype(blocks.dtype), y_bar.astype(y.dtype), None, weight_bar, x_mean_bar, y_mean_bar


def _head(
    carry: tuple[jax.Array, ...],
    h: jax.Array,
    first: jax.Array,
    fresh: jax.Array,
    blocks: jax.Array,
    y: jax.Array,
    gather: jax.Array,
    weight: jax.Array,
    means: jax.Array,
    y_mean: jax.Array,
    bar: Sums,
) -> tuple[jax.Array, ...]:
    x_bar, y_bar, weight_bar, x_mean_bar, y_mean_bar = carry
    size, (_, k), features, zero = len(fresh), gather.shape, blocks.shape[2], jnp.int32(0)
    w = jnp.where(fresh, lax.dynamic_slice(weight, (h, first), (1, size))[0], 0.0)[:, None]
    keep = w > 0
    w = jnp.where(keep, w, 0.0)
    own = [lax.dynamic_slice(blocks, (gather[h, i], first, zero), (1, size, features))[0] for i in range(k)]
    z = jnp.where(keep, jnp.concatenate(own, axis=1).astype(jnp.float32) - means[h][None], 0.0)
    u = lax.dynamic_slice(y, (h, first, zero), (1, size, y.shape[2]))[0].astype(jnp.float32)
    u = jnp.where(keep, u - y_mean[h][None], 0.0)
    a_bar, b_bar = bar.xx[h], bar.xy[h]
    zs = jnp.dot(z, a_bar + a_bar.T, precision=HIGHEST)
    ub = jnp.dot(u, b_bar.T, precision=HIGHEST)
    z_bar = w * (zs + ub + bar.x[h][None])
    u_bar = w * (jnp.dot(z, b_bar, precision=HIGHEST) + bar.y[h][None] + 2 * bar.yy[h][None] * u)
    by_row = (z * (0.5 * zs + ub + bar.x[h][None])).sum(axis=1)
    by_row = by_row + (u * (bar.y[h][None] + bar.yy[h][None] * u)).sum(axis=1)
    w_bar = jnp.where(keep[:, 0], by_row + bar.weight[h] + 2 * w[:, 0] * bar.weight2[h], 0.0)
    for i in range(k):
        part = z_bar[:, i * features : (i + 1) * features]
        x_bar = _add(x_bar, part[None], (gather[h, i], first, zero))
        x_mean_bar = _add(x_mean_bar, -part.sum(axis=0)[None], (gather[h, i], zero))
    y_bar = _add(y_bar, u_bar[None], (h, first, zero))
    y_mean_bar = _add(y_mean_bar, -u_bar.sum(axis=0)[None], (h, zero))
    return x_bar, y_bar, _add(weight_bar, w_bar[None], (h, first)), x_mean_bar, y_mean_bar


def _add(whole: jax.Array, part: jax.Array, at: tuple[jax.Array, ...]) -> jax.Array:
    return lax.dynamic_update_slice(whole, lax.dynamic_slice(whole, at, part.shape) + part, at)
