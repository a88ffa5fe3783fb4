"""A reading task that is generated: passages of facts about people, then questions only the passage can answer.

Every fact joins a person, a relation and a value drawn at random, so nothing but the passage tells the answer. Several
people share each relation, so the passage's topic does not tell it either: the question's person and relation have to
be found together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from kvx.errors import KvxError
from kvx.evaluation.answers import Template
from kvx.evaluation.items import Question


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Ada Abel Bela Bruno Cara Cyril Dora Dunia Edda Emil Fanny Fritz Greta Gustav Hanna Hugo Ida Ivan Jana Jonas Kira "
    "Karl Lena Luis Mara Milan Nora Nils Olga Oskar Petra Pavel Rosa Ralf Sara Simon Tilda Timo Ursula Viktor"
)
FAMILIES = _words(
    "Abbott Barlow Conrad Dawson Ellery Farrow Garland Hobart Ingram Jarvis Keller Lambert Mercer Norris Osborn Parker "
    "Quigley Rowland Sutter Tanner"
)


@dataclasses.dataclass(frozen=True)
class Relation:
    """A kind of fact.

    Attributes:
        fact: how a passage says it, with ``{name}`` and ``{value}``; question: how it is asked for, with ``{name}``.
        values: what the value is drawn from: one word of the first list, or one of each.
    """

    fact: str
    question: str
    values: tuple[tuple[str, ...], ...]

    @property
    def closed(self) -> bool:
        """Whether a value is one of a short list (closed set), not a phrase to be copied out (extractive)."""
        return len(self.values) == 1


CLOSED = (
    Relation(
        "{name} visits {value}.",
        "{name} visits where?",
        (_words("Rome Oslo Bonn Lyon Kyiv Riga Bari Cork Graz Gent Porto Turin Malmo Basel Leeds Delft"),),
    ),
    Relation(
        "{name} eats {value}.",
        "{name} eats what?",
        (_words("plums bread rice beans soup pears figs cheese corn leeks nuts eggs honey grapes kale trout"),),
    ),
    Relation(
        "{name} keeps {value}.",
        "{name} keeps what?",
        (_words("foxes cats dogs goats hens mules crows swans toads hares moles ducks ponies wolves seals owls"),),
    ),
    Relation(
        "{name} likes {value}.",
        "{name} likes what?",
        (_words("chess rain jazz snow poems trains maps tea dice moss clocks stars kites bells sand wind"),),
    ),
    Relation(
        "{name} sells {value}.",
        "{name} sells what?",
        (_words("ropes lamps keys drums chairs spoons brushes coins wool paper rings nails boats tiles glue ink"),),
    ),
)
OPEN = (
    Relation("{name} met {value}.", "{name} met whom?", (NAMES, FAMILIES)),
    Relation(
        "{name} wears {value}.",
        "{name} wears what?",
        (
            _words("red blue grey old new long thin dark soft cold loud tall round brown white green"),
            _words("coats boots hats gloves scarves shawls belts cloaks masks socks capes robes shoes wigs veils ties"),
        ),
    ),
)
RELATIONS = (*CLOSED, *OPEN)
LEAD = "Notes:"  # so that every name is a word after a space, as in the questions
READING = Template("reading", "\n> {question} {answer}", "\n> {question}", (), "")


@dataclasses.dataclass(frozen=True)
class Fact:
    """One fact of a passage: its sentence, its question and the answer; ``closed`` as in :class:`Relation`."""

    sentence: str
    question: str
    answer: str
    closed: bool


@dataclasses.dataclass(frozen=True)
class Passage:
    """Facts in the order in which the passage tells them.

    Example:
        >>> import dataclasses
        >>> from kvx.testing.reading import passages
        >>> one = next(passages(0, people=2, relations=1))
        >>> print(one.text)
        Notes: Timo met Milan Conrad. Kira met Ralf Ellery.
        >>> one.facts[0].question, one.facts[0].answer
        ('Timo met whom?', 'Milan Conrad')
    """

    facts: tuple[Fact, ...]

    @property
    def text(self) -> str:
        """The passage."""
        return " ".join((LEAD, *(fact.sentence for fact in self.facts)))

    def asked(self, order: tuple[int, ...]) -> str:
        """Questions about the facts of these numbers, each with its answer, as the models read them after the passage.

        Example:
            >>> from kvx.testing.reading import passages
            >>> next(passages(0, people=2, relations=1)).asked((1,))
            '\\n> Kira met whom? Ralf Ellery\\n'
        """
        asked = (READING.example.format(question=self.facts[i].question, answer=self.facts[i].answer) for i in order)
        return "".join(asked) + "\n"


def passages(seed: int, *, people: int = 4, relations: int = 3) -> Iterator[Passage]:
    """Passages without end: as many people, each with the same relations, the facts in any order.

    Args:
        seed: equal seeds give equal passages.
        people: in one passage; relations: facts about each of them.

    Yields:
        Passages of ``people * relations`` facts; the people that share a relation have different values.

    Raises:
        KvxError: more people or relations than there are, or none.
    """
    most = min(len(kind.values[0]) for kind in RELATIONS)
    if not (1 <= people <= most and 1 <= relations <= len(RELATIONS)):
        raise KvxError(
            f"a passage of {people} people with {relations} relations each cannot be made; expected 1 to {most} people "
            f"and 1 to {len(RELATIONS)} relations."
        )
    rng = np.random.default_rng([seed, people, relations])
    while True:
        yield _passage(rng, people, relations)


def _passage(rng: np.random.Generator, people: int, relations: int) -> Passage:
    names = [NAMES[i] for i in rng.choice(len(NAMES), people, replace=False)]
    facts = []
    for kind in (RELATIONS[i] for i in rng.choice(len(RELATIONS), relations, replace=False)):
        drawn = [[words[i] for i in rng.choice(len(words), people, replace=False)] for words in kind.values]
        for name, *words in zip(names, *drawn, strict=True):
            value = " ".join(words)
            facts.append(
                Fact(kind.fact.format(name=name, value=value), kind.question.format(name=name), value, kind.closed)
            )
    return Passage(tuple(facts[i] for i in rng.permutation(len(facts))))


def questions_of(seed: int, count: int, *, closed: bool, people: int = 4, relations: int = 3) -> list[Question]:
    """Questions to measure on, each of a passage of its own.

    Args:
        seed: of the passages; training uses others (:data:`kvx.testing.pretrain.SEED`).
        count: of questions; closed: of one-word values from a list (else phrases of two words).
        people, relations: as in :func:`passages`.

    Returns:
        Questions whose answer stands once in their passage.

    Example:
        >>> from kvx.testing.reading import questions_of
        >>> [(q.question, q.answers) for q in questions_of(0, 2, closed=True, people=2, relations=2)]
        [('Bela eats what?', ('leeks',)), ('Ursula keeps what?', ('toads',))]
    """
    rng = np.random.default_rng([seed, count, closed])
    found: list[Question] = []
    for passage in passages(seed, people=people, relations=relations):
        asked = [fact for fact in passage.facts if fact.closed == closed]
        if asked:
            fact = asked[int(rng.integers(len(asked)))]
            found.append(Question(passage.text, fact.question, (fact.answer,), f"reading-{seed}-{len(found)}"))
        if len(found) == count:
            return found
    return found
