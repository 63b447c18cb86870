"""Measurements that take a moment instead of half a second each."""

import pytest

from fuyou.profiling import blocks, drives, optimizer


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "REPEAT_SECONDS", 0.01)
    monkeypatch.setattr(drives, "DIRECTION_SECONDS", 0.1)
    monkeypatch.setattr(optimizer, "UPDATE_SECONDS", 0.02)
    monkeypatch.setattr(optimizer, "RECORD_ELEMENTS", 1 << 16)
