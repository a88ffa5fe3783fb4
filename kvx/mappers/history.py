"""History: the lowest source layers of the tokens just before, as further source layers of a map."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvx.cache.cache import CacheGroup, KVCache
from kvx.cache.geometry import CacheGeometry
from kvx.errors import KvxError


@dataclasses.dataclass(frozen=True)
class History:
    """Which earlier tokens a map reads beside the aligned one.

    Attributes:
        lags: source tokens before the aligned one: 1 ... lags; 0: none.
        layers: the lowest so many source layers are read there, and at the aligned token too.
    """

    lags: int = 0
    layers: int = 1

    @property
    def count(self) -> int:
        """Layers that a cache gains by it."""
        return self.lags * self.layers

    @property
    def low(self) -> tuple[int, ...]:
        """Source layers that are read at the aligned token in any case."""
        return tuple(range(self.layers)) if self.lags else ()

    def extra(self, num_layers: int) -> tuple[int, ...]:
        """Numbers of the gained layers, the last of ``num_layers``."""
        return tuple(range(num_layers - self.count, num_layers))

    def name(self, layer: int, own: int) -> str:
        """A gained layer in words: ``"0@-2"`` is layer 0 of the token two before; ``own``: the source's layers.

        Example:
            >>> from kvx.mappers.history import History
            >>> [History(lags=2, layers=1).name(i, 30) for i in (30, 31)]
            ['0@-1', '0@-2']
        """
        lag, low = divmod(layer - own, self.layers)
        return f"{low}@-{lag + 1}"


NONE = History()


def check_history(lags: Any, layers: Any) -> History:
    """Settings of a history, checked.

    Raises:
        KvxError: negative or broken numbers.

    Example:
        >>> from kvx.mappers.history import check_history
        >>> check_history(4, 2).count
        8
    """
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (lags, layers))
    if not whole or lags < 0 or layers < 1:
        raise KvxError(
            f"history is {lags!r} tokens of {layers!r} layers; expected whole numbers, at least 0 tokens and 1 layer."
        )
    return History(lags, layers)


def with_history(cache: KVCache, history: History) -> KVCache:
    """The cache with layers added whose slot s holds what a low layer holds in slot ``s - lag``.

    Attention heads that copy compare a query with the tokens *before* a key's own, so the target's keys hold what its
    neighbours are. A map that reads one token at a time has to guess that from what deep source layers happen to keep;
    the lowest layers of the neighbours say it plainly. Only earlier tokens are read, so contexts may be extended.

    Args:
        cache: un-rotated, all tokens kept, slots in the order of the tokens.
        history: which layers and tokens; zeros where there is no token so far back.

    Returns:
        The cache with ``history.count`` more layers after its own: all low layers at lag 1, then at lag 2, ...

    Raises:
        KvxError: more low layers than the cache has.

    Example:
        >>> import kvx
        >>> from kvx.fitting.synthetic import toy_pairs
        >>> from kvx.mappers.history import History, with_history
        >>> cache = next(iter(toy_pairs())).source
        >>> longer = with_history(cache, History(lags=2, layers=1))
        >>> longer.num_layers - cache.num_layers, bool((longer.keys(4)[:, :, 2:] == cache.keys(0)[:, :, :-2]).all())
        (2, True)
    """
    if not history.lags:
        return cache
    geometry = with_history_layers(cache.geometry, history)
    groups = []
    for group in cache.groups:
        at = [i for i, layer in enumerate(group.layers) if layer < history.layers]
        if not at:
            groups.append(group)
            continue
        first = cache.num_layers
        added = tuple(first + lag * history.layers + group.layers[i] for lag in range(history.lags) for i in at)
        lags = range(1, history.lags + 1)
        k, v = (jnp.concatenate([x, *(_shifted(group, x, at, lag) for lag in lags)]) for x in (group.k, group.v))
        pos = group.pos
        if pos.shape[0] > 1:
            pos = jnp.concatenate([pos, *[pos[jnp.asarray(at)]] * history.lags])
        groups.append(dataclasses.replace(group, k=k, v=v, pos=pos, layers=group.layers + added))
    return KVCache(tuple(groups), cache.rotated, geometry)


def with_history_layers(geometry: CacheGeometry, history: History) -> CacheGeometry:
    """Geometry of a cache :func:`with_history`.

    Raises:
        KvxError: more low layers than there are.
    """
    if history.lags and history.layers > geometry.num_layers:
        raise KvxError(
            f"history reads the {history.layers} lowest source layers, but the source has {geometry.num_layers}."
        )
    return CacheGeometry(geometry.layers + geometry.layers[: history.layers] * history.lags)


def _shifted(group: CacheGroup, x: Array, at: list[int], lag: int) -> Array:
    """Some layers ``[l,B,K,T,D]`` moved ``lag`` slots on; zeros where no token stands so far back."""
    layers = jnp.asarray(at)
    pos = group.pos[layers] if group.pos.shape[0] > 1 else group.pos
    real = jnp.where((pos >= 0)[..., None], x[layers], jnp.zeros((), x.dtype))
    slots = x.shape[3]
    lag = min(lag, slots)
    empty = jnp.zeros((*real.shape[:3], lag, real.shape[4]), x.dtype)
    return jnp.concatenate([empty, jax.lax.slice_in_dim(real, 0, slots - lag, axis=3)], axis=3)
