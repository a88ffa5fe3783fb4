"""``kvx train``: train a translator from a saved mapper, on texts and questions, and save the best of it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvx.commands.common import Outcome, Output, UsageError, jsonable, prepare_jax, require
from kvx.commands.eval import RESULT, models_of
from kvx.commands.fit import TextSettings
from kvx.commands.train_examples import examples_of
from kvx.errors import KvxError

if TYPE_CHECKING:
    from kvx.evaluation.items import Question
    from kvx.fitting.training.data import TrainingData
    from kvx.fitting.training.examples import Example
    from kvx.fitting.training.loss import TrainingLoss
    from kvx.fitting.training.train_report import TrainReport
    from kvx.mappers.base import CacheMap
    from kvx.models.model import Model
    from kvx.translators.base import Translator

REPORT = "training.json"  # beside the translator


@dataclasses.dataclass(frozen=True)
class LossSettings(TextSettings):
    """Weights of the loss; a term of weight zero is not computed."""

    suffix_weight: float = 1.0
    """Cross-entropy of what follows the context."""
    gain_weight: float = 0.0
    """The same, tokens weighted by how much the context helps the target with them."""
    distil_weight: float = 0.0
    """Divergence from what the target predicts with its own cache."""
    cache_weight: float = 0.0
    """Squared error to the target's own keys and values, relative to their variance."""
    sensitivity: bool = False
    """Weigh each key's and value's error by how strongly later queries read it."""
    temperature: float = 1.0
    """Of the divergence."""
    top_k: int | None = None
    """Tokens the divergence compares, likeliest first; None: all."""
    correction_weight: float = 0.0
    """Squared error of what the target makes when it reads the context again over translated keys and values."""
    trajectory_weight: float = 0.0
    """Squared error of what the target makes of the tokens after the context, to what it makes over its own cache."""
    injection: tuple[int, int] | None = None
    """First target layer that reads them in that replay, and the one after the last; None: the window, or all."""


@dataclasses.dataclass(frozen=True)
class MethodSettings(LossSettings):
    """Which translator is trained."""

    method: Literal["residual", "mixture", "trunk", "fuser", "latent_flow"] = "residual"
    """One network beside the mapper, several experts with a router, blocks on the shared state of a low_rank mapper, or
    what adds to the target's own cache."""
    width: int = 128
    """Channels inside the residual's network, each expert or each block, or of latent_flow's latent."""
    hidden: int = 1024
    """Channels of the fuser."""
    fused_layers: int | None = None
    """Target layers that latent_flow fuses, evenly spread; None: all."""
    span: int | None = None
    """Source tokens that latent_flow pools together; None: it reads what the alignment feeds each token."""
    frozen: bool = False
    """Leave the mapper's coefficients as they are and train what is beside them alone."""
    experts: int = 2
    """Experts of the mixture."""
    top: int | None = 1
    """Experts that translate a token; None: all, weighted by the router."""
    expert: Literal["mlp", "attention"] = "mlp"
    """An expert reads its own token only, or attends to the context's other tokens."""
    depth: int = 2
    """Stages of an attention expert."""
    heads: int = 16
    """Attention heads of an attention expert (they divide the width), or of each block of the trunk."""
    head_dim: int = 64
    """Channels of a head in the trunk."""
    blocks: int = 2
    """Blocks of the trunk; 0 trains its linear map alone."""
    window: tuple[int, int] | None = None
    """First channel (pair of layers at the same depth) with experts, and how many; None: all layers."""
    whole_context: bool = False
    """Attention experts read later tokens too, as published; a context can then not be extended."""
    balance: float = 0.01
    """Weight of the penalty on experts that translate more than others."""


