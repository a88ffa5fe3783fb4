"""RoPE against exact values (CASES 15, 16) and against transformers' own frequency functions."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvx.cache import CacheGeometry, LayerGeometry, RopeSpec, frequencies, rotate, unrotate
from kvx.cache.geometry import ROPE_KINDS
from kvx.cache.rope import (
    deinterleave,
    interleave,
    record_length,
    rotate_by,
    rotate_with,
    with_length,
    yarn_attention_factor,
)
from kvx.errors import KvxError

ONE = jnp.array([[1.0, 2.0, 3.0, 4.0]])


def test_half_split_and_interleaved_exact_values() -> None:
    """CASE 16."""
    at = jnp.array([1])
    half = rotate(ONE, at, RopeSpec.create(dim=4))[0]
    pairs = rotate(ONE, at, RopeSpec.create(dim=4, interleaved=True))[0]
    np.testing.assert_allclose(half, [-1.98411, 1.9599, 2.46238, 4.0198], atol=2e-5)
    np.testing.assert_allclose(pairs, [-1.14264, 1.92208, 2.95985, 4.0298], atol=2e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_unrotate_inverts_at_position_32000(interleaved: bool) -> None:
    """CASE 15: fp32 angles leave about 1e-6; angles rounded to bf16 leave an error of order 9."""
    spec = RopeSpec.create(theta=1e6, dim=128, interleaved=interleaved)
    k = jax.random.normal(jax.random.key(0), (2, 4, 3, 128))
    pos = jnp.array([[31_998, 31_999, 32_000]] * 2)[:, None]
    back = unrotate(rotate(k, pos, spec), pos, spec)
    assert float(jnp.abs(back - k).max()) < 4e-6
    exact = np.asarray(pos, np.float32)[..., None] * frequencies(spec).reshape(1, 1, 1, -1)  # fp32, whatever kvx uses
    turned = rotate_by(k, jnp.asarray(np.cos(exact)), jnp.asarray(np.sin(exact)), interleaved=interleaved)
    assert float(jnp.abs(unrotate(turned, pos, spec) - k).max()) < 4e-6
    angle = pos.astype(jnp.bfloat16)[..., None] * jnp.asarray(frequencies(spec), jnp.bfloat16).reshape(1, 1, 1, -1)
    angle = angle.astype(jnp.float32)
    rough = rotate_by(rotate(k, pos, spec), jnp.cos(angle), -jnp.sin(angle), interleaved=interleaved)
    assert float(jnp.abs(rough - k).max()) > 1.0


def test_angles_match_fp64_to_fp32_rounding() -> None:
    spec = RopeSpec.create(theta=1e4, dim=8)
    x = jnp.concatenate([jnp.ones((1, 4)), jnp.zeros((1, 4))], axis=1)
    got = np.asarray(rotate(x, jnp.array([512]), spec))[0]
    angle = 512 * 1e4 ** (-np.arange(4) / 4)
    np.testing.assert_allclose(got, np.concatenate([np.cos(angle), np.sin(angle)]), atol=2e-5)


SCALED = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 3.0, "original_length": 64, "length": 200},
    "llama3": {"factor": 8.0, "original_length": 256, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0, "original_length": 64, "beta_fast": 32.0, "beta_slow": 1.0},
}


def torch_frequencies(spec: RopeSpec, head_dim: int, max_length: int) -> tuple[np.ndarray, float]:
    """transformers' own frequencies and attention factor."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": spec.kind,
        "rope_theta": spec.theta,
        "factor": spec.factor,
        "partial_rotary_factor": spec.dim / head_dim,
        "original_max_position_embeddings": spec.original_length,
        "low_freq_factor": spec.low_freq_factor,
        "high_freq_factor": spec.high_freq_factor,
        "beta_fast": spec.beta_fast,
        "beta_slow": spec.beta_slow,
        "truncate": spec.truncate,
    }
    config = SimpleNamespace(
        rope_parameters=parameters,
        head_dim=head_dim,
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=max_length,
        standardize_rope_params=lambda: None,
    )
    kind = "linear" if spec.kind == "default" else spec.kind
    found, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=spec.length)
    return found.numpy(), float(factor)


