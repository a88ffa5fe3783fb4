"""Losses: right values, the gradient made with the loss, padding that never leaks, and no logits of the context."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvx.cache.build import from_arrays
from kvx.cache.cache import KVCache
from kvx.cache.geometry import CacheGeometry
from kvx.errors import KvxError
from kvx.fitting.synthetic import SOURCE, toy_pairs
from kvx.fitting.training import head
from kvx.fitting.training.batch import Suffix, TrainBatch
from kvx.fitting.training.head import divergence, head_loss
from kvx.fitting.training.loss import (
    TrainingLoss,
    cache_error,
    check_loss,
    correction_error,
    gain_weights,
    norms_of,
    total_loss,
)
from kvx.fitting.training.partition import Partition
from kvx.fitting.training.trainer import Static, gradient
from kvx.models.layers import lm_head
from kvx.models.model import Model
from kvx.models.prefill import prefill
from kvx.models.random_model import random_model
from kvx.models.replay import ReplayPlan, replay
from kvx.translators import residual, untrained

pytestmark = pytest.mark.usefixtures("quick_compilation")
ALL = TrainingLoss(suffix=1.0, gain=0.5, distil=2.0, temperature=2.0, top_k=5)
TERMS = TrainingLoss(suffix=1.0, gain=0.5, distil=1.0, cache=0.3, sensitivity=True, correction=0.2, injection=(0, 1))
ROWS = 7


@pytest.fixture(scope="module")
def target() -> Model:
    return random_model()


def _rows(seed: int = 0) -> tuple[jax.Array, dict[str, jax.Array]]:
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))  # noqa: E731
    rows = {
        "targets": jnp.asarray(rng.integers(0, 64, ROWS), jnp.int32),
        "share": abs(draw(ROWS)),
        "gain": abs(draw(ROWS)),
        "teacher": draw(ROWS, 32),
    }
    return draw(ROWS, 32), rows


def test_head_loss_and_its_gradient_equal_plain_ones(target: Model, monkeypatch) -> None:
    hidden, rows = _rows()

    def plain(hidden: jax.Array) -> jax.Array:
        logits, theirs = (lm_head(target.config, target.params, x) for x in (hidden, rows["teacher"]))
        nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), rows["targets"][:, None], axis=1)[:, 0]
        best, at = jax.lax.top_k(theirs, 5)
        p = jax.nn.softmax(best / 2.0)
        q = jax.nn.log_softmax(jnp.take_along_axis(logits, at, axis=1) / 2.0)
        kl = 4.0 * (p * (jnp.log(p) - q)).sum(axis=1)
        return (rows["share"] * nats + 0.5 * rows["gain"] * nats + 2.0 * rows["share"] * kl).sum()

    monkeypatch.setattr(head, "LOGIT_BYTES", 3 * 4 * 64)  # blocks of three rows, the last one filled up
    ours = lambda hidden: 3.0 * head_loss(ALL, target, hidden, dict(rows))[0]  # noqa: E731
    np.testing.assert_allclose(ours(hidden), 3.0 * plain(hidden), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(ours)(hidden), 3.0 * jax.grad(plain)(hidden), rtol=1e-4, atol=1e-5)


def test_divergence_is_zero_only_where_both_agree() -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 9), np.float32))
    assert float(abs(divergence(x, x, 3.0)).max()) < 1e-6
    assert (divergence(x[::-1], x)[jnp.array([0, 2])] > 0).all()
    np.testing.assert_allclose(divergence(x[::-1], x, top_k=9), divergence(x[::-1], x), rtol=1e-5)


def test_gain_weights_grow_with_the_gain_within_their_bounds() -> None:
    targets = jnp.array([[3, 3, 3, -1]])
    suffix = Suffix(
        targets, jnp.zeros_like(targets), targets, jnp.array([[-1.0, -1, -9, 0]]), jnp.array([[-3.0, -90, -1, 0]])
    )
    loss = TrainingLoss(gain=1.0, gain_floor=0.25, gain_cap=4.0)
    assert gain_weights(suffix, loss).tolist() == [[2.25, 4.25, 0.25, 0.0]]
    assert not gain_weights(suffix, TrainingLoss()).any()


@pytest.mark.parametrize(
    "loss", [TrainingLoss(suffix=0.0), TrainingLoss(gain=-1.0), TrainingLoss(temperature=0.0), TrainingLoss(top_k=0)]
)
def test_losses_out_of_range_are_refused(loss: TrainingLoss) -> None:
    with pytest.raises(KvxError):
        check_loss(loss)


def _batch(target: Model, seed: int = 0) -> tuple[TrainBatch, Any]:
    """Two examples over a random cache of the target's own geometry; the last places are padding."""
    rng = np.random.default_rng(seed)
    geometry = target.config.geometry
    tokens = jnp.asarray(rng.integers(0, 64, (2, 6)), jnp.int32).at[1, 4:].set(-1)
    targets = jnp.array([[5, 9, 11, -1], [7, -1, -1, -1]])
    where = jnp.array([[2, 3, 4, 0], [1, 0, 0, 0]])
    logs = jnp.asarray(-abs(rng.standard_normal((2, 4), np.float32)))
    suffix = Suffix(
        tokens, where, targets, logs, logs - 1.0, logs, jnp.asarray(rng.standard_normal((2, 4, 32), np.float32))
    )
    one = next(iter(toy_pairs(batches=1, batch_size=2)))
    cache = lambda: _random(geometry, rng)  # noqa: E731
    weights = jnp.asarray(abs(rng.standard_normal((2, 2, 2, 16, 2), np.float32)))
    native = cache()
    context = jnp.where(jnp.arange(16)[None] < 14, jnp.asarray(rng.integers(0, 64, (2, 16)), jnp.int32), -1)
    batch = TrainBatch(one.source, one.alignment, suffix, native, weights, jnp.ones((2, 2, 2)), context)
    return batch, cache()


