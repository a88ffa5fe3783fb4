"""Which implementation runs where, what tiles a device gets, and traffic counted from a launch."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tiles
from pallas_kernels.dispatch import dispatch
from pallas_kernels.launch import Launch, Operand, tile_bytes


def recorder(traced: list[str], name: str):
    def run(x: jax.Array) -> jax.Array:
        traced.append(name)
        return x * 2

    return run


def implementations(traced: list[str]):
    return {name: recorder(traced, name) for name in ("xla", "tpu", "gpu")}


def test_a_name_insists_and_none_takes_the_platform():
    traced: list[str] = []
    assert dispatch("op", implementations(traced), "gpu", jnp.ones(2)).tolist() == [2.0, 2.0]
    assert traced == ["gpu"]
    lowered = jax.jit(lambda x: dispatch("op", implementations(traced), None, x)).lower(jnp.ones(2))
    assert {"xla", "tpu", "gpu"} <= set(traced)
    assert lowered.compile()(jnp.ones(2)).tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="choose one of xla, tpu, gpu"):
        dispatch("op", implementations(traced), "cuda", jnp.ones(2))


def test_only_not_implemented_falls_through():
    def refuses(x: jax.Array) -> jax.Array:
        raise NotImplementedError("needs 128 lanes")

    def breaks(x: jax.Array) -> jax.Array:
        raise TypeError("a defect")

    assert dispatch("op", {"xla": lambda x: x, "tpu": refuses}, None, jnp.ones(1)).tolist() == [1.0]
    with pytest.raises(NotImplementedError, match="128 lanes"):
        dispatch("op", {"xla": lambda x: x, "tpu": refuses}, "tpu", jnp.ones(1))
    with pytest.raises(TypeError, match="a defect"):
        dispatch("op", {"xla": lambda x: x, "tpu": breaks}, None, jnp.ones(1))


SPREAD = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from pallas_kernels.dispatch import dispatch

def recorder(traced, name):
    return lambda x: (traced.append(name), 2 * x)[1]

for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    x = jax.device_put(jnp.ones(4), NamedSharding(mesh, P("data")))
    traced = []
    branches = {name: recorder(traced, name) for name in ("xla", "tpu", "gpu")}
    run = lambda x: dispatch("op", branches, None, x)
    assert jax.jit(run)(x).tolist() == [2.0] * 4
    assert set(traced) == {"xla"}, traced
    assert jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P("data")))(x).tolist() == [2.0] * 4
    assert {"tpu", "gpu"} <= set(traced), traced
print("both meshes")
"""


def test_spread_arrays_get_the_reference_and_shard_map_gets_the_kernel(run_python):
    result = run_python(SPREAD, devices=2)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "both meshes"


def test_tuned_tiles_are_those_of_the_device_and_the_facts(monkeypatch):
    rows = {
        "TPU v5 lite": [{"when": {"dtype": "bfloat16"}, "tiles": {"rows": 512}}, {"when": {}, "tiles": {"rows": 8}}]
    }
    monkeypatch.setattr(tiles, "_table", lambda op: json.loads(json.dumps(rows)))
    assert tiles.tuned("op", "TPU v5 lite", dtype="bfloat16", head_dim=64) == {"rows": 512}
    assert tiles.tuned("op", "TPU v5 lite", dtype="float32") == {"rows": 8}
    assert tiles.tuned("op", "another kind", dtype="float32") == {}


@pytest.mark.parametrize("op", ["moments", "sensitivity", "apply"])
def test_every_op_has_a_tile_file(op: str):
    assert tiles.tuned(op, "no such device") == {}


def test_traffic_counts_a_block_whenever_its_index_changes():
    rows = Operand("x", (40, 128), jnp.bfloat16, (16, 128), lambda i, j, order: (order[j], 0))
    out = Operand("y", (2, 8, 128), jnp.float32, (None, 8, 128), lambda i, j, order: (i, 0, 0))
    launch = Launch((2, 4), (rows,), (out,), scratch=(((3, 100), jnp.bfloat16),), scalars=1)
    found = launch.traffic(np.array([0, 0, 2, 1]))
    # per i: blocks 0, 2 (8 rows only), 1, of 256 bytes a row; the last of i=0 is block 1, the first of i=1 block 0
    assert found.bytes == {"x": 2 * (16 + 8 + 16) * 256, "y": 2 * 8 * 128 * 4}
    assert found.minimum == 40 * 256 + 2 * 8 * 128 * 4
    assert found.ratio == found.total / found.minimum > 1
    assert launch.vmem_bytes == 2 * 16 * 128 * 2 + 2 * 8 * 128 * 4 + 16 * 128 * 2


def test_vmem_is_counted_in_whole_tiles():
    assert tile_bytes((1, 64), jnp.float32) == 8 * 128 * 4
    assert tile_bytes((17, 128), jnp.bfloat16) == 32 * 128 * 2
    assert tile_bytes((100,), jnp.float32) == 8 * 128 * 4
