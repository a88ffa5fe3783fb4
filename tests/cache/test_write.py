"""Writing tokens: worked examples, rings, and tracing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvx.cache import append, empty
from kvx.cache.ops import plan_write, write_slots
from tests.cache.helpers import assert_same, chunk, geometry


def test_rows_close_up_over_padding() -> None:
    plan = plan_write(jnp.array([0, 2]), 6, False, jnp.array([[-1, 5, -1, 6], [7, -1, -1, 8]]))
    assert plan.slot.tolist() == [[6, 0, 6, 1], [2, 6, 6, 3]]
    assert plan.source.tolist() == [[1, 3, -1, -1, -1, -1], [-1, -1, 0, 3, -1, -1]]
    assert plan.next.tolist() == [2, 4]


def test_a_chunk_longer_than_the_ring_leaves_its_last_tokens() -> None:
    plan = plan_write(jnp.array([5]), 3, True, jnp.array([[0, 1, -1, 2, 3, 4]]))
    assert plan.slot.tolist() == [[3, 3, 3, 1, 2, 0]]  # ranks 2, 3, 4 go to slots (5 + rank) % 3
    assert plan.source.tolist() == [[5, 3, 4]]
    assert plan.next.tolist() == [10]


def test_tokens_without_a_slot_are_dropped_under_tracing() -> None:
    cache = empty(geometry(), 1, 4)
    k, v = chunk(cache, 6, 0)
    got = jax.jit(append)(cache, k, v, jnp.arange(6)[None])
    assert got.groups[0].pos.ravel().tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(got.groups[0].k, k[0][..., :4, :])
    again = jax.jit(append)(got, [x[..., :1, :] for x in k], [x[..., :1, :] for x in v], jnp.array([[6]]))
    np.testing.assert_array_equal(again.groups[0].k, got.groups[0].k)


def test_one_token_writes_equal_the_general_path() -> None:
    rng = np.random.default_rng(0)
    buffer = jnp.asarray(rng.standard_normal((3, 2, 2, 5, 4)), jnp.float32)
    column = jnp.asarray(rng.standard_normal((3, 2, 2, 1, 4)), jnp.float32)
    pair = jnp.concatenate([column, column], axis=-2)
    for next, pos in (([4, 7], [[9], [9]]), ([0, 2], [[-1], [3]]), ([5, 6], [[-1], [-1]])):
        for ring in (True, False):
            one = write_slots(buffer, column, plan_write(jnp.array(next), 5, ring, jnp.array(pos)))
            padded = jnp.concatenate([jnp.array(pos), jnp.full((2, 1), -1)], axis=1)
            two = write_slots(buffer, pair, plan_write(jnp.array(next), 5, ring, padded))
            np.testing.assert_array_equal(one, two)
            single = write_slots(buffer[1], column[1], plan_write(jnp.array(next), 5, ring, jnp.array(pos)))
            np.testing.assert_array_equal(one[1], single)


def test_nan_in_padding_columns_is_not_written() -> None:
    cache = empty(geometry((4, None)), 1, 8, keep="window")
    k, v = chunk(cache, 3, 0)
    pos = jnp.array([[0, -1, 1]])
    spoil = [x.at[..., 1, :].set(jnp.nan) for x in k], [x.at[..., 1, :].set(jnp.nan) for x in v]
    assert_same(append(cache, *spoil, pos), append(cache, k, v, pos))


def test_values_are_cast_to_the_dtype_of_the_cache() -> None:
    cache = empty(geometry(), 1, 4, jnp.bfloat16)
    k, v = chunk(empty(geometry(), 1, 4), 2, 0)
    assert append(cache, k, v, jnp.array([[0, 1]])).keys(0).dtype == jnp.bfloat16


def test_an_empty_chunk_changes_nothing() -> None:
    cache = empty(geometry((4, None)), 2, 8, keep="window")
    k, v = chunk(cache, 0, 0)
    assert_same(append(cache, k, v, jnp.zeros((2, 0), jnp.int32)), cache)


def test_appending_compiles_once_for_all_fills() -> None:
    """CASE 32: the fill level is data, not shape."""
    traces = []

    @jax.jit
    def step(cache, k, v, pos):
        traces.append(1)
        return append(cache, k, v, pos)

    cache = empty(geometry((4, None)), 1, 16, keep="window")
    k, v = chunk(cache, 1, 0)
    for i in range(8):
        cache = step(cache, k, v, jnp.array([[i]]))
    assert len(traces) == 1 and cache.next_position().tolist() == [8]
