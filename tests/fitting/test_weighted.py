"""Weighted fits: against direct regressions in float64, shrinkage, choice by attention, and the pairs behind them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvx
from kvx.cache.rope import rotate
from kvx.errors import KvxError
from kvx.fitting import reading as reading_module
from kvx.fitting import weighted
from kvx.fitting.mixture import Centred, mixed, shrinkage
from kvx.fitting.pairs import rows_of
from kvx.fitting.reading import HeldOutReading, Predicted
from kvx.fitting.stream import is_held_out
from kvx.fitting.synthetic import SOURCE, TARGET, toy_pairs
from kvx.fitting.weighted_sums import WeightedPass, bytes_of
from kvx.mappers import full_head
from kvx.mappers.base import Entry, Support
from kvx.mappers.linear import aligned_rows

TWO_HEADS = dataclasses.replace(TARGET, layers=(dataclasses.replace(TARGET.layers[0], kv_heads=2),) * 2)
NOISY = {"reads": 3, "noise": 1.0, "batches": 3}


def table(pairs, mode: str = "probes"):
    """All rows: features, outputs, sensitivities ``[N,L,K,2]``, and whether each is held out, float64."""
    xs, ys, rs, held = [], [], [], []
    for batch in pairs.weighed(mode):
        x, y, weight = (np.asarray(a, np.float64) for a in rows_of(batch))
        keep = weight > 0
        r = np.asarray(batch.sensitivity, np.float64).transpose(1, 3, 0, 2, 4)
        aside = np.repeat([is_held_out(n, 0.1) for n in batch.sequences], batch.weight.shape[1])
        xs, ys, rs = [*xs, x[keep]], [*ys, y[keep]], [*rs, r.reshape(len(keep), *r.shape[2:])[keep]]
        held.append(aside[keep])
    return tuple(np.concatenate(part) for part in (xs, ys, rs, held))


def ridge_fit(x: np.ndarray, y: np.ndarray, w: np.ndarray, ridge: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    w = w / w.sum()
    mu, nu = w @ x, w @ y
    xc, yc = x - mu, y - nu
    gram = (w[:, None] * xc).T @ xc
    return np.linalg.solve(gram + ridge * np.diag(np.diag(gram)), (w[:, None] * xc).T @ yc), mu, nu


def alpha_by_hand(r: np.ndarray, width: int) -> float:
    n, tau = len(r), min(len(r), 2 * width)
    return min(1.0, np.sqrt((n / tau - 1) / (r.var() / r.mean() ** 2)))


@pytest.mark.parametrize("mode", ["probes", "all"])
def test_a_weighted_fit_matches_its_own_regression(mode: str) -> None:
    pairs = toy_pairs(SOURCE, TWO_HEADS, **{**NOISY, "batches": 2})
    mapper, report = kvx.fit(full_head(layers=2, ridge=1e-3, sensitivity=mode), pairs, rows=96, progress=False)
    x, y, r, _ = table(pairs, mode)
    # target layer 1, values: its columns, and the mean of its heads' sensitivities
    weights = r[:, 1, :, 1].mean(axis=1)
    x, y = x[:, 16:48], y[:, 24 + 12 :]
    alpha = alpha_by_hand(weights, 32)
    assert 0.1 < alpha < 0.9
    wanted, mu, nu = ridge_fit(x, y, 1 + alpha * (weights / weights.mean() - 1), 1e-3)
    block = mapper.params.values[0]
    np.testing.assert_allclose(block.coefficients[1, 0].reshape(32, 12), wanted, atol=2e-5)
    np.testing.assert_allclose(block.center[1, 0], mu, atol=1e-5)
    np.testing.assert_allclose(block.mean[1].ravel(), nu, atol=1e-4)
    entry = report.entries[3]
    assert (entry.target, entry.component) == (1, "values")
    assert entry.alpha == pytest.approx(alpha, rel=1e-4)
    w = 1 + alpha * (weights / weights.mean() - 1)
    assert entry.effective_rows == pytest.approx(w.sum() ** 2 / (w**2).sum(), rel=1e-4)
    assert entry.effective_rows == pytest.approx(64, rel=1e-3)  # 2 P
    error = ((y - nu - (x - mu) @ wanted) ** 2).sum() / ((y - y.mean(axis=0)) ** 2).sum()
    assert entry.r2_fit == pytest.approx(1 - error, abs=1e-4)
    assert report.seconds["weighted"] > 0
    cov = np.cov(((x - mu) @ wanted).T, bias=True)
    np.testing.assert_allclose(block.covariance[1, 1], cov[6:, 6:], atol=1e-3)


@dataclasses.dataclass(frozen=True)
class OneHead:
    """What a head-matched method does: entries of one target head that read parts of single source heads."""

    ridges: tuple[float, ...] = (1e-2,)
    sensitivity: str | None = "probes"
    select: str = "r2"

    def reach(self, source, target):
        return None

    def fit(self, moments, held_out=None):
        support = self.support(moments, held_out)
        return support.finish(moments.regress(held_out, support.entries, self.ridges))

    def support(self, moments, held_out=None) -> Support:
        entries = [Entry(0, 0, (1, 2), 6, ((2, 4, 8), (0, 8, 12))), Entry(1, 1, (0, 1), 6, ((2, 4, 8), (0, 8, 12)))]
        return Support(entries, lambda fitted: {"w": [f.coefficients for f in fitted], "x": [f.center for f in fitted]})


def test_entries_of_single_heads_use_their_own_sensitivities() -> None:
    pairs = toy_pairs(SOURCE, TWO_HEADS, **NOISY)
    mapper, _ = kvx.fit(OneHead(), pairs, rows=100, progress=False)
    x, y, r, _ = table(pairs)
    x = np.concatenate([x[:, 32 + 4 : 32 + 8], x[:, 8:12]], axis=1)
    for at, (weights, columns) in enumerate(((r[:, 0, 1, 0], slice(6, 12)), (r[:, 1, 0, 1], slice(36, 42)))):
        alpha = alpha_by_hand(weights, 8)
        w = 1 + alpha * (weights / weights.mean() - 1)
        wanted, mu, _ = ridge_fit(x, y[:, columns], w, 1e-2)
        np.testing.assert_allclose(mapper.params["w"][at], wanted, atol=2e-5)
        np.testing.assert_allclose(mapper.params["x"][at], mu, atol=1e-5)


def test_too_few_rows_fall_back_to_the_uniform_fit() -> None:
    pairs = toy_pairs(noise=0.5, batches=1)  # 56 rows, P = 32
    weighted, report = kvx.fit(full_head(layers=2, ridge=1e-2, sensitivity=True), pairs, progress=False)
    uniform, _ = kvx.fit(full_head(layers=2, ridge=1e-2), pairs, progress=False)
    assert [entry.alpha for entry in report.entries] == [0.0] * 4
    np.testing.assert_allclose(weighted.params.keys[0].coefficients, uniform.params.keys[0].coefficients, atol=1e-5)


def test_shrinkage() -> None:
    r = np.random.default_rng(0).lognormal(sigma=2, size=3000)
    variation = r.var() / r.mean() ** 2
    for width in (10, 200, 1000, 1499, 1500, 4000):
        alpha = shrinkage(3000, variation, width)
        w = 1 + alpha * (r / r.mean() - 1)
        rows = w.sum() ** 2 / (w**2).sum()
        assert rows >= min(3000, 2 * width) * (1 - 1e-9)
        assert rows == pytest.approx(2 * width, rel=1e-6) or alpha in (0.0, 1.0)
    assert shrinkage(3000, variation, 1500) == 0.0
    assert shrinkage(3000, 0.0, 10) == 1.0


def test_mixtures_are_those_of_all_rows() -> None:
    rng = np.random.default_rng(0)
    x, y, r = rng.normal(size=(50, 3)) + 4, rng.normal(size=(50, 2)), rng.uniform(size=50)

    def centred(w: np.ndarray) -> Centred:
        w = w / w.sum()
        mu, nu = w @ x, w @ y
        xc, yc = x - mu, y - nu
        return Centred((w[:, None] * xc).T @ xc, (w[:, None] * xc).T @ yc, mu, nu, w @ yc**2)

    got, wanted = mixed(centred(np.ones(50)), centred(r), 0.3), centred(0.7 + 0.3 * r / r.mean())
    for name in ("gram", "cross", "x_mean", "y_mean", "variance"):
        np.testing.assert_allclose(getattr(got, name), getattr(wanted, name), rtol=1e-10)


def read_natively_and_predicted(batch, rows, prefix, layer, sides):
    """Attention outputs of the probes, by hand: native, and with predicted keys and values of one kv head."""
    theirs, ours = [], []
    queries, positions = np.asarray(batch.probes.queries[layer], np.float64), np.asarray(batch.probes.positions)
    rope, head_prefix = TARGET.layers[layer].rope, prefix.layer(layer)
    for row in rows:
        native = batch.target.layer(layer)
        for found, (k, v) in ((theirs, (native.k[row, 0], native.v[row, 0])), (ours, sides(row))):
            k, v = (
                jnp.concatenate([p[0, 0], jnp.asarray(a, jnp.float32)])
                for p, a in zip((head_prefix.k, head_prefix.v), (k, v), strict=True)
            )
            pos = np.concatenate([np.asarray(head_prefix.pos[0, 0]), np.asarray(native.pos[row, 0])])
            k = np.asarray(rotate(k[None, None], jnp.asarray(pos)[None, None], rope)[0, 0], np.float64)
            for head in range(queries.shape[1]):
                for n, at in enumerate(positions[row]):
                    seen = (pos >= 0) & (pos <= at)
                    score = np.where(seen, k @ queries[row, head, n] / np.sqrt(6), -np.inf)
                    weights = np.exp(score - score.max())
                    found.append((weights / weights.sum()) @ np.asarray(v, np.float64))
    return np.array(theirs), np.array(ours)


@pytest.mark.parametrize("weigh", [False, "probes"])
def test_choice_by_attention_is_the_best_held_out_attention_output(weigh) -> None:
    pairs = toy_pairs(SOURCE, TARGET, **NOISY)
    ridges = (1e-3, 3e-2, 1.0, 10.0)
    method = full_head(layers=1, ridge=ridges, sensitivity=weigh, select="attention")
    mapper, report = kvx.fit(method, pairs, progress=False)
    x, y, r, held = table(pairs)
    batches = [(b, [n for n, s in enumerate(b.sequences) if is_held_out(s, 0.1)]) for b in pairs.weighed("probes")]

    def fitted(component: int, ridge: float, rows: np.ndarray):
        weights = r[rows, 0, 0, component]
        alpha = alpha_by_hand(weights, 16) if weigh else 0.0
        w, mu, nu = ridge_fit(
            x[rows, :16], y[rows, 6 * component : 6 * component + 6], 1 + alpha * (weights / weights.mean() - 1), ridge
        )
        return alpha, w, mu, nu

    def score(ridge_of_keys: float, ridge_of_values: float) -> float:
        maps = [fitted(c, ridge, ~held)[1:] for c, ridge in enumerate((ridge_of_keys, ridge_of_values))]
        outputs = []
        for batch, rows in batches:
            features = np.asarray(aligned_rows(batch.source, batch.alignment), np.float64)[..., :16]
            sides = lambda row: [nu + (features[row] - mu) @ w for w, mu, nu in maps]  # noqa: B023, E731
            if rows:
                outputs.append(read_natively_and_predicted(batch, rows, pairs.prefix, 0, sides))
        theirs, ours = (np.concatenate(part) for part in zip(*outputs, strict=True))
        return 1 - ((ours - theirs) ** 2).sum() / ((theirs - theirs.mean(axis=0)) ** 2).sum()

    scores = {(a, b): score(a, b) for a in ridges for b in ridges}
    best = max(scores, key=lambda pair: scores[pair])
    assert max(scores.values()) - min(scores.values()) > 0.05
    for component in (0, 1):
        entry = report.entries[component]
        assert entry.ridge == best[component]
        assert entry.attention_held_out[0] == pytest.approx(scores[best], abs=1e-4)
        alpha, wanted, _, _ = fitted(component, entry.ridge, np.ones(len(x), bool))
        assert entry.alpha == pytest.approx(alpha, rel=1e-4)
        block = (mapper.params.keys, mapper.params.values)[component][0]
        np.testing.assert_allclose(block.coefficients[0, 0].reshape(16, 6), wanted, atol=2e-5)


def test_noise_on_channels_that_no_query_reads_costs_no_attention() -> None:
    """Case 1 for the choice: keys spoilt where every query is zero, as channel pairs of RoPE, against elsewhere."""
    pairs = toy_pairs(SOURCE, TARGET, batches=2)
    batch = next(iter(pairs.weighed("probes")))
    probes = dataclasses.replace(batch.probes, queries=batch.probes.queries.at[..., jnp.array([2, 5])].set(0.0))
    reading = HeldOutReading(pairs.prefix)
    reading.add(dataclasses.replace(batch, probes=probes), np.array([True, False, True, False]))
    keys = np.asarray(batch.target.keys(0), np.float32)[[0, 2], 0]
    found = {}
    for name, channels in (("none", []), ("unread", [2, 5]), ("read", [0, 3])):
        spoilt = keys.copy()
        spoilt[..., channels] += 9.0 * np.random.default_rng(0).normal(size=spoilt[..., channels].shape)
        spoilt[:, 14:] = 1e6  # padding: never read
        found[name] = reading.explained(0, (0, 1), [Predicted(0, (0, 1), [spoilt])])[0]
    assert found["none"] == pytest.approx(1.0, abs=1e-6) and found["unread"] == pytest.approx(1.0, abs=1e-6)
    assert found["read"] < 0.5


def test_held_out_sequences_are_kept_up_to_a_limit(monkeypatch) -> None:
    pairs = toy_pairs(SOURCE, TARGET, batches=3)
    monkeypatch.setattr(reading_module, "SEQUENCES", 6)
    reading = HeldOutReading(pairs.prefix)
    for batch in pairs.weighed("probes"):
        reading.add(batch, np.ones(4, bool))
    assert [len(kept.features) for kept in reading.kept] == [4, 2]
    with pytest.raises(KvxError, match="hold no queries"):
        reading.add(next(iter(pairs)), np.ones(4, bool))


def test_choosing_by_attention_needs_held_out_rows_and_several_ridges() -> None:
    with pytest.raises(KvxError, match="held-out"):
        kvx.fit(full_head(layers=1, select="attention"), toy_pairs(), held_out=0.0, progress=False)
    for make in (full_head, kvx.mappers.head_matched):
        with pytest.raises(KvxError, match="chooses among ridges, but ridge is 0.1"):
            make(layers=1, ridge=0.1, select="attention")


@pytest.mark.parametrize("select", ["r2", "attention"])
def test_sums_beyond_the_limit_take_further_passes_and_change_nothing(monkeypatch, select) -> None:
    pairs = toy_pairs(SOURCE, TWO_HEADS, **NOISY)
    method = full_head(layers=2, ridge=(1e-3, 1e-1), sensitivity=True, select=select)
    wanted, whole = kvx.fit(method, pairs, progress=False)
    monkeypatch.setattr(weighted, "SUMS_BYTES", 1)
    passes: list[WeightedPass] = []
    monkeypatch.setattr(weighted, "WeightedPass", lambda *a, **k: passes.append(WeightedPass(*a, **k)) or passes[-1])
    got, report = kvx.fit(method, pairs, progress=False)
    assert [[entry.target for entry in made.entries] for made in passes] == [[0, 0], [1, 1]]
    for made in passes:
        assert made.bytes == len(made.sides) * sum(map(bytes_of, made.entries))
    jax.tree.map(np.testing.assert_array_equal, got.params, wanted.params)
    assert report.entries == whole.entries


def test_padding_is_never_read() -> None:
    clean = toy_pairs(noise=0.5)
    method = full_head(layers=1, ridge=1e-2, sensitivity="all")

    def poisoned(mode):
        def stream(report):
            for batch in clean.sensitive(mode)(report):
                hole = (batch.weight == 0)[None, :, None, :, None]
                yield dataclasses.replace(batch, sensitivity=jnp.where(hole, jnp.nan, batch.sensitivity))

        return stream

    wanted, _ = kvx.fit(method, clean, progress=False)
    got, _ = kvx.fit(method, dataclasses.replace(clean, sensitive=poisoned), progress=False)
    jax.tree.map(np.testing.assert_array_equal, got.params, wanted.params)


def test_sums_name_the_highest_precision() -> None:
    from kvx.fitting import weighted_sums as module

    sums = module._zeros(
        Entry(0, 0, (0, 1), 2, ((0, 0, 3),)), module.Frame(jnp.zeros(3), (jnp.eye(3),), jnp.zeros(1, jnp.int32))
    )
    outputs = module.Outputs(jnp.int32(0), jnp.array([2]), jnp.zeros(2), jnp.ones(2))
    text = module._add.lower(*sums, jnp.ones((8, 3)), jnp.ones((8, 3)), jnp.ones(8), outputs).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 4 and all("precision = [HIGHEST, HIGHEST]" in line for line in products)


def test_settings_are_checked() -> None:
    assert full_head(sensitivity=True).sensitivity == "probes"
    assert full_head(sensitivity=False).sensitivity is None
    for change, match in (({"sensitivity": "some"}, "sensitivity is 'some'"), ({"select": "loss"}, "select is 'loss'")):
        with pytest.raises(KvxError, match=match):
            full_head(**change)
    with pytest.raises(KvxError, match="without queries"):
        dataclasses.replace(toy_pairs(), sensitive=None).weighed("all")
    with pytest.raises(KvxError, match="sensitivity is 'most'"):
        toy_pairs().weighed("most")
