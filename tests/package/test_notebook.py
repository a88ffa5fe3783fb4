"""The Colab notebooks: executed in their fast form, one on the real demo models; they change no installed JAX."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART, TRAINING = (ROOT / "colab" / name for name in ("quickstart.ipynb", "train_a_translator.ipynb"))
BOTH = pytest.mark.parametrize("path", (QUICKSTART, TRAINING), ids=lambda path: path.stem)


@BOTH
def test_it_is_stored_without_outputs(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        assert cell.cell_type == "markdown" or (cell.outputs == [] and cell.execution_count is None)


@BOTH
def test_it_never_upgrades_what_is_installed(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    assert "--constraint" in text and '"jax", "jaxlib"' in text
    assert "--upgrade" not in text and "%pip" not in text and "!pip" not in text


def executed(path: Path, home: Path) -> tuple[str, str]:
    """What the cells print, and what they show as HTML."""
    notebook = nbformat.read(path, as_version=4)
    env = {**os.environ, "KVX_NOTEBOOK_FAST": "1", "PYTHONPATH": str(ROOT), "KVX_TYPECHECK": "0"}
    client = NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(home)}})
    client.execute(env=env)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    return printed, "".join(output.data.get("text/html", "") for output in outputs if "data" in output)


def test_the_quickstart_shows_answers_and_the_table(tmp_path: Path) -> None:
    printed, shown = executed(QUICKSTART, tmp_path)
    assert "translated cache:" in printed and "Apache License 2.0" in printed
    for arm in ("native", "translated", "mismatched", "constant", "random", "verdict"):
        assert arm in shown


def test_the_training_notebook_compares_what_it_trained_with_its_start(tmp_path: Path) -> None:
    printed, shown = executed(TRAINING, tmp_path)
    assert "closed form:" in printed and "expected:" in printed
    for row in ("trained", "closed form", "native", "mismatched"):
        assert row in shown
    assert (tmp_path / "runs" / "gpt2_to_opt").is_dir()
