"""Translators: gradient-trained cache maps, one short file a method."""

from kvx.translators.base import Translator, untrained
from kvx.translators.fuser import fuser
from kvx.translators.fuser_torch import fuser_from_torch
from kvx.translators.latent_flow import beside, latent_flow
from kvx.translators.mixture import mixture, utilisation
from kvx.translators.residual import residual
from kvx.translators.trunks import trunk

__all__ = [
    "Translator",
    "beside",
    "fuser",
    "fuser_from_torch",
    "latent_flow",
    "mixture",
    "residual",
    "trunk",
    "untrained",
    "utilisation",
]
