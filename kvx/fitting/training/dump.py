"""Read training examples once with both models, and keep what every step of training will need."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvx.alignment import Alignment, align
from kvx.cache.cache import KVCache
from kvx.cache.join import select_batch
from kvx.cache.ops import slice_slots
from kvx.cache.provenance import digest_arrays
from kvx.errors import KvxError
from kvx.fitting.pairs import identity
from kvx.fitting.sensitivity import sensitivity
from kvx.fitting.training.batch import Contexts
from kvx.fitting.training.data import Place, Shape, TrainingData
from kvx.fitting.training.dump_suffixes import Suffixes, Variance, Wanted, cast
from kvx.fitting.training.examples import Example, SuffixTokens, digest_examples, suffix_tokens
from kvx.fitting.training.loss import TrainingLoss, check_depth, check_loss
from kvx.fitting.training.store import Table, open_tables, save_index
from kvx.models.buckets import bucket_length
from kvx.models.decoder import forward
from kvx.models.prefill import prefill
from kvx.models.progress import Hook, reporting

if TYPE_CHECKING:
    from kvx.models.model import Model


class Start(Protocol):
    """What says how contexts are put: a fitted map, or pairs."""

    @property
    def prefix(self) -> KVCache | None: ...
    @property
    def rule(self) -> str: ...
    @property
    def reads_embeddings(self) -> bool: ...


def training_data(
    source: Model,
    target: Model,
    examples: Sequence[Example],
    start: Start,
    *,
    loss: TrainingLoss | None = None,
    held_out: bool = False,
    receiver: bool = False,
    uniform: bool = False,
    max_length: int = 512,
    batch_size: int = 4,
    dtype: Any = None,
    folder: str | Path | None = None,
    progress: bool | Hook | None = True,
) -> TrainingData:
    """Read the contexts of examples with the source once, and measure with the target what the loss compares with.

    Contexts and suffixes are padded to a few lengths, so that a step compiles once for each.

    Args:
        source, target: models with tokenizers; frozen.
        examples: see :func:`kvx.examples_from_passages` and its siblings.
        start: the fitted map (or the pairs) whose prefix and alignment rule the contexts get.
        loss: what will be trained for: it decides whether the target's own losses, hidden states and caches are
            measured and kept, and what it makes of the suffixes' tokens.
        held_out: examples to judge on: measure the target's own losses in every case, over another context too.
        receiver: keep the target's own cache of every context, for methods that read it (``fuser``, ``latent_flow``).
        uniform: pad all contexts to one length and all suffixes to another: one compilation a step, more padding.
        max_length: tokens of a context in either model, prefix and BOS included; examples with longer ones are left
            out and counted in ``facts``.
        batch_size: contexts read together.
        dtype: of the caches that are kept; ``None``: the models' own. ``"bfloat16"`` halves them.
        folder: keep everything there, memory-mapped; a finished folder of the same data is used again. ``None``: in
            memory.
        progress: as in :func:`kvx.fit`.

    Returns:
        The data.

    Raises:
        KvxError: no example left, nothing to score in one, a model without tokenizer, a loss that compares layers which
            the target has not, or a folder with other data.

    Example:
        >>> import kvx
        >>> from kvx.fitting.training.examples import Example
        >>> from kvx.models.random_model import byte_model
        >>> source, target = byte_model(), byte_model(3, seed=1)
        >>> pairs = kvx.pairs(source, target, "Ann lives in Rome. " * 20, max_length=64)
        >>> examples = [Example("Ann lives in Rome.", " She likes it."), Example("Bob is old.", " So is Eva.")]
        >>> kvx.training_data(source, target, examples, pairs, progress=False)
        TrainingData(2 continuation; shapes 16x16x16, 32x16x16; 0 MB; ...)
    """
    loss = check_loss(loss or TrainingLoss())
    check_depth(loss, target.config)
    measured, natives = held_out or loss.measured, receiver or loss.compares
    embed = start.reads_embeddings
    job = _Job(source, target, start.prefix, start.rule, loss, measured, natives, batch_size, dtype, embed, uniform)
    kept = [e for e in examples if job.length(e.context) <= max_length]
    if not kept or batch_size < 1:
        raise KvxError(
            f"{len(examples)} examples leave {len(kept)} with contexts of at most {max_length} tokens, to be read "
            f"{batch_size} at a time; give shorter contexts or a larger max_length."
        )
    tokens = [suffix_tokens(example, target._tokenizer()) for example in kept]
    compared = [loss.distil > 0, natives, loss.cache > 0 and loss.sensitivity, str(dtype)]
    facts = {
        "examples": digest_examples(kept),
        "left_out": len(examples) - len(kept),
        "models": {"source": identity(source), "target": identity(target)},
        "prefix": digest_arrays(start.prefix),
        "rule": start.rule,
        "max_length": max_length,
        "measured": job.measured,
        "kept": [
            *compared,
            *["tokens"] * (loss.correction > 0),
            *["trail"] * (loss.trajectory > 0),
            *["embeddings"] * embed,
            *["uniform"] * uniform,
        ],
        "batch_size": batch_size,
    }
    home = None if folder is None else Path(folder)
    known = None if home is None else _reopened(home, facts)
    if known is None:
        with reporting(progress, "reading examples", "contexts") as report:
            known = job.read(kept, tokens, home, report)
        if home is not None:
            index = {"facts": facts, "places": _plain(known[2]), "variance": known[3], "trail_variance": known[4]}
            save_index(home, _named(*known[:2]), index)
    contexts, suffixes, places, *spreads = known
    spread, trails = (None if x is None else jnp.asarray(x, jnp.float32) for x in spreads)
    return TrainingData(
        source, target, contexts, suffixes, tuple(places), start.prefix, start.rule, spread, loss, facts, trails
    )


Known = tuple[dict[int, Table], dict[Shape, Table], list[Place], Any, Any]


def _named(contexts: dict[int, Table], suffixes: dict[Shape, Table]) -> dict[str, Table]:
    named = {f"contexts-{slots}": table for slots, table in contexts.items()}
    return named | {f"suffixes-{'-'.join(map(str, shape))}": table for shape, table in suffixes.items()}


def _plain(places: list[Place]) -> list[list[Any]]:
    return [[list(p.shape), p.suffix, p.context, p.partner, p.kind] for p in places]


def _reopened(folder: Path, facts: dict[str, Any]) -> Known | None:
    """A finished folder of the same data; ``None`` where there is none yet."""
    folder.mkdir(parents=True, exist_ok=True)
    found = open_tables(folder)
    if found is None:
        return None
    tables, known = found
    if known["facts"] != facts:
        odd = sorted(k for k in facts if known["facts"].get(k) != facts[k])
        raise KvxError(f"{folder} holds training data of other {', '.join(odd)}; choose another folder or delete it.")
    contexts: dict[int, Table] = {}
    suffixes: dict[Shape, Table] = {}
    for name, table in tables.items():
        numbers = [int(n) for n in name.split("-")[1:]]
        if name.startswith("contexts"):
            contexts[numbers[0]] = table
        else:
            suffixes[numbers[0], numbers[1], numbers[2]] = table
    places = [Place((s[0], s[1], s[2]), *rest) for s, *rest in known["places"]]
    return contexts, suffixes, places, known["variance"], known.get("trail_variance")


@dataclasses.dataclass
class _Job:
    """One reading of examples: settings, and the tables as they fill."""

    source: Model
    target: Model
    prefix: KVCache | None
    rule: str
    loss: TrainingLoss
    measured: bool
    natives: bool
    batch_size: int
    dtype: Any
    embed: bool = False
    uniform: bool = False
    counted: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    @property
    def wanted(self) -> Wanted:
        """What is measured of suffixes."""
        return Wanted(self.measured, self.loss.distil > 0, self.loss.trajectory > 0, self.dtype)

    @property
    def held(self) -> int:
        """Tokens of the prefix."""
        return 0 if self.prefix is None else self.prefix.groups[0].slots

    def lengths(self, context: str) -> tuple[int, int]:
        """Tokens of a context in the source (BOS included) and in the target (without prefix)."""
        if context not in self.counted:
            ours = len(self.target._tokenizer().encode(context, bos=False))
            if not ours:
                raise KvxError("an example has an empty context; give a text to hand over.")
            self.counted[context] = len(self.source._tokenizer().encode(context)), ours
        return self.counted[context]

    def length(self, context: str) -> int:
        """Tokens of a context, at most, in either model."""
        theirs, ours = self.lengths(context)
        return max(theirs, ours + self.held)

    def read(self, examples: list[Example], tokens: list[SuffixTokens], home: Path | None, report: Hook) -> Known:
        """Every context once, and the suffixes that follow it."""
        users: dict[str, list[int]] = {}
        for n, example in enumerate(examples):
            users.setdefault(example.context, []).append(n)
        slots = {context: bucket_length(max(self.lengths(context))) for context in users}
        shapes = [
            (slots[e.context], bucket_length(len(t.ids)), bucket_length(len(t.where)))
            for e, t in zip(examples, tokens, strict=True)
        ]
        if self.uniform:
            longest = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
            shapes = [(longest[0], longest[1], longest[2])] * len(shapes)
            slots = dict.fromkeys(slots, longest[0])
        contexts: dict[int, Table] = {}
        writer = Suffixes(self.target, self.prefix, tokens, shapes, home, self.batch_size, self.wanted)
        sums = Variance()
        done = 0
        for length in sorted(set(slots.values())):
            own = sorted((c for c in users if slots[c] == length), key=lambda c: (self.lengths(c), c))
            first = 0
            for chunk in np.array_split(np.arange(len(own)), -(-len(own) // self.batch_size)):
                texts = [own[i] for i in chunk]
                read, whole = self._read(texts, length)
                if length not in contexts:
                    contexts[length] = Table.create(home, f"contexts-{length}", read, len(own))
                contexts[length].write(first, read, len(texts))
                sums.add(read.native, len(texts))
                mates = [(row + 1) % len(texts) for row in range(len(texts))]
                for row, text in enumerate(texts):
                    partner = first + mates[row] if len(texts) > 1 else -1
                    for n in users[text]:
                        place = Place(shapes[n], -1, first + row, partner, examples[n].kind)
                        writer.wait(n, place, row, mates[row])
                writer.flush(whole)
                first += len(texts)
                done += len(texts)
                report(f"{done:,} contexts", done, len(users))
        places = [writer.places[n] for n in range(len(examples))]
        return contexts, writer.tables, places, sums.result(), writer.spread.result()

    def _read(self, texts: list[str], length: int) -> tuple[Contexts, KVCache | None]:
        """Contexts of one batch, and the target's own cache of prefix and context where it is needed."""
        filled = texts + [texts[0]] * (self.batch_size - len(texts))
        reader, writer = self.source._tokenizer(), self.target._tokenizer()
        source = prefill(self.source, reader.encode_batch(filled, length=length), capacity=length)
        alignment = align(self.source, self.target, filled, rule=self.rule, length=length, embed=self.embed)
        made = Contexts(cast(source, self.dtype), self._looked_up(alignment))
        if not (self.wanted or self.natives):
            return made, None
        tokens = writer.encode_batch(filled, bos=False, length=length)
        if self.loss.correction:
            made = dataclasses.replace(made, tokens=jnp.asarray(tokens, jnp.int32))
        lead = None if self.prefix is None else select_batch(self.prefix, [0] * len(filled))
        weighed = self.loss.cache > 0 and self.loss.sensitivity
        whole, queries = _native(self.target, tokens, lead, weighed)
        if self.natives:
            native = slice_slots(whole, self.held, self.held + length)
            made = dataclasses.replace(made, native=cast(native, self.dtype))
        if weighed:
            at = jnp.where(tokens >= 0, self.held + jnp.arange(length, dtype=jnp.int32)[None], -1)
            found = sensitivity(self.target.config, queries, at, whole, first=self.held)
            made = dataclasses.replace(made, sensitivity=found[:, :, :, self.held : self.held + length])
        return made, whole

    def _looked_up(self, alignment: Alignment) -> Alignment:
        """The alignment as it is kept: embeddings in the type of the caches, no report."""
        found = alignment.embeddings
        if found is not None and self.dtype is not None:
            found = found.astype(self.dtype)
        return dataclasses.replace(alignment, embeddings=found, report=None)


@functools.partial(jax.jit, static_argnames=("collect",))
def _native(target: Model, tokens: Array, lead: KVCache | None, collect: bool) -> tuple[KVCache, Array | None]:
    """The target's own cache of prefix and context, and its queries over the context when asked for."""
    out = forward(target, tokens, lead, collect_queries=collect)
    return out.cache, out.queries
