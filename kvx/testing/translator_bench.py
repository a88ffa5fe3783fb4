"""Translators side by side on the minis: fitted, trained on the reading task, and asked what only the passage tells."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvx import mappers, translators
from kvx.errors import KvxError
from kvx.evaluation.comparison import Comparison, evaluate_maps
from kvx.evaluation.metrics import Estimate
from kvx.evaluation.report import SOURCE_ALONE
from kvx.fitting.checkpoint import load, save
from kvx.fitting.fit import fit
from kvx.fitting.pairs import Pairs, pairs
from kvx.fitting.training.dump import training_data
from kvx.fitting.training.loss import TrainingLoss
from kvx.fitting.training.schedule import adamw, warmup_cosine
from kvx.fitting.training.train import train
from kvx.mappers.base import CacheMap
from kvx.mappers.receiver import reads_receiver
from kvx.models.model import Model
from kvx.models.progress import Hook
from kvx.models.replay import ReplayPlan
from kvx.testing.minis import MINIS, load_mini
from kvx.testing.reading import READING
from kvx.testing.reading_work import Task, Work

CORRECTED = TrainingLoss(correction=1.0)
BASELINES = ("native", "none", "constant", SOURCE_ALONE)  # arms that no further map has a part in
APPLY_TOKENS = 64  # of the context whose translation is counted and timed


@dataclasses.dataclass(frozen=True)
class Contender:
    """One row of the table.

    Attributes:
        method: a mapper or a translator.
        loss: of a translator's training; ``None``: the suffix's cross-entropy.
        replay: what the target reads again over the translated cache; ``None``: nothing.
        like: name of the contender whose trained map this one uses; ``None``: its own.
    """

    method: Any
    loss: TrainingLoss | None = None
    replay: ReplayPlan | None = None
    like: str | None = None


def contenders() -> dict[str, Contender]:
    """The table's rows: the judged mixture first, then what it is compared with; last those whose target reads too."""
    mixture = translators.mixture(experts=2, top=1, width=64)
    return {
        "mixture + correction": Contender(mixture, CORRECTED),
        "mixture": Contender(mixture),
        "residual": Contender(translators.residual(width=128)),
        "head_matched": Contender(mappers.head_matched(layers="all")),
        "full_head": Contender(mappers.full_head(layers="all")),
        "mixture + correction, replay": Contender(mixture, CORRECTED, ReplayPlan(), "mixture + correction"),
        "latent_flow": Contender(translators.latent_flow(width=64)),
        "fuser": Contender(translators.fuser(hidden=64, inner=64, anneal=200)),
    }


def ablations() -> dict[str, Contender]:
    """Mixtures that differ in one thing from the table's."""
    base: dict[str, Any] = {"experts": 2, "top": 1, "width": 64}

    def row(loss: TrainingLoss | None = CORRECTED, **changes: Any) -> Contender:
        return Contender(translators.mixture(**{**base, **changes}), loss)

    return {
        "2 experts, top-1, correction": row(),
        "1 expert": row(experts=1),
        "4 experts": row(experts=4),
        "8 experts": row(experts=8),
        "top-2 of 4": row(experts=4, top=2),
        "dense, 4 experts": row(experts=4, top=None),
        "attention experts": row(expert="attention", heads=4),
        "loss: suffix": row(None),
        "loss: + distillation": row(TrainingLoss(distil=1.0)),
        "loss: + gain": row(TrainingLoss(gain=1.0)),
        "loss: + cache": row(TrainingLoss(cache=1.0)),
        "loss: correction alone": row(TrainingLoss(suffix=0.0, correction=1.0)),
        "window: first 2": row(window=(0, 2)),
        "window: 2 from 1": row(window=(1, 2)),
        "window: first": row(window=(0, 1)),
        "window: last": row(window=(2, 1)),
    }


