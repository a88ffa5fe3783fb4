"""What a hand-off computes, in floating-point operations: of the map, and of the target where it reads the context."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from kvx.models.model import Model

if TYPE_CHECKING:
    from kvx.mappers.base import CacheMap

COST_TOKENS = 1024


@dataclasses.dataclass(frozen=True)
class MapCost:
    """What one hand-off of a context of ``tokens`` tokens costs after the source has read it.

    Attributes:
        tokens: of the context, the same number in both models.
        parameters: numbers that a translation reads.
        translate: operations of the translation; target: of the target's own reading, zero where it does not read.
        native: operations of the target's own reading, for comparison.
        target_reads_context: whether the map fuses with the target's own cache.
    """

    tokens: int
    parameters: int
    translate: int
    target: int
    native: int
    target_reads_context: bool

    @property
    def flops(self) -> int:
        """Operations in all."""
        return self.translate + self.target

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain JSON types."""
        return {**dataclasses.asdict(self), "flops": self.flops}


def map_cost(mapper: CacheMap, target: Model, tokens: int = COST_TOKENS) -> MapCost:
    """Count the work of a hand-off of so many tokens, batch 1.

    Example:
        >>> import kvx
        >>> from kvx.evaluation.flops import map_cost
        >>> from kvx.models.random_model import byte_model
        >>> source, target = byte_model(), byte_model(3, seed=1)
        >>> pairs = kvx.pairs(source, target, "Ann lives in Rome. " * 20, max_length=64)
        >>> mapper, _ = kvx.fit(kvx.mappers.full_head(layers=1, ridge=0.1), pairs, held_out=0, progress=False)
        >>> cost = map_cost(mapper, target, tokens=100)
        >>> cost.target, cost.flops < cost.native
        (0, True)
    """
    reading = reading_flops(target, tokens)
    reads = mapper.reads_target
    return MapCost(tokens, mapper.parameters, mapper.flops(tokens), reading if reads else 0, reading, reads)


def reading_flops(model: Model, tokens: int) -> int:
    """Operations of reading so many tokens into a cache: two a weight of each layer and token, and the attention.

    The LM head is not applied. Attention counts the products with keys and values of the tokens each query sees.

    Example:
        >>> from kvx.models.random_model import byte_model
        >>> reading_flops(byte_model(2), 20) > 2 * reading_flops(byte_model(1), 10)
        True
    """
    config = model.config
    matrices = sum(x.size for x in jax.tree.leaves(model.params["layers"]) if x.ndim >= 2 + int(model.stacked))
    seen = np.arange(1, tokens + 1)
    pairs = sum(
        int(np.minimum(seen, layer.window or tokens).sum()) * (layer.key_dim + layer.value_dim)
        for layer in config.geometry.layers
    )
    return 2 * tokens * matrices + 2 * config.heads * pairs
