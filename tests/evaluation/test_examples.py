"""Training examples: what is asked for stands in the context, and only the answer is scored."""

from __future__ import annotations

import re

import pytest

from kvx.errors import KvxError
from kvx.evaluation.answers import load_template
from kvx.evaluation.examples import BLANK, cloze_from_passages, examples_from_passages, examples_from_questions
from kvx.evaluation.items import Item, Question

PROSE = [
    "The tower was finished in 1889 by a small crew. Its builder, Gustave Eiffel, kept a room there. He slept well.",
    "A quiet village lies below the hills. Every autumn Maria Lind gathers exactly 42 baskets of quinces there.",
    "no such thing here",
]


def test_continuations_are_scored_whole() -> None:
    (made,) = examples_from_passages([Item("The sky is", " blue.")])
    assert (made.context, made.suffix, made.scored, made.kind) == ("The sky is", " blue.", (), "continuation")


def test_questions_end_as_the_template_goes_on_and_score_the_answer() -> None:
    question = Question("It was Ann who came.", "who came", ("Anna", "Ann"))
    (made,) = examples_from_questions([question])
    boundary = load_template().boundary("who came")
    assert made.suffix == boundary + " Ann\n\n" and made.scored_text == " Ann\n\n"


def test_clozes_ask_for_what_only_the_context_tells() -> None:
    made = cloze_from_passages([Item(text, " x y") for text in PROSE], per_passage=3, rare=1, seed=1)
    assert {e.context for e in made} == set(PROSE[:2]) and all(e.kind == "cloze" for e in made)
    for example in made:
        answer = example.scored_text.strip()
        (asked,) = re.findall(r'what is missing in "(.*)"\nAnswer:', example.suffix)
        assert asked.count(BLANK) == 1 and asked.replace(BLANK, answer) in example.context
        assert answer.lower() not in asked.lower()
    found = {e.scored_text.strip() for seed in range(12) for e in cloze_from_passages(PROSE, rare=1, seed=seed)}
    assert {"1889", "Gustave Eiffel", "Maria Lind", "42"} <= found
    assert cloze_from_passages(PROSE, seed=3) == cloze_from_passages(PROSE, seed=3)


def test_long_sentences_are_cut_at_words_around_the_blank() -> None:
    words = " ".join(f"word{'abcdefgh'[i % 8] * (1 + i // 8)}" for i in range(60))
    (made,) = cloze_from_passages([f"The {words} in 1812 and {words}."], rare=0, reach=40)
    (asked,) = re.findall(r'missing in "(.*)"', made.suffix)
    assert made.scored_text.strip() == "1812" and len(asked) < 90 and all(w in words.split() for w in asked.split()[:2])


def test_nothing_to_make_is_refused() -> None:
    with pytest.raises(KvxError, match="per_passage"):
        cloze_from_passages(PROSE, per_passage=0)
