"""Train a small decoder from random weights on the reading task: on a CPU, resumable, the same every time."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvx.errors import KvxError
from kvx.fitting.checkpoint import load_state, save_state
from kvx.fitting.training.schedule import adamw, warmup_cosine
from kvx.models.config import ModelConfig
from kvx.models.decoder import forward
from kvx.models.layers import lm_head
from kvx.models.model import Model
from kvx.models.progress import Hook, reporting
from kvx.models.tokenizer import Tokenizer
from kvx.testing.first_weights import first_model
from kvx.testing.reading import LEAD, READING, Passage, passages

SEED = 1_000_000  # passages of this seed and above are trained on; measuring uses seeds below
WINDOW = 100  # steps over which the share of right answers is told
CHECKPOINT = "checkpoint"


@dataclasses.dataclass(frozen=True)
class Stage:
    """Part of a training run: documents of one size.

    Attributes:
        steps: of the optimizer; people, relations: of each passage; asked: questions after it.
        batch_size: documents in a step.
        prose: weight of tokens that are no answers, below the 1 of those that are; 0 computes no logits for them.
    """

    steps: int
    people: int
    relations: int
    asked: int
    batch_size: int = 64
    prose: float = 0.0


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    Attributes:
        stages: one after another, under one learning rate: a warm-up, then a cosine to a tenth.
        peak: largest learning rate of AdamW; warmup: steps of its rise.
    """

    stages: tuple[Stage, ...]
    peak: float = 3e-3
    warmup: int = 50

    @property
    def steps(self) -> int:
        """Of all stages."""
        return sum(stage.steps for stage in self.stages)

    def stage(self, step: int) -> Stage:
        """The stage that a step, counted from 0, belongs to."""
        for stage in self.stages:
            if step < stage.steps:
                return stage
            step -= stage.steps
        return self.stages[-1]


