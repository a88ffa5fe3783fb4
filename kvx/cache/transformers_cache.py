"""transformers' ``DynamicCache`` in and out, and the two places where its interface is on the move.

Its keys carry RoPE, and a sliding-window layer holds only the last ``window - 1`` tokens while reporting the length of
the whole sequence. torch and transformers are imported only by :func:`to_transformers`, which builds their objects.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvx.cache.build import concrete, from_arrays
from kvx.cache.cache import KVCache, LayerView
from kvx.cache.geometry import CacheGeometry
from kvx.cache.ops import rotate_keys, unrotate_keys
from kvx.errors import KvxError


def from_transformers(cache: Any, geometry: CacheGeometry, positions: Any = None) -> KVCache:
    """Copy a ``DynamicCache`` of transformers.

    A sliding layer that holds fewer than the ``n`` tokens seen holds the last of them, so its positions start at
    ``n - held``. Keys come back un-rotated; later changes of the ``DynamicCache`` do not reach the copy.

    Args:
        cache: a ``DynamicCache`` (torch tensors ``[B,K,T,D]`` per layer, rotated keys).
        geometry: the model's, e.g. ``config.geometry``; dynamic NTK with its length recorded.
        positions: int ``[B,n]`` of all tokens seen, -1 for padding (left-padded batches); ``0..n-1`` when not given.

    Returns:
        the cache; layers with equal token counts share a group.

    Raises:
        KvxError: not a filled ``DynamicCache``, other layers or windows than the geometry has, wrong positions.

    Example:
        >>> from types import SimpleNamespace as Fake
        >>> from kvx.cache.geometry import LayerGeometry
        >>> layer = Fake(keys=np.ones((1, 1, 7, 2)), values=np.ones((1, 1, 7, 2)), sliding_window=8,
        ...              get_seq_length=lambda: 20)
        >>> cache = from_transformers(Fake(layers=[layer]), CacheGeometry((LayerGeometry(1, 2, 2, window=8),)))
        >>> cache.groups[0].pos.ravel().tolist()
        [13, 14, 15, 16, 17, 18, 19]
    """
    layers = getattr(cache, "layers", None)
    if layers is None or len(layers) != geometry.num_layers:
        held = "no layers" if layers is None else f"{len(layers)} layers"
        raise KvxError(f"{type(cache).__name__} has {held}; expected a DynamicCache with {geometry.num_layers} layers.")
    seen = [_seen(layer, i, geometry) for i, layer in enumerate(layers)]
    total = max(seen)
    if min(seen) != total:
        raise KvxError(f"layers of the DynamicCache have seen {sorted(set(seen))} tokens; expected one number.")
    keys, values = [_to_jax(layer.keys) for layer in layers], [_to_jax(layer.values) for layer in layers]
    pos = np.arange(total, dtype=np.int32)[None] if positions is None else np.asarray(positions)
    pos = np.broadcast_to(pos, (keys[0].shape[0], pos.shape[-1])) if pos.ndim == 2 and pos.shape[0] == 1 else pos
    if pos.shape != (keys[0].shape[0], total):
        raise KvxError(
            f"positions have shape {pos.shape}; expected [B,n] = {(keys[0].shape[0], total)}, all tokens seen."
        )
    by_count = {k.shape[2]: jnp.asarray(pos[:, total - k.shape[2] :], jnp.int32) for k in keys}
    out = from_arrays(keys, values, [by_count[k.shape[2]] for k in keys], geometry, rotated=True)
    return unrotate_keys(out)


def _seen(layer: Any, i: int, geometry: CacheGeometry) -> int:
    """Tokens one layer has seen, after checking that it is one this module understands."""
    if getattr(layer, "keys", None) is None or hasattr(layer, "max_cache_len"):
        raise KvxError(
            f"layer {i} of the cache is a {type(layer).__name__} without growing keys; expected the filled layers of a "
            "DynamicCache (run the model on some tokens first; static and quantised caches are not read)."
        )
    window = getattr(layer, "sliding_window", None)
    if window is not None and window != geometry.layers[i].window:
        raise KvxError(
            f"layer {i} has a window of {window} tokens in the DynamicCache and {geometry.layers[i].window} in the "
            "geometry; pass the geometry of the model that made the cache."
        )
    seen, held = int(layer.get_seq_length()), int(layer.keys.shape[2])
    if held > seen or (held < seen and window is None):
        raise KvxError(
            f"layer {i} holds {held} tokens but reports {seen}; expected all of them outside sliding windows."
        )
    return seen


def _to_jax(x: Any) -> Array:
    """Copy of a torch tensor (or array); bfloat16 passes through float32, which is exact."""
    if not hasattr(x, "detach"):
        return jnp.array(x)
    x = x.detach().cpu()
    if str(x.dtype) == "torch.bfloat16":
        return jnp.array(x.float().numpy(), jnp.bfloat16)
    return jnp.array(x.numpy(), copy=True)


def to_transformers(cache: KVCache, config: Any = None) -> Any:
    """Copy into a new ``DynamicCache``, from which the model continues in transformers.

    Keys are rotated, tokens sorted by position, sliding layers cut to their last ``window - 1`` tokens. Shorter rows of
    a ragged batch are padded on the left; continue them with ``attention_mask`` = :func:`attention_mask` plus ones, and
    ``position_ids`` from ``cache.next_position()``.

    Args:
        cache: positions of each row are 0, 1, 2, ... without gaps (window layers: their last ``window - 1``).
        config: transformers configuration of the model, when its own choice of layer classes is wanted; without it the
            geometry's windows decide.

    Returns:
        ``transformers.DynamicCache`` of torch tensors on the CPU, in the cache's dtype.

    Raises:
        KvxError: torch or transformers is missing; gaps, or a window layer that lacks part of its window.
    """
    try:
        import torch
        from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
    except ImportError as error:
        raise KvxError(
            f"to_transformers needs torch and transformers ({error}); install them in this environment."
        ) from None

    length = _lengths(cache)
    total = int(length.max())
    cache = rotate_keys(cache)
    out = DynamicCache(config=config)
    if config is None:
        windows = [layer.window for layer in cache.geometry.layers]
        out.layers = [DynamicLayer() if w is None else DynamicSlidingWindowLayer(sliding_window=w) for w in windows]
    if len(out.layers) != cache.num_layers:
        raise KvxError(f"the configuration has {len(out.layers)} layers but the cache {cache.num_layers}.")
    layer: Any
    for i, layer in enumerate(out.layers):
        window = getattr(layer, "sliding_window", None)
        first = 0 if window is None else max(total - window + 1, 0)
        view = _row_order(cache.layer(i), length, total, first, i)
        k, v = (_to_torch(x, torch) for x in (view.k, view.v))
        layer.update(k, v)
        if window is not None:
            layer.cumulative_length = total
    return out


def _lengths(cache: KVCache) -> np.ndarray:
    length = concrete(cache.next_position())
    if length is None:
        raise KvxError(
            "to_transformers copies numbers into torch tensors, so it runs outside jit; call it on the host."
        )
    return length


def _row_order(view: LayerView, length: np.ndarray, total: int, first: int, layer: int) -> LayerView:
    """Columns ``first .. total-1`` of the left-padded rows: column c of row b is position ``c - total + length_b``."""
    pos = np.asarray(view.pos)
    if pos.shape[1] != 1:
        raise KvxError(f"layer {layer} has tokens dropped per head, which a DynamicCache cannot express.")
    want = np.arange(first, total)[None] - (total - length)[:, None]
    order = np.argsort(pos[:, 0], axis=1, kind="stable")
    sorted_pos = np.take_along_axis(pos[:, 0], order, axis=1)
    found = np.stack([np.searchsorted(row, np.maximum(w, 0)) for row, w in zip(sorted_pos, want, strict=True)])
    found = np.minimum(found, max(pos.shape[-1] - 1, 0))
    missing = (want >= 0) & (np.take_along_axis(sorted_pos, found, axis=1) != want)
    if missing.any():
        row, column = np.argwhere(missing)[0]
        raise KvxError(
            f"layer {layer} lacks position {want[row, column]} of row {row}; a DynamicCache counts tokens from 0 "
            "without gaps (move the cache with kvx.cache.ops.shift_positions, or prefill with keep='all')."
        )
    index = jnp.asarray(np.take_along_axis(order, found, axis=1), jnp.int32)[:, None, :, None]
    real = jnp.asarray(want >= 0)[:, None, :, None]
    k, v = (jnp.take_along_axis(x, index, axis=2) for x in (view.k, view.v))
    zero = jnp.zeros((), view.k.dtype)
    return LayerView(jnp.where(real, k, zero), jnp.where(real, v, zero), jnp.asarray(want, jnp.int32))


def _to_torch(x: Array, torch: Any) -> Any:
    dtype = getattr(torch, str(x.dtype))
    wide = np.array(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x)
    return torch.from_numpy(wide).to(dtype)


def attention_mask(cache: KVCache) -> np.ndarray:
    """int64 ``[B,n]`` mask of the left-padded rows that :func:`to_transformers` makes: 1 for tokens, 0 for padding.

    Example:
        >>> from kvx.cache.geometry import LayerGeometry
        >>> k = jnp.ones((1, 2, 1, 3, 2))
        >>> geometry = CacheGeometry((LayerGeometry(1, 2, 2),))
        >>> attention_mask(from_arrays(k, k, jnp.array([[0, 1, 2], [0, -1, -1]]), geometry)).tolist()
        [[1, 1, 1], [0, 0, 1]]
    """
    length = _lengths(cache)
    return (np.arange(length.max())[None] >= (length.max() - length)[:, None]).astype(np.int64)


def cache_argument(model: Any) -> Literal["cache", "past_key_values"]:
    """The name under which this transformers model takes its cache, read from the signature of its ``forward``.

    transformers is renaming ``past_key_values`` to ``cache``; both names are in use.

    Example:
        >>> def forward(input_ids, past_key_values=None): ...
        >>> cache_argument(forward)
        'past_key_values'
    """
    names = inspect.signature(getattr(model, "forward", model)).parameters
    for name in ("cache", "past_key_values"):
        if name in names:
            return name  # type: ignore[return-value]
    raise KvxError(f"{type(model).__name__}.forward takes neither cache= nor past_key_values=; expected a decoder.")


def output_cache(output: Any) -> Any:
    """The cache in a transformers model's output, whichever of the two names it has there.

    Example:
        >>> output_cache({"past_key_values": 3})
        3
    """
    for name in ("cache", "past_key_values"):
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if found is not None:
            return found
    raise KvxError("the output holds neither cache nor past_key_values; run the model with use_cache=True.")


def crop_transformers(cache: Any, keep_tokens: int) -> None:
    """Cut a ``DynamicCache`` in place to its first ``keep_tokens`` tokens; its own ``crop`` wants minus those to drop.

    Example:
        >>> from types import SimpleNamespace as Fake
        >>> crop_transformers(Fake(get_seq_length=lambda: 20, crop=print), 15)
        -5
    """
    drop = int(cache.get_seq_length()) - keep_tokens
    if keep_tokens < 0 or drop < 0:
        raise KvxError(f"cannot keep {keep_tokens} tokens of a cache that has seen {drop + keep_tokens}.")
    if drop:
        cache.crop(-drop)
