"""Ratios of means, paired bootstrap intervals, undefined ratios, bytes as the common unit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvx.errors import KvxError
from kvx.evaluation.metrics import (
    Bootstrap,
    Estimate,
    answers_carried,
    benefit_retained,
    bits_per_byte,
    content_carried,
    nats_per_byte,
)

QUICK = Bootstrap(resamples=500)


def _losses(n: int = 100, seed: int = 0, share: float = 0.6) -> dict[str, np.ndarray]:
    """Items whose difficulty varies a lot and whose content effects vary little; translated carries ``share``."""
    rng = np.random.default_rng(seed)
    hard = rng.normal(3.3, 0.8, n)
    effect, generic = rng.normal(0.45, 0.1, n), rng.normal(0.35, 0.1, n)
    native, other = hard, hard + effect
    return {
        "native": native,
        "native_mismatched": other,
        "none": other + generic,
        "translated": native + 0.2 + (1 - share) * effect,
        "mismatched": native + 0.2 + effect,
    }


def test_a_ratio_is_a_ratio_of_means_not_a_mean_of_ratios():
    assert Bootstrap().ratio([1.0, 9.0], [2.0, 10.0]).value == pytest.approx(10 / 12)


def test_planted_shares_are_found_and_the_interval_is_paired():
    losses = _losses(share=0.6)
    content = content_carried(losses)
    assert content.value == pytest.approx(0.6, abs=1e-9), "the same share in every item: no spread although losses vary"
    assert content.high - content.low < 1e-9
    retained = benefit_retained(losses)
    none, own, native = (losses[k].mean() for k in ("none", "translated", "native"))
    assert retained.value == pytest.approx((none - own) / (none - native))
    assert retained.low < retained.value < retained.high


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(200):
        bottom = rng.normal(0.5, 0.3, 60)
        top = 0.7 * bottom + rng.normal(0.0, 0.2, 60)
        estimate = QUICK.ratio(top, bottom)
        hits += estimate.low <= 0.7 <= estimate.high
    assert 0.88 <= hits / 200 <= 0.99


def test_native_controls_have_content_one_and_zero():
    losses = _losses()
    native = {**losses, "translated": losses["native"], "mismatched": losses["native_mismatched"]}
    assert str(content_carried(native)) == "1.000 [1.000, 1.000]"
    blind = {**losses, "translated": losses["native_mismatched"], "mismatched": losses["native_mismatched"]}
    assert str(content_carried(blind)) == "0.000 [0.000, 0.000]"
    assert benefit_retained(blind).value > 0.4, "generic help alone gives a high retained: never quote it alone"


@pytest.mark.parametrize(("shift", "reason"), [(0.0, "contains zero"), (-1.0, "lies below zero")])
def test_a_ratio_is_undefined_and_says_so(shift: float, reason: str):
    rng = np.random.default_rng(1)
    estimate = Bootstrap().ratio(rng.normal(1, 1, 50), rng.normal(shift, 1, 50) - (0.0 if shift else 0.02))
    assert not estimate.defined and estimate.low is None and reason in estimate.reason
    assert not estimate.at_least(0.0) and "undefined" in str(estimate)


def test_a_bar_is_met_by_the_lower_end():
    estimate = Estimate(0.75, 0.66, 0.84)
    assert estimate.at_least(0.66) and not estimate.at_least(0.7)


def test_same_items_same_interval_and_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch):
    x = np.random.default_rng(0).normal(size=37)
    assert Bootstrap().mean(x) == Bootstrap().mean(x)
    assert Bootstrap(seed=1).mean(x) != Bootstrap().mean(x)
    big = Bootstrap(resamples=64).means(np.random.default_rng(1).normal(size=(200_000, 1)))
    assert big.shape == (64, 1) and abs(big.std() - 200_000**-0.5) < 0.001


def test_arms_with_different_item_counts_are_refused():
    with pytest.raises(KvxError, match="same items"):
        content_carried({**_losses(10), "native": np.ones(9)})


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_names_its_arm_and_item(bad: float):
    losses = _losses(10)
    losses["translated"][4] = bad
    with pytest.raises(KvxError, match="translated of item 4"):
        content_carried(losses)


def test_no_items_is_undefined():
    assert not Bootstrap().mean([]).defined and not Bootstrap().ratio([], []).defined


def test_answers_carried_counts_scores_upwards():
    rows = {"native": [1, 0, 1], "native_mismatched": [0, 0, 0], "translated": [1, 0, 0], "mismatched": [0, 0, 0]}
    f1 = {arm: [float(x) for x in row] * 10 for arm, row in rows.items()}
    assert answers_carried(f1, QUICK).value == pytest.approx(0.5)


def test_case_39_bytes_compare_models_with_different_vocabularies():
    """One text, one total likelihood, cut into few or many tokens: perplexities differ, bits per byte do not."""
    text, nats = "What a piece of work is a man! " * 40, 900.0
    size = len(text.encode())
    perplexities = {tokens: math.exp(nats / tokens) for tokens in (250, 400)}
    assert perplexities[250] / perplexities[400] > 3
    assert bits_per_byte([nats], [size]) == pytest.approx(nats / size / math.log(2))
    assert nats_per_byte([nats / 2, nats / 2], [size // 2, size - size // 2]) == pytest.approx(nats / size)
    with pytest.raises(KvxError, match="empty text"):
        nats_per_byte([], [])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=30), st.floats(0.1, 10))
def test_estimates_lie_in_their_interval_and_scale(values: list[float], factor: float):
    mean = QUICK.mean(values)
    assert mean.low - 1e-9 <= mean.value <= mean.high + 1e-9
    scaled = QUICK.mean([factor * v for v in values])
    assert scaled.low == pytest.approx(factor * mean.low, abs=1e-6)
