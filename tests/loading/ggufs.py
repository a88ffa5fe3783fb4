"""Tiny random models of four architectures as GGUF files, written the way llama.cpp's converter writes them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from kvx.models.config import ModelConfig
from kvx.models.hf_config import from_hf_config
from kvx.models.weight_table import Row, table

BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    "head_dim": 16,
    "tie_word_embeddings": True,
}
GEMMA = {
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 50000.0},
    },
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**BASE, "model_type": "llama"},
    "qwen2": {**BASE, "model_type": "qwen2"},
    "qwen3": {**BASE, "model_type": "qwen3", "head_dim": 32},
    "gemma3": {**BASE, "model_type": "gemma3_text", **GEMMA},
}
TOKENS = ["<s>", "</s>", "a", "b", "ab", *(f"t{i}" for i in range(59))]


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A model in transformers' names and the GGUF metadata that goes with it."""

    fields: dict[str, Any]
    config: ModelConfig
    weights: dict[str, np.ndarray]

    def rows(self) -> list[tuple[Row, int]]:
        return [(r, i) for r in table(self.config) for i in range(self.config.num_layers if r.per_layer else 1)]


def tiny(arch: str, *, seed: int = 0, **changes: Any) -> Tiny:
    """Random weights, under the names of the weight table (no ``model.`` prefix)."""
    fields = {**CONFIGS[arch], **changes}
    config = from_hf_config(fields)
    rng = np.random.default_rng(seed)
    weights = {}
    for row, i in Tiny(fields, config, {}).rows():
        shape = row.matrix[::-1] if row.kind == "conv1d" else row.matrix
        weights[row.name("hf", i)] = rng.standard_normal(shape, np.float32) * np.float32(0.3)
    return Tiny(fields, config, weights)


def metadata(model: Tiny, arch: str) -> dict[str, Any]:
    """The header llama.cpp's converter writes for this model."""
    f, full = model.fields, model.fields["rope_parameters"]
    theta = full.get("full_attention", full)["rope_theta"]
    keys = {
        "context_length": f["max_position_embeddings"],
        "embedding_length": f["hidden_size"],
        "block_count": f["num_hidden_layers"],
        "feed_forward_length": f["intermediate_size"],
        "attention.head_count": f["num_attention_heads"],
        "attention.head_count_kv": f["num_key_value_heads"],
        "attention.key_length": f["head_dim"],
        "attention.value_length": f["head_dim"],
        "attention.layer_norm_rms_epsilon": float(f["rms_norm_eps"]),
        "rope.freq_base": float(theta),
    }
    if arch == "gemma3":
        keys["attention.sliding_window"] = f["sliding_window"]
        keys["attention.sliding_window_pattern"] = len(f["layer_types"])
    if arch == "llama":
        keys["rope.dimension_count"] = f["head_dim"]
    return {f"{arch}.{name}": value for name, value in keys.items()}


def tokenizer_metadata() -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3] + [1] * 62,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def stored(model: Tiny, arch: str, row: Row, layer: int) -> np.ndarray:
    """One weight as the converter stores it: q and k interleaved (llama), norms plus one (Gemma)."""
    array = model.weights[row.name("hf", layer)]
    if arch == "llama" and row.path[-1] in ("wq", "wk"):
        heads = model.config.heads if row.path[-1] == "wq" else model.config.kv_heads
        return array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
    if arch == "gemma3" and row.path[-1] == "scale":
        return array + np.float32(1)
    return array


def write(
    path: Path,
    arch: str,
    model: Tiny,
    *,
    quant: str = "F32",
    kinds: dict[str, str] | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    meta: dict[str, Any] | None = None,
) -> Path:
    """Write the model; matrices quantised as ``kinds`` says, else as ``quant``; vectors in float32."""
    kinds = kinds or {}
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in {**metadata(model, arch), **tokenizer_metadata(), **(meta or {})}.items():
        _add(writer, key, value)
    tensors = {row.name("gguf", i): stored(model, arch, row, i) for row, i in model.rows()}
    for name, array in {**tensors, **(extra or {})}.items():
        if name in drop:
            continue
        kind = gguf.GGMLQuantizationType[kinds.get(name, quant) if array.ndim > 1 else "F32"]
        if kind == gguf.GGMLQuantizationType.IQ4_XS:  # the package cannot quantise it: zeros of the right size
            block, width = gguf.GGML_QUANT_SIZES[kind]
            data = np.zeros((array.shape[0], array.shape[1] // block * width), np.uint8)
        else:
            data = gguf.quants.quantize(array, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def write_folder(folder: Path, model: Tiny, *, dtype: Any = np.float32, shards: int = 1, **extra: np.ndarray) -> Path:
    """The same model as a Hugging Face folder."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.fields))
    prefixed = {n if n.startswith("lm_head") else f"model.{n}": a.astype(dtype) for n, a in model.weights.items()}
    tensors = {**prefixed, **extra}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names, weight_map = sorted(tensors), {}
    for k in range(shards):
        file = f"model-{k + 1:05d}-of-{shards:05d}.safetensors"
        save_file({n: tensors[n] for n in names[k::shards]}, folder / file)
        weight_map |= dict.fromkeys(names[k::shards], file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
    )
    return folder
