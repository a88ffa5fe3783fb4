"""Controls: what a map must be compared with before it is believed to carry anything."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvx.errors import KvxError
from kvx.mappers.base import CacheMap
from kvx.mappers.linear import HIGHEST, BlockMap, LinearParams

_TINY = 1e-30


def constant(mapper: CacheMap) -> CacheMap:
    """The map with all coefficients zero: every token gets the mean key and value of the fit, whatever was read.

    Args:
        mapper: a fitted linear map or a trained translator (or a chain that ends in one).

    Returns:
        A map of the same shapes.

    Raises:
        KvxError: a map without coefficients, such as the identity.

    Example:
        >>> import kvx
        >>> from kvx.fitting.synthetic import toy_pairs
        >>> from kvx.mappers import constant, full_head
        >>> mapper, _ = kvx.fit(full_head(layers=1, ridge=1e-3), toy_pairs(), progress=False)
        >>> float(abs(constant(mapper).params.keys[0].coefficients).max())
        0.0
    """

    def silence(block: BlockMap) -> BlockMap:
        return dataclasses.replace(
            block,
            coefficients=jnp.zeros_like(block.coefficients),
            covariance=jnp.zeros_like(block.covariance),
        )

    return _changed(mapper, lambda block, _: silence(block), "silenced", jax.random.key(0))


def random(mapper: CacheMap, key: Array) -> CacheMap:
    """A random map with the support of the given one, whose outputs have the same mean and variance on the fitted rows.

    Per target head the coefficients are multiplied by a random Gaussian matrix, ``W M``, and each output channel is
    scaled to the variance it had: with S the covariance of the fitted outputs, ``diag(M' S M) = diag(S)``. Whatever the
    outputs carry is scrambled beyond what the target can read, while their scale stays right.

    Args:
        mapper: a fitted linear map or a trained translator (or a chain that ends in one).
        key: seed of the draw.

    Returns:
        A map of the same shapes.

    Raises:
        KvxError: a map without coefficients, such as the identity.

    Example:
        >>> import jax, kvx
        >>> from kvx.fitting.synthetic import toy_pairs
        >>> from kvx.mappers import full_head, random
        >>> mapper, _ = kvx.fit(full_head(layers=1, ridge=1e-3), toy_pairs(), progress=False)
        >>> other = random(mapper, jax.random.key(0))
        >>> bool((other.params.keys[0].mean == mapper.params.keys[0].mean).all())
        True
    """

    def scramble(block: BlockMap, key: Array) -> BlockMap:
        layers, heads, width = block.mean.shape
        draw = scrambling(block.covariance, key)
        covariance = jnp.einsum("lkde,lkdf,lkfg->lkeg", draw, block.covariance, draw, precision=HIGHEST)
        entries, per_entry = block.coefficients.shape[1], block.coefficients.shape[3]
        by_entry = draw.reshape(layers, entries, per_entry, width, width)
        coefficients = jnp.einsum(
            "lepkd,lekdf->lepkf", block.coefficients.astype(jnp.float32), by_entry, precision=HIGHEST
        )
        return dataclasses.replace(
            block, coefficients=coefficients.astype(block.coefficients.dtype), covariance=covariance
        )

    return _changed(mapper, scramble, "scrambled", key)


def scrambling(covariance: Array, key: Array) -> Array:
    """Random matrices M with ``diag(M' S M) = diag(S)`` for the covariances S of outputs, both ``[L,K,D,D]``."""
    draw = jax.random.normal(key, covariance.shape, jnp.float32)
    before = jnp.diagonal(covariance, axis1=-2, axis2=-1)
    mixed = jnp.einsum("lkde,lkef->lkdf", covariance, draw, precision=HIGHEST)
    after = jnp.einsum("lkdf,lkdf->lkf", draw, mixed, precision=HIGHEST)
    return draw * jnp.sqrt(jnp.maximum(before, 0.0) / jnp.maximum(after, _TINY))[..., None, :]


def _changed(mapper: CacheMap, change, own: str, key: Array) -> CacheMap:  # type: ignore[no-untyped-def]
    """The map with its (last) part changed: each block of linear parameters, or what others make by their method
    ``own``. It loses its digest, since it is another map now."""
    params = mapper.params
    parts = params if type(params) is tuple else (params,)
    if not parts or not (isinstance(parts[-1], LinearParams) or hasattr(parts[-1], own)):
        raise KvxError(f"{mapper.method} has no coefficients, so it has no control; pass a fitted linear map.")
    last = parts[-1]
    last = _with_blocks(last, change, key) if isinstance(last, LinearParams) else getattr(last, own)(key)
    facts = {name: fact for name, fact in (mapper.provenance or {}).items() if name != "digest"}
    changed = (*parts[:-1], last) if type(params) is tuple else last
    return dataclasses.replace(mapper, params=changed, provenance=facts)


def _with_blocks(params: LinearParams, change, key: Array) -> LinearParams:  # type: ignore[no-untyped-def]
    keys = jax.random.split(key, len(params.keys) + len(params.values))
    blocks = [change(block, k) for block, k in zip((*params.keys, *params.values), keys, strict=True)]
    half = len(params.keys)
    return dataclasses.replace(params, keys=tuple(blocks[:half]), values=tuple(blocks[half:]), report=None)
