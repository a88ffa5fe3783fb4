"""Shifts of the target's stream: zero for its own cache, growing with the error, blind to padding and lower layers."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvx.cache.cache import KVCache
from kvx.evaluation.shifts import last_state_shift, propagated_shift, relative_shift
from kvx.models.config import tiny_config
from kvx.models.model import Model
from kvx.models.prefill import prefill
from kvx.models.random_model import random_model
from kvx.models.replay import ReplayPlan, replay

pytestmark = pytest.mark.usefixtures("quick_compilation")
TOKENS = jnp.array([[5, 6, 7, 8], [11, 12, -1, -1]])
BOUNDARY = jnp.array([[3, 4], [3, -1]])


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(tiny_config(num_layers=3))


@pytest.fixture(scope="module")
def native(model: Model) -> KVCache:
    return prefill(model, TOKENS, capacity=4)


def spoiled(native: KVCache, size: float, layer: int | None = None) -> KVCache:
    """Other values in one layer or all, and in the padding too."""
    group = native.groups[0]
    noise = np.random.default_rng(0).standard_normal(group.v.shape).astype(np.float32)
    if layer is not None:
        noise[np.arange(3) != layer] = 0
    return dataclasses.replace(native, groups=(dataclasses.replace(group, v=group.v + jnp.float32(size) * noise),))


def test_relative_shift_is_a_mean_over_real_tokens() -> None:
    native = jnp.array([[[3.0, 4.0], [1.0, 0.0], [0.0, 2.0]]])
    changed = native + jnp.array([[[0.0, 5.0], [jnp.nan, 0.0], [0.0, 1.0]]])
    real = jnp.array([[True, False, True]])
    np.testing.assert_allclose(relative_shift(changed, native, real), [(1.0 + 0.5) / 2])
    both = relative_shift(jnp.stack([changed, native]), jnp.stack([native, native]), real)
    np.testing.assert_allclose(both, [[0.75], [0.0]])


def test_shifts_are_zero_natively_and_grow_with_the_error(model: Model, native: KVCache) -> None:
    plan = ReplayPlan(1)
    found = [propagated_shift(model, TOKENS, spoiled(native, size), native, plan) for size in (0.0, 0.1, 0.5)]
    last = [last_state_shift(model, BOUNDARY, spoiled(native, size), native) for size in (0.0, 0.1, 0.5)]
    for zero, small, large in (found, last):
        assert (zero == 0).all() and (small > 1e-4).all() and (large > 2 * small).all()


def test_what_lies_below_the_window_shifts_nothing(model: Model, native: KVCache) -> None:
    below = spoiled(native, 1.0, layer=0)
    assert (propagated_shift(model, TOKENS, below, native, ReplayPlan(1)) < 1e-6).all()
    assert (propagated_shift(model, TOKENS, below, native, ReplayPlan(0)) > 1e-3).all()


def test_the_shift_is_the_mean_over_layers_from_the_start_on(model: Model, native: KVCache) -> None:
    """Only the last layer injected: its output alone moves, and the replayed cache stays native."""
    moved, plan = spoiled(native, 1.0, layer=2), ReplayPlan(2)
    assert (propagated_shift(model, TOKENS, moved, native, plan) > 1e-3).all()
    again = replay(model, TOKENS, moved, plan)
    np.testing.assert_allclose(last_state_shift(model, BOUNDARY, again, native), 0.0, atol=1e-5)
