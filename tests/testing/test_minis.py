"""The trained minis that ship with kvx: they read, and they are what their makers say."""

from __future__ import annotations

import json

import jax
import pytest

from kvx.models.load import load_model
from kvx.testing.minis import MINIS, RECIPE, folder_of, load_mini, native_scores

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("name", ["gpt2-large", "opt-small", "qwen2-large"])
def test_a_mini_answers_from_its_passage(name: str) -> None:
    """One of each family, the one that reads least well."""
    scores = native_scores(load_mini(name, stacked=True), 100, seed=1)
    assert scores["accuracy"] >= 0.95 and scores["f1"] >= 0.9


@pytest.mark.parametrize("name", MINIS)
def test_every_mini_was_trained_to_its_end_and_reached_the_bar(name: str) -> None:
    told = json.loads((folder_of(name) / "training.json").read_text())
    assert told["accuracy"] >= 0.95 and told["f1"] >= 0.9 and told["steps"] == RECIPE.steps


@pytest.mark.parametrize("name", MINIS)
def test_its_folder_is_small_and_holds_the_model_of_its_name(name: str) -> None:
    model = load_mini(name)
    assert model.config.family == MINIS[name].family and model.config == MINIS[name].config
    weights = folder_of(name) / "model.safetensors"
    assert weights.stat().st_size < 3e6
    assert (
        sum(x.size for x in jax.tree.leaves(model.params))
        == json.loads((folder_of(name) / "training.json").read_text())["parameters"]
    )


def test_without_the_passage_no_mini_knows_an_answer() -> None:
    """The names and values of a question are drawn anew for each passage, so a guess is right one time in sixteen."""
    from kvx.evaluation.answering import answerer
    from kvx.evaluation.answers import exact_match
    from kvx.evaluation.arms import boundary_tokens
    from kvx.models.prefill import prefill
    from kvx.testing.reading import READING, questions_of

    model = load_mini("qwen2-small").stack()
    words = model._tokenizer()
    asked = questions_of(1, 100, closed=True, relations=2)
    boundary = boundary_tokens(words, [READING.boundary(q.question) for q in asked])
    empty = prefill(model, words.encode_batch([""] * len(asked)), capacity=boundary.shape[1] + 16)
    said = answerer(model, words, boundary, 8)(empty, range(len(asked)))
    assert sum(exact_match(text, q.answers) for text, q in zip(said, asked, strict=True)) / len(asked) < 0.2


def test_a_mini_is_loaded_by_name_wherever_a_command_takes_a_model() -> None:
    from kvx.commands.common import load

    named, plain = load("mini:opt-small", "float32", False), load_model(folder_of("opt-small"))
    assert named.config == plain.config and named.tokenizer.digest == plain.tokenizer.digest
