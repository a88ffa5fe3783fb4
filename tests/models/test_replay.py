"""Replay: the identity on native caches, causal, sparse, pure, priced, and strict about its window."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvx
from kvx.cache.cache import KVCache
from kvx.cache.ops import slice_slots
from kvx.errors import KvxError
from kvx.models.config import tiny_config
from kvx.models.model import Model
from kvx.models.prefill import prefill
from kvx.models.random_model import random_model
from kvx.models.replay import ReplayPlan, replay, replay_states
from tests.cases import MODELS, poison

pytestmark = pytest.mark.usefixtures("quick_compilation")
LEAD = 2
TOKENS = jnp.array([[5, 6, 7, 8, 9], [11, 12, 13, -1, -1]])
PLANS = [ReplayPlan(0), ReplayPlan(1), ReplayPlan(0, 1), ReplayPlan(0, every=2), ReplayPlan(1, 2, every=3)]


def whole(model: Model, tokens: jax.Array = TOKENS) -> KVCache:
    """The model's own cache of two tokens of prefix and the context."""
    lead = prefill(model, jnp.array([[3, 4]] * len(tokens)), capacity=LEAD)
    return prefill(model, tokens, lead, capacity=LEAD + tokens.shape[1])


def noisy(cache: KVCache, seed: int = 0) -> KVCache:
    """The cache with other keys and values in its context."""
    rng = np.random.default_rng(seed)
    spoil = lambda x: x.at[:, :, :, LEAD:].add(jnp.asarray(rng.standard_normal(x[:, :, :, LEAD:].shape, np.float32)))  # noqa: E731
    groups = tuple(dataclasses.replace(g, k=spoil(g.k), v=spoil(g.v)) for g in cache.groups)
    return dataclasses.replace(cache, groups=groups)


def rows(cache: KVCache, layer: int) -> np.ndarray:
    """Keys and values of the first row's context."""
    view = cache.layer(layer)
    return np.concatenate([np.asarray(view.k[0, :, LEAD:]), np.asarray(view.v[0, :, LEAD:])], axis=-1)


@pytest.mark.parametrize(("name", "plan"), [*(("gemma3", plan) for plan in PLANS), ("opt", PLANS[-1])], ids=str)
def test_a_native_cache_replays_to_itself(name: str, plan: ReplayPlan) -> None:
    model = random_model(MODELS[name], stacked=name == "gemma3")
    native = whole(model)
    again = replay(model, TOKENS, poison(native), plan)
    assert jax.tree.structure(again) == jax.tree.structure(native)
    for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(native), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5)


def test_layers_below_are_native_and_those_above_correct_themselves() -> None:
    model = random_model(tiny_config(num_layers=4))
    native = whole(model)
    moved = noisy(native)
    again = replay(model, TOKENS, moved, ReplayPlan(1, 2))
    for layer in (0, 1):  # what enters the first injected layer is still native
        np.testing.assert_allclose(rows(again, layer), rows(native, layer), rtol=0, atol=1e-5)
    for layer in (2, 3):
        gap = np.abs(rows(again, layer) - rows(native, layer)).max()
        assert 1e-3 < gap < np.abs(rows(moved, layer) - rows(native, layer)).max()


def test_every_token_reads_only_tokens_before_it_and_sparse_plans_keep_the_rest() -> None:
    model = random_model(tiny_config(num_layers=3))
    moved = noisy(whole(model))
    for plan in (ReplayPlan(0), ReplayPlan(1, every=2)):
        again = replay(model, TOKENS, moved, plan)
        shorter = replay(model, TOKENS[:, :3], slice_slots(moved, 0, LEAD + 3), plan)
        for layer in range(3):
            np.testing.assert_allclose(rows(shorter, layer), rows(again, layer)[:, :3], rtol=0, atol=1e-5)
            kept = np.arange(5) % plan.every != 0
            np.testing.assert_array_equal(rows(again, layer)[:, kept], rows(moved, layer)[:, kept])
            assert (rows(again, layer)[:, ~kept] != rows(moved, layer)[:, ~kept]).all()


