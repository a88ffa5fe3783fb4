"""Evaluate a map: all arms on the same passages and questions, attention outputs, latency, verdict."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvx.cache.ops import slice_slots
from kvx.errors import KvxError
from kvx.evaluation.answering import MAX_NEW_TOKENS, measure_answers
from kvx.evaluation.answers import DEFAULT_TEMPLATE, Template, load_template
from kvx.evaluation.arms import Setup, tokenizer_of
from kvx.evaluation.flops import map_cost
from kvx.evaluation.items import Item, Question
from kvx.evaluation.latency import Latency, measure_latency
from kvx.evaluation.losses import measure_losses
from kvx.evaluation.metrics import Bootstrap
from kvx.evaluation.report import AnswerResult, Evaluation, LossResult
from kvx.evaluation.verdict import Thresholds, load_thresholds
from kvx.models.model import Model
from kvx.models.prefill import prefill
from kvx.models.progress import Hook, reporting
from kvx.models.replay import ReplayPlan

if TYPE_CHECKING:
    from kvx.evaluation.cosine import AttentionCosine
    from kvx.mappers.base import CacheMap

BATCH_SIZE = 8
STACK_BYTES = 2 << 30  # layer weights that may be held twice


def evaluate(
    source: Model,
    target: Model,
    mapper: CacheMap,
    items: Sequence[Item | Question],
    *,
    template: str | Path | Template = DEFAULT_TEMPLATE,
    rule: str | None = None,
    replay: ReplayPlan | None = None,
    batch_size: int = BATCH_SIZE,
    max_new_tokens: int = MAX_NEW_TOKENS,
    cosine: bool = True,
    latency: bool = True,
    seed: int = 0,
    thresholds: Thresholds | str | Path | None = None,
    bootstrap: Bootstrap | None = None,
    data: Mapping[str, str] | None = None,
    progress: bool | Hook | None = True,
) -> Evaluation:
    """Measure a map in all arms, on the same items, side by side.

    Passages (:class:`Item`) give losses, content carried, context benefit retained and attention-output cosines;
    questions (:class:`Question`) give answers. Either may be absent; a verdict ``use`` needs both.

    Args:
        source: model whose cache is handed over, with tokenizer.
        target: model that decodes, with tokenizer.
        mapper: the fitted map.
        items: passages and questions, mixed in any order; none of them may have been fitted on.
        template: how questions are put: a name, a JSON file, or a template.
        rule: alignment rule; ``None``: the one the map was fitted with.
        replay: let the target read each context again over the translated cache (:func:`kvx.replay`); the result then
            says that the target reads the context.
        batch_size: items run together, at least 2.
        max_new_tokens: tokens of an answer at most.
        cosine: compare attention outputs (needs passages).
        latency: time a warm and a cold hand-off at the median and the longest context.
        seed: of the random control.
        thresholds: bars of the verdict; ``None``: those that ship with kvx.
        bootstrap: how intervals are drawn.
        data: further digests to embed, by name (of the text, of what was fitted on).
        progress: ``True`` draws bars with the time left, ``False`` is silent; or a function ``(what, done, total)``.

    Returns:
        The result; print it, or see :meth:`Evaluation.table` and :meth:`Evaluation.to_json`.

    Raises:
        KvxError: no items, items of a single context, a model without tokenizer, or a map of another pair.

    Example:
        >>> import kvx
        >>> from kvx.evaluation.items import Item
        >>> from kvx.models.random_model import byte_model
        >>> source, target = byte_model(), byte_model(3, seed=1)
        >>> pairs = kvx.pairs(source, target, "Ann lives in Rome. " * 20, max_length=64)
        >>> mapper, _ = kvx.fit(kvx.mappers.full_head(layers=1, ridge=0.1), pairs, held_out=0, progress=False)
        >>> items = [Item("Bob lives in Oslo.", " He likes snow."), Item("Eva lives in Bonn.", " She likes rain.")]
        >>> result = kvx.evaluate(source, target, mapper, items, latency=False, progress=False)
        >>> sorted(result.to_json()["loss"])[:3], result.to_json()["verdict"]
        (['constant', 'mismatched', 'native'], None)
    """
    given: dict[str, Any] = {
        "template": template,
        "rule": rule,
        "batch_size": batch_size,
        "max_new_tokens": max_new_tokens,
        "cosine": cosine,
        "seed": seed,
        "thresholds": thresholds,
        "bootstrap": bootstrap,
        "data": data,
        "progress": progress,
    }
    return measure(source, target, [mapper], items, replays=[replay], latency=latency, **given)[0]


def measure(
    source: Model,
    target: Model,
    mappers: Sequence[CacheMap],
    items: Sequence[Item | Question],
    *,
    replays: Sequence[ReplayPlan | None] | None = None,
    template: str | Path | Template = DEFAULT_TEMPLATE,
    rule: str | None = None,
    batch_size: int = BATCH_SIZE,
    max_new_tokens: int = MAX_NEW_TOKENS,
    cosine: bool = True,
    latency: bool = True,
    seed: int = 0,
    thresholds: Thresholds | str | Path | None = None,
    bootstrap: Bootstrap | None = None,
    data: Mapping[str, str] | None = None,
    progress: bool | Hook | None = True,
) -> list[Evaluation]:
    """:func:`evaluate` for several maps of one pair: the first in all arms, the others in those that depend on the map.

    The arms without a map are run once. Controls (constant, random) and latency are the first map's. ``replays`` has a
    plan, or ``None``, for each map.

    Raises:
        KvxError: as :func:`evaluate`, or maps of other prefixes or alignment rules.
    """
    started = time.perf_counter()
    passages = [item for item in items if isinstance(item, Item)]
    questions = [item for item in items if isinstance(item, Question)]
    if len(passages) + len(questions) < len(items) or not items:
        raise KvxError("evaluate needs Item or Question objects, at least two; see kvx.evaluation.items for loaders.")
    template = template if isinstance(template, Template) else load_template(template)
    bars = thresholds if isinstance(thresholds, Thresholds) else load_thresholds(thresholds)
    plans = [None] * len(mappers) if replays is None else list(replays)
    setups = [
        prepare(source, target, mapper, rule=rule, seed=seed, replay=plan)
        for mapper, plan in zip(mappers, plans, strict=True)
    ]
    setup = setups[0]
    _check_alike(setups)
    batched = scanned(setup)
    several = [dataclasses.replace(one, source=batched.source, target=batched.target) for one in setups]
    settings = {
        "rule": setup.rule,
        "batch_size": batch_size,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "prefix_tokens": setup.prefix_length,
        "template": template.name,
        "dtype": {"source": str(source.dtype), "target": str(target.dtype)},
        "device": jax.devices()[0].device_kind,
    }
    clock = _Clock()
    losses: list[tuple[LossResult | None, AttentionCosine | None]] = [(None, None)] * len(setups)
    answers: list[AnswerResult | None] = [None] * len(setups)
    timing = None
    if passages:
        with clock("passages"), reporting(progress, "passages", "items") as report:
            told = _step(report, "all arms")
            losses[:] = measure_losses(several, passages, batch_size=batch_size, cosine=cosine, progress=told)
    if questions:
        with clock("questions"), reporting(progress, "questions", "items") as report:
            told = _step(report, "all arms")
            asked: dict[str, Any] = {"batch_size": batch_size, "max_new_tokens": max_new_tokens, "progress": told}
            answers[:] = measure_answers(several, questions, template, **asked)
    if latency:
        with clock("latency"), reporting(progress, "latency", "lengths") as report:
            timing = _latency(setup, passages, questions, template, _step(report, "warm and cold"))
    seconds = time.perf_counter() - started
    return [
        Evaluation(
            pair=f"{_name(source)} -> {_name(target)}",
            loss=loss,
            answer=answer,
            cosine=cosines,
            latency=timing if at == 0 else None,
            hashes=_hashes(setups[at], loss, answer, template, bars, settings | _told(plans[at]), data or {}),
            settings=settings | _told(plans[at]),
            seconds=seconds,
            phases=clock.seconds,
            thresholds=bars,
            bootstrap=bootstrap or Bootstrap(),
            cost=map_cost(mappers[at], target, replay=plans[at]),
        )
        for at, ((loss, cosines), answer) in enumerate(zip(losses, answers, strict=True))
    ]


def _check_alike(setups: Sequence[Setup]) -> None:
    """Refuse maps whose contexts would not stand at the same positions or be aligned alike."""
    first = setups[0]
    for at, other in enumerate(setups[1:], start=1):
        if other.rule != first.rule or other.prefix_length != first.prefix_length:
            raise KvxError(
                f"map {at} aligns by {other.rule!r} after a prefix of {other.prefix_length} tokens, the first one by "
                f"{first.rule!r} after {first.prefix_length}; compare maps that were fitted with the same rule and "
                "prefix, or pass rule=."
            )


def _told(plan: ReplayPlan | None) -> dict[str, Any]:
    """The replay, for the settings; nothing where there is none."""
    return {} if plan is None else {"replay": dataclasses.asdict(plan)}


def prepare(
    source: Model,
    target: Model,
    mapper: CacheMap,
    *,
    rule: str | None = None,
    seed: int = 0,
    replay: ReplayPlan | None = None,
) -> Setup:
    """The map, its controls and the prefix, checked against both models.

    Raises:
        KvxError: a model without tokenizer, a map fitted for other models, or a replay that cannot be.
    """
    from kvx.mappers.base import check_models

    tokenizer = tokenizer_of(target, "target")
    tokenizer_of(source, "source")
    check_models(mapper, source, target)
    prefix = mapper.prefix
    if prefix is None and tokenizer.prefix_ids:
        prefix = prefill(target, jnp.asarray([tokenizer.prefix_ids], jnp.int32), keep="all")
    if replay is not None:
        check_replay(mapper, target, replay)
        prefix = prefix and slice_slots(prefix, 0, int(prefix.next_position()[0]))
    key = jax.random.key(seed)
    return Setup(source, target, mapper, *_controls(mapper, key), key, prefix, rule or mapper.rule, replay)


def check_replay(mapper: CacheMap, target: Model, plan: ReplayPlan) -> None:
    """Refuse a replay over what the target has read already, or in layers that it has not.

    Raises:
        KvxError: either.
    """
    if mapper.reads_target:
        raise KvxError(
            f"{type(mapper.method).__name__} fuses with the target's own cache of the context, so a replay has nothing "
            "to correct; give a map that reads only the source."
        )
    plan.layers(target.config)


def scanned(setup: Setup) -> Setup:
    """The setup with stacked layers, where that costs little memory: batches run as fast and compile in a fifth of the
    time. Single sequences (latency) keep the models as they came."""
    models = {}
    for role in ("source", "target"):
        model = getattr(setup, role)
        size = sum(x.nbytes for x in jax.tree.leaves(model.params["layers"]))
        models[role] = model.stack() if not model.stacked and size <= STACK_BYTES else model
    return dataclasses.replace(setup, **models)


def _controls(mapper: CacheMap, key: jax.Array) -> tuple[CacheMap | None, CacheMap | None]:
    """Constant and random control of a map; ``None`` for a map without coefficients."""
    from kvx.mappers.controls import constant, random

    try:
        return constant(mapper), random(mapper, key)
    except KvxError:
        return None, None


class _Clock:
    """Seconds of each phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - start


