"""How far a translated cache moves the target's own stream: through depth while it replays, and in its last state.

Injecting early lets errors grow through depth; injecting late leaves few layers to correct the last state. The two
figures here show both, for each layer where an injection may start.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from kvx.cache.cache import KVCache
from kvx.models.decoder import forward
from kvx.models.model import Model
from kvx.models.replay import ReplayPlan, replay_states
from kvx.typing import typed


@typed
def relative_shift(
    changed: Float[Array, "*L B T M"], native: Float[Array, "*L B T M"], real: Bool[Array, "B T"]
) -> Float32[Array, "*L B"]:
    """Mean over tokens of ``|changed - native| / |native|``.

    Args:
        changed, native: hidden states.
        real: which tokens count; whatever stands at the others is not read.

    Returns:
        float32, one figure a row (and layer); 0 for a row without tokens.

    Example:
        >>> import jax.numpy as jnp
        >>> from kvx.evaluation.shifts import relative_shift
        >>> native = jnp.array([[[3.0, 4.0], [1.0, 0.0]]])
        >>> relative_shift(2 * native, native, jnp.array([[True, False]])).tolist()
        [1.0]
    """
    keep = real.reshape((1,) * (native.ndim - 3) + (*real.shape, 1))
    wide = [jnp.where(keep, x.astype(jnp.float32), 0.0) for x in (changed - native, native)]
    gap, size = (jnp.sqrt(jnp.square(x).sum(axis=-1)) for x in wide)
    counted = jnp.where(keep[..., 0], gap / jnp.maximum(size, 1e-30), 0.0).sum(axis=-1)
    return counted / jnp.maximum(real.sum(axis=-1), 1).astype(jnp.float32).reshape((1,) * (native.ndim - 3) + (-1,))


def propagated_shift(
    target: Model, tokens: Int[Array, "B T"] | np.ndarray, moved: KVCache, native: KVCache, plan: ReplayPlan
) -> Float32[Array, " B"]:
    """Propagated translation shift: how far a replay moves the residual stream of the context.

    ``mean over layers l >= start and context tokens of |h_l(moved) - h_l(native)| / |h_l(native)|``, h_l what leaves
    layer l when the target replays the context over the translated cache, and over its own.

    Args:
        target: the frozen target.
        tokens: int ``[B,T]`` of the context; -1 is padding.
        moved: translated cache of prefix and context; native: the target's own, with the same slots.
        plan: of the replay.

    Returns:
        float32 ``[B]``.

    Raises:
        KvxError: as :func:`kvx.replay`.

    Example:
        >>> import jax.numpy as jnp
        >>> import kvx
        >>> from kvx.evaluation.shifts import propagated_shift
        >>> from kvx.models.random_model import random_model
        >>> model, tokens = random_model(), jnp.array([[5, 6, 7]])
        >>> native = kvx.prefill(model, tokens, capacity=3)
        >>> float(propagated_shift(model, tokens, native, native, kvx.ReplayPlan(1))[0])
        0.0

    Reference: Mixture-of-Translators, arXiv 2607.28979.
    """
    pair = [replay_states(target, tokens, cache, plan)[1] for cache in (moved, native)]
    real = jnp.asarray(tokens)[:, :: plan.every] >= 0
    return jax.jit(relative_shift)(*(states[plan.start + 1 :] for states in pair), real).mean(axis=0)


def last_state_shift(
    target: Model, boundary: Int[Array, "B N"] | np.ndarray, changed: KVCache, native: KVCache
) -> Float32[Array, " B"]:
    """Last-state shift: how far the boundary's last hidden states move.

    ``mean over boundary tokens of |h(changed) - h(native)| / |h(native)|``, h what the LM head reads: the last layer's
    output after the final norm.

    Args:
        target: the frozen target.
        boundary: int ``[B,N]`` tokens that continue the context; -1 is padding.
        changed: translated cache, replayed or not; native: the target's own.

    Returns:
        float32 ``[B]``.

    Raises:
        KvxError: as :func:`kvx.prefill`.

    Example:
        >>> import jax.numpy as jnp
        >>> import kvx
        >>> from kvx.evaluation.shifts import last_state_shift
        >>> from kvx.models.random_model import random_model
        >>> model = random_model()
        >>> caches = [kvx.prefill(model, jnp.array([[5, 6, last]])) for last in (7, 8)]
        >>> float(last_state_shift(model, jnp.array([[9]]), *caches)[0]) > 0
        True

    Reference: Mixture-of-Translators, arXiv 2607.28979.
    """
    pair = [forward(target, boundary, cache).hidden for cache in (changed, native)]
    return jax.jit(relative_shift)(*pair, jnp.asarray(boundary) >= 0)