@pytest.mark.parametrize("head_dim, dim", [(64, 64), (128, 128), (64, 32), (80, 32)])
@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
@pytest.mark.parametrize("kind", ROPE_KINDS)
def test_frequencies_match_transformers(kind: str, theta: float, head_dim: int, dim: int) -> None:
    spec = RopeSpec.create(kind, theta, dim=dim, **SCALED[kind])
    theirs, factor = torch_frequencies(spec, head_dim, spec.original_length or 2048)
    np.testing.assert_allclose(frequencies(spec), theirs, rtol=1e-6)
    assert frequencies(spec).dtype == np.float32 and frequencies(spec).shape == (dim // 2,)
    if kind == "yarn":
        assert yarn_attention_factor(spec.factor) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("factor, original", [(2.0, 4096), (16.0, 32), (40.0, 4096)])
def test_yarn_ramps_match_transformers(factor: float, original: int, truncate: bool) -> None:
    spec = RopeSpec.create("yarn", 1e4, dim=64, factor=factor, original_length=original, truncate=truncate)
    theirs, _ = torch_frequencies(spec, 64, int(original * factor))
    np.testing.assert_allclose(frequencies(spec), theirs, rtol=1e-6)


def test_yarn_attention_factor_with_both_scales() -> None:
    """DeepSeek's mscale pair: equal settings cancel."""
    assert yarn_attention_factor(40.0, 1.0, 1.0) == 1.0
    assert yarn_attention_factor(40.0, 0.707, 1.0) == pytest.approx(0.9210, abs=1e-4)
    assert yarn_attention_factor(0.5) == 1.0


def test_attention_factor_multiplies_and_divides_out() -> None:
    plain = RopeSpec.create("yarn", dim=2, factor=4.0, original_length=64)
    scaled = RopeSpec.create("yarn", dim=2, factor=4.0, original_length=64, attention_factor=1.25)
    at = jnp.array([5])
    got = rotate(ONE, at, scaled)
    np.testing.assert_allclose(got[:, :2], 1.25 * rotate(ONE, at, plain)[:, :2], rtol=1e-6)
    np.testing.assert_array_equal(got[:, 2:], ONE[:, 2:])  # channels that do not turn are not scaled either
    np.testing.assert_allclose(unrotate(got, at, scaled), ONE, atol=1e-6)


def test_rotation_matches_transformers_llama() -> None:
    """The whole rotation, partial rotary included, against transformers' apply_rotary_pos_emb."""
    import torch
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    spec = RopeSpec.create(theta=5e5, dim=16)
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 16)).astype(np.float32)
    pos = np.array([[0, 1, 2, 3, 4], [7, 8, 9, 300, 301]], np.int32)
    angle = torch.tensor(pos)[..., None].float() * torch.tensor(frequencies(spec).copy())
    cos, sin = (f(torch.cat([angle, angle], -1)) for f in (torch.cos, torch.sin))
    theirs, _ = apply_rotary_pos_emb(torch.tensor(x), torch.tensor(x), cos, sin)
    got = rotate(jnp.asarray(x), jnp.asarray(pos)[:, None], spec)
    np.testing.assert_allclose(got, theirs.numpy(), atol=1e-5)
    wide = jnp.concatenate([jnp.asarray(x), jnp.ones((2, 3, 5, 4))], axis=-1)
    partial = rotate(wide, jnp.asarray(pos)[:, None], spec)
    np.testing.assert_array_equal(partial[..., :16], got)
    assert bool((partial[..., 16:] == 1.0).all())


def test_interleaved_is_a_permutation_of_half_split() -> None:
    x, at = jax.random.normal(jax.random.key(1), (3, 10)), jnp.array([3, 50, 7])
    half, pairs = RopeSpec.create(dim=8), RopeSpec.create(dim=8, interleaved=True)
    np.testing.assert_array_equal(interleave(rotate(x, at, half), 8), rotate(interleave(x, 8), at, pairs))
    np.testing.assert_array_equal(deinterleave(interleave(x, 8), 8), x)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 2000), st.booleans())
