"""Translators: gradient-trained cache maps, one short file a method."""

from kvx.translators.base import Translator, untrained
from kvx.translators.mixture import mixture, utilisation
from kvx.translators.residual import residual

__all__ = ["Translator", "mixture", "residual", "untrained", "utilisation"]