def test_tokens_that_were_left_out_come_back() -> None:
    """A window reads a token's own key and value where the translation has none."""
    model = random_model()
    native = whole(model)
    holes = tuple(dataclasses.replace(g, pos=g.pos.at[..., LEAD + 1].set(-1)) for g in native.groups)
    holey = poison(dataclasses.replace(native, groups=holes))
    again = replay(model, TOKENS, holey, ReplayPlan(0))
    np.testing.assert_array_equal(again.layer(1).pos, native.layer(1).pos)
    np.testing.assert_allclose(rows(again, 1), rows(native, 1), rtol=0, atol=1e-5)


def test_without_prefix_jitted_and_with_gradient() -> None:
    model = random_model()
    moved = slice_slots(prefill(model, TOKENS, capacity=5), 0, 5)
    plan = ReplayPlan(0)

    def energy(k: jax.Array, remat: bool) -> jax.Array:
        cache = dataclasses.replace(moved, groups=(dataclasses.replace(moved.groups[0], k=k),))
        again = replay(model, TOKENS, cache, plan, remat=remat)
        return jnp.square(again.values(1)).sum()

    slopes = [jax.jit(jax.grad(energy), static_argnums=1)(moved.groups[0].k, remat) for remat in (False, True)]
    np.testing.assert_allclose(*slopes, rtol=1e-4, atol=1e-6)
    assert np.abs(slopes[0][0]).max() > 0 and not np.asarray(slopes[0][:, 1, :, 3:]).any()
    assert not np.asarray(slopes[0][1]).any()  # nothing reads what enters the last layer's attention


def test_states_are_the_residual_stream() -> None:
    model = random_model()
    cache, states = replay_states(model, TOKENS, whole(model), ReplayPlan(1, every=2))
    assert states.shape == (3, 2, 3, 32)
    np.testing.assert_array_equal(states[0][0], model.params["embed"][TOKENS[0, ::2]])
    np.testing.assert_array_equal(rows(cache, 1), rows(replay(model, TOKENS, whole(model), ReplayPlan(1, every=2)), 1))


def test_flops_are_those_of_the_compiled_program() -> None:
    config = tiny_config(dim=64, ffn_dim=256, num_layers=3, windows=(None, 4, None))
    model = random_model(config)
    moved = prefill(model, TOKENS[:1], capacity=5)
    slots = slice_slots(moved, 0, 5)
    program = jax.jit(lambda cache: replay(model, TOKENS[:1], cache, ReplayPlan(2, 3))).lower(slots).compile()
    counted = program.cost_analysis()["flops"]
    assert ReplayPlan(2, 3).flops(config, 5) == pytest.approx(counted, rel=0.1)
    assert ReplayPlan(0, every=5).flops(config, 5, prefix=3) < ReplayPlan(0).flops(config, 5, prefix=3) / 4
    assert ReplayPlan(0).flops(config, 5, prefix=3) > ReplayPlan(0).flops(config, 5)


@pytest.mark.parametrize(
    "plan", [ReplayPlan(2), ReplayPlan(-1), ReplayPlan(1, 1), ReplayPlan(0, 3), ReplayPlan(every=0)]
)
def test_bad_plans_are_refused(plan: ReplayPlan) -> None:
    model = random_model()
    with pytest.raises(KvxError, match=r"window|every"):
        kvx.replay(model, TOKENS, whole(model), plan)
    with pytest.raises(KvxError, match=r"window|every"):
        plan.flops(model.config, 4)


def test_caches_of_other_contexts_are_refused() -> None:
    model = random_model()
    cache = whole(model)
    with pytest.raises(KvxError, match="one slot a token"):
        replay(model, jnp.zeros((2, 9), jnp.int32), cache, ReplayPlan())
    with pytest.raises(KvxError, match="padding"):
        replay(model, TOKENS.at[:, 4].set(-1), cache, ReplayPlan())
    with pytest.raises(KvxError, match="not the model's"):
        replay(random_model(tiny_config(num_layers=3)), TOKENS, cache, ReplayPlan())
