"""A transformers ``config.json`` as a :class:`ModelConfig`: seven families, nothing guessed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvx.cache.geometry import RopeSpec
from kvx.cache.rope import yarn_attention_factor
from kvx.errors import KvxError
from kvx.models.config import ModelConfig

Fields = Mapping[str, Any]

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
# What transformers' own config class assumes when a file is silent: Google's multimodal files rely on it.
_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}


def from_hf_config(config: Any) -> ModelConfig:
    """Read a transformers configuration.

    The RoPE base is looked up in all three places where files keep it (top level, ``rope_parameters``, one entry per
    layer type) and never defaulted: a file without it is refused, since a wrong base gives fluent nonsense. Gemma 3 is
    the exception, whose own published files leave it to the family's two fixed bases.

    Args:
        config: the parsed ``config.json``, or a transformers ``PretrainedConfig``.

    Returns:
        The decoder's static facts.

    Raises:
        KvxError: unknown family, RoPE type or activation; a missing field; an option of the family that this decoder
            does not compute.

    Example:
        >>> from kvx.models.hf_config import from_hf_config
        >>> config = from_hf_config({
        ...     "model_type": "qwen3", "vocab_size": 64, "hidden_size": 1024, "num_hidden_layers": 2,
        ...     "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
        ...     "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000, "tie_word_embeddings": True})
        >>> config.head_dim, config.ropes[0].theta, config.qk_norm
        (128, 1000000.0, True)
    """
    fields: Fields = config if isinstance(config, Mapping) else config.to_dict()
    family = fields.get("model_type")
    if family == "gemma3":
        text = fields.get("text_config") or {}
        text = text if isinstance(text, Mapping) else text.to_dict()
        fields = {"tie_word_embeddings": fields.get("tie_word_embeddings", True), **text}
        family = "gemma3_text"
    if family not in _FAMILIES:
        raise KvxError(f"model family {family!r} is not supported; expected one of {', '.join(_FAMILIES)}.")
    return _FAMILIES[family](fields)


def _need(fields: Fields, *names: str) -> tuple[Any, ...]:
    missing = [name for name in names if fields.get(name) is None]
    if missing:
        raise KvxError(
            f"the {fields.get('model_type')} configuration lacks {', '.join(missing)}; "
            "expected a complete config.json; download it again or add the fields."
        )
    return tuple(fields[name] for name in names)


def _refuse(fields: Fields, **allowed: Any) -> None:
    """Refuse options that change what the model computes and that this decoder does not implement."""
    for name, value in allowed.items():
        if fields.get(name, value) not in (value, None):
            raise KvxError(
                f"{fields.get('model_type')} with {name}={fields[name]!r} is not supported; expected {value!r}."
            )


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise KvxError(f"activation {name!r} is not supported; expected one of {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[name]


def _layer_types(fields: Fields, layers: int, default: Callable[[int], bool]) -> list[str]:
    """``layer_types`` of the file, or the family's rule (``default(i)``: is layer i sliding?)."""
    types = fields.get("layer_types")
    if types is None:
        return ["sliding_attention" if default(i) else "full_attention" for i in range(layers)]
    unknown = sorted(set(types) - {"sliding_attention", "full_attention"})
    if unknown or len(types) != layers:
        raise KvxError(
            f"layer_types has {len(types)} entries for {layers} layers, of kinds {sorted(set(types))}; "
            "expected one of sliding_attention or full_attention per layer."
        )
    return list(types)


def _rope(fields: Fields, layer_type: str, head_dim: int) -> RopeSpec:
    """RoPE of one layer type."""
    given = fields.get("rope_parameters") or {}
    local = layer_type == "sliding_attention" and "rope_local_base_freq" in fields
    if any(isinstance(value, Mapping) for value in given.values()):
        if not isinstance(given.get(layer_type), Mapping):
            raise KvxError(f"rope_parameters has no entry for {layer_type}; expected one per layer type of the model.")
        rope = dict(given[layer_type])
    else:  # one entry for all layers, except local ones that have a base of their own
        scaling = dict(fields.get("rope_scaling") or {})
        if "type" in scaling:
            scaling.setdefault("rope_type", scaling["type"])
        rope = {} if local else {**given, **scaling}
    theta = rope.get("rope_theta", fields.get("rope_local_base_freq" if local else "rope_theta"))
    if theta is None:
        raise KvxError(
            "the configuration has no RoPE base: rope_theta stands neither at the top level nor in rope_parameters; "
            "add it (the model card gives it; early Llama models use 10000.0)."
        )
    partial = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor")) or 1.0
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    return RopeSpec.create(kind, theta, dim=int(head_dim * partial), **_rope_extension(kind, rope, fields))


def _rope_extension(kind: str, rope: Fields, fields: Fields) -> dict[str, Any]:
    """Fields of :class:`RopeSpec` that the length extensions add."""
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        return {}
    longest = fields.get("max_position_embeddings")
    original = rope.get("original_max_position_embeddings") or fields.get("original_max_position_embeddings") or longest
    factor = rope.get("factor")
    if factor is None and kind == "yarn" and original and longest:
        factor = longest / original
    if factor is None:
        raise KvxError(f"RoPE type {kind!r} needs a factor; the configuration gives none.")
    extension: dict[str, Any] = {"factor": float(factor)}
    if kind == "dynamic":
        extension["original_length"] = longest
    elif kind == "llama3":
        low, high = rope.get("low_freq_factor"), rope.get("high_freq_factor")
        if low is None or high is None:
            raise KvxError("RoPE type 'llama3' needs low_freq_factor and high_freq_factor; one of them is absent.")
        extension |= {"original_length": original, "low_freq_factor": float(low), "high_freq_factor": float(high)}
    elif kind == "yarn":
        extension |= {
            "original_length": original,
            "beta_fast": float(rope.get("beta_fast") or 32),
            "beta_slow": float(rope.get("beta_slow") or 1),
            "truncate": bool(rope.get("truncate", True)),
            "attention_factor": _attention_factor(rope, float(factor)),
        }
    return extension


def _attention_factor(rope: Fields, factor: float) -> float:
    given = rope.get("attention_factor")
    return (
        yarn_attention_factor(factor, rope.get("mscale"), rope.get("mscale_all_dim")) if given is None else float(given)
    )


def _llama_like(fields: Fields, sliding: Callable[[int], bool], **settings: Any) -> ModelConfig:
    """What Llama, Mistral, Qwen2, Qwen3 and Gemma 3 share."""
    vocab, dim, layers, heads, ffn = _need(
        fields, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"
    )
    head_dim = fields.get("head_dim") or dim // heads
    kv_heads = fields.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise KvxError(f"{heads} query heads cannot share {kv_heads} kv heads; expected a multiple.")
    types = _layer_types(fields, layers, sliding)
    window = fields.get("sliding_window")
    rope = {kind: _rope(fields, kind, head_dim) for kind in set(types)}
    defaults = {
        "score_scale": head_dim**-0.5,
        "norm_eps": float(fields.get("rms_norm_eps") or 1e-6),
        "activation": _activation(fields.get("hidden_act") or "silu"),
        "tied": bool(fields.get("tie_word_embeddings") or False),
    }
    return ModelConfig(
        family=fields["model_type"],
        vocab_size=vocab,
        dim=dim,
        num_layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_dim=ffn,
        windows=tuple(window if kind == "sliding_attention" else None for kind in types),
        ropes=tuple(rope[kind] for kind in types),
        max_positions=fields.get("max_position_embeddings") or 2048,
        **{**defaults, **settings},
    )


def _llama(fields: Fields) -> ModelConfig:
    bias = bool(fields.get("attention_bias"))
    plain = {**fields, "layer_types": None, "sliding_window": None}
    return _llama_like(plain, lambda i: False, qkv_bias=bias, out_bias=bias, mlp_bias=bool(fields.get("mlp_bias")))


def _mistral(fields: Fields) -> ModelConfig:
    return _llama_like(fields, lambda i: fields.get("sliding_window") is not None)


def _qwen(fields: Fields, **settings: Any) -> ModelConfig:
    use = bool(fields.get("use_sliding_window"))
    if use:
        _need(fields, "sliding_window")
    else:
        fields = {**fields, "sliding_window": None}
    first = fields.get("max_window_layers")
    return _llama_like(fields, lambda i: use and i >= (28 if first is None else first), **settings)


def _qwen2(fields: Fields) -> ModelConfig:
    return _qwen(fields, qkv_bias=True)


def _qwen3(fields: Fields) -> ModelConfig:
    bias = bool(fields.get("attention_bias"))
    return _qwen({"head_dim": 128, **fields}, qk_norm=True, qkv_bias=bias, out_bias=bias)


def _gemma3(fields: Fields) -> ModelConfig:
    _refuse(fields, use_bidirectional_attention=False)
    nested = any(isinstance(value, Mapping) for value in (fields.get("rope_parameters") or {}).values())
    defaults = {k: v for k, v in _GEMMA3_DEFAULTS.items() if not (nested and k.startswith("rope"))}
    fields = {**defaults, **{k: v for k, v in fields.items() if v is not None}}
    pattern = fields.get("sliding_window_pattern", fields.get("_sliding_window_pattern", 6))
    bias = bool(fields.get("attention_bias"))
    return _llama_like(
        fields,
        lambda i: bool((i + 1) % pattern),
        score_scale=float(fields["query_pre_attn_scalar"]) ** -0.5,
        norm_offset=1.0,
        activation=_activation(fields["hidden_activation"]),
        qk_norm=True,
        post_norms=True,
        qkv_bias=bias,
        out_bias=bias,
        embed_scale=float(fields["hidden_size"]) ** 0.5,
        attn_softcap=fields.get("attn_logit_softcapping"),
        final_softcap=fields.get("final_logit_softcapping"),
        tied=bool(fields.get("tie_word_embeddings", True)),
    )


def _gpt2(fields: Fields) -> ModelConfig:
    _refuse(fields, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    vocab, dim, layers, heads, positions = _need(fields, "vocab_size", "n_embd", "n_layer", "n_head", "n_positions")
    head_dim = dim // heads
    return _learned(
        fields,
        shape=(vocab, dim, layers, heads, fields.get("n_inner") or 4 * dim, positions),
        score_scale=head_dim**-0.5 if fields.get("scale_attn_weights", True) else 1.0,
        norm_eps=float(fields.get("layer_norm_epsilon") or 1e-5),
        activation=_activation(fields.get("activation_function") or "gelu_new"),
    )


def _opt(fields: Fields) -> ModelConfig:
    dim = fields.get("hidden_size")
    _refuse(fields, do_layer_norm_before=True, _remove_final_layer_norm=False, layer_norm_elementwise_affine=True)
    _refuse(fields, enable_bias=True, word_embed_proj_dim=dim)
    vocab, dim, layers, heads, ffn, positions = _need(
        fields,
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "ffn_dim",
        "max_position_embeddings",
    )
    return _learned(
        fields,
        shape=(vocab, dim, layers, heads, ffn, positions),
        score_scale=(dim // heads) ** -0.5,
        norm_eps=1e-5,
        activation=_activation(fields.get("activation_function") or "relu"),
        position_offset=2,
    )


def _learned(fields: Fields, shape: tuple[int, ...], **settings: Any) -> ModelConfig:
    """What GPT-2 and OPT share: learned positions, layer norms, biases everywhere."""
    vocab, dim, layers, heads, ffn, positions = shape
    return ModelConfig(
        family=fields["model_type"],
        vocab_size=vocab,
        dim=dim,
        num_layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=dim // heads,
        ffn_dim=ffn,
        windows=(None,) * layers,
        ropes=(None,) * layers,
        norm="layer",
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=bool(fields.get("tie_word_embeddings", True)),
        max_positions=positions,
        **settings,
    )


_FAMILIES: dict[Any, Callable[[Fields], ModelConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "opt": _opt,
}
