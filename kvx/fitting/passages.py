"""Texts as sequences of tokens that both models can read: short ones joined, long ones cut at word boundaries."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from kvx.models.tokenizer import Tokenizer

SEPARATOR = "\n\n"
_SPACE = re.compile(r"\s+")
_BACK = 80  # characters within which a cut looks back for a space


def sequences(
    texts: Iterable[str],
    source: Tokenizer,
    target: Tokenizer,
    *,
    source_limit: int,
    target_limit: int,
    join: bool = True,
    max_tokens: int | None = None,
) -> Iterator[tuple[str, int]]:
    """Cut and join texts so that each piece fits both models.

    Args:
        texts: any texts; blank ones are skipped.
        source, target: tokenizers.
        source_limit, target_limit: tokens of a piece, at most, in each.
        join: put consecutive short texts into one piece, a blank line between them.
        max_tokens: target tokens of all pieces together, at most.

    Yields:
        ``(piece, its target tokens)``.

    Example:
        >>> from tokenizers import Tokenizer as Backend, models, pre_tokenizers
        >>> backend = Backend(models.WordLevel({w: i for i, w in enumerate("a b c d ?".split())}, unk_token="?"))
        >>> backend.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> words = Tokenizer.from_tokenizers(backend)
        >>> [piece for piece, _ in sequences(["a b", "c", "d a b c d"], words, words, source_limit=4, target_limit=4)]
        ['a b\\n\\nc', 'd a b c', 'd']
    """
    left = max_tokens
    for text in _joined(texts, source, target, source_limit, target_limit) if join else texts:
        rest = text.strip()
        while rest:
            limit = target_limit if left is None else min(target_limit, left)
            if limit < 1:
                return
            piece, tokens, rest = _cut(rest, source, target, source_limit, limit)
            if not piece:
                return
            yield piece, tokens
            left = None if left is None else left - tokens


def _joined(texts: Iterable[str], source: Tokenizer, target: Tokenizer, s_limit: int, t_limit: int) -> Iterator[str]:
    """Consecutive texts put together while their counts stay within the limits."""
    gaps = [len(t.encode(SEPARATOR, bos=False)) for t in (source, target)]
    held, counts = "", (0, 0)
    for text in texts:
        text = text.strip()
        if not text:
            continue
        own = tuple(len(t.encode(text, bos=False)) for t in (source, target))
        both = tuple(a + gap + b for a, gap, b in zip(counts, gaps, own, strict=True))
        if held and (both[0] > s_limit or both[1] > t_limit):
            yield held
            held, both = "", own
        held, counts = (f"{held}{SEPARATOR}{text}" if held else text), (both[0], both[1])
    if held:
        yield held


def _cut(text: str, source: Tokenizer, target: Tokenizer, s_limit: int, t_limit: int) -> tuple[str, int, str]:
    """The longest start of a text within both limits, its target tokens, and the rest."""
    window = 16 * max(s_limit, t_limit)
    piece = text[:window]
    while piece:
        ends = [t.encode(piece, bos=False).ends for t in (source, target)]
        over = [limit for e, limit in zip(ends, (s_limit, t_limit), strict=True) if len(e) > limit]
        if not over:
            return piece, len(ends[1]), text[len(piece) :].lstrip()
        stop = min(int(e[min(len(e), limit) - 1]) for e, limit in zip(ends, (s_limit, t_limit), strict=True))
        stop = min(stop, len(piece) - 1)
        spaces = [m.start() for m in _SPACE.finditer(piece, max(stop - _BACK, 1), stop + 1)]
        piece = piece[: spaces[-1] if spaces else stop]
    return "", 0, ""
