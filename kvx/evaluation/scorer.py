"""A score for training: answers to held-out questions over translated contexts, in that one arm."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvx.alignment import align
from kvx.cache.ops import pad_to
from kvx.evaluation.answering import MAX_NEW_TOKENS, answerer
from kvx.evaluation.answers import DEFAULT_TEMPLATE, Template, f1_score, load_template
from kvx.evaluation.arms import boundary_tokens, tokenizer_of, with_dtype
from kvx.evaluation.batches import plan
from kvx.evaluation.items import Question
from kvx.models.model import Model
from kvx.models.prefill import prefill
from kvx.pipeline import own_cache, translate

if TYPE_CHECKING:
    from kvx.mappers.base import CacheMap


@dataclasses.dataclass(frozen=True)
class AnswerScorer:
    """``scorer(mapper)`` gives ``{"f1": ...}``: mean F1 of greedy one-line answers over translated contexts.

    Attributes:
        source, target: models with tokenizers.
        questions: at least two, of different contexts.
        template: how they are put.
        batch_size, max_new_tokens: as in :func:`kvx.evaluate`.
    """

    source: Model
    target: Model
    questions: tuple[Question, ...]
    template: Template
    batch_size: int
    max_new_tokens: int

    def __call__(self, mapper: CacheMap) -> dict[str, float]:
        """Ask every question."""
        reader, writer = tokenizer_of(self.source, "source"), tokenizer_of(self.target, "target")
        contexts = [question.context for question in self.questions]
        tokens = boundary_tokens(writer, [self.template.boundary(q.question) for q in self.questions])
        answer = answerer(self.target, writer, tokens, self.max_new_tokens)
        scores = np.zeros(len(contexts))
        for batch in plan(reader, writer, contexts, self.batch_size):
            texts = [contexts[i] for i in batch.items]
            cache = prefill(self.source, reader.encode_batch(texts, length=batch.length), capacity=batch.length)
            embed = mapper.reads_embeddings
            aligned = align(self.source, self.target, texts, rule=mapper.rule, length=batch.length, embed=embed)
            own = own_cache(self.target, mapper, texts, batch.length) if mapper.reads_target else None
            moved = with_dtype(translate(mapper, cache, aligned, receiver=own), self.target.dtype)
            room = moved.groups[0].slots + tokens.shape[1] + self.max_new_tokens
            said = answer(pad_to(moved, room), batch.items)
            for i, text in zip(batch.items[: batch.real], said, strict=False):
                scores[i] = f1_score(text, self.questions[i].answers)
        return {"f1": float(scores.mean())}


def answer_scorer(
    source: Model,
    target: Model,
    questions: Sequence[Question],
    *,
    template: str | Path | Template = DEFAULT_TEMPLATE,
    batch_size: int = 8,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> AnswerScorer:
    """A scorer for :func:`kvx.train`, by the F1 of answers to questions that are neither trained nor reported on.

    Args:
        source, target: models with tokenizers.
        questions: at least two, of different contexts; each evaluation reads and answers all of them.
        template, batch_size, max_new_tokens: as in :func:`kvx.evaluate`.

    Returns:
        A function from a map to ``{"f1": ...}``.

    Example:
        >>> import kvx
        >>> from kvx.evaluation.items import Question
        >>> from kvx.evaluation.scorer import answer_scorer
        >>> from kvx.models.random_model import byte_model
        >>> model = byte_model()
        >>> asked = [Question("Ann is in Rome.", "who", ("Ann",)), Question("Bob is in Bonn.", "who", ("Bob",))]
        >>> answer_scorer(model, model, asked, max_new_tokens=2)(kvx.identity())
        {'f1': 0.0}
    """
    template = template if isinstance(template, Template) else load_template(template)
    return AnswerScorer(source, target, tuple(questions), template, batch_size, max_new_tokens)
