"""Streaming moments: accuracy, masking, pivots, merging, precision."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvx.errors import KvxError
from kvx.fitting.moments import accumulate, make_pivot, merge, start, zeros
from kvx.fitting.normal import Normals
from kvx.fitting.pairs import rows_of
from kvx.fitting.plan import Plan
from kvx.fitting.synthetic import toy_pairs

PLAN = Plan.create([(3, 2), (4, 4), (2, 2)], [(3, 3), (2, 2)])
ALL = (0, 1, 2)


def rows(seed: int, n: int, plan: Plan = PLAN) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    p, q = plan.x_starts[-1], plan.y_starts[-1]
    mix = np.random.default_rng(99).normal(size=(p, p + q))
    x = rng.normal(size=(n, p)) @ mix[:, :p] + 50
    y = x @ mix[:, p:] + rng.normal(size=(n, q)) - 1000
    return x.astype(np.float32), y.astype(np.float32), rng.uniform(0.5, 2, n).astype(np.float32)


def stream(x: np.ndarray, y: np.ndarray, w: np.ndarray, block: int, plan: Plan = PLAN) -> Normals:
    moments = zeros(plan, make_pivot(plan, *map(jnp.asarray, (x[:block], y[:block], w[:block]))))
    for i in range(0, len(x), block):
        moments = accumulate(moments, *map(jnp.asarray, (x[i : i + block], y[i : i + block], w[i : i + block])))
    return Normals(moments)


def reference(x: np.ndarray, y: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, ...]:
    x, y, w = (a.astype(np.float64) for a in (x, y, w))
    mu, nu = w @ x / w.sum(), w @ y / w.sum()
    xc, yc, wn = x - mu, y - nu, (w / w.sum())[:, None]
    return mu, nu, (wn * xc).T @ xc, (wn * xc).T @ yc, (wn * yc).T @ yc


def fit(normals: Normals, layers: tuple[int, ...], target: int, lam: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    w = normals.factor(layers, lam).solve(normals.cross(layers, target)).coefficients
    return w, normals.output_mean(target) - normals.mean(layers) @ w


def test_every_moment_matches_fp64() -> None:
    x, y, w = rows(0, 700)
    w[::7] = 0
    got, (mu, nu, gram, cross, cov) = stream(x, y, w, 128), reference(x, y, w)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6 * np.abs(b).max())  # noqa: E731
    assert got.rows == int((w > 0).sum())
    assert got.weight == pytest.approx(float(w.astype(float).sum()), rel=1e-7)
    assert got.effective_rows == pytest.approx(w.astype(float).sum() ** 2 / (w.astype(float) ** 2).sum(), rel=1e-6)
    close(got.mean(ALL), mu)
    close(got.gram(ALL), gram)
    close(got.cross(ALL, 1), cross[:, 6:])
    close(got.output_mean(0), nu[:6])
    close(got.output_covariance(0, 1), cov[3:6, 3:6])
    columns = np.r_[13:17, 0:5]  # any order of layers
    close(got.gram((2, 0)), gram[np.ix_(columns, columns)])


def test_case_2_conditioning() -> None:
    """cond(X) = 1e4, 4096 x 16: plain fp32 normal equations are useless, ours stay below 1e-3."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        u, _ = np.linalg.qr(rng.normal(size=(4096, 16)))
        v, _ = np.linalg.qr(rng.normal(size=(16, 16)))
        x = (64 * u * np.logspace(0, -4, 16) @ v.T).astype(np.float32)
        truth = rng.normal(size=(16, 16))
        y = (x.astype(np.float64) @ truth).astype(np.float32)
        plan = Plan.create([(16,)], [(16,)])
        got, _ = fit(stream(x, y, np.ones(4096, np.float32), 512, plan), (0,), 0)
        error = np.linalg.norm(got - truth) / np.linalg.norm(truth)
        # Row after row, so that no CPU's BLAS orders the sums in its own way.
        gram, cross = (np.cumsum(x[:, :, None] * side[:, None], axis=0, dtype=np.float32)[-1] for side in (x, y))
        plain = np.linalg.solve(gram.astype(np.float64), cross.astype(np.float64))
        assert np.linalg.norm(plain - truth) / np.linalg.norm(truth) > 0.5
        assert error < 1e-3
    assert 1e6 < stream(x, y, np.ones(4096, np.float32), 512, plan).factor((0,), 0.0).condition < 1e9


def test_case_3_same_coefficients_for_n_and_100_n_rows_and_any_scale() -> None:
    x, y, w = rows(1, 500)
    once, bias = fit(stream(x, y, w, 250), ALL, 0, 0.01)
    many, many_bias = fit(stream(np.tile(x, (100, 1)), np.tile(y, (100, 1)), np.tile(w, 100), 1250), ALL, 0, 0.01)
    np.testing.assert_allclose(many, once, atol=1e-4)
    np.testing.assert_allclose(many_bias, bias, rtol=1e-4)
    large, large_bias = fit(stream(1000 * x, y, w, 250), ALL, 0, 0.01)
    np.testing.assert_allclose(1000 * large, once, atol=1e-4)
    np.testing.assert_allclose(large_bias, bias, rtol=1e-4)


