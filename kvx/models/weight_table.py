"""The weight table: every parameter of a family and the tensor of a file that holds it."""

from __future__ import annotations

import dataclasses
import math

from kvx.models.config import ModelConfig

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Row:
    """One parameter and the tensor it comes from.

    Attributes:
        path: where it stands in ``Model.params``; rows of ``layers`` stand for every layer.
        hf: its name in a transformers checkpoint without wrappers such as ``model.``; ``{i}`` is the layer.
        gguf: its name in a GGUF file, empty when the format has no place for it.
        kind: ``"plain"`` (as is), ``"linear"`` (stored ``[out, in]``, as kvx keeps it) or ``"conv1d"`` (GPT-2's
            ``[in, out]``: transposed; GGUF files store these as ``[out, in]`` too).
        shape: shape of the parameter, per layer.
        part: ``(index, count)`` when the tensor holds several parameters side by side (GPT-2's fused q, k, v).
    """

    path: Path
    hf: str
    gguf: str
    kind: str
    shape: tuple[int, ...]
    part: tuple[int, int] | None = None

    @property
    def per_layer(self) -> bool:
        """Whether every layer has its own."""
        return self.path[0] == "layers"

    @property
    def matrix(self) -> tuple[int, ...]:
        """Shape as two axes, ``(out, in)`` of a projection; flat for everything else but embeddings."""
        if self.kind == "plain":
            return self.shape if self.path[-1] in ("embed", "head", "positions") else (math.prod(self.shape),)
        outputs = self.shape[0] if self.path[-1] == "wo" else math.prod(self.shape[:-1])
        return outputs, math.prod(self.shape) // outputs

    def name(self, naming: str, layer: int = 0) -> str:
        """Name of the tensor in files of kind ``naming`` (``"hf"`` or ``"gguf"``)."""
        return (self.gguf if naming == "gguf" else self.hf).replace("{i}", str(layer))


def table(config: ModelConfig) -> list[Row]:
    """Every parameter of a model and the tensor it comes from.

    Args:
        config: the decoder's static facts; decides biases, norms, gates and the head.

    Returns:
        Rows in the order in which they are read.

    Raises:
        KvxError: the family has no table.

    Example:
        >>> from kvx.models.config import tiny_config
        >>> from kvx.models.weight_table import table
        >>> [row.hf for row in table(tiny_config())][:2]
        ['embed_tokens.weight', 'norm.weight']
    """
    builders = {"gpt2": _gpt2_rows, "opt": _opt_rows}
    return builders.get(config.family, _llama_rows)(config)


