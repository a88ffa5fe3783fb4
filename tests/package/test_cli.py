"""The command line: help, exit codes, a clear sentence for a failure, one JSON object on stdout, configs and flags."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path

import pytest

from kvx import cli
from kvx.commands.common import Outcome, UsageError, jsonable

ROOT = Path(__file__).resolve().parents[2]


def run(*args: str) -> int:
    """Exit code of a command line, however it leaves."""
    try:
        return cli.main(args)
    except SystemExit as leave:
        return int(leave.code or 0)


def test_overview_lists_every_command(capsys) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in cli.COMMANDS)


def test_no_command_is_usage(capsys) -> None:
    assert run() == 2
    assert "usage: kvx COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_help_of_every_command_documents_every_flag(command: str, capsys) -> None:
    assert run(command, "--help") == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    kind = getattr(importlib.import_module(f"kvx.commands.{command}"), cli.COMMANDS[command][0])
    for field in dataclasses.fields(kind):
        if field.name not in ("what", "path"):  # positional
            assert f"--{field.name.replace('_', '-')}" in text, f"{command} --help lacks {field.name}"
    assert text.count("(default:") >= len(dataclasses.fields(kind)) - 2


@pytest.mark.parametrize(
    "args",
    [
        ["nonsense"],
        ["fit", "--layers", "many"],
        ["fit", "--no-such-flag", "1"],
        ["fit"],
        ["eval"],
        ["handoff"],
        ["inspect"],
        ["doctor", "--config", "no/such/file.yaml"],
    ],
    ids=" ".join,
)
def test_usage_errors_exit_2_and_speak_on_stderr_only(args: list[str], capsys) -> None:
    assert run(*args) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.strip() and "Traceback" not in said.err


@pytest.mark.parametrize(
    "args",
    [
        ["inspect", "no/such/place"],
        ["eval", "--mapper", "no/such/mapper", "--text", "README.md"],
        ["fit", "--source", "no/such/folder", "--target", "x", "--text", "README.md", "--out", "no/such/out"],
    ],
    ids=lambda args: args[0],
)
def test_failures_are_one_sentence_and_exit_1(args: list[str], capsys, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run(*args) == 1
    said = capsys.readouterr().err.strip()
    assert said.startswith("kvx: ") and "Traceback" not in said and "defect" not in said
    assert len(said.splitlines()) == 1


def test_a_failure_with_json_is_one_object_too(capsys) -> None:
    assert run("inspect", "no/such/place", "--json") == 1
    assert set(json.loads(capsys.readouterr().out)) == {"error"}


def test_a_defect_is_a_sentence_unless_debugging(capsys, monkeypatch) -> None:
    def broken(settings, out):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("kvx.commands.doctor.run", broken)
    assert run("doctor") == 1
    said = capsys.readouterr().err
    assert said.startswith("kvx: ZeroDivisionError") and "KVX_DEBUG=1" in said and "Traceback" not in said
    monkeypatch.setenv("KVX_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        run("doctor")


def test_the_code_of_an_outcome_is_the_exit_code(capsys, monkeypatch) -> None:
    monkeypatch.setattr("kvx.commands.doctor.run", lambda settings, out: Outcome({"verdict": "reprefill"}, 3))
    assert run("doctor", "--json") == 3
    assert json.loads(capsys.readouterr().out) == {"verdict": "reprefill"}


def test_config_file_then_flags(tmp_path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("source: a\ntarget: b\nlayers: all\nmax-length: 128\nridge: 0.5\noverwrite: true\n")
    settings = cli.parse("fit", ["--config", str(path), "--target", "c"])
    assert (settings.source, settings.target, settings.layers) == ("a", "c", "all")
    assert (settings.max_length, settings.ridge, settings.overwrite) == (128, 0.5, True)
    assert settings.batch_size == 4


def test_flags_reach_the_method() -> None:
    from kvx.commands.fit import mapper_of

    flags = ["--sensitivity", "all", "--select", "attention", "--layers", "3", "--ridge", "None"]
    for kind in ("full_head", "head_matched"):
        method = mapper_of(cli.parse("fit", ["--method", kind, *flags]))
        assert (method.sensitivity, method.select, method.layers) == ("all", "attention", 3)
        assert len(method.ridges) > 1
    with pytest.raises(UsageError, match=r"--select attention chooses among ridges, but --ridge is 0.001"):
        mapper_of(cli.parse("fit", flags[:-2]))
    assert mapper_of(cli.parse("fit", [])).sensitivity is None


@pytest.mark.parametrize(
    ("text", "says"),
    [("sauce: a\n", "sauce"), ("- a\n", "mapping"), ("layers: many\n", "layers"), ("a: [\n", "cannot read")],
)
def test_bad_config_files_say_what_is_wrong(text: str, says: str, tmp_path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=says):
        cli.parse("fit", ["--config", str(path)])


def test_shipped_configs_parse() -> None:
    paths = sorted((ROOT / "configs").glob("*.yaml"))
    assert paths
    for path in paths:
        command = path.read_text().splitlines()[0].split("kvx ")[1].split()[0]
        assert cli.parse(command, ["--config", str(path)]).config == path


def test_doctor_prints_facts_and_the_next_step(capsys) -> None:
    assert run("doctor", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["jax"] and facts["devices"] and facts["problems"] == []
    assert run("doctor") == 0
    assert facts["next"].split(";")[0] in capsys.readouterr().out


def test_doctor_names_an_accelerator_that_jax_leaves_unused(monkeypatch) -> None:
    from kvx.commands import doctor

    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(doctor, "_memory_free_gb", lambda: 16.0)  # whatever this machine has free just now
    facts = doctor.examine()
    assert facts["unused"] == ["an NVIDIA GPU (pip install 'kvx[cuda13]')"] and "cuda13" in facts["next"]


def test_doctor_finds_what_is_missing(monkeypatch, tmp_path) -> None:
    from kvx.commands import doctor

    monkeypatch.setattr(doctor, "PACKAGES", (*doctor.PACKAGES, "a-package-nobody-has"))
    assert "a-package-nobody-has is not installed" in doctor.examine()["next"]


def test_not_a_number_is_null() -> None:
    assert jsonable({"a": float("nan"), "b": [float("inf"), 1.5], "c": Path("x")}) == {
        "a": None,
        "b": [None, 1.5],
        "c": "x",
    }
