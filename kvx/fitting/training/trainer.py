"""One step of training: shares of the gradient, batch by batch, then one move of the optimizer."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32

from kvx.cache.cache import KVCache
from kvx.errors import KvxError
from kvx.fitting.training.batch import TrainBatch
from kvx.fitting.training.data import TrainingData
from kvx.fitting.training.head import token_nats
from kvx.fitting.training.loss import Norms, TrainingLoss, norms_of, scored, suffix_hidden, total_loss
from kvx.fitting.training.partition import Named, Partition
from kvx.mappers.base import CacheMap, after_prefix, applied, context_of
from kvx.models.model import Model
from kvx.translators.base import Translator
from kvx.typing import pytree


@pytree
class TrainState:
    """Everything that a step changes.

    Attributes:
        step: int32, steps done.
        trained: float32 parameters by name.
        moments: the optimizer's state.
        ema: their exponential moving average, or ``None``.
        best: the parameters that scored best on held-out data; before any score, the first ones.
        rng: uint32 key data.
    """

    step: Array
    trained: Named
    moments: Any
    ema: Named | None
    best: Named
    rng: Array

    @property
    def current(self) -> Named:
        """What is judged and kept: the average where there is one."""
        return self.trained if self.ema is None else self.ema


@dataclasses.dataclass(frozen=True, eq=False)
class Trainer:
    """What stays the same during a run: the method, what is frozen, and how a step is made.

    Attributes:
        start: the untrained map, without its trained parameters; part: which these are; rest: the others.
        optimizer: of optax; loss: weights; compute: dtype of the trained matrices in products.
        kept: dtype of these matrices in the end.
        ema: decay of the moving average, or ``None``.
        report: how the closed form was fitted, which parameters lose on their way through JAX.
    """

    start: CacheMap
    part: Partition
    rest: Any
    optimizer: optax.GradientTransformation
    loss: TrainingLoss
    compute: str
    kept: str
    ema: float | None
    report: Any = None

    @property
    def method(self) -> Translator:
        """The translator."""
        return self.start.method  # type: ignore[no-any-return]

    @classmethod
    def create(
        cls,
        first: CacheMap,
        optimizer: optax.GradientTransformation,
        loss: TrainingLoss,
        *,
        compute: str = "float32",
        kept: str = "float32",
        ema: float | None = None,
    ) -> tuple[Trainer, Named]:
        """A trainer of an untrained map, and the parameters that it trains."""
        part = Partition.of(first.params, first.method.trainable(first.params))
        trained, rest = part.split(first.params)
        report = getattr(first.params, "report", None)
        bare = dataclasses.replace(first, params=None)
        return cls(bare, part, rest, optimizer, loss, compute, kept, ema, report), trained

    def first_state(self, trained: Named, seed: int) -> TrainState:
        """Before the first step."""
        own = {name: jnp.array(x) for name, x in trained.items()}
        average = None if self.ema is None else {name: jnp.array(x) for name, x in trained.items()}
        rng = jax.random.key_data(jax.random.key(seed))
        with _lenient():
            moments = self.optimizer.init(trained)
        return TrainState(jnp.zeros((), jnp.int32), trained, moments, average, own, rng)

    def map_of(self, trained: Named) -> CacheMap:
        """The map with these parameters."""
        return dataclasses.replace(self.start, params=self.part.join(trained, self.rest))

    def final(self, trained: Named) -> CacheMap:
        """The map with these parameters, matrices in the type they are kept in."""
        made = self.map_of(_cast(trained, self.kept))
        if self.report is None:
            return made
        return dataclasses.replace(made, params=dataclasses.replace(made.params, report=self.report))

    def step(self, state: TrainState, data: TrainingData, batches: Sequence[TrainBatch]) -> tuple[TrainState, dict]:
        """One step over one or more batches, whose shares add up to the gradient of all their examples together.

        Returns:
            The next state, and figures: terms of the loss, ``loss``, ``gradient`` (global norm).

        Raises:
            KvxError: a loss or gradient that is not finite; the state is then of no more use.
        """
        parts = [norms_of(batch, self.loss) for batch in batches]
        norms = jax.tree.map(lambda *xs: sum(xs[1:], start=xs[0]), *parts)
        slopes: Named | None = None
        figures: dict[str, Array] = {}
        for n, batch in enumerate(batches):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step), n)
            found, made = gradient(
                state.trained, self.rest, data.target, batch, data.prefix, norms, key, state.step, trainer=self.static
            )
            slopes = found if slopes is None else _add(slopes, found)
            figures = {k: figures[k] + x if k in figures else x for k, x in made.items()}
        after, norm = move(state, slopes, optimizer=self.optimizer, decay=self.ema)
        told = {name: float(x) for name, x in {**figures, "gradient": norm}.items()}
        if not all(x == x and abs(x) != float("inf") for x in told.values()):
            raise KvxError(
                f"step {int(after.step)} gave {told}, which is not finite; lower the learning rate, or resume from the "
                "last checkpoint with other settings."
            )
        return after, told

    @property
    def static(self) -> Static:
        """What a compiled step depends on."""
        return Static(self.method, self.part, self.loss, self.compute)


@dataclasses.dataclass(frozen=True)
class Static:
    """Hashable settings of a compiled step."""

    method: Any
    part: Partition
    loss: TrainingLoss
    compute: str


@functools.partial(jax.jit, static_argnames=("trainer",))
def gradient(
    trained: Named,
    rest: Any,
    target: Model,
    batch: TrainBatch,
    prefix: KVCache | None,
    norms: Norms,
    key: Array,
    step: Array | None = None,
    *,
    trainer: Static,
) -> tuple[Named, dict[str, Array]]:
    """One batch's share of the gradient with respect to the trained parameters, and of the loss and its terms."""

    def share(trained: Named) -> tuple[Array, dict[str, Array]]:
        params = trainer.part.join(_cast(trained, trainer.compute), rest)
        read = batch.source, batch.alignment
        context, extra = applied(
            trainer.method, params, *read, receiver=batch.native, prefix=prefix, rng=key, step=step
        )
        moved = after_prefix(prefix, context)
        total, terms = total_loss(target, moved, batch, norms, trainer.loss, context)
        for name, penalty in extra.items():
            terms[name] = penalty.astype(jnp.float32) / norms.batches
            total = total + jnp.float32(trainer.loss.penalties) * terms[name]
        return total, {"loss": total, **terms}

    return jax.grad(share, has_aux=True)(trained)


