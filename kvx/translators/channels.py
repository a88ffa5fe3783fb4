"""Channels: which source layer stands for which target layer by depth, and windows of consecutive channels."""

from __future__ import annotations

from kvx.errors import KvxError

Window = tuple[int, int]  # first channel, number of channels


def channels(source_layers: int, target_layers: int) -> tuple[tuple[int, int], ...]:
    """Pairs of (source layer, target layer) at the same share of their models' depths.

    There are ``n = min(L_s, L_t)`` of them; channel i joins the layers that hold the depth ``(i + 1/2) / n`` of each
    model. Both columns rise strictly, so no layer is in two channels.

    Args:
        source_layers: L_s; target_layers: L_t.

    Returns:
        The pairs, from the bottom up.

    Raises:
        KvxError: a model without layers.

    Example:
        >>> from kvx.translators.channels import channels
        >>> channels(6, 3), channels(2, 3)
        (((1, 0), (3, 1), (5, 2)), ((0, 0), (1, 2)))

    Reference: depth-ratio pairing of Mixture-of-Translators, arXiv 2607.28979.
    """
    count = min(source_layers, target_layers)
    if count < 1:
        raise KvxError(f"{source_layers} source and {target_layers} target layers make no channel; expected some.")
    return tuple(
        ((2 * i + 1) * source_layers // (2 * count), (2 * i + 1) * target_layers // (2 * count)) for i in range(count)
    )


def window_layers(
    window: Window | None, source_layers: int, target_layers: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Source and target layers of a window of channels; ``None``: all layers of both models.

    Args:
        window: ``(start, size)`` in channels, or ``None``.
        source_layers, target_layers: of the models.

    Raises:
        KvxError: a window that reaches beyond the channels.

    Example:
        >>> from kvx.translators.channels import window_layers
        >>> window_layers((1, 2), 6, 3), window_layers(None, 1, 2)
        (((3, 5), (1, 2)), ((0,), (0, 1)))
    """
    if window is None:
        return tuple(range(source_layers)), tuple(range(target_layers))
    pairs = channels(source_layers, target_layers)
    start, size = window
    if start < 0 or size < 1 or start + size > len(pairs):
        raise KvxError(
            f"window {window} (start, size) does not fit into {len(pairs)} channels between {source_layers} source and "
            f"{target_layers} target layers."
        )
    chosen = pairs[start : start + size]
    return tuple(s for s, _ in chosen), tuple(t for _, t in chosen)


def injection(window: Window | None, source_layers: int, target_layers: int) -> tuple[int, int]:
    """First target layer of a window and the one after its last, as :class:`kvx.models.replay.ReplayPlan` takes them.

    Example:
        >>> from kvx.translators.channels import injection
        >>> injection((1, 2), 6, 3), injection(None, 6, 3)
        ((1, 3), (0, 3))
    """
    _, layers = window_layers(window, source_layers, target_layers)
    return layers[0], layers[-1] + 1