def _random(geometry: CacheGeometry, rng: np.random.Generator):
    draw = [rng.standard_normal((2, 2, 16, 8), np.float32) for _ in range(2 * geometry.num_layers)]
    return from_arrays(draw[:2], draw[2:], jnp.where(jnp.arange(16) < 14, jnp.arange(16), -1), geometry)


@jax.jit
def value_and_slope(target: Model, moved: KVCache, batch: TrainBatch) -> tuple[jax.Array, jax.Array]:
    """The loss of every term, and its gradient with respect to the cache's keys."""

    def value(k: jax.Array) -> jax.Array:
        cache = dataclasses.replace(moved, groups=(dataclasses.replace(moved.groups[0], k=k),))
        return total_loss(target, cache, batch, norms_of(batch, TERMS), TERMS, cache)[0]

    return jax.value_and_grad(value)(moved.groups[0].k)


def test_nan_in_unscored_places_never_leaks(target: Model) -> None:
    batch, moved = _batch(target)
    suffix = batch.suffix
    hole = suffix.targets < 0
    bad = dataclasses.replace(
        suffix,
        native=jnp.where(hole, jnp.nan, suffix.native),
        none=jnp.where(hole, jnp.nan, suffix.none),
        hidden=jnp.where(hole[..., None], jnp.nan, suffix.hidden),
    )
    unused = (batch.alignment.pos < 0)[None, :, None, :, None]
    poisoned = dataclasses.replace(batch, suffix=bad, sensitivity=jnp.where(unused, jnp.nan, batch.sensitivity))

    clean, dirty = (value_and_slope(target, moved, b) for b in (batch, poisoned))
    np.testing.assert_array_equal(clean[0], dirty[0])
    np.testing.assert_array_equal(clean[1], dirty[1])
    assert np.isfinite(clean[1]).all() and (np.asarray(clean[1]) != 0).any()


