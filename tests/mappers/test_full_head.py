"""The full-head map: recovery of planted maps, settings, hybrid geometries, transformations."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvx
from kvx.alignment import Alignment
from kvx.cache.build import check
from kvx.cache.geometry import CacheGeometry, LayerGeometry, RopeSpec
from kvx.errors import KvxError
from kvx.fitting.synthetic import SOURCE, TARGET, toy_pairs
from kvx.mappers import constant, full_head, random
from kvx.mappers.linear import source_blocks
from kvx.mappers.support import nearest_layers

NARROW, WIDE = (
    LayerGeometry(1, 4, 6, rope=RopeSpec.create(dim=4)),
    LayerGeometry(2, 6, 4, rope=RopeSpec.create(dim=6)),
)
HYBRID = CacheGeometry((NARROW, WIDE, NARROW))


def worst(pairs, mapper, **kwargs) -> float:
    """Largest error of a translated context, over real tokens."""
    worst = 0.0
    for batch in pairs:
        moved = mapper.method.apply(mapper.params, batch.source, batch.alignment)
        for layer in range(moved.num_layers):
            for side in ("keys", "values"):
                gap = getattr(moved, side)(layer) - getattr(batch.target, side)(layer)
                worst = max(worst, float(jnp.abs(gap).max()))
    return worst


@pytest.mark.parametrize(
    ("source", "target"), [(SOURCE, TARGET), (HYBRID, TARGET), (SOURCE, HYBRID), (HYBRID, HYBRID)], ids=str
)
def test_a_planted_map_is_recovered(source: CacheGeometry, target: CacheGeometry) -> None:
    pairs = toy_pairs(source, target, reads=2, batches=12)
    mapper, report = kvx.fit(full_head(layers="all", ridge=1e-8), pairs, progress=False)
    assert worst(pairs, mapper) < 2e-3
    assert report.r2_held_out > 0.9999
    moved = kvx.translate(mapper, *(lambda b: (b.source, b.alignment))(next(iter(pairs))))
    check(moved)
    assert moved.geometry == target


def test_nearest_layers_spread_over_the_depth() -> None:
    assert nearest_layers(30, 18, 7)[0] == tuple(range(7))
    assert nearest_layers(30, 18, 7)[-1] == tuple(range(23, 30))
    assert nearest_layers(4, 4, 1) == ((0,), (1,), (2,), (3,))
    assert nearest_layers(3, 5, 9) == ((0, 1, 2),) * 5
    assert nearest_layers(8, 1, 1) == ((0,),)


def test_moments_are_gathered_only_where_the_method_can_look() -> None:
    assert full_head(layers=2).reach(SOURCE, TARGET) == ((0, 1), (1, 2))
    assert full_head(layers="all").reach(SOURCE, TARGET) is None
    assert full_head(layers=1, choice="best").reach(SOURCE, TARGET) is None
    mapper, report = kvx.fit(full_head(layers=2, ridge=1e-4), toy_pairs(reads=2), progress=False)
    wide, full = kvx.fit(full_head(layers=2, ridge=1e-4, choice="best"), toy_pairs(reads=2), progress=False)
    assert report.moment_bytes < full.moment_bytes


def test_best_layers_are_found() -> None:
    """The outputs depend on one source layer each, which a map that may choose finds wherever it is."""
    source = CacheGeometry((LayerGeometry(1, 4, 4, rope=RopeSpec.create(dim=4)),) * 5)
    pairs = toy_pairs(source, TARGET, noise=0.1, batches=12)
    mapper, report = kvx.fit(full_head(layers=1, choice="best"), pairs, progress=False)
    assert [entry.source_layers for entry in report.entries] == [(0,), (0,), (4,), (4,)]
    assert report.r2_held_out > 0.95


def test_same_inputs_feed_their_own_kind() -> None:
    pairs = toy_pairs(reads=1, batches=12)
    both, first = kvx.fit(full_head(layers=1, ridge=1e-6), pairs, progress=False)
    same, second = kvx.fit(full_head(layers=1, ridge=1e-6, inputs="same"), pairs, progress=False)
    assert same.params.keys[0].coefficients.shape[2] * 2 == both.params.keys[0].coefficients.shape[2]
    assert first.r2_held_out > 0.999 > 0.9 > second.r2_held_out
    assert same.size < both.size


def test_ridge_is_chosen_on_held_out_rows() -> None:
    """With noise and few rows a larger ridge wins than with many clean ones."""
    few, many = (
        kvx.fit(full_head(layers="all"), toy_pairs(batches=n, noise=z), progress=False, held_out=0.25)[1]
        for n, z in ((2, 2.0), (40, 0.01))
    )
    assert np.mean([e.ridge for e in few.entries]) > np.mean([e.ridge for e in many.entries])
    assert few.held_out_rows > 0


def test_held_out_rows_are_needed_to_choose() -> None:
    with pytest.raises(KvxError, match="held-out moments"):
        kvx.fit(full_head(layers=1), toy_pairs(), held_out=0.0, progress=False)
    with pytest.raises(KvxError, match="held-out moments"):
        kvx.fit(full_head(layers=1, ridge=0.1, choice="best"), toy_pairs(), held_out=0.0, progress=False)
    _, report = kvx.fit(full_head(layers=1, ridge=0.1), toy_pairs(), held_out=0.0, progress=False)
    assert report.held_out_rows == 0
    assert np.isnan(report.r2_held_out)


@pytest.mark.parametrize(
    "settings",
    [{"layers": 0}, {"layers": "most"}, {"inputs": "none"}, {"choice": "worst"}, {"ridge": -1.0}, {"ridge": ()}],
)
def test_settings_out_of_range_are_refused(settings) -> None:
    with pytest.raises(KvxError, match=f"^{next(iter(settings))} is"):
        full_head(**settings)


@pytest.fixture(scope="module")
def fitted():
    pairs = toy_pairs(reads=2, noise=0.5, batches=12)
    mapper, _ = kvx.fit(full_head(layers=2, ridge=1e-2), pairs, progress=False, held_out=0.0)
    return pairs, mapper


def outputs(mapper, pairs) -> list[np.ndarray]:
    """Keys and values of every layer on all fitted tokens, ``[tokens,K*D]``."""
    found: dict[tuple[int, str], list[np.ndarray]] = {}
    for batch in pairs:
        moved = mapper.method.apply(mapper.params, batch.source, batch.alignment)
        for layer in range(moved.num_layers):
            for side in ("keys", "values"):
                x = np.moveaxis(np.asarray(getattr(moved, side)(layer), np.float64), 1, 2)
                rows = x.reshape(-1, x.shape[2] * x.shape[3])[np.asarray(batch.weight).ravel() > 0]
                found.setdefault((layer, side), []).append(rows)
    return [np.concatenate(rows) for rows in found.values()]


def test_constant_keeps_the_means_and_nothing_else(fitted) -> None:
    pairs, mapper = fitted
    for ours, theirs in zip(outputs(mapper, pairs), outputs(constant(mapper), pairs), strict=True):
        np.testing.assert_allclose(theirs, np.broadcast_to(theirs[:1], theirs.shape), atol=1e-6)
        np.testing.assert_allclose(theirs[0], ours.mean(axis=0), atol=1e-4)


def test_random_matches_mean_and_variance_and_scrambles_the_rest(fitted) -> None:
    pairs, mapper = fitted
    other = random(mapper, jax.random.key(1))
    again = random(mapper, jax.random.key(2))
    for ours, theirs, third in zip(*(outputs(m, pairs) for m in (mapper, other, again)), strict=True):
        np.testing.assert_allclose(theirs.mean(axis=0), ours.mean(axis=0), atol=1e-3)
        np.testing.assert_allclose(theirs.std(axis=0), ours.std(axis=0), rtol=1e-3)
        assert np.abs(theirs - third).max() > 0.1
        same_channel = [np.corrcoef(a, b)[0, 1] for a, b in zip(ours.T, theirs.T, strict=True)]
        assert np.abs(same_channel).max() < 0.99
    assert other.params.keys[0].gather is mapper.params.keys[0].gather
    assert other.digest != mapper.digest


def test_controls_refuse_maps_without_coefficients() -> None:
    for control in (constant, lambda m: random(m, jax.random.key(0))):
        with pytest.raises(KvxError, match="no coefficients"):
            control(kvx.identity())


def test_a_chains_control_changes_its_last_link(fitted) -> None:
    pairs, mapper = fitted
    back, _ = kvx.fit(full_head(layers=1, ridge=1e-2), toy_pairs(TARGET, SOURCE), progress=False)
    chained = kvx.chain(mapper, back)
    silent = constant(chained)
    assert silent.params[0] is chained.params[0]
    assert not np.asarray(silent.params[1].keys[0].coefficients).any()


def test_apply_is_jitted_mapped_and_differentiated(fitted) -> None:
    pairs, mapper = fitted
    batch = next(iter(pairs))
    plain = mapper.method.apply(mapper.params, batch.source, batch.alignment)
    alone = lambda tree: jax.tree.map(lambda x: x[:, None] if x.ndim > 1 else x[None], tree)  # noqa: E731

    def one(k, v, index, weight, pos):  # type: ignore[no-untyped-def]
        group = dataclasses.replace(
            batch.source.groups[0], k=k[:, None], v=v[:, None], pos=batch.source.groups[0].pos[:, :1]
        )
        cache = dataclasses.replace(batch.source, groups=(group,))
        moved = mapper.method.apply(mapper.params, cache, Alignment(index[None], weight[None], pos[None]))
        return moved.groups[0].k[:, 0]

    group, a = batch.source.groups[0], batch.alignment
    mapped = jax.vmap(one, in_axes=(1, 1, 0, 0, 0), out_axes=1)(group.k, group.v, a.index, a.weight, a.pos)
    np.testing.assert_allclose(mapped, plain.groups[0].k, atol=1e-5)
    assert alone is not None

    def loss(params):  # type: ignore[no-untyped-def]
        return (mapper.method.apply(params, batch.source, batch.alignment).groups[0].v ** 2).sum()

    grads = jax.grad(loss, allow_int=True)(mapper.params)
    assert float(jnp.abs(grads.values[0].coefficients).max()) > 0
    assert float(jnp.abs(grads.keys[0].coefficients).max()) == 0.0


def test_poison_in_unread_slots_never_arrives(fitted) -> None:
    pairs, mapper = fitted
    batch = next(iter(pairs))
    empty = (batch.source.groups[0].pos < 0)[..., None]
    group = batch.source.groups[0]
    bad = dataclasses.replace(group, k=jnp.where(empty, jnp.nan, group.k), v=jnp.where(empty, jnp.nan, group.v))
    poisoned = dataclasses.replace(batch.source, groups=(bad,))
    moved = kvx.translate(mapper, poisoned, batch.alignment)
    clean = kvx.translate(mapper, batch.source, batch.alignment)
    for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(a, b)


def test_several_source_tokens_are_averaged() -> None:
    rng = np.random.default_rng(0)
    batch = next(iter(toy_pairs()))
    index = jnp.asarray(rng.integers(0, 14, size=(4, 5, 2)), jnp.int32)
    weight = jnp.broadcast_to(jnp.array([0.25, 0.75]), index.shape)
    pos = jnp.broadcast_to(jnp.arange(5, dtype=jnp.int32), (4, 5))
    blocks = source_blocks(batch.source, Alignment(index, weight, pos), (0, 1), by_head=True)
    keys = np.asarray(batch.source.keys(1))
    wanted = 0.25 * keys[2, 1, index[2, 3, 0]] + 0.75 * keys[2, 1, index[2, 3, 1]]
    np.testing.assert_allclose(blocks[2 * 1 + 1, 2, 3, :4], wanted, rtol=1e-5)


def test_bf16_pairs_fit_and_translate() -> None:
    pairs = toy_pairs(reads=1, batches=12, dtype=jnp.bfloat16)
    mapper, report = kvx.fit(full_head(layers=1), pairs, progress=False)
    batch = next(iter(pairs))
    moved = kvx.translate(mapper, batch.source, batch.alignment)
    assert moved.groups[0].k.dtype == jnp.bfloat16
    assert report.r2_held_out > 0.99
