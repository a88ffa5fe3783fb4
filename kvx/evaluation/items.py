"""What is measured on: passages with a continuation, and questions with their context."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvx.errors import KvxError

CONTEXT_TOKENS = 320
CONTINUATION_TOKENS = 64
# Pieces about as long as a subword token, with the space before: one East Asian character, at most six letters or
# digits of another script, or one other sign.
_PIECE = re.compile(r"\s*(?:[\u3040-\u9fff\uac00-\ud7af]|[^\W\u3040-\u9fff\uac00-\ud7af]{1,6}|[^\w\s])")
_SPACE = re.compile(r"\s+")
_WORD_REACH = 40  # characters within which a word ends in a script that has spaces


@dataclasses.dataclass(frozen=True)
class Item:
    """A loss item: a context to hand over and the text that really follows it (its leading space included).

    Example:
        >>> from kvx.evaluation.items import Item
        >>> Item("The sky is", " blue.").text
        'The sky is blue.'
    """

    context: str
    continuation: str

    @property
    def text(self) -> str:
        """The whole passage, as a text to fit on."""
        return self.context + self.continuation


@dataclasses.dataclass(frozen=True)
class Question:
    """A question whose answer stands in its context.

    Attributes:
        context: the text to hand over.
        question: as the user puts it.
        answers: accepted answers; the best match counts.
        id: of the data set, for people.
    """

    context: str
    question: str
    answers: tuple[str, ...]
    id: str = ""


def digest(items: Sequence[Item] | Sequence[Question]) -> str:
    """SHA-256 of what a set of items asks, in order; ids do not count.

    Results can be compared when their digests are equal.

    Example:
        >>> from kvx.evaluation.items import Item, digest
        >>> digest([Item("a", " b")]) == digest([Item("a ", "b")])
        False
    """
    rows = [(x.context, x.continuation) if isinstance(x, Item) else (x.context, x.question, *x.answers) for x in items]
    return hashlib.sha256(json.dumps(rows, ensure_ascii=False).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class PassageSplit:
    """Passages of one text, split so that what a map is fitted on is never what it is measured on.

    Attributes:
        fit: passages for fitting (use ``item.text``); held_out: passages for measuring.
        data_sha256: of the text all came from.
    """

    fit: tuple[Item, ...]
    held_out: tuple[Item, ...]
    data_sha256: str

    @property
    def hashes(self) -> dict[str, str]:
        """``data``, ``fit`` and ``held_out`` digests, to print beside every result."""
        return {"data": self.data_sha256, "fit": digest(self.fit), "held_out": digest(self.held_out)}

    def fit_texts(self, max_tokens: int | None = None, tokens: Callable[[str], int] | None = None) -> list[str]:
        """Whole passages to fit on, as many as stay within ``max_tokens`` (``tokens`` counts; else estimated)."""
        count = tokens or (lambda text: len(token_ends(text)))
        texts: list[str] = []
        total = 0
        for item in self.fit:
            total += count(item.text)
            if max_tokens is not None and total > max_tokens:
                break
            texts.append(item.text)
        return texts


def token_ends(text: str, tokenizer: Any = None) -> np.ndarray:
    """Character offset at which each token of ``text`` ends.

    Args:
        text: any text.
        tokenizer: a ``Model`` or ``Tokenizer``; ``None`` estimates (pieces of at most six letters, about 1.3 a word).

    Returns:
        int64 ``[tokens]``, non-decreasing.

    Example:
        >>> from kvx.evaluation.items import token_ends
        >>> token_ends("Hello there, world").tolist()
        [5, 11, 12, 18]
    """
    if tokenizer is None:
        return np.fromiter((match.end() for match in _PIECE.finditer(text)), dtype=np.int64)
    tokenizer = getattr(tokenizer, "tokenizer", None) or tokenizer
    return np.asarray(tokenizer.encode(text, bos=False).offsets, dtype=np.int64).reshape(-1, 2)[:, 1]


def paragraphs(text: str) -> list[str]:
    """Blank-line separated paragraphs, in order, each different one once, line breaks inside them kept."""
    found = (block.strip() for block in re.split(r"\n\s*\n", text))
    return list(dict.fromkeys(block for block in found if block))


def passages(
    text: str,
    tokenizer: Any = None,
    *,
    context_tokens: int = CONTEXT_TOKENS,
    continuation_tokens: int = CONTINUATION_TOKENS,
) -> list[Item]:
    """Cut a text into passages of ``context_tokens`` followed by ``continuation_tokens``.

    Whole paragraphs are joined by blank lines until they are long enough, so a passage starts where a paragraph starts;
    a rest longer than a passage is used again from its next word on. No text is used twice. The context ends at a word
    boundary and the continuation takes the space with it, so both parts encode on their own as they do together.

    Args:
        text: blank-line separated paragraphs.
        tokenizer: of the target, to measure with; ``None`` estimates.
        context_tokens: tokens handed over, to within a word.
        continuation_tokens: tokens that follow.

    Returns:
        Passages in text order.

    Example:
        >>> from kvx.evaluation.items import passages
        >>> text = "One two three four five six. " * 20 + "\\n\\n" + "Seven eight nine ten. " * 20
        >>> items = passages(text, context_tokens=40, continuation_tokens=8)
        >>> len(items), items[0].continuation
        (4, ' six. One two three four five six')
    """
    if context_tokens < 1 or continuation_tokens < 2:
        raise KvxError(
            f"a passage needs a context and at least two continuation tokens, got {context_tokens} and "
            f"{continuation_tokens}; the first continuation token is never scored."
        )
    items: list[Item] = []
    pending = ""
    for block in paragraphs(text):
        pending = f"{pending}\n\n{block}" if pending else block
        cut = _cut(pending, tokenizer, context_tokens, continuation_tokens)
        while cut is not None:
            items.append(cut[0])
            cut = _cut(cut[1], tokenizer, context_tokens, continuation_tokens)
            if cut is None:
                pending = ""
    return items


def _cut(text: str, tokenizer: Any, context_tokens: int, continuation_tokens: int) -> tuple[Item, str] | None:
    """First passage of ``text`` and what is left of it, from the next word on; ``None`` when it is too short."""
    need = context_tokens + continuation_tokens
    reach = 10 * need + _WORD_REACH
    ends = token_ends(text[:reach], tokenizer)
    while len(ends) < need + _WORD_REACH and reach < len(text):
        reach *= 2
        ends = token_ends(text[:reach], tokenizer)
    if len(ends) < need:
        return None
    start = _next_word(text, int(ends[context_tokens - 1]))
    first = int(np.searchsorted(ends, start, side="right"))
    if first + continuation_tokens > len(ends):
        return None
    stop = int(ends[first + continuation_tokens - 1])
    return Item(text[:start], text[start:stop]), text[_next_word(text, stop) :].lstrip()


def _next_word(text: str, at: int) -> int:
    """Where the space before the next word starts; ``at`` itself in scripts without spaces."""
    found = _SPACE.search(text, at, at + _WORD_REACH)
    return found.start() if found else at


def split(items: Sequence[Item], data: str, *, held_out: float = 0.5, salt: str = "kvx") -> PassageSplit:
    """Split passages by the hash of their content: the same passage always falls on the same side.

    Args:
        items: passages (identical ones are kept once).
        data: the text they came from, for its digest.
        held_out: share to hold out, 0..1.
        salt: another split for another salt.

    Returns:
        The split.

    Example:
        >>> from kvx.evaluation.items import Item, split
        >>> items = [Item(f"context {i}", " and more") for i in range(100)]
        >>> halves = split(items, "all the text")
        >>> 35 < len(halves.fit) < 65, set(halves.fit) & set(halves.held_out)
        (True, set())
    """
    sides: tuple[list[Item], list[Item]] = ([], [])
    for item in dict.fromkeys(items):
        draw = int.from_bytes(hashlib.sha256(f"{salt}\0{item.text}".encode()).digest()[:8], "big") / 2.0**64
        sides[draw < held_out].append(item)
    return PassageSplit(tuple(sides[0]), tuple(sides[1]), hashlib.sha256(data.encode()).hexdigest())


def load_passages(
    path: str | pathlib.Path,
    tokenizer: Any = None,
    *,
    context_tokens: int = CONTEXT_TOKENS,
    continuation_tokens: int = CONTINUATION_TOKENS,
    held_out: float = 0.5,
) -> PassageSplit:
    """Passages of a UTF-8 text file, split into fit and held-out by content hash.

    Args, Returns: as :func:`passages` and :func:`split`; ``path`` may be ``"demo:passages"``
    (:func:`kvx.evaluation.demo_data.demo_file`).

    Raises:
        KvxError: an unreadable file, or one too short for a single passage on each side.
    """
    from kvx.evaluation.demo_data import demo_file

    try:
        text = demo_file(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KvxError(
            f"cannot read {path} as UTF-8 text ({error}); give a file of blank-line separated paragraphs."
        ) from None
    return split_text(
        text, tokenizer, context_tokens=context_tokens, continuation_tokens=continuation_tokens, held_out=held_out
    )


def split_text(
    text: str,
    tokenizer: Any = None,
    *,
    context_tokens: int = CONTEXT_TOKENS,
    continuation_tokens: int = CONTINUATION_TOKENS,
    held_out: float = 0.5,
) -> PassageSplit:
    """:func:`load_passages` of a text that is in memory."""
    items = passages(text, tokenizer, context_tokens=context_tokens, continuation_tokens=continuation_tokens)
    result = split(items, text, held_out=held_out)
    if not result.fit or not result.held_out:
        raise KvxError(
            f"the text gives {len(result.fit)} passages to fit on and {len(result.held_out)} to measure on; expected "
            f"at least one of each, of {context_tokens} + {continuation_tokens} tokens; give more text or ask for "
            "fewer tokens."
        )
    return result


def load_questions(path: str | pathlib.Path, limit: int | None = None) -> list[Question]:
    """Questions of a JSON-lines file with ``question``, ``answers`` and ``context`` in each line (``id`` optional).

    Args:
        path: the file, or ``"demo:squad_test"`` or ``"demo:questions"`` (:mod:`kvx.evaluation.demo_data`).
        limit: the first so many; ``None`` for all.

    Returns:
        Questions in file order.

    Raises:
        KvxError: an unreadable file, or the first line that is not such a question, by number.
    """
    from kvx.evaluation.demo_data import demo_file

    found: list[Question] = []
    try:
        with demo_file(path).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(found) >= limit:
                    break
                if line.strip():
                    found.append(_question(line, f"{path}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise KvxError(f"cannot read {path} ({error}); give a UTF-8 file with one JSON question a line.") from None
    if not found:
        raise KvxError(f"{path} holds no questions; expected one JSON object a line.")
    return found


def _question(line: str, where: str) -> Question:
    """One line of a questions file."""
    try:
        row = json.loads(line)
        question, context, answers = row["question"], row["context"], row["answers"]
    except (ValueError, KeyError, TypeError) as error:
        raise KvxError(
            f"{where} is not a question ({type(error).__name__}: {error}); expected JSON with question, answers and "
            "context."
        ) from None
    answers = [answers] if isinstance(answers, str) else answers
    texts = [question, context, *answers]
    if not answers or not all(isinstance(text, str) and text.strip() for text in texts):
        raise KvxError(f"{where}: question, context and at least one answer must be texts that are not empty.")
    return Question(context, question, tuple(answers), str(row.get("id", "")))
