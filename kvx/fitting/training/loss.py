"""Losses of a translator: small pure functions of what the frozen target makes of a translated cache."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from kvx.cache.cache import KVCache
from kvx.cache.ops import slice_slots
from kvx.errors import KvxError
from kvx.fitting.training.batch import Suffix, TrainBatch
from kvx.fitting.training.head import head_loss
from kvx.fitting.training.trail import trail
from kvx.models.config import ModelConfig
from kvx.models.decoder import forward
from kvx.models.model import Model
from kvx.models.replay import ReplayPlan, replay
from kvx.typing import pytree

WEIGHTS = ("suffix", "gain", "distil", "cache", "correction", "trajectory")  # one for each term


@dataclasses.dataclass(frozen=True)
class TrainingLoss:
    """Weights of the terms of a loss; a term of weight zero is not computed.

    Attributes:
        suffix: cross-entropy of the scored suffix tokens, their mean.
        gain: the same, each token weighted by ``gain_floor + clip(gain, 0, gain_cap)``, where its gain is how much
            likelier (nats) the target finds it with its own cache than without the context.
        distil: Kullback-Leibler divergence from what the target predicts with its own cache.
        cache: mean squared error of keys and values to the target's own, relative to their variance; cheap, since the
            target need not run for it.
        correction: the same error of what the target makes in a replay over the translated cache, in the layers from
            the first injected one up (context correction); the replay runs in training only.
        trajectory: the same error of what the target makes of the suffix's tokens over the translated cache, to what it
            makes of them over its own, in the layers above the first.
        injection: first target layer that reads translated keys and values in that replay, and the one after the last;
            ``None``: all of them.
        gain_floor, gain_cap: see ``gain``.
        temperature: of both sides of ``distil``, whose weight is multiplied by its square.
        top_k: compare only the k likeliest tokens of the teacher, both sides normalised over them; ``None``: all.
        sensitivity: weigh each key's and value's error by its sensitivity in ``cache``.
        penalties: multiplier of what a translator adds of its own (a load balance); residual adds nothing.

    Example:
        >>> from kvx.fitting.training.loss import TrainingLoss
        >>> TrainingLoss(gain=0.5, distil=1.0).measured
        True
    """

    suffix: float = 1.0
    gain: float = 0.0
    distil: float = 0.0
    cache: float = 0.0
    correction: float = 0.0
    trajectory: float = 0.0
    injection: tuple[int, int] | None = None
    gain_floor: float = 0.1
    gain_cap: float = 4.0
    temperature: float = 1.0
    top_k: int | None = None
    sensitivity: bool = False
    penalties: float = 1.0

    @property
    def measured(self) -> bool:
        """Whether it needs the target's own losses with and without the context, or its hidden states."""
        return self.gain > 0 or self.distil > 0

    @property
    def scores(self) -> bool:
        """Whether scored tokens have to be predicted."""
        return self.suffix > 0 or self.gain > 0 or self.distil > 0

    @property
    def reads(self) -> bool:
        """Whether the target has to read the suffix."""
        return self.scores or self.trajectory > 0

    @property
    def compares(self) -> bool:
        """Whether it needs the target's own caches of the contexts."""
        return self.cache > 0 or self.correction > 0

    @property
    def plan(self) -> ReplayPlan:
        """The replay of the ``correction`` term."""
        return ReplayPlan() if self.injection is None else ReplayPlan(*self.injection)


def check_loss(loss: TrainingLoss) -> TrainingLoss:
    """Refuse weights that make no loss.

    Raises:
        KvxError: naming the setting that is out of range.
    """
    weights = {name: getattr(loss, name) for name in WEIGHTS}
    if min(weights.values()) < 0 or max(weights.values()) == 0:
        raise KvxError(f"the loss has weights {weights}; expected none below zero and at least one above.")
    if loss.temperature <= 0 or (loss.top_k is not None and loss.top_k < 1) or loss.gain_cap <= 0:
        raise KvxError(
            f"temperature {loss.temperature} and gain_cap {loss.gain_cap} must be above zero, top_k {loss.top_k} at "
            "least 1 or None."
        )
    return loss


def check_depth(loss: TrainingLoss, config: ModelConfig) -> None:
    """Refuse a loss that compares layers which the target has not.

    Raises:
        KvxError: an injection beyond the last layer, or a trajectory through a single one.
    """
    if loss.correction:
        loss.plan.layers(config)
    if loss.trajectory and config.num_layers < 2:
        raise KvxError(
            "the trajectory term compares the layers above the first; the target has none, so set trajectory to 0."
        )


