"""``apply``: the kernel against its reference, gradients, tails, poison, and the traffic of its launch."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.apply import Linear, Rotation, apply, folded_bias, project, reference, tpu
from pallas_kernels.apply.check import Setting, alignment, cases, gpu_cases, nearest
from pallas_kernels.apply.reference import Settings
from pallas_kernels.apply.tables import plan, windows

FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclasses.dataclass(frozen=True)
class Case:
    """One small problem; source rows that nothing reads hold NaN."""

    layers: int = 2
    heads: int = 1
    blocks: int = 4
    slots: int = 70
    tokens: int = 45
    reads: int = 1
    source: tuple[int, int] = (8, 8)
    target: tuple[int, int] = (8, 8)
    counts: tuple[int, int] = (2, 2)
    dtype: Any = jnp.float32
    turned: int = 0
    interleaved: bool = False
    inputs: str = "both"
    shared: bool = False
    identity: bool = False
    rows: int = 128
    schedule: str = "heads"

    def arguments(self, seed: int = 0) -> dict[str, Any]:
        """Arrays; see :func:`pallas_kernels.apply.apply`."""
        rng = np.random.default_rng(seed)
        draw = lambda *shape: rng.standard_normal(shape, np.float32).astype(jnp.dtype(self.dtype))  # noqa: E731
        tokens = self.slots if self.identity else self.tokens
        weight = rng.uniform(0.5, 1.5, (tokens, self.reads)).astype(np.float32)
        weight[rng.random(weight.shape) < 0.3] = 0
        weight[3] = 0
        index = np.minimum(
            np.sort(rng.integers(0, self.slots, tokens))[:, None] + np.arange(self.reads), self.slots - 1
        )
        index = np.arange(tokens)[:, None] if self.identity else index
        unread = np.setdiff1d(np.arange(self.slots), index[weight != 0])
        sources = [draw(self.blocks, self.slots, d) for d in self.source]
        for source in sources:
            source[:, unread] = np.nan
        maps = []
        for n, (k, d) in enumerate(zip(self.counts, self.target, strict=True)):
            width = sum(self.source) if self.inputs == "both" else self.source[n]
            gather = rng.integers(0, self.blocks, (self.layers, self.heads, k), np.int32)
            gather = maps[0].gather if self.shared and maps else gather
            shape = (self.layers, self.heads)
            maps.append(Linear(gather, draw(*shape, k * width, d), draw(*shape, d)))
        angle = rng.uniform(-3, 3, (2, tokens, self.turned // 2)).astype(np.float32)
        groups = np.arange(self.layers, dtype=np.int32) % 2
        found = {
            "keys": sources[0],
            "values": sources[1],
            "index": None if self.identity else index.astype(np.int32),
            "weight": weight,
            "key_map": maps[0],
            "value_map": maps[1],
            "rotation": Rotation(np.cos(angle), np.sin(angle), groups) if self.turned else None,
        }
        return jax.tree.map(jnp.asarray, found)

    def run(self, arguments: dict[str, Any], implementation: str) -> tuple[jax.Array, jax.Array]:
        """Compile without optimisations, which is most of the time, and call."""
        gather = arguments["key_map"].gather

        def call(a: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
            if self.shared:
                a = a | {n: a[n]._replace(gather=gather) for n in ("key_map", "value_map")}
            return apply(
                **a,
                inputs=self.inputs,
                interleaved=self.interleaved,
                schedule=self.schedule,
                tile=(self.rows, None),
                implementation=implementation,
            )

        return jax.jit(call).lower(arguments).compile(compiler_options=FAST)(arguments)


CASES = {
    "two sources a token, two tiles, keys turned": Case(
        reads=2, tokens=150, slots=200, turned=8, counts=(2, 1), target=(10, 6), schedule="layers", heads=2
    ),
    "bfloat16, one token short of a tile": Case(dtype=jnp.bfloat16, source=(16, 8), tokens=127, slots=127),
    "identity, interleaved": Case(identity=True, slots=130, turned=6, interleaved=True, layers=1),
    "shared blocks of a longer source": Case(shared=True, layers=3, counts=(3, 3), slots=600, tokens=90),
}


def close(got: Any, want: Any, dtype: Any = jnp.float32) -> None:
    tolerance = 2e-5 if dtype == jnp.float32 else 3e-2
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        x, y = (np.asarray(a.astype(jnp.float32)) for a in (x, y))
        assert np.isfinite(y).all()
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * np.abs(y).max())


@pytest.mark.parametrize("name", CASES)
def test_kernel_agrees_with_the_reference(name: str) -> None:
    case = CASES[name]
    arguments = case.arguments()
    close(case.run(arguments, "interpret"), case.run(arguments, "xla"), case.dtype)


def test_reference_is_a_loop() -> None:
    """The formula, written naively; rows that nothing feeds are zero."""
    case = Case(reads=2, counts=(2, 1), turned=4, heads=2)
    a = case.arguments()
    made = case.run(a, "xla")
    index, weight = np.asarray(a["index"]), np.asarray(a["weight"], np.float64)
    blocks = np.nan_to_num(np.concatenate([a["keys"], a["values"]], axis=2).astype(np.float64))
    x = np.einsum("tr,utrf->utf", weight, blocks[:, index])
    for n, one in enumerate((a["key_map"], a["value_map"])):
        for layer, head in np.ndindex(2, 2):
            rows = np.concatenate([x[u] for u in np.asarray(one.gather)[layer, head]], axis=1)
            y = rows @ np.asarray(one.coefficients, np.float64)[layer, head] + np.asarray(one.bias)[layer, head]
            y[(weight == 0).all(axis=1)] = 0
            if n == 0:
                z = (y[:, :2] + 1j * y[:, 2:4]) * (np.asarray(a["rotation"].cos) + 1j * np.asarray(a["rotation"].sin))[
                    layer % 2
                ]
                y[:, :4] = np.concatenate([z.real, z.imag], axis=1)
            np.testing.assert_allclose(np.asarray(made[n])[layer, head], y, atol=1e-4)
    assert not np.asarray(made[0])[:, :, 3].any()


def test_case_31_a_tail_counts_what_it_holds() -> None:
    """Ones through tiles of 128 rows, 20 in the last one: 8, 8 and 4 of them by eights."""
    one = Linear(jnp.zeros((1, 1, 1), jnp.int32), jnp.ones((1, 1, 1, 1)), jnp.zeros((1, 1, 1)))
    (y,) = project([jnp.ones((1, 276, 1))], [one], None, tile=(128, None), implementation="interpret")
    rows = np.asarray(y)[0, 0, :, 0]
    assert [rows[at : at + 128].sum() for at in (0, 128, 256)] == [128, 128, 20]
    assert [rows[256:][at : at + 8].sum() for at in (0, 8, 16)] == [8, 8, 4]


def test_blocks_that_feed_their_own_kind() -> None:
    case = Case(inputs="same", counts=(1, 3), source=(8, 4))
    a = case.arguments()
    made = case.run(a, "xla")
    for n, (side, one) in enumerate((("keys", "key_map"), ("values", "value_map"))):
        close(project([a[side]], [a[one]], a["index"], a["weight"]), [made[n]])


@pytest.mark.parametrize("case", [Case(reads=2, turned=4, counts=(2, 1)), Case(identity=True, slots=20)], ids=str)
def test_gradients_match_autodiff_of_the_reference(case: Case) -> None:
    a = case.arguments()
    settings = Settings()

    def inner(keys: Any, values: Any, weight: Any, k: Any, v: Any, turns: Any, plain: bool) -> jax.Array:
        rotation = turns and Rotation(*turns, a["rotation"].groups)
        maps = tuple(Linear(a[n].gather, *m) for n, m in (("key_map", k), ("value_map", v)))
        args = (keys, values), maps, a["index"], weight
        made = reference.project(*args, rotation, settings) if plain else project(*args, rotation=rotation)
        return sum((jnp.sin(y) * (n + 1)).sum() for n, y in enumerate(made))

    turns = a["rotation"] and (a["rotation"].cos, a["rotation"].sin)
    inputs = (a["keys"], a["values"], a["weight"], a["key_map"][1:], a["value_map"][1:], turns)
    got, want = (
        jax.jit(jax.grad(functools.partial(inner, plain=plain), argnums=(0, 1, 2, 3, 4, 5)))(*inputs)
        for plain in (False, True)
    )
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


def test_vmap_and_the_default_dispatch() -> None:
    a = Case().arguments()
    one = lambda keys, weight: apply(**(a | {"keys": keys, "weight": weight}))  # noqa: E731
    keys, weight = jnp.stack([a["keys"], 2 * a["keys"]]), jnp.stack([a["weight"], a["weight"] / 2])
    both = jax.jit(jax.vmap(one))(keys, weight)
    for n in range(2):
        close([y[n] for y in both], one(keys[n], weight[n]))


def test_an_alignment_that_is_not_monotone_takes_the_reference() -> None:
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    index, weight = jnp.asarray(rng.permutation(1500)[:256, None], jnp.int32), jnp.ones((256, 1))
    args = (
        (draw(1, 1500, 8),),
        (Linear(jnp.zeros((1, 1, 1), jnp.int32), draw(1, 1, 8, 4), draw(1, 1, 4)),),
        index,
        weight,
    )
    assert not bool(windows(index.T, weight.T, rows=128, slots=1536, chunk=256, window=768, band=256).fits)
    made = tpu.project(*args, None, settings=Settings(rows=128), interpret=True)
    close(made, reference.project(*args, None, Settings()))


def test_folded_bias_keeps_a_large_mean_in_bfloat16() -> None:
    """Coefficients are rounded before they are folded, so an offset of 1000 costs nothing."""
    rng = np.random.default_rng(0)
    center = jnp.full((1, 1, 64), 1000.0)
    x = (center[0] + jnp.asarray(rng.standard_normal((32, 64)), jnp.float32)).astype(jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((1, 1, 64, 8)), jnp.float32).astype(jnp.bfloat16)
    one = Linear(jnp.zeros((1, 1, 1), jnp.int32), w, folded_bias(w, center, jnp.ones((1, 1, 8))))
    (y,) = project([x[None]], [one], None, dtype=jnp.float32)
    wanted = 1 + (np.asarray(x, np.float64) - 1000) @ np.asarray(w[0, 0], np.float64)
    np.testing.assert_allclose(np.asarray(y)[0, 0], wanted, atol=0.02)


def test_ring_keeps_what_the_next_steps_read() -> None:
    """A window that slides by one block loads one; a block that is still held is never loaded again."""
    sliding = jnp.asarray(np.arange(5)[:, None] + np.arange(3), jnp.int32)
    made = plan(sliding, 3)
    assert np.diff(made.first).tolist() == [3, 1, 1, 1, 1]
    assert made.block[:7].tolist() == list(range(7))
    held, at = {}, 0
    for step, blocks in enumerate(np.asarray(sliding)):
        for load in range(at, int(made.first[step + 1])):
            held[int(made.into[load])] = int(made.block[load])
        at = int(made.first[step + 1])
        assert [held[int(s)] for s in made.slot[3 * step : 3 * step + 3]] == blocks.tolist()


TRAFFIC = [
    (Setting("bfloat16", 64, 131_072), 88, 1.15),
    (Setting("bfloat16", 128, 131_072), 44, 1.15),
    (Setting("float32", 128, 131_072), 88, 1.15),
    (Setting("bfloat16", 256, 131_072, "same"), 44, 1.15),
    (Setting("bfloat16", 128, 131_072, aligned=False), 44, 1.15),
]


@pytest.mark.parametrize(("one", "mib", "most"), TRAFFIC, ids=str)
def test_traffic_is_near_the_minimum(one: Setting, mib: int, most: float) -> None:
    traffic, vmem = one.cost(mib << 20)
    assert vmem <= mib << 20
    size = jnp.dtype(one.dtype).itemsize
    own = one.length * one.head_dim * size * one.shape.layers * len(one.shape.counts)
    assert sum(n for name, n in traffic.bytes.items() if name.startswith("out")) == own
    assert traffic.ratio <= most


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("mib", [88, 44])
def test_wide_heads_stay_near_what_vmem_allows(dtype: str, mib: int) -> None:
    one = Setting(dtype, 256, 131_072)
    assert one.cost(mib << 20)[0].ratio <= 1.15 * one.bound(mib << 20)


def test_any_heads_are_read_once_where_a_layers_blocks_fit() -> None:
    """Heads chosen at random: by layers each block is loaded about once a tile, by heads nearly for every reader."""
    near = nearest()[:, 0] * 4
    gather = near[:, None, :] + np.random.default_rng(0).integers(0, 4, (len(near), 4, 8))
    shape = dataclasses.replace(Setting("bfloat16", 128, 8192).shape, heads=4, blocks=96)
    loads = {}
    for schedule in ("heads", "layers"):
        steps = tpu.steps_of([jnp.asarray(gather, jnp.int32)], schedule)
        loads[schedule] = int(plan(steps, tpu.ring(shape, schedule)).first[-1])
    distinct = len(np.unique(gather))
    assert loads["layers"] <= 1.15 * distinct
    assert loads["heads"] > 2 * loads["layers"]


@pytest.mark.parametrize("number", [1, 3, 6])
def test_lowers_for_tpu_without_one(number: int) -> None:
    case = cases("v5e")[number]
    text = jax.jit(case.run).trace(*case.args).lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in text


@pytest.mark.parametrize("number", [0, 2, 4, 6])
def test_lowers_for_cuda_without_one(number: int) -> None:
    case = gpu_cases()[number]
    text = jax.jit(case.run).trace(*case.args).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


def test_rotation_lowers_for_cuda() -> None:
    shape = jax.ShapeDtypeStruct
    x, w = shape((4, 200, 128), jnp.bfloat16), shape((2, 1, 512, 128), jnp.bfloat16)
    g, b, t = shape((2, 1, 2), jnp.int32), shape((2, 1, 128), jnp.bfloat16), shape((1, 200, 64), jnp.float32)

    def call(x: Any, g: Any, w: Any, b: Any, t: Any) -> Any:
        one = Linear(g, w, b)
        return apply(x, x, None, None, one, one, rotation=Rotation(t, t), implementation="gpu")

    assert "mosaic_gpu" in jax.jit(call).trace(x, g, w, b, t).lower(lowering_platforms=("cuda",)).as_text()


def test_what_a_kernel_cannot_take_names_the_rule() -> None:
    a = Case().arguments()
    with pytest.raises(NotImplementedError, match="multiplies bfloat16"):
        apply(**a, implementation="gpu")
    half = Case(dtype=jnp.bfloat16, source=(40, 40)).arguments()
    with pytest.raises(NotImplementedError, match="multiples of 64"):
        apply(**half, implementation="gpu")
    with pytest.raises(NotImplementedError, match="takes float32 and bfloat16"):
        apply(**Case(dtype=jnp.float16).arguments(), implementation="tpu")
    with pytest.raises(NotImplementedError, match="MiB of VMEM"):
        apply(**a, tile=(None, 1 << 16), implementation="tpu")


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    a = Case().arguments()
    with pytest.raises(ValueError, match="inputs is 'none'"):
        apply(**a, inputs="none")
    with pytest.raises(ValueError, match="do not belong together"):
        apply(**(a | {"keys": a["keys"][:, :, :4]}))
    with pytest.raises(ValueError, match="weights of shape"):
        apply(**(a | {"weight": jnp.ones((3, 1))}))
    with pytest.raises(ValueError, match="do not fit"):
        apply(**(a | {"rotation": Rotation(jnp.ones((1, 3, 2)), jnp.ones((1, 3, 2)))}))
    with pytest.raises(ValueError, match="same blocks"):
        apply(**(a | {"values": a["values"][:1]}))
    assert alignment(64)[0][-1, 0] == 63
