"""The trajectory term: a plain computation's value, zero for the target's own cache, shares that add up, data."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvx
from kvx.cache.cache import KVCache
from kvx.cache.join import select_batch
from kvx.cache.ops import shift_positions
from kvx.errors import KvxError
from kvx.fitting.training import head
from kvx.fitting.training.batch import TrainBatch
from kvx.fitting.training.data import TrainingData
from kvx.fitting.training.examples import Example
from kvx.fitting.training.loss import TrainingLoss, norms_of, total_loss, trajectory_error
from kvx.fitting.training.trail import trail
from kvx.mappers import CacheMap, full_head
from kvx.mappers.base import after_prefix
from kvx.models.decoder import forward
from kvx.models.model import Model
from kvx.models.random_model import byte_model
from kvx.translators import residual

pytestmark = pytest.mark.usefixtures("quick_compilation")
ALONE = TrainingLoss(suffix=0.0, trajectory=1.0)
COMPARED = TrainingLoss(suffix=0.0, cache=1.0, trajectory=1.0)
EXAMPLES = [  # one shape: padded to 32, 16 and 16
    Example("Ann lives in Rome, Italy.", " She likes it."),
    Example("Bob lives in Oslo by the sea.", " It is cold"),
    Example("Eva was born in Paris.", " In May.", ((3, 6),)),
    Example("Tom has a boat and a dog.", " He sails"),
]


@pytest.fixture(scope="module")
def models() -> tuple[Model, Model]:
    return byte_model(1), byte_model(3, seed=1)


@pytest.fixture(scope="module")
def start(models) -> CacheMap:
    pairs = kvx.pairs(*models, "Ann lives in Rome. " * 20, max_length=64)
    return kvx.fit(full_head(layers=1, ridge=0.1), pairs, held_out=0, progress=False)[0]


@pytest.fixture(scope="module")
def data(models, start) -> TrainingData:
    return read(models, start, COMPARED)


def read(models: tuple[Model, Model], start: CacheMap, loss: TrainingLoss | None, **how) -> TrainingData:
    return kvx.training_data(*models, EXAMPLES, start, loss=loss, progress=False, **how)


def own_cache(data: TrainingData, batch: TrainBatch) -> KVCache:
    """The target's own cache of prefix and context, as a perfect translation would make it."""
    return after_prefix(data.prefix, shift_positions(batch.native, -data.prefix.groups[0].slots))


def shaken(cache: KVCache, seed: int = 0) -> KVCache:
    """The cache with noise in its keys and values."""
    rng = np.random.default_rng(seed)
    noisy = lambda x: x + jnp.asarray(rng.standard_normal(x.shape), x.dtype) / 2  # noqa: E731
    return dataclasses.replace(
        cache, groups=tuple(dataclasses.replace(g, k=noisy(g.k), v=noisy(g.v)) for g in cache.groups)
    )


def made_of(target: Model, batch: TrainBatch, cache: KVCache, row: int) -> list[np.ndarray]:
    """Keys and values ``[K,n,D]`` of one row's suffix, layer by layer, read by itself and without padding."""
    tokens = np.asarray(batch.suffix.tokens[row])
    tokens = tokens[tokens >= 0][None]
    after = forward(target, tokens, select_batch(cache, [row])).cache
    first = int(cache.next_position()[row])
    found = []
    for layer in range(target.config.num_layers):
        view = after.layer(layer)
        own = np.asarray(view.pos[0, 0]) >= first
        found += [np.asarray(view.k[0])[:, own], np.asarray(view.v[0])[:, own]]
    assert found[0].shape[1] == tokens.shape[1]
    return found


