"""The identity: a cache as it is, carried onto the alignment's tokens; the unit of ``chain``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from kvx.alignment import Alignment, resample
from kvx.cache.cache import KVCache
from kvx.cache.geometry import CacheGeometry
from kvx.mappers.base import CacheMap, context_cache, groups_of

if TYPE_CHECKING:
    from kvx.fitting.moments import Moments


@dataclasses.dataclass(frozen=True)
class Identity:
    """Every layer's keys and values, unchanged."""

    def reach(self, source: CacheGeometry, target: CacheGeometry) -> tuple[tuple[int, ...], ...] | None:
        """Nothing is fitted."""
        return tuple(() for _ in target.layers)

    def fit(self, moments: Moments, held_out: Moments | None = None) -> Any:
        """Nothing is fitted: no parameters."""
        return ()

    def apply(self, params: Any, cache: KVCache, alignment: Alignment) -> KVCache:
        """The source's un-rotated keys and values in the alignment's slots and positions."""
        keys, values = [], []
        for layers in groups_of(cache.geometry):
            k, v = (jnp.stack([read(layer) for layer in layers], axis=1) for read in (cache.keys, cache.values))
            keys.append(resample(alignment, k).swapaxes(0, 1))
            values.append(resample(alignment, v).swapaxes(0, 1))
        return context_cache(keys, values, alignment, cache.geometry)


def identity() -> CacheMap:
    """The map that changes nothing: for a model handed to itself (or to one that shares its cache), any geometry.

    ``chain(identity(), m)`` and ``chain(m, identity())`` are ``m``.

    Example:
        >>> import jax.numpy as jnp, kvx
        >>> from kvx.fitting.synthetic import toy_pairs
        >>> batch = next(iter(toy_pairs()))
        >>> same = kvx.translate(kvx.identity(), batch.source, batch.alignment)
        >>> bool(jnp.array_equal(same.keys(0), batch.source.keys(0)))
        True
    """
    return CacheMap((), None, Identity())
