"""What ``kvx demo`` reads and asks: real models on real prose, or, with ``--minis``, generated passages."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvx.commands.demo import Demo
    from kvx.evaluation.answers import Template
    from kvx.evaluation.items import PassageSplit, Question
    from kvx.fitting.training.examples import Example
    from kvx.models.model import Model

MINIS = {
    **{"source": "mini:gpt2-small", "target": "mini:opt-large", "method": "full_head", "layers": "all"},
    **{"batch_size": 32, "max_tokens": 30_000, "items": 60, "max_questions": 60, "max_new_tokens": 8},
}
FIT_PASSAGES, TRAIN_PASSAGES = 800, 2400  # of the minis
QUESTIONS, PASSAGES = 240, 60  # that a translator between real models learns from


@dataclasses.dataclass(frozen=True)
class Scene:
    """Texts and questions of one demo.

    Attributes:
        split: passages to fit on, and passages that are never fitted.
        questions: to be asked; their contexts are never fitted.
        template: how they are put.
    """

    split: PassageSplit
    questions: list[Question]
    template: Template


def scene_of(settings: Demo, target: Model) -> Scene:
    """The texts and questions that the settings describe."""
    if settings.minis:
        return _generated(settings)
    from kvx.commands.demo import load_demo_questions, passages_of
    from kvx.evaluation.answers import load_template

    return Scene(passages_of(settings, target), load_demo_questions(settings.max_questions), load_template())


def _generated(settings: Demo) -> Scene:
    """Passages of people, and questions about them, half of a closed set and half to be copied out."""
    from kvx.evaluation.items import Item, PassageSplit, digest
    from kvx.testing.reading import READING
    from kvx.testing.reading_work import Task, Work

    each = max(settings.max_questions // 2, 1)
    task = Task.create(Work(fit=FIT_PASSAGES, train=1, items=settings.items, questions=each))
    fitted = tuple(Item(text, "") for text in task.texts)
    split = PassageSplit(fitted, task.items, digest(fitted))
    return Scene(split, [q for both in zip(task.closed, task.phrases, strict=True) for q in both], READING)


def examples_of(settings: Demo, scene: Scene) -> tuple[list[Example], list[Example]]:
    """What a translator learns from, and what it is judged on while it learns; neither is measured in the end."""
    from kvx.evaluation.examples import cloze_from_passages, examples_from_passages, examples_from_questions
    from kvx.evaluation.items import load_questions

    if settings.minis:
        from kvx.testing.reading_work import Task, Work

        count = TRAIN_PASSAGES // (12 if settings.fast else 1)
        made = list(Task.create(Work(fit=1, train=count, items=1, questions=1)).examples)
        return made[count // 12 :], made[: count // 12]
    few = 12 if settings.fast else 1
    asked = examples_from_questions(load_questions("demo:questions", QUESTIONS // few), scene.template)
    read = list(scene.split.fit[: PASSAGES // few])
    judged, kept = read[: max(len(read) // 5, 2)], read[max(len(read) // 5, 2) :]
    aside = max(len(asked) // 12, 2)
    trained = [*asked[aside:], *examples_from_passages(kept), *cloze_from_passages(kept, scene.template)]
    return trained, [*asked[:aside], *examples_from_passages(judged)]
