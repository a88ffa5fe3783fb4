"""Fusers that were trained elsewhere: parameters in the layout of C2C's public PyTorch module."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvx.cache.geometry import LayerGeometry
from kvx.errors import KvxError
from kvx.mappers.base import CacheMap, groups_of
from kvx.mappers.linear import block_widths
from kvx.models.safetensors_folder import SafetensorsFolder
from kvx.translators.additions import Control, check_start, last_with_last
from kvx.translators.base import with_params
from kvx.translators.fuser import fuser
from kvx.translators.fuser_params import Block, FuserParams, Half, Part

CONFIG = "projector_config.json"
BUFFERS = ("gate_temperature",)  # of training only
SIDES = ("key", "value")
Named = dict[str, np.ndarray]


def fuser_from_torch(weights: str | Path | Mapping[str, Any], start: CacheMap) -> CacheMap:
    """A fuser from the parameters of C2C's public projectors, one a target layer.

    Args:
        weights: a folder with ``projector_0.safetensors``, ``projector_1.safetensors``, ... (each the state dict of
            one projector) and, if it has one, the ``projector_config.json`` that says which source layer and which
            projector each target layer uses; or a mapping from ``"projector_0.key_in.weight"`` and so on to arrays.
            Without a config target layer i uses projector i, and layers are paired last with last.
        start: an unfitted or fitted map of the pair, whose shapes, prefix, rule and provenance it keeps.

    Returns:
        The map; ``kvx.translate(map, cache, alignment, receiver=...)`` fuses with it.

    Raises:
        KvxError: parameters that are missing, left over or of another shape than the pair's, or no such files.

    Example:
        >>> import numpy as np
        >>> from kvx.cache.geometry import CacheGeometry, LayerGeometry, RopeSpec
        >>> from kvx.mappers.base import CacheMap
        >>> one = CacheGeometry((LayerGeometry(1, 2, 2, rope=RopeSpec.create(dim=2)),))
        >>> shapes = {"in.weight": (3, 4), "in.bias": (3,), "scalar_head.weight": (1, 3), "scalar_head.bias": (1,)}
        >>> shapes |= {"proj_out.weight": (2, 3), "proj_out.bias": (2,), "gate_logit": ()}
        >>> for block in ("mlp1", "scalar_mlp2", "proj_mlp2"):
        ...     shapes |= {f"{block}.blocks.0.norm.weight": (3,)}
        ...     shapes |= {f"{block}.blocks.0.{w}.weight": (3, 3) for w in ("w1", "w2")}
        >>> weights = {f"projector_0.{s}_{n}": np.ones(x) for n, x in shapes.items() for s in ("key", "value")}
        >>> made = fuser_from_torch(weights, CacheMap((), None, None, one, one))
        >>> made.method.hidden, made.parameters
        (3, 182)

    Reference: thu-nics/C2C, ``rosetta/model/projector.py`` (``C2CProjector``).
    """
    source, target = check_start("fuser_from_torch", start)
    named, config = _folder(Path(weights)) if isinstance(weights, str | Path) else (_plain(weights), None)
    uses = _uses(config, source.num_layers, target.num_layers)
    owned = {p: {n: x for n, x in _of(named, p).items() if n not in BUFFERS} for _, p in uses}
    settings = [_settings(p, state) for p, state in owned.items()]
    if len(set(settings)) > 1:
        raise KvxError(f"projectors differ in (hidden, inner, layers): {sorted(set(settings))}; expected equal ones.")
    hidden, inner, layers = settings[0]
    parts = []
    for members in groups_of(target):
        halves = []
        for component, side in enumerate(SIDES):
            widths = block_widths(source, "same", component, False)
            rows = []
            for layer in members:
                at, p = uses[layer]
                wanted = widths[at], max(widths), target.layers[layer]
                rows.append(_half(owned[p], side, wanted, (hidden, inner, layers), f"projector_{p}"))
            halves.append(_stacked(rows))
        gather = jnp.array([uses[layer][0] for layer in members], jnp.int32)
        parts.append(Part(gather, halves[0], halves[1], members))
    _check_names(owned, layers)
    method = fuser(hidden=hidden, inner=inner, layers=layers)
    return with_params(start, method, FuserParams(tuple(parts), target), imported="C2CProjector")


def _folder(folder: Path) -> tuple[Named, Any]:
    """Every tensor of the files ``projector_*.safetensors`` by its file and name, and the config."""
    files = sorted(folder.glob("projector_*.safetensors"))
    if not files:
        raise KvxError(
            f"{folder} holds no projector_*.safetensors; save each projector's state dict (projector_0.pt, ...) as "
            "safetensors first: kvx does not unpickle torch files."
        )
    named: dict[str, Any] = {}
    for file in files:
        held = SafetensorsFolder.of([file])
        named |= {f"{file.stem}.{name}": held.read(name) for name in held.slots}
    config = folder / CONFIG
    return _plain(named), json.loads(config.read_text(encoding="utf-8")) if config.is_file() else None


def _plain(weights: Mapping[str, Any]) -> Named:
    return {name: np.asarray(x).astype(np.float32) for name, x in weights.items()}


def _of(named: Named, projector: int) -> Named:
    lead = f"projector_{projector}."
    found = {name[len(lead) :]: x for name, x in named.items() if name.startswith(lead)}
    if not found:
        raise KvxError(f"there are no parameters {lead}*, which a target layer needs; expected one projector a layer.")
    return found


def _uses(config: Any, sources: int, targets: int) -> list[tuple[int, int]]:
    """Source layer and projector of each target layer."""
    if config is None:
        return [(at, layer) for layer, at in enumerate(last_with_last(sources, targets))]
    try:
        ((_, by_source),) = config.items()
        ((_, by_layer),) = by_source.items()
        found = {int(layer): [(int(s), int(p)) for s, p in pairs] for layer, pairs in by_layer.items()}
    except (AttributeError, TypeError, ValueError):
        raise KvxError(f"{CONFIG} does not name one source and one target model, and a projector a layer.") from None
    odd = [layer for layer in range(targets) if len(found.get(layer, ())) != 1 or found[layer][0][0] >= sources]
    if odd or len(found) != targets:
        raise KvxError(
            f"{CONFIG} fuses layers {sorted(found)} of the {targets} target layers; expected every layer once, with "
            f"one of the {sources} source layers; layers {odd} are not."
        )
    return [found[layer][0] for layer in range(targets)]


def _settings(projector: int, state: Named) -> tuple[int, int, int]:
    """Hidden width, inner width and number of blocks."""
    needed = ("key_in.weight", "key_mlp1.blocks.0.w1.weight")
    lacks = [name for name in needed if name not in state]
    if lacks:
        raise KvxError(f"projector_{projector} lacks {', '.join(lacks)}; expected the state dict of a C2CProjector.")
    blocks = {name.split(".")[2] for name in state if name.startswith("key_proj_mlp2.blocks.")}
    return state[needed[0]].shape[0], state[needed[1]].shape[0], 2 + len(blocks)


def _half(
    state: Named, side: str, widths: tuple[int, int, LayerGeometry], sizes: tuple[int, int, int], name: str
) -> Half:
    """One layer's keys or values, without the leading axis."""
    (features, padded, layer), (hidden, inner, blocks) = widths, sizes
    heads, channels = layer.kv_heads, layer.key_dim if side == "key" else layer.value_dim

    def read(key: str, *shape: int) -> np.ndarray:
        x = state.get(f"{side}_{key}")
        if x is None or x.shape != shape:
            found = "nothing" if x is None else str(x.shape)
            raise KvxError(f"{name}.{side}_{key} is {found}; this pair of models needs shape {shape}.")
        return x

    def block(key: str, inside: int) -> Block:
        up, down = read(f"{key}.w1.weight", inside, hidden), read(f"{key}.w2.weight", hidden, inside)
        return Block(*(_array(x) for x in (read(f"{key}.norm.weight", hidden), up.T, down.T)))

    into = read("in.weight", hidden, features + heads * channels).T
    out = read("proj_out.weight", heads * channels, hidden).T.reshape(hidden, heads, channels)
    blank = Control.blank(1, heads, channels)
    return Half(
        source_weight=_array(np.pad(into[:features], ((0, padded - features), (0, 0)))),
        target_weight=_array(into[features:]),
        bias=_array(read("in.bias", hidden)),
        shared=block("mlp1.blocks.0", inner),
        weigh=block("scalar_mlp2.blocks.0", hidden),
        head_weight=_array(read("scalar_head.weight", heads, hidden).T),
        head_bias=_array(read("scalar_head.bias", heads)),
        project=tuple(block(f"proj_mlp2.blocks.{i}", inner) for i in range(blocks - 2)),
        out_weight=_array(out),
        out_bias=_array(read("proj_out.bias", heads * channels).reshape(heads, channels)),
        gate=_array(read("gate_logit")),
        control=Control(blank.offset[0], blank.average[0], blank.covariance[0]),
    )


def _array(x: np.ndarray) -> Array:
    return jnp.asarray(x, jnp.float32)


def _stacked(rows: list[Half]) -> Half:
    return jax.tree.map(lambda *xs: jnp.stack(xs), *rows)


def _check_names(owned: Mapping[int, Named], layers: int) -> None:
    """Refuse parameters that nothing reads, all at once."""
    single = ["mlp1.blocks.0", "scalar_mlp2.blocks.0", *(f"proj_mlp2.blocks.{i}" for i in range(layers - 2))]
    known = {f"{block}.{name}.weight" for block in single for name in ("norm", "w1", "w2")} | {"gate_logit"}
    known |= {f"{name}.{kind}" for name in ("in", "scalar_head", "proj_out") for kind in ("weight", "bias")}
    wanted = {f"{side}_{name}" for side in SIDES for name in known}
    odd = sorted(f"projector_{p}.{name}" for p, state in owned.items() for name in set(state) - wanted)
    if odd:
        raise KvxError(f"nothing reads {', '.join(odd)}; expected the state dicts of C2CProjector modules.")
