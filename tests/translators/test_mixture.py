"""The mixture: routers that learn, experts that separate, windows that keep the rest, and settings that are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvx
from kvx.alignment import Alignment
from kvx.cache.build import from_arrays
from kvx.cache.geometry import CacheGeometry, LayerGeometry
from kvx.errors import KvxError
from kvx.fitting.pairs import PairBatch, Pairs
from kvx.fitting.synthetic import toy_pairs
from kvx.fitting.training.partition import Partition
from kvx.fitting.training.window_search import grow_window
from kvx.mappers import CacheMap, full_head
from kvx.translators import mixture, untrained, utilisation
from kvx.translators.base import with_params
from kvx.translators.channels import channels, injection, window_layers
from kvx.translators.router import imbalance, route
from tests.cases import TRANSLATORS, poison

pytestmark = pytest.mark.usefixtures("quick_compilation")
ONE = CacheGeometry((LayerGeometry(1, 4, 4),))
LENGTH = 16


def kinds_of(seed: int) -> np.ndarray:
    """Which of two kinds each token is, ``[4,T]``."""
    return np.random.default_rng(seed).integers(0, 2, (4, LENGTH))


def two_kinds(seed: int) -> PairBatch:
    """Contexts whose tokens are of two kinds, each translated by a linear map of its own, opposite to the other's."""
    rng, truth = np.random.default_rng(seed), np.random.default_rng(99).standard_normal((4, 4))
    kinds = kinds_of(seed)
    x = rng.standard_normal((2, 4, 1, LENGTH, 4))
    x[0, :, 0, :, 0] = 3.0 * (2 * kinds - 1)
    y = np.where(kinds[:, None, :, None] == 1, 1.0, -1.0) * (x[1] @ truth)
    pos = np.arange(LENGTH)
    source, target = (from_arrays([np.float32(k)], [np.float32(v)], pos, ONE) for k, v in (x, (x[0], y)))
    rows = np.tile(pos, (4, 1)).astype(np.int32)
    weight = jnp.ones((4, LENGTH), jnp.float32)
    return PairBatch(
        source, target, Alignment(jnp.asarray(rows[..., None]), weight[..., None], jnp.asarray(rows)), weight
    )


@pytest.fixture(scope="module")
def start() -> CacheMap:
    def stream(report) -> Iterator[PairBatch]:
        for seed in range(8):
            yield two_kinds(seed)
            report(100.0)

    pairs = Pairs(stream, ONE, ONE, prefix=None, provenance={"source": None, "target": None}, facts={})
    return kvx.fit(full_head(layers=1, ridge=1e-3), pairs, held_out=0, progress=False)[0]


def error(mapper: CacheMap, batch: PairBatch) -> float:
    moved = kvx.translate(mapper, batch.source, batch.alignment)
    return float(jnp.square(moved.values(0) - batch.target.values(0)).mean())


def test_training_separates_two_kinds_of_tokens(start: CacheMap) -> None:
    """No linear map fits both kinds; a router that learns sends them to different experts."""
    method = mixture(experts=2, width=6, router_width=8, balance=0.05)
    batches = [two_kinds(seed) for seed in range(4)]
    first = untrained(method, start, jax.random.key(1), [(b.source, b.alignment) for b in batches])
    part = Partition.of(first.params, method.trainable(first.params))
    trained, rest = part.split(first.params)
    moves = optax.adam(1e-2)

    @jax.jit
    def step(trained, state, batch: PairBatch, key):
        def loss(trained):
            moved, aux = method.apply(part.join(trained, rest), batch.source, batch.alignment, rng=key)
            return jnp.square(moved.values(0) - batch.target.values(0)).mean() + aux["balance"]

        value, slopes = jax.value_and_grad(loss)(trained)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            change, state = moves.update(slopes, state)
            return optax.apply_updates(trained, change), state, value

    with jax.numpy_dtype_promotion("standard"):
        state = moves.init(trained)
    for n in range(240):
        trained, state, _ = step(trained, state, batches[n % 4], jax.random.key(n))
    made = with_params(first, method, part.join(trained, rest))
    held = two_kinds(50)
    assert error(made, held) < 0.35 * error(start, held)
    pos = np.asarray(held.alignment.pos)
    used = []
    for kind in (0, 1):
        own = dataclasses.replace(held.alignment, pos=jnp.asarray(np.where(kinds_of(50) == kind, pos, -1)))
        used.append(np.asarray(utilisation(made, held.source, own)["values of layers 0"])[0])
    assert np.abs(used[0] - used[1]).max() > 0.8, used
    recorded = method.calibrate(made.params, [(b.source, b.alignment) for b in batches])
    shares = method.figures(recorded)["experts"]["values of layers 0"][0]
    assert min(shares) > 0.2 and sum(shares) == pytest.approx(1.0)


