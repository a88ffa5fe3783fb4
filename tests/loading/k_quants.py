"""K-quants by the letter of the format, one number at a time: the oracle for the vectorised code.

Reference: the block layouts ``block_q4_K``, ``block_q5_K`` and ``block_q6_K`` of ggml (super-blocks of 256 numbers).
"""

from __future__ import annotations

import numpy as np


def half(raw: bytes) -> float:
    return float(np.frombuffer(raw, np.float16)[0])


def scale_min(index: int, packed: bytes) -> tuple[int, int]:
    """6-bit scale and minimum of one of eight sub-blocks, packed into 12 bytes."""
    if index < 4:
        return packed[index] & 63, packed[index + 4] & 63
    scale = (packed[index + 4] & 15) | ((packed[index - 4] >> 6) << 4)
    minimum = (packed[index + 4] >> 4) | ((packed[index] >> 6) << 4)
    return scale, minimum


def q4_k(block: bytes) -> list[float]:
    d, dmin, packed, low = half(block[0:2]), half(block[2:4]), block[4:16], block[16:144]
    out = []
    for n in range(256):
        sub, byte = n // 32, low[32 * (n // 64) + n % 32]
        scale, minimum = scale_min(sub, packed)
        out.append(d * scale * (byte >> 4 if sub % 2 else byte & 15) - dmin * minimum)
    return out


def q5_k(block: bytes) -> list[float]:
    d, dmin, packed, high, low = half(block[0:2]), half(block[2:4]), block[4:16], block[16:48], block[48:176]
    out = []
    for n in range(256):
        sub, byte = n // 32, low[32 * (n // 64) + n % 32]
        fifth = (high[n % 32] >> sub) & 1
        scale, minimum = scale_min(sub, packed)
        out.append(d * scale * ((byte >> 4 if sub % 2 else byte & 15) + 16 * fifth) - dmin * minimum)
    return out


def q6_k(block: bytes) -> list[float]:
    low, high, scales, d = block[0:128], block[128:192], np.frombuffer(block[192:208], np.int8), half(block[208:210])
    out = []
    for n in range(256):
        side, quarter, lane = n // 128, n % 128 // 32, n % 32
        byte = low[64 * side + 32 * (quarter % 2) + lane]
        nibble = byte >> 4 if quarter >= 2 else byte & 15
        top = (high[32 * side + lane] >> (2 * quarter)) & 3
        out.append(d * int(scales[n // 16]) * ((nibble | top << 4) - 32))
    return out


ORACLES = {"Q4_K": (q4_k, slice(0, 4)), "Q5_K": (q5_k, slice(0, 4)), "Q6_K": (q6_k, slice(208, 210))}
