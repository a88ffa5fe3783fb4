"""Controls of maps that have no coefficients to silence or scramble (the identity): made from the caches themselves."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvx.cache.cache import KVCache


def mean_cache(cache: KVCache, first: int = 0) -> KVCache:
    """Every context token gets the mean key and value, per layer and head, of all context tokens of the batch.

    Args:
        cache: un-rotated cache of several contexts.
        first: position of the first context token; the prefix before it stays.

    Returns:
        A cache of the same shapes and positions.

    Example:
        >>> import jax.numpy as jnp
        >>> from kvx.cache.build import from_arrays
        >>> from kvx.cache.geometry import CacheGeometry, LayerGeometry
        >>> k = jnp.array([9.0, 1.0, 3.0, 7.0]).reshape(1, 1, 1, 4, 1)
        >>> cache = from_arrays(k, k, jnp.array([0, 1, 2, -1]), CacheGeometry((LayerGeometry(1, 1, 1),)))
        >>> mean_cache(cache, first=1).keys(0).ravel().tolist()
        [9.0, 2.0, 2.0, 0.0]
    """
    return _replace(cache, first, lambda mean, spread, shape, at: jnp.broadcast_to(mean, shape))


def noise_cache(cache: KVCache, key: Array, first: int = 0) -> KVCache:
    """Every context token gets Gaussian keys and values with the mean and variance of each channel over the batch.

    Args, Returns: as :func:`mean_cache`, and the seed of the draw.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from kvx.cache.build import from_arrays
        >>> from kvx.cache.geometry import CacheGeometry, LayerGeometry
        >>> k = jnp.ones((1, 2, 1, 8, 4))
        >>> cache = from_arrays(k, k, jnp.arange(8), CacheGeometry((LayerGeometry(1, 4, 4),)))
        >>> bool((noise_cache(cache, jax.random.key(0)).keys(0) == 1).all())
        True
    """

    def draw(mean: Array, spread: Array, shape: tuple[int, ...], at: int) -> Array:
        noise = jax.random.normal(jax.random.fold_in(key, at), shape, jnp.float32)
        return mean + spread * noise

    return _replace(cache, first, draw)


def _replace(cache: KVCache, first: int, make) -> KVCache:  # type: ignore[no-untyped-def]
    """Put ``make(mean, spread, shape, n)`` in the context slots of the n-th array."""
    groups = []
    for at, group in enumerate(cache.groups):
        context = group.pos >= first
        k, v = (_changed(x, context, make, 2 * at + part) for part, x in enumerate((group.k, group.v)))
        groups.append(dataclasses.replace(group, k=k, v=v))
    return dataclasses.replace(cache, groups=tuple(groups))


def _changed(x: Array, context: Array, make, at: int) -> Array:  # type: ignore[no-untyped-def]
    """``x [L,B,K,T,D]`` with its context slots replaced; statistics over batch and slots, in fp32."""
    real = jnp.broadcast_to(context[..., None], (*x.shape[:4], 1))
    wide = jnp.where(real, x.astype(jnp.float32), 0.0)
    count = jnp.maximum(real.sum(axis=(1, 3), keepdims=True), 1).astype(jnp.float32)
    mean = wide.sum(axis=(1, 3), keepdims=True) / count
    spread = jnp.sqrt(jnp.where(real, jnp.square(wide - mean), 0.0).sum(axis=(1, 3), keepdims=True) / count)
    return jnp.where(real, make(mean, spread, x.shape, at).astype(x.dtype), x)
