from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kvx cache folder."""
    home = tmp_path / "cache"
    monkeypatch.setenv("KVX_CACHE", str(home))
    return home
