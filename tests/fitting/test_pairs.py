"""Pairs of two small models over text: cutting, joining, alignment, prefix, and the hand-off that follows."""

from __future__ import annotations

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.export import export
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

import kvx
from kvx import pipeline
from kvx.cache.provenance import Provenance
from kvx.errors import KvxError
from kvx.fitting.pairs import rows_of
from kvx.fitting.sensitivity import sensitivity
from kvx.mappers import full_head
from kvx.models.buckets import bucket_length
from kvx.models.config import tiny_config
from kvx.models.decoder import forward
from kvx.models.random_model import random_model
from kvx.models.tokenizer import Tokenizer

STORY = "the a cat dog sat ran on under mat tree and then it was gone far away"
WORDS = STORY.split()
TEXTS = [" ".join(WORDS[(i * k) % len(WORDS)] for i in range(12 + 5 * k)) for k in range(1, 9)]


def letters() -> Tokenizer:
    """One token a character, BOS in front."""
    pieces = ["<s>", *"abcdefghijklmnopqrstuvwxyz \n"]
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.decoder = decoders.Fuse()
    return Tokenizer.from_tokenizers(backend, bos="<s>", adds_bos=True)


def words() -> Tokenizer:
    """One token a word, no BOS, an end token."""
    pieces = ["<end>", "?", *WORDS]
    backend = Backend(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer.from_tokenizers(backend, eos="<end>")


def model(tokenizer: Tokenizer, seed: int, **config: object):
    made = random_model(tiny_config(**config), seed=seed)
    return dataclasses.replace(made, tokenizer=tokenizer, provenance=Provenance(f"tiny-{seed}", f"weights-{seed}"))


@pytest.fixture(scope="module")
def source():
    return model(words(), 0)


@pytest.fixture(scope="module")
def target():
    return model(letters(), 1)


@pytest.fixture(scope="module")
def pairs(source, target):
    return kvx.pairs(source, target, TEXTS, max_length=96, batch_size=2)


def test_batches_hold_what_both_models_cache(source, target, pairs) -> None:
    batch = next(iter(pairs))
    length = batch.weight.shape[1]
    assert batch.target.groups[0].slots == length == batch.alignment.pos.shape[1]
    found = sorted(n for b in pairs for n in b.sequences if n >= 0)
    assert found == list(range(len(found)))
    text_tokens = int(batch.weight[0].sum())
    assert (np.asarray(batch.target.groups[0].pos)[0, 0, 0, :text_tokens] == 1 + np.arange(text_tokens)).all()


def test_the_target_side_is_its_own_cache_after_the_prefix(source, target) -> None:
    text = "the cat sat on the mat"
    (batch,) = kvx.pairs(source, target, text, max_length=96, batch_size=1)
    own = kvx.prefill(target, target.tokenizer.encode_batch([text]))
    n = len(text)
    for layer in range(own.num_layers):
        np.testing.assert_allclose(batch.target.keys(layer)[:, :, :n], own.keys(layer)[:, :, 1 : n + 1], atol=1e-5)
    read = kvx.prefill(source, source.tokenizer.encode_batch([text]))
    np.testing.assert_allclose(batch.source.values(1), read.values(1)[:, :, : batch.source.groups[0].slots], atol=1e-5)
    x, _, weight = rows_of(batch)
    third = text.index("sat")
    first = np.asarray(read.keys(0))[0, :, 2].ravel()
    np.testing.assert_allclose(x[third, : len(first)], first, atol=1e-5)
    assert int(weight.sum()) == n


def test_iteration_can_be_repeated(pairs) -> None:
    first, second = ([np.asarray(b.weight) for b in pairs] for _ in range(2))
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    assert pairs.digest == pairs.digest


def test_long_texts_are_cut_and_short_ones_joined(source, target) -> None:
    long = " ".join(TEXTS)
    texts, tokens = [], 0
    for batch in kvx.pairs(source, target, [long, "the cat", "a dog"], max_length=64, batch_size=1):
        assert batch.source.groups[0].slots <= 64
        rows = np.asarray(batch.weight).sum(axis=1)
        assert rows.max() <= 63
        tokens += int(rows.sum())
        texts.append(int(rows[0]))
    apart = list(kvx.pairs(source, target, ["the cat", "a dog"], max_length=64, batch_size=1, join=False))
    together = list(kvx.pairs(source, target, ["the cat", "a dog"], max_length=64, batch_size=1))
    assert (len(apart), len(together)) == (2, 1)
    assert tokens > 0.9 * len(long)


def test_max_tokens_is_kept(source, target) -> None:
    for limit in (1, 50, 200):
        found = kvx.pairs(source, target, TEXTS, max_length=64, batch_size=2, max_tokens=limit)
        assert 0.5 * limit <= sum(int(b.weight.sum()) for b in found) <= limit


def test_rows_that_fill_a_batch_do_not_count(source, target) -> None:
    (batch,) = kvx.pairs(source, target, "the cat sat", max_length=64, batch_size=3)
    assert batch.sequences == (0, -1, -1)
    assert int(batch.weight[1:].sum()) == 0


def test_a_target_without_bos_reads_its_end_token_first(source, target) -> None:
    back = kvx.pairs(target, source, TEXTS, max_length=96, batch_size=2)
    assert back.prefix is not None and back.prefix.groups[0].slots == 1
    none = kvx.pairs(target, source, TEXTS, max_length=96, batch_size=2, prefix=())
    assert none.prefix is None
    assert int(next(iter(none)).target.groups[0].pos[0, 0, 0, 0]) == 0
    two = kvx.pairs(target, source, TEXTS, max_length=96, batch_size=2, prefix=(0, 1))
    assert int(next(iter(two)).target.groups[0].pos[0, 0, 0, 0]) == 2
    assert len({p.digest for p in (back, none, two)}) == 3


def test_case_25_a_bos_written_in_the_text_shifts_nothing(target) -> None:
    """The target's BOS is its prefix: the one in the text must not become a second one at position 1."""
    (plain,), (marked,) = (
        kvx.pairs(target, target, text, max_length=64, batch_size=1) for text in ("the cat sat", "<s>the cat sat")
    )
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(marked), strict=True):
        np.testing.assert_array_equal(a, b)


