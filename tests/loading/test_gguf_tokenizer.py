"""Tokenizers built from GGUF metadata: small vocabularies by hand, and transformers' own tokenizers as oracle."""

from __future__ import annotations

from typing import Any

import pytest

from kvx.errors import KvxError
from kvx.models.gguf_tokenizer import PRE_TOKENIZERS, build_tokenizer


def metadata(**changes: Any) -> dict[str, Any]:
    base = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "Ġ", "Ġa", "<|im_start|>", "<|im_end|>", "<think>"],
        "tokenizer.ggml.token_type": [1, 1, 1, 1, 1, 3, 3, 4],
        "tokenizer.ggml.merges": ["a b", "Ġ a"],
        "tokenizer.ggml.bos_token_id": 5,
        "tokenizer.ggml.eos_token_id": 6,
    }
    return {k: v for k, v in {**base, **changes}.items() if v is not None}


SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "<0x0A>", "▁", "a", "b", "▁a", "ab", "▁ab"],
    "tokenizer.ggml.token_type": [2, 3, 3, 6, 1, 1, 1, 1, 1, 1],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -5.0, -4.0, -6.0],
    "tokenizer.ggml.merges": None,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def test_special_tokens_stay_whole() -> None:
    found = build_tokenizer(metadata())
    assert found.backend.encode("<|im_start|>ab a<think>b<|im_end|>").ids == [5, 2, 4, 7, 1, 6]
    assert found.backend.decode([5, 2, 7, 6], skip_special_tokens=True) == "ab<think>"
    assert (found.bos_id, found.eos_ids, found.adds_bos) == (5, (6,), False)


def test_end_of_turn_tokens_are_eos_too() -> None:
    tokens = ["a", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>"]
    meta = metadata(
        **{
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1, 3, 3, 3, 1],
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.eot_token_id": 3,
            "tokenizer.ggml.bos_token_id": None,
        }
    )
    assert build_tokenizer(meta).eos_ids == (2, 3, 1)  # stated ones first; "<|im_end|>" is text here


@pytest.mark.parametrize(("flag", "adds"), [(None, True), (True, True), (False, False)])
def test_llama3_adds_bos_unless_told_otherwise(flag: bool | None, adds: bool) -> None:
    meta = metadata(**{"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": flag})
    assert build_tokenizer(meta).adds_bos is adds


def test_ignore_merges() -> None:
    """Llama 3 looks a whole pre-token up before it merges; GPT-2 does not."""
    meta = metadata(**{"tokenizer.ggml.merges": ["Ġ a"]})
    assert build_tokenizer(meta).backend.encode("ab").ids == [0, 1]
    assert build_tokenizer({**meta, "tokenizer.ggml.pre": "llama-bpe"}).backend.encode("ab").ids == [2]


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt-2", "a 1234  b", ["a", "Ġ1234", "Ġ", "Ġb"]),
        ("smollm", "a 12  3", ["a", "Ġ", "1", "2", "ĠĠ", "3"]),
        ("llama-bpe", "a 12345\n\nb", ["a", "Ġ", "123", "45", "ĊĊ", "b"]),
        ("qwen2", "a 12\n b'LL", ["a", "Ġ", "1", "2", "Ċ", "Ġb", "'LL"]),
        ("tekken", "aBC/\n", ["a", "BC", "/Ċ"]),
    ],
)
def test_pre_tokenizers(name: str, text: str, pieces: list[str]) -> None:
    backend = build_tokenizer(metadata(**{"tokenizer.ggml.pre": name})).backend
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_sentencepiece() -> None:
    found = build_tokenizer(metadata(**SENTENCEPIECE))
    assert found.backend.encode("ab ab\n").tokens == ["▁ab", "▁ab", "<0x0A>"]
    assert found.backend.decode(found.backend.encode("ab ab\n").ids) == "ab ab\n"
    assert found.adds_bos and found.bos_id == 1


def test_sentencepiece_without_space_prefix() -> None:
    found = build_tokenizer(metadata(**SENTENCEPIECE, **{"tokenizer.ggml.add_space_prefix": False}))
    assert found.backend.encode("ab").tokens == ["ab"]
    assert found.backend.decode(found.backend.encode(" ab").ids) == " ab"


@pytest.mark.parametrize("pre", [None, "default", "klingon"])
def test_unknown_pre_tokenizers_are_refused(pre: str | None) -> None:
    with pytest.raises(KvxError, match=r"pre-tokenizer .*gpt-2.*pass tokenizer="):
        build_tokenizer(metadata(**{"tokenizer.ggml.pre": pre}))


@pytest.mark.parametrize("kind", [None, "bert", "rwkv"])
def test_unknown_models_are_refused(kind: str | None) -> None:
    with pytest.raises(KvxError, match="tokenizer of type"):
        build_tokenizer(metadata(**{"tokenizer.ggml.model": kind}))


TEXTS = [
    "Hello, world's 12345 end.\n\n  x",
    "Ünïcödé 漢字 かな 한국어 🙂👩‍👧",
    "tabs\t\tand\r\n",
    "CamelCase HTTPServer",
]


@pytest.mark.parametrize("name", ["qwen2", "llama-bpe", "gpt-2"])
def test_splits_match_transformers_classes(name: str) -> None:
    """Where transformers ships the family's tokenizer class, both cut the same pieces."""
    from transformers import GPT2Tokenizer, Qwen2Tokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if name == "llama-bpe":
        assert PRE_TOKENIZERS[name].split == GGUF_PRE_TOKENIZER_SPLITS[name]
        return
    theirs = {"qwen2": Qwen2Tokenizer, "gpt-2": GPT2Tokenizer}[name]().backend_tokenizer.pre_tokenizer
    ours = build_tokenizer(metadata(**{"tokenizer.ggml.pre": name})).backend.pre_tokenizer
    for text in TEXTS:
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)
