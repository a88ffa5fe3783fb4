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


def test_the_demo_on_minis_trains_on_and_shows_both_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--minis", "--train", "--fast", "--json"]) == 0
    out, err = capsys.readouterr()
    figures = json.loads(out)
    assert set(figures["maps"]) == {"closed form", "trained"} and figures["maps"]["closed form"]["build_s"] is None
    assert figures["training"]["steps"] == 4 and figures["training"]["history"]
    assert set(figures["answers_shown"]) >= {"closed form", "trained", "expected", "without any context"}
    assert figures["f1"]["native"] > 0.9 > 0.3 > figures["f1"]["none"]
    assert "trained for 4 steps" in err and "mini:opt-large" in err and "closed form" in err


def test_the_bench_runs_what_was_asked_for_and_prints_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = {"accuracy": 0.5, "f1": 0.25}
    seed = {**scores, "content": 0.4, "content_low": 0.3, "content_high": 0.5, "content_difference": [0.1, -0.1, 0.2]}
    costs = {"parameters": 10, "flops": 20, "bytes": 40, "train_seconds": 1.5, "target_reads_context": False}
    row = {**scores, "mismatched_accuracy": 0.0, "native_fraction": 0.6, "content": 0.4, **costs, "seeds": [seed]}
    asked: list[tuple[str, str, int, int, Path]] = []

    def direction(
        source: str, target: str, rows: object, seeds: range, work: Work, folder: Path, watch: object
    ) -> dict[str, object]:
        asked.append((source, target, len(seeds), work.steps, folder))
        arms = dict.fromkeys(("native", "none"), scores)
        return {"direction": f"{source}>{target}", "arms": arms, "rows": {"mixture": row, "full_head": row}}

    monkeypatch.setattr(bench, "run_direction", direction)
    args = ["bench", "translators", "--directions", "qwen2-small>gpt2-small", "opt-small>qwen2-large", "--seeds", "2"]
    args += ["--steps", "7", "--folder", str(tmp_path), "--figure", str(tmp_path / "rows.png"), "--json"]
    assert main(args) == 0
    figures = json.loads(capsys.readouterr().out)
    assert asked == [("qwen2-small", "gpt2-small", 2, 7, tmp_path), ("opt-small", "qwen2-large", 2, 7, tmp_path)]
    wanted = {"accuracy", "f1", "content", "parameters", "flops", "train_seconds", "target_reads_context"}
    assert wanted <= set(figures["directions"][1]["rows"]["mixture"])
    assert (
        figures["native_fraction_mean"] == {"mixture": 0.6, "full_head": 0.6} and figures["first_is_best"] == [True] * 2
    )
    assert (tmp_path / "rows.png").is_file()


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
