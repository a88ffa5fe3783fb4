"""The weight table: misfits reported at once, biases, tied heads (CASES 21, 23)."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from kvx.errors import KvxError
from kvx.models.export import hf_tensors
from kvx.models.random_model import random_model
from kvx.models.weights import assemble, resolve_tied


def state_of(model):
    return dict(hf_tensors(model))


def test_tensors_go_back(name, oracle):
    twin = oracle(name)
    own = {key: value.numpy() for key, value in twin.torch_model.state_dict().items()}
    for key, array in state_of(twin.model).items():
        np.testing.assert_array_equal(array, own[key], err_msg=key)


def test_stacked_and_unrolled_hold_the_same():
    plain, stacked = random_model(), random_model(stacked=True)
    for a, b in zip(jax.tree.leaves(plain.stack()), jax.tree.leaves(stacked), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(jax.tree.leaves(stacked.unstack()), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(a, b)


def test_everything_that_does_not_fit_is_listed_at_once(oracle):
    """Qwen2 has q, k, v biases and no o bias: a reader without biases must not pass silently."""
    model = oracle("qwen2-gqa").model
    state = state_of(model)
    del state["model.layers.0.mlp.up_proj.weight"], state["model.norm.weight"]
    config = dataclasses.replace(model.config, qkv_bias=False)
    with pytest.raises(KvxError) as caught:
        assemble(config, state.__getitem__, state)
    message = str(caught.value)
    assert "missing layers.0.mlp.up_proj.weight, norm.weight" in message
    for layer in range(2):
        for x in "qkv":
            assert f"layers.{layer}.self_attn.{x}_proj.bias" in message
    assert "o_proj.bias" not in message


def test_wrong_shapes_are_listed(oracle):
    model = oracle("llama-gqa").model
    state = state_of(model)
    state["model.layers.1.self_attn.k_proj.weight"] = np.zeros((32, 16), np.float32)  # transposed, same size
    state["model.layers.0.input_layernorm.weight"] = np.zeros(31, np.float32)
    with pytest.raises(KvxError, match=r"layers.0.input_layernorm.weight.*layers.1.self_attn.k_proj.weight"):
        assemble(model.config, state.__getitem__, state)


def test_buffers_and_other_towers_are_no_weights(oracle):
    model = oracle("llama-gqa").model
    state = state_of(model) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4)}
    state = {f"language_model.{key}": value for key, value in state.items()} | {"vision_tower.x.weight": np.zeros(3)}
    params = assemble(model.config, state.__getitem__, state)
    np.testing.assert_array_equal(params["layers"][1]["wk"], model.params["layers"][1]["wk"])


def tied_and_state():
    from kvx.models.config import tiny_config

    model = random_model(tiny_config(tied=True))
    return model.config, state_of(model)


def test_tied_without_a_head():
    config, state = tied_and_state()
    assert "lm_head.weight" not in state
    assert resolve_tied(config, state, state.__getitem__).tied
    assert "head" not in assemble(config, state.__getitem__, state)


def test_untied_flag_without_the_tensor_is_tied_and_says_so():
    config, state = tied_and_state()
    flagged = dataclasses.replace(config, tied=False)
    with pytest.warns(UserWarning, match="no lm_head.weight: tied"):
        settled = resolve_tied(flagged, state, state.__getitem__)
    assert settled.tied
    assert "head" not in assemble(settled, state.__getitem__, state)


def test_tied_flag_with_a_redundant_tensor():
    config, state = tied_and_state()
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    assert resolve_tied(config, state, state.__getitem__).tied
    assert "head" not in assemble(config, state.__getitem__, state)
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    with pytest.warns(UserWarning, match="differs"):
        settled = resolve_tied(config, state, state.__getitem__)
    assert not settled.tied
    np.testing.assert_array_equal(assemble(settled, state.__getitem__, state)["head"], state["lm_head.weight"])


def test_bfloat16_torch_weights(oracle):
    import torch

    model = oracle("llama-gqa").model
    state = {key: torch.from_numpy(value).to(torch.bfloat16) for key, value in state_of(model).items()}
    params = assemble(model.config, state.__getitem__, state)
    np.testing.assert_array_equal(params["embed"], state["model.embed_tokens.weight"].float().numpy())
