"""The generated reading task: only the passage answers, and nothing else about it tells the answer."""

from __future__ import annotations

import collections
from itertools import islice

import pytest

from kvx.errors import KvxError
from kvx.testing.minis import VOCABULARIES, tokenizer
from kvx.testing.pretrain import SEED, Reader, Stage, documents
from kvx.testing.reading import READING, RELATIONS, passages, questions_of


def test_every_question_has_one_answer_in_its_passage() -> None:
    for passage in islice(passages(3, people=4, relations=3), 200):
        answers = collections.defaultdict(set)
        for fact in passage.facts:
            answers[fact.question].add(fact.answer)
            assert fact.sentence in passage.text
        assert len(answers) == 12 and all(len(found) == 1 for found in answers.values())


def test_people_who_share_a_relation_have_different_values() -> None:
    for passage in islice(passages(4, people=4, relations=1), 200):
        assert len({fact.answer for fact in passage.facts}) == 4


def test_a_person_and_a_relation_tell_nothing_without_the_passage() -> None:
    found = collections.defaultdict(collections.Counter)
    for passage in islice(passages(5, people=4, relations=1), 20_000):
        for fact in passage.facts:
            if fact.closed:
                found[fact.question][fact.answer] += 1
    most = [max(row.values()) / sum(row.values()) for row in found.values() if sum(row.values()) > 200]
    assert len(most) > 150 and sum(most) / len(most) < 0.12  # a sixteenth is chance


def test_equal_seeds_give_equal_passages_and_others_do_not() -> None:
    first, again, other = (list(islice(passages(seed), 20)) for seed in (7, 7, 8))
    assert first == again and not set(first) & set(other)


def test_questions_to_measure_on_share_no_passage_with_training() -> None:
    measured = {q.context for q in questions_of(1, 200, closed=True, people=4, relations=2)}
    trained = {p.text for step in range(50) for p, _ in islice(documents(SEED + step, Stage(1, 4, 2, 6)), 64)}
    assert len(measured) == 200 and not measured & trained


@pytest.mark.parametrize("closed", [True, False])
def test_questions_are_of_the_kind_that_was_asked_for(closed: bool) -> None:
    kinds = {value for kind in RELATIONS if kind.closed for value in kind.values[0]}
    for question in questions_of(2, 50, closed=closed):
        assert (question.answers[0] in kinds) == closed and question.answers[0] in question.context


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_document_read_in_parts_is_the_document_read_whole(vocabulary: str) -> None:
    words = tokenizer(vocabulary)
    reader = Reader(words)
    for passage, order in islice(documents(9, Stage(1, 3, 2, 4)), 50):
        ids, answers = reader.document(passage, order)
        text = passage.text + passage.asked(tuple(order))
        assert ids == words.encode(text).ids.tolist()
        asked = "".join(f" {passage.facts[i].answer}" for i in order)
        assert words.decode([ids[i] for i in answers]) == asked


def test_rows_hold_what_is_scored_and_its_weight() -> None:
    words = tokenizer("words")
    reader, stage = Reader(words), Stage(1, 2, 1, 1, prose=0.25)
    one = next(documents(11, stage))
    ids, answers = reader.document(*one)
    rows = reader.batch([one], stage, len(ids) + 3)
    assert rows.tokens[0].tolist() == [*ids, -1, -1, -1]
    scored = dict(zip(rows.where[0].tolist(), rows.weights[0].tolist(), strict=True))
    assert {at for at, weight in scored.items() if weight == 1.0} == set(answers)
    assert sum(weight == 0.25 for weight in scored.values()) == len(ids) - 1 - len(answers)  # BOS weighs nothing
    only = reader.batch([one], Stage(1, 2, 1, 1), len(ids))
    assert only.weights.sum() == len(answers) and set(only.where[only.weights > 0].tolist()) == set(answers)


def test_passages_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(KvxError, match="expected 1 to 16 people and 1 to 7 relations"):
        next(passages(0, people=40))


def test_the_template_ends_an_answer_at_a_line_break() -> None:
    assert READING.boundary("Ada eats what?") == "\n> Ada eats what?"
    assert next(passages(0)).asked((0,)).endswith("\n")