def test_case_3_duplicated_features_share_their_coefficients() -> None:
    """Features 4 and 5 repeat 0 and 1: finite, the same for N and 100 N rows and for 1000 X, the pair split evenly."""
    rng = np.random.default_rng(11)
    base = rng.normal(size=(2000, 4)).astype(np.float32)
    x = np.concatenate([base, base[:, :2]], axis=1)
    y = (base @ rng.normal(size=(4, 2)) + 0.1 * rng.normal(size=(2000, 2))).astype(np.float32)
    plan = Plan.create([(6,)], [(2,)])
    ones = np.ones(2000, np.float32)
    once, _ = fit(stream(x, y, ones, 500, plan), (0,), 0, 0.01)
    many, _ = fit(stream(np.tile(x, (100, 1)), np.tile(y, (100, 1)), np.tile(ones, 100), 2000, plan), (0,), 0, 0.01)
    large, _ = fit(stream(1000 * x, y, ones, 500, plan), (0,), 0, 0.01)
    xc, yc = x.astype(np.float64) - x.mean(axis=0), y - y.mean(axis=0)
    gram = xc.T @ xc
    wanted = np.linalg.solve(gram + 0.01 * np.diag(np.diag(gram)), xc.T @ yc)
    for got in (once, many, 1000 * large):
        np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_case_5_accumulators() -> None:
    """4096 ones make 4096, and a Gram streamed over 256 bf16 batches keeps its digits."""
    plan = Plan.create([(1,)], [(1,)])
    one = jnp.ones((1, 1))
    moments = zeros(plan, make_pivot(plan, one, one))
    for _ in range(4096):
        moments = accumulate(moments, one, one)
    assert Normals(moments).weight == 4096.0
    assert moments.rows == 4096
    rng = np.random.default_rng(0)
    plan = Plan.create([(8,)], [(4,)])
    x = jnp.asarray(rng.normal(size=(256, 16, 8)), jnp.bfloat16)
    y = jnp.asarray(rng.normal(size=(256, 16, 4)), jnp.bfloat16)
    moments = start(plan, x[0], y[0])
    for i in range(1, 256):
        moments = accumulate(moments, x[i], y[i])
    flat = np.asarray(x, np.float64).reshape(-1, 8)
    _, _, gram, _, _ = reference(flat, np.asarray(y, np.float64).reshape(-1, 4), np.ones(4096))
    np.testing.assert_allclose(Normals(moments).gram((0,)), gram, atol=1e-6)


def test_totals_are_compensated() -> None:
    """A plain fp32 total of 2,000 blocks would drift by about 1e-5; the compensated one keeps fp32 block accuracy."""
    plan = Plan.create([(1,)], [(1,)])
    x = np.random.default_rng(0).normal(size=(2000, 8, 1)).astype(np.float32)
    moments = zeros(plan, make_pivot(plan, jnp.asarray(x[0]), jnp.asarray(x[0])))
    for block in x:
        moments = accumulate(moments, jnp.asarray(block), jnp.asarray(block))
    z = (x.astype(np.float64) - float(moments.pivot.x_mean[0])) * float(moments.pivot.white[0][0, 0])
    got = float(moments.total.xx[0][0, 0]) + float(moments.error.xx[0][0, 0])
    assert abs(got / (z**2).sum() - 1) < 2e-7
    assert float(moments.error.xx[0][0, 0]) != 0.0


def test_case_6_padding_and_nan_rows_change_nothing() -> None:
    x, y, _ = rows(2, 128)
    w = np.r_[np.ones(100), np.zeros(28)].astype(np.float32)
    clean, bias = fit(stream(x[:100], y[:100], w[:100], 100), ALL, 0, 1e-3)
    x[100:], y[100:] = np.nan, np.inf
    masked, masked_bias = fit(stream(x, y, w, 128), ALL, 0, 1e-3)
    np.testing.assert_allclose(masked, clean, atol=1e-5)
    np.testing.assert_allclose(masked_bias, bias, rtol=1e-5)
    plan = Plan.create([(1,)], [(1,)])
    two = jnp.array([[1.0], [jnp.nan]])
    moments = start(plan, two, two, jnp.array([1.0, 0.0]))
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(moments))
    one = Normals(moments)
    assert (one.rows, one.weight, one.mean((0,)).tolist(), one.gram((0,)).tolist()) == (1, 1.0, [1.0], [[0.0]])


def test_case_7_a_large_mean_is_recovered_as_bias() -> None:
    rng = np.random.default_rng(3)
    plan = Plan.create([(3,)], [(2,)])
    x = (rng.normal(size=(400, 3)) + 300).astype(np.float32)
    truth, bias = rng.normal(size=(3, 2)), np.array([1e4, -2e4])
    got, got_bias = fit(stream(x, (x @ truth + bias).astype(np.float32), np.ones(400, np.float32), 100, plan), (0,), 0)
    np.testing.assert_allclose(got, truth, atol=2e-3)
    np.testing.assert_allclose(got_bias, bias, rtol=1e-4)
    np.testing.assert_allclose(x[:5] @ got + got_bias, x[:5] @ truth + bias, rtol=1e-6)