def test_bad_requests_are_refused(source, target) -> None:
    for change, match in (
        ({"texts": [" ", ""]}, "no text"),
        ({"rule": "nearest"}, "rule 'nearest'"),
        ({"max_length": 2}, "no room"),
        ({"batch_size": 0}, "at least 1"),
        ({"max_tokens": 0}, "at least 1"),
    ):
        with pytest.raises(KvxError, match=match):
            kvx.pairs(source, target, **{"texts": TEXTS, **change})
    with pytest.raises(KvxError, match="tokenizer"):
        kvx.pairs(random_model(), target, TEXTS)


@pytest.fixture(scope="module")
def mapper(pairs):
    return kvx.fit(full_head(layers="all", ridge=1e-4), pairs, progress=False)[0]


def test_a_model_handed_to_itself_is_the_same_model(target) -> None:
    """Same tokenizer, same weights: the fitted map is nearly the identity, and answers stay the same."""
    pairs = kvx.pairs(target, target, TEXTS, max_length=128, batch_size=4)
    mapper, report = kvx.fit(full_head(layers="all", ridge=1e-7), pairs, progress=False)
    assert report.r2_held_out > 0.9999
    context = "a dog ran under the tree and then it was gone"
    tokens = target.tokenizer.encode_batch([context])
    moved = kvx.translate(mapper, kvx.prefill(target, tokens), kvx.align(target, target, context))
    own = kvx.prefill(target, tokens)
    assert moved.next_position().tolist() == own.next_position().tolist()
    question = target.encode(" far away", bos=False).tokens
    ours, theirs = (kvx.next_token_logits(target, question, cache) for cache in (moved, own))
    np.testing.assert_allclose(ours, theirs, atol=0.05)
    said = kvx.handoff(target, target, mapper, context, " far away", max_new_tokens=8, stop_tokens=())
    direct = kvx.generate(target, question, own, max_new_tokens=8)
    assert said.tokens == tuple(direct.tokens[0].tolist())