def _cast(trained: Named, compute: str) -> Named:
    """Matrices in the type of the products; biases and gates stay in float32."""
    matrix = lambda name, x: x.ndim >= 4 or name.endswith("weight")  # noqa: E731
    return {name: x.astype(compute) if matrix(name, x) else x for name, x in trained.items()}


@contextlib.contextmanager
def _lenient() -> Iterator[None]:
    """Optimizers of optax mix types and ranks, which a caller's strict settings would refuse."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@functools.partial(jax.jit, donate_argnums=(0,))
def _add(a: Named, b: Named) -> Named:
    return jax.tree.map(jnp.add, a, b)


@functools.partial(jax.jit, static_argnames=("optimizer", "decay"), donate_argnums=(0,))
def move(
    state: TrainState, slopes: Named, *, optimizer: optax.GradientTransformation, decay: float | None
) -> tuple[TrainState, Float32[Array, ""]]:
    """One move of the optimizer and of the average (whose decay grows to ``decay`` over the first steps)."""
    with _lenient():
        steps, moments = optimizer.update(slopes, state.moments, state.trained)
        trained = optax.apply_updates(state.trained, steps)
    average = None
    if decay is not None and state.ema is not None:
        count = state.step.astype(jnp.float32)
        keep = jnp.minimum(jnp.float32(decay), (1.0 + count) / (10.0 + count))
        average = jax.tree.map(lambda old, new: keep * old + (1 - keep) * new, state.ema, trained)
    after = dataclasses.replace(state, step=state.step + 1, trained=trained, moments=moments, ema=average)
    return after, jnp.sqrt(sum((jnp.square(x).sum() for x in jax.tree.leaves(slopes)), start=jnp.float32(0)))


@jax.jit
def example_nats(mapper: CacheMap, target: Model, batch: TrainBatch, prefix: KVCache | None) -> Float32[Array, "B 2"]:
    """Summed nats and number of the scored tokens of each example, over its translated cache."""
    read = batch.source, batch.alignment
    context = context_of(mapper.method, mapper.params, *read, receiver=batch.native, prefix=prefix)
    hidden = suffix_hidden(target, batch.suffix, after_prefix(prefix, context))
    nats = token_nats(target, hidden, batch.suffix.targets)
    return jnp.stack([nats.sum(axis=1), scored(batch.suffix).sum(axis=1).astype(jnp.float32)], axis=1)
