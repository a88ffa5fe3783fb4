"""Fit several mappers on the same tokens of a pair and measure them on the same items.

    python scripts/compare_mappers.py --text FILE --questions FILE.jsonl --out result.json \
        --methods 'full_head(layers=7, ridge=1e-3)' 'head_matched(layers=21, ridge=1e-3, sensitivity=True)'

The pair is read once; every fit streams the caches that were kept. The first method is the reference.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

import kvx
from kvx.evaluation.comparison import evaluate_maps
from kvx.evaluation.items import Item, Question, load_passages, load_questions
from kvx.fitting.pairs import Pairs
from kvx.fitting.report import FitReport
from kvx.fitting.weighted import Weighing
from kvx.mappers.base import CacheMap


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to compare, on what."""

    text: Path
    """Passages: the fit sees one half, the figures come from the other."""
    out: Path
    """JSON file with every figure of every item."""
    methods: list[str]
    """Mappers as written in Python, without the module: full_head(layers=7, ridge=1e-3); identity() is raw reuse."""
    questions: Path | None = None
    """Questions: JSON lines with question, answers and context."""
    source: str = "demo:smollm2"
    """Source model."""
    target: str = "demo:gemma3"
    """Target model."""
    max_tokens: int = 20_000
    """Target tokens to fit on."""
    items: int = 100
    """Passages, at most."""
    max_questions: int = 100
    """Questions, at most."""
    context_tokens: int = 320
    """Target tokens handed over in each passage."""
    batch_size: int = 8
    """Items in one step."""


def main(settings: Settings) -> None:
    """Read, fit, measure, print, save."""
    console = Console(width=150)
    source, target = kvx.load_model(settings.source), kvx.load_model(settings.target)
    split = load_passages(settings.text, target, context_tokens=settings.context_tokens, held_out=0.5)
    items: list[Item | Question] = list(split.held_out[: settings.items])
    if settings.questions is not None:
        items += load_questions(settings.questions, settings.max_questions)
    pairs = kept(
        kvx.pairs(source, target, [i.text for i in split.fit], max_tokens=settings.max_tokens, join=False),
        [method_of(text) for text in settings.methods if text != "identity()"],
    )
    maps: dict[str, CacheMap] = {}
    reports: dict[str, FitReport] = {}
    build_s: dict[str, float] = {}
    for text in settings.methods:
        if text == "identity()":
            maps[text] = kvx.identity()
            continue
        started = time.perf_counter()
        maps[text], reports[text] = kvx.fit(method_of(text), pairs, progress=False)
        build_s[text] = sum(s for phase, s in reports[text].seconds.items() if phase != "pairs")
        console.print(f"{text}: {time.perf_counter() - started:.0f} s", reports[text].seconds, markup=False)
    result = evaluate_maps(
        source, target, maps, items, build_s=build_s, batch_size=settings.batch_size, data=split.hashes
    )
    console.print(result.results[result.reference].table())
    console.print(result.table())
    fits = {name: report.to_json() for name, report in reports.items()}
    settings.out.write_text(json.dumps({**result.to_json(), "fits": fits}, default=str), encoding="utf-8")


def method_of(text: str) -> Any:
    """The mapper that a line names; only the names of kvx.mappers are known to it."""
    known = {name: getattr(kvx.mappers, name) for name in ("full_head", "head_matched")}
    return eval(text, {"__builtins__": {}}, known)


def kept(pairs: Pairs, methods: list[Any]) -> Pairs:
    """The same pairs, their batches read once (for each kind of sensitivity the methods ask for) and kept in memory."""
    asked = [Weighing.of(method) for method in methods]
    modes = {weighing.mode for weighing in asked if weighing is not None}
    streams = {mode: list(pairs.weighed(mode)) for mode in sorted(modes)} or {"": list(pairs)}
    plain = next(iter(streams.values()))
    return dataclasses.replace(
        pairs, batches=lambda report: iter(plain), sensitive=lambda mode: lambda report: iter(streams[mode])
    )


if __name__ == "__main__":
    main(tyro.cli(Settings))
