"""``kvx eval``: measure a saved mapper in all arms, or a replay over it, on what it was never fitted on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvx.commands.common import OK, REPREFILL, Outcome, Output, UsageError, jsonable, load, prepare_jax, require
from kvx.commands.fit import TextSettings
from kvx.errors import KvxError

if TYPE_CHECKING:
    from kvx.evaluation.items import Item, Question
    from kvx.mappers.base import CacheMap
    from kvx.models.model import Model

RESULT = "evaluation.json"  # beside the mapper; `kvx handoff` reads its verdict
SWEEP = "injection_sweep"  # .json and .png, beside the mapper


@dataclasses.dataclass(frozen=True)
class Eval(TextSettings):
    """Settings of ``kvx eval``."""

    mapper: Path | None = None
    """Folder of the saved mapper. Required."""
    source: str | None = None
    """Source model; None: where the mapper was fitted."""
    target: str | None = None
    """Target model; None: where the mapper was fitted."""
    text: Path | None = None
    """Passages: a UTF-8 file, the fitted one or another, or demo:passages; only its never-fitted part is used."""
    questions: Path | None = None
    """Questions: JSON lines with question, answers and context, or demo:squad_test."""
    items: int = 100
    """Passages, at most."""
    max_questions: int = 100
    """Questions, at most."""
    template: str = "two_examples"
    """How questions are put: a name, or a JSON file."""
    max_new_tokens: int = 16
    """Tokens of an answer, at most."""
    batch_size: int = 8
    """Items in one step."""
    thresholds: Path | None = None
    """JSON file with the bars of the verdict; None: those that ship with kvx."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations."""
    per_item: bool = False
    """Also put every item's figures into the JSON."""
    sweep: Literal["injection"] | None = None
    """Instead of the arms: replay over the translated cache, injected from each target layer on; needs --text."""
    sweep_starts: tuple[int, ...] | None = None
    """First injected target layers; None: every one. The number of layers: no injection."""
    sweep_size: int | None = None
    """Layers of the injected window; None: up to the top."""
    sweep_figure: Path | None = None
    """PNG or SVG file of the sweep's figure; None: injection_sweep.png beside the mapper. Needs matplotlib."""


def run(settings: Eval, out: Output) -> Outcome:
    """Measure, print the tables, keep the result beside the mapper; code 3 when the verdict is ``reprefill``.

    Raises:
        KvxError: the mapper, a model or an item file cannot be read, or the models are not the mapper's.
    """
    require(settings, "mapper")
    check_sweep(settings)
    if settings.text is None and settings.questions is None:
        raise UsageError("kvx eval needs --text or --questions (or both), else there is nothing to measure on.")
    prepare_jax()
    import kvx

    folder = Path(str(settings.mapper))
    mapper = kvx.load(folder)
    source, target = models_of(mapper, settings.source, settings.target, settings.dtype)
    items, hashes = items_of(settings, target)
    if settings.sweep is not None:
        return run_sweep(settings, out, (source, target, mapper), items, hashes)
    result = kvx.evaluate(
        source,
        target,
        mapper,
        items,
        template=settings.template,
        batch_size=settings.batch_size,
        max_new_tokens=settings.max_new_tokens,
        thresholds=settings.thresholds,
        data=hashes,
        progress=out.watch("measuring"),
    )
    figures = result.to_json(per_item=settings.per_item)
    out.console.print(result.table())
    (folder / RESULT).write_text(json.dumps(jsonable(figures), indent=1), encoding="utf-8")
    return Outcome(figures, REPREFILL if result.verdict.decision == "reprefill" else OK)


def check_sweep(settings: Eval) -> None:
    """Refuse settings of a sweep that cannot be met, before anything is loaded.

    Raises:
        UsageError: settings of a sweep without ``--sweep``, or a sweep without passages or with questions.
        KvxError: a figure of unknown format.
    """
    from kvx.evaluation.sweep_figure import check_format

    given = [name for name in ("sweep_starts", "sweep_size", "sweep_figure") if getattr(settings, name) is not None]
    if settings.sweep is None and given:
        raise UsageError(f"--{given[0].replace('_', '-')} is a setting of --sweep injection, which is not asked for.")
    if settings.sweep is not None and (settings.text is None or settings.questions is not None):
        raise UsageError("kvx eval --sweep injection measures passages: it needs --text and takes no --questions.")
    if settings.sweep_figure is not None:
        check_format(settings.sweep_figure)


def run_sweep(
    settings: Eval,
    out: Output,
    parts: tuple[Model, Model, CacheMap],
    items: list[Item | Question],
    hashes: dict[str, str],
) -> Outcome:
    """Sweep the injection start over passages, print the table, keep figures and drawing beside the mapper.

    Raises:
        KvxError: as :func:`kvx.evaluation.sweep.sweep_injection`.
    """
    from kvx.evaluation.items import Item
    from kvx.evaluation.sweep import sweep_injection
    from kvx.evaluation.sweep_figure import INSTALL, draw, drawable

    file = Path(str(settings.mapper)) / f"{SWEEP}.json"
    result = sweep_injection(
        *parts,
        [item for item in items if isinstance(item, Item)],
        starts=settings.sweep_starts,
        size=settings.sweep_size,
        batch_size=settings.batch_size,
        data=hashes,
        progress=out.watch("injection sweep"),
    )
    figures = jsonable(result.to_json(per_item=settings.per_item))
    file.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    out.console.print(result.table())
    if drawable():
        out.say(f"figure: {draw(figures, settings.sweep_figure or file.with_suffix('.png'))}")
    else:
        out.say(INSTALL)
    return Outcome(figures)


def items_of(settings: Eval, target: Model) -> tuple[list[Item | Question], dict[str, str]]:
    """Held-out passages and questions, and the digests of the text they come from."""
    from kvx.evaluation.items import load_passages, load_questions

    items: list[Item | Question] = []
    hashes: dict[str, str] = {}
    if settings.text is not None:
        split = load_passages(settings.text, target, **settings.cut)
        items += split.held_out[: settings.items]
        hashes |= split.hashes
    if settings.questions is not None:
        items += load_questions(settings.questions, settings.max_questions)
    return items, hashes


def models_of(mapper: CacheMap, source: str | None, target: str | None, dtype: str) -> tuple[Model, Model]:
    """Both models, from where the mapper was fitted unless said otherwise.

    Raises:
        KvxError: a name is neither given nor recorded, or a model cannot be loaded.
    """
    names = []
    for side, given in (("source", source), ("target", target)):
        recorded = getattr((mapper.provenance or {}).get(side), "model", None)
        if not (given or recorded):
            raise KvxError(f"this mapper does not say which {side} it was fitted for; pass --{side}.")
        names.append(given or recorded)
    return load(str(names[0]), dtype, True), load(str(names[1]), dtype, True)


def recorded_verdict(folder: Path, mapper: CacheMap) -> dict[str, Any] | None:
    """The result that ``kvx eval`` left beside a mapper, when it is about this very mapper."""
    try:
        figures = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return figures if figures.get("hashes", {}).get("mapper") == mapper.digest else None
