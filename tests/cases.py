"""The tables behind the contract tests: every law in ``tests/contract`` runs over every row.

A new mapper, model family, kind of cache or kernel is one row here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvx
from kvx.cache.build import from_arrays
from kvx.cache.cache import CacheGroup, KVCache
from kvx.cache.geometry import CacheGeometry, LayerGeometry, RopeSpec
from kvx.fitting.synthetic import SOURCE, TARGET, planted_heads, toy_pairs
from kvx.mappers import CacheMap, full_head, head_matched, low_rank
from kvx.mappers.receiver import context_start, reads_receiver, receiver_rows
from kvx.models.config import ModelConfig
from kvx.models.hf_config import from_hf_config
from kvx.translators import fuser, latent_flow, mixture, residual, trunk, untrained
from kvx.translators.base import with_params
from pallas_kernels.apply import Linear
from pallas_kernels.apply import apply as kernel_apply
from pallas_kernels.moments import moments as kernel_moments
from pallas_kernels.sensitivity import sensitivity as kernel_sensitivity
from pallas_kernels.sensitivity import statistics as kernel_statistics

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}
_GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_GEMMA = {
    "head_dim": 12,
    "query_pre_attn_scalar": 12,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0,
}
_OPT = {
    "model_type": "opt",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "max_position_embeddings": 64,
    "activation_function": "relu",
    "do_layer_norm_before": True,
}

# One of each structure: Mistral's windows and Qwen3's normed keys are Gemma 3's; every family itself is compared with
# transformers in tests/models/test_parity.py.
MODELS: dict[str, ModelConfig] = {
    "llama": from_hf_config(_LLAMA),
    "qwen2": from_hf_config({**_LLAMA, "model_type": "qwen2", "num_key_value_heads": 1}),
    "gemma3": from_hf_config({**_LLAMA, "model_type": "gemma3_text", "num_key_value_heads": 1, **_GEMMA}),
    "gpt2": from_hf_config({"model_type": "gpt2", **_GPT2}),
    "opt": from_hf_config(_OPT),
}


def _random(geometry: CacheGeometry, positions: Any, *, batch: int = 2, slots: int = 6, seed: int = 0) -> KVCache:
    rng = np.random.default_rng(seed)
    shape = lambda layer, dim: (batch, layer.kv_heads, slots, dim)  # noqa: E731
    keys = [rng.standard_normal(shape(g, g.key_dim), np.float32) for g in geometry.layers]
    values = [rng.standard_normal(shape(g, g.value_dim), np.float32) for g in geometry.layers]
    return from_arrays(keys, values, positions, geometry)


def _uniform(value_dim: int = 4) -> CacheGeometry:
    return CacheGeometry((LayerGeometry(2, 4, value_dim, None, RopeSpec.create(dim=4)),) * 3)


def _hybrid() -> CacheGeometry:
    local = LayerGeometry(1, 4, 4, 3, RopeSpec.create(dim=4))
    wide = LayerGeometry(2, 6, 6, None, RopeSpec.create(theta=1e6, dim=4))
    return CacheGeometry((local, wide, local))


def _ring() -> KVCache:
    """A ring of three slots that has wrapped: seven tokens were written."""
    geometry = CacheGeometry((LayerGeometry(2, 4, 4, 3, RopeSpec.create(dim=4)),))
    whole = _random(geometry, jnp.array([6, 4, 5]), slots=3)
    group = dataclasses.replace(whole.groups[0], next=jnp.array([7, 7], jnp.int32), ring=True)
    return dataclasses.replace(whole, groups=(group,))


def _per_head() -> KVCache:
    """Other tokens dropped in each kv head."""
    pos = jnp.array([[[0, 1, -1, 3, 4, -1], [0, -1, 2, 3, -1, -1]]] * 2)
    return _random(_uniform(), [pos] * 3)


def _learned() -> KVCache:
    return _random(CacheGeometry((LayerGeometry(2, 4, 4),) * 2), jnp.array([0, 1, 2, 3, -1, -1]))


CACHES: dict[str, Callable[[], KVCache]] = {
    "full": lambda: _random(_uniform(), jnp.arange(6)),
    "ragged": lambda: _random(_uniform(), jnp.array([[0, 1, 2, 3, -1, -1], [0, 1, 2, 3, 4, 5]])),
    "padded left": lambda: _random(_uniform(), jnp.array([-1, -1, 0, 1, 2, 3])),
    "other value dim": lambda: _random(_uniform(value_dim=5), jnp.array([0, 1, 2, -1, -1, -1])),
    "two groups": lambda: _random(_hybrid(), jnp.array([0, 1, 2, 3, 4, -1])),
    "per head": _per_head,
    "ring": _ring,
    "learned positions": _learned,
}


def poison(cache: KVCache) -> KVCache:
    """The cache with NaN in every empty slot: nothing that reads it properly may notice."""

    def fill(group: CacheGroup) -> CacheGroup:
        empty = (group.pos < 0)[..., None]
        k, v = (jnp.where(empty, jnp.asarray(jnp.nan, x.dtype), x) for x in (group.k, group.v))
        return dataclasses.replace(group, k=k, v=v)

    return dataclasses.replace(cache, groups=tuple(fill(group) for group in cache.groups))


@dataclasses.dataclass(frozen=True)
class MapperCase:
    """One fitted map and a batch it reads.

    Attributes:
        fitted: makes the map (of toy pairs; see :mod:`kvx.fitting.synthetic`) for a seed of its pairs.
        exact: whether the toy pairs are affine in what the method reads, so that it must recover them.
    """

    fitted: Callable[[int], CacheMap]
    exact: bool = True


def _fitted(method: Any, **pairs: Any) -> Callable[[int], CacheMap]:
    return lambda seed: kvx.fit(method, toy_pairs(seed=seed, **pairs), progress=False)[0]


def _chained(seed: int) -> CacheMap:
    there = _fitted(full_head(layers=2, ridge=1e-4))(seed)
    back = _fitted(full_head(layers=2, ridge=1e-4), source=TARGET, target=SOURCE)(seed + 1)
    return kvx.chain(there, back)


MAPPERS: dict[str, MapperCase] = {
    "full_head": MapperCase(_fitted(full_head(layers=2))),
    "full_head, all layers": MapperCase(_fitted(full_head(layers="all", ridge=1e-6))),
    "full_head, best layers": MapperCase(_fitted(full_head(layers=1, choice="best"))),
    "full_head, history": MapperCase(_fitted(full_head(layers=1, history=2, history_layers=2)), exact=False),
    "full_head, own kind": MapperCase(_fitted(full_head(layers=2, inputs="same")), exact=False),
    "head_matched": MapperCase(_fitted(head_matched(layers=2), support=planted_heads(SOURCE, TARGET)), exact=False),
    "head_matched, widened": MapperCase(_fitted(head_matched(layers=1, ridge=1e-6))),
    "head_matched, by index": MapperCase(
        _fitted(head_matched(layers=1, inputs="same", heads="index", choice="best", ridge=0.1)), exact=False
    ),
    "full_head, weighted": MapperCase(_fitted(full_head(layers=2, sensitivity="probes", select="attention"))),
    "low_rank": MapperCase(_fitted(low_rank(rank=24))),
    "low_rank, embeddings": MapperCase(_fitted(low_rank(rank=20, embeddings=2), embedding_dim=4), exact=False),
    "identity": MapperCase(lambda seed: kvx.identity(), exact=False),
    "chain": MapperCase(_chained, exact=False),
}


def _stirred(method: Any, start: Callable[[int], CacheMap]) -> Callable[[int], CacheMap]:
    """A translator whose every trained parameter has moved, as if by training."""

    def made(seed: int) -> CacheMap:
        batch = next(iter(toy_pairs(batches=1, embedding_dim=4)))
        begun = start(seed)
        own = receiver_rows(batch.target, batch.alignment, context_start(begun.prefix))
        sample = [(batch.source, batch.alignment, *((own,) if reads_receiver(method) else ()))]
        first = untrained(method, begun, jax.random.key(seed), sample)
        rng = np.random.default_rng(seed)
        move = lambda x, mark: x + 0.1 * rng.standard_normal(x.shape, np.float32) if mark else x  # noqa: E731
        return with_params(first, method, jax.tree.map(move, first.params, method.trainable(first.params)))

    return made


def _unfitted(seed: int) -> CacheMap:
    return toy_pairs(seed=seed).unfitted()


TRANSLATORS: dict[str, MapperCase] = {
    "residual, history": MapperCase(_stirred(residual(width=4), _fitted(full_head(layers=1, history=2))), exact=False),
    "residual, by head": MapperCase(
        _stirred(residual(width=4), _fitted(head_matched(layers=2), support=planted_heads(SOURCE, TARGET))), exact=False
    ),
    "mixture": MapperCase(_stirred(mixture(width=4), _fitted(full_head(layers=2))), exact=False),
    "mixture, two of three, by head, in a window": MapperCase(
        _stirred(
            mixture(width=4, experts=3, top=2, window=(1, 1)),
            _fitted(head_matched(layers=2), support=planted_heads(SOURCE, TARGET)),
        ),
        exact=False,
    ),
    "mixture of attention, dense": MapperCase(
        _stirred(
            mixture(expert="attention", top=None, width=8, heads=2, depth=1),
            _fitted(full_head(layers=2, inputs="same")),
        ),
        exact=False,
    ),
    "trunk, embeddings": MapperCase(
        _stirred(
            trunk(blocks=2, width=4, heads=2, head_dim=4), _fitted(low_rank(rank=16, embeddings=3), embedding_dim=4)
        ),
        exact=False,
    ),
    "fuser": MapperCase(_stirred(fuser(hidden=8, inner=8, gate=1.0), _unfitted), exact=False),
    "latent_flow": MapperCase(_stirred(latent_flow(width=6), _unfitted), exact=False),
    "latent_flow, spans": MapperCase(_stirred(latent_flow(width=6, span=2), _unfitted), exact=False),
}


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """One op of ``pallas_kernels`` on a small problem.

    Attributes:
        run: of arrays, and ``implementation=``.
        arrays: makes float arrays (which gradients are taken of), the others, and the float arrays with NaN wherever
            nothing may be read.
    """

    run: Callable[..., Any]
    arrays: Callable[[], tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]]


def _moments_arrays() -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(3, 20, 8)), rng.normal(size=(2, 20, 5))
    weight = np.where(np.arange(20) % 4 == 3, 0.0, rng.uniform(0.5, 2, (2, 20)))
    rest = weight, rng.normal(size=(3, 8)), rng.normal(size=(2, 5))
    hole = weight[0] == 0
    poisoned = np.where(hole[None, :, None], np.nan, x), np.where(hole[None, :, None], np.nan, y), *rest
    gather = jnp.array([[0, 2], [1, 0]], jnp.int32)
    return _float32((x, y, *rest)), (gather,), _float32(poisoned)


def _sensitivity_arrays() -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=(1, heads, n, 8)) for heads, n in ((4, 5), (2, 12), (2, 12)))
    at, slots = jnp.array([[3, 5, 7, 9, -1]], jnp.int32), jnp.array([[[*range(10), -1, -1]]], jnp.int32)
    lse, o = kernel_statistics(*_float32((q, k, v)), at, slots, scale=0.3)
    rest = np.asarray(lse), np.asarray(o), rng.uniform(0.5, 1, (1, 2, 5, 2))
    hole = (np.asarray(slots) < 0)[..., None]
    poisoned = np.where((np.asarray(at) < 0)[:, None, :, None], np.nan, q), *(np.where(hole, np.nan, a) for a in (k, v))
    return _float32((q, k, v, *rest)), (at, slots), _float32((*poisoned, *rest))


def _apply_arrays() -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    rng = np.random.default_rng(2)
    keys, values = rng.normal(size=(2, 4, 9, 8))
    w, bias = rng.normal(size=(2, 2, 2, 32, 8)), rng.normal(size=(2, 2, 2, 8))
    index = np.minimum(np.arange(7)[:, None] + np.arange(2), 7)  # slot 8 feeds nothing
    weight = np.where(np.arange(7)[:, None] == 3, 0.0, rng.uniform(0.5, 1, (7, 2)))
    rest = weight, *w, *bias
    poisoned = (np.where((np.arange(9) == 8)[:, None], np.nan, a) for a in (keys, values))
    gather = jnp.asarray(rng.integers(0, 4, (2, 2, 2)), jnp.int32)
    return _float32((keys, values, *rest)), (jnp.asarray(index, jnp.int32), gather), _float32((*poisoned, *rest))


def _apply(keys, values, weight, w_k, w_v, b_k, b_v, index, gather, *, implementation=None):  # type: ignore[no-untyped-def]
    maps = Linear(gather, w_k, b_k), Linear(gather, w_v, b_v)
    return kernel_apply(keys, values, index, weight, *maps, implementation=implementation)


def _moments(x, y, weight, x_mean, y_mean, gather, *, implementation=None):  # type: ignore[no-untyped-def]
    return kernel_moments(x, y, gather, weight, x_mean, y_mean, implementation=implementation)


def _sensitivity(q, k, v, lse, o, weights, at, slots, *, implementation=None):  # type: ignore[no-untyped-def]
    return kernel_sensitivity(q, k, v, at, slots, lse, o, weights, scale=0.3, implementation=implementation)


def _float32(arrays: Any) -> tuple[Any, ...]:
    return tuple(jnp.asarray(a, jnp.float32) for a in arrays)


KERNELS: dict[str, KernelCase] = {
    "moments": KernelCase(_moments, _moments_arrays),
    "sensitivity": KernelCase(_sensitivity, _sensitivity_arrays),
    "apply": KernelCase(_apply, _apply_arrays),
}