def test_scores_depend_on_distance_only(p: int, q: int, shift: int, interleaved: bool) -> None:
    spec = RopeSpec.create(dim=8, interleaved=interleaved)
    a, b = jax.random.normal(jax.random.key(2), (2, 1, 8))

    def score(p: int, q: int) -> float:
        left, right = rotate(a, jnp.array([p]), spec), rotate(b, jnp.array([q]), spec)
        return float((left * right).sum())

    assert score(p, q) == pytest.approx(score(p + shift, q + shift), abs=5e-3)


def test_empty_slots_do_not_turn_and_stay_finite() -> None:
    x = jnp.ones((2, 4))
    np.testing.assert_array_equal(rotate(x, jnp.array([-1, 0]), RopeSpec.create(dim=4)), x)


def test_bf16_vectors_turn_with_fp32_angles() -> None:
    spec = RopeSpec.create(theta=1e6, dim=64)
    x = jax.random.normal(jax.random.key(3), (1, 64)).astype(jnp.bfloat16)
    at = jnp.array([32_000])
    want = rotate(x.astype(jnp.float32), at, spec)
    got = rotate(x, at, spec)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=2e-2)


def test_traced_frequencies_give_the_same() -> None:
    """A scan over layers that differ in their frequencies only."""
    specs = [RopeSpec.create(theta=t, dim=4) for t in (1e4, 1e6)]
    table = jnp.stack([jnp.asarray(frequencies(s)) for s in specs])
    x, at = jax.random.normal(jax.random.key(4), (2, 1, 3, 5, 4)), jnp.arange(5)[None, None]

    def body(carry: None, layer: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        return carry, rotate_with(layer[0], at, layer[1], False, 4, 1.0)

    _, got = jax.jit(lambda: jax.lax.scan(body, None, (x, table)))()
    for i, spec in enumerate(specs):
        np.testing.assert_allclose(got[i], rotate(x[i], at, spec), atol=1e-6)


def test_dynamic_ntk_records_its_length_or_refuses() -> None:
    spec = RopeSpec.create("dynamic", dim=8, factor=2.0, original_length=16)
    with pytest.raises(KvxError, match="depends on the sequence length"):
        frequencies(spec)
    with pytest.raises(KvxError, match="depends on the sequence length"):
        rotate(jnp.ones((1, 8)), jnp.array([0]), spec)
    plain = RopeSpec.create(dim=8)
    np.testing.assert_array_equal(frequencies(spec, 16), frequencies(plain))
    assert frequencies(spec, 64)[1] < frequencies(plain)[1]
    geometry = CacheGeometry((LayerGeometry(1, 8, 8, rope=spec), LayerGeometry(1, 8, 8, rope=plain)))
    recorded = record_length(geometry, 64)
    assert recorded.layers[0].rope is not None and recorded.layers[0].rope.length == 64
    assert recorded.layers[1] == geometry.layers[1]
    np.testing.assert_array_equal(frequencies(recorded.layers[0].rope), frequencies(spec, 64))
    with pytest.raises(KvxError, match="recorded for 64"):
        record_length(recorded, 65)
    assert with_length(spec, 3) == with_length(spec, 16)  # short sequences share one spec, hence one compilation


def test_refusals_name_the_reason() -> None:
    with pytest.raises(KvxError, match="'longrope' is not supported"):
        RopeSpec.create("longrope", dim=4)
    with pytest.raises(KvxError, match="even"):
        RopeSpec.create(dim=5)
    with pytest.raises(KvxError, match="original_length"):
        RopeSpec.create("yarn", dim=4)
    with pytest.raises(KvxError, match="one axis less"):
        rotate(jnp.ones((2, 3, 5, 4)), jnp.zeros((2, 5), jnp.int32), RopeSpec.create(dim=4))
    with pytest.raises(KvxError, match="head_dim"):
        rotate(jnp.ones((5, 4)), jnp.arange(5), RopeSpec.create(dim=8))
