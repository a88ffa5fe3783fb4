"""The Colab notebook: executed in its fast form on the real demo models; it changes no installed JAX."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "colab" / "quickstart.ipynb"


def sources() -> str:
    return "\n".join(cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code")


def test_it_is_stored_without_outputs() -> None:
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        assert cell.cell_type == "markdown" or (cell.outputs == [] and cell.execution_count is None)


def test_it_never_upgrades_what_is_installed() -> None:
    text = sources()
    assert "--constraint" in text and '"jax", "jaxlib"' in text
    assert "--upgrade" not in text and "%pip" not in text and "!pip" not in text


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> nbformat.NotebookNode:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    env = {**os.environ, "KVX_NOTEBOOK_FAST": "1", "PYTHONPATH": str(ROOT), "KVX_TYPECHECK": "0"}
    home = str(tmp_path_factory.mktemp("notebook"))
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": home}}).execute(
        env=env
    )
    return notebook


def test_it_runs_and_shows_answers_and_the_table(executed: nbformat.NotebookNode) -> None:
    outputs = [output for cell in executed.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    shown = "".join(output.data.get("text/html", "") for output in outputs if "data" in output)
    assert "translated cache:" in printed and "Apache License 2.0" in printed
    for arm in ("native", "translated", "mismatched", "constant", "random", "verdict"):
        assert arm in shown
