"""GGUF metadata -> a transformers-style configuration, for the architectures that kvx decodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvx.errors import KvxError
from kvx.models.gguf_file import GgufFile

Fields = dict[str, Any]
LLAMA3_RAMP = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def gguf_config(file: GgufFile) -> Fields:
    """The configuration that a GGUF's metadata states, under transformers' names.

    Args:
        file: an open GGUF file.

    Returns:
        A ``config.json`` as a dict, for :func:`kvx.models.hf_config.from_hf_config`.

    Raises:
        KvxError: an architecture or option that kvx does not decode, by name, or a missing key.

    Example:
        >>> from pathlib import Path
        >>> from kvx.models.gguf_config import gguf_config
        >>> from kvx.models.gguf_file import GgufFile, TensorInfo
        >>> meta = {"general.architecture": "llama", "llama.embedding_length": 64, "llama.block_count": 2,
        ...         "llama.feed_forward_length": 128, "llama.attention.head_count": 4, "llama.context_length": 256,
        ...         "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 100000.0}
        >>> embed = TensorInfo("token_embd.weight", (32, 64), "F32", 0, 8192)
        >>> config = gguf_config(GgufFile(Path("x.gguf"), meta, {embed.name: embed}))
        >>> config["model_type"], config["head_dim"], config["rope_parameters"]["rope_theta"]
        ('llama', 16, 100000.0)
    """
    arch = file.metadata["general.architecture"]
    if arch not in _ARCHITECTURES:
        raise KvxError(
            f"{file.path.name}: architecture {arch!r} is not supported; expected one of {', '.join(_ARCHITECTURES)}; "
            "pass a model of one of these families."
        )
    return _ARCHITECTURES[arch](_Keys(file, arch))


class _Keys:
    """Metadata of one architecture, with the errors that a missing or odd key deserves."""

    def __init__(self, file: GgufFile, arch: str):
        self.file, self.arch = file, arch

    def error(self, sentence: str) -> KvxError:
        return KvxError(f"{self.file.path.name}: {sentence}")

    def get(self, key: str, default: Any = None) -> Any:
        value = self.file.metadata.get(f"{self.arch}.{key}", default)
        if isinstance(value, list) and value and not isinstance(value[0], bool):
            if len(set(value)) > 1:
                raise self.error(f"{self.arch}.{key} differs between layers: {value}; kvx decodes uniform layers.")
            return value[0]
        return value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise self.error(f"{self.arch}.{key} is missing from the header; convert the model again.")
        return value

    def eps(self, key: str) -> float:
        """A float32 as the shortest decimal that means it: 1e-06, not 9.999999974752427e-07."""
        return float(str(np.float32(self.need(key))))

    def tensor(self, name: str) -> bool:
        return name in self.file.tensors

    @property
    def vocab(self) -> int:
        if not self.tensor("token_embd.weight"):
            raise self.error("there is no token_embd.weight, so this is not a whole model; pass the full GGUF.")
        return self.file.tensors["token_embd.weight"].shape[0]

    def token_ids(self) -> Fields:
        meta = self.file.metadata
        return {f"{name}_token_id": meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}


def _llama_like(keys: _Keys, model_type: str, **extra: Any) -> Fields:
    if keys.get("expert_count"):
        raise keys.error("mixtures of experts are not supported; pass a dense model.")
    hidden, heads = keys.need("embedding_length"), keys.need("attention.head_count")
    head_dim = keys.get("attention.key_length") or hidden // heads
    if keys.get("attention.value_length", head_dim) != head_dim:
        raise keys.error(f"keys have width {head_dim}, values another; kvx decodes equal widths.")
    return {
        "model_type": model_type,
        "architectures": [_CLASSES[model_type]],
        "vocab_size": keys.vocab,
        "hidden_size": hidden,
        "intermediate_size": keys.need("feed_forward_length"),
        "num_hidden_layers": keys.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.need("context_length"),
        "rms_norm_eps": keys.eps("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "rope_parameters": _rope(keys, head_dim),
        "tie_word_embeddings": not keys.tensor("output.weight"),
        **keys.token_ids(),
        **extra,
    }


def _rope(keys: _Keys, head_dim: int) -> Fields:
    """RoPE of a uniform model: base, length extension, partial rotary."""
    rope: Fields = {"rope_type": "default"}
    if (theta := keys.get("rope.freq_base")) is not None:
        rope["rope_theta"] = float(theta)
    rotated = keys.get("rope.dimension_count", head_dim)
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    kind = keys.get("rope.scaling.type", "none")
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear"))
    if keys.tensor("rope_freqs.weight"):
        return rope | _llama3(keys, rotated, rope.get("rope_theta", 0.0))
    if kind == "none" and keys.get("rope.scale_linear", 1.0) != 1.0:
        kind = "linear"
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": float(factor)}
    if kind == "yarn":
        return rope | _yarn(keys, float(factor))
    if kind != "none":
        raise keys.error(f"RoPE scaling {kind!r} is not supported; expected none, linear, yarn or Llama 3's.")
    return rope


def _yarn(keys: _Keys, factor: float) -> Fields:
    """llama.cpp multiplies its own ``attn_factor`` with YaRN's ``0.1 ln(factor) + 1``."""
    original = keys.need("rope.scaling.original_context_length")
    yarn: Fields = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for name in ("beta_fast", "beta_slow"):
        if (value := keys.get(f"rope.scaling.yarn_{name}")) is not None:
            yarn[name] = float(value)
    attention = keys.get("rope.scaling.yarn_attn_factor", keys.get("rope.scaling.attn_factor"))
    if attention is not None:
        yarn["attention_factor"] = float(attention) * (0.1 * float(np.log(factor)) + 1.0)
    return yarn


def _llama3(keys: _Keys, dim: int, theta: float) -> Fields:
    """GGUF keeps Llama 3's scaling as divisors of the frequencies: recover the parameters that made them."""
    divisors = keys.file.read("rope_freqs.weight").astype(np.float64)
    if np.all(divisors == 1.0):
        return {}
    factor = float(divisors.max())
    turns = LLAMA3_RAMP["original_max_position_embeddings"] * theta ** (-np.arange(0, dim, 2) / dim) / (2 * np.pi)
    low, high = LLAMA3_RAMP["low_freq_factor"], LLAMA3_RAMP["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    if divisors.shape != turns.shape or not np.allclose(divisors, 1.0 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise keys.error(
            "rope_freqs.weight is not Llama 3's scaling (8192 tokens, factors 1 and 4), the only one that kvx can "
            "recover; pass the original Hugging Face folder."
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3_RAMP}


def _llama(keys: _Keys) -> Fields:
    if window := keys.get("attention.sliding_window"):
        return _llama_like(keys, "mistral", sliding_window=window)
    bias = keys.tensor("blk.0.attn_q.bias")
    return _llama_like(keys, "llama", attention_bias=bias)


def _qwen3(keys: _Keys) -> Fields:
    return _llama_like(keys, "qwen3", attention_bias=keys.tensor("blk.0.attn_q.bias"))


def _gemma3(keys: _Keys) -> Fields:
    layers = keys.need("block_count")
    pattern = keys.get("attention.sliding_window_pattern", 6)
    sliding = pattern if isinstance(pattern, list) else [bool((i + 1) % pattern) for i in range(layers)]
    types = ["sliding_attention" if flag else "full_attention" for flag in sliding]
    config = _llama_like(keys, "gemma3_text", hidden_activation="gelu_pytorch_tanh", layer_types=types)
    del config["hidden_act"]
    local = {"rope_type": "default", "rope_theta": float(keys.get("rope.freq_base_swa", 10000.0))}
    config["rope_parameters"] = {"sliding_attention": local, "full_attention": config["rope_parameters"]}
    # 27B scales its scores by hidden/heads; every other size by the head dim.
    width = config["hidden_size"] // config["num_attention_heads"] if layers == 62 else config["head_dim"]
    return config | {
        "sliding_window": keys.need("attention.sliding_window"),
        "query_pre_attn_scalar": width,
        "attn_logit_softcapping": keys.get("attn_logit_softcapping"),
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
    }


def _gpt2(keys: _Keys) -> Fields:
    return {
        "model_type": "gpt2",
        "architectures": [_CLASSES["gpt2"]],
        "vocab_size": keys.vocab,
        "n_embd": keys.need("embedding_length"),
        "n_layer": keys.need("block_count"),
        "n_head": keys.need("attention.head_count"),
        "n_positions": keys.need("context_length"),
        "n_inner": keys.need("feed_forward_length"),
        "layer_norm_epsilon": keys.eps("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        "tie_word_embeddings": not keys.tensor("output.weight"),
        **keys.token_ids(),
    }


_ARCHITECTURES: dict[str, Callable[[_Keys], Fields]] = {
    "llama": _llama,
    "qwen2": lambda keys: _llama_like(keys, "qwen2"),
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
}
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
