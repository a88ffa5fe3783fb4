"""A training run as it goes on: steps, held-out judgements, checkpoints, and what is kept in the end."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvx.errors import KvxError
from kvx.fitting.checkpoint import load_state, save_state
from kvx.fitting.training.data import TrainingData
from kvx.fitting.training.held_out import RATIOS, HeldOut, score_of
from kvx.fitting.training.partition import Named, name_of
from kvx.fitting.training.train_report import Log, TrainReport
from kvx.fitting.training.trainer import Trainer, TrainState
from kvx.mappers.base import CacheMap
from kvx.models.progress import Hook
from kvx.translators.base import with_params

CHECKPOINT = "checkpoint"
SAMPLE = 64  # contexts on which scales and controls are measured


@dataclasses.dataclass(frozen=True)
class Limits:
    """When to stop, judge and save."""

    steps: int
    minutes: float | None
    evaluate_every: int
    patience: int | None
    checkpoint_every: int


@dataclasses.dataclass
class Run:
    """One run as it goes on: the state, and what the host remembers beside it."""

    trainer: Trainer
    data: TrainingData
    judge: HeldOut | None
    select: tuple[str, ...]
    facts: dict[str, Any]
    home: Path | None
    batch_size: int
    accumulate: int
    seed: int
    state: TrainState = dataclasses.field(init=False)
    history: list[dict[str, float]] = dataclasses.field(default_factory=list)
    best_step: int = 0
    examples: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def begin(self, trained: Named, resume: bool) -> None:
        """A new state of these parameters, or the one of the folder's checkpoint.

        Raises:
            KvxError: a checkpoint that is in the way, or of another run.
        """
        self.state = self.trainer.first_state(trained, self.seed)
        path = None if self.home is None else self.home / CHECKPOINT
        if path is None or not path.exists():
            return
        if not resume:
            raise KvxError(
                f"{path} holds a run already; go on with it (resume=True, --resume), or choose another folder."
            )
        arrays, told = load_state(path)
        odd = sorted(name for name, fact in self.facts.items() if told["facts"].get(name) != fact)
        if odd:
            raise KvxError(f"{path} is of a run with other {', '.join(odd)}; give the same, or choose another folder.")
        self.state = _restored(self.state, arrays, path)
        self.history, self.best_step = told["history"], told["best_step"]
        self.examples, self.tokens, self.seconds = told["examples"], told["tokens"], told["seconds"]

    def go(self, limits: Limits, log: Log, report: Hook) -> str:
        """Steps until a limit is met; says which."""
        began = time.monotonic() - self.seconds
        first = int(self.state.step)
        stream = self.data.stream(self.batch_size, self.seed, first * self.accumulate)
        if not self.history:
            self._judge(0, {}, log)
        stopped = "steps"
        for step in range(first + 1, limits.steps + 1):
            chosen = [next(stream) for _ in range(self.accumulate)]
            batches = [self.data.batch(rows, self.batch_size) for rows in chosen]
            self.state, figures = self.trainer.step(self.state, self.data, batches)
            self.examples += sum(map(len, chosen))
            self.tokens += sum(int((np.asarray(batch.suffix.targets) >= 0).sum()) for batch in batches)
            log.write(step, "train", figures)
            self.seconds = time.monotonic() - began
            late = limits.minutes is not None and self.seconds >= 60 * limits.minutes
            last = late or step == limits.steps
            if last or step % limits.evaluate_every == 0:
                self._judge(step, {"train": figures["loss"]}, log)
                self.seconds = time.monotonic() - began
            tired = self._tired(limits.patience)
            if self.home is not None and (last or tired or step % limits.checkpoint_every == 0):
                self._save()
            report(self._told(figures), step, limits.steps)
            if late or tired:
                stopped = "minutes" if late else "patience"
                break
        return stopped

    def _judge(self, step: int, figures: dict[str, float], log: Log) -> None:
        """Held-out figures of the present parameters, which are kept when they are the best."""
        if self.judge is None:
            self.state = dataclasses.replace(self.state, best=_copied(self.state.current))
            self.best_step = step
            return
        found = self.judge.figures(self.trainer.map_of(self.state.current))
        if self.select == RATIOS and "f1" in found:
            self.select = (*RATIOS, "f1")
        score = score_of(found, self.select)
        known = [row["score"] for row in self.history]
        self.history.append({"step": float(step), **figures, **found, "score": score})
        log.write(step, "held_out", self.history[-1])
        if not known or score > max(known):
            self.state = dataclasses.replace(self.state, best=_copied(self.state.current))
            self.best_step = step

    def _tired(self, patience: int | None) -> bool:
        """Whether the last evaluations were all worse than the best."""
        steps = [int(row["step"]) for row in self.history]
        return (
            patience is not None
            and self.best_step in steps
            and len(steps) - 1 - steps.index(self.best_step) >= patience
        )

    def _told(self, figures: dict[str, float]) -> str:
        held = self.history[-1] if self.history else {}
        shown = [f"held out {name} {held[name]:.3f}" for name in self.select if name in held]
        return ", ".join([f"loss {figures['loss']:.3f}", *shown])

    def _save(self) -> None:
        arrays = {name_of(path): x for path, x in jax.tree_util.tree_leaves_with_path(self.state)}
        told = {
            "facts": self.facts,
            "history": self.history,
            "best_step": self.best_step,
            "examples": self.examples,
            "tokens": self.tokens,
            "seconds": self.seconds,
        }
        save_state(Path(str(self.home)) / CHECKPOINT, arrays, told)

    def finish(self, stopped: str) -> tuple[CacheMap, TrainReport]:
        """The kept parameters as a map, with what its controls need, and the report."""
        best = self.trainer.final(self.state.best)
        sample = self.data.sample(SAMPLE, self.batch_size, fused=best.reads_target)
        params = self.trainer.method.calibrate(best.params, sample)
        digests = {name: str(self.facts[name]) for name in ("start", "data", "held_out")}
        facts = {"training": {**digests, "steps": self.best_step, "loss": self.facts["loss"]}}
        made = with_params(best, self.trainer.method, params, **facts)
        report = TrainReport(
            method=str(self.trainer.method),
            steps=int(self.state.step),
            best_step=self.best_step,
            stopped=stopped,
            examples=self.examples,
            tokens=self.tokens,
            trained=sum(x.size for x in self.state.best.values()),
            map_bytes=made.size,
            seconds=self.seconds,
            select=self.select,
            history=tuple(self.history),
            data=digests,
            extra=self.trainer.method.figures(params) if hasattr(self.trainer.method, "figures") else {},
        )
        return made, report


def _copied(named: dict[str, Any]) -> dict[str, Any]:
    """Arrays of their own: a step gives the memory of its state away."""
    return jax.tree.map(lambda x: x.copy(), named)


def _restored(state: TrainState, arrays: dict[str, Any], path: Path) -> TrainState:
    """The saved arrays in the place of a new state's."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(state)
    names = [name_of(at) for at, _ in leaves]
    fits = set(names) == set(arrays) and all(
        arrays[n].shape == x.shape and arrays[n].dtype == x.dtype for n, (_, x) in zip(names, leaves, strict=True)
    )
    if not fits:
        raise KvxError(f"{path} holds the state of another optimizer or method; give the same, or another folder.")
    return jax.tree.unflatten(structure, [arrays[n] for n in names])
