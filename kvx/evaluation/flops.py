"""What a hand-off computes, in floating-point operations: of the map, and of the target where it reads the context."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from kvx.models.model import Model
from kvx.models.replay import ReplayPlan

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
        target_reads_context: whether it does: the map fuses with the target's own cache, or is replayed over.
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


def map_cost(mapper: CacheMap, target: Model, tokens: int = COST_TOKENS, replay: ReplayPlan | None = None) -> MapCost:
    """Count the work of a hand-off of so many tokens, batch 1, the ``replay`` over it included.

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
    reading = ReplayPlan().flops(target.config, tokens)  # reading again costs what reading does
    own = replay.flops(target.config, tokens) if replay else reading if mapper.reads_target else 0
    return MapCost(tokens, mapper.parameters, mapper.flops(tokens), own, reading, own > 0)
