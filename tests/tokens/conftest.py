"""Small tokenizers of every kind kvx meets, trained in a second on a few sentences in many scripts."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from kvx.models.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog; then they went home together in 1984.",
    "Größe und Straße, naïve café, señor, Ångström: the thing there is theirs.",
    "Быстрая лиса прыгает через ленивую собаку, 中文分词需要对齐, 日本語の文章です。",
    "한국어 문장도 있습니다. العربية من اليمين إلى اليسار. हिन्दी में लिखा हुआ।",
    "def f(x):\n    return x + 1\n\n\tfor i in range(10): print(i)",
    "👩‍👩‍👧 👍🏽 🇫🇷 e\u0301 o\u0308",
] * 5

# Llama 3 and Qwen 2 split words with (almost) this pattern before byte-level BPE.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = [f"<0x{b:02X}>" for b in range(256)]


def _byte_bpe(
    pre: list,
    *,
    normalizer: object = None,
    prefix_space: bool = False,
    regex: bool = True,
    specials: tuple = (),
    vocab: int = 420,
) -> Backend:
    """Byte-level BPE (GPT-2's kind)."""
    backend = Backend(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=regex)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*pre, bytes_])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=vocab, initial_alphabet=alphabet, special_tokens=list(specials), show_progress=False
        ),
    )
    return backend


def gpt2() -> Tokenizer:
    """GPT-2: trimmed offsets in its post-processor, one token for BOS and EOS, not added."""
    backend = _byte_bpe([], specials=("<|endoftext|>",))
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    return Tokenizer.from_tokenizers(backend, bos="<|endoftext|>", eos="<|endoftext|>")


def prefix_gpt2() -> Tokenizer:
    """Byte-level BPE that inserts a space before the text (RoBERTa, OPT converted so)."""
    return Tokenizer.from_tokenizers(_byte_bpe([], prefix_space=True, vocab=380))


def smollm2() -> Tokenizer:
    """SmolLM2: digits one by one."""
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    backend = _byte_bpe([pre_tokenizers.Digits(individual_digits=True)], specials=specials, vocab=500)
    return Tokenizer.from_tokenizers(backend, bos="<|im_start|>", eos="<|im_end|>")


def qwen2() -> Tokenizer:
    """Qwen: NFC and no BOS at all."""
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    backend = _byte_bpe([split], normalizer=normalizers.NFC(), regex=False, specials=("<|endoftext|>", "<|im_end|>"))
    return Tokenizer.from_tokenizers(backend, eos=["<|im_end|>", "<|endoftext|>"])


def llama3() -> Tokenizer:
    """Llama 3: trimmed offsets and a BOS from the post-processor."""
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    backend = _byte_bpe([split], regex=False, specials=("<|begin_of_text|>", "<|eot_id|>"), vocab=600)
    bos = ("<|begin_of_text|>", backend.token_to_id("<|begin_of_text|>"))
    template = processors.TemplateProcessing(single=f"{bos[0]} $A", pair=f"{bos[0]} $A $B", special_tokens=[bos])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), template])
    return Tokenizer.from_tokenizers(backend, eos="<|eot_id|>")


def _sentencepiece(normalizer: object, pre: object, strip: bool, vocab: int = 700) -> Backend:
    """BPE over characters with a ``▁`` for the space and bytes for what it does not know."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizer
    if pre is not None:
        backend.pre_tokenizer = pre
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if strip else []))
    trainer = trainers.BpeTrainer(vocab_size=vocab, show_progress=False, limit_alphabet=60)
    backend.train_from_iterator(CORPUS, trainer)
    # As in converted SentencePiece models, the bytes are ordinary vocabulary, not added tokens.
    vocabulary = backend.get_vocab()
    merges = [tuple(merge) for merge in json.loads(backend.to_str())["model"]["merges"]]
    for token in ("<unk>", "<s>", "</s>", *BYTES):
        vocabulary.setdefault(token, len(vocabulary))
    backend.model = models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def llama2() -> Tokenizer:
    """Llama 2: inserts a ``▁`` before the text, byte fallback, BOS."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend = _sentencepiece(normalizer, None, strip=True)
    return Tokenizer.from_tokenizers(backend, bos="<s>", eos="</s>", adds_bos=True)


