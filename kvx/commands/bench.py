"""``kvx bench models | mapper | translators``: kinds of speed, and of quality, measured side by side in one run."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any, Literal

import tyro

from kvx.commands.common import Common, Outcome, Output, prepare_jax
from kvx.errors import KvxError


@dataclasses.dataclass(frozen=True)
class Bench(Common):
    """Settings of ``kvx bench``."""

    what: tyro.conf.Positional[Literal["models", "mapper", "translators"]] = "models"
    """Time models against transformers + torch, or a head-matched map against a full-head one; or train translators
    between small models and see what each carries."""
    models: tuple[str, ...] = ("demo:smollm2", "demo:gemma3")
    """Models: hub ids, local folders or .gguf files."""
    tokens: int = 512
    """Tokens of the prompt; models only."""
    threads: int = 2
    """CPU threads of each side; models only."""
    lengths: tuple[int, ...] = (128, 512, 1024, 4096, 32768)
    """Tokens of the contexts that are translated; mapper only."""
    layers: int = 20
    """Layers of both models; mapper only."""
    heads: int = 8
    """Kv heads of both models; mapper only."""
    width: int = 128
    """Channels of a head; mapper only."""
    reads: int = 4
    """Source layers that feed each target layer; mapper only."""
    rows: int = 16384
    """Tokens that are fitted; mapper only."""
    repeats: int = 5
    """How often each side runs; the best counts; mapper only."""
    directions: tuple[str, ...] = ()
    """SOURCE>TARGET pairs of minis, or all (thirty); none: six; translators only."""
    seeds: int = 3
    """How often each translator is trained; translators only."""
    steps: int = 600
    """Training steps of each (300 took one and a half to three and a half minutes on a core); translators only."""
    ablations: bool = False
    """Instead of the methods: mixtures that differ in experts, router, loss or window; translators only."""
    folder: Path = Path("runs/translators")
    """Where finished maps and records are kept: a second run goes on from them; translators only."""
    figure: Path | None = None
    """PNG or SVG file; None: none is drawn, but for ablations (ablations.png in the folder). Needs matplotlib."""


def run(settings: Bench, out: Output) -> Outcome:
    """Time both sides by turns; ratios above 1 mean that kvx, or the head-matched map, is better.

    Raises:
        KvxError: torch or transformers is not installed (models), or a model cannot be loaded.
    """
    if settings.what == "mapper":
        return _mapper(settings, out)
    if settings.what == "translators":
        return _translators(settings, out)
    from kvx.evaluation.bench_models import bench_models

    out.say(f"timing {', '.join(settings.models)} at {settings.tokens} tokens, {settings.threads} threads each")
    figures = bench_models(list(settings.models), tokens=settings.tokens, threads=settings.threads)
    _print(figures, out)
    return Outcome(figures)


def _mapper(settings: Bench, out: Output) -> Outcome:
    from kvx.evaluation.bench_mapper import Shape, bench_mapper

    shape = Shape(settings.layers, settings.heads, settings.width, settings.reads)
    out.say(f"timing full_head and head_matched, {shape}; some minutes")
    figures = bench_mapper(shape, tokens=settings.lengths, rows=settings.rows, repeats=settings.repeats)
    for name, value in figures.items():
        out.console.print(f"{name:36} {_text(value)}", markup=False, highlight=False)
    return Outcome(figures)


def _translators(settings: Bench, out: Output) -> Outcome:
    from kvx.evaluation.sweep_figure import check_format
    from kvx.testing.translator_bench import Work, ablations, contenders, directions, run_direction
    from kvx.testing.translator_report import draw, overview, summary, table

    figure = settings.figure or (settings.folder / "ablations.png" if settings.ablations else None)
    if figure is not None:
        check_format(figure)
    if settings.seeds < 1:
        raise KvxError(f"--seeds is {settings.seeds}; expected at least one.")
    prepare_jax()
    wanted, work = directions(settings.directions), Work(steps=settings.steps)
    rows = ablations() if settings.ablations else contenders()
    records: list[dict[str, Any]] = []
    began = time.monotonic()
    for at, (source, target) in enumerate(wanted):
        left = f", about {(time.monotonic() - began) / at * (len(wanted) - at) / 60:.0f} min left" if at else ""
        out.say(f"{source} -> {target} ({at + 1} of {len(wanted)}){left}")
        watch = out.watch(f"{source} -> {target}")
        records.append(run_direction(source, target, rows, range(settings.seeds), work, settings.folder, watch))
        out.console.print(table(records[-1]))
    found = summary(records)
    out.console.print(overview(found))
    if figure is not None:
        draw(found, figure)
        out.say(f"drawn: {figure}")
    return Outcome(found)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(one)}" for name, one in value.items())
    return f"{value:,.4g}" if _number(value) else str(value)


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
