"""``kvx inspect``: what a saved mapper holds (and whether it is whole), or a model folder or GGUF file (headers)."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from kvx.commands.common import Common, Outcome, Output, UsageError, jsonable
from kvx.errors import KvxError

if TYPE_CHECKING:
    from kvx.cache.geometry import CacheGeometry
    from kvx.mappers.base import CacheMap
    from kvx.models.config import ModelConfig

MANIFEST = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Inspect(Common):
    """Settings of ``kvx inspect``."""

    path: tyro.conf.Positional[Path | None] = None
    """A saved mapper, a model folder or a .gguf file. Required."""


def run(settings: Inspect, out: Output) -> Outcome:
    """Say what lies at a path.

    Raises:
        KvxError: nothing is there, or it is none of the three; the message says what was looked for.
    """
    if settings.path is None:
        raise UsageError("kvx inspect needs a PATH: a saved mapper, a model folder or a .gguf file.")
    figures = examine(settings.path)
    if not out.as_json:
        _print(figures, out)
    return Outcome(figures)


def examine(path: Path) -> dict[str, Any]:
    """Facts about what lies at ``path``, as plain values.

    Returns:
        ``kind`` (``mapper``, ``folder`` or ``gguf``) and what such a thing has: a mapper's manifest; a model's
        ``config``, ``geometry`` (runs of equal layers), ``cache_bytes_per_token`` (fp32 and bf16), ``tensors``.
    """
    if not path.exists():
        raise KvxError(f"there is nothing at {path}; give a saved mapper, a model folder or a .gguf file.")
    if path.is_file() and path.suffix == ".gguf":
        return _gguf(path)
    if path.is_dir() and (path / MANIFEST).is_file():
        return _mapper(path)
    if path.is_dir() and (path / "config.json").is_file():
        return _folder(path)
    raise KvxError(
        f"{path} is not something kvx knows: expected a saved mapper (a folder with {MANIFEST}), a model folder (with "
        "config.json) or a .gguf file."
    )


def _mapper(path: Path) -> dict[str, Any]:
    """A saved mapper, every file of it checked; and its verdict, when it has been measured."""
    import kvx
    from kvx.commands.eval import recorded_verdict

    mapper = kvx.load(path)
    owners = mapper.provenance or {}
    result = recorded_verdict(path, mapper) or {}
    return {
        "kind": "mapper",
        "path": str(path),
        "digest": mapper.digest,
        "method": str(mapper.method),
        "bytes": mapper.size,
        "rule": mapper.rule,
        "prefix_tokens": mapper.prefix_length,
        "source": owners.get("source"),
        "target": owners.get("target"),
        "fitted_on": owners.get("facts"),
        "verdict": result.get("verdict"),
        "content": result.get("content"),
        "retained": result.get("retained"),
        "geometry": layer_runs(mapper.target),
        "source_geometry": layer_runs(mapper.source),
        "support": _support(mapper),
    }


def _support(mapper: CacheMap) -> list[dict[str, Any]]:
    """Which source layers and heads (``layer:head``) feed which target heads; empty for maps without a support.

    ``beside`` names what else is read: ``0@-2`` is layer 0 of the source token two before the aligned one,
    ``embedding@-1`` the target's embedding of the token before.
    """
    from kvx.mappers.history import NONE

    own, history = mapper.source.num_layers, getattr(mapper.params, "history", NONE)

    def name(layer: int) -> str:
        """A layer beyond the source's own: of a history, or the target's embedding of a token."""
        if mapper.reads_embeddings:
            return f"embedding@-{layer - own}" if layer > own else "embedding"
        return history.name(layer, own)

    return [
        {
            "target_layer": entry.target,
            "component": entry.component,
            "target_heads": list(range(*entry.heads)),
            "source_layers": [i for i in entry.source_layers if i < own],
            "beside": [name(i) for i in entry.source_layers if i >= own],
            "source_heads": [f"{layer}:{head}" for layer, head in entry.source_heads] or "all",
            "ridge": entry.ridge,
            "condition": entry.condition,
        }
        for entry in getattr(mapper.params, "report", None) or ()
    ]


def _gguf(path: Path) -> dict[str, Any]:
    from kvx.models.gguf_config import gguf_config
    from kvx.models.gguf_file import GgufFile

    file = GgufFile.open(path)
    facts = {
        "kind": "gguf",
        "path": str(path),
        "name": file.metadata.get("general.name"),
        "licence": file.metadata.get("general.license"),
        "vocabulary": f"{file.metadata.get('tokenizer.ggml.model')} / {file.metadata.get('tokenizer.ggml.pre')}",
        "tensors": len(file.tensors),
        "parameters": sum(math.prod(t.shape) for t in file.tensors.values()),
        "bytes": path.stat().st_size,
        "quantisations": dict(collections.Counter(t.kind for t in file.tensors.values())),
    }
    return facts | _model(lambda: gguf_config(file))


def _folder(path: Path) -> dict[str, Any]:
    from kvx.models.safetensors_folder import SafetensorsFolder

    files = SafetensorsFolder.open(path)
    facts = {
        "kind": "folder",
        "path": str(path),
        "tensors": len(files.slots),
        "bytes": sum(file.stat().st_size for file in files.paths),
        "tokenizer": (path / "tokenizer.json").is_file(),
    }
    return facts | _model(lambda: json.loads((path / "config.json").read_text(encoding="utf-8")))


def _model(read: Any) -> dict[str, Any]:
    """What kvx makes of a configuration; ``supported`` holds the reason when it does not run it."""
    from kvx.models.hf_config import from_hf_config

    try:
        config: ModelConfig = from_hf_config(read())
    except KvxError as error:
        return {"supported": False, "reason": str(error)}
    keys = ("family", "num_layers", "dim", "heads", "kv_heads", "head_dim", "vocab_size", "max_positions", "tied")
    return {
        "supported": True,
        "config": {key: getattr(config, key) for key in keys},
        "geometry": layer_runs(config.geometry),
        "cache_bytes_per_token": {
            "float32": config.geometry.cache_bytes(bytes_per_number=4),
            "bfloat16": config.geometry.cache_bytes(bytes_per_number=2),
        },
    }


def layer_runs(geometry: CacheGeometry) -> list[dict[str, Any]]:
    """Runs of neighbouring layers with the same geometry: ``layers`` (``"0-4"``), shapes, window and RoPE.

    Example:
        >>> from kvx.cache.geometry import CacheGeometry, LayerGeometry, RopeSpec
        >>> local = LayerGeometry(1, 64, 64, 512, RopeSpec.create(dim=64))
        >>> wide = LayerGeometry(1, 64, 64, None, RopeSpec.create(theta=1e6, dim=64))
        >>> [(run["layers"], run["window"]) for run in layer_runs(CacheGeometry((local, local, wide)))]
        [('0-1', 512), ('2', None)]
    """
    runs = []
    for layer, group in itertools.groupby(enumerate(geometry.layers), key=lambda pair: pair[1]):
        first, *rest = [index for index, _ in group]
        rope = layer.rope and f"{layer.rope.kind}, base {layer.rope.theta:g}, {layer.rope.dim} channels"
        runs.append(
            {
                "layers": f"{first}-{rest[-1]}" if rest else str(first),
                "kv_heads": layer.kv_heads,
                "key_dim": layer.key_dim,
                "value_dim": layer.value_dim,
                "window": layer.window,
                "rope": rope or "learned positions",
            }
        )
    return runs


TABLES = {"geometry": "layers", "source_geometry": "source layers", "support": "target layer"}


def _print(figures: dict[str, Any], out: Output) -> None:
    from rich.table import Table

    facts = Table(show_header=False, box=None, pad_edge=False)
    for name, value in figures.items():
        if name not in TABLES and value is not None:
            facts.add_row(name.replace("_", " "), _line(jsonable(value)).replace("[", r"\["))
    out.console.print(facts)
    for name, first in TABLES.items():
        if rows := figures.get(name):
            _, *others = rows[0]
            table = Table(first, *(other.replace("_", " ") for other in others), box=None, pad_edge=False)
            for row in rows:
                table.add_row(*(_cell(value) for value in row.values()))
            out.console.print("", table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.1e}" if isinstance(value, float) else str(value)


def _line(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_line(v)}" for k, v in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
