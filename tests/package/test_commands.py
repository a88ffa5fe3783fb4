"""The commands on a tiny real pair: fit, inspect, eval, handoff, demo; their figures, files and exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvx import cli

FIT = ["--layers", "2", "--max-tokens", "1500", "--max-length", "96", "--context-tokens", "40"]
CUT = ["--context-tokens", "40", "--continuation-tokens", "16"]
ARMS = {"native", "native_mismatched", "none", "translated", "mismatched", "constant", "random"}


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVX_CACHE", str(tmp_path_factory.getbasetemp() / "kvx-cache"))


@pytest.fixture(scope="module")
def mapper(pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "map"
    args = [*pair.models, "--text", str(pair.text), "--out", str(folder), *FIT, "--continuation-tokens", "16"]
    assert cli.main(["fit", *args]) == 0
    return folder


def figures(capsys: pytest.CaptureFixture[str]) -> dict:
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return json.loads(said.out)


def test_fit_refuses_a_taken_folder(mapper: Path, pair, capsys) -> None:
    args = ["fit", *pair.models, "--text", str(pair.text), "--out", str(mapper), *FIT]
    assert cli.main(args) == 1
    assert "--overwrite" in capsys.readouterr().err


def test_fit_reports_as_json(pair, tmp_path: Path, capsys) -> None:
    args = ["fit", *pair.models, "--text", str(pair.text), "--out", str(tmp_path / "m"), *FIT, "--json"]
    assert cli.main(args) == 0
    found = figures(capsys)
    assert found["report"]["rows"] > 500 and {"data", "fit", "held_out", "mapper"} <= set(found["hashes"])


def test_inspect_tells_what_a_mapper_is(mapper: Path, capsys) -> None:
    assert cli.main(["inspect", str(mapper), "--json"]) == 0
    found = figures(capsys)
    assert found["kind"] == "mapper" and found["rule"] == "covering" and found["prefix_tokens"] == 1
    assert {row["target_layer"] for row in found["support"]} == {0, 1}
    assert cli.main(["inspect", str(mapper)]) == 0
    assert "FullHead" in capsys.readouterr().out


def test_head_matched_maps_are_fitted_and_inspected(pair, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "m"
    fit = ["fit", *pair.models, "--text", str(pair.text), "--out", str(folder), *FIT, "--budget", "1000000"]
    assert cli.main(fit) == 2
    assert "--method head_matched" in capsys.readouterr().err
    assert cli.main([*fit, "--method", "head_matched", "--json"]) == 0
    assert figures(capsys)["report"]["entries"][0]["source_heads"]
    assert cli.main(["inspect", str(folder), "--json"]) == 0
    found = figures(capsys)
    assert found["bytes"] <= 1_000_000
    heads = [(row["target_layer"], row["component"], row["target_heads"]) for row in found["support"]]
    assert len(heads) == len({str(one) for one in heads})
    for row in found["support"]:
        assert {int(one.split(":")[0]) for one in row["source_heads"]} == set(row["source_layers"])
    assert cli.main(["inspect", str(folder)]) == 0
    assert "HeadMatched" in capsys.readouterr().out


def test_maps_with_a_history_are_fitted_and_inspected(pair, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "m"
    fit = ["fit", *pair.models, "--text", str(pair.text), "--out", str(folder), *FIT, "--history", "2"]
    assert cli.main([*fit, "--method", "head_matched"]) == 2
    assert "--history is a setting of full_head" in capsys.readouterr().err
    assert cli.main([*fit, "--json"]) == 0
    capsys.readouterr()
    assert cli.main(["inspect", str(folder), "--json"]) == 0
    for row in figures(capsys)["support"]:
        assert row["beside"] == ["0@-1", "0@-2"]
        assert 0 in row["source_layers"] and max(row["source_layers"]) < 3


def test_low_rank_maps_are_fitted_inspected_and_trained_on(pair, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "m"
    fit = ["fit", *pair.models, "--text", str(pair.text), "--out", str(folder), *FIT, "--embeddings", "2"]
    assert cli.main(fit) == 2
    assert "--embeddings is a setting of low_rank" in capsys.readouterr().err
    assert cli.main([*fit, "--method", "low_rank", "--history", "2"]) == 2
    assert "low_rank has no setting --history" in capsys.readouterr().err
    assert cli.main([*fit, "--method", "low_rank", "--rank", "8", "--layers", "2", "--json"]) == 0
    capsys.readouterr()
    assert cli.main(["inspect", str(folder), "--json"]) == 0
    for row in figures(capsys)["support"]:
        assert row["source_layers"] == [0, 2] and row["beside"] == ["embedding", "embedding@-1"]
    train = ["train", "--mapper", str(folder), "--out", str(tmp_path / "t"), *TRAIN, *pair.models]
    few = ["--text", str(pair.text), "--max-passages", "2", "--judge-passages", "0", "--judge-questions", "0"]
    blocks = ["--method", "trunk", "--blocks", "1", "--heads", "2", "--head-dim", "4", "--trajectory-weight", "1.0"]
    assert cli.main([*train, *few, *blocks, "--json"]) == 0
    assert figures(capsys)["report"]["steps"] == 1
    assert cli.main(["inspect", str(tmp_path / "t")]) == 0
    assert "Trunk(blocks=1" in capsys.readouterr().out


def test_inspect_tells_what_a_model_is(pair, capsys) -> None:
    assert cli.main(["inspect", str(pair.source), "--json"]) == 0
    found = figures(capsys)
    assert found["supported"] and found["geometry"][0]["layers"] == "0-2"
    assert found["cache_bytes_per_token"] == {"float32": 3 * 2 * 16 * 4, "bfloat16": 3 * 2 * 16 * 2}


def test_a_damaged_mapper_is_refused(mapper: Path, tmp_path: Path, capsys) -> None:
    import shutil

    copy = shutil.copytree(mapper, tmp_path / "copy")
    victim = max((p for p in (copy / "arrays").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    assert cli.main(["inspect", str(copy)]) == 1
    assert capsys.readouterr().err.startswith("kvx: ")


def test_eval_gives_the_promised_figures_and_keeps_them(mapper: Path, pair, capsys) -> None:
    args = ["eval", "--mapper", str(mapper), "--text", str(pair.text), "--questions", str(pair.questions), *CUT]
    assert cli.main([*args, "--items", "6", "--max-new-tokens", "4", "--json"]) in (0, 3)
    found = figures(capsys)
    for name in ("retained", "content"):
        assert {name, f"{name}_low", f"{name}_high"} <= set(found)
    assert set(found["loss"]) >= ARMS | {"source_alone_nats_per_byte"}
    assert set(found["f1"]) == ARMS | {"source_alone"}
    assert found["items"] == 6 and found["questions"] == 6 and found["seconds"] > 0
    assert {"mapper", "items", "questions", "template", "data_held_out"} <= set(found["hashes"])
    assert json.loads((mapper / "evaluation.json").read_text())["hashes"] == found["hashes"]


def test_eval_exits_3_when_the_verdict_is_reprefill(mapper: Path, pair, tmp_path: Path, capsys) -> None:
    bars = {"name": "impossible", "min_contexts": 2, "min_questions": 2, "content": 9.0, "answers": 9.0}
    path = tmp_path / "bars.json"
    path.write_text(json.dumps({**bars, "attention_cosine": 2.0, "warm_speedup": 0.0}))
    args = ["eval", "--mapper", str(mapper), "--text", str(pair.text), "--thresholds", str(path), "--items", "6", *CUT]
    assert cli.main([*args, "--json"]) == 3
    assert figures(capsys)["verdict"] == "reprefill"
    handoff = ["handoff", "--mapper", str(mapper), "--context", str(pair.text.with_name("context.txt"))]
    Path(handoff[-1]).write_text("The miller found the bridge. A heron sold nine pears.")
    assert cli.main([*handoff, "--question", "who?", "--max-new-tokens", "4", "--json"]) == 3
    answer = figures(capsys)
    assert answer["verdict"] == "reprefill" and answer["coverage"] == 1.0 and len(answer["tokens"]) <= 4


def test_eval_sweeps_the_injection(mapper: Path, pair, tmp_path: Path, capsys) -> None:
    from kvx.evaluation.sweep_figure import drawable

    figure = tmp_path / "sweep.svg"
    args = ["eval", "--mapper", str(mapper), "--text", str(pair.text), *CUT, "--sweep", "injection"]
    assert cli.main([*args, "--items", "4", "--sweep-starts", "1", "2", "--sweep-figure", str(figure), "--json"]) == 0
    found = figures(capsys)
    assert [(row["start"], row["stop"]) for row in found["injections"]] == [(1, 2), (2, 2)]
    assert found["injections"][1]["loss"] == found["baselines"]["native"]["loss"]
    assert json.loads((mapper / "injection_sweep.json").read_text()) == found
    assert figure.exists() == drawable()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--sweep-size", "2"], "--sweep-size is a setting of --sweep injection"),
        (["--sweep", "injection", "--questions", "q.jsonl"], "takes no --questions"),
    ],
    ids=["without a sweep", "questions"],
)
def test_eval_refuses_half_a_sweep(flags: list[str], said: str, capsys) -> None:
    assert cli.main(["eval", "--mapper", "m", "--text", "t.txt", *flags]) == 2
    assert said in capsys.readouterr().err


def test_handoff_of_another_model_is_refused(mapper: Path, pair, tmp_path: Path, capsys) -> None:
    context = tmp_path / "c.txt"
    context.write_text("The miller found the bridge.")
    args = ["handoff", "--mapper", str(mapper), "--context", str(context), "--question", "who?"]
    assert cli.main([*args, "--source", str(pair.target)]) == 1
    assert "source" in capsys.readouterr().err


def test_an_empty_context_is_one_sentence(mapper: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    args = ["handoff", "--mapper", str(mapper), "--context", str(tmp_path / "empty.txt"), "--question", "who?"]
    assert cli.main(args) == 1
    assert "is empty" in capsys.readouterr().err


def test_what_is_remembered_depends_on_everything() -> None:
    from kvx.commands.remember import key_of

    keys = {key_of("fit", pairs, method, held) for pairs in "ab" for method in "cd" for held in (0.1, 0.2)}
    assert len(keys) == 8


def test_demo_shows_an_answer_and_the_table_and_remembers(pair, capsys) -> None:
    args = ["demo", *pair.models, "--text", str(pair.text), *FIT, "--continuation-tokens", "16"]
    args += ["--items", "6", "--max-questions", "4", "--max-new-tokens", "4"]
    assert cli.main(args) == 0
    said = capsys.readouterr()
    assert "answers from the translated cache" in said.out and "verdict" in said.out and "native" in said.out
    assert "kept from an earlier run" not in said.err
    assert cli.main([*args, "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert said.err.count("kept from an earlier run") == 2
    assert found["fit"]["kept"] and set(found["answers_shown"]) >= {"translated", "expected"}
    assert {"retained", "content", "items", "loss", "f1", "verdict", "hashes", "seconds"} <= set(found)


TRAIN = [
    "--context-tokens",
    "30",
    "--continuation-tokens",
    "16",
    "--width",
    "4",
    "--steps",
    "1",
    "--batch-size",
    "2",
    "--max-length",
    "96",
    "--cloze",
    "1",
]


@pytest.mark.usefixtures("quick_compilation")
def test_train_makes_a_translator_that_the_other_commands_take(
    mapper: Path, pair, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "translator"
    train = ["train", "--mapper", str(mapper), "--out", str(folder), *TRAIN, "--json"]
    assert cli.main(train) == 2
    assert "--text or --questions" in capsys.readouterr().err
    asked = tmp_path / "questions.jsonl"
    contexts = [text[:110] for text in pair.text.read_text().split("\n\n")[:5]]
    rows = [{"context": text, "question": "who found it?", "answers": ["the miller"]} for text in contexts]
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = [*pair.models, "--text", str(pair.text), "--questions", str(asked)]
    few = ["--max-passages", "2", "--judge-passages", "0", "--judge-questions", "2", "--minutes", "60", "--items", "2"]
    measured = []

    def evaluate(source, target, made, items, **settings):
        measured.extend(items)
        return SimpleNamespace(table=lambda: "", to_json=lambda: {"content_low": 0.5})

    monkeypatch.setattr("kvx.evaluate", evaluate)  # tried for real by the tests of eval
    monkeypatch.setattr("kvx.evaluation.scorer.AnswerScorer.__call__", lambda scorer, made: {"f1": 0.25})
    assert cli.main([*train, *named, *few]) == 0
    found = figures(capsys)
    assert found["report"]["steps"] == 1 and found["artefact_bytes"] > 0 and found["train_seconds"] > 0
    assert found["content_low"] == 0.5 and len(measured) == 2 and found["hashes"]["questions"]
    assert len(found["report"]["history"]) == 2 and found["report"]["best"]["f1"] == 0.25
    assert (folder / "training.json").is_file() and (tmp_path / "translator.run" / "metrics.jsonl").is_file()
    assert cli.main(["inspect", str(folder), "--json"]) == 0
    found = figures(capsys)
    assert "Residual" in found["method"] and found["support"]
    assert cli.main([*train, *named]) == 1
    assert "--overwrite" in capsys.readouterr().err


def test_train_fits_the_mapper_first_where_it_is_not_there_yet(pair, tmp_path: Path, capsys) -> None:
    import kvx
    from kvx.commands.common import Output, UsageError
    from kvx.commands.train import Train, _fit_first

    wanted, folder = tmp_path / "fit.yaml", tmp_path / "map"
    wanted.write_text("method: full_head\nlayers: 1\nmax_tokens: 600\nmax_length: 96\n")
    flags = ["--mapper", str(folder), "--fit", str(wanted), "--out", str(tmp_path / "t"), *pair.models]
    settings = cli.parse("train", [*flags, "--text", str(pair.text), *CUT])
    assert isinstance(settings, Train)
    _fit_first(settings, Output())
    assert "is not there yet: fitting it first" in capsys.readouterr().err
    digest = kvx.load(folder).digest
    _fit_first(settings, Output())
    assert "fitting" not in capsys.readouterr().err and kvx.load(folder).digest == digest
    other = cli.parse("train", [*flags, "--mapper", str(tmp_path / "other")])
    assert isinstance(other, Train)
    with pytest.raises(UsageError, match="--text first, which is missing"):
        _fit_first(other, Output())


def test_the_translators_config_names_files_that_are_there() -> None:
    from kvx.commands.train import Train

    root = Path(__file__).resolve().parents[2]
    settings = cli.parse("train", ["--config", str(root / "configs/smollm2_to_gemma3_translator.yaml")])
    assert isinstance(settings, Train) and settings.fit is not None and (root / settings.fit).is_file()
    assert (str(settings.questions), str(settings.test_questions)) == ("demo:questions", "demo:squad_test")
    assert settings.max_test_questions == 150 and settings.items == 100


def test_train_makes_the_method_and_the_loss_of_its_flags() -> None:
    from kvx.cache.geometry import CacheGeometry, LayerGeometry
    from kvx.commands.train import Train, loss_of, method_of
    from kvx.mappers import CacheMap
    from kvx.models.config import tiny_config
    from kvx.translators import mixture, residual

    layers = CacheGeometry((LayerGeometry(1, 4, 4),) * 4)
    start = CacheMap(None, None, None, layers, layers)
    flags = ["--method", "mixture", "--experts", "4", "--top", "2", "--width", "8", "--correction-weight", "0.5"]
    settings = cli.parse("train", [*flags, "--window", "1", "2"])
    assert isinstance(settings, Train)
    assert method_of(settings) == mixture(experts=4, top=2, width=8, window=(1, 2))
    loss = loss_of(settings, start)
    assert (loss.correction, loss.injection, loss.plan.layers(tiny_config(num_layers=4))) == (0.5, (1, 3), range(1, 3))
    settings = cli.parse("train", ["--correction-weight", "1.0", "--injection", "2", "4", "--width", "16"])
    assert isinstance(settings, Train) and method_of(settings) == residual(width=16)
    assert loss_of(settings, start).injection == (2, 4) and loss_of(Train(), start).injection is None
