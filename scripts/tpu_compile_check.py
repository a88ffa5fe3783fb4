"""Compile every Pallas kernel with the real TPU compiler, without a TPU, and count the HBM traffic of its schedule.

In an environment of its own (this replaces jax by the release the compiler belongs to):

    python3 -m venv .tpu && .tpu/bin/pip install "jax[tpu]==0.10.2"
    .tpu/bin/python scripts/tpu_compile_check.py [--json]

Exit code 1 when a kernel does not compile, or moves more than 1.15 times the bytes it must: every distinct block once,
or, where the chip's VMEM cannot hold what that takes, the bound that its schedule is measured against.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
from jax.experimental import topologies

from pallas_kernels.apply import check as apply
from pallas_kernels.check import Case
from pallas_kernels.moments import check as moments
from pallas_kernels.sensitivity import check as sensitivity

OPS = {"moments": moments, "sensitivity": sensitivity, "apply": apply}
TOPOLOGIES = {"v5e": "v5e:2x4", "v5p": "v5p:2x2x1", "v6e": "v6e:2x4"}
BAR = 1.15


def main() -> int:
    """Run the checks that were asked for and print a table or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--op", choices=[*OPS], action="append", help="only this kernel (may be repeated)")
    parser.add_argument("--chip", choices=[*TOPOLOGIES], action="append", help="only this chip (may be repeated)")
    asked = parser.parse_args()
    rows = []
    for row in checked(asked.op or [*OPS], asked.chip or [*TOPOLOGIES]):
        rows.append(row)
        print(line(row), file=sys.stderr if asked.json else sys.stdout, flush=True)
    failed = [row for row in rows if not row["compiled"] or row["hbm_ratio"] > BAR * row["hbm_bound"]]
    if asked.json:
        print(json.dumps({"jax": jax.__version__, "bar": BAR, "failed": len(failed), "kernels": rows}, indent=1))
    else:
        print(f"{len(rows)} compiled or tried, {len(failed)} failed or above {BAR}")
    return 1 if failed else 0


def checked(ops: list[str], chips: list[str]) -> Iterator[dict[str, Any]]:
    """One row a kernel, shape and chip."""
    for chip in chips:
        described = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
        place = jax.sharding.SingleDeviceSharding(described.devices[0])
        for op in ops:
            for case in OPS[op].cases(chip):
                yield {"chip": chip, **compile_case(case, place)}


def compile_case(case: Case, place: jax.sharding.Sharding) -> dict[str, Any]:
    """Compile one case for a device; its traffic is counted from the grid and the block index maps."""
    args = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for a in case.args]
    row: dict[str, Any] = {name: getattr(case, name) for name in ("op", "label", "dtype", "head_dim", "length")}
    started = time.perf_counter()
    try:
        text = jax.jit(case.run).lower(*args).compile().as_text()
        row |= {"compiled": "tpu_custom_call" in text, "error": None}
    except Exception as error:  # the compiler's own errors have many types; each is reported as the row's result
        row |= {"compiled": False, "error": f"{type(error).__name__}: {str(error)[:400]}"}
    row["seconds"] = round(time.perf_counter() - started, 2)
    if case.cost is None:
        raise SystemExit(f"{case.op}: this case does not tell its traffic; give Case(cost=...).")
    traffic, vmem = case.cost()
    moved = {"hbm_bytes": traffic.total, "hbm_minimum": traffic.minimum, "hbm_ratio": round(traffic.ratio, 4)}
    bound = 1.0 if case.bound is None else round(case.bound(), 4)
    return {**row, **moved, "hbm_bound": bound, "vmem_bytes": vmem}


def line(row: dict[str, Any]) -> str:
    """One row for people."""
    name = (
        f"{row['chip']:4} {row['op']:12} {row['dtype']:9} D={row['head_dim']:<4} T={row['length']:<7} {row['label']:18}"
    )
    state = f"compiled in {row['seconds']:5.1f} s" if row["compiled"] else f"NOT compiled: {row['error']}"
    moved = (
        f"{row['hbm_bytes'] / 1e6:9.1f} MB moved, {row['hbm_ratio']:.3f} of the least (bound {row['hbm_bound']:.3f})"
    )
    return f"{name} {moved}, VMEM {row['vmem_bytes'] / 2**20:5.1f} MiB, {state}"


if __name__ == "__main__":
    sys.exit(main())
