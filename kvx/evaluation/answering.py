"""Answers to questions, in every arm and by the source alone: greedy, one line, scored by F1 and exact match."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvx.cache.cache import KVCache
from kvx.cache.ops import pad_to
from kvx.evaluation.answers import Template, exact_match, f1_score, first_line, newline_tokens
from kvx.evaluation.arms import Setup, arms_of, boundary_tokens, build, read, shared_arms, stack_rows
from kvx.evaluation.items import Question, digest
from kvx.evaluation.report import SOURCE_ALONE, AnswerResult
from kvx.models.generate import generate
from kvx.models.model import Model
from kvx.models.tokenizer import Tokenizer

MAX_NEW_TOKENS = 16


def measure_answers(
    setups: Sequence[Setup],
    questions: Sequence[Question],
    template: Template,
    *,
    batch_size: int,
    max_new_tokens: int = MAX_NEW_TOKENS,
    progress: Callable[[int, int], Any] = lambda done, total: None,
) -> list[AnswerResult]:
    """Ask every question in every arm.

    The boundary (worked examples and the question, in the template) follows each arm's cache and is prefilled by the
    answering model itself; generation is greedy and stops at a line break or an end token.

    Args:
        setups: models, prefix and a map; further ones as in :func:`kvx.evaluation.losses.measure_losses`.
        questions: at least two, of different contexts.
        template: how questions are put.
        batch_size: questions run together (each in seven arms at once).
        max_new_tokens: tokens of an answer at most.
        progress: called with (questions done, questions in all).

    Returns:
        For each setup answers and their scores.

    Raises:
        KvxError: questions that cannot be paired.
    """
    setup = setups[0]
    texts = [template.boundary(question.question) for question in questions]
    batches = setup.plan([question.context for question in questions], batch_size)
    ours, theirs = (boundary_tokens(t, texts) for t in (setup.target_tokenizer, setup.source_tokenizer))
    answer_target = answerer(setup.target, setup.target_tokenizer, ours, max_new_tokens)
    answer_source = answerer(setup.source, setup.source_tokenizer, theirs, max_new_tokens)
    room = max(ours.shape[1], theirs.shape[1]) + max_new_tokens
    said = [{arm: [""] * len(questions) for arm in arms_of(at)} for at in range(len(setups))]
    alone = [""] * len(questions)
    done = 0
    for batch in batches:
        rows = batch.items[: batch.real]
        reading = read(setup, [questions[i].context for i in batch.items], batch)
        for at, one in enumerate(setups):  # one map at a time, so that memory stays that of its arms
            caches = build(one, reading, batch, room, arms_of(at)).target
            answers = answer_target(stack_rows(list(caches.values())), [*batch.items] * len(caches))
            for n, arm in enumerate(caches):
                for row, i in enumerate(rows):
                    said[at][arm][i] = answers[n * len(batch.items) + row]
        for i, text in zip(rows, answer_source(pad_to(reading.source, batch.length + room), batch.items), strict=False):
            alone[i] = text
        done += batch.real
        progress(done, len(questions))
    return [score(questions, {**shared_arms(said, at), SOURCE_ALONE: alone}) for at in range(len(setups))]


def answerer(
    model: Model, tokenizer: Tokenizer, tokens: np.ndarray, max_new_tokens: int
) -> Callable[[KVCache, Sequence[int]], list[str]]:
    """A function from a cache and the questions of its rows to one-line answers."""
    stops = tuple(sorted({*newline_tokens(tokenizer), *tokenizer.eos_ids}))

    def answer(cache: KVCache, items: Sequence[int]) -> list[str]:
        out = generate(model, jnp.asarray(tokens[list(items)]), cache, max_new_tokens=max_new_tokens, stop_tokens=stops)
        return [first_line(tokenizer.decode(row)) for row in np.asarray(out.tokens)]

    return answer


def score(questions: Sequence[Question], said: dict[str, list[str]]) -> AnswerResult:
    """F1 and exact match of what was said, arm by arm.

    Example:
        >>> from kvx.evaluation.answering import score
        >>> from kvx.evaluation.items import Question
        >>> result = score([Question("It was Ann.", "who was it", ("Ann",))], {"native": ["ann"], "none": ["bob"]})
        >>> result.f1["native"].tolist(), result.exact["none"].tolist()
        ([1.0], [0.0])
    """
    f1, exact = (
        {
            arm: np.array([metric(a, q.answers) for a, q in zip(row, questions, strict=True)])
            for arm, row in said.items()
        }
        for metric in (f1_score, exact_match)
    )
    contexts = len({question.context for question in questions})
    return AnswerResult({arm: tuple(row) for arm, row in said.items()}, f1, exact, contexts, digest(questions))
