"""Sweep of the injection start: both shifts and the loss, for each layer where a replay may begin to read translations.

Injecting early lets errors grow through depth, injecting late leaves few layers to correct the last state. All starts
are measured on the same items, beside the target's own cache, no context, and the translated cache without a replay.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvx.cache.cache import KVCache
from kvx.cache.ops import pad_to, slice_slots
from kvx.errors import KvxError
from kvx.evaluation.arms import Setup, boundary_tokens, build, read
from kvx.evaluation.batches import Batch
from kvx.evaluation.evaluate import BATCH_SIZE, check_replay, prepare, scanned
from kvx.evaluation.flops import map_cost
from kvx.evaluation.items import Item, digest
from kvx.evaluation.losses import check_scored, logprobs
from kvx.evaluation.metrics import Bootstrap
from kvx.evaluation.shifts import relative_shift
from kvx.evaluation.sweep_report import BASELINES, Figures, Injection, Sweep
from kvx.models.buckets import bucket_length
from kvx.models.config import ModelConfig
from kvx.models.decoder import forward
from kvx.models.model import Model
from kvx.models.progress import Hook, reporting
from kvx.models.replay import ReplayPlan, replay_states

if TYPE_CHECKING:
    from kvx.mappers.base import CacheMap

Window = tuple[int, int]  # first layer, and the one after the last
_shift = jax.jit(relative_shift)


def sweep_injection(
    source: Model,
    target: Model,
    mapper: CacheMap,
    items: Sequence[Item],
    *,
    starts: Sequence[int] | None = None,
    size: int | None = None,
    rule: str | None = None,
    batch_size: int = BATCH_SIZE,
    bootstrap: Bootstrap | None = None,
    data: Mapping[str, str] | None = None,
    progress: bool | Hook | None = True,
) -> Sweep:
    """Measure a replay over translated keys and values, for each layer where the injection may start.

    For each start the target replays every context (:func:`kvx.replay`) and then reads the item's continuation over
    the replayed cache. The propagated shift is that of the replay, at context tokens, in the layers from the start up;
    the last-state shift is that of the continuation's tokens (see :mod:`kvx.evaluation.shifts`); the loss is that of
    the continuation's tokens except the first.

    Args:
        source, target: models with tokenizers.
        mapper: a fitted map or a trained translator that does not read the target's own cache.
        items: passages, at least two, of different contexts; none of them may have been fitted on.
        starts: target layers where the injection starts, 0 to the number of layers (then no layer is injected and all
            is native); ``None``: every layer where a window fits.
        size: layers of a window; ``None``: from the start to the top.
        rule: alignment rule; ``None``: the one the map was fitted with.
        batch_size: items run together, at least 2.
        bootstrap: how intervals are drawn.
        data: further digests to embed, by name.
        progress: ``True`` draws bars with the time left, ``False`` is silent; or a function ``(what, done, total)``.

    Returns:
        The figures; see :meth:`Sweep.table` and :meth:`Sweep.to_json`.

    Raises:
        KvxError: items that are no passages or cannot be paired, a window beyond the target's layers, a map that reads
            the target's own cache, a model without tokenizer, or a map of another pair.

    Example:
        >>> import kvx
        >>> from kvx.evaluation.items import Item
        >>> from kvx.evaluation.sweep import sweep_injection
        >>> from kvx.models.random_model import byte_model
        >>> model = byte_model()
        >>> items = [Item("Bob lives in Oslo.", " He likes snow."), Item("Eva lives in Bonn.", " She likes rain.")]
        >>> found = sweep_injection(model, model, kvx.identity(), items, progress=False)
        >>> [(str(one), bool(one.items["propagated_shift"].max() < 1e-4)) for one in found.injections]
        [('layers 0-1', True), ('layer 1', True)]

    Reference: Mixture-of-Translators, arXiv 2607.28979.
    """
    started = time.perf_counter()
    windows = injection_windows(target.config, starts, size)
    _check(mapper, target, items)
    setup = _setup(source, target, mapper, rule)
    counts = _scored_tokens(setup, items)
    with reporting(progress, "injection sweep", "readings") as report:
        found = _measure(setup, items, counts, windows, batch_size, report)
    mean = round(np.mean([len(setup.target_tokenizer.encode(item.context, bos=False)) for item in items]))
    settings = _settings(setup, windows, batch_size)
    hashes = _hashes(setup, items, settings) | {f"data_{name}": value for name, value in (data or {}).items()}
    return Sweep(
        pair=" -> ".join(m.provenance.model if m.provenance else m.config.family for m in (source, target)),
        layers=target.config.num_layers,
        injections=tuple(
            Injection(*window, _flops(target.config, window, mean, setup.prefix_length), found[window[0]])
            for window in windows
        ),
        baselines={arm: found[arm] for arm in BASELINES},
        tokens=counts,
        contexts=len({item.context for item in items}),
        cost=map_cost(mapper, target, mean),
        hashes=hashes,
        settings=settings,
        seconds=time.perf_counter() - started,
        bootstrap=bootstrap or Bootstrap(),
    )


def injection_windows(
    config: ModelConfig, starts: Sequence[int] | None = None, size: int | None = None
) -> list[Window]:
    """Windows ``(start, stop)`` of target layers, by ascending start; ``(layers, layers)``: no layer.

    Args:
        config: of the target.
        starts, size: as for :func:`sweep_injection`.

    Raises:
        KvxError: no start, or a window beyond the model's layers.

    Example:
        >>> from kvx.evaluation.sweep import injection_windows
        >>> from kvx.models.config import tiny_config
        >>> config = tiny_config(num_layers=3)
        >>> injection_windows(config), injection_windows(config, size=2), injection_windows(config, [3, 1])
        ([(0, 3), (1, 3), (2, 3)], [(0, 2), (1, 3)], [(1, 3), (3, 3)])
    """
    layers = config.num_layers
    if size is not None and not 1 <= size <= layers:
        raise KvxError(f"the size of the window is {size}; expected 1 to the target's {layers} layers.")
    chosen = sorted(set(range(layers - (size or 1) + 1) if starts is None else starts))
    last = layers - (size or 1)
    bad = [start for start in chosen if not (0 <= start <= last or start == layers)]
    if bad or not chosen:
        window = f" for a window of {size}" if size else ""
        raise KvxError(
            f"injection starts {bad or 'are missing'}: expected layers from 0 to {last}{window}, since the target has "
            f"{layers} layers, or {layers} for no injection."
        )
    return [(start, layers if size is None or start == layers else start + size) for start in chosen]


def _check(mapper: CacheMap, target: Model, items: Sequence[Item]) -> None:
    """Refuse what cannot be swept."""
    check_replay(mapper, target, ReplayPlan())
    if not items or not all(isinstance(item, Item) for item in items):
        raise KvxError("an injection sweep needs passages (Item objects), at least two; see load_passages.")


def _scored_tokens(setup: Setup, items: Sequence[Item]) -> np.ndarray:
    """int ``[n]``: the tokens of each continuation but the first."""
    encoded = [setup.target_tokenizer.encode(item.continuation, bos=False) for item in items]
    check_scored(items, encoded)
    return np.array([len(one) - 1 for one in encoded])


def _settings(setup: Setup, windows: Sequence[Window], batch_size: int) -> dict[str, Any]:
    """What decides the figures, besides models, map and items."""
    return {
        "windows": [list(window) for window in windows],
        "rule": setup.rule,
        "batch_size": batch_size,
        "prefix_tokens": setup.prefix_length,
        "dtype": {role: str(getattr(setup, role).dtype) for role in ("source", "target")},
        "device": jax.devices()[0].device_kind,
    }


def _flops(config: ModelConfig, window: Window, tokens: int, prefix: int) -> int:
    """Operations of a replay; with an empty window, those of the native prefill that it is."""
    start, stop = window
    return (ReplayPlan(start, stop) if stop > start else ReplayPlan()).flops(config, tokens, prefix)


def _setup(source: Model, target: Model, mapper: CacheMap, rule: str | None) -> Setup:
    """Without controls; the prefix has no free slots, as a replay expects."""
    setup = scanned(prepare(source, target, mapper, rule=rule))
    prefix = setup.prefix and slice_slots(setup.prefix, 0, setup.prefix_length)
    return dataclasses.replace(setup, constant=None, random=None, prefix=prefix)


def _measure(
    setup: Setup,
    items: Sequence[Item],
    counts: np.ndarray,
    windows: Sequence[Window],
    batch_size: int,
    report: Hook,
) -> dict[str | int, Figures]:
    """Baseline or start -> figures of every item."""
    found: dict[str | int, Figures] = {}
    width = bucket_length(int(counts.max()) + 1)
    done, total = 0, len(items) * (len(BASELINES) + len(windows))
    for batch in setup.plan([item.context for item in items], batch_size):
        rows, real = list(batch.items[: batch.real]), batch.real
        for row, figures in _batch(setup, [items[i] for i in batch.items], batch, width, windows):
            into = found.setdefault(row, {name: np.zeros(len(items)) for name in figures})
            for name, values in figures.items():
                into[name][rows] = values[:real] / counts[rows] if name == "loss" else values[:real]
            done += real
            report(BASELINES[row] if isinstance(row, str) else f"from layer {row}", done, total)
    return found


def _batch(
    setup: Setup, items: Sequence[Item], batch: Batch, width: int, windows: Sequence[Window]
) -> Iterator[tuple[str | int, Figures]]:
    """Each baseline's and each start's figures ``[B]`` of one batch; the loss is a sum over tokens here."""
    contexts, target = [item.context for item in items], setup.target
    arms = build(setup, read(setup, contexts, batch), batch, 0, tuple(BASELINES)).target
    context = setup.target_tokenizer.encode_batch(contexts, bos=False, length=batch.length)
    boundary = boundary_tokens(setup.target_tokenizer, [item.continuation for item in items], width)
    native, own = _boundary(target, boundary, arms["native"])
    yield "native", native
    for arm in ("translated", "none"):
        yield arm, _boundary(target, boundary, arms[arm], own)[0]
    stream = replay_states(target, context, arms["native"], ReplayPlan())[1]
    for start, stop in windows:
        if start == stop:
            yield start, {"propagated_shift": np.zeros(len(items)), **native}
            continue
        cache, moved = replay_states(target, context, arms["translated"], ReplayPlan(start, stop))
        shift = _shift(moved[start + 1 :], stream[start + 1 :], jnp.asarray(context) >= 0).mean(axis=0)
        figures = _boundary(target, boundary, cache, own)[0]
        yield start, {"propagated_shift": np.asarray(shift, np.float64), **figures}


def _boundary(
    target: Model, boundary: np.ndarray, cache: KVCache, own: jax.Array | None = None
) -> tuple[Figures, jax.Array]:
    """Last-state shift from the ``own`` states (zero without) and loss of the boundary, and its last states."""
    cache = pad_to(cache, cache.groups[0].slots + boundary.shape[1])
    states = forward(target, jnp.asarray(boundary), cache).hidden
    shift = _shift(states, states if own is None else own, jnp.asarray(boundary) >= 0)
    loss = -logprobs(target, boundary, cache).sum(axis=1)
    return {"last_state_shift": np.asarray(shift, np.float64), "loss": loss}, states


def _hashes(setup: Setup, items: Sequence[Item], settings: Mapping[str, Any]) -> dict[str, str]:
    """Digests that say what was measured, on what, and how."""
    models = {role: getattr(setup, role).provenance for role in ("source", "target")}
    return {
        "mapper": setup.mapper.digest,
        **{role: facts.weights if facts else "" for role, facts in models.items()},
        "items": digest(items),
        "settings": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest(),
    }
