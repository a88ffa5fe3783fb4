"""``kvx bench models``: prefill and decode speed against transformers + torch, in one run on this machine."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import tyro

from kvx.commands.common import Common, Outcome, Output


@dataclasses.dataclass(frozen=True)
class Bench(Common):
    """Settings of ``kvx bench``."""

    what: tyro.conf.Positional[Literal["models"]] = "models"
    """What to time."""
    models: tuple[str, ...] = ("demo:smollm2", "demo:gemma3")
    """Models: hub ids, local folders or .gguf files."""
    tokens: int = 512
    """Tokens of the prompt."""
    threads: int = 2
    """CPU threads of each side."""


def run(settings: Bench, out: Output) -> Outcome:
    """Time both on the same weights and tokens; ratios above 1 mean kvx is faster.

    Raises:
        KvxError: torch or transformers is not installed, or a model cannot be loaded.
    """
    from kvx.evaluation.bench_models import bench_models

    out.say(f"timing {', '.join(settings.models)} at {settings.tokens} tokens, {settings.threads} threads each")
    figures = bench_models(list(settings.models), tokens=settings.tokens, threads=settings.threads)
    _print(figures, out)
    return Outcome(figures)


def _print(figures: dict[str, Any], out: Output) -> None:
    from rich.table import Table

    rows = {
        name: facts for name, facts in figures.items() if isinstance(facts, dict) and "prefill_ratio_vs_torch" in facts
    }
    columns = list(dict.fromkeys(key for facts in rows.values() for key, value in facts.items() if _number(value)))
    table = Table("model", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for name, facts in rows.items():
        table.add_row(name, *(f"{facts[column]:,.4g}" if _number(facts.get(column)) else "-" for column in columns))
    out.console.print(table)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
