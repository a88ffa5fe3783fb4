"""What runs without the test tools: neither torch nor transformers is imported on any run-time path."""

from __future__ import annotations

import json
from pathlib import Path

WITHOUT = """
import json, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "beartype", "hypothesis", "pytest"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
from kvx import cli

source, target, text, out = PATHS
cut = ["--context-tokens", "40", "--continuation-tokens", "8"]
code = cli.main(["fit", "--source", source, "--target", target, "--text", text, "--out", out, "--layers", "1",
                 "--max-tokens", "600", "--max-length", "64", *cut])
code = code or cli.main(["inspect", out])
context = out + ".txt"
open(context, "w").write("The miller found the bridge. A heron sold nine pears.")
ask = ["--mapper", out, "--context", context, "--question", "who?", "--max-new-tokens", "3"]
code = code or cli.main(["handoff", *ask])
code = code or cli.main(["eval", "--mapper", out, "--text", text, "--items", "4", "--json", *cut]) % 3
sys.exit(code)
"""


def test_a_whole_hand_off_without_torch_or_transformers(pair, tmp_path: Path, run_python) -> None:
    paths = [str(pair.source), str(pair.target), str(pair.text), str(tmp_path / "map")]
    code = WITHOUT.replace("PATHS", repr(paths))
    result = run_python(code, timeout=600, KVX_CACHE=str(tmp_path / "cache"), KVX_TYPECHECK="0")
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout[result.stdout.index('{\n  "pair"') :])
    assert figures["items"] == 4 and figures["loss"]["translated"] > 0


def test_bench_says_what_it_needs(run_python, pair) -> None:
    head = WITHOUT.split("from kvx import cli")[0]
    code = f"{head}\nfrom kvx import cli\nsys.exit(cli.main(['bench', 'models', '--models', {str(pair.source)!r}]))"
    result = run_python(code, KVX_TYPECHECK="0")
    assert result.returncode == 1 and "pip install" in result.stderr and "Traceback" not in result.stderr
