"""The verdict on a pair and its map: ``use``, ``reprefill``, or none where too little was measured to say.

Gates read content carried, answers, attention outputs and speed. The R^2 of keys and values is no gate: a map may
explain nearly all variance through a channel that no query reads (and the other way round).
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.resources
import json
import pathlib
from typing import Literal

from kvx.errors import KvxError
from kvx.evaluation.metrics import Estimate

Decision = Literal["use", "reprefill"]
_ANSWERING = ("translated", "native", "source_alone")


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """Bars of the verdict, read from a data file.

    Attributes:
        name: for reports.
        min_contexts: different contexts that a loss figure must rest on; min_questions: different contexts asked about.
        content: lower end of content carried, on loss; answers: lower end of answers carried, on F1.
        attention_cosine: mean cosine of attention outputs over the translated and the native cache.
        warm_speedup: native prefill time over warm hand-off time.
        sha256: of the file.
    """

    name: str
    min_contexts: int
    min_questions: int
    content: float
    answers: float
    attention_cosine: float
    warm_speedup: float
    sha256: str = ""


def load_thresholds(path: str | pathlib.Path | None = None) -> Thresholds:
    """Read thresholds from a JSON file; the ones that ship with kvx when ``path`` is ``None``.

    Raises:
        KvxError: an unreadable file, or missing or unknown keys.

    Example:
        >>> from kvx.evaluation.verdict import load_thresholds
        >>> load_thresholds().min_contexts
        30
    """
    try:
        if path is None:
            raw = (importlib.resources.files("kvx.evaluation") / "thresholds.json").read_bytes()
        else:
            raw = pathlib.Path(path).read_bytes()
        return Thresholds(**json.loads(raw), sha256=hashlib.sha256(raw).hexdigest())
    except (OSError, ValueError, TypeError) as error:
        expected = ", ".join(field.name for field in dataclasses.fields(Thresholds) if field.name != "sha256")
        raise KvxError(f"cannot read thresholds from {path} ({error}); expected JSON with {expected}.") from None


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What a verdict reads; ``None`` means not measured.

    Attributes:
        contexts: different contexts behind the loss figures; question_contexts: behind the answers.
        content: content carried on loss; answers: content carried on F1.
        f1: mean F1 per arm (``translated``, ``native``, ``source_alone`` are read).
        attention_cosine: mean over layers and heads.
        warm_speedup: native prefill time over warm hand-off time.
    """

    contexts: int = 0
    question_contexts: int = 0
    content: Estimate | None = None
    answers: Estimate | None = None
    f1: dict[str, float] = dataclasses.field(default_factory=dict)
    attention_cosine: float | None = None
    warm_speedup: float | None = None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """``use``, ``reprefill`` or ``None`` (too little measured), with the numbers behind it.

    Attributes:
        decision: the verdict.
        reasons: one sentence for each gate, those that decided first.
    """

    decision: Decision | None
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        """The verdict and its first reason."""
        return f"{self.decision or 'no verdict'}: {self.reasons[0]}"


@dataclasses.dataclass(frozen=True)
class _Gate:
    passed: bool | None
    reason: str


def judge(evidence: Evidence, thresholds: Thresholds | None = None) -> Verdict:
    """Weigh the evidence: one failed gate says ``reprefill``; ``use`` needs every quality gate measured and met.

    Args:
        evidence: what was measured.
        thresholds: bars, default those that ship with kvx.

    Returns:
        The verdict; ``decision`` is ``None`` when no gate failed but some could not be measured, or when there are
        fewer contexts than the minimum counts.

    Example:
        >>> from kvx.evaluation.metrics import Estimate
        >>> from kvx.evaluation.verdict import Evidence, judge
        >>> judge(Evidence(contexts=5, content=Estimate(1.0, 1.0, 1.0))).decision is None
        True
        >>> judge(Evidence(contexts=100, content=Estimate(0.2, 0.1, 0.3))).decision
        'reprefill'
    """
    bars = thresholds or load_thresholds()
    gates = [
        _share(
            "content carried (loss)", evidence.content, bars.content, evidence.contexts, bars.min_contexts, "passages"
        ),
        _share(
            "answers carried (F1)",
            evidence.answers,
            bars.answers,
            evidence.question_contexts,
            bars.min_questions,
            "questions",
        ),
        _beats_source(evidence, bars),
        _bar("attention-output cosine", evidence.attention_cosine, bars.attention_cosine),
        _bar("warm speed-up over a native prefill", evidence.warm_speedup, bars.warm_speedup),
    ]
    counted = evidence.contexts >= bars.min_contexts or evidence.question_contexts >= bars.min_questions
    failed = [gate.reason for gate in gates if gate.passed is False]
    unknown = [gate.reason for gate in gates[:2] if gate.passed is None]
    if evidence.question_contexts >= bars.min_questions and (absent := _absent(evidence)):
        unknown.append(f"answers were not measured in every arm: F1 of {', '.join(absent)} is missing")
    if evidence.attention_cosine is None:
        unknown.append("the attention-output cosine was not measured; evaluate with cosine=True and passages")
    met = [gate.reason for gate in gates if gate.passed]
    rest = [gate.reason for gate in gates[2:] if gate.passed is None and gate.reason]
    if not counted:
        return Verdict(None, tuple(unknown))
    if failed:
        return Verdict("reprefill", (*failed, *unknown, *met, *rest))
    if unknown:
        return Verdict(None, (*unknown, *met, *rest))
    return Verdict("use", (*met, *rest))


def _share(name: str, estimate: Estimate | None, bar: float, contexts: int, minimum: int, of: str) -> _Gate:
    """Gate on the lower end of an interval, with a minimum count of different contexts."""
    if estimate is None or contexts == 0:
        return _Gate(None, f"{name} was not measured: there were no {of}")
    if contexts < minimum:
        return _Gate(None, f"{name} rests on {contexts} different contexts; no verdict on fewer than {minimum}")
    if not estimate.defined:
        return _Gate(None, f"{name} is {estimate}")
    met = estimate.at_least(bar)
    return _Gate(met, f"{name} {estimate}: lower end {'meets' if met else 'misses'} {bar:g}")


def _absent(evidence: Evidence) -> list[str]:
    """Arms without an F1."""
    return [name for name in _ANSWERING if name not in evidence.f1]


def _beats_source(evidence: Evidence, bars: Thresholds) -> _Gate:
    """Where the native target answers better than the source, the translated target must too: else ask the source."""
    if evidence.question_contexts < bars.min_questions or _absent(evidence):
        return _Gate(None, "")
    translated, native, source = (evidence.f1[name] for name in _ANSWERING)
    figures = f"F1 translated {translated:.2f}, source alone {source:.2f}, native {native:.2f}"
    if native <= source:
        return _Gate(None, f"{figures}: the source answers at least as well as the native target, so it sets no bar")
    if translated >= source:
        return _Gate(True, f"{figures}: the translated cache beats using the source alone")
    return _Gate(False, f"{figures}: using the source alone answers better")


def _bar(name: str, value: float | None, bar: float) -> _Gate:
    """Gate on a plain number."""
    if value is None:
        return _Gate(None, "")
    return _Gate(value >= bar, f"{name} {value:.2f} {'meets' if value >= bar else 'misses'} {bar:g}")
