"""Measurements that take a moment instead of half a second each."""

import pytest

from fuyou.planner.profiling import blocks, contention, drives, optimizer


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "REPEAT_SECONDS", 0.01)
    monkeypatch.setattr(drives, "DIRECTION_SECONDS", 0.1)
    monkeypatch.setattr(contention, "WINDOW_SECONDS", 0.02)
    monkeypatch.setattr(contention, "WARM_SECONDS", 0.01)
    monkeypatch.setattr(optimizer, "UPDATED_ELEMENTS", 1 << 14)
    monkeypatch.setattr(optimizer, "WRITTEN_ELEMENTS", 1 << 14)
