"""Everything about a decoder that is not a weight: one frozen, hashable record for all families."""

from __future__ import annotations

import dataclasses

from kvx.cache.geometry import CacheGeometry, LayerGeometry, RopeSpec
from kvx.cache.rope import with_length


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One configurable decoder; the families (llama, mistral, qwen2, qwen3, gemma3_text, gpt2, opt) are settings of it.

    Attributes:
        family: transformers' ``model_type``.
        vocab_size: ``V``.
        dim: ``M``, residual width.
        num_layers: ``L``.
        heads: ``H`` query heads; kv_heads: ``K``; head_dim: ``D``.
        ffn_dim: feed-forward width.
        windows: per layer, sliding-window width in tokens or ``None``.
        ropes: per layer, rotary facts, or ``None`` for learned positions.
        score_scale: multiplier of q.k before the softmax.
        norm: ``"rms"`` or ``"layer"``; norm_eps; norm_offset: added to the norm's scale (Gemma: 1).
        activation: ``"silu"``, ``"gelu_tanh"``, ``"gelu"`` or ``"relu"``; gated: SwiGLU-style feed-forward.
        qkv_bias, out_bias, mlp_bias: which projections have biases.
        qk_norm: RMS norm over each head of q and k before RoPE.
        post_norms: Gemma's extra norms after attention and after the feed-forward.
        embed_scale: multiplier of token embeddings.
        attn_softcap, final_softcap: tanh caps of scores and logits, ``None`` when absent.
        tied: the LM head is the embedding matrix.
        max_positions: rows of the learned position table (GPT-2, OPT) or the trained length; position_offset: OPT's 2.
    """

    family: str
    vocab_size: int
    dim: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    windows: tuple[int | None, ...]
    ropes: tuple[RopeSpec | None, ...]
    score_scale: float
    norm: str = "rms"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    activation: str = "silu"
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    embed_scale: float = 1.0
    attn_softcap: float | None = None
    final_softcap: float | None = None
    tied: bool = True
    max_positions: int = 2048
    position_offset: int = 0

    @property
    def learned_positions(self) -> bool:
        """True for GPT-2 and OPT."""
        return self.ropes[0] is None

    @property
    def geometry(self) -> CacheGeometry:
        """Geometry of this model's cache."""
        return CacheGeometry(
            tuple(
                LayerGeometry(self.kv_heads, self.head_dim, self.head_dim, window, rope)
                for window, rope in zip(self.windows, self.ropes, strict=True)
            )
        )

    def at_length(self, tokens: int) -> ModelConfig:
        """The same configuration with the sequence length recorded in every dynamic NTK RoPE (others are unchanged).

        Example:
            >>> from kvx.cache.geometry import RopeSpec
            >>> from kvx.models.config import tiny_config
            >>> rope = RopeSpec.create("dynamic", dim=8, factor=2.0, original_length=16)
            >>> tiny_config(ropes=(rope, rope)).at_length(40).ropes[0].length
            40
        """
        ropes = tuple(None if rope is None else with_length(rope, tokens) for rope in self.ropes)
        return dataclasses.replace(self, ropes=ropes)


def tiny_config(**overrides: object) -> ModelConfig:
    """A Llama of a few thousand weights, for examples and tests.

    Args:
        overrides: fields of :class:`ModelConfig` that differ; ``windows`` and ``ropes`` follow ``num_layers`` and
            ``head_dim`` unless given.

    Returns:
        Two layers, four query heads over two kv heads of 8 channels, 64 tokens of vocabulary.

    Example:
        >>> from kvx.models.config import tiny_config
        >>> tiny_config(num_layers=3).geometry.num_layers
        3
    """
    fields: dict = {
        "family": "llama",
        "vocab_size": 64,
        "dim": 32,
        "num_layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "ffn_dim": 48,
        **overrides,
    }
    fields.setdefault("windows", (None,) * fields["num_layers"])
    fields.setdefault("ropes", (RopeSpec.create(dim=fields["head_dim"]),) * fields["num_layers"])
    fields.setdefault("score_scale", fields["head_dim"] ** -0.5)
    return ModelConfig(**fields)
