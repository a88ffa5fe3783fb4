"""The tokenizer inside a GGUF file, as a ``tokenizers.Tokenizer``.

A GGUF lists the vocabulary, token types and merges (byte-level BPE) or scores (sentencepiece BPE); which normaliser,
pre-tokenizer and decoder go with them follows from ``tokenizer.ggml.model`` and ``tokenizer.ggml.pre``. Names that are
not in the tables below are refused: a wrong pre-tokenizer gives wrong tokens without any error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvx.errors import KvxError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTROL, USER_DEFINED = 3, 4
SPACE = "\u2581"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_TAIL}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """How byte-level BPE cuts text before merging.

    Attributes:
        split: regular expression whose matches are pre-tokens.
        digits: cut every digit off first (SmolLM, StarCoder).
        ignore_merges: a pre-token that is in the vocabulary is one token, whatever the merges say (Llama 3).
        adds_bos: whether texts start with BOS where the file does not say.
    """

    split: str
    digits: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_LLAMA3_LIKE = PreTokenizer(_LLAMA3, ignore_merges=True, adds_bos=True)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais", "trillion"), PreTokenizer(_GPT2)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), PreTokenizer(_GPT2, digits=True)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _LLAMA3_LIKE),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo"), PreTokenizer(_QWEN2)),
    "tekken": PreTokenizer(_TEKKEN, ignore_merges=True, adds_bos=True),
}
END_OF_TURN = ("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>")
GEMMA = ("gemma", "gemma2", "gemma3")


@dataclasses.dataclass(frozen=True)
class GgufTokenizer:
    """A tokenizer and the facts a GGUF states beside it.

    Attributes:
        backend: the ``tokenizers.Tokenizer``; it adds no BOS by itself.
        bos_id: beginning-of-sequence id, or ``None``.
        eos_ids: ids that end a text or a turn, the file's own EOS first.
        adds_bos: whether the model expects a BOS before every text.
        chat_template: Jinja source, or ``None``.
    """

    backend: Tokenizer
    bos_id: int | None
    eos_ids: tuple[int, ...]
    adds_bos: bool
    chat_template: str | None


def build_tokenizer(metadata: Mapping[str, Any]) -> GgufTokenizer:
    """Build the tokenizer that a GGUF's metadata describes.

    Args:
        metadata: the header of :class:`kvx.models.gguf_file.GgufFile`.

    Returns:
        The tokenizer and its facts.

    Raises:
        KvxError: no vocabulary, or a tokenizer model or pre-tokenizer that kvx does not know, by name.

    Example:
        >>> from kvx.models.gguf_tokenizer import build_tokenizer
        >>> found = build_tokenizer({
        ...     "general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        ...     "tokenizer.ggml.tokens": ["a", "b", "ab", "<|im_end|>"], "tokenizer.ggml.token_type": [1, 1, 1, 3],
        ...     "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.eos_token_id": 3})
        >>> found.backend.encode("abba<|im_end|>").ids, found.eos_ids
        ([2, 1, 0, 3], (3,))
    """
    kind = metadata.get("tokenizer.ggml.model")
    if "tokenizer.ggml.tokens" not in metadata or kind not in ("gpt2", "llama"):
        raise KvxError(
            f"this GGUF holds a tokenizer of type {kind!r}; kvx builds 'gpt2' (byte-level BPE) and 'llama' "
            "(sentencepiece BPE) ones; pass tokenizer= (a folder with the original tokenizer.json)."
        )
    backend = _byte_level(metadata) if kind == "gpt2" else _sentencepiece(metadata)
    _add_special_tokens(backend, metadata, byte_level=kind == "gpt2")
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    default = kind == "llama" or PRE_TOKENIZERS[metadata["tokenizer.ggml.pre"]].adds_bos
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", default)) and bos is not None
    return GgufTokenizer(backend, bos, _eos_ids(metadata), adds_bos, metadata.get("tokenizer.chat_template"))


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    name = metadata.get("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise KvxError(
            f"this GGUF names the pre-tokenizer {name!r}; kvx knows {', '.join(sorted(PRE_TOKENIZERS))}; "
            "pass tokenizer= (a folder with the original tokenizer.json)."
        )
    pre = PRE_TOKENIZERS[name]
    alphabet = _alphabet()
    vocab = {_spell(token, alphabet): i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = _listed_merges(metadata) or _recovered_merges(vocab, {token: -i for token, i in vocab.items()})
    tok = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, ignore_merges=pre.ignore_merges))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre.digits else []
    steps.append(pre_tokenizers.Split(Regex(pre.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tok.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tok.decoder = decoders.ByteLevel()
    return tok


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    gemma = metadata.get("general.architecture") in GEMMA
    if gemma:  # runs of spaces are stored as spaces, but looked up in their escaped form
        tokens = [SPACE * len(t) if " " in t and not t.strip() else t for t in tokens]
    vocab = {token: i for i, token in enumerate(tokens)}
    # Gemma's scores do not follow its merge order; the order of its vocabulary does.
    scored = range(0, -len(tokens), -1) if gemma else metadata["tokenizer.ggml.scores"]
    scores = dict(zip(tokens, scored, strict=True))
    merges = _listed_merges(metadata) or _recovered_merges(vocab, scores)
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id")
    unknown = None if unknown_id is None else tokens[unknown_id]
    tok = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True, unk_token=unknown))
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if gemma:
        tok.normalizer = normalizers.Replace(" ", SPACE)
        tok.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    else:
        prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        scheme = "first" if prefix else "never"
        tok.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
        steps += [decoders.Strip(" ", 1, 0)] if prefix else []
    tok.decoder = decoders.Sequence(steps)
    return tok


def _listed_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = []
    for merge in metadata.get("tokenizer.ggml.merges", ()):
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    return pairs


def _recovered_merges(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Merges implied by a sentencepiece vocabulary: every way to cut a token into two tokens, best score first."""
    found: list[tuple[float, int, int, int, int, str, str]] = []
    for token, score in scores.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            a, b = vocab.get(left), vocab.get(right)
            if a is not None and b is not None:
                found.append((-score, -len(left), -len(right), a, b, left, right))
    found.sort(key=lambda row: row[:3])
    return [(row[5], row[6]) for row in found]


