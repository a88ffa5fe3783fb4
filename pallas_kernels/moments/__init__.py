"""Weighted second moments of every head's gathered blocks, streamed over rows."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import dispatch
from pallas_kernels.moments import backward, gpu, reference, tpu
from pallas_kernels.moments.reference import Sums

__all__ = ["Sums", "moments", "whiten"]

IMPLEMENTATIONS: dict[str, Callable[..., Sums]] = {
    "xla": reference.moments,
    "tpu": tpu.moments,
    "gpu": gpu.moments,
    "interpret": functools.partial(tpu.moments, interpret=True),
}


def moments(
    blocks: jax.Array,
    y: jax.Array,
    gather: jax.Array,
    weight: jax.Array,
    x_mean: jax.Array,
    y_mean: jax.Array,
    white: jax.Array | None = None,
    *,
    implementation: str | None = None,
) -> Sums:
    """Second moments of a weighted regression for each head, over the source blocks it reads.

    Head h reads k blocks: ``z_n = [(blocks[gather[h,i], n] - x_mean[gather[h,i]]) white[gather[h,i]]]_i`` (without
    ``white`` the identity) and ``u_n = y[h,n] - y_mean[h]``. With ``w = weight[h]``: ``sum w``, ``sum w^2``,
    ``sum w z``, ``sum w u``, ``sum w u^2``, ``sum w z z'``, ``sum w z u'``. Sums add up over calls with other rows.

    Means are pivots: anything near the true ones keeps fp32 sums from cancelling. Whitening keeps features that are
    nearly collinear. It is done once a source block before the sums, since heads share it: doing it to each
    gathered block would cost ``2/k`` of the Gram's products again for every head; its price is ``4 U N F`` bytes of
    scratch, so long streams should come in calls of some thousand rows.

    Args:
        blocks: source blocks ``[U,N,F]``, bf16 or fp32: U blocks of F features, N token rows.
        y: ``[H,N,Q]``, bf16 or fp32: the outputs of each head.
        gather: int32 ``[H,k]``, which blocks a head reads, each ``0..U-1``.
        weight: float32 ``[H,N]``, at least zero. A row of weight zero is not read by that head (NaN included).
        x_mean: float32 ``[U,F]``; y_mean: float32 ``[H,Q]``.
        white: float32 ``[U,F,F]``.
        implementation: ``"xla"``, ``"tpu"``, ``"gpu"``, ``"interpret"``; ``None``: by platform.

    Returns:
        :class:`Sums`, float32; products of float32 values at highest precision, whatever the inputs' dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
        NotImplementedError: an implementation asked for by name cannot take these arguments; the message says why.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels.moments import moments
        >>> x = jnp.array([[[1.0], [2.0], [jnp.nan]]])
        >>> found = moments(x, 2 * x, jnp.zeros((1, 1), jnp.int32), jnp.array([[1.0, 1.0, 0.0]]),
        ...                 jnp.zeros((1, 1)), jnp.zeros((1, 1)))
        >>> found.xx.tolist(), found.xy.tolist(), found.x.tolist(), found.weight.tolist()
        ([[[5.0]]], [[[10.0]]], [[3.0]], [2.0])

    Reference:
        CacheBridge (arXiv 2609.00891), the fused fit; chunked sums about a pivot: Chan, Golub and LeVeque 1983.
    """
    _check(blocks, y, gather, weight, x_mean, y_mean, white)
    if white is not None:
        blocks = whiten(blocks, gather, weight, x_mean, white)
        x_mean = jnp.zeros_like(x_mean)
    return _moments(implementation, blocks, y, gather, weight, x_mean, y_mean)


def whiten(blocks: jax.Array, gather: jax.Array, weight: jax.Array, x_mean: jax.Array, white: jax.Array) -> jax.Array:
    """``(blocks - x_mean) white`` in float32, block by block; zero in rows that no head reads (NaN in padding).

    Args:
        blocks, gather, weight, x_mean, white: see :func:`moments`.

    Returns:
        ``[U,N,F]`` float32.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels.moments import whiten
        >>> x, mean, white = jnp.ones((1, 2, 1)), jnp.zeros((1, 1)), 3 * jnp.ones((1, 1, 1))
        >>> whiten(x, jnp.zeros((1, 1), jnp.int32), jnp.array([[1.0, 0.0]]), mean, white).tolist()
        [[[3.0], [0.0]]]
    """
    read = jnp.zeros(blocks.shape[:2], bool)
    read = read.at[gather].max(jnp.broadcast_to((weight > 0)[:, None], (*gather.shape, weight.shape[1])))

    def one(block: tuple[jax.Array, ...]) -> jax.Array:
        rows, keep, mean, own = block
        centred = jnp.where(keep[:, None], rows.astype(jnp.float32) - mean[None], 0.0)
        return jnp.dot(centred, own, precision=lax.Precision.HIGHEST)

    return lax.map(one, (blocks, read, x_mean, white))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _moments(implementation: str | None, *args: jax.Array) -> Sums:
    found: Sums = dispatch("moments", IMPLEMENTATIONS, implementation, *args)
    return found


def _forward(implementation: str | None, *args: jax.Array) -> tuple[Sums, tuple[jax.Array, ...]]:
    return _moments(implementation, *args), args


def _backward(implementation: str | None, args: tuple[jax.Array, ...], bar: Sums) -> tuple[jax.Array | None, ...]:
    return backward.backward(args, bar)


_moments.defvjp(_forward, _backward)


def _check(
    blocks: jax.Array,
    y: jax.Array,
    gather: jax.Array,
    weight: jax.Array,
    x_mean: jax.Array,
    y_mean: jax.Array,
    white: jax.Array | None,
) -> None:
    if blocks.ndim != 3 or y.ndim != 3 or gather.ndim != 2:
        raise ValueError(
            f"blocks {blocks.shape}, y {y.shape} and gather {gather.shape} must be [U,N,F], [H,N,Q] and [H,k]."
        )
    (u, n, f), (h, _, q), k = blocks.shape, y.shape, gather.shape[1]
    if min(u, n, f, h, q, k) == 0:
        raise ValueError(f"moments of nothing: blocks {blocks.shape}, y {y.shape}, gather {gather.shape}.")
    wanted = {"y": (h, n, q), "gather": (h, k), "weight": (h, n), "x_mean": (u, f), "y_mean": (h, q)}
    found = {"y": y, "gather": gather, "weight": weight, "x_mean": x_mean, "y_mean": y_mean}
    if white is not None:
        wanted["white"], found["white"] = (u, f, f), white
    for name, shape in wanted.items():
        if found[name].shape != shape:
            raise ValueError(f"{name} is {found[name].shape}; blocks {blocks.shape} and y {y.shape} ask for {shape}.")
        dtype = jnp.int32 if name == "gather" else jnp.float32
        if name != "y" and found[name].dtype != dtype:
            raise ValueError(f"{name} is {found[name].dtype}; it must be {jnp.dtype(dtype).name}.")
    for name, array in (("blocks", blocks), ("y", y)):
        if array.dtype not in (jnp.bfloat16, jnp.float32):
            raise ValueError(f"{name} is {array.dtype}; it must be bfloat16 or float32.")
