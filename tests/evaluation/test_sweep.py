"""Sweep of the injection start: the identity moves nothing, errors show, no injection is native, refusals are clear."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import kvx
from kvx.cache.join import select_batch
from kvx.errors import KvxError
from kvx.evaluation.items import Item, Question
from kvx.evaluation.metrics import Bootstrap
from kvx.evaluation.shifts import last_state_shift, propagated_shift
from kvx.evaluation.sweep import injection_windows, sweep_injection
from kvx.evaluation.sweep_figure import INSTALL, check_format, draw, drawable
from kvx.evaluation.sweep_report import Sweep
from kvx.mappers import CacheMap, constant, low_rank
from kvx.models.model import Model
from kvx.models.random_model import byte_model
from kvx.models.replay import ReplayPlan
from kvx.translators import fuser

pytestmark = pytest.mark.usefixtures("quick_compilation")
QUIET: dict[str, Any] = {"progress": False, "batch_size": 4, "bootstrap": Bootstrap(500)}
ITEMS = [
    Item("Ann lives in Rome and sings.", " She likes snow."),
    Item("Bob lives in Oslo.", " He likes rain a lot."),
    Item("Eva lives in Bonn, by a river.", " She reads."),
    Item("Tom is out.", " He will be late."),
    Item("The cat is in the garden.", " It sleeps."),
]
SHIFTS = ("propagated_shift", "last_state_shift")


@pytest.fixture(scope="module")
def fitted(models: tuple[Model, Model], mapper: CacheMap) -> Sweep:
    return sweep_injection(*models, mapper, ITEMS, starts=(3, 0, 1, 2), **QUIET)


def test_the_identity_moves_nothing(models: tuple[Model, Model]) -> None:
    target = models[1]
    found = sweep_injection(target, target, kvx.identity(), ITEMS, **QUIET)
    native = found.baselines["native"]["loss"]
    assert [(one.start, one.stop) for one in found.injections] == [(0, 3), (1, 3), (2, 3)]
    for one in found.injections:
        np.testing.assert_allclose(one.items["loss"], native, atol=1e-4)
        assert all(one.items[name].max() < 1e-4 for name in SHIFTS)
    np.testing.assert_allclose(found.baselines["translated"]["loss"], native, atol=1e-4)
    assert np.abs(found.baselines["none"]["loss"] - native).min() > 1e-3


def test_a_constant_map_shifts_every_item_at_every_start(models: tuple[Model, Model], mapper: CacheMap) -> None:
    found = sweep_injection(*models, constant(mapper), ITEMS, **QUIET)
    for one in found.injections:
        assert one.items["propagated_shift"].min() > 1e-3
    for one in found.injections[:-1]:  # what only the last layer reads does not change its own keys and values
        assert one.items["last_state_shift"].min() > 1e-4
    assert found.injections[-1].items["last_state_shift"].max() < 1e-4
    assert found.baselines["translated"]["last_state_shift"].min() > 1e-3


def test_injecting_in_no_layer_is_native_exactly(fitted: Sweep) -> None:
    none = fitted.injections[-1]
    assert (none.start, none.stop, str(none)) == (3, 3, "no layer")
    np.testing.assert_array_equal(none.items["loss"], fitted.baselines["native"]["loss"])
    assert all((none.items[name] == 0).all() for name in SHIFTS)
    assert none.flops == ReplayPlan().flops(byte_model(3).config, fitted.cost.tokens, prefix=1)
    assert fitted.best in (0, 1, 2)


def test_figures_are_those_of_the_single_functions(
    models: tuple[Model, Model], mapper: CacheMap, fitted: Sweep
) -> None:
    source, target = models
    item, plan = ITEMS[1], ReplayPlan(1)
    text = [item.context]
    length = 32
    cache = kvx.prefill(source, source.tokenizer.encode_batch(text, length=length), capacity=length)
    moved = kvx.translate(mapper, cache, kvx.align(source, target, text, length=length))
    tokens = target.tokenizer.encode_batch(text, bos=False, length=length)
    prefix = select_batch(mapper.prefix, [0])
    native = kvx.prefill(target, tokens, prefix, capacity=length + 1)
    boundary = jnp.asarray(target.tokenizer.encode(item.continuation, bos=False).tokens)
    again = kvx.replay(target, tokens, moved, plan)
    expected = {
        "propagated_shift": propagated_shift(target, tokens, moved, native, plan)[0],
        "last_state_shift": last_state_shift(target, boundary, again, native)[0],
        "loss": -kvx.token_logprobs(target, boundary, again).sum() / (boundary.shape[1] - 1),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(fitted.injections[1].items[name][1], value, rtol=2e-3)
    baseline = last_state_shift(target, boundary, moved, native)[0]
    np.testing.assert_allclose(fitted.baselines["translated"]["last_state_shift"][1], baseline, rtol=2e-3)


def test_windows_of_a_fixed_size_move(models: tuple[Model, Model], mapper: CacheMap, fitted: Sweep) -> None:
    found = sweep_injection(*models, mapper, ITEMS, size=1, **QUIET)
    assert [str(one) for one in found.injections] == ["layer 0", "layer 1", "layer 2"]
    np.testing.assert_allclose(found.injections[2].items["loss"], fitted.injections[2].items["loss"], rtol=1e-5)
    assert np.abs(found.injections[0].items["loss"] - fitted.injections[0].items["loss"]).min() > 1e-4


def test_maps_that_read_embeddings_are_swept(models: tuple[Model, Model]) -> None:
    pairs = kvx.pairs(*models, "Ann lives in Rome. She likes snow. " * 20, max_length=64)
    made = kvx.fit(low_rank(layers=1, rank=8, embeddings=2, ridge=0.1), pairs, held_out=0, progress=False)[0]
    assert made.reads_embeddings
    found = sweep_injection(*models, made, ITEMS[:2], starts=[1], **QUIET)
    assert np.isfinite(found.injections[0].items["loss"]).all()


def test_json_and_table_hold_every_figure(fitted: Sweep) -> None:
    figures = fitted.to_json(per_item=True)
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert [row["start"] for row in figures["injections"]] == [0, 1, 2, 3]
    for row in [*figures["injections"], *figures["baselines"].values()]:
        assert row["loss_low"] <= row["loss"] <= row["loss_high"]
    for row, one in zip(figures["injections"], fitted.injections, strict=True):
        assert row["propagated_shift"] == pytest.approx(one.items["propagated_shift"].mean())
        assert row["flops"] == one.flops and len(row["per_item"]["loss"]) == len(ITEMS)
    first = fitted.estimates[0]["over_native"]
    ours, native = fitted.injections[0].items["loss"], fitted.baselines["native"]["loss"]
    assert first == fitted.bootstrap.difference(ours, native), "paired"
    assert figures["cost"]["tokens"] == round(np.mean([len(item.context) for item in ITEMS]))
    console = Console(width=118, file=io.StringIO())
    console.print(fitted.table())
    text = console.file.getvalue()
    assert "layers 0-2" in text and "no layer" in text and "no context" in text
    assert "layers 0-2: loss" in repr(fitted)


def test_progress_reaches_the_end(models: tuple[Model, Model], mapper: CacheMap) -> None:
    seen: list[tuple[str, int, int]] = []
    sweep_injection(*models, mapper, ITEMS, starts=[0], **{**QUIET, "progress": lambda *told: seen.append(told)})
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1] == ("from layer 0", 20, 20)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_figure_is_written(fitted: Sweep, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / f"sweep{suffix}"
    figures = json.loads(json.dumps(fitted.to_json()))
    assert draw(figures, path) == path and path.stat().st_size > 1000


def test_without_matplotlib_the_figure_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not drawable()
    with pytest.raises(KvxError, match="pip install"):
        draw({}, tmp_path / "sweep.png")
    assert INSTALL.count(".") == 2, "one sentence, and a version"


def test_bad_settings_are_one_sentence(models: tuple[Model, Model], mapper: CacheMap) -> None:
    config = models[1].config
    for settings, said in (
        (([4],), r"\[4\].*0 to 2.*3 for no injection"),
        (([-1],), r"\[-1\]"),
        (([],), "missing"),
        (([2], 2), "0 to 1 for a window of 2"),
        ((None, 4), "window is 4"),
        ((None, 0), "window is 0"),
    ):
        with pytest.raises(KvxError, match=said):
            injection_windows(config, *settings)
    with pytest.raises(KvxError, match="'sweep.jpg' has no known format"):
        check_format(Path("sweep.jpg"))
    asked = [Question("Ann is in Rome.", "who", ("Ann",))]
    for items in ([], asked):
        with pytest.raises(KvxError, match="needs passages"):
            sweep_injection(*models, mapper, items, **QUIET)  # type: ignore[arg-type]
    with pytest.raises(KvxError, match="at least two"):
        sweep_injection(*models, mapper, [dataclasses.replace(item, continuation="x") for item in ITEMS], **QUIET)


def test_a_map_that_reads_the_target_is_refused(models: tuple[Model, Model], mapper: CacheMap) -> None:
    made = dataclasses.replace(mapper, method=fuser())
    assert made.reads_target
    with pytest.raises(KvxError, match="fuses with the target's own cache"):
        sweep_injection(*models, made, ITEMS, **QUIET)
