"""The commands on the minis: a demo with no download, trained on from its closed form, and the bench of translators."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvx.testing.translator_bench as bench
from kvx.cli import main
from kvx.commands.demo import Demo, adjusted
from kvx.testing.reading_work import Work

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVX_CACHE", str(tmp_path / "cache"))


def test_the_demo_on_minis_trains_on_and_shows_both_side_by_side(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["demo", "--minis", "--train", "--fast", "--json"]
    assert main(args) == 0
    out, err = capsys.readouterr()
    figures = json.loads(out)
    assert set(figures["maps"]) == {"closed form", "trained"} and figures["maps"]["closed form"]["build_s"] is None
    assert figures["training"]["steps"] == 4 and figures["training"]["history"]
    assert set(figures["answers_shown"]) >= {"closed form", "trained", "expected", "without any context"}
    assert figures["f1"]["native"] > 0.9 > 0.3 > figures["f1"]["none"]
    assert "trained for 4 steps" in err and "mini:opt-large" in err and "closed form" in err

    def refuse(*args: object, **settings: object) -> None:
        raise AssertionError("what was trained is kept")

    monkeypatch.setattr("kvx.fitting.training.train.train", refuse)
    monkeypatch.setattr("kvx.train", refuse, raising=False)
    assert main(args) == 0
    assert json.loads(capsys.readouterr().out)["f1"] == figures["f1"]


def test_the_bench_prints_the_figures_and_goes_on_from_what_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {name: bench.contenders()[name] for name in ("residual", "full_head")}
    small = Work(fit=40, train=16, asked=2, batch_size=4, items=4, questions=4)
    monkeypatch.setattr(bench, "contenders", lambda: rows)
    monkeypatch.setattr(bench, "Work", lambda steps: Work(**{**vars(small), "steps": steps}))
    args = ["bench", "translators", "--directions", "qwen2-small>gpt2-small", "--seeds", "1", "--steps", "1"]
    args += ["--folder", str(tmp_path / "bench"), "--figure", str(tmp_path / "rows.png"), "--json"]
    assert main(args) == 0
    figures = json.loads(capsys.readouterr().out)
    row = figures["directions"][0]["rows"]["residual"]
    wanted = {"accuracy", "f1", "content", "parameters", "flops", "train_seconds", "target_reads_context"}
    assert wanted <= set(row) and row["train_seconds"] > 0
    assert set(figures["native_fraction_mean"]) == {"residual", "full_head"}
    assert (tmp_path / "rows.png").is_file()
    monkeypatch.setattr(bench, "compare", None)
    assert main(args) == 0
    assert json.loads(capsys.readouterr().out)["directions"] == figures["directions"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--seeds", "0"], "--seeds is 0; expected at least one"),
        (["--directions", "llama>opt-small"], "is no direction; expected SOURCE>TARGET of gpt2-small"),
        (["--figure", "rows.txt"], "no known format"),
    ],
)
def test_the_bench_refuses_what_it_cannot_do(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "translators", *flags]) == 1
    assert said in " ".join(capsys.readouterr().err.split())


def test_what_minis_and_training_change_in_the_demo() -> None:
    minis = adjusted(Demo(minis=True, source="mini:qwen2-large", fast=True))
    assert (minis.source, minis.target, minis.layers) == ("mini:qwen2-large", "mini:opt-large", "all")
    trained = adjusted(Demo(train=True))
    assert (trained.method, trained.embeddings, trained.source) == ("low_rank", 3, "demo:smollm2")
    assert adjusted(Demo()) == Demo()
