"""Run the tests with the oldest releases that pyproject.toml allows: ``python scripts/check_floors.py [pytest args]``.

Makes a virtual environment in ``.venv-floors``, installs kvx with every floor of ``dependencies`` as a pin, and runs
pytest in it. Floors that the test tools themselves raise (transformers needs newer tokenizers, safetensors and
huggingface-hub) are left to them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RAISED_BY_TEST_TOOLS = {"huggingface-hub", "safetensors", "tokenizers"}


def floors() -> list[str]:
    """``name==floor`` of each dependency that has a floor."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [re.match(r"([\w.-]+)>=([\w.]+)", row) for row in project["dependencies"]]
    return [f"{row[1]}=={row[2]}" for row in found if row and row[1] not in RAISED_BY_TEST_TOOLS]


def main() -> int:
    python = ROOT / ".venv-floors" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
    pins = python.parents[1] / "floors.txt"
    pins.write_text("\n".join(floors()) + "\n")
    print("floors:", ", ".join(floors()))
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", pins, "--editable", f"{ROOT}[test]"]
    subprocess.run([str(part) for part in install], check=True)
    return subprocess.run([str(python), "-m", "pytest", *sys.argv[1:]], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