def directions(which: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Pairs of minis.

    Args:
        which: ``"source>target"`` names; empty: six in which every architecture is source and target, one of them
            between two sizes of the same; ``("all",)``: all thirty.

    Raises:
        KvxError: a name that is none.

    Example:
        >>> from kvx.testing.translator_bench import directions
        >>> len(directions()), len(directions(("all",))), directions(("opt-small>gpt2-large",))
        (6, 30, [('opt-small', 'gpt2-large')])
    """
    if tuple(which) == ("all",):
        return [(a, b) for a in MINIS for b in MINIS if a != b]
    found = []
    for name in which or SIX:
        source, _, target = name.partition(">")
        if source == target or not {source, target} <= set(MINIS):
            raise KvxError(f"{name!r} is no direction; expected SOURCE>TARGET of {', '.join(MINIS)}, or all.")
        found.append((source, target))
    return found


SIX = (
    "gpt2-small>opt-large",
    "opt-large>gpt2-large",
    "opt-small>qwen2-large",
    "qwen2-large>opt-small",
    "gpt2-large>qwen2-small",
    "qwen2-small>qwen2-large",
)


@dataclasses.dataclass(frozen=True)
class Trained:
    """The maps of a direction: name -> map, and the seconds that making it took."""

    maps: Mapping[str, CacheMap]
    seconds: Mapping[str, float]


def train_all(
    source: Model,
    target: Model,
    rows: Mapping[str, Contender],
    seeds: Sequence[int],
    work: Work,
    task: Task,
    *,
    folder: Path | None = None,
    progress: bool | Hook | None = True,
) -> Trained:
    """Fit and train every contender; what is in the folder already is read.

    Args:
        source, target: the pair.
        rows: name -> contender; those that use another's map get it.
        seeds: of training; closed forms have none.
        work, task: see there.
        folder: where maps are kept; ``None``: nowhere.
        progress: as in :func:`kvx.fit`.

    Returns:
        Maps named ``"name"`` (closed forms) and ``"name #seed"``.
    """
    read = pairs(source, target, task.texts, batch_size=32, join=False)
    shop = _Workshop(source, target, read, work, task, folder, progress)
    maps: dict[str, CacheMap] = {}
    seconds: dict[str, float] = {}
    for name, row in rows.items():
        for label, seed in _labels(name, row, seeds):
            origin = label if row.like is None else f"{row.like} #{seed}"
            if origin in maps:
                maps[label], seconds[label] = maps[origin], seconds[origin]
            else:
                maps[label], seconds[label] = shop.made(label, row, seed)
    return Trained(maps, seconds)


def _labels(name: str, row: Contender, seeds: Sequence[int]) -> list[tuple[str, int]]:
    return [(f"{name} #{seed}", seed) for seed in seeds] if trains(row) else [(name, 0)]


def trains(row: Contender) -> bool:
    """Whether a contender is trained by gradients, so that a seed changes it."""
    return isinstance(row.method, translators.Translator)


class _Workshop:
    """Makes the maps of one direction; what several of them need is made once."""

    def __init__(
        self,
        source: Model,
        target: Model,
        read: Pairs,
        work: Work,
        task: Task,
        folder: Path | None,
        progress: bool | Hook | None,
    ) -> None:
        self.source, self.target, self.read, self.work, self.task = source, target, read, work, task
        self.folder, self.progress = folder, progress
        self.known: dict[str, Any] = {}

    def made(self, label: str, row: Contender, seed: int) -> tuple[CacheMap, float]:
        """A contender's map and the seconds it took, from the folder where they are there."""
        home = None if self.folder is None else self.folder / label.replace(" ", "_").replace(",", "")
        note = None if home is None else home.with_suffix(".json")
        if home is not None and note is not None and note.is_file():
            return load(home), float(json.loads(note.read_text(encoding="utf-8"))["seconds"])
        made, seconds = self._trained(row, seed) if trains(row) else self._fitted(row.method)
        if home is not None and note is not None:
            save(home, made, overwrite=True)
            note.write_text(json.dumps({"seconds": round(seconds, 2)}) + "\n", encoding="utf-8")
        return made, seconds

    def _fitted(self, method: Any) -> tuple[CacheMap, float]:
        started = time.monotonic()
        return fit(method, self.read, progress=self.progress)[0], time.monotonic() - started

    def _trained(self, row: Contender, seed: int) -> tuple[CacheMap, float]:
        """The map, and the seconds of its training and of the closed form it began from; reading is not counted."""
        fused, work, before = reads_receiver(row.method), self.work, 0.0
        if fused:
            start = self.read.unfitted()
        else:
            start, before = self._once("start", lambda: self._fitted(mappers.full_head(layers="all")))
        loss = row.loss or TrainingLoss()
        data = self._once(f"data {loss} {fused}", lambda: self._data(loss, fused, start))
        optimizer = self._once("optimizer", lambda: adamw(warmup_cosine(work.peak, steps=work.steps)))
        settings: dict[str, Any] = {"steps": work.steps, "batch_size": work.batch_size, "seed": seed}
        made, report = train(row.method, start, data, optimizer=optimizer, progress=self.progress, **settings)
        return made, before + report.seconds

    def _data(self, loss: TrainingLoss, fused: bool, start: CacheMap) -> Any:
        return training_data(
            self.source,
            self.target,
            self.task.examples,
            start,
            loss=loss,
            receiver=fused,
            uniform=True,
            batch_size=32,
            progress=self.progress,
        )

    def _once(self, key: str, make: Any) -> Any:
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]


