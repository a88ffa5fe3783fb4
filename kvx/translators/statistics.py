"""Mean and covariance of what a translator makes, which its constant and random controls use."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from kvx.mappers.linear import HIGHEST

Sums = tuple[Array, Array, Array]


def output_sums(out: Any, made: Array, real: Array) -> Sums:
    """Tokens, and first and second sums of what is made about the present average, so that nothing cancels.

    Args:
        out: holds ``average`` ``[L,K,D]``; made: ``[L,B,K,T,D]``; real: ``[B,T]``, which tokens count.
    """
    real = real[None, :, None, :, None]
    y = jnp.where(real, made - out.average[:, None, :, None], 0.0)
    second = jnp.einsum("lbktd,lbkte->lkde", y, y, precision=HIGHEST)
    return real.sum().astype(jnp.float32), y.sum(axis=(1, 3)), second


def calibrated(out: Any, parts: Sequence[Sums]) -> Any:
    """The outputs with ``average`` and ``covariance`` as their sums over several batches tell them."""
    count, first, second = (sum(column[1:], start=column[0]) for column in zip(*parts, strict=True))
    offset = first / jnp.maximum(count, 1)
    covariance = second / jnp.maximum(count, 1) - offset[..., :, None] * offset[..., None, :]
    return dataclasses.replace(out, average=out.average + offset, covariance=covariance)
