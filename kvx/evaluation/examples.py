"""Training examples from what evaluation reads: passages, questions, and sentences with something blanked."""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvx.errors import KvxError
from kvx.evaluation.answers import DEFAULT_TEMPLATE, Template, load_template
from kvx.evaluation.items import Item, Question
from kvx.fitting.training.examples import Example

BLANK = "____"
CLOZE = 'what is missing in "{sentence}"'
_SENTENCE = re.compile(r"[^.!?\n]+(?:[.!?](?=\S)[^.!?\n]*)*[.!?]*")
_NUMBER = re.compile(r"(?<![\w.,])\d+(?:[.,]\d+)*(?![\w])")
_ENTITY = re.compile(r"\b[^\W\d_a-z][\w'-]+(?: [^\W\d_a-z][\w'-]+)*")
_WORD = re.compile(r"\b[^\W\d_]{5,}\b")


def examples_from_passages(items: Sequence[Item]) -> list[Example]:
    """Continuations: the target goes on from the translated context, every token but the first is scored.

    Args:
        items: passages, such as the ``fit`` side of :func:`kvx.evaluation.items.load_passages`.

    Returns:
        One example a passage.

    Example:
        >>> from kvx.evaluation.examples import examples_from_passages
        >>> from kvx.evaluation.items import Item
        >>> examples_from_passages([Item("The sky is", " blue today.")])[0].suffix
        ' blue today.'
    """
    return [Example(item.context, item.continuation) for item in items]


def examples_from_questions(
    questions: Sequence[Question], template: str | Path | Template = DEFAULT_TEMPLATE
) -> list[Example]:
    """Questions as evaluation puts them, with their answers; only the answers (and what ends them) are scored.

    Args:
        questions: of contexts that no evaluation will use.
        template: as in :func:`kvx.evaluate`; use the same.

    Returns:
        One example a question, with the first accepted answer that its context holds word for word, else the first.

    Example:
        >>> from kvx.evaluation.examples import examples_from_questions
        >>> from kvx.evaluation.items import Question
        >>> made = examples_from_questions([Question("Ann was born in Rome.", "where was ann born", ("Rome",))])[0]
        >>> made.scored_text, made.suffix[-35:]
        (' Rome\\n\\n', ': where was ann born\\nAnswer: Rome\\n\\n')
    """
    template = _template(template)
    return [_asked(q.context, q.question, _answer(q), template, "question") for q in questions]


def cloze_from_passages(
    items: Sequence[Item | str],
    template: str | Path | Template = DEFAULT_TEMPLATE,
    *,
    per_passage: int = 1,
    rare: int = 2,
    reach: int = 160,
    seed: int = 0,
) -> list[Example]:
    """Questions made from the passages themselves: a number, a name or a rare word of a sentence is asked for.

    The question repeats the sentence with a blank, in the template of evaluation; only the answer is scored. What is
    asked for never stands in the rest of the repeated sentence, so that it has to be found in the context.

    Args:
        items: passages (their contexts are handed over) or contexts.
        template: as in :func:`kvx.evaluate`.
        per_passage: examples of each passage, at most; from different sentences.
        rare: a word that all passages together hold at most so often is rare.
        reach: characters of the sentence kept on either side of the blank.
        seed: of the draw.

    Returns:
        Examples, passage by passage; passages without anything to ask for give none.

    Raises:
        KvxError: ``per_passage`` below 1.

    Example:
        >>> from kvx.evaluation.examples import cloze_from_passages
        >>> made = cloze_from_passages(["The bridge was built. It was opened by Ann Hill in the rain."], rare=0)[0]
        >>> made.scored_text, made.suffix[-74:-18]
        (' Ann Hill\\n\\n', 'what is missing in "It was opened by ____ in the rain."\\n')
    """
    if per_passage < 1:
        raise KvxError(f"per_passage is {per_passage}; expected at least one question of each passage.")
    template = _template(template)
    contexts = [item if isinstance(item, str) else item.context for item in items]
    counts = collections.Counter(word.lower() for text in contexts for word in _WORD.findall(text))
    rng = np.random.default_rng(seed)
    found = []
    for context in contexts:
        asked = [(sentence, kinds) for sentence in _sentences(context) if (kinds := _spans(sentence, counts, rare))]
        for at in rng.permutation(len(asked))[:per_passage]:
            sentence, kinds = asked[at]
            spans = kinds[int(rng.integers(len(kinds)))]  # numbers and names are few among rare words, and count more
            first, stop = spans[int(rng.integers(len(spans)))]
            question = CLOZE.format(sentence=_blanked(sentence, first, stop, reach))
            found.append(_asked(context, question, sentence[first:stop], template, "cloze"))
    return found


def _template(template: str | Path | Template) -> Template:
    return template if isinstance(template, Template) else load_template(template)


def _asked(context: str, question: str, answer: str, template: Template, kind: str) -> Example:
    """The boundary of a question, its answer, and the separator that comes before the next one."""
    boundary = template.boundary(question)
    space = "" if boundary[-1:].isspace() else " "
    end = template.question[: len(template.question) - len(template.question.lstrip())] or "\n"
    suffix = f"{boundary}{space}{answer}{end}"
    return Example(context, suffix, ((len(boundary), len(suffix)),), kind)


def _answer(question: Question) -> str:
    return next((a for a in question.answers if a in question.context), question.answers[0]).strip()


def _sentences(text: str) -> list[str]:
    """Sentences of some length, in order."""
    found = (match.group().strip() for match in _SENTENCE.finditer(text))
    return [sentence for sentence in found if len(sentence.split()) >= 5]


def _spans(sentence: str, counts: collections.Counter[str], rare: int) -> list[list[tuple[int, int]]]:
    """What may be asked for, kind by kind: numbers, names inside the sentence, rare words; each stands there once.

    Example:
        >>> import collections
        >>> from kvx.evaluation.examples import _spans
        >>> text = "In 1889 the tower in Paris was unveiled, before Paris slept."
        >>> kinds = _spans(text, collections.Counter(unveiled=1, tower=9, before=9, slept=9), 1)
        >>> [[text[a:b] for a, b in spans] for spans in kinds]
        [['1889'], ['unveiled']]
    """
    found = [
        [m.span() for m in _NUMBER.finditer(sentence)],
        [m.span() for m in _ENTITY.finditer(sentence) if m.start() > 0],
        [m.span() for m in _WORD.finditer(sentence) if m.group().islower() and counts[m.group()] <= rare],
    ]
    once = [[(a, b) for a, b in spans if sentence.lower().count(sentence[a:b].lower()) == 1] for spans in found]
    return [spans for spans in once if spans]


def _blanked(sentence: str, first: int, stop: int, reach: int) -> str:
    """The sentence with a blank, cut at words when it is long."""
    before, after = sentence[:first], sentence[stop:]
    if len(before) > reach:
        before = before[-reach:].split(" ", 1)[-1]
    if len(after) > reach:
        after = after[:reach].rsplit(" ", 1)[0]
    return f"{before}{BLANK}{after}"
