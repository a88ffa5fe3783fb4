"""What translators between minis are fitted on, trained on and asked: passages of three seeds, none met twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import islice

import numpy as np

from kvx.evaluation.items import Item, Question
from kvx.fitting.training.examples import Example
from kvx.testing.minis import PEOPLE, RELATIONS
from kvx.testing.reading import READING, Passage, passages, questions_of

FIT_SEED, TRAIN_SEED, TEST_SEED = 11, 12, 13  # of passages; the minis were trained on others


@dataclasses.dataclass(frozen=True)
class Work:
    """How much is read, trained and asked: the same for every contender.

    Attributes:
        fit, train: passages that closed forms are fitted on, and that translators learn from.
        asked: questions about each training passage.
        steps, batch_size, peak: of training, and its largest learning rate.
        items, questions: passages scored, and questions of each kind (closed set, extractive).
    """

    fit: int = 600
    train: int = 2400
    asked: int = 6
    steps: int = 600
    batch_size: int = 16
    peak: float = 3e-3
    items: int = 100
    questions: int = 100


@dataclasses.dataclass(frozen=True)
class Task:
    """What a direction is fitted on, trained on and asked.

    Attributes:
        texts: passages for the closed form; examples: for training.
        items: passages whose questions and answers are scored.
        closed, phrases: questions of a closed set, and those whose answers are copied out, each of its own passage.

    Example:
        >>> from kvx.testing.reading_work import Task, Work
        >>> task = Task.create(Work(fit=3, train=2, items=2, questions=2))
        >>> len(task.texts), len(task.examples), task.closed[0].answers[0] in task.closed[0].context
        (3, 2, True)
    """

    texts: tuple[str, ...]
    examples: tuple[Example, ...]
    items: tuple[Item, ...]
    closed: tuple[Question, ...]
    phrases: tuple[Question, ...]

    @classmethod
    def create(cls, work: Work) -> Task:
        """Passages and questions of three seeds, so that nothing is met twice but by chance."""

        def some(seed: int, count: int) -> list[Passage]:
            return list(islice(passages(seed, people=PEOPLE, relations=RELATIONS), count))

        rng = np.random.default_rng(TRAIN_SEED)
        orders = (tuple(rng.permutation(PEOPLE * RELATIONS)[: work.asked].tolist()) for _ in range(work.train))
        questions = (
            tuple(questions_of(TEST_SEED, work.questions, closed=kind, people=PEOPLE, relations=RELATIONS))
            for kind in (True, False)
        )
        return cls(
            tuple(passage.text for passage in some(FIT_SEED, work.fit)),
            tuple(example(p, order) for p, order in zip(some(TRAIN_SEED, work.train), orders, strict=True)),
            tuple(
                Item(p.text, p.asked(tuple(rng.permutation(len(p.facts)).tolist())))
                for p in some(TEST_SEED + 1, work.items)
            ),
            *questions,
        )


def example(passage: Passage, order: Sequence[int]) -> Example:
    """A passage and questions about it, of which the answers and the line ends after them are scored.

    Example:
        >>> from kvx.testing.reading import passages
        >>> from kvx.testing.reading_work import example
        >>> example(next(passages(0, people=2, relations=1)), (1, 0)).scored_text
        ' Ralf Ellery\\n Milan Conrad\\n'
    """
    suffix, spans = "", []
    for fact in (passage.facts[i] for i in order):
        suffix += READING.question.format(question=fact.question)
        spans.append((len(suffix), len(suffix) + len(fact.answer) + 2))
        suffix += f" {fact.answer}"
    return Example(passage.text, f"{suffix}\n", tuple(spans), "question")