@pytree
class Norms:
    """What the sums of a step are divided by, over all its batches: scored tokens, their gain weights, context
    tokens, batches, and suffix tokens."""

    tokens: Array
    gains: Array
    context: Array
    batches: Array
    suffix: Array


def norms_of(batch: TrainBatch, loss: TrainingLoss) -> Norms:
    """The share of one batch in the norms of its step."""
    real, weights = scored(batch.suffix), gain_weights(batch.suffix, loss)
    context = (batch.alignment.pos >= 0) & real.any(axis=1, keepdims=True)
    counts = (real.sum(), weights.sum(), context.sum(), 1.0, suffix_read(batch.suffix).sum())
    return Norms(*(jnp.asarray(x, jnp.float32) for x in counts))


def scored(suffix: Suffix) -> Bool[Array, "B N"]:
    """Which places of a suffix hold a scored token."""
    return suffix.targets >= 0


def suffix_read(suffix: Suffix) -> Bool[Array, "B U"]:
    """Which places of a suffix hold a token, in rows that do not only fill the batch."""
    return (suffix.tokens >= 0) & scored(suffix).any(axis=1, keepdims=True)


def gain_weights(suffix: Suffix, loss: TrainingLoss) -> Float32[Array, "B N"]:
    """Weight of each scored token in the gain-weighted term; zero at padding, and everywhere when it is off."""
    if not loss.gain or suffix.native is None or suffix.none is None:
        return jnp.zeros(suffix.targets.shape, jnp.float32)
    gain = (suffix.native - suffix.none).clip(0.0, loss.gain_cap)
    return jnp.where(scored(suffix), loss.gain_floor + gain, 0.0)


def total_loss(
    target: Model, moved: KVCache, batch: TrainBatch, norms: Norms, loss: TrainingLoss, context: KVCache | None = None
) -> tuple[Float32[Array, ""], dict[str, Array]]:
    """One batch's share of a step's loss, ``sum_i weight_i numerator_i / norm_i``, and of each of its terms.

    Args:
        target: the frozen target.
        moved: its translated cache, prefix included.
        batch: what is scored, and what it is compared with.
        norms: of the whole step, so that shares add up whatever the batches.
        loss: weights.
        context: the translated cache without the prefix, for the ``cache`` term.

    Returns:
        The share, and the shares of the single terms by name, unweighted.
    """
    terms: dict[str, Array] = {}
    total = jnp.zeros((), jnp.float32)
    read = forward(target, batch.suffix.tokens, moved, remat=True) if loss.reads else None
    if loss.scores and read is not None:
        rows = _rows(batch.suffix, norms, loss, predicting(read.hidden, batch.suffix))
        total, sums = head_loss(loss, target, rows.pop("hidden"), rows)
        terms |= {name: x for name, x in sums.items() if getattr(loss, name)}
    if loss.trajectory and read is not None:
        made = trail(batch.suffix.tokens, moved, read.cache)
        terms["trajectory"] = trajectory_error(made, batch) / jnp.maximum(norms.suffix, 1.0)
        total = total + jnp.float32(loss.trajectory) * terms["trajectory"]
    if loss.cache and context is not None:
        terms["cache"] = cache_error(context, batch, loss.sensitivity) / jnp.maximum(norms.context, 1.0)
        total = total + jnp.float32(loss.cache) * terms["cache"]
    if loss.correction:
        terms["correction"] = correction_error(target, moved, batch, loss.plan) / jnp.maximum(norms.context, 1.0)
        total = total + jnp.float32(loss.correction) * terms["correction"]
    return total, terms


def suffix_hidden(target: Model, suffix: Suffix, cache: KVCache) -> Float[Array, "B N M"]:
    """Hidden states that predict the scored tokens; each layer is computed again for the gradient."""
    return predicting(forward(target, suffix.tokens, cache, remat=True).hidden, suffix)


def predicting(hidden: Float[Array, "B U M"], suffix: Suffix) -> Float[Array, "B N M"]:
    """Those of the hidden states of a suffix that predict its scored tokens."""
    return jnp.take_along_axis(hidden, suffix.where[..., None], axis=1)


