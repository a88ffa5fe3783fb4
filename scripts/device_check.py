"""Every kernel on this machine's accelerator: difference from the reference, and speed against the machine's own rates.

    python scripts/device_check.py [--small] [--json FILE]

The reference runs on the same device. Rates are measured in the same run: bfloat16 products, and copies (bytes read and
bytes written). "of the roof" is the least time the op could take, by the slower of the two, over the time it took. Exit
code 1 when a kernel differs by more than its bar, or no kernel took anything although there is an accelerator.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.apply import Linear, apply
from pallas_kernels.moments import moments
from pallas_kernels.sensitivity import sensitivity, statistics

KERNEL = {"tpu": "tpu", "gpu": "gpu"}
REPEATS = 10


@dataclasses.dataclass(frozen=True)
class Task:
    """One op at one size.

    Attributes:
        run: function of arrays and ``implementation``; args: the arrays.
        flops, bytes: least work and traffic.
        bar: largest difference from the reference, relative to its largest value.
    """

    name: str
    run: Callable[..., Any]
    args: tuple[jax.Array, ...]
    flops: float
    bytes: float
    bar: float


def main() -> int:
    """Check, time, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="sizes that a laptop does in seconds")
    parser.add_argument("--json", type=Path, help="file for the figures")
    asked = parser.parse_args()
    device = jax.devices()[0]
    kernel = KERNEL.get(device.platform)
    rates = machine_rates(asked.small)
    print(f"{device.device_kind}, jax {jax.__version__}, kernels: {kernel or 'none here, the reference runs'}")
    print(f"bf16 products {rates['flops_per_s'] / 1e12:.3g} TFLOP/s, copies {rates['bytes_per_s'] / 1e9:.3g} GB/s")
    rows = []
    for task in tasks(asked.small):
        rows.append(checked(task, kernel, rates))
        print(line(rows[-1]), flush=True)
    report = {"device": device.device_kind, "jax": jax.__version__, "rates": rates, "rows": rows}
    if asked.json is not None:
        asked.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    idle = kernel is not None and all("not_taken" in row for row in rows)
    return 1 if idle or any(row["failed"] for row in rows) else 0


def machine_rates(small: bool) -> dict[str, float]:
    """Rates of bfloat16 products and of copies."""
    size, room = (512, 1 << 20) if small else (8192, 1 << 28)
    a, x = jnp.ones((size, size), jnp.bfloat16), jnp.ones((room,), jnp.float32)
    product = jax.jit(lambda a: jnp.dot(a, a, preferred_element_type=jnp.float32))
    copy = jax.jit(lambda x: x + 1)
    return {"flops_per_s": 2 * size**3 / seconds(product, a), "bytes_per_s": 8 * room / seconds(copy, x)}


def seconds(run: Callable[..., Any], *args: Any) -> float:
    """Least wall seconds of a compiled call."""
    jax.block_until_ready(run(*args))
    best = float("inf")
    for _ in range(REPEATS):
        started = time.perf_counter()
        jax.block_until_ready(run(*args))
        best = min(best, time.perf_counter() - started)
    return best


def checked(task: Task, kernel: str | None, rates: dict[str, float]) -> dict[str, Any]:
    """Compare with the reference and time both."""
    row: dict[str, Any] = {"name": task.name, "implementation": kernel or "xla", "bar": task.bar}
    reference = jax.jit(functools.partial(task.run, implementation="xla"))
    run = jax.jit(functools.partial(task.run, implementation=kernel or "xla"))
    roof = max(task.flops / rates["flops_per_s"], task.bytes / rates["bytes_per_s"])
    row["xla_s"] = seconds(reference, *task.args)
    try:
        row["difference"] = difference(run(*task.args), reference(*task.args))
        row["s"] = seconds(run, *task.args)
    except NotImplementedError as error:
        return {**row, "failed": False, "not_taken": str(error), "of_roof": roof / row["xla_s"]}
    return {
        **row,
        "failed": row["difference"] > task.bar,
        "of_roof": roof / row["s"],
        "vs_xla": row["xla_s"] / row["s"],
    }


