"""Second moments of every head's gathered blocks in plain XLA: the specification, the fallback and the test oracle."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

HIGHEST = lax.Precision.HIGHEST
ROWS = 4096  # a chunk's
PANELS, PANEL = 4, 512  # at most so many panels of the Gram, at least so wide


class Sums(NamedTuple):
    """Sums over rows with each head's weights w, of ``z = x - mean`` and ``u = y - mean``, float32.

    Attributes:
        weight, weight2: ``sum w``, ``sum w^2`` ``[H]``.
        x: ``sum w z`` ``[H,kF]``; y: ``sum w u``, yy: ``sum w u^2`` ``[H,Q]``.
        xx: ``sum w z z'`` ``[H,kF,kF]``; xy: ``sum w z u'`` ``[H,kF,Q]``.
    """

    weight: jax.Array
    weight2: jax.Array
    x: jax.Array
    y: jax.Array
    yy: jax.Array
    xx: jax.Array
    xy: jax.Array


class Rows(NamedTuple):
    """A head's rows times ``sqrt w``: panels of blocks ``z [n,..F]``, outputs ``u [n,Q]``, ``sqrt w`` ``[n,1]``."""

    z: list[jax.Array]
    u: jax.Array
    root: jax.Array


def moments(
    blocks: jax.Array, y: jax.Array, gather: jax.Array, weight: jax.Array, x_mean: jax.Array, y_mean: jax.Array
) -> Sums:
    """See :func:`pallas_kernels.moments.moments`.

    One head after the other, a chunk of rows at a time: scratch is one chunk of one head. The Gram is symmetric, so
    only panels on and below its diagonal are multiplied, and mirrored at the end; products are plain matrices, which
    run at the machine's rate where batched ones do not.
    """

    def head(one: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> Sums:
        return _head(blocks, one[0], one[1], one[2], x_mean, one[3])

    return lax.map(head, (y, gather, weight, y_mean))


def _head(
    blocks: jax.Array, y: jax.Array, gather: jax.Array, weight: jax.Array, x_mean: jax.Array, y_mean: jax.Array
) -> Sums:
    total = weight.shape[0]
    chunks, rest = divmod(total, ROWS)
    if total <= ROWS:
        chunks, rest = 0, total

    def add(first: int | jax.Array, count: int) -> list[jax.Array]:
        return _products(rows(blocks, y, gather, weight, x_mean, y_mean, first, count))

    if chunks:
        sums = add(0, ROWS)
        body = lambda i, sums: jax.tree.map(jnp.add, sums, add(i * ROWS, ROWS))  # noqa: E731
        sums = lax.fori_loop(1, chunks, body, sums) if chunks > 1 else sums
        sums = jax.tree.map(jnp.add, sums, add(chunks * ROWS, rest)) if rest else sums
    else:
        sums = add(0, rest)
    w = jnp.where(weight > 0, weight, 0.0)
    x, y_sum, yy, xy, *xx = sums
    return Sums(w.sum(), (w * w).sum(), x, y_sum, yy, _mirrored(xx), xy)


def rows(
    blocks: jax.Array,
    y: jax.Array,
    gather: jax.Array,
    weight: jax.Array,
    x_mean: jax.Array,
    y_mean: jax.Array,
    first: int | jax.Array,
    count: int,
) -> Rows:
    """A chunk of one head's rows; zero where the weight is (``where`` before every product: NaN in padding)."""
    features, at = blocks.shape[2], jnp.asarray(first, jnp.int32)
    w = lax.dynamic_slice_in_dim(weight, at, count)[:, None]
    keep = w > 0
    root = jnp.where(keep, jnp.sqrt(jnp.where(keep, w, 1.0)), 0.0)
    zero = jnp.int32(0)

    def block(i: int) -> jax.Array:
        own = lax.dynamic_slice(blocks, (gather[i], at, zero), (1, count, features))[0]
        mean = lax.dynamic_slice_in_dim(x_mean, gather[i], 1)
        return jnp.where(keep, own.astype(jnp.float32) - mean, 0.0) * root

    parts = [block(i) for i in range(gather.shape[0])]
    panel = _panel(len(parts), features)
    z = [jnp.concatenate(parts[i : i + panel], axis=1) for i in range(0, len(parts), panel)]
    own = lax.dynamic_slice_in_dim(y, at, count).astype(jnp.float32)
    return Rows(z, jnp.where(keep, own - y_mean[None], 0.0) * root, root)


def _panel(count: int, features: int) -> int:
    """Blocks a panel."""
    return min(count, max(-(-count // PANELS), -(-PANEL // features)))


def flops(heads: int, k: int, features: int, rows: int, outputs: int) -> int:
    """Floating-point operations of the products that :func:`moments` does.

    Example:
        >>> from pallas_kernels.moments.reference import flops
        >>> flops(1, 1, 512, 10, 1), flops(1, 4, 512, 10, 1)  # one panel; ten of sixteen
        (5253120, 52469760)
    """
    panel, wide = _panel(k, features), k * features
    widths = [min(panel, k - i) * features for i in range(0, k, panel)]
    lower = sum(a * b for i, a in enumerate(widths) for b in widths[: i + 1])
    return 2 * heads * rows * (lower + wide * outputs)


def _products(found: Rows) -> list[jax.Array]:
    z, u, root = found
    x = jnp.concatenate([_dot(root, panel)[0] for panel in z])
    xy = jnp.concatenate([_dot(u, panel) for panel in z], axis=1).T  # few rows times many columns: faster on a CPU
    lower = [_dot(z[i], z[j]) for i in range(len(z)) for j in range(i + 1)]
    return [x, _dot(root, u)[0], (u * u).sum(axis=0), xy, *lower]


def _mirrored(lower: list[jax.Array]) -> jax.Array:
    """A symmetric matrix from the panels on and below its diagonal, row by row; products of a panel with itself are
    symmetric only up to rounding on some CPUs."""
    count = round(((8 * len(lower) + 1) ** 0.5 - 1) / 2)
    at = [i * (i + 1) // 2 for i in range(count)]
    own = [(lower[at[i] + i] + lower[at[i] + i].T) / 2 for i in range(count)]
    full = [
        [own[i] if i == j else lower[at[i] + j] if j < i else lower[at[j] + i].T for j in range(count)]
        for i in range(count)
    ]
    return jnp.concatenate([jnp.concatenate(row, axis=1) for row in full], axis=0)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.dot_general(a, b, (((0,), (0,)), ((), ())), precision=HIGHEST)