def test_the_value_is_that_of_a_plain_computation(models, data) -> None:
    target, batch = models[1], data.batch(range(4))
    native, moved = (change(own_cache(data, batch)) for change in (lambda cache: cache, shaken))
    own, ours = ([made_of(target, batch, cache, row) for row in range(4)] for cache in (native, moved))
    side = [np.concatenate([rows[i] for rows in own], axis=1) for i in range(6)]
    spread = np.array([x.var(axis=1).mean(axis=-1) for x in side]).reshape(3, 2, -1)
    np.testing.assert_allclose(data.trail_variance, spread, rtol=1e-3)

    errors = []
    for i in range(2, 6):  # above the first layer
        other = np.concatenate([rows[i] for rows in ours], axis=1)
        errors.append((np.square(other - side[i]).mean(axis=-1) / spread[i // 2, i % 2][:, None]).mean())
    norms = norms_of(batch, ALONE)
    assert float(norms.suffix) == side[0].shape[1] == sum(len(e.suffix) for e in EXAMPLES)
    total, terms = total_loss(target, moved, batch, norms, dataclasses.replace(ALONE, trajectory=3.0))
    np.testing.assert_allclose(terms["trajectory"], np.mean(errors), rtol=1e-3)
    assert list(terms) == ["trajectory"] and float(total) == pytest.approx(3 * float(terms["trajectory"]))
    assert float(total) > 0.01
    zero = total_loss(target, native, batch, norms, ALONE)[0]
    assert float(zero) < 1e-9


def test_a_trail_lies_in_the_order_of_its_chunk(models, data) -> None:
    """Whatever stands between its tokens, whatever the cache before them left out."""
    target, tokens = models[1], jnp.array([[7, -1, 8, -1], [-1, 9, 10, 11]])
    moved = own_cache(data, data.batch([0, 1]))
    made = trail(tokens, moved, forward(target, tokens, moved).cache)
    for row, real in enumerate(([7, 8], [9, 10, 11])):
        alone = jnp.array([real])
        before = select_batch(moved, [row])
        lone = trail(alone, before, forward(target, alone, before).cache)
        at = np.flatnonzero(np.asarray(tokens[row]) >= 0)
        np.testing.assert_array_equal(made.groups[0].pos[0, row, 0, at], lone.groups[0].pos[0, 0, 0])
        np.testing.assert_allclose(made.groups[0].k[:, row][:, :, at], lone.groups[0].k[:, 0], rtol=1e-4, atol=1e-5)
    hole = np.asarray(tokens) < 0
    assert not np.asarray(made.groups[0].v).swapaxes(2, 3)[:, hole].any()
    assert (np.asarray(made.groups[0].pos[0, :, 0])[hole] == -1).all()


def test_gradients_are_finite_and_nan_in_padding_never_leaks(models, data) -> None:
    target, batch = models[1], data.batch([0, 1, 2], 4)  # the last row only fills the batch
    moved = shaken(own_cache(data, batch))
    group = batch.suffix.trail.groups[0]
    hole = (group.pos < 0)[..., None] | (jnp.arange(4) == 3)[None, :, None, None, None]
    bad = dataclasses.replace(group, k=jnp.where(hole, jnp.nan, group.k), v=jnp.where(hole, jnp.nan, group.v))
    poisoned = dataclasses.replace(batch.suffix.trail, groups=(bad,))
    poisoned = dataclasses.replace(batch, suffix=dataclasses.replace(batch.suffix, trail=poisoned))

    @jax.jit
    def slope(batch: TrainBatch, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        def value(k: jax.Array) -> jax.Array:
            cache = dataclasses.replace(moved, groups=(dataclasses.replace(moved.groups[0], k=k),))
            return total_loss(target, cache, batch, norms_of(batch, ALONE), ALONE)[0]

        return jax.value_and_grad(value)(keys)

    clean, dirty = (slope(b, moved.groups[0].k) for b in (batch, poisoned))
    np.testing.assert_array_equal(clean[0], dirty[0])
    np.testing.assert_array_equal(clean[1], dirty[1])
    found = np.asarray(clean[1])
    assert np.isfinite(found).all() and found[:2, :3].any(axis=(1, 2, 3, 4)).all() and not found[:, 3].any()
    assert not found[2].any()  # what the last layer reads makes no key or value any more


def test_no_logits_are_computed_for_it_alone(models, start, monkeypatch) -> None:
    monkeypatch.setattr(head, "lm_head", None)
    data = read(models, start, ALONE)
    held = {name.split(".")[0] for table in data.suffixes.values() for name in table.columns}
    assert held == {"tokens", "where", "targets", "trail"} and not data.holds("native") and data.variance is None
    batch = data.batch([0, 1])
    moved = after_prefix(data.prefix, kvx.translate(start, batch.source, batch.alignment))
    norms = norms_of(batch, ALONE)
    assert float(total_loss(models[1], moved, batch, norms, ALONE)[0]) > 0
    with pytest.raises(TypeError):
        total_loss(models[1], moved, batch, norms, TrainingLoss())


def test_2_times_2_is_1_times_4(models, start, data) -> None:
    loss = TrainingLoss(suffix=0.1, trajectory=1.0)
    how = {"loss": loss, "steps": 1, "optimizer": optax.sgd(0.1), "progress": False}
    method = residual(width=4)
    one, two = (kvx.train(method, start, data, batch_size=b, accumulate=n, **how)[0] for b, n in ((4, 1), (2, 2)))
    still = kvx.train(method, start, data, batch_size=4, **{**how, "optimizer": optax.sgd(0.0)})[0]
    moved = 0
    for x, y, was in zip(*(jax.tree.leaves(m.params) for m in (one, two, still)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
        moved += int(not np.array_equal(x, was))
    assert moved >= 5


def test_shares_of_uneven_batches_add_up(models, data) -> None:
    batches = [data.batch(rows, 2) for rows in ([0, 1], [2, 3])]
    whole = data.batch(range(4))
    noisy = lambda batch: jax.tree.map(_doubled, own_cache(data, batch))  # noqa: E731
    norms = norms_of(whole, ALONE)
    parts = [norms_of(batch, ALONE) for batch in batches]
    assert float(norms.suffix) == sum(float(part.suffix) for part in parts)
    shares = [total_loss(models[1], noisy(batch), batch, norms, ALONE)[0] for batch in batches]
    total = total_loss(models[1], noisy(whole), whole, norms, ALONE)[0]
    np.testing.assert_allclose(sum(map(float, shares)), total, rtol=1e-4)


def _doubled(x: jax.Array) -> jax.Array:
    return 2 * x if jnp.issubdtype(x.dtype, jnp.floating) else x


def test_what_lacks_a_trail_or_a_layer_is_refused(models, start) -> None:
    plain = read(models, start, None)
    with pytest.raises(KvxError, match="made without what trajectory needs; pass the same loss"):
        kvx.train(residual(width=4), start, plain, loss=ALONE, progress=False)
    batch = plain.batch([0])
    with pytest.raises(KvxError, match="trail"):
        trajectory_error(batch.source, batch)
    with pytest.raises(KvxError, match="the target has none"):
        kvx.training_data(models[1], models[0], EXAMPLES, start, loss=ALONE, progress=False)
    with pytest.raises(KvxError, match="weights"):
        read(models, start, TrainingLoss(trajectory=-1.0))


def test_trails_are_kept_on_disk_in_the_datas_type(models, start, data, tmp_path, monkeypatch) -> None:
    how = {"folder": tmp_path / "d", "dtype": "bfloat16"}
    first = read(models, start, ALONE, **how)
    monkeypatch.setattr("kvx.fitting.training.dump.prefill", None)
    second = read(models, start, ALONE, **how)
    np.testing.assert_array_equal(first.trail_variance, second.trail_variance)
    for x, y in zip(*(jax.tree.leaves(d.batch([0, 1], 4)) for d in (first, second)), strict=True):
        np.testing.assert_array_equal(x, y)
    kept, exact = (d.batch([0, 1]).suffix.trail.groups[0] for d in (second, data))
    assert kept.k.dtype == jnp.bfloat16 and kept.k.shape == (3, 2, 2, 16, 8)
    np.testing.assert_allclose(kept.k.astype(jnp.float32), exact.k, rtol=1e-2, atol=1e-2)
    np.testing.assert_array_equal(kept.pos, exact.pos)
    with pytest.raises(KvxError, match="other kept"):
        read(models, start, TrainingLoss(), **how)