@dataclasses.dataclass(frozen=True)
class Train(MethodSettings):
    """Settings of ``kvx train``."""

    mapper: Path | None = None
    """Folder of the saved mapper to start from. Required."""
    fit: Path | None = None
    """Config of kvx fit: when the mapper's folder is not there, it is fitted so on the text first, and saved there."""
    out: Path | None = None
    """Folder to save the translator in. Required."""
    source: str | None = None
    """Source model; None: where the mapper was fitted."""
    target: str | None = None
    """Target model; None: where the mapper was fitted."""
    text: Path | None = None
    """Passages: a UTF-8 file, or demo:passages; only the part that kvx eval never measures is used."""
    questions: Path | None = None
    """Questions to train on: JSON lines with question, answers and context, or demo:questions; measure on others."""
    cloze: int = 0
    """Questions made of each passage itself, a number, a name or a rare word blanked, at most."""
    max_passages: int | None = None
    """Passages, at most."""
    max_questions: int | None = None
    """Questions, at most."""
    judge_passages: int = 32
    """Passages set aside to choose the best parameters."""
    judge_questions: int = 32
    """Questions set aside, by their contexts, to choose the best parameters."""
    steps: int = 1000
    """Moves of the optimizer, at most."""
    minutes: float | None = None
    """Wall time of training, at most; it ends cleanly and keeps the best. None: unlimited."""
    batch_size: int = 4
    """Examples run together."""
    accumulate: int = 1
    """Batches in one step."""
    learning_rate: float = 2e-4
    """Largest learning rate: after a warm-up it falls along a cosine."""
    warmup: int | None = None
    """Steps of the warm-up; None: a twentieth of the run."""
    weight_decay: float = 0.0
    """Of AdamW."""
    clip: float = 1.0
    """Largest global norm of a gradient."""
    ema: float | None = None
    """Decay of a moving average of the parameters, which is then kept; None: none."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """Type of the translator's products in training."""
    kept: Literal["float32", "bfloat16"] = "float32"
    """Type of the matrices that are saved; bfloat16 halves the translator."""
    evaluate_every: int = 50
    """Steps between two judgements (and checkpoints)."""
    patience: int | None = 5
    """Judgements without a better score after which training ends; None: unlimited."""
    max_length: int = 512
    """Tokens in one context, at most; examples with longer ones are left out."""
    template: str = "two_examples"
    """How questions are put: a name, or a JSON file."""
    run: Path | None = None
    """Folder of checkpoints and metrics.jsonl; None: OUT.run."""
    resume: bool = False
    """Go on from the run's checkpoint."""
    store: Path | None = None
    """Folder of the source caches that are streamed; None: in memory."""
    cache_dtype: Literal["float32", "bfloat16"] | None = None
    """Type of these caches; None: the models' own."""
    tensorboard: bool = False
    """Also write TensorBoard events into the run's folder."""
    items: int = 0
    """Never-trained passages to measure all arms on in the end; 0: none."""
    test_questions: Path | None = None
    """Questions to measure all arms on in the end, of contexts that are not trained on, such as demo:squad_test."""
    max_test_questions: int | None = None
    """Of these, at most."""
    overwrite: bool = False
    """Replace a translator that is already saved there."""
    seed: int = 0
    """Of the order of examples and of what is drawn."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the models' weights and activations."""


def run(settings: Train, out: Output) -> Outcome:
    """Read the examples once, train, save the best translator and its report.

    Raises:
        KvxError: the mapper, a model or a file cannot be read, the output folder is taken, or nothing is to be read.
    """
    require(settings, "mapper", "out")
    if settings.text is None and settings.questions is None:
        raise UsageError("kvx train needs --text or --questions (or both), else there is nothing to train on.")
    folder = Path(str(settings.out))
    if folder.exists() and not settings.overwrite:
        raise KvxError(f"{folder} exists already; choose another --out, or pass --overwrite to replace it.")
    prepare_jax()
    import kvx

    started = time.perf_counter()
    _fit_first(settings, out)
    start = kvx.load(Path(str(settings.mapper)))
    source, target = models_of(start, settings.source, settings.target, settings.dtype)
    method, loss = method_of(settings), loss_of(settings, start)
    trained, judged, questions, hashes = examples_of(settings, target)
    data = _read(settings, method, source, target, start, trained, loss, out)
    held_out = _read(settings, method, source, target, start, judged, None, out) if judged else None
    made, report = _train(settings, method, start, data, held_out, questions, out)
    kvx.save(folder, made, overwrite=settings.overwrite)
    plain = {**report.to_json(), "hashes": hashes}
    (folder / REPORT).write_text(json.dumps(jsonable(plain), indent=1), encoding="utf-8")
    out.console.print(report)
    out.console.print(f"saved to {folder}; measure it with: kvx eval --mapper {folder} --text FILE", markup=False)
    figures = {
        "translator": str(folder),
        "report": report.to_json(),
        "hashes": {**hashes, "mapper": made.digest},
        "train_seconds": report.seconds,
        "artefact_bytes": made.size,
        **_measured(settings, source, target, made, folder, out),
    }
    return Outcome({**figures, "seconds": time.perf_counter() - started})


def _fit_first(settings: Train, out: Output) -> None:
    """Fit the mapper to start from where it is not there yet and the settings say how."""
    folder = Path(str(settings.mapper))
    if settings.fit is None or folder.exists():
        return
    from kvx.cli import from_yaml
    from kvx.commands import fit

    wanted = from_yaml(fit.Fit, settings.fit)
    if not isinstance(wanted, fit.Fit) or settings.text is None:
        raise UsageError("--fit fits the mapper on --text first, which is missing; give it, or a --mapper that exists.")
    given = {name: getattr(settings, name) for name in ("text", "context_tokens", "continuation_tokens", "test_share")}
    given |= {name: value for name in ("source", "target") if (value := getattr(settings, name)) is not None}
    out.say(f"{folder} is not there yet: fitting it first, as {settings.fit} says")
    fit.run(dataclasses.replace(wanted, out=folder, **given), out)


