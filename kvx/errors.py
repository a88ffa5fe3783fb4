"""The one exception type that kvx raises for bad input."""

from __future__ import annotations


class KvxError(ValueError):
    """Bad input or an unmeetable request: one sentence naming what was wrong, what was expected and what to do."""
