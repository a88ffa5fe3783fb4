"""Building, cutting, joining and moving caches: worked examples, refusals, NaN in empty slots (CASE 13), jit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvx.cache import (
    CacheGeometry,
    KVCache,
    LayerGeometry,
    RopeSpec,
    append,
    blank,
    check,
    compact,
    concatenate,
    crop,
    empty,
    from_arrays,
    pad_to,
    reserve,
    rotate,
    rotate_keys,
    select_batch,
    shift_positions,
    slice_positions,
    slice_slots,
    unrotate_keys,
)
from kvx.errors import KvxError
from tests.cache.helpers import ROPE, assert_clean, assert_same, chunk, filled, geometry, poison, triples

RAGGED = [[0, 1, 2, -1, -1], [0, 1, 2, 3, 4]]


def positions(cache: KVCache, layer: int = 0) -> list[list[int]]:
    return cache.layer(layer).pos[:, 0].tolist()


def test_from_arrays_stacks_layers_that_fit_together() -> None:
    where = CacheGeometry(
        (LayerGeometry(2, 4, 4), LayerGeometry(1, 4, 4), LayerGeometry(2, 4, 4), LayerGeometry(2, 4, 4))
    )
    shapes = [(1, 2, 3, 4), (1, 1, 3, 4), (1, 2, 3, 4), (1, 2, 5, 4)]
    arrays = [jnp.full(s, float(i + 1)) for i, s in enumerate(shapes)]
    pos = [jnp.arange(s[2]) for s in shapes]
    cache = from_arrays(arrays, arrays, pos, where)
    assert [g.layers for g in cache.groups] == [(0, 2), (1,), (3,)]
    assert [g.pos.shape for g in cache.groups] == [(1, 1, 1, 3), (1, 1, 1, 3), (1, 1, 1, 5)]
    for i in range(4):
        assert float(cache.keys(i)[0, 0, 0, 0]) == i + 1 == float(cache.values(i)[0, 0, 0, 0])
    assert cache.next_position().tolist() == [5]


def test_positions_may_differ_per_layer_and_head() -> None:
    k = jnp.ones((2, 1, 2, 3, 4))
    pos = jnp.array([[[[0, 1, 2], [0, -1, 2]]], [[[-1, 1, 2], [0, 1, -1]]]])
    cache = from_arrays(k, k, pos, geometry())
    assert cache.groups[0].pos.shape == (2, 1, 2, 3)
    assert cache.layer(1).pos.tolist() == [[[-1, 1, 2], [0, 1, -1]]]
    assert float(cache.keys(0)[0, 1, 1, 0]) == 0.0 and float(cache.keys(0)[0, 0, 1, 0]) == 1.0
    assert cache.groups[0].next.tolist() == [3]
    assert_clean(cache)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda k, v, p: (k[:1], v, p), "hold 1 layers"),
        (lambda k, v, p: (k[..., :2], v, p), "keys of layer 0"),
        (lambda k, v, p: (k, v[:, :, :1], p), "values of layer 0"),
        (lambda k, v, p: (k, v, p[:, :3]), "positions of"),
        (lambda k, v, p: (k, v, p.astype(jnp.float32)), "integers"),
        (lambda k, v, p: (k, v, p.at[0, 1].set(0)), "held twice"),
        (lambda k, v, p: (k, v, p.at[0, 1].set(-2)), "expected -1"),
        (lambda k, v, p: (k.astype(jnp.int32), v, p), "floating"),
        (lambda k, v, p: (jnp.swapaxes(k, 2, 3), jnp.swapaxes(v, 2, 3), p), "layouts"),
    ],
)
def test_from_arrays_refuses(change: Callable, message: str) -> None:
    k = jnp.ones((2, 1, 2, 5, 4))
    keys, values, pos = change(k, k, jnp.arange(5)[None])
    with pytest.raises(KvxError, match=message):
        from_arrays(keys, values, pos, geometry())


def test_check_refuses_missing_layers() -> None:
    cache = filled([[0, 1]])
    with pytest.raises(KvxError, match="each of the geometry's 2 layers once"):
        check(dataclasses.replace(cache, groups=cache.groups * 2))


def test_empty_gives_windows_their_rings() -> None:
    where = geometry((4, None, 4, 64))
    cache = empty(where, 3, 16, jnp.bfloat16, keep="window")
    assert [(g.layers, g.slots, g.ring) for g in cache.groups] == [((0, 2), 4, True), ((1, 3), 16, False)]
    assert cache.keys(3).dtype == jnp.bfloat16 and cache.next_position().tolist() == [0, 0, 0]
    assert [g.slots for g in empty(where, 3, 16).groups] == [16]
    with pytest.raises(KvxError, match="'all' or 'window'"):
        empty(where, 1, 4, keep="some")  # type: ignore[arg-type]
    with pytest.raises(KvxError, match="at least one row"):
        empty(where, 0, 4)


OPERATIONS: dict[str, Callable[[KVCache], KVCache]] = {
    "blank": blank,
    "compact": compact,
    "concatenate": lambda c: concatenate(c, shift_positions(c, 50)),
    "crop": lambda c: crop(c, 2),
    "pad_to": lambda c: pad_to(c, 9),
    "reserve": lambda c: reserve(c, 7),
    "rotate_keys": rotate_keys,
    "unrotate_keys": lambda c: unrotate_keys(dataclasses.replace(c, rotated=True)),
    "select_batch": lambda c: blank(select_batch(c, [1, 0, 1])),
    "shift_positions": lambda c: shift_positions(c, jnp.array([3, 40])),
    "slice_positions": lambda c: slice_positions(c, 1, jnp.array([2, 4])),
    "slice_slots": lambda c: slice_slots(c, 1, 4),
    "append": lambda c: append(pad_to(c, 8), *chunk(c, 3, 5), jnp.array([[7, -1, 8], [-1, -1, 9]])),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_empty_slots_are_zeros_after_every_operation(name: str) -> None:
    """CASE 13: NaN in an empty slot neither survives nor reaches a token."""
    cache = filled(RAGGED, (3, None))
    operation = OPERATIONS[name]
    got = operation(poison(cache))
    assert_clean(got)
    assert_same(got, operation(cache))


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_do_the_same_under_jit(name: str) -> None:
    cache = filled(RAGGED, (3, None))
    eager, traced = OPERATIONS[name](cache), jax.jit(OPERATIONS[name])(cache)
    if name == "reserve":  # a traced cache cannot count its free slots
        traced = slice_slots(traced, 0, eager.groups[0].slots)
    assert jax.tree.structure(eager) == jax.tree.structure(traced)
    for x, y in zip(jax.tree.leaves(eager), jax.tree.leaves(traced), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=1e-6)


def test_operations_leave_their_input_alone() -> None:
    """CASE 12: a cache is a value; two continuations never see each other."""
    cache = pad_to(filled(RAGGED), 8)
    before = jax.tree.map(np.array, cache)
    one = append(cache, *chunk(cache, 2, 1), jnp.array([[3, 4], [5, 6]]))
    two = append(cache, *chunk(cache, 2, 2), jnp.array([[3, 4], [5, 6]]))
    again = append(cache, *chunk(cache, 2, 1), jnp.array([[3, 4], [5, 6]]))
    assert_same(one, again)
    assert triples(one) != triples(two)
    assert_same(cache, before)


def test_slice_slots() -> None:
    part = slice_slots(filled(RAGGED), 1, 4)
    assert positions(part) == [[1, 2, -1], [1, 2, 3]] and part.groups[0].next.tolist() == [2, 3]
    with pytest.raises(KvxError, match="not inside"):
        slice_slots(filled(RAGGED), 1, 6)
    with pytest.raises(KvxError, match="slice_positions"):
        slice_slots(empty(geometry((4, None)), 1, 8, keep="window"), 0, 2)


def test_crop_goes_back_and_writing_continues_there() -> None:
    cache = crop(filled(RAGGED), jnp.array([1, 3]))
    assert positions(cache) == [[0, -1, -1, -1, -1], [0, 1, 2, -1, -1]]
    assert cache.groups[0].next.tolist() == [1, 3]
    more = append(cache, *chunk(cache, 1, 3), jnp.array([[1], [3]]))
    assert positions(more) == [[0, 1, -1, -1, -1], [0, 1, 2, 3, -1]]
    with pytest.raises(KvxError, match="0 or more"):
        crop(cache, -2)


def test_crop_of_a_ring_goes_back_only_as_far_as_it_remembers() -> None:
    cache = empty(geometry((4, None)), 1, 16, keep="window")
    cache = append(cache, *chunk(cache, 7, 0), jnp.arange(7)[None])
    back = crop(cache, 6)  # the window of a query at 6 is 3, 4, 5: all still there
    assert sorted(back.layer(0).pos.ravel().tolist()) == [-1, 3, 4, 5]
    k, v = chunk(back, 1, 9)
    more = append(back, k, v, jnp.array([[6]]))
    assert sorted(more.layer(0).pos.ravel().tolist()) == [3, 4, 5, 6]
    with pytest.raises(KvxError, match="cannot go back to position 5"):
        crop(cache, 5)
    short = append(empty(geometry((4, None)), 1, 16, keep="window"), *chunk(cache, 3, 0), jnp.arange(3)[None])
    assert crop(short, 1).layer(0).pos.ravel().tolist() == [0, -1, -1, -1]  # not wrapped: nothing is forgotten


def test_shift_moves_positions_and_turns_rotated_keys() -> None:
    cache = filled(RAGGED, (None, 3))
    moved = shift_positions(cache, 10)
    assert positions(moved) == [[10, 11, 12, -1, -1], [10, 11, 12, 13, 14]]
    np.testing.assert_array_equal(moved.keys(0), cache.keys(0))
    turned = shift_positions(rotate_keys(cache), jnp.array([10, 10]))
    want = rotate_keys(moved)
    assert turned.rotated
    for i in range(2):
        np.testing.assert_allclose(turned.keys(i), want.keys(i), atol=1e-6)
    with pytest.raises(KvxError, match="before position 0"):
        shift_positions(cache, -1)
    assert positions(jax.jit(shift_positions)(cache, -1)) == [[-1, 0, 1, -1, -1], [-1, 0, 1, 2, 3]]
    assert positions(shift_positions(moved, -10)) == positions(cache)


def test_learned_positions_refuse_to_shift_by_name() -> None:
    cache = filled(RAGGED, rope=None)
    with pytest.raises(KvxError, match=r"learned position embeddings \(GPT-2, OPT\)"):
        shift_positions(cache, 1)
    with pytest.raises(KvxError, match="learned position"):
        jax.jit(shift_positions)(cache, jnp.array([1, 2]))
    assert shift_positions(cache, 0) is cache
    np.testing.assert_array_equal(rotate_keys(cache).keys(0), cache.keys(0))


def test_rotate_keys_uses_each_layers_own_rope() -> None:
    cache = filled(RAGGED, (None, 3, None))
    turned = rotate_keys(cache)
    for i, layer in enumerate(cache.geometry.layers):
        assert layer.rope is not None
        want = rotate(cache.keys(i), cache.layer(i).pos, layer.rope)
        np.testing.assert_allclose(turned.keys(i), want, atol=1e-6)
        np.testing.assert_allclose(unrotate_keys(turned).keys(i), cache.keys(i), atol=1e-6)
    assert rotate_keys(turned) is turned and unrotate_keys(cache) is cache


def test_dynamic_ntk_cache_needs_a_recorded_length() -> None:
    spec = RopeSpec.create("dynamic", dim=4, factor=2.0, original_length=4)
    with pytest.raises(KvxError, match="record_length"):
        rotate_keys(filled(RAGGED, rope=spec))


def test_pad_and_reserve() -> None:
    cache = filled(RAGGED)
    wide = pad_to(cache, 8)
    assert wide.groups[0].slots == 8 and wide.groups[0].next.tolist() == [3, 5]
    assert triples(wide) == triples(cache)
    assert pad_to(wide, 4).groups[0].slots == 8
    assert reserve(wide, 3).groups[0].slots == 8 and reserve(wide, 4).groups[0].slots == 9
    hybrid = empty(geometry((4, None)), 1, 8, keep="window")
    assert [g.slots for g in pad_to(hybrid, 32).groups] == [4, 32]  # rings never need to grow


def test_append_raises_when_there_is_no_room() -> None:
    cache = filled(RAGGED)
    with pytest.raises(KvxError, match="5 slots but the longest row would need 6"):
        append(cache, *chunk(cache, 1, 0), jnp.array([[3], [5]]))
    assert positions(append(cache, *chunk(cache, 1, 0), jnp.array([[3], [-1]]))) == [[0, 1, 2, 3, -1], [0, 1, 2, 3, 4]]
    with pytest.raises(KvxError, match="one array per group"):
        append(cache, chunk(cache, 1, 0)[0] * 2, chunk(cache, 1, 0)[1], jnp.array([[3], [-1]]))
    with pytest.raises(KvxError, match="do not fit layers"):
        append(cache, *chunk(cache, 2, 0), jnp.array([[3], [-1]]))


def test_select_batch() -> None:
    cache = filled(RAGGED)
    picked = select_batch(cache, [1, 1, 0])
    assert triples(picked) == [[rows[1], rows[1], rows[0]] for rows in triples(cache)]
    assert picked.groups[0].next.tolist() == [5, 5, 3]
    with pytest.raises(KvxError, match=r"0\.\.1"):
        select_batch(cache, [2])


def test_compact_orders_and_unrolls_rings() -> None:
    cache = empty(geometry((4, None)), 2, 16, keep="window")
    cache = append(cache, *chunk(cache, 6, 0), jnp.array([[0, 1, 2, -1, 3, 4], [0, 1, 2, 3, 4, 5]]))
    flat = compact(cache)
    assert positions(flat) == [[1, 2, 3, 4], [2, 3, 4, 5]] and not any(g.ring for g in flat.groups)
    assert triples(flat) == triples(cache)


def test_concatenate_differently_cut_caches() -> None:
    """A one-row prefix that keeps everything, joined with a batch whose windows are rings of fewer slots."""
    prefix = filled([[0, 1]], (4, None, 4), seed=1)
    body = empty(geometry((4, None, 4)), 2, 16, keep="window")
    body = append(body, *chunk(body, 6, 2), jnp.array([[2, 3, 4, 5, 6, 7], [2, 3, 4, -1, 5, 6]]))
    joined = concatenate(prefix, body)
    assert [(g.layers, g.slots, g.ring) for g in joined.groups] == [((0, 2), 6, False), ((1,), 18, False)]
    first, second = triples(select_batch(prefix, [0, 0])), triples(body)
    assert triples(joined) == [
        [{**a, **b} for a, b in zip(*rows, strict=True)] for rows in zip(first, second, strict=True)
    ]
    assert joined.groups[1].next.tolist() == [8, 7]
    assert_clean(joined)


def test_concatenate_refuses_what_does_not_fit() -> None:
    a = filled([[0, 1]])
    with pytest.raises(KvxError, match="position 1 is held twice"):
        concatenate(a, filled([[1, 2]]))
    with pytest.raises(KvxError, match="rotated is True"):
        concatenate(a, rotate_keys(filled([[2, 3]])))
    with pytest.raises(KvxError, match="dtype"):
        concatenate(
            a, jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, filled([[2, 3]]))
        )
    with pytest.raises(KvxError, match="geometry"):
        concatenate(a, filled([[2, 3]], (None, 7)))
    with pytest.raises(KvxError, match="batch is 2, expected 3"):
        concatenate(filled([[2], [3], [4]]), filled([[5], [6]]))
    with pytest.raises(KvxError, match="at least one"):
        concatenate()


def test_vmap_over_stacked_caches() -> None:
    one, two = filled(RAGGED, seed=1), filled(RAGGED, seed=2)
    both = jax.tree.map(lambda x, y: jnp.stack([x, y]), one, two)
    got = jax.vmap(lambda c: crop(shift_positions(c, 2), 5))(both)
    for i, cache in enumerate((one, two)):
        want = crop(shift_positions(cache, 2), 5)
        assert_same(jax.tree.map(lambda x, i=i: x[i], got), want)


def test_caches_of_one_geometry_share_a_compilation() -> None:
    """Static fields are hashable facts: a second cache of the same shape does not trace again (CASE 33)."""
    traces = []

    @jax.jit
    def function(cache: KVCache) -> KVCache:
        traces.append(1)
        return crop(cache, 3)

    function(filled(RAGGED, seed=1))
    function(filled(RAGGED, seed=2))
    function(filled([[4, 5, 6, 7, 8], [0, 1, -1, -1, -1]], seed=3))
    assert len(traces) == 1


def test_arrays_never_become_static_fields() -> None:
    """CASE 33: an array in a static field works in the first jitted call and fails in the second."""
    spec = RopeSpec.create(theta=jnp.float32(100.0), dim=np.int64(4), factor=jnp.array(2.0))  # type: ignore[arg-type]
    assert [type(x) for x in (spec.theta, spec.dim, spec.factor)] == [float, int, float] and hash(spec)
    with pytest.raises(KvxError, match="plain number"):
        RopeSpec.create(dim=4, factor=jnp.array([2.0, 3.0]))
    with pytest.raises(KvxError, match="positive"):
        RopeSpec.create(dim=4, factor=0.0)
    layer = LayerGeometry(2, 4, 4, jnp.array(3), ROPE)  # type: ignore[arg-type]
    for bad in (CacheGeometry((layer,)), CacheGeometry([LayerGeometry(2, 4, 4)])):  # type: ignore[arg-type]
        with pytest.raises(KvxError, match="not hashable"):
            empty(bad, 1, 4)
        with pytest.raises(KvxError, match="not hashable"):
            from_arrays(jnp.ones((1, 1, 2, 3, 4)), jnp.ones((1, 1, 2, 3, 4)), jnp.arange(3), bad)


def test_caches_print_their_shapes_not_their_numbers() -> None:
    shown = repr(empty(geometry((4, 4, None, 4)), 1, 8, keep="window"))
    assert shown.splitlines()[1].strip() == (
        "CacheGroup(layers 0-1,3, ring, k float32[3,1,2,4,4], v float32[3,1,2,4,4], pos int32[1,1,1,4])"
    )
    assert "un-rotated" in shown and len(shown.splitlines()) == 3
    assert "object" in repr(jax.tree.map(lambda x: object(), filled([[0, 1]])))  # placeholders print too