def test_handoff_streams_stops_and_reports(source, target, mapper) -> None:
    context = "the cat sat on the mat and then it was gone"
    pieces: list[str] = []
    whole = kvx.handoff(
        source, target, mapper, context, " then", max_new_tokens=12, stop_tokens=(), on_text=pieces.append
    )
    assert "".join(pieces) == whole.text == str(whole)
    assert len(whole.tokens) == 12
    assert whole.alignment.coverage == 1.0
    assert set(whole.seconds) == {"source", "translate", "answer"}
    middle = whole.text[4:6]
    cut = kvx.handoff(source, target, mapper, context, " then", max_new_tokens=12, stop_tokens=(), stop=[middle])
    assert cut.text == whole.text[: whole.text.index(middle)]
    marked = kvx.handoff(source, target, mapper, context, "<s> then", max_new_tokens=12, stop_tokens=())
    assert marked.tokens == whole.tokens  # case 25: no second BOS amid the text
    for context, question in (("", "x"), ("x", "")):
        with pytest.raises(KvxError, match="not empty"):
            kvx.handoff(source, target, mapper, context, question)


def test_another_models_map_is_refused(source, target, mapper) -> None:
    """The same name, other weights (case 17): identity is a digest."""
    fake = dataclasses.replace(source, provenance=Provenance("tiny-0", "weights-other"))
    with pytest.raises(KvxError, match="other weights"):
        kvx.handoff(fake, target, mapper, "the cat", "sat")
    wide = model(words(), 0, num_layers=3)
    with pytest.raises(KvxError, match="this map's source has"):
        kvx.handoff(wide, target, mapper, "the cat", "sat")


def test_caches_and_alignments_must_belong_together(source, target, mapper) -> None:
    context = "the cat sat on the mat"
    cache = kvx.prefill(source, source.tokenizer.encode_batch([context]))
    alignment = kvx.align(source, target, context)
    with pytest.raises(KvxError, match="reads source slot"):
        kvx.translate(mapper, cache, kvx.align(source, target, context + " then it was gone"))
    with pytest.raises(KvxError, match="1 rows and the cache 2"):
        kvx.translate(mapper, kvx.prefill(source, source.tokenizer.encode_batch([context] * 2)), alignment)
    other = kvx.prefill(model(words(), 2, kv_heads=1), source.tokenizer.encode_batch([context]))
    with pytest.raises(KvxError, match="this map reads caches of"):
        kvx.translate(mapper, other, alignment)


def test_translate_is_pure(source, target, mapper) -> None:
    context = "the cat sat on the mat"
    cache = kvx.prefill(source, source.tokenizer.encode_batch([context]))
    alignment = kvx.align(source, target, context)
    plain = kvx.translate(mapper, cache, alignment)
    jitted = jax.jit(kvx.translate)(mapper, cache, alignment)
    np.testing.assert_allclose(jitted.keys(1), plain.keys(1), atol=1e-6)
    exported = export(jax.jit(lambda k, a: kvx.translate(mapper, k, a).groups[0].v))(cache, alignment)
    np.testing.assert_allclose(exported.call(cache, alignment), plain.groups[0].v, atol=1e-6)
    grad = jax.grad(lambda c: (kvx.translate(mapper, c, alignment).groups[0].k ** 2).sum(), allow_int=True)(cache)
    assert float(jnp.abs(grad.groups[0].k).max()) > 0
    rotated = kvx.translate(mapper, rotate(cache), alignment)
    np.testing.assert_allclose(rotated.keys(1), plain.keys(1), atol=1e-4)