def _shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each projection and its bias."""
    return {
        "wq": (c.heads, c.head_dim, c.dim),
        "wk": (c.kv_heads, c.head_dim, c.dim),
        "wv": (c.kv_heads, c.head_dim, c.dim),
        "wo": (c.dim, c.heads, c.head_dim),
        "bq": (c.heads, c.head_dim),
        "bk": (c.kv_heads, c.head_dim),
        "bv": (c.kv_heads, c.head_dim),
        "bo": (c.dim,),
        "gate": (c.ffn_dim, c.dim),
        "up": (c.ffn_dim, c.dim),
        "down": (c.dim, c.ffn_dim),
        "b_gate": (c.ffn_dim,),
        "b_up": (c.ffn_dim,),
        "b_down": (c.dim,),
    }


def _outer_rows(c: ModelConfig, embed: str, norm: str, positions: str | None = None) -> list[Row]:
    """Embeddings, final norm and head."""
    rows = [Row(("embed",), embed, "token_embd.weight", "plain", (c.vocab_size, c.dim))]
    if positions:
        shape = (c.max_positions + c.position_offset, c.dim)
        rows.append(Row(("positions",), positions, "position_embd.weight", "plain", shape))
    rows += _norm_rows(c, ("final_norm",), norm, "output_norm", c.dim)
    if not c.tied:
        rows.append(Row(("head",), "lm_head.weight", "output.weight", "plain", (c.vocab_size, c.dim)))
    return rows


def _norm_rows(c: ModelConfig, path: Path, hf: str, gguf: str, width: int) -> list[Row]:
    rows = [Row((*path, "scale"), f"{hf}.weight", f"{gguf}.weight", "plain", (width,))]
    if c.norm == "layer":
        rows.append(Row((*path, "bias"), f"{hf}.bias", f"{gguf}.bias", "plain", (width,)))
    return rows


def _linear_rows(c: ModelConfig, names: dict[str, tuple[str, str]], hf: str, kind: str = "linear") -> list[Row]:
    """Projections ``parameter -> (hf, gguf)`` and, where the config has them, their biases."""
    shapes = _shapes(c)
    biases = {"wq": c.qkv_bias, "wk": c.qkv_bias, "wv": c.qkv_bias, "wo": c.out_bias}
    rows = []
    for parameter, (inner, gguf) in names.items():
        source, target = f"{hf}.{inner}", f"blk.{{i}}.{gguf}"
        rows.append(Row(("layers", parameter), f"{source}.weight", f"{target}.weight", kind, shapes[parameter]))
        if biases.get(parameter, c.mlp_bias):
            bias = f"b{parameter[1]}" if parameter in biases else f"b_{parameter}"
            rows.append(Row(("layers", bias), f"{source}.bias", f"{target}.bias", "plain", shapes[bias]))
    return rows


def _llama_rows(c: ModelConfig) -> list[Row]:
    """Llama, Mistral, Qwen2, Qwen3 and Gemma 3."""
    hf = "layers.{i}"
    mlp_norm = "pre_feedforward_layernorm" if c.post_norms else "post_attention_layernorm"
    norms = [("attn_norm", "input_layernorm", "attn_norm", c.dim), ("mlp_norm", mlp_norm, "ffn_norm", c.dim)]
    if c.qk_norm:
        norms += [
            ("q_norm", "self_attn.q_norm", "attn_q_norm", c.head_dim),
            ("k_norm", "self_attn.k_norm", "attn_k_norm", c.head_dim),
        ]
    if c.post_norms:
        norms += [
            ("post_attn_norm", "post_attention_layernorm", "post_attention_norm", c.dim),
            ("post_mlp_norm", "post_feedforward_layernorm", "post_ffw_norm", c.dim),
        ]
    names = {f"w{x}": (f"self_attn.{x}_proj", f"attn_{'output' if x == 'o' else x}") for x in "qkvo"}
    names |= {x: (f"mlp.{x}_proj", f"ffn_{x}") for x in ("gate", "up", "down")}
    rows = _outer_rows(c, "embed_tokens.weight", "norm")
    for parameter, inner, gguf, width in norms:
        rows += _norm_rows(c, ("layers", parameter), f"{hf}.{inner}", f"blk.{{i}}.{gguf}", width)
    return rows + _linear_rows(c, names, hf)


def _opt_rows(c: ModelConfig) -> list[Row]:
    hf = "decoder.layers.{i}"
    names = {f"w{x}": (f"self_attn.{'out' if x == 'o' else x}_proj", "") for x in "qkvo"}
    names |= {"up": ("fc1", ""), "down": ("fc2", "")}
    return [
        *_outer_rows(c, "decoder.embed_tokens.weight", "decoder.final_layer_norm", "decoder.embed_positions.weight"),
        *_norm_rows(c, ("layers", "attn_norm"), f"{hf}.self_attn_layer_norm", "", c.dim),
        *_norm_rows(c, ("layers", "mlp_norm"), f"{hf}.final_layer_norm", "", c.dim),
        *_linear_rows(c, names, hf),
    ]


def _gpt2_rows(c: ModelConfig) -> list[Row]:
    hf, gguf, shapes = "h.{i}", "blk.{i}", _shapes(c)
    rows = [
        *_outer_rows(c, "wte.weight", "ln_f", "wpe.weight"),
        *_norm_rows(c, ("layers", "attn_norm"), f"{hf}.ln_1", f"{gguf}.attn_norm", c.dim),
        *_norm_rows(c, ("layers", "mlp_norm"), f"{hf}.ln_2", f"{gguf}.ffn_norm", c.dim),
    ]
    fused, stored = f"{hf}.attn.c_attn", f"{gguf}.attn_qkv"
    for index, x in enumerate("qkv"):
        part = (index, 3)
        rows.append(Row(("layers", f"w{x}"), f"{fused}.weight", f"{stored}.weight", "conv1d", shapes[f"w{x}"], part))
        rows.append(Row(("layers", f"b{x}"), f"{fused}.bias", f"{stored}.bias", "plain", shapes[f"b{x}"], part))
    names = {
        "wo": ("attn.c_proj", "attn_output"),
        "up": ("mlp.c_fc", "ffn_up"),
        "down": ("mlp.c_proj", "ffn_down"),
    }
    return rows + _linear_rows(c, names, hf, "conv1d")
