"""The part of ``kvx demo --train``: from the demo's closed form on, some minutes of training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvx.commands.remember import key_of, remembered_fit

if TYPE_CHECKING:
    from kvx.commands.common import Output
    from kvx.commands.demo import Demo
    from kvx.commands.demo_scene import Scene
    from kvx.fitting.training.loss import TrainingLoss
    from kvx.mappers.base import CacheMap
    from kvx.models.model import Model
    from kvx.translators.base import Translator

MAPPER = {"method": "low_rank", "rank": 1024, "layers": 15, "embeddings": 3, "batch_size": 16}  # what a trunk needs


def method_of(mapper: CacheMap, fast: bool) -> tuple[Translator, TrainingLoss]:
    """The translator that goes on from a mapper, and what it is trained for.

    A low-rank map gets a trunk, held to what the target makes of the suffix natively (both measured best between real
    models, see docs/results.md); any other a mixture with context correction.
    """
    import kvx
    from kvx.mappers.low_rank import LowRank

    if isinstance(mapper.method, LowRank):
        width = 16 if fast else 448
        return kvx.translators.trunk(blocks=1, width=width), kvx.TrainingLoss(trajectory=30.0)
    width = 16 if fast else 64
    return kvx.translators.mixture(experts=2, top=1, width=width), kvx.TrainingLoss(correction=1.0)


def trained(
    settings: Demo, source: Model, target: Model, mapper: CacheMap, scene: Scene, out: Output
) -> tuple[CacheMap, dict[str, Any]]:
    """The translator: kept from an earlier run, or trained now for ``--minutes`` at most, and kept."""
    import kvx
    from kvx.commands.demo_scene import examples_of
    from kvx.fitting.training.examples import digest_examples
    from kvx.fitting.training.schedule import adamw, warmup_cosine

    method, loss = method_of(mapper, settings.fast)
    steps = _steps(settings)
    ours, judged = examples_of(settings, scene)
    key = key_of("train", mapper.digest, str(method), str(loss), digest_examples(ours), steps, settings.minutes)

    def make() -> tuple[CacheMap, dict[str, Any]]:
        read: dict[str, Any] = {"batch_size": 8, "uniform": settings.minis, "dtype": "bfloat16"}
        out.say(f"reading {len(ours)} contexts to train on, and {len(judged)} to judge by")
        data = kvx.training_data(
            source, target, ours, mapper, loss=loss, progress=out.watch("reading what to train on"), **read
        )
        held_out = kvx.training_data(
            source, target, judged, mapper, held_out=True, progress=out.watch("reading what to judge by"), **read
        )
        out.say(f"training {method}: {steps} steps, {settings.minutes:g} minutes at most")
        made, report = kvx.train(
            method,
            mapper,
            data,
            held_out=held_out,
            optimizer=adamw(warmup_cosine(3e-3 if settings.minis else 2e-4, steps=steps)),
            steps=steps,
            batch_size=16 if settings.minis else 8,
            minutes=settings.minutes,
            ema=0.98,
            evaluate_every=max(steps // 4, 1),
            patience=2,
            progress=out.watch("training"),
        )
        out.progress.print(report)
        return made, report.to_json()

    made, report, old = remembered_fit(key, make, again=settings.again)
    told = f"{report['steps']} steps, {report['examples']:,} examples, {report['seconds']:.0f} s"
    out.say(f"{'kept from an earlier run: ' if old else ''}a translator trained for {told}")
    return made, report


def _steps(settings: Demo) -> int:
    if settings.fast:
        return 4
    return 500 if settings.minis else 60
