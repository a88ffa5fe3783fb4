"""Layouts of other systems, in and out. Every layout is named by the caller; none is guessed from a shape.

========================  ======================  ==========================================================
name                      one array a layer       who
========================  ======================  ==========================================================
``heads_first``           ``[B,K,T,D]``           kvx, transformers
``tokens_first``          ``[B,T,K,D]``           flash-attention kernels, most JAX decoders
``paged_tokens_first``    ``[N,2,page,K,D]``      pages that hold K and V side by side
``paged_heads_first``     ``[N,2,K,page,D]``      the same, head-major
``split_tokens_first``    ``[2,N,page,K,D]``      all K pages, then all V pages
``split_heads_first``     ``[2,N,K,page,D]``      the same, head-major
========================  ======================  ==========================================================

``N`` counts blocks of ``page`` tokens; a block table ``[B,n]`` lists the blocks of each sequence. With two blocks the
paged and the split shapes are equal, which is why names are required. Keys in engines carry RoPE: say so with
``rotated=``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvx.cache.build import concrete, from_arrays
from kvx.cache.cache import KVCache
from kvx.cache.geometry import CacheGeometry
from kvx.cache.ops import rotate_keys, unrotate_keys
from kvx.cache.transformers_cache import (
    attention_mask,
    cache_argument,
    crop_transformers,
    from_transformers,
    output_cache,
    to_transformers,
)
from kvx.errors import KvxError
from kvx.typing import pytree

__all__ = [
    "Pages",
    "attention_mask",
    "cache_argument",
    "crop_transformers",
    "from_dense",
    "from_list",
    "from_pages",
    "from_transformers",
    "output_cache",
    "to_dense",
    "to_list",
    "to_pages",
    "to_transformers",
]

Dense = Literal["heads_first", "tokens_first"]
Paged = Literal["paged_tokens_first", "paged_heads_first", "split_tokens_first", "split_heads_first"]
Order = Literal["k_then_v", "alternating"]

# Axes of each paged layout in the order [2, N, page, K, D].
_PAGE_AXES = {
    "paged_tokens_first": (1, 0, 2, 3, 4),
    "paged_heads_first": (1, 0, 3, 2, 4),
    "split_tokens_first": (0, 1, 2, 3, 4),
    "split_heads_first": (0, 1, 3, 2, 4),
}


def _named(name: str, kind: Any) -> str:
    if name not in get_args(kind):
        raise KvxError(f"{name!r} is not the name of a layout here; expected one of {', '.join(get_args(kind))}.")
    return name


def _flip(x: Any, layout: str) -> Array:
    """Between ``heads_first`` and ``tokens_first`` (its own inverse)."""
    x = jnp.asarray(x)
    return x if layout == "heads_first" else jnp.swapaxes(x, -3, -2)


def _as(cache: KVCache, rotated: bool) -> KVCache:
    return rotate_keys(cache) if rotated else unrotate_keys(cache)


def from_dense(
    keys: Any, values: Any, positions: Any, geometry: CacheGeometry, *, layout: Dense, rotated: bool
) -> KVCache:
    """Cache from one key and one value array per layer (or stacked along a first layer axis) in a named layout.

    Args:
        keys, values: per layer ``heads_first [B,K,T,D]`` or ``tokens_first [B,T,K,D]``.
        positions: as in :func:`kvx.cache.ops.from_arrays`.
        geometry: geometry of the model.
        layout: name of the layout.
        rotated: whether the keys carry RoPE; the cache then says so too.

    Raises:
        KvxError: an unknown name, or shapes that disagree with the geometry (as when the name is wrong).

    Example:
        >>> from kvx.cache.geometry import LayerGeometry
        >>> k = jnp.arange(6.0).reshape(1, 1, 3, 2, 1)
        >>> geometry = CacheGeometry((LayerGeometry(2, 1, 1),))
        >>> cache = from_dense(k, k, jnp.arange(3), geometry, layout="tokens_first", rotated=False)
        >>> cache.keys(0)[0, 1].ravel().tolist()
        [1.0, 3.0, 5.0]
    """
    _named(layout, Dense)
    stacked = not isinstance(keys, (list, tuple))
    k = _flip(keys, layout) if stacked else [_flip(x, layout) for x in keys]
    v = _flip(values, layout) if stacked else [_flip(x, layout) for x in values]
    return from_arrays(k, v, positions, geometry, rotated=rotated)


def to_dense(cache: KVCache, *, layout: Dense, rotated: bool) -> tuple[list[Array], list[Array], list[Array]]:
    """Keys, values and positions of each layer, in a named layout, with or without RoPE. Inverse of :func:`from_dense`.

    Returns:
        keys and values, one array per layer; positions int32 ``[B,K|1,T]`` per layer (-1: empty slot).
    """
    _named(layout, Dense)
    views = [_as(cache, rotated).layer(i) for i in range(cache.num_layers)]
    return [_flip(x.k, layout) for x in views], [_flip(x.v, layout) for x in views], [x.pos for x in views]


def from_list(
    arrays: Sequence[Any], positions: Any, geometry: CacheGeometry, *, layout: Dense, order: Order, rotated: bool
) -> KVCache:
    """Cache from one flat list of ``2 L`` arrays.

    Args:
        arrays: ``k_then_v``: keys of all layers, then values of all layers; ``alternating``: k0, v0, k1, v1, ...
        positions, geometry, layout, rotated: as in :func:`from_dense`.
        order: name of the order.

    Example:
        >>> from kvx.cache.geometry import LayerGeometry
        >>> k, v = jnp.zeros((1, 1, 2, 1)), jnp.ones((1, 1, 2, 1))
        >>> geometry = CacheGeometry((LayerGeometry(1, 1, 1),) * 2)
        >>> names = {"layout": "heads_first", "order": "k_then_v"}
        >>> cache = from_list([k, k, v, v], jnp.arange(2), geometry, **names, rotated=False)
        >>> cache.keys(1).ravel().tolist(), cache.values(0).ravel().tolist()
        ([0.0, 0.0], [1.0, 1.0])
    """
    _named(order, Order)
    count = geometry.num_layers
    if len(arrays) != 2 * count:
        raise KvxError(
            f"the list holds {len(arrays)} arrays; expected a key and a value array for each of {count} layers."
        )
    split = (arrays[:count], arrays[count:]) if order == "k_then_v" else (arrays[0::2], arrays[1::2])
    return from_dense(list(split[0]), list(split[1]), positions, geometry, layout=layout, rotated=rotated)


def to_list(cache: KVCache, *, layout: Dense, order: Order, rotated: bool) -> list[Array]:
    """One flat list of ``2 L`` arrays. Inverse of :func:`from_list` (positions come from :func:`to_dense`)."""
    _named(order, Order)
    k, v, _ = to_dense(cache, layout=layout, rotated=rotated)
    return k + v if order == "k_then_v" else [x for pair in zip(k, v, strict=True) for x in pair]


@pytree
class Pages:
    """A cache cut into pages.

    Attributes:
        pages: one array per layer, in the layout that was asked for.
        block_table: int32 ``[B,n]`` blocks of each sequence, in token order; -1: no block.
        length: int32 ``[B]`` tokens of each sequence.
    """

    pages: tuple[Array, ...]
    block_table: Array
    length: Array


def from_pages(
    pages: Sequence[Any] | Array,
    block_table: Any,
    positions: Any,
    geometry: CacheGeometry,
    *,
    layout: Paged,
    rotated: bool,
) -> KVCache:
    """Cache from paged memory.

    Args:
        pages: one array per layer (or stacked), as the layout's name says.
        block_table: int ``[B,n]``: the blocks of each sequence in token order; -1: no block.
        positions: int ``[B,T]``, ``T <= n page``: position of each token in table order; -1: nothing there.
        geometry: geometry of the model (``D == Dv``: pages hold K and V of one width).
        layout: name of the layout.
        rotated: whether the keys carry RoPE, as they do in serving engines.

    Raises:
        KvxError: an unknown name, shapes that disagree with it, or (when concrete) a token in a missing block.

    Example:
        >>> from kvx.cache.geometry import LayerGeometry
        >>> pages = jnp.arange(8.0).reshape(2, 2, 2, 1, 1)
        >>> geometry, table = CacheGeometry((LayerGeometry(1, 1, 1),)), jnp.array([[1, 0]])
        >>> pos = jnp.arange(3)[None]
        >>> cache = from_pages([pages], table, pos, geometry, layout="paged_tokens_first", rotated=False)
        >>> cache.keys(0).ravel().tolist(), cache.values(0).ravel().tolist()
        ([4.0, 5.0, 0.0], [6.0, 7.0, 2.0])
    """
    axes = _PAGE_AXES[_named(layout, Paged)]
    table, pos = jnp.asarray(block_table, jnp.int32), jnp.asarray(positions, jnp.int32)
    keys, values = [], []
    if len(pages) != geometry.num_layers:
        raise KvxError(f"pages hold {len(pages)} layers but the geometry has {geometry.num_layers}.")
    for i, given in enumerate(pages):
        layer, x = geometry.layers[i], jnp.asarray(given)
        x = x.transpose(axes) if x.ndim == 5 else x
        if x.ndim != 5 or x.shape[0] != 2 or x.shape[3:] != (layer.kv_heads, layer.key_dim):
            raise KvxError(
                f"pages of layer {i} have shape {jnp.shape(given)}; expected {layout} with {layer.kv_heads} kv heads "
                f"of width {layer.key_dim}: name the layout the pages really have."
            )
        _check_table(table, pos, x.shape[1], x.shape[2])
        rows = jnp.take(x, jnp.maximum(table, 0), axis=1)  # [2,B,n,page,K,D]
        rows = rows.reshape(2, table.shape[0], -1, *x.shape[3:])[:, :, : pos.shape[1]]
        k, v = jnp.swapaxes(rows, 2, 3)
        keys.append(k)
        values.append(v)
    return from_arrays(keys, values, pos, geometry, rotated=rotated)


def _check_table(table: Array, pos: Array, blocks: int, page: int) -> None:
    if table.ndim != 2 or pos.ndim != 2 or pos.shape[0] != table.shape[0] or pos.shape[1] > table.shape[1] * page:
        raise KvxError(
            f"block table {table.shape} and positions {pos.shape} do not fit pages of {page} tokens; expected [B,n] "
            "and [B,T] with T at most n * page."
        )
    blocks_of, held = concrete(table), concrete(pos)
    if blocks_of is None or held is None:
        return
    used = np.repeat(blocks_of, page, axis=1)[:, : held.shape[1]]
    wrong = (held >= 0) & ((used < 0) | (used >= blocks))
    if wrong.any():
        row, slot = np.argwhere(wrong)[0]
        raise KvxError(f"row {row} has a token in block {used[row, slot]}, but there are blocks 0..{blocks - 1} only.")


def to_pages(cache: KVCache, page: int, *, layout: Paged, rotated: bool) -> Pages:
    """Cut a cache into pages of ``page`` tokens, each token at the place its position says. Runs on the host.

    Sequence b gets blocks ``b n .. b n + n - 1``. Layers that keep only their window leave zeros before it. The keys
    under which an engine stores pages are the caller's business; ask
    :func:`kvx.cache.provenance.exact_key`, which refuses translated caches.

    Args:
        cache: positions of each sequence are 0, 1, 2, ... without gaps in its global layers.
        page: tokens a page.
        layout: name of the layout.
        rotated: whether the pages' keys shall carry RoPE, as serving engines expect.

    Raises:
        KvxError: an unknown name, gaps, tokens dropped per head, keys and values of different widths.

    Example:
        >>> from kvx.cache.geometry import LayerGeometry
        >>> k = jnp.arange(3.0).reshape(1, 1, 1, 3, 1)
        >>> cache = from_arrays(k, k, jnp.array([2, 0, 1]), CacheGeometry((LayerGeometry(1, 1, 1),)))
        >>> out = to_pages(cache, 2, layout="split_tokens_first", rotated=False)
        >>> out.pages[0][0].ravel().tolist(), out.block_table.tolist(), out.length.tolist()
        ([1.0, 2.0, 0.0, 0.0], [[0, 1]], [3])
    """
    axes = _PAGE_AXES[_named(layout, Paged)]
    if page < 1:
        raise KvxError(f"a page holds at least one token, got {page}.")
    length = concrete(cache.next_position())
    if length is None:
        raise KvxError("to_pages sizes its result by the tokens held, so it runs outside jit; call it on the host.")
    blocks = max(-(-int(length.max()) // page), 1)
    pages = []
    cache = _as(cache, rotated)
    for i in range(cache.num_layers):
        view, geometry = cache.layer(i), cache.geometry.layers[i]
        if view.pos.shape[1] != 1 or geometry.key_dim != geometry.value_dim:
            raise KvxError(
                f"layer {i} has tokens dropped per head, or keys and values of different widths; pages cannot."
            )
        if geometry.window is None and ((np.asarray(view.pos) >= 0).sum(axis=(1, 2)) != length).any():
            raise KvxError(f"layer {i} does not hold positions 0..{int(length.max()) - 1} without gaps, as pages must.")
        kv = jnp.stack([_by_position(x, view.pos[:, 0], blocks * page) for x in (view.k, view.v)])  # [2,B,S,K,D]
        kv = kv.reshape(2, -1, page, *kv.shape[3:])
        pages.append(kv.transpose(tuple(int(a) for a in np.argsort(axes))))
    table = np.arange(cache.batch * blocks, dtype=np.int32).reshape(cache.batch, blocks)
    used = np.arange(blocks)[None] * page < length[:, None]
    return Pages(tuple(pages), jnp.asarray(np.where(used, table, -1), jnp.int32), jnp.asarray(length, jnp.int32))


def _by_position(x: Array, pos: Array, size: int) -> Array:
    """``[B,K,T,D]`` to ``[B,size,K,D]`` with the token of position p at index p."""
    batch, heads, _, dim = x.shape
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    out = jnp.zeros((batch, size, heads, dim), x.dtype)
    return out.at[rows, jnp.where(pos >= 0, pos, size)].set(jnp.swapaxes(x, 1, 2), mode="drop")