def method_of(settings: MethodSettings) -> Translator:
    """The translator that the settings describe.

    Raises:
        KvxError: settings out of range.
    """
    from kvx.translators import fuser, latent_flow, mixture, residual, trunk

    if settings.method == "fuser":
        return fuser(hidden=settings.hidden, inner=settings.hidden)
    if settings.method == "latent_flow":
        return latent_flow(width=settings.width, layers=settings.fused_layers, span=settings.span)
    if settings.method == "trunk":
        return trunk(**{name: getattr(settings, name) for name in ("blocks", "width", "heads", "head_dim")})
    if settings.method == "residual":
        return residual(width=settings.width, frozen=settings.frozen)
    names = ("experts", "top", "expert", "width", "depth", "heads", "window", "balance", "frozen")
    return mixture(causal=not settings.whole_context, **{name: getattr(settings, name) for name in names})


def loss_of(settings: Train, start: CacheMap) -> TrainingLoss:
    """The loss that the settings describe; a window of the mixture is where the correction injects by default."""
    from kvx.fitting.training.loss import TrainingLoss
    from kvx.translators.channels import injection

    inject = settings.injection
    if inject is None and settings.method == "mixture" and settings.correction_weight:
        inject = injection(settings.window, start.source.num_layers, start.target.num_layers)
    return TrainingLoss(
        suffix=settings.suffix_weight,
        gain=settings.gain_weight,
        distil=settings.distil_weight,
        cache=settings.cache_weight,
        correction=settings.correction_weight,
        trajectory=settings.trajectory_weight,
        injection=inject,
        temperature=settings.temperature,
        top_k=settings.top_k,
        sensitivity=settings.sensitivity,
    )


def _read(
    settings: Train,
    method: Translator,
    source: Model,
    target: Model,
    start: CacheMap,
    examples: Sequence[Example],
    loss: TrainingLoss | None,
    out: Output,
) -> TrainingData:
    """Examples as both models read them: to train on with a loss, to judge on without one."""
    import kvx
    from kvx.mappers.receiver import reads_receiver

    side = "judge" if loss is None else "train"
    data = kvx.training_data(
        source,
        target,
        examples,
        start,
        loss=loss,
        held_out=loss is None,
        receiver=reads_receiver(method),
        max_length=settings.max_length,
        batch_size=settings.batch_size,
        dtype=settings.cache_dtype,
        folder=None if settings.store is None else settings.store / side,
        progress=out.watch(f"reading what to {side} on"),
    )
    longer = data.facts["left_out"]
    told = f"; {longer} examples with contexts of more than {settings.max_length} tokens are left out" if longer else ""
    out.say(f"{side}: {data!r}{told}")
    return data


def _train(
    settings: Train,
    method: Translator,
    start: CacheMap,
    data: TrainingData,
    held_out: TrainingData | None,
    questions: Sequence[Question],
    out: Output,
) -> tuple[CacheMap, TrainReport]:
    import kvx
    from kvx.evaluation.scorer import answer_scorer
    from kvx.fitting.training.schedule import adamw, warmup_cosine

    scorer = None
    if len({question.context for question in questions}) > 1:
        scorer = answer_scorer(data.source, data.target, questions, template=settings.template)
    rate = warmup_cosine(settings.learning_rate, steps=settings.steps, warmup=settings.warmup)
    return kvx.train(
        method,
        start,
        data,
        held_out=held_out,
        scorer=scorer,
        optimizer=adamw(rate, weight_decay=settings.weight_decay, clip=settings.clip),
        steps=settings.steps,
        batch_size=settings.batch_size,
        accumulate=settings.accumulate,
        compute=settings.compute,
        kept=settings.kept,
        ema=settings.ema,
        evaluate_every=settings.evaluate_every,
        patience=settings.patience,
        minutes=settings.minutes,
        folder=settings.run or Path(f"{settings.out}.run"),
        resume=settings.resume,
        seed=settings.seed,
        tensorboard=settings.tensorboard,
        progress=out.watch("training"),
    )


def _measured(
    settings: Train, source: Model, target: Model, made: CacheMap, folder: Path, out: Output
) -> dict[str, Any]:
    """All arms on what was never trained on, when asked for; the result stays beside the translator."""
    if not settings.items and settings.test_questions is None:
        return {}
    import kvx
    from kvx.evaluation.items import load_passages, load_questions

    items: list[Any] = []
    if settings.items and settings.text is not None:
        items += load_passages(settings.text, target, **settings.cut).held_out[: settings.items]
    if settings.test_questions is not None:
        items += load_questions(settings.test_questions, settings.max_test_questions)
    result = kvx.evaluate(source, target, made, items, template=settings.template, progress=out.watch("measuring"))
    out.console.print(result.table())
    figures = result.to_json()
    (folder / RESULT).write_text(json.dumps(jsonable(figures), indent=1), encoding="utf-8")
    return figures
