"""Generation: greedy, sampled, ragged, streamed, inside transforms; and what its compiled loop does not do."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvx.cache.geometry import RopeSpec
from kvx.cache.ops import rotate_keys, unrotate_keys
from kvx.errors import KvxError
from kvx.models import generate as generating
from kvx.models.config import tiny_config
from kvx.models.generate import generate, stream
from kvx.models.prefill import next_token_logits, prefill
from kvx.models.random_model import random_model
from kvx.models.request import request
from kvx.models.sampling import choose, greedy, nucleus, sampling

ROPE = RopeSpec.create(dim=8)
WINDOWED = tiny_config(windows=(6, None), ropes=(ROPE, RopeSpec.create(theta=1e6, dim=8)))


@pytest.fixture(scope="module")
def model():
    """Scanned, as in every command; that unrolled layers read and make the same is shown in test_decoder.py."""
    return random_model(WINDOWED, stacked=True)


def ids(batch, length, seed=0):
    return np.random.default_rng(seed).integers(0, 64, (batch, length)).astype(np.int32)


def by_hand(model, tokens, count):
    """Greedy tokens from full forward passes, no cache."""
    row = tokens.tolist()
    for _ in range(count):
        row.append(int(next_token_logits(model, np.array([row], np.int32))[0].argmax()))
    return row[len(tokens) :]


@pytest.mark.parametrize("keep", ["all", "window"])
def test_greedy_with_a_ragged_batch(model, keep):
    context, boundary = ids(2, 9), ids(2, 5, seed=1)
    context[1, 7:], boundary[0, 3:] = -1, -1
    cache = prefill(model, context, keep=keep)
    out = generate(model, boundary, cache, max_new_tokens=12)
    for row, (a, b) in enumerate([(9, 3), (7, 5)]):
        whole = np.concatenate([context[row, :a], boundary[row, :b]])
        assert out.tokens[row].tolist() == by_hand(model, whole, 12)
    assert out.lengths.tolist() == [12, 12]
    assert out.cache.next_position().tolist() == [24, 24]


def test_the_cache_holds_everything(model):
    """Going on from the returned cache equals reading all of it at once; the given cache stays as it was."""
    context, boundary = ids(1, 7), ids(1, 3, seed=1)
    cache = prefill(model, context)
    before = jax.tree.map(np.asarray, cache)
    out = generate(model, boundary, cache, max_new_tokens=5)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(a, b)
    whole = np.concatenate([context, boundary, out.tokens], axis=1)
    read, after = prefill(model, whole), ids(1, 2, seed=2)
    for layer in range(2):
        np.testing.assert_allclose(out.cache.keys(layer)[:, :, :15], read.keys(layer)[:, :, :15], atol=2e-6)
    again = generate(model, after, out.cache, max_new_tokens=6).tokens
    assert again.tolist() == generate(model, np.concatenate([whole, after], 1), max_new_tokens=6).tokens.tolist()


def test_without_a_cache_and_with_a_rotated_one(model):
    context, boundary = ids(1, 20), ids(1, 3, seed=1)
    whole = generate(model, np.concatenate([context, boundary], 1), max_new_tokens=9)
    cache = prefill(model, context)
    plain, turned = (generate(model, boundary, c, max_new_tokens=9) for c in (cache, rotate_keys(cache)))
    assert whole.tokens.tolist() == plain.tokens.tolist() == turned.tokens.tolist()
    assert turned.cache.rotated
    np.testing.assert_allclose(unrotate_keys(turned.cache).keys(0), plain.cache.keys(0), atol=1e-5)


def test_stop_tokens_end_rows_one_by_one(model):
    boundary = ids(2, 4)
    free = generate(model, boundary, max_new_tokens=10).tokens
    stops = {int(free[0, 3]), int(free[1, 6])}
    out = generate(model, boundary, max_new_tokens=10, stop_tokens=stops)
    for row in range(2):
        first = next((i for i, token in enumerate(free[row].tolist()) if token in stops), 9)
        assert out.lengths[row] == first + 1
        assert out.tokens[row].tolist() == free[row, : first + 1].tolist() + [-1] * (9 - first)
        assert out.cache.next_position()[row] == 4 + first + 1
    empty = np.asarray(out.cache.groups[0].pos < 0)[..., None]
    assert not np.where(empty, out.cache.groups[0].k, 0).any()


def test_stream_gives_the_same(model):
    boundary, cache = ids(1, 4), prefill(model, ids(1, 6, seed=1))
    out = generate(model, boundary, cache, max_new_tokens=9)
    caught = []

    def run():
        caught.append((yield from stream(model, boundary, cache, max_new_tokens=9)))

    assert list(run()) == out.tokens[0].tolist()
    assert caught[0].lengths.tolist() == [9]
    np.testing.assert_allclose(caught[0].cache.keys(1), out.cache.keys(1), atol=1e-6)
    stop = int(out.tokens[0, 2])
    first = out.tokens[0].tolist().index(stop)
    assert (
        list(stream(model, boundary, cache, max_new_tokens=9, stop_tokens=[stop]))
        == out.tokens[0, : first + 1].tolist()
    )
    two = list(stream(model, ids(2, 4), max_new_tokens=3))
    assert np.array(two).T.tolist() == generate(model, ids(2, 4), max_new_tokens=3).tokens.tolist()


def test_inside_jit_and_vmap(model):
    context, boundary = jnp.asarray(ids(3, 8)), jnp.asarray(ids(3, 2, seed=1))
    plain = generate(model, boundary, prefill(model, context), max_new_tokens=5).tokens.tolist()

    def hand_over(tokens, question):
        return generate(model, question, prefill(model, tokens), max_new_tokens=5).tokens

    assert jax.jit(hand_over)(context, boundary).tolist() == plain
    assert jax.vmap(lambda t, q: hand_over(t[None], q[None])[0])(context, boundary).tolist() == plain


def test_sampling_is_reproducible_and_follows_the_settings(model):
    boundary = ids(1, 4)
    draw = lambda seed, **kw: generate(  # noqa: E731
        model, boundary, max_new_tokens=8, temperature=1.0, rng=jax.random.key(seed), **kw
    ).tokens.tolist()
    assert draw(0) == draw(0)
    assert len({str(draw(seed)) for seed in range(4)}) > 1
    free = generate(model, boundary, max_new_tokens=8).tokens.tolist()
    assert draw(0, top_k=1) == free
    assert draw(0, top_p=1e-6) == free
    streamed = list(stream(model, boundary, max_new_tokens=8, temperature=1.0, rng=jax.random.key(3)))
    assert [streamed] == draw(3)


def test_draws_follow_the_distribution():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    keys = jax.random.split(jax.random.key(0), 4000)

    def frequencies(**kw):
        how = sampling(rng=keys[0], **kw)
        drawn = jax.vmap(lambda key: choose(logits, how, key)[0])(keys)
        return np.bincount(drawn, minlength=4) / len(keys)

    np.testing.assert_allclose(frequencies(temperature=1.0), [0.5, 0.3, 0.15, 0.05], atol=0.03)
    sharp = np.array([0.25, 0.09, 0.0225, 0.0025])
    np.testing.assert_allclose(frequencies(temperature=0.5), sharp / sharp.sum(), atol=0.03)
    np.testing.assert_allclose(frequencies(temperature=1.0, top_k=2), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(frequencies(temperature=1.0, top_p=0.75), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(frequencies(temperature=1.0, top_k=3, top_p=0.9), [0.5263, 0.3158, 0.1579, 0], atol=0.03)


def test_nucleus_keeps_the_smallest_sufficient_head():
    kept = nucleus(jnp.log(jnp.array([[0.5, 0.3, 0.2]])), 0.5)
    assert np.isfinite(kept).tolist() == [[True, False, False]]


def test_greedy_takes_the_first_of_equals_and_survives_nan():
    assert greedy(jnp.array([[1.0, 3.0, 3.0], [5.0, 5.0, 1.0]])).tolist() == [1, 0]
    assert 0 <= int(greedy(jnp.full((1, 4), jnp.nan))[0]) < 4


def test_one_compilation_serves_a_bucket():
    model = random_model(tiny_config(num_layers=1, vocab_size=61))
    jax.clear_caches()
    for length in (1, 5, 16):
        for count in (3, 16):
            out = generate(model, np.ones((1, length), np.int32), max_new_tokens=count, stop_tokens=[length])
            assert out.tokens.shape == (1, count)
    assert generating._generate._cache_size() <= 2  # slots for 16 or for 32 tokens in all


def test_no_step_copies_the_cache(model):
    """In the compiled loop the frozen cache (96 slots) is only ever an operand: nothing of its size is made."""
    cache = prefill(model, ids(1, 90))
    made = request(model, ids(1, 3), cache, extra=16)
    lowered = generating._generate.lower(model, made, generating._stops(()), jnp.int32(16), sampling(), None, steps=16)
    text = lowered.compile().as_text()
    bodies = [part for part in re.split(r"\n\n", text) if re.match(r"%?\S*(body|region|while)", part.strip())]
    made_here = re.compile(r"= f32\[(?:\d+,)*96,8\]\S* (copy|fusion|transpose|dynamic-update-slice|concatenate|pad)\(")
    loops = [body for body in bodies if "get-tuple-element" in body and "f32[1,64]" in body]
    assert loops, "the loop body was not found"
    for body in loops:
        assert not made_here.search(body), made_here.search(body).group(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 2, "temperature": -1.0}, "temperature is -1"),
        ({"max_new_tokens": 2, "temperature": 1.0}, "give rng="),
        ({"max_new_tokens": 2, "temperature": 1.0, "top_k": 0, "rng": 0}, "top_k is 0"),
        ({"max_new_tokens": 2, "temperature": 1.0, "top_p": 0.0, "rng": 0}, "top_p is 0"),
    ],
)
def test_bad_settings_get_a_sentence(model, options, message):
    if options.get("rng") == 0:
        options = {**options, "rng": jax.random.key(0)}
    with pytest.raises(KvxError, match=message):
        generate(model, ids(1, 2), **options)


def test_a_row_without_tokens_is_refused(model):
    with pytest.raises(KvxError, match="no token at all"):
        generate(model, np.array([[1, 2], [-1, -1]], np.int32), max_new_tokens=2)
    with pytest.raises(KvxError, match="no token at all"):
        next_token_logits(model, np.array([[-1]], np.int32))


def test_learned_positions_do_not_run_out_midway():
    config = tiny_config(
        family="gpt2", kv_heads=4, ropes=(None, None), norm="layer", gated=False, qkv_bias=True, out_bias=True,
        mlp_bias=True, activation="gelu_tanh", max_positions=20,
    )  # fmt: skip
    model = random_model(config)
    cache = prefill(model, ids(1, 10))
    assert generate(model, ids(1, 4), cache, max_new_tokens=6).lengths.tolist() == [6]
    with pytest.raises(KvxError, match="20 learned positions"):
        generate(model, ids(1, 4), cache, max_new_tokens=7)
