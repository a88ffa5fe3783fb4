"""Laws of every mapper and translator in ``tests/cases.py``, through the public ``translate``."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import kvx
from kvx.cache.build import check
from kvx.cache.cache import KVCache
from kvx.cache.ops import rotate_keys, shift_positions
from kvx.fitting.pairs import PairBatch
from kvx.fitting.synthetic import toy_pairs
from kvx.mappers import CacheMap
from tests.cases import MAPPERS, TRANSLATORS, poison

CASES = {**MAPPERS, **TRANSLATORS}
CLOSE = {"rtol": 0, "atol": 1e-5}


@functools.cache
def fitted(name: str, seed: int = 0) -> CacheMap:
    return CASES[name].fitted(seed)


@functools.cache
def batch() -> PairBatch:
    """A toy batch whose alignment also holds embeddings, which most maps do not read."""
    made, looked_up = (next(iter(toy_pairs(batches=1, embedding_dim=dim))) for dim in (0, 4))
    return dataclasses.replace(made, alignment=looked_up.alignment)


@pytest.fixture(params=CASES, ids=str)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def mapper(name: str) -> CacheMap:
    return fitted(name)


def own(mapper: CacheMap) -> KVCache | None:
    """The target's own cache of the batch, for maps that read it."""
    return batch().target if mapper.reads_target else None


def translate(mapper: CacheMap, cache: KVCache | None = None) -> KVCache:
    return kvx.translate(mapper, batch().source if cache is None else cache, batch().alignment, receiver=own(mapper))


def leaves_close(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, **CLOSE)


def test_shapes_dtypes_positions_and_zeros(mapper: CacheMap) -> None:
    moved = translate(mapper)
    check(moved)
    tokens, prefix = batch().alignment.pos, mapper.prefix_length
    wanted = mapper.target if mapper.target.layers else batch().source.geometry
    assert [g.shapes for g in moved.geometry.layers] == [g.shapes for g in wanted.layers] and not moved.rotated
    np.testing.assert_array_equal(moved.next_position(), (tokens >= 0).sum(axis=1) + prefix)
    for group in moved.groups:
        empty = np.broadcast_to(np.asarray(group.pos < 0)[..., None], group.k.shape)
        assert group.k.dtype == jnp.float32 and (np.asarray(group.k)[empty] == 0).all()


def test_costs_are_told(mapper: CacheMap) -> None:
    """Tables print them for every map, so every kind of parameters has to say them."""
    few, many = mapper.flops(10), mapper.flops(30)
    if mapper.size:
        assert 0 < mapper.parameters <= mapper.size // 4 and 3 * few <= many and few > 0
    else:
        assert (mapper.parameters, few, many) == (0, 0, 0)


def test_what_can_be_recovered_is(name: str) -> None:
    if not CASES[name].exact:
        return
    moved = translate(fitted(name))
    real = np.asarray(batch().alignment.pos) >= 0
    for layer in range(moved.num_layers):
        got = np.asarray(moved.keys(layer))[:, :, fitted(name).prefix_length :]
        want = np.asarray(batch().target.keys(layer))
        error = np.square(got - want).mean(axis=(1, 3))[real].mean()
        assert error < 1e-2 * np.square(want).mean(axis=(1, 3))[real].mean(), f"layer {layer}"


def test_identity_is_the_unit_of_chain(mapper: CacheMap) -> None:
    leaves_close(translate(kvx.chain(kvx.identity(), mapper)), translate(mapper))
    leaves_close(translate(kvx.chain(mapper, kvx.identity())), translate(mapper))


def test_composition_prefix_and_context_are_independent(mapper: CacheMap) -> None:
    """Without its prefix a map writes the same context at positions that start at zero."""
    if getattr(mapper.method, "rotated", False):
        return  # what it makes depends on where the context stands
    whole, lead = translate(mapper), mapper.prefix_length
    first = None if own(mapper) is None else shift_positions(own(mapper), -lead)
    bare = kvx.translate(dataclasses.replace(mapper, prefix=None), batch().source, batch().alignment, receiver=first)
    np.testing.assert_allclose(np.asarray(whole.keys(0))[:, :, lead:], bare.keys(0), **CLOSE)
    np.testing.assert_array_equal(whole.next_position(), bare.next_position() + lead)


def test_rotated_caches_are_read_as_un_rotated(mapper: CacheMap) -> None:
    leaves_close(translate(mapper, rotate_keys(batch().source)), translate(mapper))


def test_nan_in_empty_slots_is_never_read(mapper: CacheMap) -> None:
    given = None if own(mapper) is None else poison(own(mapper))
    moved = kvx.translate(mapper, poison(batch().source), batch().alignment, receiver=given)
    leaves_close(moved, translate(mapper))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(moved))