def gemma() -> Tokenizer:
    """Gemma: no inserted space, byte fallback, BOS."""
    pre = pre_tokenizers.Split(" ", "merged_with_previous")
    backend = _sentencepiece(normalizers.Replace(" ", "▁"), pre, strip=False, vocab=900)
    return Tokenizer.from_tokenizers(backend, bos="<s>", eos="</s>", adds_bos=True)


def nfkc_unigram() -> Tokenizer:
    """T5 and its kin: Unigram after NFKC, unknown characters fused."""
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=220, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return Tokenizer.from_tokenizers(backend, eos="</s>")


def nfkc_bytes() -> Tokenizer:
    """SentencePiece BPE with NFKC in front and byte fallback behind."""
    normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "▁")])
    return Tokenizer.from_tokenizers(_sentencepiece(normalizer, None, strip=False), bos="<s>", adds_bos=True)


def words() -> Tokenizer:
    """Lower-cased whole words; drops whitespace."""
    backend = Backend(models.WordLevel(unk_token="[UNK]"))
    backend.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=["[UNK]"], show_progress=False))
    return Tokenizer.from_tokenizers(backend)


BUILDERS = (gpt2, prefix_gpt2, smollm2, qwen2, llama3, llama2, gemma, nfkc_unigram, nfkc_bytes, words)
# Those whose pieces, joined, are the text; the value is what they insert before it.
LOSSLESS = {"gpt2": b"", "prefix_gpt2": b" ", "smollm2": b"", "llama3": b"", "llama2": b" ", "gemma": b""}


class Zoo:
    """Every tokenizer by name; prints as one word when a property fails."""

    def __init__(self) -> None:
        self._built = {build.__name__: build() for build in BUILDERS}

    def __getitem__(self, name: str) -> Tokenizer:
        return self._built[name]

    def __repr__(self) -> str:
        return "zoo"

    def items(self) -> Iterable[tuple[str, Tokenizer]]:
        return self._built.items()


@pytest.fixture(scope="session")
def zoo() -> Zoo:
    """Every tokenizer by name."""
    return Zoo()


@pytest.fixture(scope="session")
def lossless() -> dict[str, bytes]:
    """What the lossless ones insert before a text, by name."""
    return LOSSLESS


SNIPPETS = [
    *(
        "the ",
        "quick",
        " fox",
        "\n",
        "\t",
        "  ",
        " ",
        "1984",
        "don't",
        "naïve",
        "Straße",
        "e\u0301",
        "o\u0308\u0323",
        "\u0301",
    ),
    *(
        "Быстрая",
        "лиса",
        "中文分词",
        "日本語の",
        "한국어",
        "\u1112\u1161\u11ab",
        "العربية",
        "हिन्दी",
        "ไทย",
        "עברית",
        "Ελληνικά",
    ),
    *(
        "👩\u200d👩\u200d👧",
        "👍🏽",
        "🇫🇷",
        "❤\ufe0f",
        "\u200d",
        "ﬃ",
        "\ufdfa",
        "㋿",
        "½",
        "\u1e9b\u0323",
        "𝔘𝔫𝔦",
        "\U00020bb7",
        "\x00",
        "\ufeff",
    ),
]
# A text that spells one of these is read otherwise, which has a test of its own; "▁" may be taken out of a text.
SPECIALS = ("<s>", "</s>", "<unk>", "[UNK]", "<|endoftext|>", "<|begin_of_text|>", "<|eot_id|>")
CHAT_SPECIALS = ("<|im_start|>", "<|im_end|>")
TEXTS = (
    st.lists(st.sampled_from(SNIPPETS) | st.text(max_size=4), max_size=24)
    .map("".join)
    .filter(lambda text: not any(token in text.replace("▁", "") for token in SPECIALS + CHAT_SPECIALS))
)


@pytest.fixture(scope="session")
def texts() -> st.SearchStrategy[str]:
    """Texts in many scripts, with emoji sequences, combining marks, compatibility forms and random Unicode."""
    return TEXTS
