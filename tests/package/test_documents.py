"""README, docs, configs and CI say what is true: commands, links, names, examples."""

from __future__ import annotations

import dataclasses
import importlib
import re
import subprocess
from pathlib import Path

import pytest

import kvx
from kvx import cli

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])


def commands() -> list[str]:
    """The lines of README's first two shell blocks."""
    return [block.strip() for block in re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)[:2]]


def test_two_commands_do_everything_on_a_fresh_machine() -> None:
    demo, tests = commands()
    assert "\n" not in demo and "\n" not in tests
    assert demo.startswith("python3 -m venv ") and "pip install ." in demo and demo.endswith("kvx demo")
    assert tests.startswith("python3 -m venv ") and ".[test]" in tests and "pytest" in tests


def test_ci_runs_readmes_test_command_as_typed() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    found = re.search(r"tests=\$\((sed .*?README\.md)\)", script)
    assert found, ".ci/run no longer takes its test command from README"
    line = subprocess.run(["bash", "-c", found[1]], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert line == commands()[1]
    assert '"$tests"' in script


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_exist(page: Path) -> None:
    """Every ``kvx.name`` a page mentions is public; every path of this repository it mentions is there."""
    text = page.read_text()
    for name in re.findall(r"`kvx\.(\w+)", text):
        assert name in kvx.__all__ or (ROOT / "kvx" / name).exists() or (ROOT / "kvx" / f"{name}.py").exists(), name
    for path in re.findall(r"`((?:kvx|configs|tests|colab|docs|scripts)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_command_lines_parse(page: Path) -> None:
    """Every command line a page shows has a known command and known flags."""
    for line in re.findall(rf"`kvx ((?:{'|'.join(cli.COMMANDS)})[^`]*)`", page.read_text()):
        command, *words = line.split()
        flags = [word for word in words if word.startswith("--")]
        known = flags_of(command)
        assert all(flag in known for flag in flags), f"{page.name}: kvx {line}"


def flags_of(command: str) -> set[str]:
    """Flags of a command."""
    kind = getattr(importlib.import_module(f"kvx.commands.{command}"), cli.COMMANDS[command][0])
    return {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(kind)} | {"--help"}


def test_readmes_python_example_runs(pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names = {"HuggingFaceTB/SmolLM2-135M-Instruct": pair.source, "google/gemma-3-270m": pair.target}
    for name, folder in names.items():
        assert f'kvx.load_model("{name}")' in block
        block = block.replace(name, str(folder))
    block = block.replace("layers=7", "layers=2").replace("max_length=512", "max_length=96")
    texts = pair.text.read_text().split("\n\n")[:40]
    monkeypatch.chdir(tmp_path)
    exec(block, {"texts": texts, "context": texts[0], "question": "\nWho found the bridge?"})
    assert (tmp_path / "runs" / "smol_to_gemma" / "manifest.json").is_file()
    assert capsys.readouterr().out.strip()


def test_changelog_names_this_version() -> None:
    assert f"## {kvx.__version__}" in (ROOT / "CHANGELOG.md").read_text()
