"""Laws of every kind of cache in ``tests/cases.py``."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from kvx.cache.build import blank, check
from kvx.cache.cache import KVCache
from kvx.cache.ops import concatenate, crop, pad_to, rotate_keys, shift_positions, unrotate_keys
from tests.cases import CACHES, poison

# Maps of a cache onto one of the same structure; each must also be a function that JAX can transform.
OPERATIONS: dict[str, Callable[[KVCache], KVCache]] = {
    "blank": blank,
    "crop": lambda cache: crop(cache, 100),
    "rotate and back": lambda cache: unrotate_keys(rotate_keys(cache)),
    "shift": lambda cache: blank(cache) if cache.geometry.learned_positions else shift_positions(cache, 3),
}


@pytest.fixture(params=CACHES, ids=str)
def cache(request: pytest.FixtureRequest) -> KVCache:
    return CACHES[request.param]()


@pytest.fixture(params=OPERATIONS, ids=str)
def operation(request: pytest.FixtureRequest) -> Callable[[KVCache], KVCache]:
    return OPERATIONS[request.param]


def form(cache: KVCache) -> tuple:
    """Structure, shapes and dtypes."""
    return jax.tree.structure(cache), [(x.shape, x.dtype) for x in jax.tree.leaves(cache)]


def same(a: KVCache, b: KVCache, atol: float = 0.0) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=0, atol=atol)


def test_rows_are_valid_and_a_pytree(cache: KVCache) -> None:
    check(cache)
    leaves, structure = jax.tree.flatten(cache)
    same(jax.tree.unflatten(structure, leaves), cache)
    hash(structure)  # static facts can key a compilation


def test_shape_and_dtype_fixed_point(cache: KVCache, operation) -> None:
    after = operation(cache)
    assert form(after) == form(cache)
    check(after)


def test_bf16_stays_bf16(cache: KVCache, operation) -> None:
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, cache)
    assert {x.dtype for x in jax.tree.leaves(operation(half))} == {x.dtype for x in jax.tree.leaves(half)}


def test_nan_in_empty_slots_is_never_read(cache: KVCache, operation) -> None:
    same(blank(operation(poison(cache))), blank(operation(cache)))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(operation(poison(cache))))


def test_jit_agrees_with_eager(cache: KVCache, operation) -> None:
    same(jax.jit(operation)(cache), operation(cache), atol=1e-6)


def test_vmap_agrees_with_a_loop(cache: KVCache, operation) -> None:
    other = jax.tree.map(lambda x: x * 2 if x.dtype == jnp.float32 else x, cache)
    both = jax.tree.map(lambda *xs: jnp.stack(xs), cache, other)
    for i, one in enumerate((cache, other)):
        same(jax.tree.map(lambda x, i=i: x[i], jax.vmap(operation)(both)), operation(one), atol=1e-6)


def test_export_round_trip(cache: KVCache, operation) -> None:
    leaves, structure = jax.tree.flatten(cache)
    flat = lambda *xs: jax.tree.leaves(operation(jax.tree.unflatten(structure, xs)))  # noqa: E731
    exported = export.deserialize(export.export(jax.jit(flat))(*leaves).serialize())
    for x, y in zip(exported.call(*leaves), jax.tree.leaves(operation(cache)), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)


def test_gradients_are_finite_and_reach_real_slots_only(cache: KVCache, operation) -> None:
    def energy(k: jax.Array) -> jax.Array:
        first = cache.groups[0]
        groups = (type(first)(k, first.v, first.pos, first.next, first.layers, first.ring), *cache.groups[1:])
        return (operation(KVCache(groups, cache.rotated, cache.geometry)).groups[0].k ** 2).sum()

    slope = jax.grad(energy)(poison(cache).groups[0].k)
    real = np.broadcast_to(np.asarray(cache.groups[0].pos >= 0)[..., None], slope.shape)
    assert np.isfinite(slope).all()
    assert (np.asarray(slope)[~real] == 0).all() and (np.asarray(slope)[real] != 0).any()


def test_rotation_is_undone(cache: KVCache) -> None:
    same(unrotate_keys(rotate_keys(cache)), cache, atol=1e-6)


def test_shifts_compose(cache: KVCache) -> None:
    if cache.geometry.learned_positions:
        with pytest.raises(ValueError, match="learned position"):
            shift_positions(cache, 1)
        return
    same(shift_positions(shift_positions(cache, 5), 2), shift_positions(cache, 7))


def test_padding_adds_only_empty_slots(cache: KVCache) -> None:
    wide = pad_to(cache, 9)
    for before, after in zip(cache.groups, wide.groups, strict=True):
        assert after.slots == (before.slots if before.ring else 9)
        assert (np.asarray(after.pos)[..., before.slots :] == -1).all()
    assert (wide.next_position() == cache.next_position()).all()


def test_joining_a_cache_with_its_continuation(cache: KVCache) -> None:
    if cache.geometry.learned_positions or any(group.ring for group in cache.groups):
        with pytest.raises(ValueError):
            concatenate(cache, cache)
        return
    end = int(cache.next_position().max())
    both = concatenate(cache, shift_positions(cache, end))
    assert (both.next_position() == cache.next_position() + end).all()
    same_keys = np.asarray(both.keys(0))[:, :, : cache.groups[0].slots]
    np.testing.assert_array_equal(same_keys, cache.keys(0))


def test_another_cache_of_the_same_shape_does_not_retrace(cache: KVCache, operation) -> None:
    traces = []

    @jax.jit
    def counted(x: KVCache) -> KVCache:
        traces.append(1)
        return operation(x)

    counted(cache)
    counted(jax.tree.map(lambda x: x + 1 if x.dtype == jnp.float32 else x, cache))
    assert len(traces) == 1


def test_a_cache_is_a_value(cache: KVCache, operation) -> None:
    before = [np.array(x) for x in jax.tree.leaves(cache)]
    operation(cache)
    for x, y in zip(jax.tree.leaves(cache), before, strict=True):
        np.testing.assert_array_equal(x, y)