def test_case_32_64_lengths_compile_three_times(source, caplog) -> None:
    """Contexts of 1 to 64 tokens, from text to translated cache: beyond 16, 32 and 64 nothing is compiled."""
    mapper, before = kvx.identity(), pipeline._translate._cache_size()

    def move(length: int) -> None:
        text = " ".join(["cat"] * length)
        for tokens in (source.encode(text).tokens, source.tokenizer.encode_batch([text])):
            cache = kvx.prefill(source, tokens)
        moved = kvx.translate(mapper, cache, kvx.align(source, source, text))
        assert moved.groups[0].slots == bucket_length(length)
        assert moved.next_position().tolist() == [length]

    for length in (16, 32, 64):
        move(length)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for length in range(1, 65):
            move(length)
    assert not [record.message for record in caplog.records if "Compiling" in record.message]
    assert pipeline._translate._cache_size() - before == 3


def rotate(cache):
    from kvx.cache.ops import rotate_keys

    return rotate_keys(cache)


def test_a_longer_prefix_moves_the_context(source, target, mapper) -> None:
    context = "the cat sat"
    cache = kvx.prefill(source, source.tokenizer.encode_batch([context]))
    alignment = kvx.align(source, target, context)
    plain = kvx.translate(mapper, cache, alignment)
    prefix = kvx.prefill(target, target.encode("a dog", bos=True).tokens)
    moved = kvx.translate(mapper, cache, alignment, prefix=prefix)
    assert int(moved.next_position()[0] - plain.next_position()[0]) == 5
    n = len(context)
    at = np.flatnonzero(np.asarray(moved.groups[0].pos)[0, 0, 0] == 6)[0]
    np.testing.assert_allclose(moved.keys(0)[:, :, at : at + n], plain.keys(0)[:, :, 1 : 1 + n], atol=1e-6)


def test_learned_positions_refuse_another_prefix(mapper, source, target) -> None:
    bare = dataclasses.replace(
        mapper.target, layers=tuple(dataclasses.replace(layer, rope=None) for layer in mapper.target.layers)
    )
    fixed = dataclasses.replace(mapper, target=bare)
    cache = kvx.prefill(source, source.tokenizer.encode_batch(["the cat"]))
    alignment = kvx.align(source, target, "the cat")
    with pytest.raises(KvxError, match="learned positions"):
        kvx.translate(fixed, cache, alignment, prefix=kvx.prefill(target, jnp.array([[0, 1, 2]])))


@pytest.mark.parametrize("mode", ["probes", "all"])
def test_weighed_pairs_hold_the_same_caches_and_the_targets_sensitivities(source, target, mode: str) -> None:
    texts = ["the cat sat on the mat and then it was gone", "a dog ran"]
    pairs = kvx.pairs(source, target, texts, max_length=96, batch_size=2, join=False)
    (plain,), (weighed,) = pairs, pairs.weighed(mode)
    assert plain.sensitivity is None
    assert plain.sequences == weighed.sequences
    np.testing.assert_allclose(weighed.target.keys(1), plain.target.keys(1), atol=1e-5)
    for row, number in enumerate(weighed.sequences):
        text = texts[number]
        tokens = target.tokenizer.encode_batch([text])
        out = forward(target, tokens, collect_queries=True)
        positions = jnp.arange(len(text) + 1, dtype=jnp.int32)[None]
        own = sensitivity(target.config, out.queries, positions, out.cache, mode=mode, first=1)[:, 0, :, 1:]
        np.testing.assert_allclose(weighed.sensitivity[:, row, :, : len(text)], own, rtol=1e-3, atol=1e-5)
        assert float(abs(weighed.sensitivity[:, row, :, len(text) :]).max()) == 0