def _step(report: Hook, what: str) -> Callable[[int, int], Any]:
    return lambda done, total: report(what, done, total)


def _latency(
    setup: Setup,
    passages: Sequence[Item],
    questions: Sequence[Question],
    template: Template,
    progress: Callable[[int, int], Any],
) -> Latency:
    """Latency at the median and the longest context that was evaluated."""
    contexts = sorted({x.context for x in passages} | {x.context for x in questions}, key=len)
    chosen = list(dict.fromkeys((contexts[len(contexts) // 2], contexts[-1])))
    boundary = template.boundary(questions[0].question) if questions else passages[0].continuation
    return measure_latency(setup, chosen, boundary, progress=progress)


def _name(model: Model) -> str:
    return model.provenance.model if model.provenance else model.config.family


def _hashes(
    setup: Setup,
    loss: LossResult | None,
    answer: AnswerResult | None,
    template: Template,
    bars: Thresholds,
    settings: Mapping[str, Any],
    data: Mapping[str, str],
) -> dict[str, str]:
    """Digests that say what was measured, on what, and how."""
    models = {role: getattr(setup, role).provenance for role in ("source", "target")}
    found = {
        "mapper": setup.mapper.digest,
        **{role: facts.weights if facts else "" for role, facts in models.items()},
        "source_tokenizer": setup.source_tokenizer.digest,
        "target_tokenizer": setup.target_tokenizer.digest,
        "items": loss.sha256 if loss else "",
        "questions": answer.sha256 if answer else "",
        "template": template.sha256 if answer else "",
        "thresholds": bars.sha256,
        "settings": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest(),
    }
    return {**found, **{f"data_{name}": value for name, value in data.items()}}
