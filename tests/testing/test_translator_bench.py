"""The bench of translators on the minis: rows, seeds, what is kept, and how the table judges."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import kvx.testing.translator_bench as bench
from kvx.errors import KvxError
from kvx.evaluation.sweep_figure import drawable
from kvx.testing.minis import load_mini
from kvx.testing.reading_work import Task, Work
from kvx.testing.translator_report import draw, overview, summary, table, within
from kvx.translators import mixture

pytestmark = pytest.mark.usefixtures("quick_compilation")
WORK = Work(fit=40, train=32, asked=3, steps=2, batch_size=8, items=6, questions=4)
NAMES = ("mixture + correction", "full_head")
REPLAY = "mixture + correction, replay"


@pytest.fixture(scope="module")
def rows() -> dict[str, bench.Contender]:
    small = dataclasses.replace(bench.contenders()[NAMES[0]], method=mixture(experts=2, width=4))
    return {NAMES[0]: small, "full_head": bench.contenders()["full_head"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def record(rows: dict[str, bench.Contender], folder: Path) -> dict[str, Any]:
    return bench.run_direction("qwen2-small", "gpt2-small", rows, (0, 1), WORK, folder, False)


def test_every_row_is_measured_for_every_seed_and_the_first_is_what_others_differ_from(record: dict[str, Any]) -> None:
    assert list(record["rows"]) == list(NAMES)
    assert {name: len(row["seeds"]) for name, row in record["rows"].items()} == dict(zip(NAMES, (2, 1), strict=True))
    first = record["rows"][NAMES[0]]
    assert first["seeds"][0]["content_difference"] is None and first["seeds"][1]["content_difference"] is not None
    assert record["arms"]["native"]["accuracy"] >= 0.75 and record["arms"]["none"]["accuracy"] <= 0.25
    assert [row["target_reads_context"] for row in record["rows"].values()] == [False, False]


def test_a_replay_uses_the_map_that_was_trained_without_one(
    record: dict[str, Any], rows: dict[str, bench.Contender], folder: Path
) -> None:
    kept = next(folder.glob("*/record.json")).parent
    replayed = dataclasses.replace(bench.contenders()[REPLAY], method=rows[NAMES[0]].method)
    models = [load_mini(name, stacked=True) for name in ("qwen2-small", "gpt2-small")]
    made = bench.train_all(
        *models, {**rows, REPLAY: replayed}, (0, 1), WORK, Task.create(WORK), folder=kept, progress=False
    )
    assert list(made.maps) == [f"{NAMES[0]} #0", f"{NAMES[0]} #1", NAMES[1], f"{REPLAY} #0", f"{REPLAY} #1"]
    assert made.maps[f"{REPLAY} #1"] is made.maps[f"{NAMES[0]} #1"]
    assert made.seconds[f"{REPLAY} #1"] == pytest.approx(
        record["rows"][NAMES[0]]["seeds"][1]["train_seconds"], abs=0.01
    )


def test_a_finished_direction_is_read_and_a_broken_off_one_goes_on(
    record: dict[str, Any], rows: dict[str, bench.Contender], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **settings: object) -> None:
        raise AssertionError("nothing is left to train")

    monkeypatch.setattr(bench, "train", refuse)
    monkeypatch.setattr(bench, "fit", refuse)
    again = bench.run_direction("qwen2-small", "gpt2-small", rows, (0, 1), WORK, folder, False)
    assert again == json.loads(json.dumps(record))
    home = next(folder.glob("*/record.json"))
    home.unlink()  # as if it had been broken off while measuring: all maps are there, and nothing is trained again
    measured: list[list[str]] = []

    def measure(source: object, target: object, maps: Mapping[str, object], items: object, **settings: object) -> None:
        measured.append(list(maps))
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "evaluate_maps", measure)
    with pytest.raises(KeyboardInterrupt):
        bench.run_direction("qwen2-small", "gpt2-small", rows, (0, 1), WORK, folder, False)
    assert measured == [[f"{NAMES[0]} #0", f"{NAMES[0]} #1", NAMES[1]]]
    with pytest.raises(AssertionError, match="nothing is left"):
        bench.run_direction("qwen2-small", "gpt2-small", rows, (0, 2), WORK, folder, False)


def test_tables_and_figure_show_every_row(record: dict[str, Any], tmp_path: Path) -> None:
    found = summary([record])
    out = io.StringIO()
    console = Console(file=out, width=200)
    console.print(table(record))
    console.print(overview(found))
    assert all(out.getvalue().count(name) >= 2 for name in NAMES) and "source alone" in out.getvalue()
    assert found["native_fraction_mean"]["full_head"] == record["rows"]["full_head"]["native_fraction"]
    assert json.loads(json.dumps(found))["directions"][0]["direction"] == "qwen2-small>gpt2-small"
    if drawable():
        assert draw(found, tmp_path / "rows.png").stat().st_size > 5000
    with pytest.raises(KvxError, match="no known format"):
        draw(found, tmp_path / "rows.txt")


def test_the_first_row_wins_unless_another_is_better_beyond_its_interval(record: dict[str, Any]) -> None:
    def with_content(name: str, value: float, low: float, reads: bool = False) -> dict[str, Any]:
        made = copy.deepcopy(record)
        made["rows"][NAMES[0]]["content"] = 0.5
        for other in NAMES[1:]:
            made["rows"][other]["content"] = 0.1
        row = made["rows"][name]
        row["content"], row["target_reads_context"] = value, reads
        for seed in row["seeds"]:
            seed["content_difference"] = [value - 0.5, low, 1.0]
        return made

    assert within(with_content("full_head", 0.4, -0.2))
    assert within(with_content("full_head", 0.6, -0.1))
    assert not within(with_content("full_head", 0.6, 0.05))
    assert within(with_content("full_head", 0.9, 0.3, reads=True))


def test_training_fitting_and_testing_share_no_passage() -> None:
    task = Task.create(Work(fit=400, train=400, items=50, questions=50))
    parts = [
        set(task.texts),
        {one.context for one in task.examples},
        {one.context for one in (*task.items, *task.closed, *task.phrases)},
    ]
    assert not (parts[0] & parts[1]) and not (parts[0] & parts[2]) and not (parts[1] & parts[2])


def test_directions_cover_every_architecture_and_odd_ones_are_named() -> None:
    six = bench.directions()
    families = [{name.split("-")[0] for name in side} for side in zip(*six, strict=True)]
    assert families == [{"gpt2", "opt", "qwen2"}] * 2
    assert sum(a.split("-")[0] == b.split("-")[0] for a, b in six) == 1
    for odd in ("gpt2-small", "gpt2-small>gpt2-small", "gpt2-small>llama"):
        with pytest.raises(KvxError, match="no direction"):
            bench.directions((odd,))


def test_ablations_name_each_change_once() -> None:
    rows = bench.ablations()
    assert len({repr(row) for row in rows.values()}) == len(rows)
    assert {row.method.experts for row in rows.values()} == {1, 2, 4, 8}
