"""Tiny random transformers models and their kvx twins, each made once a session."""

from __future__ import annotations

import functools
import inspect
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers

from kvx.models.model import Model
from kvx.models.weights import from_transformers

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}
HEADS = {"mha": 4, "gqa": 2, "mqa": 1}
ROPE = {"rope_type": "default", "rope_theta": 500000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]


def _gemma(**kwargs: Any) -> Any:
    fields = {
        **SHAPE,
        "num_hidden_layers": 3,
        "layer_types": LAYERS,
        "sliding_window": 8,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        **kwargs,
    }
    return transformers.Gemma3TextConfig(**fields)


def _config(name: str) -> Any:
    family, _, variant = name.partition("-")
    heads = {"num_key_value_heads": HEADS.get(variant, 2)}
    if family == "llama":
        rope = {"llama3": LLAMA3, "yarn": YARN, "linear": {**ROPE, "rope_type": "linear", "factor": 2.0}}
        bias = variant == "bias"
        parameters = rope.get(variant, ROPE)
        return transformers.LlamaConfig(
            **SHAPE, **heads, rope_parameters=parameters, attention_bias=bias, mlp_bias=bias, tie_word_embeddings=bias
        )
    if family == "mistral":
        return transformers.MistralConfig(**SHAPE, **heads, rope_parameters=ROPE, sliding_window=8)
    if family == "qwen2":
        sliding = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
        extra = sliding if variant == "sliding" else {}
        return transformers.Qwen2Config(**SHAPE, **heads, rope_parameters=YARN if variant == "yarn" else ROPE, **extra)
    if family == "qwen3":
        return transformers.Qwen3Config(**SHAPE, **heads, rope_parameters=ROPE, head_dim=16)
    if family == "gemma3":
        scaled = {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
        }
        return _gemma(**heads, **({"rope_parameters": scaled} if variant == "scaled" else {}))
    if family == "gpt2":
        shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "bos_token_id": 0, "eos_token_id": 0}
        return transformers.GPT2Config(vocab_size=97, **shape)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48}
    return transformers.OPTConfig(vocab_size=97, max_position_embeddings=128, **shape)


NAMES = (
    *("llama-mha", "llama-gqa", "llama-mqa", "llama-bias", "llama-linear", "llama-llama3", "llama-yarn"),
    *("mistral-gqa", "mistral-mqa", "qwen2-mha", "qwen2-gqa", "qwen2-mqa", "qwen2-sliding", "qwen2-yarn"),
    *("qwen3-mha", "qwen3-gqa", "qwen3-mqa", "gemma3-mha", "gemma3-gqa", "gemma3-mqa", "gemma3-scaled"),
    *("gpt2-mha", "opt-mha"),
)


class Oracle(NamedTuple):
    """A torch model and what it says of a token array."""

    torch_model: Any
    model: Model

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return self.torch_model(torch.tensor(tokens)).logits.float().numpy()

    def greedy(self, tokens: np.ndarray, count: int) -> list[int]:
        ids = torch.tensor(tokens)
        settings = transformers.GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0)
        self.torch_model.generation_config = settings  # no end-of-sequence token: it would be suppressed or stop early
        with torch.no_grad():
            out = self.torch_model.generate(ids, attention_mask=torch.ones_like(ids))
        return out[:, tokens.shape[1] :].tolist()

    def keys_values(self, tokens: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Un-rotated keys (after any key norm) and values ``[B,K,T,D]`` of every layer, caught by hooks."""
        caught: dict[str, torch.Tensor] = {}
        hooks = [
            module.register_forward_hook(functools.partial(_keep, caught, name))
            for name, module in self.torch_model.named_modules()
            if name.rsplit(".", 1)[-1] in ("k_proj", "k_norm", "v_proj", "c_attn")
        ]
        self.logits(tokens)
        for hook in hooks:
            hook.remove()
        return [self._layer(caught, i) for i in range(self.model.config.num_layers)]

    def _layer(self, caught: dict[str, torch.Tensor], i: int) -> tuple[np.ndarray, np.ndarray]:
        c = self.model.config
        own = {name.rsplit(".", 1)[-1]: x for name, x in caught.items() if f".{i}." in name}
        if "c_attn" in own:
            k, v = own["c_attn"].split(c.dim, dim=2)[1:]
        else:
            k, v = own.get("k_norm", own["k_proj"]), own["v_proj"]
        batch, length = v.shape[:2]
        if k.ndim == 4 and k.shape[1] == c.kv_heads and k.shape[2] == length:
            k = k.transpose(1, 2)
        shape = (batch, length, c.kv_heads, c.head_dim)
        return tuple(x.reshape(shape).transpose(1, 2).numpy() for x in (k, v))


def _keep(caught: dict[str, torch.Tensor], name: str, module: Any, inputs: Any, output: torch.Tensor) -> None:
    caught[name] = output.detach().clone()


@functools.cache
def make(name: str) -> Oracle:
    """The torch model ``name`` with noisy weights (biases and norms too), and its kvx twin."""
    torch.manual_seed(sum(map(ord, name)))
    config = _config(name)
    config._attn_implementation = "eager"
    torch_model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in torch_model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return Oracle(torch_model, from_transformers(torch_model))


@pytest.fixture
def oracle() -> Any:
    """``oracle("family-variant")``: see :data:`NAMES`."""
    return make


@pytest.fixture
def tokens() -> Any:
    """``tokens(batch, length)``: random ids."""

    def draw(batch: int, length: int, seed: int = 0) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, 97, (batch, length)).astype(np.int32)

    return draw


def pytest_generate_tests(metafunc: Any) -> None:
    """Tests that take ``name`` run for every model."""
    if "name" in inspect.signature(metafunc.function).parameters and not any(
        "name" in str(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize")
    ):
        metafunc.parametrize("name", NAMES)
