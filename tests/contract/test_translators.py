"""Laws of translators alone: where they start, what is trained, and that no token reads what comes after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

import kvx
from kvx.alignment import Alignment, align
from kvx.cache.build import from_arrays
from kvx.cache.cache import KVCache
from kvx.errors import KvxError
from kvx.fitting.synthetic import SOURCE, TARGET, planted_heads, toy_pairs
from kvx.mappers import CacheMap, constant, full_head, head_matched, low_rank, random
from kvx.mappers.base import applied
from kvx.models.tokenizer import Tokenizer
from kvx.translators import mixture, residual, trunk, untrained
from kvx.translators.residual import Residual
from tests.cases import TRANSLATORS
from tests.contract.test_mappers import batch, fitted, own, translate

STARTS: dict[str, Callable[[], CacheMap]] = {
    "all heads": lambda: _fit(full_head(layers=2)),
    "own kind": lambda: _fit(full_head(layers=1, inputs="same", ridge=0.1)),
    "weighted": lambda: _fit(full_head(layers=2, sensitivity="probes", ridge=0.1)),
    "by head": lambda: _fit(head_matched(layers=2, ridge=0.1), support=planted_heads(SOURCE, TARGET)),
    "shared state": lambda: _fit(low_rank(rank=12)),
}
METHODS = {
    "residual": residual(width=4),
    "mixture": mixture(width=4),
    "attention": mixture(expert="attention", width=4, heads=2, depth=1, experts=1),
    "trunk": trunk(width=4, heads=2, head_dim=4),
}
FIRST = [
    *((method, start) for method in ("residual", "mixture") for start in STARTS if start != "shared state"),
    ("attention", "own kind"),
    ("trunk", "shared state"),
]
TEXT = "one fox saw two red birds"


def _fit(method, **pairs) -> CacheMap:
    return kvx.fit(method, toy_pairs(**pairs), progress=False)[0]


@pytest.fixture(params=TRANSLATORS, ids=str)
def mapper(request: pytest.FixtureRequest) -> CacheMap:
    return fitted(request.param)


@pytest.mark.parametrize(("method", "name"), FIRST)
def test_the_first_translator_is_the_closed_form(method: str, name: str) -> None:
    start = STARTS[name]()
    first = untrained(METHODS[method], start, jax.random.key(0), [(batch().source, batch().alignment)])
    ours, theirs = translate(first), translate(start)
    exact = name in ("all heads", "own kind")  # scales are powers of two; by head another kernel sums in its own order
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if exact:
            np.testing.assert_array_equal(x, y)
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-6 * float(abs(y).max()))


def test_it_starts_only_from_linear_maps() -> None:
    for method in METHODS.values():
        with pytest.raises(KvxError, match="fitted linear map|fitted low_rank map"):
            untrained(method, kvx.identity(), jax.random.key(0))
    with pytest.raises(KvxError, match="width"):
        residual(width=0)
    with pytest.raises(KvxError, match="gate_rate"):
        residual(gate_rate=0.0)


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_reach_every_trained_array_and_no_other(mapper: CacheMap, frozen: bool) -> None:
    residuals = isinstance(mapper.method, Residual)
    if frozen and not residuals:
        return
    method = dataclasses.replace(mapper.method, frozen=frozen) if residuals else mapper.method
    marks = method.trainable(mapper.params)

    def energy(params) -> jax.Array:
        trained = jax.tree.map(lambda x, mark: x if mark else jax.lax.stop_gradient(x), params, marks)
        given = {"receiver": own(mapper), "prefix": mapper.prefix, "rng": jax.random.key(0), "step": jnp.int32(0)}
        moved, _ = applied(method, trained, batch().source, batch().alignment, **given)
        return sum(jnp.square(g.k).sum() + jnp.square(g.v).sum() for g in moved.groups)

    slopes = jax.grad(energy, allow_int=True)(mapper.params)
    for slope, mark in zip(jax.tree.leaves(slopes), jax.tree.leaves(marks), strict=True):
        if slope.dtype == jax.dtypes.float0:
            assert not mark
            continue
        assert np.isfinite(slope).all() and bool((np.asarray(slope) != 0).any()) == mark
    if not residuals:
        return
    chosen = sum(jax.tree.leaves(marks))
    outputs = sum(len(branch.outputs) for branch in mapper.params.branches)
    assert chosen == len(mapper.params.branches) + outputs * (2 if frozen else 4)


def test_the_constant_control_hears_nothing_and_the_random_one_is_as_loud(mapper: CacheMap) -> None:
    if mapper.reads_target:
        return  # tests/translators/test_receiver.py: what is added to the target's own cache is silenced and scrambled
    sample = [(b.source, b.alignment) for b in toy_pairs(embedding_dim=4)]
    params = mapper.method.calibrate(mapper.params, sample)
    mapper = dataclasses.replace(mapper, params=params)
    real = np.asarray(batch().alignment.pos[0]) >= 0
    rows = lambda m: np.asarray(translate(m).values(1))[:, :, 1:][:, :, real]  # noqa: E731
    assert np.ptp(rows(constant(mapper)), axis=(0, 2)).max() < 1e-5
    np.testing.assert_allclose(rows(constant(mapper))[0, :, 0], params_average(params, 1), atol=1e-5)
    made, drawn = (
        np.concatenate([_context(m, b.source, b.alignment) for b in toy_pairs(embedding_dim=4)])
        for m in (mapper, random(mapper, jax.random.key(3)))
    )
    np.testing.assert_allclose(drawn.mean(axis=0), made.mean(axis=0), atol=2e-3)
    np.testing.assert_allclose(drawn.var(axis=0), made.var(axis=0), rtol=1e-2)
    assert np.abs(drawn - made).mean() > 0.3 * made.std(axis=0).mean()


def _context(mapper: CacheMap, cache: KVCache, alignment) -> np.ndarray:
    moved = kvx.translate(dataclasses.replace(mapper, prefix=None), cache, alignment)
    return np.asarray(moved.values(1))[:, 0][np.asarray(alignment.pos) >= 0]


def params_average(params, component: int) -> np.ndarray:
    if hasattr(params, "branches"):
        branch = next(b for b in params.branches if 1 in b.layers and component in [out.component for out in b.outputs])
        out = next(out for out in branch.outputs if out.component == component)
        return np.asarray(out.average[branch.layers.index(1)])
    parts = params.writes if hasattr(params, "writes") else params.parts
    part = next(part for part in parts if part.component == component and 1 in part.layers)
    return np.asarray(part.average[part.layers.index(1)])


def _words_and_letters() -> tuple[Tokenizer, Tokenizer]:
    words = Backend(models.WordLevel({w: i for i, w in enumerate(["?", *TEXT.split()])}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    letters = Backend(models.BPE({c: i for i, c in enumerate(sorted(set(TEXT)))}, []))
    return Tokenizer.from_tokenizers(words), Tokenizer.from_tokenizers(letters)


def _random_source(tokens: int, seed: int = 0) -> KVCache:
    rng = np.random.default_rng(seed)
    made = [[rng.standard_normal((1, 2, tokens, 4), np.float32) for _ in range(3)] for _ in range(2)]
    return from_arrays(*made, jnp.arange(tokens), SOURCE)


def _cut(cache: KVCache, tokens: int) -> KVCache:
    keys, values = ([np.asarray(read(i))[:, :, :tokens] for i in range(3)] for read in (cache.keys, cache.values))
    return from_arrays(keys, values, jnp.arange(tokens), SOURCE)


def _receiver(mapper: CacheMap, tokens: int) -> KVCache | None:
    """The target's own cache of the first tokens of a text, after one token of prefix."""
    if not mapper.reads_target:
        return None
    rng = np.random.default_rng(1)
    made = [[rng.standard_normal((1, 1, len(TEXT), 6), np.float32)[:, :, :tokens] for _ in range(2)] for _ in range(2)]
    return from_arrays(*made, 1 + jnp.arange(tokens), TARGET)


