"""A kvx model as transformers describes it: configuration and tensors, the weight table read backwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from kvx.cache.geometry import RopeSpec
from kvx.errors import KvxError
from kvx.models.config import ModelConfig
from kvx.models.decoder import layer_weights
from kvx.models.model import Model
from kvx.models.weight_table import Row, table

_PREFIX = {"gpt2": "transformer.", "opt": "model."}
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of a model; :func:`kvx.models.hf_config.from_hf_config` reads it back unchanged.

    Args:
        config: static facts.

    Returns:
        Fields as transformers 5 writes them.

    Raises:
        KvxError: interleaved RoPE, which the transformers families have no field for.

    Example:
        >>> from kvx.models.config import tiny_config
        >>> from kvx.models.hf_config import from_hf_config
        >>> from_hf_config(to_hf_config(tiny_config())) == tiny_config()
        True
    """
    c = config
    learned = {"gpt2": _gpt2, "opt": _opt}
    if c.family in learned:
        return learned[c.family](c)
    kinds = ["sliding_attention" if window else "full_attention" for window in c.windows]
    ropes = {kind: _rope(rope, c) for kind, rope in zip(kinds, c.ropes, strict=True) if rope is not None}
    fields = {
        "model_type": c.family,
        "vocab_size": c.vocab_size,
        "hidden_size": c.dim,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.ffn_dim,
        "max_position_embeddings": c.max_positions,
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied,
        "attention_bias": c.out_bias,
        "sliding_window": next((window for window in c.windows if window), None),
        "rope_parameters": ropes if c.family == "gemma3_text" else next(iter(ropes.values())),
    }
    return fields | _family_fields(c, kinds)


def _family_fields(c: ModelConfig, kinds: list[str]) -> dict[str, Any]:
    activation = _ACTIVATIONS[c.activation]
    if c.family == "gemma3_text":
        return {
            "hidden_activation": activation,
            "layer_types": kinds,
            "query_pre_attn_scalar": _whole(c.score_scale**-2),
            "attn_logit_softcapping": c.attn_softcap,
            "final_logit_softcapping": c.final_softcap,
        }
    if c.family in ("qwen2", "qwen3"):
        sliding = any(c.windows)
        return {"hidden_act": activation, "use_sliding_window": sliding, "layer_types": kinds}
    return {"hidden_act": activation} | ({"mlp_bias": c.mlp_bias} if c.family == "llama" else {})


def _rope(rope: RopeSpec, c: ModelConfig) -> dict[str, Any]:
    if rope.interleaved:
        raise KvxError("transformers' families rotate halves, this model rotates neighbours; it has no equal there.")
    fields: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.dim != c.head_dim:
        fields["partial_rotary_factor"] = rope.dim / c.head_dim
    if rope.kind != "default":
        fields["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        fields["original_max_position_embeddings"] = rope.original_length
    if rope.kind == "llama3":
        fields |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        fields |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        fields["attention_factor"] = rope.attention_factor
    return fields


def _gpt2(c: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "vocab_size": c.vocab_size,
        "n_embd": c.dim,
        "n_layer": c.num_layers,
        "n_head": c.heads,
        "n_inner": c.ffn_dim,
        "n_positions": c.max_positions,
        "layer_norm_epsilon": c.norm_eps,
        "activation_function": "gelu_new" if c.activation == "gelu_tanh" else _ACTIVATIONS[c.activation],
        "scale_attn_weights": c.score_scale != 1.0,
        "tie_word_embeddings": c.tied,
    }


def _opt(c: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "opt",
        "vocab_size": c.vocab_size,
        "hidden_size": c.dim,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.heads,
        "ffn_dim": c.ffn_dim,
        "max_position_embeddings": c.max_positions,
        "activation_function": _ACTIVATIONS[c.activation],
        "tie_word_embeddings": c.tied,
    }


def hf_tensors(model: Model) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of the model under its transformers name, one at a time.

    Args:
        model: any model.

    Yields:
        ``(name, array)``, as ``load_state_dict`` of the transformers class takes them (a tied head is not repeated).

    Example:
        >>> from kvx.models.random_model import random_model
        >>> name, array = next(hf_tensors(random_model()))
        >>> name, array.shape
        ('model.embed_tokens.weight', (64, 32))
    """
    c, layers = model.config, layer_weights(model)
    shift = 1.0 - c.norm_offset if c.family == "gemma3_text" else 0.0  # GGUF norms come with the one added
    prefix = _PREFIX.get(c.family, "model.")
    rows = table(c)
    for row in rows:
        if row.part is not None and row.part[0]:
            continue
        group = [row] if row.part is None else [other for other in rows if other.hf == row.hf]
        for i in range(c.num_layers if row.per_layer else 1):
            tree = layers[i] if row.per_layer else model.params
            parts = [_stored(other, _get(tree, other)) for other in group]
            array = np.concatenate(parts)
            array = array - np.asarray(shift, array.dtype) if row.path[-1] == "scale" and shift else array
            name = row.name("hf", i)
            head = "" if name.startswith("lm_head") else prefix
            yield head + name, np.ascontiguousarray(array.T if row.kind == "conv1d" else array)


def _get(tree: dict[str, Any], row: Row) -> jax.Array:
    for step in row.path[1:] if row.per_layer else row.path:
        tree = tree[step]
    return tree  # type: ignore[return-value]


def _stored(row: Row, x: jax.Array) -> np.ndarray:
    """One parameter as matrix ``[out, in]``, or flat."""
    return np.asarray(x).reshape(row.matrix)


def _whole(value: float) -> int | float:
    """The integer that a number is but for rounding (transformers checks the type of some fields), else the number."""
    return round(value) if abs(value - round(value)) < 1e-6 * abs(value) else round(value, 6)
