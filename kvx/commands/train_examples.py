"""What ``kvx train`` trains and judges on: passages, clozes made of them, and questions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvx.errors import KvxError

if TYPE_CHECKING:
    from kvx.commands.train import Train
    from kvx.evaluation.items import Item, Question
    from kvx.fitting.training.examples import Example
    from kvx.models.model import Model


def examples_of(settings: Train, target: Model) -> tuple[list[Example], list[Example], list[Question], dict[str, str]]:
    """Examples to train on, examples to judge on, questions to judge by their answers, and digests of both files.

    Raises:
        KvxError: a file that cannot be read, or fewer passages or questions than are set aside.
    """
    from kvx.evaluation.examples import cloze_from_passages, examples_from_passages, examples_from_questions
    from kvx.evaluation.items import digest, load_questions

    trained: list[Example] = []
    judged: list[Example] = []
    asked: list[Question] = []
    hashes: dict[str, str] = {}
    if settings.text is not None:
        passages, hashes = passages_of(settings, target)
        aside, ours = _divided(passages, settings.judge_passages, "passages")
        judged += examples_from_passages(aside)
        trained += examples_from_passages(ours)
        if settings.cloze:
            cloze: dict[str, Any] = {"per_passage": settings.cloze, "seed": settings.seed}
            trained += cloze_from_passages(ours, settings.template, **cloze)
    if settings.questions is not None:
        questions = load_questions(settings.questions, settings.max_questions)
        asked, kept = divide_questions(questions, settings.judge_questions)
        judged += examples_from_questions(asked, settings.template)
        trained += examples_from_questions(kept, settings.template)
        hashes["questions"] = digest(kept)
    if not trained:
        raise KvxError("everything was set aside for judging; give more text or questions, or lower --judge-passages.")
    return trained, judged, asked, hashes


def passages_of(settings: Train, target: Model) -> tuple[list[Item], dict[str, str]]:
    """The passages of the text that are never measured on, and digests."""
    from kvx.evaluation.items import load_passages

    split = load_passages(Path(str(settings.text)), target, **settings.cut)
    return list(split.fit[: settings.max_passages]), split.hashes


def _divided(rows: Sequence[Any], aside: int, what: str) -> tuple[list[Any], list[Any]]:
    """The first rows set aside, and the others."""
    if len(rows) <= aside:
        raise KvxError(f"{len(rows)} {what} leave none to train on when {aside} are set aside; give more text.")
    return list(rows[:aside]), list(rows[aside:])


def divide_questions(questions: Sequence[Question], aside: int) -> tuple[list[Question], list[Question]]:
    """About ``aside`` questions, chosen by a hash of their contexts, and those of all other contexts.

    Example:
        >>> from kvx.commands.train_examples import divide_questions
        >>> from kvx.evaluation.items import Question
        >>> rows = [Question(f"context {i // 2}", f"question {i}", ("yes",)) for i in range(40)]
        >>> ours, others = divide_questions(rows, 10)
        >>> len(ours), {q.context for q in ours} & {q.context for q in others}
        (10, set())
    """
    order = sorted({q.context for q in questions}, key=lambda text: hashlib.sha256(text.encode()).digest())
    chosen: set[str] = set()
    counts = {context: sum(q.context == context for q in questions) for context in order} if aside else {}
    total = 0
    for context, count in counts.items():
        if total + count > aside:
            break
        chosen.add(context)
        total += count
    rest = [q for q in questions if q.context not in chosen]
    if not rest:
        raise KvxError(f"{len(questions)} questions leave none to train on when {aside} are set aside.")
    return [q for q in questions if q.context in chosen], rest