def test_rows_that_only_fill_a_batch_count_for_nothing(target: Model) -> None:
    batch, moved = _batch(target)
    emptied = dataclasses.replace(
        batch, suffix=dataclasses.replace(batch.suffix, targets=batch.suffix.targets.at[1].set(-1))
    )
    norms = norms_of(emptied, TERMS)
    assert (float(norms.tokens), float(norms.context)) == (3.0, 14.0)
    other = jax.tree.map(lambda x: x.at[:, 1].multiply(2.0) if x.ndim > 3 and x.dtype == jnp.float32 else x, moved)
    found = [value_and_slope(target, cache, emptied) for cache in (moved, other)]
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert not np.asarray(found[1][1])[:, 1].any() and np.asarray(found[1][1])[:, 0].any()


def test_cache_error_is_relative_and_weighted(target: Model) -> None:
    batch, moved = _batch(target)
    even = dataclasses.replace(batch, sensitivity=jnp.ones_like(batch.sensitivity))
    plain = cache_error(moved, batch, weighted=False)
    np.testing.assert_allclose(cache_error(moved, even, weighted=True), plain, rtol=1e-6)
    halved = dataclasses.replace(batch, variance=2 * batch.variance)
    np.testing.assert_allclose(cache_error(moved, halved, weighted=False), plain / 2, rtol=1e-6)
    assert float(cache_error(batch.native, batch, weighted=False)) == 0.0


def test_the_correction_compares_the_targets_own_trajectory(target: Model) -> None:
    """Zero for the target's own cache; else what the first injected layer changes in those above it, and no more."""
    batch, moved = _batch(target)
    native = prefill(target, batch.tokens, capacity=16)
    batch = dataclasses.replace(batch, native=native)
    assert float(correction_error(target, native, batch, ReplayPlan(0))) < 1e-9
    plan = ReplayPlan(0, 1)

    def error(values: jax.Array) -> jax.Array:
        cache = dataclasses.replace(moved, groups=(dataclasses.replace(moved.groups[0], v=values),))
        return correction_error(target, cache, batch, plan)

    found, slope = jax.value_and_grad(error)(moved.groups[0].v)
    above = cache_error(replay(target, batch.tokens, moved, plan), batch, False, first=1)
    np.testing.assert_allclose(found, above / 2, rtol=1e-5)  # the first layer's own keys and values are native
    assert float(found) > 0.01 and np.asarray(slope[0]).any() and not np.asarray(slope[1]).any()
    with pytest.raises(KvxError, match="tokens"):
        correction_error(target, moved, dataclasses.replace(batch, tokens=None), plan)


def test_no_logits_of_the_context_are_computed() -> None:
    """No product of the whole step has the vocabulary as an axis, but for those of the scored tokens."""
    target = random_model(dataclasses.replace(random_model().config, vocab_size=211))
    start, batch = _planted_step(target)
    part = Partition.of(start.params, start.method.trainable(start.params))
    trained, rest = part.split(start.params)
    static = Static(start.method, part, TrainingLoss(), "float32")
    norms = norms_of(batch, TrainingLoss())
    made = jax.make_jaxpr(
        lambda t: gradient(t, rest, target, batch, start.prefix, norms, jax.random.key(0), trainer=static)
    )(trained)
    shapes = [
        v.aval.shape for eqn in _equations(made.jaxpr) if eqn.primitive.name == "dot_general" for v in eqn.outvars
    ]
    wide = [shape for shape in shapes if 211 in shape]
    scored = batch.suffix.targets.size
    assert wide and all(np.prod(shape) <= 211 * scored for shape in wide), wide
    assert len(shapes) > len(wide)


def _planted_step(target: Model):
    import kvx

    geometry = target.config.geometry
    pairs = toy_pairs(target=geometry, batches=2, batch_size=2)
    mapper, _ = kvx.fit(kvx.mappers.full_head(layers=1, ridge=0.1), pairs, held_out=0, progress=False)
    one = next(iter(pairs))
    start = untrained(residual(width=4), mapper, jax.random.key(0))
    assert start.source == SOURCE
    tokens = jnp.array([[3, 4, 5], [6, 7, -1]])
    suffix = Suffix(tokens, jnp.array([[0, 1], [0, 0]]), jnp.array([[4, 5], [7, -1]]))
    return start, TrainBatch(one.source, one.alignment, suffix)


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)
