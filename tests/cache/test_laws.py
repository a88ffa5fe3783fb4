"""Laws of caches, over random ragged rows: writing, cutting, joining and moving, against a dictionary as the model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvx.cache import (
    KVCache,
    append,
    compact,
    concatenate,
    crop,
    empty,
    rotate_keys,
    shift_positions,
    slice_positions,
    unrotate_keys,
)
from tests.cache.helpers import assert_clean, assert_same, chunk, filled, geometry, triples

BATCH, TOKENS, WINDOW = 2, 9, 4
LAWS = settings(max_examples=25, deadline=None)

masks = st.lists(st.lists(st.booleans(), min_size=TOKENS, max_size=TOKENS), min_size=BATCH, max_size=BATCH)


def consecutive(mask: list[list[bool]]) -> np.ndarray:
    """Positions 0, 1, 2, ... of the real tokens, -1 at padding, wherever it stands."""
    real = np.asarray(mask)
    return np.where(real, np.cumsum(real, axis=1) - 1, -1).astype(np.int32)


def start(keep: str = "window") -> KVCache:
    return empty(geometry((WINDOW, None)), BATCH, 12, keep=keep)  # type: ignore[arg-type]


def feed(cache: KVCache, pos: np.ndarray, cuts: tuple[int, ...] = (TOKENS,), seed: int = 0) -> KVCache:
    """Append one chunk of TOKENS tokens, cut into pieces of the given sizes."""
    k, v = chunk(cache, TOKENS, seed)
    at = 0
    for size in cuts:
        part = slice(at, at + size)
        cache = append(cache, [x[..., part, :] for x in k], [x[..., part, :] for x in v], jnp.asarray(pos[:, part]))
        at += size
    return cache


@LAWS
@given(masks, st.sampled_from(["window", "all"]))
def test_append_keeps_what_a_dictionary_would(mask: list[list[bool]], keep: str) -> None:
    pos = consecutive(mask)
    cache = feed(start(keep), pos)
    k, v = chunk(start(keep), TOKENS, 0)
    for i in range(2):
        group, inner = cache.locate(i)
        for b in range(BATCH):
            want = {
                int(p): (np.asarray(k[group][inner, b, :, t]).tobytes(), np.asarray(v[group][inner, b, :, t]).tobytes())
                for t, p in enumerate(pos[b])
                if p >= 0
            }
            newest = sorted(want)[-WINDOW:] if cache.groups[group].ring else sorted(want)
            assert triples(cache)[i][b] == {p: want[p] for p in newest}
    assert cache.next_position().tolist() == (pos.max(axis=1) + 1).tolist()
    assert [g.next.tolist() for g in cache.groups] == [(pos >= 0).sum(axis=1).tolist()] * len(cache.groups)
    assert_clean(cache)


@LAWS
@given(masks, st.sampled_from([(4, 5), (1,) * TOKENS, (5, 1, 3)]), st.sampled_from(["window", "all"]))
def test_chunked_append_equals_one_append(mask: list[list[bool]], cuts: tuple[int, ...], keep: str) -> None:
    """Also for chunks longer than the ring, and slot for slot."""
    pos = consecutive(mask)
    assert_same(feed(start(keep), pos, cuts), feed(start(keep), pos))


@LAWS
@given(masks, st.lists(st.integers(0, TOKENS), min_size=BATCH, max_size=BATCH))
def test_crop_undoes_append(mask: list[list[bool]], keep: list[int]) -> None:
    pos = consecutive(mask)
    cut = np.asarray(keep, np.int32)
    cache = crop(feed(start("all"), pos), jnp.asarray(cut))
    want = feed(start("all"), np.where(pos < cut[:, None], pos, -1))
    assert_same(cache, want)


@LAWS
@given(masks, st.integers(0, 3))
def test_slices_by_position_partition_a_cache(mask: list[list[bool]], cut: int) -> None:
    cache = feed(start("all"), consecutive(mask))
    low, high = slice_positions(cache, 0, cut), slice_positions(cache, cut, TOKENS)
    assert triples(concatenate(low, high)) == triples(cache)
    assert triples(concatenate(high, low)) == triples(cache)


@LAWS
@given(masks, masks, masks)
def test_concatenate_is_associative_with_the_empty_cache_as_unit(
    one: list[list[bool]], two: list[list[bool]], three: list[list[bool]]
) -> None:
    rows = enumerate((one, two, three))
    a, b, c = (shift_positions(feed(start("window"), consecutive(mask), seed=i), 20 * i) for i, mask in rows)
    assert_same(concatenate(concatenate(a, b), c), concatenate(a, concatenate(b, c)))
    assert triples(concatenate(a, start(), b)) == triples(concatenate(a, b))
    assert triples(compact(concatenate(c, a, b))) == triples(concatenate(a, b, c))
    in_order = compact(concatenate(c, a, b)).layer(1).pos
    assert bool((jnp.diff(jnp.where(in_order < 0, 999, in_order)) >= 0).all())


@LAWS
@given(masks, st.integers(0, 4000), st.integers(0, 4000), st.booleans())
def test_shifts_add_up(mask: list[list[bool]], one: int, two: int, rotated: bool) -> None:
    cache = feed(start(), consecutive(mask))
    cache = rotate_keys(cache) if rotated else cache
    twice, once = shift_positions(shift_positions(cache, one), two), shift_positions(cache, one + two)
    back = shift_positions(once, -(one + two))
    for a, b in ((twice, once), (back, cache)):
        assert jax.tree.structure(a) == jax.tree.structure(b)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=2e-3 if rotated else 0.0)


@LAWS
@given(st.lists(st.integers(0, 40_000), min_size=6, max_size=6, unique=True))
def test_unrotate_inverts_rotate_at_any_position(pos: list[int]) -> None:
    cache = filled([pos], (None, 3))
    back = unrotate_keys(rotate_keys(cache))
    for i in range(2):
        np.testing.assert_allclose(back.keys(i), cache.keys(i), atol=3e-6)
