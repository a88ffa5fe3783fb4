"""Configurations: nothing lost, nothing guessed (CASES 19, 20, 22)."""

from __future__ import annotations

import pytest
import transformers

from kvx.errors import KvxError
from kvx.models.export import to_hf_config
from kvx.models.hf_config import from_hf_config
from kvx.models.weight_table import table

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0},
        {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
        {"rope_parameters": {"full_attention": {"rope_theta": 500000.0, "rope_type": "default"}}},
    ],
)
def test_rope_base_in_three_places(rope):
    config = from_hf_config({**LLAMA, **rope})
    assert [spec.theta for spec in config.ropes] == [500000.0, 500000.0]


def test_rope_base_of_a_transformers_5_object():
    parameters = {"rope_type": "default", "rope_theta": 500000.0}
    made = transformers.LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"}, rope_parameters=parameters)
    assert getattr(made, "rope_theta", 10000.0) == 10000.0  # the trap
    assert from_hf_config(made).ropes[0].theta == 500000.0


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_rope_scaling_beside_rope_parameters_is_not_lost(key):
    base = {"rope_theta": 500000.0, "rope_type": "default"}
    config = from_hf_config({**LLAMA, "rope_parameters": base, "rope_scaling": {key: "linear", "factor": 8.0}})
    assert {(rope.theta, rope.kind, rope.factor) for rope in config.ropes} == {(500000.0, "linear", 8.0)}


def test_no_rope_base_is_refused():
    with pytest.raises(KvxError, match="no RoPE base"):
        from_hf_config(LLAMA)


@pytest.mark.parametrize("kind", ["longrope", "mrope", "proportional", "su"])
def test_unknown_rope_types_are_refused_by_name(kind):
    with pytest.raises(KvxError, match=kind):
        from_hf_config({**LLAMA, "rope_theta": 1e4, "rope_scaling": {"type": kind, "factor": 2.0}})


def test_unknown_family_activation_and_missing_fields():
    with pytest.raises(KvxError, match="'mamba' is not supported"):
        from_hf_config({"model_type": "mamba"})
    with pytest.raises(KvxError, match="'mish'"):
        from_hf_config({**LLAMA, "rope_theta": 1e4, "hidden_act": "mish"})
    with pytest.raises(KvxError, match="vocab_size, hidden_size"):
        from_hf_config({"model_type": "llama", "rope_theta": 1e4, "num_hidden_layers": 2})


def test_head_dim_is_not_hidden_over_heads():
    fields = {**LLAMA, "model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16, "rope_theta": 1e6}
    given = from_hf_config({**fields, "num_key_value_heads": 8, "head_dim": 128})
    assert given.head_dim == 128 and given.geometry.layers[0].shapes == (8, 128, 128)
    assert given.ropes[0].dim == 128 and given.score_scale == 128**-0.5
    shapes = {row.path[-1]: row.shape for row in table(given) if row.per_layer}
    assert shapes["wq"] == (16, 128, 1024) and shapes["wo"] == (1024, 16, 128) and shapes["wk"] == (8, 128, 1024)
    assert from_hf_config(fields).head_dim == 128  # the family's default, as in transformers
    assert from_hf_config({**LLAMA, "rope_theta": 1e4}).head_dim == 8


def test_gemma_has_two_bases_and_scales_only_the_global_one():
    fields = {"model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 512}
    config = from_hf_config({**fields, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert [rope.theta for rope in config.ropes] == [1e4] * 5 + [1e6]
    assert [rope.kind for rope in config.ropes] == ["default"] * 5 + ["linear"]
    assert [rope.factor for rope in config.ropes] == [1.0] * 5 + [8.0]
    assert config.windows == (512,) * 5 + (None,)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}},
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            }
        },
    ],
    ids=["top level", "one entry", "per layer type"],
)
def test_gemma_local_layers_keep_their_base_however_it_is_written(rope):
    config = from_hf_config({"model_type": "gemma3_text", "num_hidden_layers": 6, **rope})
    found = [(spec.theta, spec.kind, spec.factor) for spec in config.ropes]
    assert found == [(1e4, "default", 1.0)] * 5 + [(1e6, "linear", 8.0)]


def test_gemma_legacy_names_and_the_multimodal_wrapper():
    text = {"model_type": "gemma3_text", "num_hidden_layers": 6, "rope_theta": 2e6, "rope_local_base_freq": 3e4}
    assert [rope.theta for rope in from_hf_config(text).ropes] == [3e4] * 5 + [2e6]
    wrapped = from_hf_config({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    assert wrapped.tied and wrapped.ropes == from_hf_config(text).ropes
    assert wrapped.score_scale == 256**-0.5 and wrapped.norm_offset == 1.0


def test_windows():
    assert from_hf_config({**LLAMA, "model_type": "mistral", "rope_theta": 1e4, "sliding_window": 9}).windows == (9, 9)
    assert from_hf_config({**LLAMA, "model_type": "mistral", "rope_theta": 1e4, "sliding_window": None}).windows == (
        None,
        None,
    )
    qwen = {**LLAMA, "model_type": "qwen2", "rope_theta": 1e4, "sliding_window": 9, "max_window_layers": 1}
    assert from_hf_config({**qwen, "use_sliding_window": False}).windows == (None, None)
    assert from_hf_config({**qwen, "use_sliding_window": True}).windows == (None, 9)


def test_yarn_attention_factor():
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    spec = from_hf_config({**LLAMA, "rope_theta": 1e6, "rope_scaling": rope}).ropes[0]
    assert spec.attention_factor == pytest.approx(1.1386294361)
    assert spec.original_length == 2048
    given = from_hf_config({**LLAMA, "rope_theta": 1e6, "rope_scaling": {**rope, "attention_factor": 1.5}})
    assert given.ropes[0].attention_factor == 1.5


@pytest.mark.parametrize(
    ("family", "option"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("opt", {"do_layer_norm_before": False}),
        ("opt", {"word_embed_proj_dim": 16}),
        ("gemma3_text", {"use_bidirectional_attention": True}),
    ],
)
def test_options_that_are_not_computed_are_refused(family, option):
    made = transformers.AutoConfig.for_model(family).to_dict()
    with pytest.raises(KvxError, match=next(iter(option))):
        from_hf_config({**made, **option})


def test_configurations_go_back(name, oracle):
    config = oracle(name).model.config
    assert from_hf_config(to_hf_config(config)) == config


def test_configurations_are_hashable(name, oracle):
    assert len({oracle(name).model.config, from_hf_config(oracle(name).torch_model.config)}) == 1
