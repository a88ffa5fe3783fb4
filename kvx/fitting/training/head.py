"""The LM head in a loss: only for scored tokens, block by block, with the gradient made while the logits exist."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from kvx.models.layers import lm_head
from kvx.models.model import Model
from kvx.typing import typed

if TYPE_CHECKING:
    from kvx.fitting.training.loss import TrainingLoss

LOGIT_BYTES = 1 << 26  # logits that exist at any one time


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def head_loss(
    loss: TrainingLoss, target: Model, hidden: Float[Array, "R M"], rows: dict[str, Array]
) -> tuple[Float32[Array, ""], dict[str, Array]]:
    """Weighted loss of R scored tokens through the LM head, block by block.

    The gradient with respect to ``hidden`` is made together with the loss while a block's logits exist, so the head is
    applied twice (once forward, once transposed) and no logits are kept.

    Args:
        loss: weights.
        target: whose head it is; gets no gradient.
        hidden: ``[R,M]`` of the student.
        rows: ``targets [R]``, ``share [R]`` and ``gain [R]`` (weights over their norms), ``teacher [R,M]`` or absent.

    Returns:
        The loss, and sums by term.
    """
    blocks = _blocks(target, {"hidden": hidden, **rows})
    return _summed(jax.lax.map(lambda block: _block_loss(block.pop("hidden"), block, target, loss), blocks))


def _forward(loss: TrainingLoss, target: Model, hidden: Array, rows: dict[str, Array]) -> Any:
    slope = jax.value_and_grad(_block_loss, has_aux=True)
    blocks = _blocks(target, {"hidden": hidden, **rows})
    made, slopes = jax.lax.map(lambda block: slope(block.pop("hidden"), block, target, loss), blocks)
    return _summed(made), slopes.reshape(-1, hidden.shape[1])[: hidden.shape[0]]


def _backward(loss: TrainingLoss, slopes: Array, cotangents: Any) -> tuple[None, Array, None]:
    return None, (slopes * cotangents[0].astype(slopes.dtype)), None


head_loss.defvjp(_forward, _backward)


def _summed(made: tuple[Array, dict[str, Array]]) -> tuple[Array, dict[str, Array]]:
    return made[0].sum(), {name: x.sum() for name, x in made[1].items()}


def _blocks(target: Model, rows: dict[str, Array]) -> dict[str, Array]:
    """Rows cut into blocks whose logits fit ``LOGIT_BYTES``; the last one is filled with rows of weight zero."""
    count = rows["targets"].shape[0]
    block = max(1, min(count, LOGIT_BYTES // (4 * target.config.vocab_size)))
    more = -count % block

    def cut(x: Array) -> Array:
        return jnp.pad(x, ((0, more), *((0, 0),) * (x.ndim - 1))).reshape(-1, block, *x.shape[1:])

    return {name: cut(x) for name, x in rows.items()}


def _block_loss(
    hidden: Array, rows: dict[str, Array], target: Model, loss: TrainingLoss
) -> tuple[Array, dict[str, Array]]:
    logits = lm_head(target.config, target.params, hidden)
    nats = cross_entropy(logits, rows["targets"])
    sums = {"suffix": (rows["share"] * nats).sum(), "gain": (rows["gain"] * nats).sum()}
    if "teacher" in rows:
        theirs = jax.lax.stop_gradient(lm_head(target.config, target.params, rows["teacher"]))
        sums["distil"] = (rows["share"] * divergence(logits, theirs, loss.temperature, loss.top_k)).sum()
    weights = {name: jnp.float32(getattr(loss, name)) for name in sums}
    return sum((weights[name] * x for name, x in sums.items()), start=jnp.zeros((), jnp.float32)), sums


def token_nats(target: Model, hidden: Float[Array, "B N M"], targets: Int[Array, "B N"]) -> Float32[Array, "B N"]:
    """Nats of each token, zero at padding (-1), without a gradient."""
    rows = {"hidden": hidden.reshape(-1, hidden.shape[-1]), "targets": jnp.maximum(targets, 0).reshape(-1)}

    def nats(block: dict[str, Array]) -> Array:
        return cross_entropy(lm_head(target.config, target.params, block["hidden"]), block["targets"])

    made = jax.lax.map(nats, _blocks(target, rows)).reshape(-1)[: targets.size]
    return jnp.where(targets >= 0, made.reshape(targets.shape), 0.0)


@typed
def cross_entropy(logits: Float32[Array, "R V"], targets: Int[Array, " R"]) -> Float32[Array, " R"]:
    """``-log softmax(logits)[target]`` in nats.

    Example:
        >>> import jax.numpy as jnp
        >>> from kvx.fitting.training.head import cross_entropy
        >>> cross_entropy(jnp.zeros((1, 8)), jnp.array([3])).round(4).tolist()  # log 8
        [2.0794...]
    """
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - chosen


@typed
def divergence(
    logits: Float32[Array, "R V"], teacher: Float32[Array, "R V"], temperature: float = 1.0, top_k: int | None = None
) -> Float32[Array, " R"]:
    """``T^2 sum_v p_v log(p_v / q_v)`` with ``p = softmax(teacher / T)``, ``q = softmax(logits / T)``, in nats.

    Args:
        logits: of the student; teacher: logits of the target with its own cache.
        temperature: T.
        top_k: the sum, and both softmaxes, run over the teacher's k likeliest tokens only; ``None``: over all.

    Example:
        >>> import jax.numpy as jnp
        >>> from kvx.fitting.training.head import divergence
        >>> x = jnp.array([[1.0, 2.0, 0.0]])
        >>> divergence(x, x).tolist(), float(divergence(-x, x, top_k=2)[0]) > 0
        ([0.0], True)

    Reference: Hinton et al., arXiv 1503.02531.
    """
    if top_k is not None and top_k < logits.shape[1]:
        teacher, chosen = jax.lax.top_k(teacher, top_k)
        logits = jnp.take_along_axis(logits, chosen, axis=1)
    scale = jnp.float32(1 / temperature)
    ours, theirs = (jax.nn.log_softmax(x * scale, axis=1) for x in (logits, teacher))
    return jnp.float32(temperature**2) * (jnp.exp(theirs) * (theirs - ours)).sum(axis=1)
