"""Speed and size of the two supports side by side, against what the machine itself can multiply and copy."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvx.alignment import Alignment
from kvx.cache.cache import KVCache
from kvx.cache.geometry import CacheGeometry, LayerGeometry, RopeSpec
from kvx.errors import KvxError
from kvx.evaluation.comparison import straight_context
from kvx.fitting.head_sums import EntrySums, two_sum
from kvx.fitting.solve import prepare
from kvx.mappers.linear import BlockMap, LinearParams, apply_linear
from kvx.mappers.support import kinds, nearest_layers
from kvx.models.config import ModelConfig, tiny_config
from kvx.models.prefill import next_token_logits, prefill
from kvx.models.random_model import random_model
from kvx.typing import typed
from pallas_kernels.moments import moments
from pallas_kernels.moments.reference import flops

CHUNK = 4096  # tokens translated at a time; longer contexts go chunk by chunk
BLOCK = 2048  # rows of one step of the sums
RIDGE = 1e-3
SUPPORTS = ("full_head", "head_matched")
Run = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A pair of like models, and the supports of two maps between them.

    Attributes:
        layers: of source and target; heads: kv heads; width: of a head.
        reads: source layers that feed a target layer.
        inputs: ``"same"`` (keys feed keys) or ``"both"``.
    """

    layers: int = 20
    heads: int = 8
    width: int = 128
    reads: int = 4
    inputs: str = "same"

    @property
    def geometry(self) -> CacheGeometry:
        """Of both caches."""
        rope = RopeSpec.create(dim=self.width)
        return CacheGeometry((LayerGeometry(self.heads, self.width, self.width, rope=rope),) * self.layers)

    @property
    def features(self) -> int:
        """Features of one source head."""
        return self.width * len(kinds(self.inputs, 0))


