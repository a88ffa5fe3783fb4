"""The mixture: routers that learn, experts that separate, windows that keep the rest, and settings that are refused."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvx
from kvx.errors import KvxError
from kvx.fitting.pairs import PairBatch
from kvx.fitting.synthetic import toy_pairs
from kvx.fitting.training.window_search import grow_window
from kvx.mappers import CacheMap, full_head
from kvx.translators import mixture, untrained, utilisation
from kvx.translators.base import with_params
from kvx.translators.channels import channels, injection, window_layers
from kvx.translators.router import Router, imbalance, route
from tests.cases import TRANSLATORS, poison

pytestmark = pytest.mark.usefixtures("quick_compilation")
KINDS = np.random.default_rng(0).standard_normal((2, 6, 4)).astype(np.float32)


def draw(seed: int) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """Tokens ``[B,T,P]`` of two kinds, told by their first feature, what a linear map of each makes, and the kinds."""
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, 2, (4, 32))
    x = rng.standard_normal((4, 32, 6)).astype(np.float32)
    x[..., 0] = 2 * kinds - 1
    return jnp.asarray(x), jnp.asarray(np.einsum("btp,btpd->btd", x, KINDS[kinds])), kinds


def test_training_separates_two_kinds_of_tokens() -> None:
    """One linear expert cannot serve both kinds; with top-1 the router learns to send each to an expert of its own."""
    whole = Router.create(jax.random.key(0), 1, 6, 8, 2)
    params = {
        "router": jax.tree.map(lambda a: a[0], whole),
        "maps": 0.1 * jax.random.normal(jax.random.key(1), (2, 6, 4)),
    }
    moves, real = optax.adam(2e-2), jnp.ones((4, 32), bool)

    def output(params, x: jax.Array, noise: jax.Array | None = None):
        logits = params["router"].logits(x)
        weights = route(logits, 1, noise)
        return jnp.einsum("btp,npd,btn->btd", x, params["maps"], weights), logits, weights

    def step(carry, given):
        params, state = carry
        x, y, noise = given

        def loss(params):
            made, logits, weights = output(params, x, noise)
            return jnp.square(made - y).mean() + 0.02 * imbalance(logits, weights, real)

        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            change, state = moves.update(jax.grad(loss)(params), state)
            return (optax.apply_updates(params, change), state), None

    with jax.numpy_dtype_promotion("standard"):
        state = moves.init(params)
    x, y, _ = (np.stack(column) for column in zip(*(draw(n) for n in range(300)), strict=True))
    noise = 0.5 * jax.random.normal(jax.random.key(2), (300, 4, 32, 2))
    (params, _), _ = jax.jit(lambda carry, given: jax.lax.scan(step, carry, given))((params, state), (x, y, noise))
    x, y, kinds = draw(999)
    made, _, weights = output(params, x)
    assert float(jnp.square(made - y).mean()) < 0.1 * float(jnp.square(y).mean())
    first = [np.asarray(weights)[kinds == kind, 0].mean() for kind in (0, 1)]
    assert abs(first[0] - first[1]) > 0.9


@pytest.mark.parametrize("top", [1, 2, None])
def test_the_router_gets_a_gradient(top: int | None) -> None:
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 3), np.float32))
    values = jnp.asarray(np.random.default_rng(1).standard_normal((2, 5, 3), np.float32))
    slope = jax.grad(lambda x: (route(x, top) * values).sum())(logits)
    assert (np.abs(slope).max(axis=-1) > 1e-4).all()
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
    told = stirred.method.figures(stirred.method.calibrate(stirred.params, [(batch.source, batch.alignment)]))[
        "experts"
    ]
    np.testing.assert_allclose(told["values of layers 0, 1"], clean["values of layers 0, 1"], rtol=1e-5)
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
