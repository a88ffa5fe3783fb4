"""The result of an evaluation: per-item figures of every arm, their intervals, JSON and tables."""

from __future__ import annotations

import dataclasses
import functools
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvx.errors import KvxError
from kvx.evaluation.metrics import Bootstrap, Estimate, answers_carried, benefit_retained, content_carried
from kvx.evaluation.verdict import Evidence, Thresholds, Verdict, judge

if TYPE_CHECKING:
    from rich.console import Group

    from kvx.evaluation.cosine import AttentionCosine
    from kvx.evaluation.flops import MapCost
    from kvx.evaluation.latency import Latency

SOURCE_ALONE = "source_alone"
READS = "target also reads the context"
ARMS: dict[str, str] = {
    "native": "its own cache of the context",
    "native_mismatched": "its own cache of another item of about the same length",
    "none": "only the prefix",
    "translated": "the translated cache of this item",
    "mismatched": "the translated cache of that other item",
    "constant": "the map's biases only",
    "random": "a random map with matched mean and variance",
}
FUSED: dict[str, str] = {  # the same arms of a map that reads the target's own cache: all but the source's part is kept
    "translated": "its own cache, fused with the source's",
    "mismatched": "its own cache, fused with the source's of that other item",
    "constant": "its own cache, and the mean of what the map adds",
    "random": "its own cache, and a random addition with matched mean and variance",
}
REPLAYED: dict[str, str] = {  # of a map over whose cache the target reads the context again
    "translated": "its own reading over the translated cache",
    "mismatched": "its own reading over the translated cache of that other item",
    "constant": "its own reading over the map's biases only",
    "random": "its own reading over a random map with matched mean and variance",
}


