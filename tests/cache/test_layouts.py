"""Named layouts in and out: the head axis survives every one of them (CASE 10)."""

from __future__ import annotations

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvx.cache import (
    CacheGeometry,
    KVCache,
    LayerGeometry,
    append,
    empty,
    from_arrays,
    from_dense,
    from_list,
    from_pages,
    rotate_keys,
    to_dense,
    to_list,
    to_pages,
)
from kvx.cache.layouts import Dense, Order, Paged
from kvx.errors import KvxError
from tests.cache.helpers import assert_clean, chunk, filled, geometry, triples

LAYERS, HEADS, TOKENS, PAGE = 2, 3, 4, 2
MARK = 100 * np.arange(LAYERS)[:, None, None] + 10 * np.arange(HEADS)[:, None] + np.arange(TOKENS)  # 100 l + 10 h + t
WHERE = CacheGeometry((LayerGeometry(HEADS, 2, 2),) * LAYERS)


def marked() -> KVCache:
    """K[l,h,t] = 100 l + 10 h + t; values the same, negative."""
    k = jnp.asarray(np.repeat(MARK[:, None, ..., None], 2, axis=-1), jnp.float32)
    return from_arrays(k, -k, jnp.arange(TOKENS)[None], WHERE)


def assert_marked(cache: KVCache) -> None:
    for i in range(LAYERS):
        np.testing.assert_array_equal(cache.keys(i)[0, ..., 0], MARK[i])
        np.testing.assert_array_equal(cache.values(i)[0, ..., 1], -MARK[i])


def dense_by_hand(layout: str) -> np.ndarray:
    order = {"heads_first": (0, 1, 2, 3, 4), "tokens_first": (0, 1, 3, 2, 4)}[layout]
    return np.repeat(MARK[:, None, ..., None], 2, axis=-1).astype(np.float32).transpose(order)


