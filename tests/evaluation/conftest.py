"""A small random pair and its closed-form map, for tests of how things are measured rather than of what comes out."""

from __future__ import annotations

import pytest

import kvx
from kvx.mappers import CacheMap, full_head
from kvx.models.model import Model
from kvx.models.random_model import byte_model


@pytest.fixture(scope="module")
def models() -> tuple[Model, Model]:
    return byte_model(2), byte_model(3, seed=1)


@pytest.fixture(scope="module")
def mapper(models: tuple[Model, Model]) -> CacheMap:
    pairs = kvx.pairs(*models, "Ann lives in Rome. She likes snow. " * 20, max_length=64)
    return kvx.fit(full_head(layers=1, ridge=0.1), pairs, held_out=0, progress=False)[0]
