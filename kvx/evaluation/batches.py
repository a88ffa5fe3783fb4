"""Who is run with whom: partners of about the same length, batches that hold them, and few different shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvx.errors import KvxError
from kvx.models.buckets import bucket_length
from kvx.models.tokenizer import Tokenizer

CACHE_BYTES = 1 << 30  # of all arms of one batch
COMPILE_TOKENS = 4000  # what small models read on a CPU while one more shape compiles


@dataclasses.dataclass(frozen=True)
class Batch:
    """Items that are run together.

    Attributes:
        items: indices of the items, one a row; rows beyond ``real`` repeat earlier ones to keep one compiled shape.
        partner: for each row, the row whose cache it borrows in the mismatched arms.
        real: how many rows count.
        length: tokens that contexts are padded to, in both models.
    """

    items: tuple[int, ...]
    partner: tuple[int, ...]
    real: int
    length: int


def plan(source: Tokenizer, target: Tokenizer, contexts: Sequence[str], size: int, token_bytes: int = 0) -> list[Batch]:
    """Batches of at most about ``size`` items, shortest first, in which every item has its partner.

    Args:
        source: tokenizer of the source; target: of the target.
        contexts: text of each item's context.
        size: rows of a batch, at least 2; fewer are taken where their caches would pass ``CACHE_BYTES``.
        token_bytes: bytes of one token in the caches of all arms together.

    Returns:
        Batches that cover every item once.

    Raises:
        KvxError: ``size`` below 2, an empty context, or items without a partner.
    """
    if size < 2:
        raise KvxError(f"batch_size is {size}; every item is run beside its partner, so use at least 2.")
    ours = [len(target.encode(text, bos=False)) for text in contexts]
    theirs = [len(source.encode(text)) for text in contexts]
    if 0 in ours:
        raise KvxError(f"the context of item {ours.index(0)} is empty; give a text to hand over.")
    longest = max(*ours, *theirs)
    size = min(size, max(2, CACHE_BYTES // max(token_bytes * longest, 1) // 2 * 2))
    rows = pack(derange(ours, contexts), size)
    needs = [max(max(ours[i], theirs[i]) for i in items) for items, _ in rows]
    lengths = shared_lengths(needs, size)
    batches = []
    for (items, partner), length in zip(rows, lengths, strict=True):
        again = [row % len(items) for row in range(max(size, len(items)))]
        filled = tuple(items[row] for row in again), tuple(partner[row] for row in again)
        batches.append(Batch(*filled, len(items), length))
    return batches


def pack(groups: Sequence[tuple[int, ...]], size: int) -> list[tuple[list[int], list[int]]]:
    """Whole groups of :func:`derange` in batches of at most ``size`` rows (a group of three may
    stand alone in a larger one): ``(items, partner row of each)``.

    Example:
        >>> from kvx.evaluation.batches import pack
        >>> pack([(0, 1), (2, 3), (4, 5, 6)], 4)
        [([0, 1, 2, 3], [1, 0, 3, 2]), ([4, 5, 6], [1, 2, 0])]
    """
    batches: list[tuple[list[int], list[int]]] = []
    for group in groups:
        if not batches or len(batches[-1][0]) + len(group) > size:
            batches.append(([], []))
        items, partner = batches[-1]
        partner += [len(items) + (at + 1) % len(group) for at in range(len(group))]
        items += group
    return batches


def shared_lengths(needs: Sequence[int], rows: int, compile_tokens: int = COMPILE_TOKENS) -> list[int]:
    """Padded length of each batch: buckets, but no more different ones than pay for their compilation.

    Minimises padded tokens plus ``compile_tokens`` for each different length.

    Args:
        needs: tokens of each batch's longest row.
        rows: rows of a batch.
        compile_tokens: tokens that could be read in the time one more shape takes to compile.

    Returns:
        Lengths, at least ``needs``, in the same order.

    Example:
        >>> from kvx.evaluation.batches import shared_lengths
        >>> shared_lengths([30, 60, 90, 120, 125, 300], rows=8, compile_tokens=4000)
        [128, 128, 128, 128, 128, 384]
    """
    buckets = [bucket_length(need) for need in needs]
    levels = sorted(set(buckets))
    count = [sum(bucket == level for bucket in buckets) for level in levels]
    best: list[tuple[float, int]] = [(0.0, 0)]  # cost of the levels below i, and where the last shared length begins
    for stop in range(1, len(levels) + 1):
        costs = [
            best[start][0] + compile_tokens + rows * levels[stop - 1] * sum(count[start:stop]) for start in range(stop)
        ]
        start = min(range(stop), key=costs.__getitem__)
        best.append((costs[start], start))
    shared: dict[int, int] = {}
    stop = len(levels)
    while stop:
        start = best[stop][1]
        shared |= dict.fromkeys(levels[start:stop], levels[stop - 1])
        stop = start
    return [shared[bucket] for bucket in buckets]


def derange(lengths: Sequence[int], contexts: Sequence[str]) -> list[tuple[int, ...]]:
    """Group items of about the same length so that each can borrow another's cache, never one of its own context.

    Items are sorted by length and paired with the nearest one that has a different context. In a group ``(a, b)`` each
    borrows from the other; in ``(a, b, c)`` a borrows from b, b from c, c from a. Every cache is borrowed exactly once,
    so native and borrowed arms see the same set of caches.

    Args:
        lengths: tokens of each context.
        contexts: text of each context.

    Returns:
        Groups of two or three item indices that cover all items, shortest first.

    Raises:
        KvxError: some item has no partner with another context.

    Example:
        >>> from kvx.evaluation.batches import derange
        >>> derange([9, 5, 8, 4, 7], list("abcde"))
        [(3, 1), (4, 2, 0)]
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    groups: list[tuple[int, ...]] = []
    left: list[int] = []
    while order:
        first = order.pop(0)
        partner = next((i for i in order if contexts[i] != contexts[first]), None)
        if partner is None:
            left.append(first)
            continue
        order.remove(partner)
        groups.append((first, partner))
    for item in left:
        hosts = [
            (abs(lengths[item] - lengths[group[0]]), -at)
            for at, group in enumerate(groups)
            if len(group) == 2 and all(contexts[i] != contexts[item] for i in group)
        ]
        if not hosts:
            raise KvxError(
                f"{len(lengths)} items hold too few different contexts: item {item} has none to be compared with; "
                "mismatched arms need items of at least two contexts in about equal numbers."
            )
        at = -min(hosts)[1]
        groups[at] = (*groups[at], item)
    return groups