@pytest.mark.parametrize("top", [1, 2, None])
def test_the_router_gets_a_gradient(top: int | None) -> None:
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 3), np.float32))
    values = jnp.asarray(np.random.default_rng(1).standard_normal((2, 5, 3), np.float32))
    weights, slope = jax.value_and_grad(lambda x: (route(x, top) * values).sum())(logits)[0], None
    slope = jax.grad(lambda x: (route(x, top) * values).sum())(logits)
    assert np.isfinite(weights) and (np.abs(slope).max(axis=-1) > 1e-4).all()
    made = np.asarray(route(logits, top))
    np.testing.assert_allclose(made.sum(axis=-1), 1.0, rtol=1e-6)
    assert ((made > 0).sum(axis=-1) == (top or 3)).all()
    np.testing.assert_array_equal(made.argmax(axis=-1), np.asarray(logits).argmax(axis=-1))


def test_noise_changes_the_choice_and_only_that() -> None:
    logits = jnp.array([[[1.0, 0.0, -3.0]]])
    noise = jnp.array([[[-2.0, 0.0, 0.0]]])
    assert route(logits, 1, noise).tolist() == [[[0.0, 1.0, 0.0]]]
    kept = route(logits, 2, jnp.array([[[0.0, -9.0, 0.0]]]))[0, 0]
    np.testing.assert_allclose(
        kept, jax.nn.softmax(logits[0, 0, jnp.array([0, 2])])[jnp.array([0, 0, 1])].at[1].set(0.0)
    )
    np.testing.assert_array_equal(route(logits, None, noise), jax.nn.softmax(logits))


def test_the_penalty_is_zero_when_experts_share_and_grows_when_they_do_not() -> None:
    real = jnp.array([[True, True, False]])
    even = jnp.array([[[9.0, 0.0], [0.0, 9.0], [99.0, jnp.nan]]])
    uneven = jnp.array([[[9.0, 0.0], [9.0, 0.0], [0.0, 0.0]]])
    assert float(imbalance(even, route(even, 1), real)) == pytest.approx(0.0, abs=1e-6)
    assert float(imbalance(uneven, route(uneven, 1), real)) == pytest.approx(1.0, abs=1e-3)
    slope = jax.grad(lambda x: imbalance(x, route(x, 1), real))(uneven / 9)
    assert (slope[0, :2, 0] > 0).all() and (slope[0, :2, 1] < 0).all()


@pytest.fixture(scope="module")
def toy() -> tuple[CacheMap, PairBatch]:
    pairs = toy_pairs()
    return kvx.fit(full_head(layers=2), pairs, progress=False)[0], next(iter(pairs))


def test_penalties_and_noise_come_only_with_a_choice(toy: tuple[CacheMap, PairBatch]) -> None:
    mapper, batch = toy
    for method, named in ((mixture(width=4), {"balance"}), (mixture(width=4, balance=0.0), set())):
        params = method.init(jax.random.key(0), mapper)
        moved, aux = method.apply(params, batch.source, batch.alignment)
        assert set(aux) == named
    single = mixture(experts=1, width=4)
    params = single.init(jax.random.key(0), mapper)
    assert single.apply(params, batch.source, batch.alignment)[1] == {}
    marks = single.trainable(params)
    assert not any(jax.tree.leaves([part.router for part in marks.parts]))
    assert moved.num_layers == 2