def _rows(suffix: Suffix, norms: Norms, loss: TrainingLoss, hidden: Array) -> dict[str, Array]:
    """Scored tokens of all rows side by side, with their shares in each term; padding has none."""
    real = scored(suffix)
    share = real.astype(jnp.float32) / jnp.maximum(norms.tokens, 1.0)
    rows = {
        "hidden": jnp.where(real[..., None], hidden, jnp.zeros((), hidden.dtype)),
        "targets": jnp.maximum(suffix.targets, 0),
        "share": share,
        "gain": gain_weights(suffix, loss) / jnp.maximum(norms.gains, 1e-6),
    }
    if loss.distil:
        if suffix.hidden is None:
            raise KvxError("distillation needs the target's hidden states; make the data with this loss.")
        rows["teacher"] = jnp.where(real[..., None], suffix.hidden, jnp.zeros((), suffix.hidden.dtype))
    return {name: x.reshape(-1, *x.shape[2:]) for name, x in rows.items()}


def correction_error(target: Model, moved: KVCache, batch: TrainBatch, plan: ReplayPlan) -> Float32[Array, ""]:
    """:func:`cache_error` of the replayed cache in the layers from the first injected one up.

    It compares trajectories, not translations: keys and values that the target itself makes of the context while it
    reads the translated ones, with those that it makes natively.

    Args:
        target: reads the context again; moved: translated cache, prefix included.
        batch: holds the context's tokens and the native cache; plan: where translated keys and values are read.

    Reference: context correction loss of Mixture-of-Translators, arXiv 2607.28979.
    """
    if batch.tokens is None:
        raise KvxError("the correction term needs the context's tokens; make the data with this loss.")
    again = replay(target, batch.tokens, moved, plan, remat=True)
    slots = again.groups[0].slots
    return cache_error(slice_slots(again, slots - batch.tokens.shape[1], slots), batch, False, plan.start)


def cache_error(context: KVCache, batch: TrainBatch, weighted: bool, first: int = 0) -> Float32[Array, ""]:
    """Sum over context tokens of the mean, over layers, heads, keys and values, of their relative squared errors.

    Each error is divided by the variance of the target's own keys (values) of its layer and head, and with
    ``weighted`` multiplied by its sensitivity.

    Args:
        context: translated cache of the context; batch: holds the native one, its variances and sensitivities.
        weighted: see above.
        first: layers below it do not count.
    """
    if batch.native is None or batch.variance is None or (weighted and batch.sensitivity is None):
        raise KvxError("the cache and correction terms need the target's own caches; make the data with this loss.")
    real = scored(batch.suffix).any(axis=1)[:, None] & (batch.alignment.pos >= 0)
    weights = batch.sensitivity if weighted else None
    return relative_error(context, batch.native, batch.variance, real, first, weights)


def trajectory_error(made: KVCache, batch: TrainBatch) -> Float32[Array, ""]:
    """Sum over suffix tokens of the mean relative squared error of the keys and values that the target makes of them.

    The first layer makes the same of a token whatever came before, so it does not count.

    Args:
        made: the trail of the suffix over the translated cache.
        batch: holds the one over the target's own cache, and its variances.
    """
    if batch.suffix.trail is None or batch.trail_variance is None:
        raise KvxError("the trajectory term needs the target's own trail of the suffix; make the data with this loss.")
    return relative_error(made, batch.suffix.trail, batch.trail_variance, suffix_read(batch.suffix), 1)


def relative_error(
    ours: KVCache,
    theirs: KVCache,
    variance: Float32[Array, "L 2 K"],
    real: Bool[Array, "B T"],
    first: int = 0,
    weights: Array | None = None,
) -> Float32[Array, ""]:
    """Sum over tokens of the mean, over layers, heads, keys and values, of squared differences of two caches.

    Args:
        ours, theirs: caches with the same tokens in the same slots, keys un-rotated.
        variance: what each squared difference is divided by.
        real: which slots count; whatever stands in the others has no influence.
        first: layers below it do not count.
        weights: float32 ``[L,B,K,T,2]`` of each key and value, or ``None``.
    """
    parts = []
    for layer in range(first, ours.num_layers):
        one, two = ours.layer(layer), theirs.layer(layer)
        for component, (x, y) in enumerate(((one.k, two.k), (one.v, two.v))):
            error = jnp.where(real[:, None, :, None], x.astype(jnp.float32) - y.astype(jnp.float32), 0.0)
            error = jnp.square(error).mean(axis=3) / variance[layer, component][None, :, None]
            if weights is not None:
                error = error * jnp.where(real[:, None], weights[layer, ..., component], 0.0)
            parts.append(error.mean(axis=1).sum())
    return jnp.stack(parts).mean()
