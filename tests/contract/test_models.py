"""Laws of every model family in ``tests/cases.py``: what it reads, and what it predicts from what it has read."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from kvx.cache.cache import KVCache
from kvx.cache.provenance import Provenance
from kvx.models.model import Model
from kvx.models.prefill import next_token_logits, prefill, token_logprobs
from kvx.models.random_model import random_model
from tests.cases import MODELS, poison

TOKENS = jnp.array([[5, 17, 3, 44, 8, 29, 60, 2, 11, 35], [1, 9, 9, 20, 31, -1, -1, -1, -1, -1]], jnp.int32)
MORE = jnp.array([[7, 14, 21], [50, 40, 30]], jnp.int32)
CLOSE = {"rtol": 0, "atol": 2e-5}


@functools.cache
def model_of(name: str, seed: int = 0) -> Model:
    return random_model(MODELS[name], seed=seed)


@pytest.fixture(params=MODELS, ids=str)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(name: str) -> Model:
    return model_of(name)


def held(cache: KVCache, layer: int, row: int) -> dict[int, np.ndarray]:
    """Position -> key and value of one layer and row, whatever the slot order."""
    view = cache.layer(layer)
    pos = np.asarray(view.pos)[row, 0]
    both = np.concatenate([np.asarray(view.k)[row], np.asarray(view.v)[row]], axis=-1)
    return {int(p): both[:, i] for i, p in enumerate(pos) if p >= 0}


def same_content(a: KVCache, b: KVCache) -> None:
    for layer in range(a.num_layers):
        for row in range(a.batch):
            x, y = held(a, layer, row), held(b, layer, row)
            assert x.keys() == y.keys()
            for p in x:
                np.testing.assert_allclose(x[p], y[p], **CLOSE)


def test_shape_and_dtype_fixed_point(model: Model) -> None:
    before = prefill(model, TOKENS, capacity=32)
    after = prefill(model, MORE, before, capacity=32)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(before)] == [(x.shape, x.dtype) for x in jax.tree.leaves(after)]
    assert {x.dtype for x in jax.tree.leaves(after)} == {jnp.dtype("float32"), jnp.dtype("int32")}


def test_composition_reading_in_two_parts_is_reading_at_once(model: Model) -> None:
    whole = prefill(model, jnp.concatenate([TOKENS[:1], MORE[:1]], axis=1))
    same_content(prefill(model, MORE[:1], prefill(model, TOKENS[:1])), whole)
    same_content(prefill(model, jnp.concatenate([TOKENS[:1], MORE[:1]], axis=1), chunk=4), whole)


def test_identity_padding_adds_nothing(model: Model) -> None:
    cache = prefill(model, TOKENS)
    same_content(prefill(model, jnp.full((2, 3), -1, jnp.int32), cache), cache)


def test_padding_on_either_side_changes_nothing(model: Model) -> None:
    left = jnp.pad(TOKENS[:1], ((0, 0), (3, 0)), constant_values=-1)
    right = jnp.pad(TOKENS[:1], ((0, 0), (0, 9)), constant_values=-1)
    same_content(prefill(model, left), prefill(model, TOKENS[:1]))
    same_content(prefill(model, right), prefill(model, TOKENS[:1]))


def test_rows_do_not_see_each_other(model: Model) -> None:
    together, alone = prefill(model, TOKENS), prefill(model, TOKENS[1:, :5])
    for layer in range(together.num_layers):
        x, y = held(together, layer, 1), held(alone, layer, 0)
        assert x.keys() == y.keys()
        assert all(np.allclose(x[p], y[p], **CLOSE) for p in x)


def test_windows_forget_what_no_query_reads(model: Model) -> None:
    short, long = (prefill(model, TOKENS, keep=keep) for keep in ("window", "all"))
    np.testing.assert_allclose(next_token_logits(model, MORE, short), next_token_logits(model, MORE, long), **CLOSE)


def test_nan_in_empty_slots_is_never_read(model: Model) -> None:
    cache = prefill(model, TOKENS, capacity=32)
    for read in (next_token_logits, token_logprobs):
        np.testing.assert_array_equal(read(model, MORE, poison(cache)), read(model, MORE, cache))
    after = prefill(model, MORE, poison(cache), capacity=32)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after))


def test_a_cache_is_a_value(model: Model) -> None:
    cache = prefill(model, TOKENS)
    first = next_token_logits(model, MORE, cache)
    next_token_logits(model, MORE + 1, cache)
    prefill(model, MORE + 2, cache)
    np.testing.assert_array_equal(next_token_logits(model, MORE, cache), first)


def test_vmap_agrees_with_a_loop(model: Model) -> None:
    stack = jnp.stack([MORE, MORE[::-1]])
    cache = prefill(model, TOKENS)
    both = jax.vmap(lambda tokens: next_token_logits(model, tokens, cache))(stack)
    for i in range(2):
        np.testing.assert_allclose(both[i], next_token_logits(model, stack[i], cache), **CLOSE)


def test_export_round_trip(model: Model) -> None:
    leaves, structure = jax.tree.flatten(model)

    def logits(tokens: jax.Array, *weights: jax.Array) -> jax.Array:
        rebuilt = jax.tree.unflatten(structure, weights)
        return next_token_logits(rebuilt, MORE, prefill(rebuilt, tokens))

    exported = export.deserialize(export.export(jax.jit(logits))(TOKENS, *leaves).serialize())
    expected = next_token_logits(model, MORE, prefill(model, TOKENS))
    np.testing.assert_allclose(exported.call(TOKENS, *leaves), expected, **CLOSE)


def test_gradients_are_finite_and_reach_weights_and_cache(model: Model) -> None:
    cache = prefill(model, TOKENS, capacity=16)

    def loss(params: Any, k: jax.Array) -> jax.Array:
        first = dataclasses.replace(poison(cache).groups[0], k=k)
        groups = (first, *cache.groups[1:])
        return -token_logprobs(
            dataclasses.replace(model, params=params), MORE, dataclasses.replace(cache, groups=groups)
        ).sum()

    weights, keys = jax.grad(loss, argnums=(0, 1))(model.params, poison(cache).groups[0].k)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(weights)) and np.isfinite(keys).all()
    assert (np.abs(weights["embed"]) > 0).any() and (np.abs(keys) > 0).any()


def test_another_checkpoint_of_the_same_shape_does_not_retrace(name: str) -> None:
    traces = []

    @jax.jit
    def counted(model: Model, tokens: jax.Array) -> jax.Array:
        traces.append(1)
        return next_token_logits(model, tokens)

    first = dataclasses.replace(model_of(name), provenance=Provenance("one", "aa"))
    other = dataclasses.replace(model_of(name, seed=1), provenance=Provenance("two", "bb"))
    assert not np.allclose(counted(first, TOKENS), counted(other, TOKENS))
    assert len(traces) == 1


def test_stacked_and_unrolled_layers_agree(model: Model) -> None:
    same_content(prefill(model.stack(), TOKENS), prefill(model, TOKENS))


def test_bf16_stays_bf16(name: str) -> None:
    half = random_model(MODELS[name], dtype=jnp.bfloat16)
    cache = prefill(half, TOKENS)
    assert {x.dtype for x in jax.tree.leaves(cache)} == {jnp.dtype("bfloat16"), jnp.dtype("int32")}
    assert np.isfinite(next_token_logits(half, MORE, cache)).all()


def test_sharding_fixed_point(run_python) -> None:
    """Rows spread over two devices and weights over two: caches stay where they are, and hold the same."""
    result = run_python(SHARDED, devices=4, timeout=600)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["gemma3", "gpt2", "llama"]


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
jax.config.update('jax_disable_most_optimizations', True)
from jax.sharding import NamedSharding, PartitionSpec as P
from kvx.models.prefill import prefill, next_token_logits
from kvx.models.random_model import random_model
from kvx.sharding import parameter_sharding
from tests.cases import MODELS

mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
rows = NamedSharding(mesh, P("data"))
tokens = jax.random.randint(jax.random.key(0), (4, 16), 0, 60)
for name in ("gemma3", "gpt2", "llama"):
    model = random_model(MODELS[name], stacked=True)
    path = lambda steps: tuple(step.key for step in steps if hasattr(step, "key"))
    place = lambda steps, x: jax.device_put(x, parameter_sharding(mesh, path(steps), x.shape))
    spread = jax.tree_util.tree_map_with_path(place, model)
    step = jax.jit(lambda m, t, c: prefill(m, t, c, capacity=64), out_shardings=None)
    cache = jax.jit(lambda m, t: prefill(m, t, capacity=64))(spread, jax.device_put(tokens, rows))
    again = step(spread, jax.device_put(tokens, rows), cache)
    for x, y in zip(jax.tree.leaves(cache), jax.tree.leaves(again), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim), (name, x.sharding, y.sharding)
    assert len(again.groups[0].k.sharding.device_set) == 4 and not again.groups[0].k.sharding.is_fully_replicated
    alone = next_token_logits(model, tokens, prefill(model, tokens))
    np.testing.assert_allclose(next_token_logits(spread, jax.device_put(tokens, rows), cache), alone, atol=5e-5, rtol=0)
    print(name)
"""