def pages_by_hand(layer: int, layout: str) -> np.ndarray:
    """Two blocks of two tokens, filled number by number: [blocks, 2, ...] and [2, blocks, ...] have one shape."""
    out = np.zeros((2, 2, PAGE, HEADS, 2) if layout.endswith("tokens_first") else (2, 2, HEADS, PAGE, 2), np.float32)
    for t in range(TOKENS):
        for h in range(HEADS):
            for kv, sign in enumerate((1, -1)):
                first = (t // PAGE, kv) if layout.startswith("paged") else (kv, t // PAGE)
                rest = (t % PAGE, h) if layout.endswith("tokens_first") else (h, t % PAGE)
                out[first + rest] = sign * MARK[layer, h, t]
    return out


@pytest.mark.parametrize("layout", get_args(Dense))
def test_dense_layouts(layout: str) -> None:
    k = dense_by_hand(layout)
    for keys, values in ((k, -k), (list(k), list(-k))):
        cache = from_dense(keys, values, jnp.arange(TOKENS), WHERE, layout=layout, rotated=False)
        assert_marked(cache)
    keys, values, pos = to_dense(cache, layout=layout, rotated=False)
    for i in range(LAYERS):
        np.testing.assert_array_equal(keys[i], k[i])
        np.testing.assert_array_equal(values[i], -k[i])
        assert pos[i].tolist() == [[[0, 1, 2, 3]]]


@pytest.mark.parametrize("order", get_args(Order))
@pytest.mark.parametrize("layout", get_args(Dense))
def test_lists_of_keys_and_values(layout: str, order: str) -> None:
    k = dense_by_hand(layout)
    arrays = [k[0], k[1], -k[0], -k[1]] if order == "k_then_v" else [k[0], -k[0], k[1], -k[1]]
    cache = from_list(arrays, jnp.arange(TOKENS), WHERE, layout=layout, order=order, rotated=False)
    assert_marked(cache)
    for got, want in zip(to_list(cache, layout=layout, order=order, rotated=False), arrays, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("layout", get_args(Paged))
def test_pages_with_exactly_two_blocks(layout: str) -> None:
    pages = [pages_by_hand(i, layout) for i in range(LAYERS)]
    cache = from_pages(pages, [[0, 1]], jnp.arange(TOKENS)[None], WHERE, layout=layout, rotated=False)
    assert_marked(cache)
    out = to_pages(marked(), PAGE, layout=layout, rotated=False)
    assert out.block_table.tolist() == [[0, 1]] and out.length.tolist() == [TOKENS]
    for got, want in zip(out.pages, pages, strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_wrong_name_gives_other_numbers_or_an_error() -> None:
    """Shapes alone cannot tell; that is why the name is required."""
    pages = [pages_by_hand(i, "paged_tokens_first") for i in range(LAYERS)]
    wrong = from_pages(pages, [[0, 1]], jnp.arange(TOKENS)[None], WHERE, layout="split_tokens_first", rotated=False)
    assert (np.asarray(wrong.keys(0)[0, ..., 0]) != MARK[0]).any()
    with pytest.raises(KvxError, match="name the layout the pages really have"):
        from_pages(pages, [[0, 1]], jnp.arange(TOKENS)[None], WHERE, layout="paged_heads_first", rotated=False)
    with pytest.raises(KvxError, match="not the name of a layout"):
        from_pages(pages, [[0, 1]], jnp.arange(TOKENS)[None], WHERE, layout="paged", rotated=False)  # type: ignore[arg-type]
    with pytest.raises(KvxError, match="not the name of a layout"):
        to_dense(marked(), layout="paged_heads_first", rotated=False)  # type: ignore[arg-type]
    k = dense_by_hand("tokens_first")
    with pytest.raises(KvxError, match="expected"):
        from_dense(k, k, jnp.arange(TOKENS), WHERE, layout="heads_first", rotated=False)
    with pytest.raises(KvxError, match="key and a value array"):
        from_list([k[0]] * 3, jnp.arange(TOKENS), WHERE, layout="tokens_first", order="k_then_v", rotated=False)


@pytest.mark.parametrize("layout", get_args(Paged))
def test_pages_of_ragged_rows_come_back(layout: str) -> None:
    cache = filled([[0, 1, 2, -1, -1], [2, 0, 3, 1, 4], [-1, -1, -1, -1, -1]])
    out = to_pages(cache, 2, layout=layout, rotated=True)
    assert out.block_table.tolist() == [[0, 1, -1], [3, 4, 5], [-1, -1, -1]] and out.length.tolist() == [3, 5, 0]
    pos = np.where(np.arange(5)[None] < np.asarray(out.length)[:, None], np.arange(5)[None], -1)
    back = from_pages(out.pages, out.block_table, pos, cache.geometry, layout=layout, rotated=True)
    assert back.rotated
    want = triples(rotate_keys(cache))
    assert triples(back) == want
    assert_clean(back)


def test_blocks_may_lie_anywhere() -> None:
    pages = jnp.asarray(np.stack([pages_by_hand(i, "paged_heads_first") for i in range(LAYERS)]))
    spread = jnp.full((LAYERS, 7, *pages.shape[2:]), jnp.nan).at[:, 5].set(pages[:, 0]).at[:, 2].set(pages[:, 1])
    cache = from_pages(spread, [[5, 2, -1]], jnp.arange(TOKENS)[None], WHERE, layout="paged_heads_first", rotated=False)
    assert_marked(cache)
    jitted = jax.jit(
        lambda p: from_pages(
            p, jnp.array([[5, 2, -1]]), jnp.arange(TOKENS)[None], WHERE, layout="paged_heads_first", rotated=False
        )
    )
    assert_marked(jitted(spread))
    with pytest.raises(KvxError, match="block 9"):
        from_pages(spread, [[5, 9]], jnp.arange(TOKENS)[None], WHERE, layout="paged_heads_first", rotated=False)
    with pytest.raises(KvxError, match="block -1"):
        from_pages(spread, [[5, -1]], jnp.arange(TOKENS)[None], WHERE, layout="paged_heads_first", rotated=False)
    with pytest.raises(KvxError, match="do not fit pages"):
        from_pages(spread, [[5]], jnp.arange(TOKENS)[None], WHERE, layout="paged_heads_first", rotated=False)


def test_window_layers_leave_zeros_before_their_window() -> None:
    cache = empty(geometry((4, None)), 1, 8, keep="window")
    cache = append(cache, *chunk(cache, 7, 0), jnp.arange(7)[None])
    out = to_pages(cache, 4, layout="paged_tokens_first", rotated=False)
    rows = np.asarray(out.pages[0])[:, 0].reshape(8, 2, 4)
    assert not rows[:3].any() and rows[3:7].any(axis=(1, 2)).all() and not rows[7:].any()
    for t in range(7):
        np.testing.assert_array_equal(np.asarray(out.pages[1])[t // 4, 0, t % 4], cache.keys(1)[0, :, t])


def test_pages_refuse_gaps_and_per_head_drops() -> None:
    with pytest.raises(KvxError, match="without gaps"):
        to_pages(filled([[0, 2, 3]]), 2, layout="paged_tokens_first", rotated=False)
    k = jnp.ones((2, 1, 2, 2, 4))
    dropped = from_arrays(k, k, jnp.array([[[[0, 1], [-1, 1]]]]), geometry())
    with pytest.raises(KvxError, match="per head"):
        to_pages(dropped, 2, layout="paged_tokens_first", rotated=False)
    with pytest.raises(KvxError, match="outside jit"):
        jax.jit(lambda c: to_pages(c, 2, layout="paged_tokens_first", rotated=False))(filled([[0, 1]]))