@dataclasses.dataclass(frozen=True)
class LossResult:
    """Losses of one set of passages.

    Attributes:
        nats: arm -> float ``[n]``: mean negative log-likelihood of each item's scored continuation tokens.
        tokens: int ``[n]``: scored tokens of each item (target's tokens; the same in all arms).
        nats_per_byte: ``native`` and ``source_alone``: total over total, on the same text.
        contexts: how many different contexts.
        sha256: of the items.
    """

    nats: Mapping[str, np.ndarray]
    tokens: np.ndarray
    nats_per_byte: Mapping[str, float]
    contexts: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class AnswerResult:
    """Answers to one set of questions.

    Attributes:
        texts: arm -> what the model answered, per question.
        f1, exact: arm -> float ``[n]``.
        contexts: how many different contexts.
        sha256: of the questions.
    """

    texts: Mapping[str, tuple[str, ...]]
    f1: Mapping[str, np.ndarray]
    exact: Mapping[str, np.ndarray]
    contexts: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """All arms of one source, target and map on the same items, with intervals and a verdict.

    Print it, call :meth:`table` for the terminal, :meth:`to_json` for a file; a notebook shows it as tables.

    Attributes:
        pair: ``"source -> target"``, for people.
        loss: losses of the passages; ``None`` when none were given.
        answer: answers to the questions; ``None`` when none were given.
        cosine: attention-output cosines; latency: timings; ``None`` when not asked for.
        hashes: SHA-256 digests of weights, mapper, items, template, thresholds and settings.
        settings: what the run was asked to do.
        seconds: wall time of the whole evaluation; phases: of its parts.
        thresholds: bars of the verdict; bootstrap: how intervals were drawn.
        cost: parameters and operations of the map, and whether its target also reads the context.
    """

    pair: str
    loss: LossResult | None
    answer: AnswerResult | None
    cosine: AttentionCosine | None
    latency: Latency | None
    hashes: Mapping[str, str]
    settings: Mapping[str, Any]
    seconds: float
    phases: Mapping[str, float]
    thresholds: Thresholds
    bootstrap: Bootstrap = Bootstrap()
    cost: MapCost | None = None

    @property
    def target_reads_context(self) -> bool:
        """Whether the target reads the context too, in a fusion or a replay: its figures then stand apart."""
        return self.cost is not None and self.cost.target_reads_context

    @property
    def sees(self) -> dict[str, str]:
        """Arm -> what the target sees before the boundary."""
        if not self.target_reads_context:
            return ARMS
        return ARMS | (REPLAYED if self.settings.get("replay") else FUSED)

    @functools.cached_property
    def content(self) -> Estimate:
        """Content carried, on loss: (mismatched - translated) / (native mismatched - native)."""
        return content_carried(self.loss.nats, self.bootstrap) if self.loss else _not_given("passages")

    @functools.cached_property
    def retained(self) -> Estimate:
        """Context benefit retained, on loss: (none - translated) / (none - native). Never quote it without content."""
        return benefit_retained(self.loss.nats, self.bootstrap) if self.loss else _not_given("passages")

    @functools.cached_property
    def answers(self) -> Estimate:
        """Answers carried, on F1: (translated - mismatched) / (native - native mismatched)."""
        return answers_carried(self.answer.f1, self.bootstrap) if self.answer else _not_given("questions")

    @functools.cached_property
    def loss_estimates(self) -> dict[str, Estimate]:
        """Arm -> mean loss in nats per target token, with its interval."""
        return (
            {arm: self.bootstrap.mean(self.loss.nats[arm]) for arm in ARMS if arm in self.loss.nats}
            if self.loss
            else {}
        )

    @functools.cached_property
    def f1_estimates(self) -> dict[str, Estimate]:
        """Arm -> mean F1, with its interval; the source by itself included."""
        return {arm: self.bootstrap.mean(f1) for arm, f1 in self.answer.f1.items()} if self.answer else {}

    @functools.cached_property
    def verdict(self) -> Verdict:
        """``use``, ``reprefill``, or no verdict where too little was measured."""
        loss, answer = self.loss, self.answer
        evidence = Evidence(
            contexts=loss.contexts if loss else 0,
            question_contexts=answer.contexts if answer else 0,
            content=self.content if loss else None,
            answers=self.answers if answer else None,
            f1={arm: float(f1.mean()) for arm, f1 in answer.f1.items()} if answer else {},
            attention_cosine=self.cosine.mean() if self.cosine else None,
            warm_speedup=self.latency.warm_speedup if self.latency else None,
        )
        return judge(evidence, self.thresholds)

    def to_json(self, *, per_item: bool = False) -> dict[str, Any]:
        """Plain numbers, strings and lists, ready for ``json.dumps``; undefined figures are ``None``.

        Args:
            per_item: also every item's loss, answer and F1.

        Returns:
            ``retained``, ``content``, ``answers`` (each with ``_low`` and ``_high``), ``items``, ``questions``,
            ``loss``, ``f1`` and ``exact`` per arm, ``target_reads_context``, ``cost``, ``verdict``, ``reasons``,
            ``attention_cosine``, ``latency``, ``hashes``, ``settings``, ``seconds``.
        """
        from kvx.evaluation.render import as_json

        return as_json(self, per_item)

    def table(self) -> Group:
        """Tables for a rich console: arms, figures, attention outputs, latency, verdict, hashes."""
        from kvx.evaluation.render import as_tables

        return as_tables(self)

    def to_html(self) -> str:
        """The same tables as an HTML fragment."""
        from rich.console import Console

        console = Console(record=True, width=118, file=io.StringIO(), force_jupyter=False)
        console.print(self.table())
        form = '<pre style="line-height:normal;font-family:Menlo,Consolas,monospace">{code}</pre>'
        return console.export_html(inline_styles=True, code_format=form)

    def _repr_html_(self) -> str:
        return self.to_html()

    def __repr__(self) -> str:
        """The verdict and the two figures, in a line each."""
        lines = [
            f"{self.pair}: {self.verdict}",
            f"content carried {self.content}",
            f"context benefit retained {self.retained}",
            f"answers carried {self.answers}",
        ]
        return "\n".join(lines)


def _not_given(what: str) -> Estimate:
    return Estimate.undefined(f"no {what} were given")


# Two results can be compared when these agree: the same questions were put, in the same way, to the same target.
_COMPARABLE = ("items", "questions", "template", "target", "boundary")


def compare(a: Evaluation, b: Evaluation) -> dict[str, Estimate]:
    """How much better map ``a`` is than map ``b`` on the same items, paired item by item.

    Args:
        a: one result.
        b: another result on the same items.

    Returns:
        ``loss``: mean over items of b's translated loss minus a's (nats per token; above zero: a is better);
        ``content``: mean over items of the difference of mismatched minus translated loss; ``f1``: a's translated F1
        minus b's. Only what both have.

    Raises:
        KvxError: they were measured on different items, questions, templates or targets.
    """
    different = [key for key in _COMPARABLE if a.hashes.get(key) != b.hashes.get(key)]
    if different:
        raise KvxError(
            f"these results cannot be compared: they differ in {', '.join(different)} (see their hashes); evaluate "
            "both maps on the same items, with the same template and target."
        )
    found: dict[str, Estimate] = {}
    if a.loss and b.loss:
        ours, theirs = a.loss.nats, b.loss.nats
        found["loss"] = a.bootstrap.difference(theirs["translated"], ours["translated"])
        found["content"] = a.bootstrap.difference(
            ours["mismatched"] - ours["translated"], theirs["mismatched"] - theirs["translated"]
        )
    if a.answer and b.answer:
        found["f1"] = a.bootstrap.difference(a.answer.f1["translated"], b.answer.f1["translated"])
    return found
