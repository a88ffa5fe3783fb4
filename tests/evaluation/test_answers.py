"""SQuAD's scores, the template, and where a one-line answer ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from kvx.errors import KvxError
from kvx.evaluation.answers import exact_match, f1_score, first_line, load_template, newline_tokens, normalise
from kvx.models.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("answer", "golds", "f1", "exact"),
    [
        ("Las Vegas, Nevada", ["Las Vegas, Nevada"], 1.0, 1.0),
        ("the las vegas nevada.", ["Las Vegas, Nevada"], 1.0, 1.0),
        ("Nevada", ["Las Vegas, Nevada"], 0.5, 0.0),
        ("1592", ["prior to June 1592", "1592"], 1.0, 1.0),
        ("", ["Paris"], 0.0, 0.0),
        ("a", ["the"], 1.0, 1.0),  # both empty once articles are gone, as in the official script
        ("Paris Paris", ["Paris"], 2 / 3, 0.0),
        ("London", ["Paris"], 0.0, 0.0),
    ],
)
def test_squad_scores(answer: str, golds: list[str], f1: float, exact: float):
    assert f1_score(answer, golds) == pytest.approx(f1)
    assert exact_match(answer, golds) == exact


def test_no_gold_answer_is_an_error():
    for score in (f1_score, exact_match):
        with pytest.raises(KvxError, match="at least one gold"):
            score("x", [])


def test_normal_form_keeps_words_that_contain_articles():
    assert normalise("An  Anthem; THE theatre") == "anthem theatre"


def test_the_answer_is_the_first_line():
    assert (
        first_line(" Paris \nQuestion: who") == "Paris" and first_line("Paris") == "Paris" and first_line("\nx") == ""
    )


def test_every_token_with_a_line_break_stops():
    byte_level = Backend(models.BPE({"a": 0, "Ċ": 1, ".Ċ": 2, "Ġ": 3, "ĊĊ": 4, "<s>": 5}, []))
    byte_level.decoder = decoders.ByteLevel()
    assert newline_tokens(Tokenizer.from_tokenizers(byte_level)) == (1, 2, 4)
    pieces = Backend(models.BPE({"a": 0, "\n": 1, "<0x0A>": 2, "Ċ": 3, "▁b": 4}, []))
    assert newline_tokens(Tokenizer.from_tokenizers(pieces)) == (1, 2), "the letter Ċ is no line break here"


def test_shipped_template_starts_a_fresh_turn_and_has_its_hash(tmp_path: Path):
    template = load_template()
    text = template.boundary("who {wrote} it")
    assert text.startswith("\n\nQuestion:") and text.endswith("Question: who {wrote} it\nAnswer:")
    assert text.count("Answer:") == 1 + len(template.examples) == 3
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"name": "m", "example": "", "question": "\n{question}\n", "examples": []}))
    assert load_template(path).boundary("q") == "\nq\n" and load_template(path).sha256 != template.sha256


@pytest.mark.parametrize("content", ["{}", "[", '{"name":"m","example":"{x}","question":"{y}","examples":[]}'])
def test_a_broken_template_is_refused(tmp_path: Path, content: str):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(KvxError, match="not usable"):
        load_template(path)
    with pytest.raises(KvxError, match="two_examples"):
        load_template("absent")
