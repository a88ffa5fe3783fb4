"""Training data: what the models make of examples once, kept on the host and streamed in a shuffled order."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvx.cache.cache import KVCache
from kvx.cache.join import select_batch
from kvx.fitting.training.batch import TrainBatch
from kvx.fitting.training.loss import TrainingLoss
from kvx.fitting.training.store import Table
from kvx.mappers.receiver import context_start, laid_under, receiver_rows
from kvx.models.model import Model

Shape = tuple[int, int, int]  # slots of the context, tokens of the suffix, scored tokens


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one example stands: shape, row of its suffix, row of its context and of its partner's (-1: none)."""

    shape: Shape
    suffix: int
    context: int
    partner: int
    kind: str


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TrainingData:
    """Examples of a pair of models, read once by :func:`kvx.training_data` and streamed as often as wanted.

    Attributes:
        source, target: the models; neither is ever changed.
        contexts: per number of slots, rows of :class:`kvx.fitting.training.batch.Contexts`.
        suffixes: per shape, rows of :class:`kvx.fitting.training.batch.Suffix`.
        places: of each example.
        prefix: the target's cache of its prefix, one row, or ``None``.
        rule: alignment rule.
        variance: float32 ``[L,2,K]`` of the target's keys and values, or ``None``.
        loss: what was measured is enough for it.
        facts: settings and digests, plain JSON.
        trail_variance: the same as ``variance`` of the suffixes' trails, or ``None``.
    """

    source: Model
    target: Model
    contexts: Mapping[int, Table]
    suffixes: Mapping[Shape, Table]
    places: tuple[Place, ...]
    prefix: KVCache | None
    rule: str
    variance: Array | None
    loss: TrainingLoss
    facts: Mapping[str, Any]
    trail_variance: Array | None = None

    def __len__(self) -> int:
        return len(self.places)

    @property
    def nbytes(self) -> int:
        """Bytes of everything kept."""
        return sum(table.nbytes for table in (*self.contexts.values(), *self.suffixes.values()))

    @property
    def digest(self) -> str:
        """SHA-256 of the examples, the models and all settings."""
        return hashlib.sha256(json.dumps(dict(self.facts), sort_keys=True).encode()).hexdigest()

    @property
    def kinds(self) -> dict[str, int]:
        """Examples of each kind."""
        names = [place.kind for place in self.places]
        return {name: names.count(name) for name in sorted(set(names))}

    def holds(self, name: str) -> bool:
        """Whether something was kept of every context: ``"native"`` (the target's own cache), ``"sensitivity"``."""
        return all(any(key.split(".")[0] == name for key in table.columns) for table in self.contexts.values())

    def __repr__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items())
        shapes = ", ".join("x".join(map(str, shape)) for shape in sorted(self.suffixes))
        return f"TrainingData({kinds}; shapes {shapes}; {self.nbytes / 1e6:,.0f} MB; {self.digest[:8]})"

    def order(self, batch_size: int, seed: int, epoch: int) -> list[tuple[int, ...]]:
        """One pass over all examples: batches of one shape each, shuffled by seed and epoch alone.

        Every pass has equally many batches, so step and batch size say where any run stands.
        """
        rng = np.random.default_rng([seed, epoch])
        members: dict[Shape, list[int]] = {}
        for n, place in enumerate(self.places):
            members.setdefault(place.shape, []).append(n)
        batches = []
        for shape in sorted(members):
            mixed = rng.permutation(members[shape]).tolist()
            batches += [tuple(mixed[i : i + batch_size]) for i in range(0, len(mixed), batch_size)]
        return [batches[i] for i in rng.permutation(len(batches))]

    def stream(self, batch_size: int, seed: int, first: int = 0) -> Iterator[tuple[int, ...]]:
        """Batches without end, pass after pass, from the ``first`` on."""
        per_pass = len(self.order(batch_size, seed, 0))
        epoch, skip = divmod(first, per_pass)
        while True:
            yield from self.order(batch_size, seed, epoch)[skip:]
            epoch, skip = epoch + 1, 0

    def batch(
        self, examples: Sequence[int], size: int | None = None, *, crossed: bool = False, fused: bool = False
    ) -> TrainBatch:
        """Some examples of one shape as arrays.

        Args:
            examples: their numbers.
            size: rows of the batch; missing ones repeat the first without scored tokens. ``None``: as many.
            crossed: give each example its partner's context instead of its own.
            fused: for methods that read the target's own cache: crossed examples keep that cache of their own context,
                and get their partner's source cache, slot for slot.

        Returns:
            The batch; crossed ones hold no native caches, unless ``fused``.
        """
        places = [self.places[n] for n in examples]
        filled = places + [places[0]] * ((size or len(places)) - len(places))
        shape = places[0].shape
        suffix = self.suffixes[shape].read([place.suffix for place in filled])
        if len(filled) > len(places):
            real = jnp.arange(len(filled))[:, None] < len(places)
            suffix = dataclasses.replace(suffix, targets=jnp.where(real, suffix.targets, -1))
        rows = [place.partner if crossed else place.context for place in filled]
        held = self.contexts[shape[0]].read(rows)
        if crossed and fused:
            own = self.contexts[shape[0]].read([place.context for place in filled])
            return TrainBatch(held.source, laid_under(own.alignment, held.source), suffix, own.native)
        if crossed:
            return TrainBatch(held.source, held.alignment, suffix)
        own = held.native, held.sensitivity, self.variance, held.tokens, self.trail_variance
        return TrainBatch(held.source, held.alignment, suffix, *own)

    def rows(self, size: int) -> KVCache | None:
        """The prefix for a batch of ``size`` rows."""
        return None if self.prefix is None else select_batch(self.prefix, [0] * size)

    def sample(self, contexts: int, size: int = 4, *, fused: bool = False) -> list[tuple[Any, ...]]:
        """Source caches and alignments of about so many contexts, evenly spread, in batches of one shape each.

        With ``fused`` the target's own caches of them come third, in the slots of the alignments.
        """
        total = sum(table.rows for table in self.contexts.values())
        found = []
        for table in self.contexts.values():
            wanted = max(1, round(contexts * table.rows / total))
            wanted = table.rows if table.rows < size else min(table.rows, -(-wanted // size) * size) // size * size
            chosen = np.unique(np.linspace(0, table.rows - 1, wanted).astype(int))
            for i in range(0, len(chosen), size):
                held = table.read(chosen[i : i + size])
                own = (receiver_rows(held.native, held.alignment, context_start(self.prefix)),) if fused else ()
                found.append((held.source, held.alignment, *own))
        return found
