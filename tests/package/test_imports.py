"""Laws of the import graph, and what importing and running kvx must not bring along."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import kvx

ROOT = Path(__file__).resolve().parents[2]

# Dependencies point one way: a module imports only from its own layer or from those before it.
LAYERS = [
    {"errors", "typing"},
    {"cache", "sharding"},
    {"models"},
    {"alignment"},
    {"mappers", "translators"},
    {"fitting"},
    {"pipeline"},
    {"evaluation"},
    {"testing"},
    {"commands", "cli", "__main__"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def modules(package: str) -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


class Imports(ast.NodeVisitor):
    """Names of the modules a file imports at run time: those under ``if TYPE_CHECKING`` are left out."""

    def __init__(self) -> None:
        self.everywhere: set[str] = set()
        self.on_import: set[str] = set()
        self.depth = 0

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) not in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    def _add(self, names: list[str]) -> None:
        self.everywhere.update(names)
        if not self.depth:
            self.on_import.update(names)

    def visit_Import(self, node: ast.Import) -> None:
        self._add([alias.name for alias in node.names])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self._add([node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)])


def imports(path: Path) -> Imports:
    visitor = Imports()
    visitor.visit(ast.parse(path.read_text()))
    return visitor


def top(name: str) -> str:
    return name.split(".")[0]


def violations() -> list[str]:
    found = []
    for module, path in modules("kvx").items():
        own = module.split(".")[1] if "." in module else None
        if own is None:
            continue
        for name in imports(path).everywhere:
            parts = name.split(".")
            if parts[0] == "kvx" and len(parts) > 1 and parts[1] in RANK and RANK[parts[1]] > RANK[own]:
                found.append(f"{module} imports {name}")
    return found


def test_every_module_has_a_layer() -> None:
    homes = {name.split(".")[1] for name in modules("kvx") if "." in name}
    assert homes <= set(RANK), f"give these a layer: {homes - set(RANK)}"


def test_dependencies_point_one_way() -> None:
    assert violations() == []


def test_the_law_sees_a_violation() -> None:
    visitor = Imports()
    visitor.visit(ast.parse("def f():\n    from kvx.evaluation import metrics\n"))
    assert "kvx.evaluation" in visitor.everywhere and "kvx.evaluation" not in visitor.on_import


def test_pallas_kernels_import_nothing_of_kvx() -> None:
    assert not [n for n, p in modules("pallas_kernels").items() if "kvx" in {top(i) for i in imports(p).everywhere}]


def test_one_module_imports_orbax() -> None:
    users = [n for n, p in modules("kvx").items() if "orbax" in {top(i) for i in imports(p).everywhere}]
    assert users == ["kvx.fitting.checkpoint"]


@pytest.mark.parametrize("guest", ["torch", "transformers"])
def test_torch_and_transformers_are_never_imported_with_a_module(guest: str) -> None:
    assert not [n for n, p in modules("kvx").items() if guest in {top(i) for i in imports(p).on_import}]


def test_only_import_export_and_bench_know_torch() -> None:
    users = {
        n for n, p in modules("kvx").items() if {"torch", "transformers"} & {top(i) for i in imports(p).everywhere}
    }
    allowed = {"kvx.cache.transformers_cache", "kvx.evaluation.bench_models"}
    assert {n for n in users if not n.startswith("kvx.models.")} <= allowed


def test_the_lazy_table_and_the_type_checkers_table_agree() -> None:
    tree = ast.parse((ROOT / "kvx/__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    seen |= {name: f"kvx.{name}" for name in ("mappers", "translators")}
    assert seen == kvx._HOMES


@pytest.mark.parametrize("name", sorted(kvx._HOMES))
def test_every_public_name_exists(name: str) -> None:
    assert getattr(kvx, name) is not None


def test_unknown_names_say_what_exists() -> None:
    with pytest.raises(AttributeError, match="handoff"):
        _ = kvx.hand_off  # type: ignore[attr-defined]


def test_import_is_light_and_free_of_side_effects(run_python) -> None:
    heavy = ["jax", "torch", "transformers", "orbax", "tokenizers", "tyro", "numpy"]
    code = f"import sys, json, kvx; print(json.dumps([m for m in {heavy!r} if m in sys.modules]))"
    result = run_python(code)
    assert json.loads(result.stdout) == [], result.stderr


def test_help_does_not_start_jax(run_python) -> None:
    code = "import sys; from kvx.cli import main; main(['fit', '--help'])"
    result = run_python(f"import atexit, sys\natexit.register(lambda: print('jax' in sys.modules))\n{code}")
    assert result.stdout.rstrip().endswith("False"), result.stdout + result.stderr