def _aligned(words: Tokenizer, letters: Tokenizer, text: str) -> Alignment:
    """Letters onto words, with an embedding for every letter."""
    made = align(words, letters, text, rule="causal", length=len(TEXT))
    table = np.random.default_rng(2).standard_normal((64, 4), np.float32)
    rows = np.zeros((1, len(TEXT), 4), np.float32)
    rows[0, : len(text)] = table[letters.encode(text).ids]
    return dataclasses.replace(made, embeddings=jnp.asarray(rows))


def test_no_token_reads_a_later_one_and_token_by_token_equals_one_shot(mapper: CacheMap) -> None:
    """Under the ``causal`` rule the cache of a longer text begins with the cache of the shorter one."""
    words, letters = _words_and_letters()
    count = len(TEXT.split())
    whole = _random_source(count)
    aligned = _aligned(words, letters, TEXT)
    once = kvx.translate(mapper, whole, aligned, receiver=_receiver(mapper, len(TEXT)))
    changed = dataclasses.replace(
        whole, groups=tuple(dataclasses.replace(g, k=g.k.at[:, :, :, -1].set(9.0)) for g in whole.groups)
    )
    other = kvx.translate(mapper, changed, aligned, receiver=_receiver(mapper, len(TEXT)))
    last = len(TEXT)  # in slots: the prefix takes one, and the last word's first letter onwards may look at it
    np.testing.assert_array_equal(once.keys(0)[:, :, :last], other.keys(0)[:, :, :last])
    assert (np.asarray(once.keys(0)[:, :, last:]) != np.asarray(other.keys(0)[:, :, last:])).any()
    for read in range(1, count + 1):
        text = " ".join(TEXT.split()[:read])
        fewer = _aligned(words, letters, text)
        grown = kvx.translate(mapper, _cut(whole, read), fewer, receiver=_receiver(mapper, len(text)))
        slots = 1 + len(text)
        for layer in range(grown.num_layers):
            np.testing.assert_allclose(
                grown.values(layer)[:, :, :slots], once.values(layer)[:, :, :slots], rtol=0, atol=1e-5
            )