def test_utilisation_counts_real_tokens_only() -> None:
    stirred = TRANSLATORS["mixture"].fitted(0)
    batch = next(iter(toy_pairs(batches=1)))
    clean, dirty = (utilisation(stirred, cache, batch.alignment) for cache in (batch.source, poison(batch.source)))
    assert list(clean) == ["keys of layers 0, 1", "values of layers 0, 1"]
    for name, used in clean.items():
        np.testing.assert_array_equal(used, dirty[name])
        np.testing.assert_allclose(used.sum(axis=-1), 1.0, rtol=1e-5)
    with pytest.raises(KvxError, match="mixture"):
        utilisation(kvx.identity(), batch.source, batch.alignment)


def test_layers_outside_the_window_keep_the_closed_form(toy: tuple[CacheMap, PairBatch]) -> None:
    mapper, batch = toy
    method = mixture(width=4, window=(1, 1), frozen=True)
    first = untrained(method, mapper, jax.random.key(0))
    marks = method.trainable(first.params)
    stirred = jax.tree.map(lambda x, mark: x + 1.0 if mark else x, first.params, marks)
    ours, theirs = (
        kvx.translate(m, batch.source, batch.alignment) for m in (with_params(first, method, stirred), mapper)
    )
    np.testing.assert_array_equal(ours.keys(0), theirs.keys(0))
    assert (np.asarray(ours.keys(1)) != np.asarray(theirs.keys(1))).any()
    assert [part.coefficients for part in marks.parts] == [False] * 4


def test_published_attention_reads_the_whole_context(toy: tuple[CacheMap, PairBatch]) -> None:
    mapper, batch = toy
    last = jax.tree.map(lambda x: x.at[..., 13, :].set(9.0) if x.ndim > 4 else x, batch.source)
    for causal in (True, False):
        method = mixture(expert="attention", width=4, heads=2, depth=1, experts=1, causal=causal)
        first = untrained(method, mapper, jax.random.key(0), [(batch.source, batch.alignment)])
        parts = tuple(dataclasses.replace(p, gate=jnp.ones_like(p.gate)) for p in first.params.parts)
        open_ = with_params(first, method, dataclasses.replace(first.params, parts=parts))
        ours, theirs = (np.asarray(kvx.translate(open_, s, batch.alignment).keys(1)) for s in (batch.source, last))
        assert (ours[:, :, :14] == theirs[:, :, :14]).all() == causal
        assert (ours[:, :, 14] != theirs[:, :, 14]).any()


def test_channels_pair_layers_by_depth() -> None:
    for source, target in ((30, 18), (18, 30), (4, 4), (1, 5)):
        pairs = np.array(channels(source, target))
        assert len(pairs) == min(source, target) and (np.diff(pairs, axis=0) > 0).all()
        assert (pairs >= 0).all() and (pairs < [source, target]).all()
        np.testing.assert_allclose(pairs[:, 0] / source, pairs[:, 1] / target, atol=1 / min(source, target))
    assert window_layers((0, 2), 4, 2) == ((1, 3), (0, 1)) and injection((1, 1), 4, 2) == (1, 2)


def test_the_search_grows_the_best_window() -> None:
    asked = []

    def score(window: tuple[int, int]) -> float:
        asked.append(window)
        return sum(abs(channel - 4) for channel in range(window[0], sum(window))) / window[1]

    found = grow_window(score, channels=6, size=3)
    assert found.window == (3, 3) and found.loss == score((3, 3))
    assert asked[:6] == [(n, 1) for n in range(6)] and len(set(asked)) == 6 + 2 + 2
    assert grow_window(lambda window: -window[0], channels=3, size=3, first=2).window == (0, 3)
    with pytest.raises(KvxError, match="windows"):
        grow_window(score, channels=3, size=4)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"experts": 0}, "experts"),
        ({"top": 3}, "translate"),
        ({"expert": "mlps"}, "attention"),
        ({"width": 0}, "width"),
        ({"expert": "attention", "width": 6, "heads": 4}, "multiple"),
        ({"depth": 0}, "depth"),
        ({"balance": -1.0}, "balance"),
        ({"gate_rate": 0.0}, "gate_rate"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict, says: str) -> None:
    with pytest.raises(KvxError, match=says):
        mixture(**settings)


def test_windows_beyond_the_channels_are_refused(toy: tuple[CacheMap, PairBatch]) -> None:
    with pytest.raises(KvxError, match="2 channels"):
        untrained(mixture(window=(1, 2)), toy[0], jax.random.key(0))
