"""Learning rates over a run, and the optimizer that training uses unless given another."""

from __future__ import annotations

import optax

from kvx.errors import KvxError

LEARNING_RATE = 2e-4


def warmup_cosine(
    peak: float = LEARNING_RATE, *, steps: int, warmup: int | None = None, end: float = 0.1
) -> optax.Schedule:
    """A learning rate that rises linearly from zero to ``peak``, then falls along a half cosine to ``end * peak``.

    Args:
        peak: largest rate.
        steps: of the whole run.
        warmup: steps of the rise; ``None``: a twentieth of the run.
        end: share of the peak that is left in the end, 0 to 1.

    Returns:
        A function from the step to the rate.

    Raises:
        KvxError: a rate, share or number of steps out of range.

    Example:
        >>> from kvx.fitting.training.schedule import warmup_cosine
        >>> rate = warmup_cosine(1.0, steps=100, warmup=10, end=0.0)
        >>> [round(float(rate(step)), 2) for step in (0, 5, 10, 55, 100)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    warmup = min(max(steps // 20, 1), max(steps - 1, 0)) if warmup is None else warmup
    if peak <= 0 or not 0 <= end <= 1 or not 0 <= warmup < max(steps, 1):
        raise KvxError(
            f"a learning rate of {peak} with {warmup} warm-up steps of {steps}, falling to {end} of it, makes no "
            "schedule; expected a rate above zero, fewer warm-up steps than steps, and a share from 0 to 1."
        )
    return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, max(steps, warmup + 1), end * peak)


def adamw(
    learning_rate: float | optax.Schedule = LEARNING_RATE, *, weight_decay: float = 0.0, clip: float | None = 1.0
) -> optax.GradientTransformation:
    """AdamW after clipping the gradient's global norm.

    Args:
        learning_rate: a number, or a schedule such as :func:`warmup_cosine`.
        weight_decay: decoupled, per step and unit of the learning rate.
        clip: largest global norm; ``None``: unlimited.

    Returns:
        An optax optimizer; any other may be given to :func:`kvx.train` in its place.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from kvx.fitting.training.schedule import adamw
        >>> optimizer, w = adamw(0.1, clip=1.0), {"w": jnp.zeros(2)}
        >>> with jax.numpy_dtype_promotion("standard"):  # optax mixes types, which strict settings refuse
        ...     steps, _ = optimizer.update({"w": jnp.ones(2)}, optimizer.init(w), w)
        >>> steps["w"].round(3).tolist()
        [-0.1..., -0.1...]

    Reference: Loshchilov and Hutter, arXiv 1711.05101.
    """
    moved = optax.adamw(learning_rate, b2=0.99, weight_decay=weight_decay)
    return moved if clip is None else optax.chain(optax.clip_by_global_norm(clip), moved)