def _add_special_tokens(tok: Tokenizer, metadata: Mapping[str, Any], *, byte_level: bool) -> None:
    """Control tokens stay whole and are special; user-defined ones stay whole and are text."""
    from tokenizers import AddedToken

    alphabet = set(_alphabet().values()) if byte_level else None
    kinds = metadata.get("tokenizer.ggml.token_type") or ()
    control, plain = [], []
    for token, kind in zip(metadata["tokenizer.ggml.tokens"], kinds, strict=False):
        if kind == CONTROL and (alphabet is None or set(token) <= alphabet):
            control.append(AddedToken(token, normalized=False, special=True))
        elif kind == USER_DEFINED and tok.token_to_id(token) is not None:
            plain.append(AddedToken(token, normalized=False, special=False))
    tok.add_special_tokens(control)
    tok.add_tokens(plain)


def _eos_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The stated EOS, end-of-turn and end-of-message ids, then control tokens that end a turn by their spelling."""
    stated = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    kinds = metadata.get("tokenizer.ggml.token_type") or ()
    spelled = [
        i
        for i, (token, kind) in enumerate(zip(metadata["tokenizer.ggml.tokens"], kinds, strict=False))
        if kind == CONTROL and token in END_OF_TURN
    ]
    return tuple(dict.fromkeys(i for i in [*stated, *spelled] if i is not None))


def _alphabet() -> dict[int, str]:
    """Byte-level BPE's spelling of each byte: printable Latin-1 as itself, the rest from U+0100 upwards."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in printable}
    rest = [byte for byte in range(256) if byte not in table]
    return table | {byte: chr(256 + i) for i, byte in enumerate(rest)}


def _spell(token: str, alphabet: Mapping[int, str]) -> str:
    if set(token) <= set(alphabet.values()):
        return token
    return "".join(alphabet[byte] for byte in token.encode("utf-8"))