def difference(found: Any, wanted: Any) -> float:
    """Largest difference of any output, relative to that output's largest value."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)
        worst = max(worst, float("inf") if np.isnan(error) else float(error))
    return worst


def line(row: dict[str, Any]) -> str:
    """One row for people."""
    if "not_taken" in row:
        return f"{row['name']:44} XLA {1e3 * row['xla_s']:9.3f} ms (kernel: {row['not_taken']})"
    state = "FAILED" if row["failed"] else "ok"
    times = f"{1e3 * row['s']:9.3f} ms, {row['of_roof']:6.1%} of the roof, {row['vs_xla']:5.2f}x XLA"
    return f"{row['name']:44} {times}, difference {row['difference']:.1e} {state}"


def tasks(small: bool) -> list[Task]:
    """All ops, in bfloat16 and float32."""
    found = []
    for dtype in (jnp.bfloat16, jnp.float32):
        for width in (64, 128) if small else (64, 128, 256):
            found += [_moments(dtype, width, small), _sensitivity(dtype, width, small), _apply(dtype, width, small)]
    return found


def _draw(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def _size(dtype: Any) -> int:
    return jnp.dtype(dtype).itemsize


def _moments(dtype: Any, width: int, small: bool) -> Task:
    heads, k, rows = (2, 2, 256) if small else (8, 4, 16384)
    blocks, y = _draw(0, (heads * k, rows, width), dtype), _draw(1, (heads, rows, width), dtype)
    gather = jnp.arange(heads * k, dtype=jnp.int32).reshape(heads, k)
    weight = jax.random.uniform(jax.random.key(2), (heads, rows), minval=0.5, maxval=1.5)
    means = jnp.zeros((heads * k, width)), jnp.zeros((heads, width))
    wide = k * width
    flops = heads * rows * wide * (wide + 2 * width)  # the Gram is symmetric
    moved = (blocks.size + y.size) * _size(dtype) + 4 * heads * (wide * (wide + width) + rows)
    name = f"moments {jnp.dtype(dtype).name} D={width} N={rows} k={k} H={heads}"
    return Task(name, moments, (blocks, y, gather, weight, *means), flops, moved, 1e-4)


def _sensitivity(dtype: Any, width: int, small: bool) -> Task:
    heads, kv, tokens, probes = (4, 2, 256, 8) if small else (32, 8, 32768, 32)
    q = _draw(3, (1, heads, probes, width), dtype)
    k, v = _draw(4, (1, kv, tokens, width), dtype), _draw(5, (1, kv, tokens, width), dtype)
    at = jnp.linspace(tokens // 2, tokens - 1, probes).astype(jnp.int32)[None]
    slots = jnp.arange(tokens, dtype=jnp.int32)[None, None]
    scale = width**-0.5
    lse, o = statistics(q, k, v, at, slots, scale=scale)
    run = functools.partial(sensitivity, scale=scale)
    flops = 4 * heads * probes * tokens * width
    moved = (k.size + v.size) * _size(dtype) + 8 * kv * tokens
    name = f"sensitivity {jnp.dtype(dtype).name} D={width} T={tokens} U={probes}"
    bar = 5e-2 if dtype == jnp.bfloat16 else 1e-3
    return Task(name, run, (q, k, v, at, slots, lse, o, jnp.ones((1, kv, probes, 2))), flops, moved, bar)


def _apply(dtype: Any, width: int, small: bool) -> Task:
    layers, heads, k, tokens = (2, 2, 2, 128) if small else (8, 8, 4, 8192)
    units = (layers + k) * heads
    keys, values = _draw(6, (units, tokens, width), dtype), _draw(7, (units, tokens, width), dtype)
    near = jnp.arange(layers)[:, None, None] + jnp.arange(k)[None, None]
    gather = (near * heads + jnp.arange(heads)[None, :, None]).astype(jnp.int32)
    coefficients = [(_draw(8 + i, (layers, heads, k * width, width), jnp.float32) / (k * width) ** 0.5) for i in (0, 1)]
    bias = jnp.zeros((layers, heads, width))

    def run(keys: jax.Array, values: jax.Array, a: jax.Array, b: jax.Array, *, implementation: str) -> Any:
        maps = [Linear(gather, w, bias) for w in (a, b)]
        return apply(keys, values, None, None, *maps, inputs="same", dtype=dtype, implementation=implementation)

    weights = [w.astype(dtype) for w in coefficients]
    flops = 4 * layers * heads * tokens * k * width * width
    moved = (keys.size + values.size + 2 * layers * heads * (tokens + k * width) * width) * _size(dtype)
    name = f"apply {jnp.dtype(dtype).name} D={width} T={tokens} k={k} L={layers} H={heads}"
    bar = 2e-2 if dtype == jnp.bfloat16 else 1e-4
    return Task(name, run, (keys, values, *weights), flops, moved, bar)


if __name__ == "__main__":
    sys.exit(main())
