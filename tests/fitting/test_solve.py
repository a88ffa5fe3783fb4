"""The ridge solve: scale and size invariance, conditioning, escalation, clear failure."""

from __future__ import annotations

import numpy as np
import pytest

from kvx.errors import KvxError
from kvx.fitting.solve import factor, ridge


def normal_equations(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    return x.T @ x / len(x), x.T @ y / len(x)


def test_matches_the_closed_form() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200, 6)) * [1, 2, 3, 4, 5, 6], rng.normal(size=(200, 3))
    gram, cross = normal_equations(x, y)
    wanted = np.linalg.solve(gram + 0.1 * np.diag(np.diag(gram)), cross)
    got = ridge(gram, cross, 0.1)
    np.testing.assert_allclose(got.coefficients, wanted, rtol=1e-10)
    assert got.escalations == 0
    assert got.residual < 1e-12
    scaled = gram / np.sqrt(np.outer(np.diag(gram), np.diag(gram))) + 0.1 * np.eye(6)
    exact = np.linalg.cond(scaled, 1)
    assert exact / 3 < got.condition <= exact * 1.01


def test_case_3_ridge_means_the_same_for_any_size_and_scale() -> None:
    rng = np.random.default_rng(1)
    base = rng.normal(size=(2000, 4))
    x = np.concatenate([base, base[:, :2]], axis=1)  # duplicated features
    y = base @ rng.normal(size=(4, 2)) + 0.1 * rng.normal(size=(2000, 2))
    once = ridge(*normal_equations(x, y), 0.01).coefficients
    hundredfold = ridge(*normal_equations(np.tile(x, (100, 1)), np.tile(y, (100, 1))), 0.01).coefficients
    np.testing.assert_allclose(hundredfold, once, rtol=1e-9)
    scaled = ridge(*normal_equations(1000 * x, y), 0.01).coefficients
    np.testing.assert_allclose(1000 * scaled, once, rtol=1e-9)
    one_column = x * np.array([1000, 1, 1, 1, 1, 1])
    np.testing.assert_allclose(
        one_column @ ridge(*normal_equations(one_column, y), 0.01).coefficients, x @ once, atol=1e-8
    )
    assert np.isfinite(once).all()


def test_case_4_an_indefinite_gram_is_an_error_that_names_layer_and_head() -> None:
    with pytest.raises(
        KvxError, match=r"target layer 3, head 1.*not positive definite.*condition estimate.*-1\.0e\+00"
    ):
        ridge(np.array([[1.0, 2.0], [2.0, 1.0]]), np.ones((2, 1)), 1e-8, where="target layer 3, head 1")


def test_case_4_a_singular_gram_escalates_and_says_so() -> None:
    x = np.random.default_rng(2).normal(size=(500, 3))
    x = np.concatenate([x, x @ np.ones((3, 1))], axis=1)
    gram, cross = normal_equations(x, x[:, :1] - x[:, 1:2])
    got = ridge(gram, cross, 0.0)
    assert got.escalations >= 1
    assert 0 < got.ridge <= 1e-4
    assert np.isfinite(got.coefficients).all()
    np.testing.assert_allclose(x @ got.coefficients, x[:, :1] - x[:, 1:2], atol=1e-3)


def test_nan_never_enters_or_leaves() -> None:
    good, bad = np.eye(2), np.array([[1.0, np.nan], [np.nan, 1.0]])
    with pytest.raises(KvxError, match="layer 7.*Gram holds NaN"):
        ridge(bad, good, 0.1, where="layer 7")
    with pytest.raises(KvxError, match="layer 7.*cross moments hold NaN"):
        ridge(good, bad, 0.1, where="layer 7")
    for lam in (-1.0, np.nan, np.inf):
        with pytest.raises(KvxError, match="ridge is"):
            ridge(good, good, lam)


def test_constant_features_get_no_coefficient() -> None:
    gram = np.diag([2.0, 0.0, 1e-20])
    got = ridge(gram, np.array([[2.0], [5.0], [5.0]]), 0.0, floor=1e-18)
    np.testing.assert_array_equal(got.coefficients[1:], 0.0)
    np.testing.assert_allclose(got.coefficients[0], 1.0)


def test_one_factor_serves_many_right_hand_sides() -> None:
    rng = np.random.default_rng(3)
    gram, cross = normal_equations(rng.normal(size=(100, 5)), rng.normal(size=(100, 7)))
    shared = factor(gram, 0.01)
    parts = [shared.solve(cross[:, i : i + 3]).coefficients for i in range(0, 7, 3)]
    np.testing.assert_allclose(np.concatenate(parts, axis=1), ridge(gram, cross, 0.01).coefficients, rtol=1e-12)
    np.testing.assert_allclose(ridge(gram, cross[:, 0], 0.01).coefficients, parts[0][:, 0], rtol=1e-12)


def test_condition_of_a_hard_problem_is_reported() -> None:
    rng = np.random.default_rng(4)
    q, _ = np.linalg.qr(rng.normal(size=(12, 12)))
    gram = q * np.logspace(0, -11, 12) @ q.T
    got = ridge(gram, gram @ np.ones((12, 1)), 0.0)
    assert 1e9 < got.condition < 1e13
    assert got.residual < 1e-6
