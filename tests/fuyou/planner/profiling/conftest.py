"""Measurements that take a moment instead of half a second each."""

import pytest

from fuyou.planner.profiling import blocks, measure


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "REPEAT_SECONDS", 0.01)
    monkeypatch.setattr(measure, "DIRECTION_SECONDS", 0.1)
    monkeypatch.setattr(measure, "WINDOW_SECONDS", 0.02)
    monkeypatch.setattr(measure, "UPDATED_ELEMENTS", 1 << 14)