def compare(
    source: Model,
    target: Model,
    rows: Mapping[str, Contender],
    seeds: Sequence[int],
    work: Work,
    *,
    folder: Path | None = None,
    progress: bool | Hook | None = True,
) -> dict[str, Any]:
    """Make and measure every contender of a direction.

    Args:
        source, target: the pair.
        rows: name -> contender; the first is measured in all arms, and the others are compared with it.
        seeds: of training.
        work: how much is done.
        folder: where maps are kept; progress: as in :func:`kvx.fit`.

    Returns:
        ``arms``: arm -> ``accuracy`` (exact match, closed set) and ``f1`` (extractive); ``rows``: name -> means over
        seeds of ``accuracy``, ``f1``, ``mismatched_accuracy``, ``native_fraction`` (accuracy over the native one),
        ``content`` and ``train_seconds``; ``parameters``, ``flops`` and ``bytes`` of a hand-off; whether
        ``target_reads_context``; and ``seeds``: the same of each seed, with ``content_low`` and ``content_high`` and
        the paired ``content_difference`` ``[value, low, high]`` from the first row.
    """
    task = Task.create(work)
    trained = train_all(source, target, rows, seeds, work, task, folder=folder, progress=progress)
    replays = {label: row.replay for name, row in rows.items() for label, _ in _labels(name, row, seeds) if row.replay}
    found = evaluate_maps(
        source,
        target,
        trained.maps,
        [*task.items, *task.closed, *task.phrases],
        build_s=trained.seconds,
        replays=replays,
        apply_tokens=APPLY_TOKENS,
        template=READING,
        batch_size=50,
        max_new_tokens=8,
        cosine=False,
        progress=progress,
    )
    closed = len(task.closed)
    first = found.results[found.reference]
    arms = {arm: _scores(first, arm, closed) for arm in BASELINES}
    return {
        "arms": arms,
        "rows": {
            name: _summary(found, [x for x, _ in _labels(name, row, seeds)], closed) for name, row in rows.items()
        },
    }


def _scores(result: Any, arm: str, closed: int) -> dict[str, float]:
    answer = result.answer
    return {
        "accuracy": round(float(answer.exact[arm][:closed].mean()), 4),
        "f1": round(float(answer.f1[arm][closed:].mean()), 4),
    }


def _summary(found: Comparison, labels: Sequence[str], closed: int) -> dict[str, Any]:
    """Means over seeds, and each seed's figures."""
    seeds = []
    for label in labels:
        result, facts = found.results[label], found.facts[label]
        gap = None if label == found.reference else found.difference(label)["content"]
        seeds.append(
            {
                **_scores(result, "translated", closed),
                **{f"mismatched_{k}": v for k, v in _scores(result, "mismatched", closed).items()},
                "native_fraction": _fraction(result, closed),
                "content": result.content.value,
                "content_low": result.content.low,
                "content_high": result.content.high,
                "content_difference": None if gap is None else _ends(gap),
                "train_seconds": facts.build_s,
            }
        )
    means = {
        key: float(np.mean([row[key] for row in seeds]))
        for key in ("accuracy", "f1", "mismatched_accuracy", "native_fraction", "content", "train_seconds")
    }
    facts = found.facts[labels[0]]
    return {
        **means,
        "parameters": facts.parameters,
        "flops": facts.flops,
        "bytes": facts.bytes,
        "target_reads_context": facts.target_reads_context,
        "seeds": seeds,
    }


def _fraction(result: Any, closed: int) -> float:
    native = _scores(result, "native", closed)["accuracy"]
    return _scores(result, "translated", closed)["accuracy"] / native if native else float("nan")


def _ends(one: Estimate) -> list[float | None]:
    return [one.value, one.low, one.high]


def digest_of(source: str, target: str, rows: Mapping[str, Contender], seeds: Sequence[int], work: Work) -> str:
    """What a record was made with; records of other settings are not mixed up."""
    told = repr((source, target, sorted((name, repr(row)) for name, row in rows.items()), tuple(seeds), work))
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def run_direction(
    source: str,
    target: str,
    rows: Mapping[str, Contender],
    seeds: Sequence[int],
    work: Work,
    folder: Path,
    progress: bool | Hook | None = True,
) -> dict[str, Any]:
    """:func:`compare` of two minis, kept in the folder as soon as it is done, and read from there another time."""
    home = folder / f"{source}_to_{target}-{digest_of(source, target, rows, seeds, work)}"
    record = home / "record.json"
    if record.is_file():
        return dict(json.loads(record.read_text(encoding="utf-8")))
    home.mkdir(parents=True, exist_ok=True)
    models = load_mini(source, stacked=True), load_mini(target, stacked=True)
    found = {"direction": f"{source}>{target}", **compare(*models, rows, seeds, work, folder=home, progress=progress)}
    text = json.dumps(found, indent=1)
    partial = home / "record.part"
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(record)
    jax.clear_caches()
    return found
