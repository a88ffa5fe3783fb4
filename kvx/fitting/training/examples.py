"""Training examples: a context to hand over, a suffix the target reads after it, and which of its tokens are scored."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence

import numpy as np

from kvx.errors import KvxError
from kvx.models.tokenizer import Tokenizer

Spans = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Example:
    """What a translator is trained on.

    Attributes:
        context: the text whose cache is handed over.
        suffix: what the target reads after it, its leading space or separator included.
        scored: character ranges ``(first, stop)`` of the suffix whose tokens are scored; empty: all of it. The first
            token of a suffix is never scored, since nothing among the suffix predicts it.
        kind: for reports, such as ``"continuation"`` or ``"question"``.

    Example:
        >>> from kvx.fitting.training.examples import Example
        >>> Example("Ann lives in Rome.", " Where? Rome", ((8, 12),)).scored_text
        'Rome'
    """

    context: str
    suffix: str
    scored: Spans = ()
    kind: str = "continuation"

    @property
    def scored_text(self) -> str:
        """The parts of the suffix that are scored, joined."""
        return "".join(self.suffix[a:b] for a, b in self.scored) if self.scored else self.suffix


@dataclasses.dataclass(frozen=True)
class SuffixTokens:
    """A suffix as tokens: their ids, and which are scored and by the hidden state of which token before.

    Attributes:
        ids: int32 ``[U]``; where: int32 ``[N]`` tokens before the scored ones; targets: int32 ``[N]`` scored ids.
    """

    ids: np.ndarray
    where: np.ndarray
    targets: np.ndarray


def suffix_tokens(example: Example, tokenizer: Tokenizer) -> SuffixTokens:
    """Encode a suffix and find its scored tokens: those, the first excepted, that share text with a scored range.

    Raises:
        KvxError: nothing to score, or a range outside the suffix.

    Example:
        >>> from kvx.fitting.training.examples import Example, suffix_tokens
        >>> from kvx.models.random_model import byte_model
        >>> made = suffix_tokens(Example("c", "ab: yes", ((3, 7),)), byte_model().tokenizer)
        >>> made.where.tolist(), byte_model().decode(made.targets)
        ([2, 3, 4, 5], ' yes')
    """
    encoding = tokenizer.encode(example.suffix, bos=False)
    if any(not 0 <= a < b <= len(example.suffix) for a, b in example.scored):
        raise KvxError(f"scored ranges {example.scored} are not inside a suffix of {len(example.suffix)} characters.")
    starts, stops = encoding.offsets[:, 0], encoding.offsets[:, 1]
    spans = example.scored or ((0, len(example.suffix)),)
    wanted = np.zeros(len(encoding), bool)
    for a, b in spans:
        wanted |= (starts < b) & (stops > a)
    wanted[:1] = False
    chosen = np.flatnonzero(wanted)
    if not len(chosen):
        raise KvxError(
            f"the suffix {example.suffix!r} has no token to score beyond its first; give a longer suffix or another "
            "scored range."
        )
    return SuffixTokens(encoding.ids, (chosen - 1).astype(np.int32), encoding.ids[chosen])


def digest_examples(examples: Sequence[Example]) -> str:
    """SHA-256 of what examples say, in order."""
    rows = [dataclasses.astuple(example) for example in examples]
    return hashlib.sha256(json.dumps(rows, ensure_ascii=False).encode()).hexdigest()
