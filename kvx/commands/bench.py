"""``kvx bench models``: prefill and decode speed against transformers + torch, in one run on this machine."""

from __future__ import annotations

import dataclasses
from typing import Literal

import tyro

from kvx.commands.common import Common


@dataclasses.dataclass(frozen=True)
class Bench(Common):
    """Settings of ``kvx bench``."""

    what: tyro.conf.Positional[Literal["models"]] = "models"
    """What to time."""
