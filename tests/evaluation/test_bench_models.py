"""The bench measures the same thing on both sides."""

from __future__ import annotations

import pytest

from kvx.evaluation.bench_models import bench_models, torch_model
from kvx.models.config import tiny_config
from kvx.models.random_model import random_model


def test_figures_and_same_tokens():
    figures = bench_models([random_model(tiny_config(tied=False))], tokens=12, threads=1, new_tokens=3, repeats=1)
    row = figures["llama-2x32"]
    assert row["same_tokens"] and row["threads"] == 1 and row["tokens"] == 12
    for name in ("prefill", "decode"):
        assert row[f"{name}_ratio_vs_torch"] > 0
    rates = row["prefill_tokens_per_s"] / row["torch_prefill_tokens_per_s"]
    assert row["prefill_ratio_vs_torch"] == pytest.approx(rates)
    assert set(figures["versions"]) == {"jax", "torch", "transformers"}


def test_the_twin_has_the_same_weights():
    model = random_model()
    state = torch_model(model).state_dict()
    assert (state["model.embed_tokens.weight"].numpy() == model.params["embed"]).all()
    down = state["model.layers.1.mlp.down_proj.weight"].numpy()
    assert (down == model.params["layers"][1]["down"]).all()
