"""Passages, the fit / held-out split, questions, and who borrows whose cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvx.errors import KvxError
from kvx.evaluation.batches import CACHE_BYTES, derange, pack, plan, shared_lengths
from kvx.evaluation.items import (
    Item,
    digest,
    load_passages,
    load_questions,
    paragraphs,
    passages,
    split,
    split_text,
    token_ends,
)
from kvx.models.buckets import bucket_length
from tests.evaluation import planted

WORDS = "the quick brown fox jumps over a lazy dog while seven wizards quietly measure extraordinary voltages"


def _text(count: int = 60, words: int = 55) -> str:
    bag = WORDS.split()
    return "\n\n".join(
        " ".join(bag[(7 * p + w * (1 + p % 5)) % len(bag)] + str(p * w % 13) for w in range(words))
        for p in range(count)
    )


def test_passages_have_the_asked_lengths_and_never_share_text():
    text = _text()
    items = passages(text, context_tokens=40, continuation_tokens=10)
    assert len(items) > 20
    for item in items:
        assert 40 <= len(token_ends(item.context)) <= 43
        assert len(token_ends(item.continuation)) == 10
        assert item.continuation[0].isspace() and not item.context[-1].isspace()
        assert item.text in text
    at = [text.index(item.text) for item in items]
    assert all(a + len(x.text) <= b for a, x, b in zip(at, items, at[1:], strict=False)), "in order, without overlap"


def test_a_single_endless_paragraph_is_cut_into_many_passages():
    items = passages(" ".join(WORDS.split() * 300), context_tokens=50, continuation_tokens=10)
    assert len(items) > 80


def test_scripts_without_spaces_give_passages_too():
    items = passages("中文的句子没有空格。" * 100, context_tokens=30, continuation_tokens=8)
    assert len(items) > 10 and all(len(token_ends(i.continuation)) == 8 for i in items)


def test_a_text_that_is_too_short_gives_none_and_bad_lengths_are_refused():
    assert passages("only a few words here") == []
    with pytest.raises(KvxError, match="at least two continuation tokens"):
        passages(_text(), context_tokens=10, continuation_tokens=1)


def test_repeated_paragraphs_count_once():
    assert paragraphs("a\n\nb\n \na\n\n\nc d\ne") == ["a", "b", "c d\ne"]


def test_split_never_overlaps_and_does_not_depend_on_order():
    items = passages(_text(), context_tokens=40, continuation_tokens=10)
    one, two = split(items, "text"), split(items[::-1] + items, "text")
    assert set(one.fit) == set(two.fit) and set(one.held_out) == set(two.held_out)
    assert not set(one.fit) & set(one.held_out) and set(one.fit) | set(one.held_out) == set(items)
    assert len({len(h) for h in one.hashes.values()}) == 1 and one.hashes["fit"] != one.hashes["held_out"]


def test_fit_texts_stay_within_the_budget():
    halves = split_text(_text(), context_tokens=40, continuation_tokens=10)
    texts = halves.fit_texts(max_tokens=260)
    assert 1 <= sum(len(token_ends(t)) for t in texts) <= 260
    assert len(halves.fit_texts()) == len(halves.fit)


def test_files(tmp_path: Path):
    path = tmp_path / "prose.txt"
    path.write_text(_text(), encoding="utf-8")
    halves = load_passages(path, context_tokens=40, continuation_tokens=10, held_out=0.3)
    assert len(halves.held_out) < len(halves.fit)
    with pytest.raises(KvxError, match="cannot read"):
        load_passages(tmp_path / "absent.txt")
    with pytest.raises(KvxError, match="more text"):
        load_passages(path, context_tokens=4000)


def test_questions(tmp_path: Path):
    path = tmp_path / "q.jsonl"
    rows = [{"id": str(i), "question": f"who {i}", "answers": ["x"], "context": f"it was x{i}"} for i in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    found = load_questions(path)
    assert [q.question for q in found] == ["who 0", "who 1", "who 2"] and found[1].answers == ("x",)
    assert len(load_questions(path, limit=2)) == 2
    assert digest(found) != digest(found[:2]) and digest(found) == digest(load_questions(path))


@pytest.mark.parametrize("line", ["no json", '{"question": "q"}', '{"question": "q", "context": "c", "answers": []}'])
def test_a_broken_question_is_named_by_its_line(tmp_path: Path, line: str):
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "q", "context": "c", "answers": ["a"]}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(KvxError, match="line 2"):
        load_questions(path)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 12)), min_size=2, max_size=40))
def test_nobody_borrows_from_their_own_context(rows: list[tuple[int, int]]):
    lengths, contexts = [r[0] for r in rows], [str(r[1]) for r in rows]
    most = max(contexts.count(c) for c in contexts)
    try:
        groups = derange(lengths, contexts)
    except KvxError:
        assert most > len(rows) // 3, "only refused when one context dominates"
        return
    donor = {a: b for group in groups for a, b in zip(group, (*group[1:], group[0]), strict=True)}
    assert sorted(donor) == sorted(donor.values()) == list(range(len(rows))), "every cache is borrowed once"
    assert all(contexts[a] != contexts[b] for a, b in donor.items())


def test_partners_have_about_the_same_length():
    lengths = [10 * i for i in range(20)]
    groups = derange(lengths[::-1], [str(i) for i in range(20)])
    assert all(abs(lengths[a] - lengths[b]) == 10 for a, b in groups)


def test_items_of_one_context_are_refused():
    with pytest.raises(KvxError, match="different contexts"):
        derange([5, 5, 5], ["same", "same", "same"])
    with pytest.raises(KvxError, match="different contexts"):
        derange([5], ["alone"])


def test_an_item_is_its_text():
    assert Item("a b", " c").text == "a b c"


def test_batches_hold_whole_groups_and_name_partners_by_row():
    groups = [(5, 1), (0, 2, 4), (3, 6), (7, 8)]
    packed = pack(groups, 4)
    assert [sorted(items) for items, _ in packed] == [[1, 5], [0, 2, 4], [3, 6, 7, 8]]
    for items, partner in packed:
        assert all(items[a] != items[row] for row, a in enumerate(partner))
    assert pack([(0, 1, 2)], 2) == [([0, 1, 2], [1, 2, 0])], "a group of three may stand alone"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 900), min_size=1, max_size=20), st.integers(2, 16), st.integers(0, 10_000))
def test_shared_lengths_fit_and_cost_no_more_than_one_or_all(needs: list[int], rows: int, price: int):
    needs = sorted(needs)
    lengths = shared_lengths(needs, rows, price)
    assert all(length >= need for length, need in zip(lengths, needs, strict=True)) and lengths == sorted(lengths)

    def cost(chosen: list[int]) -> int:
        return rows * sum(chosen) + price * len(set(chosen))

    buckets = [bucket_length(need) for need in needs]
    assert cost(lengths) <= min(cost(buckets), cost([max(buckets)] * len(needs)))


def test_long_contexts_take_fewer_rows_and_shapes_stay_few():
    letters = planted.tokenizer()
    contexts = ["abc" * n + "d" * (n % 3) for n in range(10, 34)]
    batches = plan(letters, letters, contexts, 8)
    assert sorted(i for b in batches for i in b.items[: b.real]) == list(range(24))
    assert {len(b.items) for b in batches} == {8} and len({b.length for b in batches}) == 1
    assert all(b.length >= 1 + len(contexts[i]) for b in batches for i in b.items), "BOS counted"
    assert {len(b.items) for b in plan(letters, letters, contexts, 8, CACHE_BYTES // 300)} == {2}
    with pytest.raises(KvxError, match="at least 2"):
        plan(letters, letters, contexts, 1)
    with pytest.raises(KvxError, match="item 1 is empty"):
        plan(letters, letters, ["abc", ""], 2)
