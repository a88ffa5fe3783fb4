"""Answers: the prompt template around a question, what counts as the answer, and SQuAD's exact match and F1."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import importlib.resources
import json
import pathlib
import re
import string
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvx.errors import KvxError

if TYPE_CHECKING:
    from kvx.models.tokenizer import Tokenizer

DEFAULT_TEMPLATE = "two_examples"
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
# How vocabularies write a line break: as it is, in byte-level BPE's alphabet, as a byte piece.
_NEWLINES = ("\n", "\u010a", "<0x0A>")


def normalise(text: str) -> str:
    """SQuAD's normal form: lower case, no punctuation, no articles, single spaces.

    Reference: Rajpurkar et al., arXiv 1606.05250 (official evaluation script).

    Example:
        >>> from kvx.evaluation.answers import normalise
        >>> normalise("The  Quick, brown fox!")
        'quick brown fox'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _overlap_f1(answer: str, gold: str) -> float:
    """Harmonic mean of the word precision and recall of one normalised answer against one gold answer."""
    said, wanted = normalise(answer).split(), normalise(gold).split()
    if not said or not wanted:
        return float(said == wanted)
    common = sum((collections.Counter(said) & collections.Counter(wanted)).values())
    return 2.0 * common / (len(said) + len(wanted))


def f1_score(answer: str, golds: Sequence[str]) -> float:
    """Word-overlap F1 of an answer, the best over the gold answers.

    Args:
        answer: what the model said.
        golds: accepted answers, at least one.

    Returns:
        0..1.

    Raises:
        KvxError: no gold answers.

    Example:
        >>> from kvx.evaluation.answers import f1_score
        >>> f1_score("in Las Vegas", ["Las Vegas, Nevada", "Las Vegas"])
        0.8
    """
    if not golds:
        raise KvxError("an answer can only be scored against at least one gold answer; this question has none.")
    return max(_overlap_f1(answer, gold) for gold in golds)


def exact_match(answer: str, golds: Sequence[str]) -> float:
    """1.0 when the normalised answer equals one of the normalised gold answers, else 0.0.

    Example:
        >>> from kvx.evaluation.answers import exact_match
        >>> exact_match("The Beatles.", ["beatles"]), exact_match("Beatles band", ["beatles"])
        (1.0, 0.0)
    """
    if not golds:
        raise KvxError("an answer can only be scored against at least one gold answer; this question has none.")
    return float(any(normalise(answer) == normalise(gold) for gold in golds))


def first_line(text: str) -> str:
    """The answer in a greedy continuation: everything before the first line break, without outer spaces.

    Example:
        >>> from kvx.evaluation.answers import first_line
        >>> first_line(" Las Vegas\\n\\nQuestion: who")
        'Las Vegas'
    """
    return text.split("\n", 1)[0].strip()


def newline_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of every vocabulary entry that holds a line break, ascending: where an answer of one line ends.

    Tokens such as ``".\\n"`` hold more than the line break, so generation stops at them and :func:`first_line` cuts
    the text.
    """
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
    candidates = (i for piece, i in vocabulary.items() if any(mark in piece for mark in _NEWLINES))
    return tuple(sorted(i for i in candidates if b"\n" in tokenizer.piece(i)))


@dataclasses.dataclass(frozen=True)
class Template:
    """How a question is put to a model after its context: a fresh turn that the model always prefills itself.

    The same boundary text follows the context in every arm. It starts with its own separator, so that no delimiter is
    ever read from a translated cache.

    Attributes:
        name: for reports.
        example: format of one worked example, with ``{question}`` and ``{answer}``.
        question: format of the question itself, with ``{question}``.
        examples: worked examples ``(question, answer)``, shown before the question without any context.
        sha256: of the file the template came from, or of its fields.
    """

    name: str
    example: str
    question: str
    examples: tuple[tuple[str, str], ...]
    sha256: str

    def boundary(self, question: str) -> str:
        """Text of the boundary for one question.

        Example:
            >>> from kvx.evaluation.answers import load_template
            >>> load_template().boundary("who wrote it")[-32:]
            '\\n\\nQuestion: who wrote it\\nAnswer:'
        """
        worked = "".join(self.example.format(question=q, answer=a) for q, a in self.examples)
        return worked + self.question.format(question=question)


def load_template(name_or_path: str | pathlib.Path = DEFAULT_TEMPLATE) -> Template:
    """Read a template: one that ships with kvx, by name, or a JSON file of the same shape.

    Args:
        name_or_path: e.g. ``"two_examples"`` or ``"my_template.json"``.

    Returns:
        The template, with the SHA-256 of the file's bytes.

    Raises:
        KvxError: no such template, or a file without the expected fields.

    Example:
        >>> from kvx.evaluation.answers import load_template
        >>> load_template("two_examples").name, len(load_template("two_examples").sha256)
        ('two_examples', 64)
    """
    folder = importlib.resources.files("kvx.evaluation") / "templates"
    shipped = folder / f"{name_or_path}.json"
    path = pathlib.Path(name_or_path)
    if shipped.is_file():
        raw = shipped.read_bytes()
    elif path.is_file():
        raw = path.read_bytes()
    else:
        names = sorted(p.name[:-5] for p in folder.iterdir() if p.name.endswith(".json"))
        raise KvxError(f"no template {str(name_or_path)!r}; give a JSON file or one of {', '.join(names)}.")
    try:
        fields = json.loads(raw)
        examples = tuple((e["question"], e["answer"]) for e in fields["examples"])
        template = Template(
            fields["name"], fields["example"], fields["question"], examples, hashlib.sha256(raw).hexdigest()
        )
        template.boundary("")
    except (ValueError, KeyError, TypeError) as error:
        raise KvxError(
            f"template {str(name_or_path)!r} is not usable ({type(error).__name__}: {error}); expected JSON with name, "
            "example, question and examples, and only {question} and {answer} as placeholders."
        ) from None
    return template
