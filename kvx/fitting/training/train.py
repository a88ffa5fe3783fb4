"""Train a translator: the source's caches streamed, the target frozen, the best held-out parameters kept."""

from __future__ import annotations

from pathlib import Path

import jax
import optax

from kvx.cache.provenance import digest_arrays
from kvx.errors import KvxError
from kvx.fitting.fit import fit
from kvx.fitting.pairs import Pairs
from kvx.fitting.training.data import TrainingData
from kvx.fitting.training.held_out import RATIOS, HeldOut, Scorer
from kvx.fitting.training.loss import TrainingLoss, check_depth, check_loss
from kvx.fitting.training.run import SAMPLE, Limits, Run
from kvx.fitting.training.schedule import adamw, warmup_cosine
from kvx.fitting.training.train_report import Log, TrainReport
from kvx.fitting.training.trainer import Trainer
from kvx.mappers.base import CacheMap, check_models
from kvx.mappers.full_head import full_head
from kvx.mappers.receiver import reads_receiver
from kvx.models.progress import Hook, reporting
from kvx.translators.base import Translator, untrained


def train(
    method: Translator,
    start: CacheMap | Pairs,
    data: TrainingData,
    *,
    held_out: TrainingData | None = None,
    scorer: Scorer | None = None,
    optimizer: optax.GradientTransformation | None = None,
    loss: TrainingLoss | None = None,
    steps: int = 1000,
    batch_size: int = 4,
    accumulate: int = 1,
    compute: str = "float32",
    kept: str = "float32",
    ema: float | None = None,
    evaluate_every: int = 50,
    patience: int | None = 5,
    select: tuple[str, ...] | None = None,
    minutes: float | None = None,
    folder: str | Path | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    seed: int = 0,
    tensorboard: bool = False,
    progress: bool | Hook | None = True,
) -> tuple[CacheMap, TrainReport]:
    """Train a translator from a closed-form start, through the frozen target's reading of what follows the context.

    Every step takes ``batch_size * accumulate`` examples in an order fixed by ``seed``, translates their source caches,
    lets the target read each suffix after its translated context, and moves the translator's parameters (float32)
    down the gradient of the loss. The target computes no logits but those of scored tokens, and each of its layers is
    computed again for the gradient.

    Args:
        method: settings, such as ``kvx.translators.residual(width=128)``.
        start: the fitted map to begin from; or pairs, to which a ``full_head`` map is fitted first (but for methods
            that read the target's own cache: they have no closed form to begin from).
        data: from :func:`kvx.training_data`; made with ``receiver=True`` for methods that read the target's own cache.
        held_out: data to judge on (``training_data(held_out=True)``), of other texts; ``None``: the last parameters are
            kept.
        scorer: further held-out figures of a map, such as ``kvx.evaluation.scorer.answer_scorer(...)``'s ``f1``.
        optimizer: of optax; ``None``: :func:`kvx.fitting.training.schedule.adamw` with :func:`warmup_cosine` over
            ``steps``.
        loss: weights of its terms; ``None``: those the data was made for.
        steps: moves of the optimizer, at most.
        batch_size: examples run together; accumulate: batches in one step. The step is the same for 2 x 4 as for 1 x 8.
        compute: ``"bfloat16"``: multiply the translator's matrices in that type; the target runs in its own.
        kept: dtype of the matrices of the returned map; ``"bfloat16"`` halves it.
        ema: decay of a moving average of the parameters, which is then judged and kept; ``None``: none.
        evaluate_every: steps between two held-out evaluations.
        patience: evaluations without a better score after which the run ends; ``None``: unlimited.
        select: held-out figures whose mean is the score (``"loss"`` counts negative). ``None``: content and retained,
            and ``f1`` where the scorer tells it; the loss where the right context hardly helps the target itself.
        minutes: wall time after which the run ends cleanly, evaluating a last time.
        folder: where ``metrics.jsonl`` and checkpoints are written; ``None``: nowhere.
        checkpoint_every: steps between two checkpoints; ``None``: as ``evaluate_every``.
        resume: go on from the folder's checkpoint, exactly as if the run had never stopped; start anew without one.
        seed: of the order of examples and of what is drawn.
        tensorboard: also write TensorBoard events (needs tensorboardX).
        progress: ``True`` shows a bar with the time left, ``False`` nothing; or a function ``(what, done, total)``.

    Returns:
        The best map, which :func:`kvx.translate`, :func:`kvx.save` and :func:`kvx.evaluate` take like any other, and
        the report.

    Raises:
        KvxError: settings out of range, data of other models or without what the loss needs, a folder with another
            run, or a step that is not finite.

    Example:
        >>> import kvx
        >>> from kvx.fitting.training.examples import Example
        >>> from kvx.models.random_model import byte_model
        >>> source, target = byte_model(1), byte_model(1, seed=1)
        >>> pairs = kvx.pairs(source, target, "Ann lives in Rome. " * 20, max_length=64)
        >>> mapper, _ = kvx.fit(kvx.mappers.full_head(layers=1, ridge=0.1), pairs, held_out=0, progress=False)
        >>> examples = [Example("Ann lives in Rome.", " She likes it."), Example("Bob lives in Oslo.", " It is cold.")]
        >>> data = kvx.training_data(source, target, examples, mapper, progress=False)
        >>> method = kvx.translators.residual(width=4)
        >>> translator, report = kvx.train(method, mapper, data, steps=2, batch_size=2, progress=False)
        >>> report.steps, report.examples, translator.method.width
        (2, 4, 4)

    Reference: suffix loss through the frozen target, as in Mixture-of-Translators, arXiv 2607.28979.
    """
    loss = check_loss(loss or data.loss)
    _check(data, loss, steps, batch_size, accumulate, (compute, kept), evaluate_every, ema)
    check_depth(loss, data.target.config)
    fused = reads_receiver(method)
    if isinstance(start, Pairs):
        start = start.unfitted() if fused else fit(full_head(), start, progress=progress)[0]
    check_models(start, data.source, data.target)
    if (start.rule, digest_arrays(start.prefix)) != (data.rule, data.facts["prefix"]):
        raise KvxError(
            "the data was read with another prefix or alignment rule than the start; make it with this start."
        )
    if fused and not all(d is None or d.holds("native") for d in (data, held_out)):
        raise KvxError(
            f"{method} reads the target's own cache of each context, which the data lacks; make training and held-out "
            "data with training_data(receiver=True)."
        )
    first = untrained(method, start, jax.random.key(seed), data.sample(SAMPLE, batch_size, fused=fused))
    moves = optimizer or adamw(warmup_cosine(steps=steps))
    trainer, trained = Trainer.create(first, moves, loss, compute=compute, kept=kept, ema=ema)
    del first
    judge = None if held_out is None else HeldOut.create(held_out, batch_size, scorer)
    facts = {
        "method": str(method),
        "loss": str(loss),
        "run": [batch_size, accumulate, compute, ema, seed, evaluate_every, patience],
        "start": start.digest,
        "data": data.digest,
        "held_out": None if held_out is None else held_out.digest,
    }
    home = None if folder is None else Path(folder)
    run = Run(trainer, data, judge, _selected(select, judge), facts, home, batch_size, accumulate, seed)
    run.begin(trained, resume)
    log = Log(home, int(run.state.step), tensorboard)
    limits = Limits(steps, minutes, evaluate_every, patience, checkpoint_every or evaluate_every)
    try:
        with reporting(progress, "training", "steps") as report:
            stopped = run.go(limits, log, report)
    finally:
        log.close()
    return run.finish(stopped)