@typed
def bench_mapper(
    shape: Shape | None = None,
    *,
    tokens: Sequence[int] = (128, 512, 1024, 4096, 32768),
    rows: int = 16384,
    repeats: int = 5,
    model: ModelConfig | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Time build and application of a full-head and a head-matched map of equal source layers, by turns.

    The build is what a fit does for the keys of one target layer once its support is known: sums over ``rows`` rows
    (centred, weighted, compensated) and the solve in float64. The application is a whole translation, batch 1. The best
    of all repeats counts on every side. Fractions are of this machine's own rates, measured in the same turns: float32
    products at highest precision, and copies (bytes read plus bytes written).

    Args:
        shape: of the pair; ``None``: 20 layers of 8 kv heads x 128, 4 source layers a target layer.
        tokens: context lengths to translate.
        rows: of the build.
        repeats: how often each side runs; once for contexts above 4,096 tokens.
        model: target model whose native prefill the warm hand-off is compared with; ``None``: one of random weights
            with the shape of Qwen3 0.6B (dim 1024, 16 heads, feed-forward 3072) and the layers of ``shape``.
        seed: of everything random.

    Returns:
        Ratios above 1 mean that head_matched (or kvx) is better: ``storage_ratio``, ``build_ratio``,
        ``apply_ratio_<tokens>``, ``fused_ratio`` (streamed sums against products of the gathered rows as a whole),
        ``warm_vs_native_prefill_1024``; ``build_gemm_fraction_<support>``, ``apply_bandwidth_fraction`` and
        ``apply_gemm_fraction`` (at 1,024 tokens) are fractions of the machine's rates; seconds and rates beside.

    Raises:
        KvxError: no tokens or rows, or a model whose cache has another shape.

    Example:
        >>> from kvx.evaluation.bench_mapper import Shape, bench_mapper
        >>> figures = bench_mapper(Shape(2, 4, 8, 2), tokens=[16], rows=64, repeats=1)
        >>> round(figures["storage_ratio"], 2), sorted(figures["build_s"])
        (3.48, ['full_head', 'head_matched'])
    """
    shape = shape or Shape()
    if not tokens or min(tokens) < 1 or rows < 1 or repeats < 1:
        raise KvxError(f"tokens {tokens}, rows {rows} and repeats {repeats} must all be at least 1.")
    rng = np.random.default_rng(seed)
    maps = {support: random_map(shape, support, rng) for support in SUPPORTS}
    stored = {support: maps[support].stored for support in SUPPORTS}
    figures: dict[str, Any] = {
        "shape": dataclasses.asdict(shape),
        "device": jax.devices()[0].device_kind,
        "storage_bytes": stored,
        "storage_ratio": stored["full_head"] / stored["head_matched"],
    }
    figures |= _build(shape, rows, repeats, rng)
    figures |= _apply(shape, maps, tokens, repeats, figures["gemm_flops_per_s"])
    figures |= _warm(shape, maps["head_matched"], model, repeats, seed)
    return figures


def random_map(shape: Shape, support: str, rng: np.random.Generator) -> LinearParams:
    """A map of one of the two supports with random coefficients."""
    layers, heads, width = shape.layers, shape.heads, shape.width
    near = np.array(nearest_layers(layers, layers, shape.reads))
    by_head = support == "head_matched"
    if by_head:
        gather = near[:, None, :] * heads + np.arange(heads)[None, :, None]
        features, entries, outputs = near.shape[1] * shape.features, heads, 1
    else:
        gather = near[:, None, :]
        features, entries, outputs = near.shape[1] * shape.features * heads, 1, heads

    def block() -> BlockMap:
        draw = rng.standard_normal((layers, entries, features, outputs, width), np.float32) / np.sqrt(features)
        return BlockMap(
            jnp.asarray(gather, jnp.int32),
            jnp.asarray(draw, jnp.float32),
            jnp.zeros((layers, entries, features)),
            jnp.zeros((layers, heads, width)),
            jnp.zeros((layers, heads, 1, 1)),
            tuple(range(layers)),
        )

    return LinearParams((block(),), (block(),), shape.geometry, shape.inputs, by_head)


def best_of(runs: Mapping[str, Run], repeats: int) -> dict[str, float]:
    """Least wall seconds of each, run by turns after one run that compiles.

    Example:
        >>> from kvx.evaluation.bench_mapper import best_of
        >>> sorted(best_of({"a": lambda: 1, "b": lambda: 2}, 2))
        ['a', 'b']
    """
    for run in runs.values():
        jax.block_until_ready(run())
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats):
        for name, run in runs.items():
            started = time.perf_counter()
            jax.block_until_ready(run())
            best[name] = min(best[name], time.perf_counter() - started)
    return best


def _build(shape: Shape, rows: int, repeats: int, rng: np.random.Generator) -> dict[str, Any]:
    """Sums and solves of the keys of one target layer, and the machine's rate of float32 products."""
    blocks = min(BLOCK, rows)
    steps = -(-rows // blocks)
    units = shape.reads * shape.heads
    x = jnp.asarray(rng.standard_normal((units, blocks, shape.features), np.float32))
    y = jnp.asarray(rng.standard_normal((blocks, shape.heads * shape.width), np.float32))
    weight = jnp.asarray(rng.uniform(0.5, 1.5, (blocks,)), jnp.float32)
    by_head = y.reshape(blocks, shape.heads, shape.width).swapaxes(0, 1)
    gathers = {
        "full_head": np.arange(units)[None],
        "head_matched": np.arange(shape.reads)[None] * shape.heads + np.arange(shape.heads)[:, None],
    }
    sides = {
        support: _summed(x, by_head if len(gather) > 1 else y[None], jnp.asarray(gather, jnp.int32), weight, steps)
        for support, gather in gathers.items()
    }
    size = 4096
    a = jnp.asarray(rng.standard_normal((blocks, size), np.float32))
    product = jax.jit(lambda a: jax.lax.dot_general(a, a, (((0,), (0,)), ((), ())), precision="highest"))
    unfused = _unfused(x, by_head, jnp.asarray(gathers["head_matched"], jnp.int32), weight, steps)
    best = best_of({**sides, "unfused": unfused, "gemm": lambda: product(a)}, repeats)
    rate = 2 * blocks * size * size / best["gemm"]
    out: dict[str, Any] = {"rows": steps * blocks, "gemm_flops_per_s": rate}
    solves = {support: _solved(sides[support]()) for support in SUPPORTS}
    solve_s = best_of(solves, 1)
    work = {}
    for support, gather in gathers.items():
        outputs = shape.heads * shape.width // len(gather)
        work[support] = flops(len(gather), gather.shape[1], shape.features, steps * blocks, outputs)
    out["sums_s"] = {support: best[support] for support in SUPPORTS}
    out["solve_s"] = solve_s
    out["build_s"] = {support: best[support] + solve_s[support] for support in SUPPORTS}
    out["build_ratio"] = out["build_s"]["full_head"] / out["build_s"]["head_matched"]
    out["sums_ratio"] = best["full_head"] / best["head_matched"]
    out["fused_ratio"] = best["unfused"] / best["head_matched"]
    for support in SUPPORTS:
        out[f"build_gemm_fraction_{support}"] = work[support] / best[support] / rate
    return out


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _step(total: EntrySums, error: EntrySums, *rows: jax.Array) -> tuple[EntrySums, EntrySums]:
    """One block of rows added to compensated sums, as a fit does it."""
    return two_sum(total, error, EntrySums(*moments(*rows)))


def _summed(x: jax.Array, y: jax.Array, gather: jax.Array, weight: jax.Array, steps: int) -> Run:
    """Weighted moments over ``steps`` blocks of rows. (Arguments, not constants: XLA would fold those away.)"""
    heads, means = gather.shape[0], (jnp.zeros((x.shape[0], x.shape[2])), jnp.zeros((y.shape[0], y.shape[2])))
    rows = (x, y, gather, jnp.broadcast_to(weight[None], (heads, weight.shape[0])), *means)
    shapes = jax.eval_shape(moments, *rows)

    def run() -> Any:
        total, error = (EntrySums(*(jnp.zeros(s.shape, s.dtype) for s in shapes)) for _ in range(2))
        for _ in range(steps):
            total, error = _step(total, error, *rows)
        return total, error

    return run


@jax.jit
def _plain(total: list[jax.Array], x: jax.Array, y: jax.Array, gather: jax.Array, weight: jax.Array) -> list[jax.Array]:
    """The same products the plain way: gather every head's rows, weigh them, multiply."""
    root = jnp.sqrt(weight)[None, :, None]
    rows = jnp.moveaxis(x[gather], 1, 2).reshape(gather.shape[0], x.shape[1], -1) * root
    found = [jnp.einsum("hnp,hnq->hpq", rows, side, precision="highest") for side in (rows, y * root)]
    return [a + b for a, b in zip(total, found, strict=True)]


def _unfused(x: jax.Array, y: jax.Array, gather: jax.Array, weight: jax.Array, steps: int) -> Run:
    """Sums over ``steps`` blocks of rows by :func:`_plain`."""
    width = gather.shape[1] * x.shape[2]

    def run() -> Any:
        total = [jnp.zeros((gather.shape[0], width, size)) for size in (width, y.shape[2])]
        for _ in range(steps):
            total = _plain(total, x, y, gather, weight)
        return total

    return run


def _solved(sums: Any) -> Run:
    """Normal equations of every head in float64, as a fit solves them."""
    total, error = sums
    gram, cross, weight = (
        np.asarray(getattr(total, name), np.float64) + np.asarray(getattr(error, name), np.float64)
        for name in ("xx", "xy", "weight")
    )

    def run() -> list[np.ndarray]:
        found = []
        for a, b, w in zip(gram, cross, weight, strict=True):
            system = prepare(a / w, floor=np.zeros(len(a)), where="the bench")
            found.append(system.factor(RIDGE).solve(b / w, where="the bench").coefficients)
        return found

    return run


def _apply(
    shape: Shape, maps: Mapping[str, LinearParams], tokens: Sequence[int], repeats: int, rate: float
) -> dict[str, Any]:
    """Translations of contexts of every length, and the machine's rate of copies."""
    out: dict[str, Any] = {"apply_s": {support: {} for support in SUPPORTS}}
    source = jnp.ones((64 << 20,))
    copied = best_of({"copy": lambda: source + 1}, repeats)["copy"]
    out["copy_bytes_per_s"] = 2 * source.nbytes / copied
    del source
    for count in tokens:
        chunk = min(count, CHUNK)
        chunks = -(-count // chunk)
        cache, alignment = straight_context(shape.geometry, chunk)
        runs = {support: _translation(maps[support], cache, alignment, chunks) for support in SUPPORTS}
        best = best_of(runs, repeats) if chunks == 1 else _once(runs)
        for support in SUPPORTS:
            out["apply_s"][support][str(count)] = best[support]
        out[f"apply_ratio_{count}"] = best["full_head"] / best["head_matched"]
        if count == 1024:
            moved = maps["head_matched"].stored + 2 * sum(g.k.nbytes + g.v.nbytes for g in cache.groups)
            blocks = (*maps["head_matched"].keys, *maps["head_matched"].values)
            work = 2 * count * sum(block.coefficients.size for block in blocks)
            out["apply_bandwidth_fraction"] = moved / best["head_matched"] / out["copy_bytes_per_s"]
            out["apply_gemm_fraction"] = work / best["head_matched"] / rate
    return out


def _translation(params: LinearParams, cache: KVCache, alignment: Alignment, chunks: int) -> Run:
    def run() -> Any:
        for _ in range(chunks):
            made = jax.block_until_ready(apply_linear(params, cache, alignment))
        return made

    return run


def _once(runs: Mapping[str, Run]) -> dict[str, float]:
    """Wall seconds of one run each; what they run has been compiled by a shorter one or compiles here."""
    found = {}
    for name, run in runs.items():
        started = time.perf_counter()
        jax.block_until_ready(run())
        found[name] = time.perf_counter() - started
    return found


def _warm(shape: Shape, params: LinearParams, config: ModelConfig | None, repeats: int, seed: int) -> dict[str, Any]:
    """A warm hand-off of 1,024 tokens (translation, then the boundary) against the target's own prefill."""
    if config is None:
        config = tiny_config(
            dim=1024,
            num_layers=shape.layers,
            heads=2 * shape.heads,
            kv_heads=shape.heads,
            head_dim=shape.width,
            ffn_dim=3072,
            vocab_size=32000,
        )
    wanted = [layer.shapes for layer in shape.geometry.layers]
    if [layer.shapes for layer in config.geometry.layers] != wanted:
        found = f"{config.num_layers} layers of {config.kv_heads} kv heads x {config.head_dim}"
        raise KvxError(f"the model's cache has {found}, the map writes {shape}; give a model of that cache shape.")
    count, boundary = 1024, jnp.arange(16, dtype=jnp.int32)[None]
    model = random_model(config, seed=seed)
    context = jnp.asarray(np.random.default_rng(seed).integers(0, config.vocab_size, (1, count)), jnp.int32)
    cache, alignment = straight_context(shape.geometry, count)

    def warm() -> Any:
        return next_token_logits(model, boundary, apply_linear(params, cache, alignment))

    def native() -> Any:
        return next_token_logits(model, boundary, prefill(model, context, keep="all"))

    best = best_of({"warm": warm, "native": native}, repeats)
    return {
        "warm_s": best["warm"],
        "native_s": best["native"],
        "warm_vs_native_prefill_1024": best["native"] / best["warm"],
    }
