"""Static, hashable facts about a cache: shapes and positions only, never identity (see ``provenance``)."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvx.errors import KvxError

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


def _plain(name: str, value: Any) -> Any:
    """A plain Python number: an array in a static field would make the second jitted call fail."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    try:
        return value.item()
    except (AttributeError, ValueError, TypeError):
        raise KvxError(
            f"{name} is {value!r}; expected a plain number, since it is part of the compiled program."
        ) from None


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of one layer (Su et al., arXiv 2104.09864, and its length extensions).

    Build with :meth:`create`, which validates. Angles are always computed in fp32.

    Attributes:
        kind: one of ``ROPE_KINDS``.
        theta: base of the geometric frequency ladder.
        dim: number of rotated channels (at most the head dim; the rest pass through: partial rotary), even.
        interleaved: pairs are (0,1),(2,3),... instead of half-split (0,D/2),(1,D/2+1),...
        factor: length extension factor (linear, dynamic, llama3, yarn).
        original_length: tokens the model was trained on before extension (dynamic, llama3, yarn).
        low_freq_factor, high_freq_factor: llama3 ramp.
        beta_fast, beta_slow, truncate: yarn ramp.
        attention_factor: yarn's multiplier of the rotated vectors; 1 elsewhere.
        length: for ``dynamic``: the sequence length the frequencies were computed for, ``None`` when not yet recorded.
    """

    kind: str
    theta: float
    dim: int
    interleaved: bool = False
    factor: float = 1.0
    original_length: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    length: int | None = None

    @classmethod
    def create(cls, kind: str = "default", theta: float = 10000.0, *, dim: int, **kwargs: object) -> RopeSpec:
        """Validate and build.

        Raises:
            KvxError: unknown ``kind``, odd or non-positive ``dim``, a missing ``original_length``, or no plain numbers.
        """
        if kind not in ROPE_KINDS:
            raise KvxError(f"RoPE type {kind!r} is not supported; expected one of {', '.join(ROPE_KINDS)}.")
        if dim <= 0 or dim % 2:
            raise KvxError(
                f"RoPE rotates an even, positive number of channels, got {dim}; check head_dim and the rotary share."
            )
        spec = cls(kind, float(theta), int(dim), **{name: _plain(name, value) for name, value in kwargs.items()})
        if spec.theta <= 0.0 or spec.factor <= 0.0 or spec.attention_factor <= 0.0:
            raise KvxError(f"RoPE base, factor and attention factor are positive; got {spec}.")
        if kind in ("dynamic", "llama3", "yarn") and not spec.original_length:
            raise KvxError(
                f"RoPE type {kind!r} needs original_length (original_max_position_embeddings); none was given."
            )
        return spec


@dataclasses.dataclass(frozen=True)
class LayerGeometry:
    """Shapes and position facts of one layer's cache.

    Attributes:
        kv_heads: ``K``.
        key_dim: ``D``, channels of a key.
        value_dim: ``Dv``, channels of a value.
        window: sliding-window width in tokens (a query at p reads positions p - window + 1 .. p); ``None``: global.
        rope: rotary facts; ``None`` for learned positions.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    rope: RopeSpec | None = None

    @property
    def shapes(self) -> tuple[int, int, int]:
        """``(K, D, Dv)``: what layers must share to be stacked in one group."""
        return self.kv_heads, self.key_dim, self.value_dim


@dataclasses.dataclass(frozen=True)
class CacheGeometry:
    """Geometry of every layer of a model's cache, in model order."""

    layers: tuple[LayerGeometry, ...]

    @property
    def num_layers(self) -> int:
        """Number of layers ``L``."""
        return len(self.layers)

    @property
    def learned_positions(self) -> bool:
        """True when positions are baked into the stored vectors (GPT-2, OPT), so they cannot be shifted."""
        return any(layer.rope is None for layer in self.layers)

    def cache_bytes(self, tokens: int = 1, bytes_per_number: int = 2) -> int:
        """Bytes that ``tokens`` cached tokens take over all layers (K and V)."""
        width = sum(g.kv_heads * (g.key_dim + g.value_dim) for g in self.layers)
        return tokens * width * bytes_per_number
