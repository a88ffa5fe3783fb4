"""The bench of mappers: sizes are counted, both sides compute what they claim to."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from kvx.errors import KvxError
from kvx.evaluation.bench_mapper import SUPPORTS, Shape, bench_mapper, random_map

FIGURES = ("storage_ratio", "build_ratio", "apply_ratio_16", "fused_ratio", "warm_vs_native_prefill_1024")


@pytest.fixture(scope="module")
def figures():
    return bench_mapper(Shape(2, 4, 8, 2), tokens=[16], rows=64, repeats=1)


def test_every_figure_is_there_and_positive(figures):
    fractions = [f"build_gemm_fraction_{support}" for support in SUPPORTS]
    assert all(figures[name] > 0 for name in (*FIGURES, *fractions))
    assert figures["rows"] == 64 and set(figures["apply_s"]) == set(SUPPORTS)


def test_eight_heads_store_eight_times_less_but_for_the_biases():
    rng = np.random.default_rng(0)
    shape = Shape(layers=4, heads=8, width=32, reads=4)
    full, matched = (random_map(shape, support, rng).stored for support in SUPPORTS)
    coefficients = 2 * 4 * 8 * (4 * 32) * 32 * 4
    assert matched >= coefficients and full >= 8 * coefficients
    assert 7.6 < full / matched < 8


def test_both_maps_fit_a_cache_of_the_shape():
    from kvx.evaluation.comparison import straight_context
    from kvx.mappers.linear import apply_linear

    shape = Shape(3, 2, 8, 2, inputs="both")
    for support in SUPPORTS:
        params = random_map(shape, support, np.random.default_rng(0))
        made = apply_linear(params, *straight_context(shape.geometry, 5))
        assert made.keys(2).shape == (1, 2, 5, 8)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(made))


def test_wrong_settings_are_refused():
    with pytest.raises(KvxError, match="at least 1"):
        bench_mapper(Shape(2, 2, 8, 1), tokens=[], rows=8, repeats=1)
