"""Training small models: it learns, it is the same every time, and it goes on exactly where it stopped."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
import pytest

from kvx.errors import KvxError
from kvx.models.load import load_model
from kvx.models.model import Model
from kvx.testing.first_weights import first_model
from kvx.testing.minis import MINIS, folder_of, native_scores, tokenizer, write_mini
from kvx.testing.pretrain import Recipe, Stage, Training, pretrain

pytestmark = pytest.mark.usefixtures("quick_compilation")
RECIPE = Recipe((Stage(12, 2, 1, 2, batch_size=8), Stage(8, 2, 2, 3, batch_size=4, prose=0.1)), warmup=4)


def trained(name: str = "qwen2-small", recipe: Recipe = RECIPE, **settings: object) -> tuple[Model, Training]:
    mini = MINIS[name]
    return pretrain(mini.config, tokenizer(mini.vocabulary), recipe, seed=3, progress=False, **settings)


def equal(a: Model, b: Model) -> bool:
    leaves = zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True)
    return all(np.array_equal(x, y) for x, y in leaves)


@pytest.fixture(scope="module")
def whole() -> tuple[Model, Training]:
    return trained()


def test_two_runs_give_the_same_weights(whole) -> None:
    (first, run), (again, _) = whole, trained()
    assert equal(first, again) and run.steps == 20


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(whole, tmp_path) -> None:
    whole, run = whole
    trained(folder=tmp_path, stop_after=13)
    resumed, rest = trained(folder=tmp_path, resume=True)
    assert equal(whole, resumed)
    assert [step for step, *_ in rest.history] == [13, 20] and rest.steps == run.steps == 20


def test_a_run_in_the_way_and_a_run_of_other_settings_are_refused(tmp_path) -> None:
    trained(folder=tmp_path, stop_after=2)
    with pytest.raises(KvxError, match="holds a run already"):
        trained(folder=tmp_path)
    with pytest.raises(KvxError, match="other recipe"):
        trained(folder=tmp_path, recipe=dataclasses.replace(RECIPE, peak=1e-3), resume=True)


def test_training_learns_which_words_answer() -> None:
    recipe = Recipe((Stage(120, 2, 1, 2, batch_size=16),), warmup=10)
    _, run = trained(recipe=recipe)
    first, last = run.history[0], run.history[-1]
    assert last[0] == 120 and last[1] < first[1]
    assert last[1] < math.log(250) - 1.0  # knowing the answers' words alone (about 150) is worth more than a nat


@pytest.mark.parametrize("name", MINIS)
def test_every_mini_is_of_its_family_and_survives_its_folder(name: str, tmp_path) -> None:
    mini = MINIS[name]
    model = first_model(mini.config, tokenizer(mini.vocabulary), mini.seed)
    folder = write_mini(model, tmp_path / name, {"steps": 0})
    loaded = load_model(folder)
    assert loaded.config == model.config and loaded.config.family == mini.family
    assert equal(loaded.unstack(), model.unstack())
    assert loaded.tokenizer is not None and loaded.tokenizer.digest == model.tokenizer.digest
    assert 2 * sum(x.size for x in jax.tree.leaves(model.params)) < 3e6  # bytes in bfloat16


def test_an_untrained_mini_answers_nothing() -> None:
    mini = MINIS["opt-small"]
    model = first_model(mini.config, tokenizer(mini.vocabulary), mini.seed)
    scores = native_scores(model.stack(), 8)
    assert set(scores) == {"accuracy", "f1"} and max(scores.values()) < 0.2


def test_a_mini_that_does_not_exist_is_named() -> None:
    with pytest.raises(KvxError, match="no mini 'llama'; expected one of gpt2-small"):
        folder_of("llama")


def test_a_vocabulary_of_another_tokenizer_is_refused() -> None:
    with pytest.raises(KvxError, match="expected a step at least, and equal vocabularies"):
        pretrain(MINIS["opt-small"].config, tokenizer("words"), RECIPE, progress=False)
