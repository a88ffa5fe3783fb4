"""The fuser: numbers of the public module, where it starts, noise of its gates, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import kvx
from kvx.alignment import Alignment
from kvx.cache.build import from_arrays
from kvx.cache.geometry import CacheGeometry, LayerGeometry, RopeSpec
from kvx.cache.ops import rotate_keys
from kvx.errors import KvxError
from kvx.fitting.synthetic import toy_pairs
from kvx.mappers import CacheMap
from kvx.translators import fuser, fuser_from_torch, untrained
from kvx.translators.additions import last_with_last

# Made once by the public module (thu-nics/C2C at 69eb705, rosetta/model/projector.py, C2CProjector in torch 2.13.0 on a
# CPU, in evaluation mode): two projectors of 2 heads x 4 -> 3 heads x 6, hidden_dim 16, intermediate_dim 12, four
# layers, default initial weights with norms drawn around one and gate logits set to (0.7, -0.4) and (0.2, 0.9), seed 7;
# inputs are standard normal. ``projector_i.*`` are the state dicts, ``io.i.*`` the inputs and outputs.
pytestmark = pytest.mark.usefixtures("quick_compilation")
GOLDEN = Path(__file__).parent / "data" / "c2c_projector.npz"
TOKENS = 5
SOURCE = CacheGeometry((LayerGeometry(2, 4, 4, rope=RopeSpec.create(dim=4)),) * 3)
TARGET = CacheGeometry((LayerGeometry(3, 6, 6, rope=RopeSpec.create(dim=6)),) * 2)
BARE = CacheMap((), None, None, SOURCE, TARGET)


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as held:
        return dict(held)


def weights_of(golden: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: x for name, x in golden.items() if name.startswith("projector_")}


def caches(golden: dict[str, np.ndarray]):
    """Rotated caches that hold the golden inputs in the layers that meet: 1 and 2 of three, and both of two."""
    side = lambda who, kind: [golden[f"io.{i}.{who}_{kind}"] for i in (0, 1)]  # noqa: E731
    other = [np.full_like(x, 9.0) for x in side("source", "key")[:1]]
    at = jnp.arange(TOKENS)
    source = from_arrays(other + side("source", "key"), other + side("source", "value"), at, SOURCE, rotated=True)
    own = from_arrays(side("target", "key"), side("target", "value"), at, TARGET, rotated=True)
    index = jnp.broadcast_to(jnp.arange(TOKENS, dtype=jnp.int32)[None], (2, TOKENS))
    return source, own, Alignment(index[..., None], jnp.ones((2, TOKENS, 1)), index)


def test_it_agrees_with_the_public_module(golden) -> None:
    made = fuser_from_torch(weights_of(golden), BARE)
    moved = rotate_keys(kvx.translate(made, caches(golden)[0], caches(golden)[2], receiver=caches(golden)[1]))
    for i in (0, 1):
        np.testing.assert_allclose(moved.keys(i), golden[f"io.{i}.key"], rtol=0, atol=1e-4)
        np.testing.assert_allclose(moved.values(i), golden[f"io.{i}.value"], rtol=0, atol=1e-4)
    assert np.abs(golden["io.0.key"] - golden["io.0.target_key"]).max() > 0.1  # an open gate
    np.testing.assert_array_equal(golden["io.0.value"], golden["io.0.target_value"])  # a closed one
    assert made.parameters == sum(x.size for n, x in weights_of(golden).items() if "temperature" not in n)


def test_parameters_are_read_from_a_folder_with_its_pairing(golden, tmp_path) -> None:
    weights = weights_of(golden)
    for i in (0, 1):
        lead = f"projector_{i}."
        state = {n[len(lead) :]: x.copy() for n, x in weights.items() if n.startswith(lead)}
        save_file(state, tmp_path / f"projector_{i}.safetensors")
    plain = fuser_from_torch(weights, BARE)
    assert fuser_from_torch(tmp_path, BARE).digest == plain.digest
    pairing = {"0": {"1": {"0": [[2, 1]], "1": [[0, 0]]}}}
    (tmp_path / "projector_config.json").write_text(json.dumps(pairing))
    other = fuser_from_torch(str(tmp_path), BARE).params.parts[0]
    assert other.gather.tolist() == [2, 0]
    np.testing.assert_array_equal(other.keys.bias, plain.params.parts[0].keys.bias[::-1])
    (tmp_path / "projector_config.json").write_text(json.dumps({"0": {"1": {"0": [[2, 1], [1, 0]]}}}))
    with pytest.raises(KvxError, match="every layer once"):
        fuser_from_torch(tmp_path, BARE)
    with pytest.raises(KvxError, match="unpickle"):
        fuser_from_torch(tmp_path / "none", BARE)


def test_parameters_of_another_layout_are_refused(golden) -> None:
    weights = weights_of(golden)
    name = "projector_1.value_proj_out.bias"
    with pytest.raises(KvxError, match=f"{name} is nothing"):
        fuser_from_torch({n: x for n, x in weights.items() if n != name}, BARE)
    with pytest.raises(KvxError, match="nothing reads projector_0.extra"):
        fuser_from_torch({**weights, "projector_0.extra": np.ones(1)}, BARE)
    with pytest.raises(KvxError, match="needs shape"):
        fuser_from_torch(weights, dataclasses.replace(BARE, source=TARGET))
    with pytest.raises(KvxError, match="no parameters projector_1"):
        fuser_from_torch({n: x for n, x in weights.items() if "_1." not in n}, BARE)
    with pytest.raises(KvxError, match="start from pairs"):
        fuser_from_torch(weights, kvx.identity())


def test_an_untrained_fuser_passes_the_targets_own_cache_on() -> None:
    pairs = toy_pairs(batches=1)
    one = next(iter(pairs))
    made = untrained(fuser(hidden=8, inner=8), pairs.unfitted(), jax.random.key(0))
    moved = kvx.translate(made, one.source, one.alignment, receiver=one.target)
    for layer in range(2):
        np.testing.assert_allclose(moved.keys(layer)[:, :, 1:], one.target.keys(layer), rtol=0, atol=1e-5)
        np.testing.assert_array_equal(moved.values(layer)[:, :, 1:], one.target.values(layer))
    part = made.params.parts[0]
    part = dataclasses.replace(part, values=dataclasses.replace(part.values, gate=jnp.ones(2)))
    opened = dataclasses.replace(made, params=dataclasses.replace(made.params, parts=(part,)))
    fused = kvx.translate(opened, one.source, one.alignment, receiver=one.target)
    assert np.abs(fused.values(0) - moved.values(0)).max() > 0.01
    assert made.params.parts[0].gather.tolist() == last_with_last(3, 2) == [1, 2]


def test_gates_are_noisy_in_training_and_harden_as_the_temperature_falls() -> None:
    pairs = toy_pairs(batches=1)
    one = next(iter(pairs))
    method = fuser(hidden=8, inner=8, dropout=0.0, anneal=100)
    params = untrained(method, pairs.unfitted(), jax.random.key(0)).params
    cache, own = rotate_keys(one.source), rotate_keys(one.target)

    @jax.jit
    def run(gate: jax.Array, step: jax.Array, key: jax.Array) -> jax.Array:
        halves = dataclasses.replace(params.parts[0].values, gate=gate)
        held = dataclasses.replace(params, parts=(dataclasses.replace(params.parts[0], values=halves),))
        moved, _ = method.apply(held, cache, one.alignment, receiver=own, rng=key, step=step)
        return moved.values(0) - own.values(0)

    def added(gate: float, step: int, seed: int = 0) -> np.ndarray:
        made = run(jnp.full((2,), gate), jnp.int32(step), jax.random.key(seed))
        return np.asarray(made)[:, 0][np.asarray(one.alignment.pos) >= 0]

    full = added(50.0, 0)  # a logit that no noise closes
    soft, hard = (added(0.0, step)[:, 0] / full[:, 0] for step in (0, 100))
    assert ((soft > 0.05) & (soft < 0.95)).mean() > 0.5
    assert ((hard < 0.01) | (hard > 0.99)).mean() > 0.9 and 0.2 < (hard > 0.5).mean() < 0.95
    assert (added(0.0, 0, seed=1) != added(0.0, 0)).any() and not added(-50.0, 100).any()
    dropped = dataclasses.replace(method, dropout=0.5)
    moved, _ = dropped.apply(params, cache, one.alignment, receiver=own, rng=jax.random.key(0), step=jnp.int32(0))
    assert not np.allclose(moved.values(0) - own.values(0), 0)


def test_settings_out_of_range_are_refused() -> None:
    for settings, says in (({"hidden": 0}, "hidden"), ({"layers": 2}, "layers"), ({"dropout": 1.0}, "dropout")):
        with pytest.raises(KvxError, match=says):
            fuser(**settings)
    with pytest.raises(KvxError, match="missing"):
        fuser().apply(None, None, None)  # type: ignore[arg-type]