def test_case_8_every_product_names_the_highest_precision() -> None:
    x, y, w = map(jnp.asarray, rows(4, 32))
    moments = start(PLAN, x, y, w)
    text = jax.jit(accumulate).lower(moments, x, y, w).as_text()
    products = re.findall(r"stablehlo\.dot_general.*", text)
    assert len(products) >= 2 * len(PLAN.sources) + 4
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)


def test_case_8_rows_are_made_without_products() -> None:
    """What a batch goes through before the sums has no matrix product that could run in bf16."""
    text = jax.jit(rows_of).lower(next(iter(toy_pairs(batches=1)))).as_text()
    assert "stablehlo.gather" in text and "stablehlo.dot_general" not in text


def test_merging_equals_one_run() -> None:
    x, y, w = rows(5, 300)
    a = start(PLAN, *map(jnp.asarray, (x[:100], y[:100], w[:100])))
    b = accumulate(zeros(PLAN, a.pivot), *map(jnp.asarray, (x[100:], y[100:], w[100:])))
    whole = stream(x, y, w, 100)
    for got in (Normals(merge(a, b)), Normals(merge(b, a)), Normals(a, b)):
        assert got.rows == 300
        np.testing.assert_allclose(got.gram(ALL), whole.gram(ALL), atol=1e-4)
        np.testing.assert_allclose(got.cross(ALL, 0), whole.cross(ALL, 0), atol=1e-3)
    other = start(PLAN, *map(jnp.asarray, (x[100:], y[100:], w[100:])))
    with pytest.raises(KvxError, match="different pivots"):
        merge(a, other)
    with pytest.raises(KvxError, match="different plans"):
        merge(a, start(Plan.create([(17,)], [(10,)]), *map(jnp.asarray, (x, y, w))))


def test_counts_pass_two_to_the_thirty() -> None:
    plan = Plan.create([(1,)], [(1,)])
    x = jnp.ones((3, 1))
    moments = start(plan, x, x)
    nearly = type(moments)(moments.pivot, moments.total, moments.error, jnp.array([(1 << 30) - 2, 5], jnp.int32), plan)
    assert accumulate(nearly, x, x).rows == 6 * (1 << 30) + 1


def test_reach_keeps_only_what_a_map_can_use() -> None:
    plan = Plan.create([(2, 2)] * 4, [(3, 3)] * 2, reach=[(0, 1), (2, 3)])
    x, y, w = rows(6, 100, plan)
    shared = np.random.default_rng(7).normal(size=(100, 1)).astype(np.float32)
    x, y = x + 20 * shared, y + 500 * shared  # so that no covariance is close to zero, where sums of fp32 cancel
    full = Plan.create([(2, 2)] * 4, [(3, 3)] * 2)
    got, whole = stream(x, y, w, 50, plan), stream(x, y, w, 50, full)
    assert plan.numbers < full.numbers
    np.testing.assert_allclose(got.gram((2, 3)), whole.gram((2, 3)), rtol=1e-6)
    np.testing.assert_allclose(got.cross((2, 3), 1), whole.cross((2, 3), 1), rtol=1e-6)
    with pytest.raises(KvxError, match="no products of source layers 2 and 1"):
        got.gram((1, 2))
    with pytest.raises(KvxError, match="source layer 0 and target layer 1"):
        got.cross((0,), 1)


def test_wrong_widths_and_empty_batches_are_refused() -> None:
    x, y, w = map(jnp.asarray, rows(7, 10))
    with pytest.raises(KvxError, match="the plan expects 17 and 10"):
        start(PLAN, x[:, :-1], y, w)
    with pytest.raises(KvxError, match="no rows of non-zero weight"):
        start(PLAN, x, y, 0 * w)
    with pytest.raises(KvxError, match="NaN or infinity"):
        start(PLAN, x.at[0, 0].set(jnp.nan), y, w)
    with pytest.raises(KvxError, match="source layers"):
        Plan.create([(1,)], [(1,)], reach=[(3,)])


def test_accumulate_works_inside_jit_and_does_not_retrace() -> None:
    x, y, w = map(jnp.asarray, rows(8, 64))
    traces = []

    @jax.jit
    def step(moments, x, y, w):  # type: ignore[no-untyped-def]
        traces.append(1)
        return accumulate(moments, x, y, w)

    pivot = make_pivot(PLAN, x, y, w)
    moments = step(step(zeros(PLAN, pivot), x, y, w), x, y, w)
    plain = accumulate(accumulate(zeros(PLAN, pivot), x, y, w), x, y, w)
    assert len(traces) == 1
    np.testing.assert_allclose(Normals(moments).gram(ALL), Normals(plain).gram(ALL), rtol=1e-5, atol=1e-4)
