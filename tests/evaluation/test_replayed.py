"""Evaluation of a map over whose cache the target reads the context again."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import kvx
from kvx.errors import KvxError
from kvx.evaluation.comparison import Comparison, evaluate_maps
from kvx.evaluation.evaluate import evaluate
from kvx.evaluation.flops import map_cost
from kvx.evaluation.items import Item, Question
from kvx.evaluation.metrics import Bootstrap
from kvx.evaluation.sweep import sweep_injection
from kvx.mappers import CacheMap
from kvx.models.model import Model
from kvx.models.replay import ReplayPlan
from kvx.translators import fuser, untrained

pytestmark = pytest.mark.usefixtures("quick_compilation")
QUIET: dict[str, Any] = {"progress": False, "batch_size": 4, "bootstrap": Bootstrap(500), "max_new_tokens": 3}
ITEMS = [
    Item("Ann lives in Rome and sings.", " She likes snow."),
    Item("Bob lives in Oslo.", " He likes rain a lot."),
    Item("Eva lives in Bonn, by a river.", " She reads."),
    Item("Tom is out.", " He will be late."),
]
QUESTIONS = [Question(item.context, "who is it", (item.context[:3],)) for item in ITEMS]
PLAN = ReplayPlan(1)


@pytest.fixture(scope="module")
def found(models: tuple[Model, Model], mapper: CacheMap) -> Comparison:
    maps = {"alone": mapper, "replayed": mapper}
    return evaluate_maps(*models, maps, [*ITEMS, *QUESTIONS], replays={"replayed": PLAN}, apply_tokens=32, **QUIET)


def test_losses_are_those_of_the_sweep_from_the_same_layer(models, mapper: CacheMap, found: Comparison) -> None:
    swept = sweep_injection(*models, mapper, ITEMS, starts=(1,), progress=False, batch_size=4)
    (row,) = swept.injections
    np.testing.assert_allclose(found.results["replayed"].loss.nats["translated"], row.items["loss"], atol=1e-5)
    assert not np.allclose(*(found.results[name].loss.nats["translated"] for name in ("alone", "replayed")), atol=1e-3)


def test_a_replay_stands_among_those_that_read_and_counts_its_work(models, mapper, found: Comparison) -> None:
    target = models[1]
    facts = found.facts["replayed"]
    assert facts.target_reads_context and not found.facts["alone"].target_reads_context
    assert facts.flops == map_cost(mapper, target, 32).flops + PLAN.flops(target.config, 32)
    assert [names for _, names in found.parts] == [["alone"], ["replayed"]]
    result = found.results["replayed"]
    assert result.sees["translated"] == "its own reading over the translated cache"
    assert result.hashes["settings"] != found.results["alone"].hashes["settings"]


def test_all_arms_of_a_replay_and_what_is_exchanged_is_the_source_alone(models, mapper, found: Comparison) -> None:
    alone = evaluate(*models, mapper, [*ITEMS, *QUESTIONS], replay=PLAN, **QUIET)
    for arm in ("translated", "mismatched"):
        np.testing.assert_allclose(alone.loss.nats[arm], found.results["replayed"].loss.nats[arm], atol=1e-5)
        assert alone.answer.texts[arm] == found.results["replayed"].answer.texts[arm]
    top = evaluate(*models, mapper, ITEMS, replay=ReplayPlan(2, 3, every=1), latency=False, **QUIET)
    # layers 0 to 2 read nothing translated when they make their keys and values, so another item's cache is no change
    np.testing.assert_allclose(top.loss.nats["mismatched"], top.loss.nats["translated"], atol=1e-4)
    assert np.abs(alone.loss.nats["mismatched"] - alone.loss.nats["translated"]).max() > 1e-3
    assert alone.latency is not None and alone.latency.rows[0].translate > 0


def test_odd_replays_are_refused(models, mapper: CacheMap) -> None:
    pairs = kvx.pairs(*models, "Ann lives in Rome. " * 20, max_length=64)
    fused = untrained(fuser(hidden=8), pairs.unfitted(), jax.random.key(0))
    with pytest.raises(KvxError, match="a replay has nothing to correct"):
        evaluate(*models, fused, ITEMS, replay=PLAN, **QUIET)
    with pytest.raises(KvxError, match="no window of this model's 3 layers"):
        evaluate(*models, mapper, ITEMS, replay=ReplayPlan(5), **QUIET)
    with pytest.raises(KvxError, match="replays names other, which are no maps"):
        evaluate_maps(*models, {"a": mapper, "b": mapper}, ITEMS, replays={"other": PLAN}, **QUIET)
