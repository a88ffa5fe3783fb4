"""Where each token ends in the text: character offsets, made total and strictly ordered."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvx.errors import KvxError

# Characters for which str.isspace() holds: what word-level tokenizers drop between tokens.
_SPACES = np.array([c for c in range(0x3001) if chr(c).isspace()], np.uint32)


def code_points(text: str) -> np.ndarray:
    """Unicode code points of ``text``: uint32 ``[N]``, one per character.

    Raises:
        KvxError: the text holds a lone surrogate, which is no character and which no tokenizer can read.

    Example:
        >>> from kvx.models.offsets import code_points
        >>> [hex(c) for c in code_points("né😀")]
        ['0x6e', '0xe9', '0x1f600']
    """
    try:
        return np.frombuffer(text.encode("utf-32-le"), np.uint32)
    except UnicodeEncodeError as error:
        raise KvxError(
            f"the text holds a lone surrogate at character {error.start}; expected valid Unicode; "
            "decode the bytes it came from with errors='replace' first."
        ) from None


def utf8_starts(points: np.ndarray) -> np.ndarray:
    """Byte at which each character starts in UTF-8: int64 ``[N+1]``, the last entry being the length in bytes.

    Example:
        >>> from kvx.models.offsets import code_points, utf8_starts
        >>> utf8_starts(code_points("né😀")).tolist()
        [0, 1, 3, 7]
    """
    lengths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def fill_gaps(offsets: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Give characters that a normalizer merged or dropped to the token before them; whitespace stays outside.

    ``e`` + combining acute becomes one piece under NFC, and ``tokenizers`` reports it as holding ``e`` alone. A gap
    between two tokens (or after the last) therefore belongs to the earlier token up to its first whitespace.

    Args:
        offsets: int ``[T,2]`` character offsets in text order.
        points: uint32 ``[N]`` code points of the text.

    Returns:
        int ``[T,2]``: starts unchanged, ends non-decreasing and extended over gaps.

    Example:
        >>> import numpy as np
        >>> from kvx.models.offsets import code_points, fill_gaps
        >>> fill_gaps(np.array([[0, 1], [3, 4]]), code_points("e\\u0301 x")).tolist()
        [[0, 2], [3, 4]]
    """
    ends = np.maximum.accumulate(offsets[:, 1])
    last = np.append(ends[1:] != ends[:-1], True)  # last token of each run that shares an end
    upper = np.append(np.maximum(offsets[1:, 0], ends[:-1]), len(points))[last]
    spaces = np.append(np.flatnonzero(np.isin(points, _SPACES)), len(points))
    space = spaces[np.searchsorted(spaces, ends[last])]
    grown = np.where(ends[last] > 0, np.maximum(np.minimum(upper, space), ends[last]), 0)
    run = np.cumsum(last) - last
    return np.stack([np.minimum(offsets[:, 0], grown[run]), grown[run]], axis=1)


def strict_ends(
    offsets: np.ndarray, ids: np.ndarray, starts: np.ndarray, size: Callable[[int], int]
) -> tuple[np.ndarray, np.ndarray]:
    """Ends in characters, fractional inside a character, strictly increasing.

    Tokens that overlap (the bytes of one emoji, an inserted ``▁``) are placed by the UTF-8 bytes of their pieces,
    counted back from the end of the last of them; where the bytes are not those of the text (compatibility forms),
    tokens that share an end are spread evenly over its last character. So equal tokenizations always align one to one.

    Args:
        offsets: int ``[T,2]`` from :func:`fill_gaps`, T > 0.
        ids: int ``[T]`` token ids.
        starts: int64 ``[N+1]`` from :func:`utf8_starts`.
        size: bytes that a token id contributes to the text; asked only for tokens that overlap.

    Returns:
        ``(ends float64 [T], offsets [T,2])``; a token that holds none of the text (an inserted space) gets (0, 0).

    Example:
        >>> import numpy as np
        >>> from kvx.models.offsets import code_points, strict_ends, utf8_starts
        >>> offsets = np.array([[0, 1], [0, 1], [1, 2]])  # "é" in two one-byte tokens, then "a"
        >>> strict_ends(offsets, np.arange(3), utf8_starts(code_points("éa")), lambda token: 1)[0].tolist()
        [0.5, 1.0, 2.0]
    """
    end = offsets[:, 1]
    alone = np.append(True, (offsets[1:, 0] >= end[:-1]) & (end[1:] > end[:-1]))  # starts where the last one ended
    if alone.all():
        return end.astype(np.float64), offsets
    first, run = np.flatnonzero(alone), np.cumsum(alone) - 1
    last = np.append(first[1:], len(end)) - 1
    sizes = _sizes(ids, (last > first)[run], size)
    total = np.add.reduceat(sizes, first)
    extra = total - (starts[end[last]] - starts[offsets[first, 0]])
    inserted = (first == 0) & (offsets[first, 0] == 0) & (extra == 1)
    summed = np.cumsum(sizes)
    by_bytes = np.interp(starts[end[last]][run] - (summed[last][run] - summed), starts, np.arange(len(starts)))
    inside = (np.ceil(by_bytes) == end) | (inserted[run] & (by_bytes == 0))
    exact = ((extra == 0) | inserted) & np.logical_and.reduceat(inside & (sizes > 0), first)
    ends = np.where(exact[run], by_bytes, _spread(end))
    ends = np.where((last == first)[run], end, ends)
    return ends, np.where((ends <= 0)[:, None], 0, offsets)


def _sizes(ids: np.ndarray, wanted: np.ndarray, size: Callable[[int], int]) -> np.ndarray:
    """Piece sizes in bytes of the wanted tokens, each distinct id looked up once; zero elsewhere."""
    sizes = np.zeros(len(ids), np.int64)
    tokens, which = np.unique(ids[wanted], return_inverse=True)
    sizes[wanted] = np.array([size(int(token)) for token in tokens], np.int64)[which]
    return sizes


def _spread(end: np.ndarray) -> np.ndarray:
    """Ends with ties spread evenly over the last character before them."""
    _, first, group, count = np.unique(end, return_index=True, return_inverse=True, return_counts=True)
    rank = np.arange(len(end)) - first[group] + 1
    return end - 1 + rank / count[group]