def test_a_dropped_token_stays_dropped(mapper: CacheMap) -> None:
    alignment = batch().alignment
    fewer = dataclasses.replace(alignment, weight=alignment.weight.at[:, 2].set(0), pos=alignment.pos.at[:, 2].set(-1))
    moved = kvx.translate(mapper, batch().source, fewer, receiver=own(mapper))
    positions = np.asarray(moved.layer(0).pos)
    assert (positions != 2 + mapper.prefix_length).all()


def test_vmap_agrees_with_a_loop(mapper: CacheMap) -> None:
    other = jax.tree.map(lambda x: 2 * x if x.dtype == jnp.float32 else x, batch().source)
    both = jax.tree.map(lambda *xs: jnp.stack(xs), batch().source, other)
    moved = jax.vmap(lambda cache: translate(mapper, cache))(both)
    for i, one in enumerate((batch().source, other)):
        leaves_close(jax.tree.map(lambda x, i=i: x[i], moved), translate(mapper, one))


def test_export_round_trip(mapper: CacheMap) -> None:
    leaves, structure = jax.tree.flatten((mapper, batch().source, batch().alignment, own(mapper)))

    def flat(*xs: jax.Array) -> list[jax.Array]:
        *given, receiver = jax.tree.unflatten(structure, xs)
        return jax.tree.leaves(kvx.translate(*given, receiver=receiver))

    exported = export.deserialize(export.export(jax.jit(flat))(*leaves).serialize())
    for x, y in zip(exported.call(*leaves), jax.tree.leaves(translate(mapper)), strict=True):
        np.testing.assert_allclose(x, y, **CLOSE)


def test_gradients_are_finite_and_reach_the_cache(mapper: CacheMap) -> None:
    source = poison(batch().source)

    def energy(k: jax.Array) -> jax.Array:
        group = dataclasses.replace(source.groups[0], k=k)
        moved = translate(mapper, dataclasses.replace(source, groups=(group,)))
        return sum(jnp.square(g.k).sum() for g in moved.groups)

    slope = np.asarray(jax.grad(energy)(source.groups[0].k))
    assert np.isfinite(slope).all() and (slope != 0).any()
    unread = np.broadcast_to(np.asarray(source.groups[0].pos < 0)[..., None], slope.shape)
    assert (slope[unread] == 0).all()


def test_another_fit_of_the_same_shape_does_not_retrace(name: str) -> None:
    traces = []

    @jax.jit
    def counted(mapper: CacheMap, cache: KVCache, alignment: Alignment, receiver: KVCache | None) -> KVCache:
        traces.append(1)
        return kvx.translate(mapper, cache, alignment, receiver=receiver)

    for seed in (0, 1):
        counted(fitted(name, seed), batch().source, batch().alignment, own(fitted(name, seed)))
    assert len(traces) == 1


def test_case_8_every_product_names_the_highest_precision(mapper: CacheMap) -> None:
    text = jax.jit(kvx.translate).lower(mapper, batch().source, batch().alignment, receiver=own(mapper)).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert bool(products) == (mapper.method != kvx.identity().method)
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)


def test_checkpoint_round_trip(mapper: CacheMap, tmp_path) -> None:
    again = kvx.load(kvx.save(tmp_path / "map", mapper))
    assert again.digest == mapper.digest and again.method == mapper.method
    assert jax.tree.structure(again) == jax.tree.structure(mapper)
    for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(mapper), strict=True):
        np.testing.assert_array_equal(x, y)


def test_sharding_fixed_point(run_python, tmp_path) -> None:
    """Rows spread over devices stay there through a translation, and hold the same."""
    for at, name in enumerate(CASES):  # fitted in this process already, and read back there
        kvx.save(tmp_path / str(at), fitted(name))
    result = run_python(SHARDED, devices=2, KVX_FITTED=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == list(CASES)


SHARDED = """
import os, pathlib
import jax, numpy as np, kvx
jax.config.update('jax_disable_most_optimizations', True)
from jax.sharding import NamedSharding, PartitionSpec as P
from kvx.fitting.synthetic import toy_pairs
from tests.cases import MAPPERS, TRANSLATORS

mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
batch = next(iter(toy_pairs(batches=1, embedding_dim=4)))

def axis(x):
    return P("data") if x.ndim < 4 else P(None, "data")

spread = lambda tree: jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, axis(x))), tree)
for at, name in enumerate({**MAPPERS, **TRANSLATORS}):
    mapper = kvx.load(pathlib.Path(os.environ["KVX_FITTED"]) / str(at))
    own = batch.target if mapper.reads_target else None
    alone = kvx.translate(mapper, batch.source, batch.alignment, receiver=own)
    moved = kvx.translate(mapper, spread(batch.source), spread(batch.alignment), receiver=spread(own))
    for x, y in zip(jax.tree.leaves(moved), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)
    assert not moved.groups[0].k.sharding.is_fully_replicated, name
    print(name)
"""