def _check(
    data: TrainingData,
    loss: TrainingLoss,
    steps: int,
    batch_size: int,
    accumulate: int,
    types: tuple[str, str],
    evaluate_every: int,
    ema: float | None,
) -> None:
    if min(steps, batch_size, accumulate, evaluate_every) < 1:
        raise KvxError(
            f"steps {steps}, batch_size {batch_size}, accumulate {accumulate} and evaluate_every {evaluate_every} must "
            "be at least 1."
        )
    if not set(types) <= {"float32", "bfloat16"}:
        raise KvxError(f"compute and kept are {types}; expected 'float32' or 'bfloat16' for each.")
    if ema is not None and not 0 < ema < 1:
        raise KvxError(f"ema is {ema}; expected a decay above 0 and below 1, or None.")
    held = {name.split(".")[0] for table in data.suffixes.values() for name in table.columns}
    lacks = [
        name
        for name, wanted, there in (
            ("gain", loss.gain > 0, "native" in held),
            ("distil", loss.distil > 0, "hidden" in held),
            ("cache", loss.cache > 0, data.holds("native")),
            ("correction", loss.correction > 0, data.holds("native") and data.holds("tokens")),
            ("trajectory", loss.trajectory > 0, "trail" in held),
            ("sensitivity", loss.cache > 0 and loss.sensitivity, data.holds("sensitivity")),
        )
        if wanted and not there
    ]
    if lacks:
        raise KvxError(f"the data was made without what {', '.join(lacks)} needs; pass the same loss to training_data.")


def _selected(select: tuple[str, ...] | None, judge: HeldOut | None) -> tuple[str, ...]:
    if select is not None or judge is None:
        return select or ()
    return RATIOS if judge.informative else ("loss",)
