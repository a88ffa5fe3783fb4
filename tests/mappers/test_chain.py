"""The identity and chains of maps."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvx
from kvx.alignment import Alignment, compose
from kvx.cache.geometry import CacheGeometry, LayerGeometry
from kvx.cache.provenance import Provenance
from kvx.errors import KvxError
from kvx.fitting.synthetic import SOURCE, TARGET, toy_pairs
from kvx.mappers import full_head


@pytest.fixture(scope="module")
def there_and_back():
    there, _ = kvx.fit(full_head(layers=2, ridge=1e-4), toy_pairs(SOURCE, TARGET), progress=False)
    back, _ = kvx.fit(full_head(layers=1, ridge=1e-4), toy_pairs(TARGET, SOURCE, seed=3), progress=False)
    return there, back


def random_alignment(seed: int, reads: int, length: int, width: int = 1) -> Alignment:
    rng = np.random.default_rng(seed)
    weight = rng.uniform(0.1, 1, size=(4, length, width)).astype(np.float32)
    return Alignment(
        jnp.asarray(rng.integers(0, reads, size=(4, length, width)), jnp.int32),
        jnp.asarray(weight / weight.sum(axis=2, keepdims=True)),
        jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (4, length)),
    )


def test_identity_is_the_unit(there_and_back) -> None:
    there, _ = there_and_back
    assert kvx.chain(kvx.identity(), there) is there
    assert kvx.chain(there, kvx.identity()) is there
    assert kvx.chain(there) is there
    assert kvx.chain().method == kvx.identity().method


def test_identity_returns_the_same_cache() -> None:
    hybrid = CacheGeometry((LayerGeometry(1, 4, 4), LayerGeometry(2, 2, 6), LayerGeometry(1, 4, 4)))
    batch = next(iter(toy_pairs(hybrid, TARGET)))
    same = kvx.translate(kvx.identity(), batch.source, batch.alignment)
    for layer in range(3):
        np.testing.assert_array_equal(same.keys(layer), batch.source.keys(layer))
        np.testing.assert_array_equal(same.values(layer), batch.source.values(layer))
    np.testing.assert_array_equal(same.next_position(), batch.source.next_position())


def test_a_chain_equals_hop_by_hop(there_and_back) -> None:
    there, back = there_and_back
    back = dataclasses.replace(back, prefix=None)
    batch = next(iter(toy_pairs(SOURCE, TARGET)))
    first, second = random_alignment(0, 14, 12, 2), random_alignment(1, 12, 9)
    middle = kvx.translate(dataclasses.replace(there, prefix=None), batch.source, first)
    wanted = kvx.translate(back, middle, second)
    got = kvx.translate(kvx.chain(there, back), batch.source, compose(first, second))
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    np.testing.assert_allclose(got.keys(1), wanted.keys(1), atol=1e-4)
    np.testing.assert_allclose(got.values(2), wanted.values(2), atol=1e-4)


def test_links_must_meet(there_and_back) -> None:
    there, back = there_and_back
    with pytest.raises(KvxError, match="map 0 writes caches of"):
        kvx.chain(there, there)
    with pytest.raises(KvxError, match="not fitted as a whole"):
        kvx.fit(kvx.chain(there, back).method, toy_pairs(), progress=False)
    one = dataclasses.replace(there, provenance={"target": Provenance("b", "11")})
    other = dataclasses.replace(back, provenance={"source": Provenance("b", "22")})
    with pytest.raises(KvxError, match="other weights"):
        kvx.chain(one, other)
