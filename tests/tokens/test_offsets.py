"""Offsets are characters of the whole text, and ends are ordered, whatever the tokenizer does to the text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvx.errors import KvxError
from kvx.models.offsets import code_points, fill_gaps, strict_ends, utf8_starts
from kvx.models.tokenizer import Encoding, Tokenizer


def spell(tokenizer: Tokenizer, encoding: Encoding) -> list[bytes]:
    return [tokenizer.piece(int(i)) for i in encoding.ids[encoding.prefix :]]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_ends_are_strictly_ordered_and_offsets_stay_inside_the_text(zoo, texts, data):
    text = data.draw(texts)
    for name, tokenizer in zoo.items():
        encoding = tokenizer.encode(text)
        offsets, ends = encoding.offsets[encoding.prefix :], encoding.ends[encoding.prefix :]
        assert (np.diff(ends) > 0).all(), name
        assert (np.diff(offsets[:, 1]) >= 0).all(), name
        assert (offsets[:, 0] <= offsets[:, 1]).all(), name
        assert ((offsets >= 0) & (offsets <= len(text))).all(), name
        assert (np.ceil(ends) == offsets[:, 1]).all(), name
        assert encoding.characters == len(text)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_case_26_joined_pieces_are_the_text_and_give_the_offsets(zoo, lossless, texts, data):
    """Chinese, emoji, anything: bytes of the pieces, joined, are the text's, and every offset follows from them."""
    text = data.draw(texts).replace("▁", "")
    starts = utf8_starts(code_points(text))
    for name, inserted in lossless.items():
        tokenizer = zoo[name]
        encoding = tokenizer.encode(text)
        pieces = spell(tokenizer, encoding)
        lead = inserted if text and (name == "llama2" or not text.startswith(" ")) else b""
        assert b"".join(pieces) == lead + text.encode(), name
        stop = np.cumsum([len(p) for p in pieces], dtype=np.int64) - len(lead)
        start = np.maximum(stop - [len(p) for p in pieces], 0)
        first = np.searchsorted(starts, start, side="right") - 1  # the character that holds the first byte
        last = np.searchsorted(starts, stop)  # one past the character that holds the last byte
        first[stop <= 0] = 0
        expected = np.stack([first, last], axis=1).reshape(-1, 2)
        np.testing.assert_array_equal(encoding.offsets[encoding.prefix :], expected, err_msg=name)
        whole = np.interp(stop, starts, np.arange(len(starts)))
        np.testing.assert_allclose(encoding.ends[encoding.prefix :], whole, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    ("name", "text", "pieces", "offsets"),
    [
        ("smollm2", "a<|im_end|>b", [b"a", b"<|im_end|>", b"b"], [[0, 1], [1, 11], [11, 12]]),
        ("gemma", "a<s>b", [b"a", b"<s>", b"b"], [[0, 1], [1, 4], [4, 5]]),
        ("llama2", "a<s>b", [b" ", b"a", b"<s>", b" ", b"b"], [[0, 0], [0, 1], [1, 4], [4, 5], [4, 5]]),
        ("llama2", "<s>", [], [[0, 3]]),  # a text that brings its own BOS is given no second one
    ],
)
def test_a_special_token_spelled_in_the_text_is_read_as_such(zoo, name, text, pieces, offsets):
    encoding = zoo[name].encode(text)
    assert spell(zoo[name], encoding) == pieces
    assert encoding.offsets[encoding.prefix if pieces else 0 :].tolist() == offsets
    assert encoding.characters == len(text)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_decoding_gives_the_text_back(zoo, texts, data):
    text = data.draw(texts).replace("▁", "")
    for name in ("gpt2", "smollm2", "llama3", "llama2", "gemma"):
        tokenizer = zoo[name]
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids) == text, name
        assert "".join(tokenizer.decode_stream(int(i) for i in ids)) == text, name


@pytest.mark.parametrize("name", ["gpt2", "smollm2", "llama3", "gemma"])
def test_a_split_character_is_shared(zoo, name):
    """A character no tokenizer has seen is one token a byte; all of them hold it, and they end inside it in order."""
    encoding = zoo[name].encode("a\U00020bb7b", bos=False)
    assert encoding.offsets.tolist() == [[0, 1], [1, 2], [1, 2], [1, 2], [1, 2], [2, 3]]
    assert encoding.ends.tolist() == [1.0, 1.25, 1.5, 1.75, 2.0, 3.0]


def test_inserted_space_holds_no_text(zoo):
    encoding = zoo["llama2"].encode("\nx", bos=False)
    assert zoo["llama2"].piece(int(encoding.ids[0])) == b" "
    assert encoding.offsets.tolist() == [[0, 0], [0, 1], [1, 2]]


def test_merged_and_dropped_characters_belong_to_the_token_before_them(zoo):
    composed = zoo["qwen2"].encode("e\u0301x")
    assert composed.offsets.tolist()[0] == [0, 2]
    accents = zoo["words"].encode("the\u0301 fox\u0301")
    assert accents.offsets.tolist() == [[0, 4], [5, 9]]


def test_dropped_whitespace_belongs_to_no_token(zoo):
    assert zoo["words"].encode(" the  fox \n").offsets.tolist() == [[1, 4], [6, 9]]


def test_compatibility_forms_are_spread_in_order(zoo):
    """One ligature that becomes three letters: three tokens hold it, ordered although its bytes do not say how."""
    encoding = zoo["nfkc_unigram"].encode("xﬃx")
    held = encoding.offsets[:, 0] == 1
    assert held.sum() >= 2
    assert (np.diff(encoding.ends) > 0).all()


def test_lone_surrogates_are_refused(zoo):
    with pytest.raises(KvxError, match="lone surrogate at character 1"):
        zoo["gpt2"].encode("a\ud800")


def test_fill_gaps_stops_at_whitespace():
    offsets = np.array([[0, 1], [4, 5]])
    assert fill_gaps(offsets, code_points("e\u0301 \u0301x")).tolist() == [[0, 2], [4, 5]]


def test_strict_ends_falls_back_when_bytes_do_not_add_up():
    offsets = np.array([[0, 1], [0, 1], [0, 1], [1, 2]])
    ends, _ = strict_ends(offsets, np.arange(4), utf8_starts(code_points("½x")), lambda token: 5)
    np.testing.assert_allclose(ends, [1 / 3, 2 / 3, 1, 2])


def test_overlap_that_continues_is_placed_by_bytes():
    """A token that stops inside a character while the next goes on past it: "é" is split between two tokens."""
    offsets = np.array([[0, 2], [1, 3]])
    ends, _ = strict_ends(offsets, np.arange(2), utf8_starts(code_points("aéb")), lambda token: 2)
    np.testing.assert_allclose(ends, [1.5, 3])