class Reader:
    """Documents as token rows, quickly: each sentence and each question is encoded once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.encode = functools.lru_cache(1 << 16)(lambda text: tokenizer.encode(text, bos=False).ids.tolist())
        self.prefix = list(tokenizer.prefix_ids)

    def document(self, passage: Passage, order: Sequence[int]) -> tuple[list[int], list[int]]:
        """Tokens of a passage and what is asked after it, BOS first, and the numbers of those that are answers."""
        ids = self.prefix + self.encode(LEAD)
        for fact in passage.facts:
            ids += self.encode(f" {fact.sentence}")
        answers: list[int] = []
        for fact in (passage.facts[i] for i in order):
            ids += self.encode(READING.question.format(question=fact.question))
            answer = self.encode(f" {fact.answer}")
            answers += range(len(ids), len(ids) + len(answer))
            ids += answer
        return ids + self.encode("\n"), answers

    def batch(self, documents: Sequence[tuple[Passage, Sequence[int]]], stage: Stage, length: int) -> Rows:
        """Documents as arrays.

        Args:
            documents: passages and the facts asked for; stage: what is scored; length: tokens of a row.

        Returns:
            The rows, padded with -1; longer documents are cut.
        """
        rows = np.full((len(documents), length), -1, np.int32)
        made = [self.document(*one) for one in documents]
        scored = [answers if stage.prose == 0 else list(range(len(self.prefix), len(ids))) for ids, answers in made]
        size = length if stage.prose else 4 * stage.asked
        where, weights = (np.zeros((len(documents), size), kind) for kind in (np.int32, np.float32))
        for n, ((ids, answers), chosen) in enumerate(zip(made, scored, strict=True)):
            rows[n, : len(ids)] = ids[:length]
            chosen = [i for i in chosen if i < length][:size]
            where[n, : len(chosen)] = chosen
            said = set(answers)
            weights[n, : len(chosen)] = [1.0 if i in said else stage.prose for i in chosen]
        return Rows(rows, where, weights)


class Rows(NamedTuple):
    """A batch: int32 ``[B,T]`` tokens, int32 ``[B,N]`` numbers of scored tokens and float32 ``[B,N]`` their weights."""

    tokens: Any
    where: Any
    weights: Any


def documents(seed: int, stage: Stage) -> Iterator[tuple[Passage, list[int]]]:
    """Passages without end, each with the numbers of the facts that are asked for."""
    rng = np.random.default_rng([seed, 1])
    for passage in passages(seed, people=stage.people, relations=stage.relations):
        yield passage, rng.permutation(len(passage.facts))[: stage.asked].tolist()


def loss_of(params: Any, model: Model, batch: Rows) -> tuple[jax.Array, jax.Array]:
    """Weighted cross-entropy of the scored tokens, and the share of answer tokens that are predicted right."""
    model = dataclasses.replace(model, params=params)
    rows = jnp.arange(batch.where.shape[0])[:, None]
    hidden = forward(model, batch.tokens[:, :-1]).hidden[rows, jnp.maximum(batch.where - 1, 0)]
    logits, wanted = lm_head(model.config, params, hidden), batch.tokens[rows, batch.where]
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(wanted, 0))
    answers = (batch.weights == 1).astype(jnp.float32)
    right = (jnp.argmax(logits, -1).astype(jnp.int32) == wanted).astype(jnp.float32)
    return (nats * batch.weights).sum() / batch.weights.sum(), (right * answers).sum() / answers.sum()


@functools.partial(jax.jit, static_argnames="optimizer", donate_argnums=(0, 1))
def step(params: Any, moments: Any, model: Model, batch: Rows, *, optimizer: Any) -> tuple[Any, Any, Any, Any]:
    """One move of the optimizer."""
    (loss, right), slopes = jax.value_and_grad(loss_of, has_aux=True)(params, model, batch)
    with jax.numpy_dtype_promotion("standard"):
        moves, moments = optimizer.update(slopes, moments, params)
    return optax.apply_updates(params, moves), moments, loss, right


@dataclasses.dataclass(frozen=True)
class Training:
    """How a run went.

    Attributes:
        steps, seconds: of the run, pauses left out; history: ``(step, loss, share of answer tokens right)``, means over
            ``WINDOW`` steps.
    """

    steps: int
    seconds: float
    history: tuple[tuple[int, float, float], ...]


def pretrain(
    config: ModelConfig,
    tokenizer: Tokenizer,
    recipe: Recipe,
    *,
    seed: int = 0,
    folder: str | Path | None = None,
    resume: bool = False,
    checkpoint_every: int = 200,
    stop_after: int | None = None,
    progress: bool | Hook | None = True,
) -> tuple[Model, Training]:
    """Train a decoder on passages and questions.

    The batch of every step follows from ``seed`` and the step alone, so a run that was stopped goes on as if it had not
    been.

    Args:
        config: the decoder, of the tokenizer's vocabulary; tokenizer: of the model.
        recipe: stages and learning rate; seed: of the first weights and of all passages.
        folder: where a checkpoint is kept; ``None``: nowhere.
        resume: go on from it; without one, start.
        checkpoint_every: steps between two checkpoints.
        stop_after: end the run early, at this step.
        progress: as in :func:`kvx.train`.

    Returns:
        The model, with its tokenizer, and how the run went.

    Raises:
        KvxError: no steps, a vocabulary that is not the tokenizer's, a checkpoint in the way or of another run, or a
            loss that is not finite.

    Example:
        >>> from kvx.models.config import tiny_config
        >>> from kvx.testing.minis import tokenizer
        >>> from kvx.testing.pretrain import Recipe, Stage, pretrain
        >>> words = tokenizer("words")
        >>> config = tiny_config(vocab_size=words.vocab_size, num_layers=1)
        >>> model, run = pretrain(config, words, Recipe((Stage(2, 2, 1, 1, batch_size=2),), warmup=1), progress=False)
        >>> run.steps, model.tokenizer is words
        (2, True)
    """
    if recipe.steps < 1 or config.vocab_size != tokenizer.vocab_size:
        raise KvxError(
            f"{recipe.steps} steps on a vocabulary of {config.vocab_size:,} with a tokenizer of "
            f"{tokenizer.vocab_size:,} make no training; expected a step at least, and equal vocabularies."
        )
    optimizer = _optimizer(recipe)
    first = first_model(config, tokenizer, seed)
    bare = dataclasses.replace(first, params={}, tokenizer=None)
    home = None if folder is None else Path(folder) / CHECKPOINT
    facts = {"config": repr(config), "tokenizer": tokenizer.digest, "recipe": repr(recipe), "seed": seed}
    state, done, seconds, history = _begun(home, resume, facts, (first.params, optimizer.init(first.params)))
    reader, lengths = Reader(tokenizer), {stage: _length(Reader(tokenizer), stage) for stage in recipe.stages}
    began, recent = time.monotonic() - seconds, []
    last = recipe.steps if stop_after is None else min(stop_after, recipe.steps)
    with reporting(progress, "training", "steps") as report:
        for at in range(done, last):
            stage = recipe.stage(at)
            read = islice(documents(SEED + seed * 1_000_000 + at, stage), stage.batch_size)
            batch = reader.batch(list(read), stage, lengths[stage])
            *state, loss, right = step(*state, bare, batch, optimizer=optimizer)
            recent.append((loss, right))
            if (at + 1) % WINDOW == 0 or at + 1 == last:
                history.append((at + 1, *_means(recent, at + 1)))
                recent = []
            told = f"loss {history[-1][1]:.3f}, {history[-1][2]:.0%} right" if history else ""
            report(told, at + 1, recipe.steps)
            if home is not None and ((at + 1) % checkpoint_every == 0 or at + 1 == last):
                seconds = time.monotonic() - began
                save_state(home, _named(state), {**facts, "step": at + 1, "seconds": seconds, "history": history})
    made = dataclasses.replace(first, params=state[0])
    return made, Training(last, time.monotonic() - began, tuple(history))


@functools.lru_cache(8)
def _optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """The same object for equal recipes, so that a second run compiles nothing."""
    return adamw(warmup_cosine(recipe.peak, steps=recipe.steps, warmup=min(recipe.warmup, recipe.steps - 1)))


def _means(recent: list[tuple[Any, Any]], at: int) -> tuple[float, float]:
    loss, right = (float(np.mean([float(x[i]) for x in recent])) for i in (0, 1))
    if not np.isfinite(loss):
        raise KvxError(f"the loss is {loss} at step {at}; give a smaller learning rate than this recipe's.")
    return round(loss, 5), round(right, 5)


def _length(reader: Reader, stage: Stage) -> int:
    """Tokens of a row: what the longest of some documents needs, and a few more."""
    longest = max(len(reader.document(*one)[0]) for one in islice(documents(SEED - 1, stage), 500))
    return -(-longest // 8) * 8 + 1


def _named(state: Sequence[Any]) -> dict[str, Any]:
    return {f"{i:04d}": x for i, x in enumerate(jax.tree.leaves(tuple(state)))}


def _begun(
    home: Path | None, resume: bool, facts: dict[str, Any], state: tuple[Any, Any]
) -> tuple[list[Any], int, float, list[Any]]:
    """The state to go on from, the step it stands at, seconds until then, and the history."""
    if home is None or not home.exists():
        return list(state), 0, 0.0, []
    if not resume:
        raise KvxError(f"{home} holds a run already; go on with it (resume=True), or choose another folder.")
    arrays, told = load_state(home)
    if odd := sorted(name for name, fact in facts.items() if told.get(name) != fact):
        raise KvxError(f"{home} is of a run with other {', '.join(odd)}; give the same, or choose another folder.")
    leaves, structure = jax.tree.flatten(state)
    restored = [jnp.asarray(arrays[f"{i:04d}"], x.dtype) for i, x in enumerate(leaves)]
    history = [tuple(row) for row in told["history"]]
    return list(jax.tree.unflatten(structure, restored)), told["step"], told["seconds"], history
