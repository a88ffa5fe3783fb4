"""Lengths that compiled functions come in: arrays are padded up, so nearby lengths share one compilation."""

from __future__ import annotations

from kvx.errors import KvxError

SMALLEST = 16


def bucket_length(n: int) -> int:
    """Smallest bucket that holds ``n`` tokens.

    16, 32, 64, 96, 128, 192, 256, 384, 512, then four per octave (640, 768, 896, 1024, 1280, ...): padding wastes at
    most a third of the slots, a fifth beyond 512, and all lengths up to 4,096 need 21 compilations.

    Args:
        n: number of tokens, zero or more.

    Returns:
        Number of slots, at least 16.

    Raises:
        KvxError: ``n`` is negative.

    Example:
        >>> [bucket_length(n) for n in (1, 17, 65, 130, 500, 513, 1100)]
        [16, 32, 96, 192, 512, 640, 1280]
    """
    if n < 0:
        raise KvxError(f"a length of {n} tokens makes no sense; expected zero or more.")
    if n <= SMALLEST:
        return SMALLEST
    octave = 1 << (n - 1).bit_length() - 1
    step = max(octave // (4 if octave >= 512 else 2 if octave >= 64 else 1), SMALLEST)
    return -(-n // step) * step
