"""Who made a cache: host-side facts kept beside arrays, never inside jitted pytrees."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Identity of the weights and the tokenizer behind a cache or an artefact.

    Attributes:
        model: the name or path the user gave (for people; never compared).
        weights: SHA-256 of the weights, adapters included.
        tokenizer: SHA-256 of the tokenizer, empty when the model has none.
        exact: whether the cache is the model's own; translated caches are lossy and say ``False``.
        mapper: digest of the map that made a translated cache, ``None`` for native ones.
    """

    model: str
    weights: str
    tokenizer: str = ""
    exact: bool = True
    mapper: str | None = None

    def same_model(self, other: Provenance) -> bool:
        """Whether both come from the same weights and tokenizer, whatever they are called."""
        return (self.weights, self.tokenizer) == (other.weights, other.tokenizer)
