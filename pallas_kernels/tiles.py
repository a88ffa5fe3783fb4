"""Tile sizes: measured ones from a data file by kind of device, else a heuristic's."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

import jax


@functools.cache
def _table(op: str) -> dict[str, Any]:
    file = resources.files("pallas_kernels") / op / "tiles.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def tuned(op: str, device_kind: str | None = None, **facts: Any) -> dict[str, int]:
    """Tile sizes for a kind of device, from ``pallas_kernels/<op>/tiles.json``; empty when nothing was measured there.

    The file maps a device kind (``jax.Device.device_kind``) to rows ``{"when": {...}, "tiles": {...}}``; the first row
    whose ``when`` agrees with ``facts`` counts.

    Args:
        op: folder of the kernel.
        device_kind: ``None``: of the first local device.
        facts: what tile sizes depend on, such as ``dtype="bfloat16"``, ``head_dim=128``.
    """
    kind = jax.devices()[0].device_kind if device_kind is None else device_kind
    for row in _table(op).get(kind, ()):
        if all(facts.get(name) == value for name, value in row["when"].items()):
            return {name: int(value) for name, value in row["tiles"].items()}
    return {}
