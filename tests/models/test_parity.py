"""Every family against transformers: logits, un-rotated keys and values, and 64 greedy tokens."""

from __future__ import annotations

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from kvx.models.decoder import forward
from kvx.models.generate import generate
from kvx.models.layers import lm_head
from kvx.models.prefill import next_token_logits, prefill, token_logprobs

TOLERANCE = 1e-4


def logits_of(model, out):
    return np.asarray(lm_head(model.config, model.params, out.hidden))


@pytest.mark.parametrize(("length", "stacked"), [(7, False), (40, False), (40, True)])
def test_logits_keys_and_values(name, length, stacked, oracle, tokens):
    """40 tokens are past the sliding window (8) and past the original length of Llama-3 scaling and YaRN (16)."""
    twin, ids = oracle(name), tokens(2, length)
    model = twin.model.stack() if stacked else twin.model
    out = forward(model, ids)
    np.testing.assert_allclose(logits_of(model, out), twin.logits(ids), atol=TOLERANCE)
    for i, (k, v) in enumerate(twin.keys_values(ids)):
        np.testing.assert_allclose(out.cache.keys(i), k, atol=TOLERANCE)
        np.testing.assert_allclose(out.cache.values(i), v, atol=TOLERANCE)


@pytest.mark.parametrize(
    "name", ["llama-llama3", "mistral-gqa", "qwen2-yarn", "qwen3-gqa", "gemma3-gqa", "gpt2-mha", "opt-mha"]
)
def test_greedy_64(name, oracle, tokens):
    """A prompt longer than the window, cut between prefill and boundary; rings for the window layers."""
    twin, ids = oracle(name), tokens(1, 21)
    cache = prefill(twin.model, ids[:, :12], keep="window")
    out = generate(twin.model, ids[:, 12:], cache, max_new_tokens=64)
    assert out.tokens.tolist() == twin.greedy(ids, 64)


@pytest.mark.parametrize(
    "name", ["llama-gqa", "qwen2-gqa", "qwen3-gqa", "gemma3-gqa", "gpt2-mha", "opt-mha", "mistral-gqa"]
)
def test_bfloat16(name, oracle, tokens):
    """As close to the fp32 model as torch's own bfloat16 is, within a factor, and never further than 3 %."""
    twin, ids = oracle(name), tokens(1, 24)
    exact = twin.logits(ids)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), twin.model.params)
    model = dataclasses.replace(twin.model, params=params)
    out = forward(model, ids)
    assert out.hidden.dtype == out.cache.keys(0).dtype == jnp.bfloat16
    ours = np.abs(logits_of(model, out) - exact).max()
    low = copy.deepcopy(twin.torch_model)
    for parameter in low.parameters():  # buffers (RoPE frequencies) stay fp32, as when transformers loads bfloat16
        parameter.data = parameter.data.to(torch.bfloat16)
    theirs = np.abs(twin._replace(torch_model=low).logits(ids) - exact).max()
    assert ours < 2 * theirs + 1e-3
    assert ours < 0.03 * np.abs(exact).max()


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3-gqa", "opt-mha"])
def test_logits_and_scores(name, oracle, tokens):
    twin, ids = oracle(name), tokens(2, 20)
    exact = twin.logits(ids)
    np.testing.assert_allclose(next_token_logits(twin.model, ids), exact[:, -1], atol=TOLERANCE)
    rows = torch.log_softmax(torch.tensor(exact), -1)[:, :-1].numpy()
    wanted = np.take_along_axis(rows, ids[:, 1:, None], axis=-1)[..., 0]
    cache = prefill(twin.model, ids[:, :6])
    scores = np.asarray(token_logprobs(twin.model, ids[:, 6:], cache))
    assert scores[:, 0].tolist() == [0.0, 0.0]
    np.testing.assert_allclose(scores[:, 1:], wanted[:, 6:], atol=TOLERANCE)
