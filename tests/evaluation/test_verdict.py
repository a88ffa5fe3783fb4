"""The verdict: minimum counts, gates, undefined figures, thresholds file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from kvx.errors import KvxError
from kvx.evaluation.metrics import Bootstrap, Estimate
from kvx.evaluation.verdict import Evidence, judge, load_thresholds

GOOD = Evidence(
    contexts=100,
    question_contexts=100,
    content=Estimate(0.9, 0.8, 1.0),
    answers=Estimate(0.8, 0.7, 0.9),
    f1={"native": 0.41, "translated": 0.36, "source_alone": 0.23},
    attention_cosine=0.9,
    warm_speedup=3.0,
)


def _with(**changes: object) -> Evidence:
    return dataclasses.replace(GOOD, **changes)


def test_case_9_retention_of_one_on_five_conversations_is_no_verdict():
    """5 conversations x 3 turns: 15 perfect items, but only 5 contexts."""
    ones = Bootstrap().ratio([1.0] * 15, [1.0] * 15)
    verdict = judge(Evidence(contexts=5, content=ones, question_contexts=5, answers=ones))
    assert ones.value == 1.0 and verdict.decision is None
    assert "5 different contexts" in verdict.reasons[0] and "fewer than 30" in verdict.reasons[0]


def test_a_gate_that_was_not_measured_gives_no_verdict():
    assert judge(GOOD).decision == "use"
    verdict = judge(_with(attention_cosine=None))
    assert verdict.decision is None and "attention-output cosine was not measured" in verdict.reasons[0]


@pytest.mark.parametrize("arm", ["native", "translated", "source_alone"])
def test_case_9_an_arm_that_was_not_run_gives_no_verdict(arm: str):
    verdict = judge(_with(f1={name: f1 for name, f1 in GOOD.f1.items() if name != arm}))
    assert verdict.decision is None and arm in verdict.reasons[0]


def test_all_gates_met_says_use_with_the_numbers():
    verdict = judge(GOOD)
    assert verdict.decision == "use" and len(verdict.reasons) == 5
    assert any("0.900 [0.800, 1.000]" in reason for reason in verdict.reasons)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"content": Estimate(0.6, 0.45, 0.75)}, "content carried"),
        ({"answers": Estimate(0.6, 0.3, 0.9)}, "answers carried"),
        ({"f1": {"native": 0.41, "translated": 0.10, "source_alone": 0.23}}, "using the source alone answers better"),
        ({"attention_cosine": 0.25}, "attention-output cosine"),
        ({"warm_speedup": 0.8}, "warm speed-up"),
    ],
)
def test_one_failed_gate_says_reprefill_and_is_named_first(changes: dict, named: str):
    verdict = judge(_with(**changes))
    assert verdict.decision == "reprefill" and named in verdict.reasons[0] and named in str(verdict)


def test_losses_alone_can_reject_but_never_accept():
    unasked = {"answers": None, "question_contexts": 0, "f1": {}}
    accepted = judge(_with(**unasked))
    assert accepted.decision is None and "there were no questions" in accepted.reasons[0]
    assert judge(_with(**unasked, content=Estimate(0.1, 0.0, 0.2))).decision == "reprefill"


def test_an_undefined_figure_is_neither_met_nor_missed():
    undefined = Estimate.undefined("the denominator's interval [-1, 1] contains zero")
    verdict = judge(_with(content=undefined))
    assert verdict.decision is None and "contains zero" in verdict.reasons[0]


def test_a_source_that_answers_better_than_the_native_target_sets_no_bar():
    assert judge(_with(f1={"native": 0.41, "translated": 0.36, "source_alone": 0.6})).decision == "use"


def test_r2_is_nowhere_among_the_gates():
    names = {field.name for cls in (Evidence, type(load_thresholds())) for field in dataclasses.fields(cls)}
    assert not [name for name in names if "r2" in name or "r_squared" in name]


def test_thresholds_come_from_a_file(tmp_path: Path):
    path = tmp_path / "strict.json"
    fields = {k: v for k, v in dataclasses.asdict(load_thresholds()).items() if k != "sha256"}
    path.write_text(json.dumps({**fields, "name": "strict", "content": 0.95}))
    strict = load_thresholds(path)
    assert judge(GOOD, strict).decision == "reprefill" and strict.sha256 != load_thresholds().sha256
    path.write_text(json.dumps({"r2": 0.9}))
    with pytest.raises(KvxError, match="expected JSON with name"):
        load_thresholds(path)
