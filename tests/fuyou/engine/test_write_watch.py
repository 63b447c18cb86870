"""Drives that become slow: noticed once, by the share of them that a rank has."""

from types import SimpleNamespace
from typing import Any

import pytest

from fuyou.engine import write_watch
from fuyou.engine.write_watch import WriteWatch
from tests.helpers.profiles import PROFILE


def test_slow_writes_are_noticed_once_and_the_next_plan_counts_on_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank of two has half of 1 GB/s, and then a quarter of that."""
    saved: list[Any] = []
    monkeypatch.setattr(write_watch, "save", lambda profile, *_: saved.append(profile))
    share = SimpleNamespace(rank=0)
    context: Any = SimpleNamespace(
        job=SimpleNamespace(layout=SimpleNamespace(share=share)), workload=None, device=None
    )
    watch, second, each = WriteWatch(PROFILE, context, 2), 0.0, 10**9
    for step, rate in enumerate([0.5e9] * 4 + [0.125e9] * 2, 1):
        watch.step([(second, second + each / rate)], (0, step * each))
        second += each / rate
        watch.note([None, watch.slow_rate])
    assert not saved
    watch.step([(second, second + 8.0)], (0, 7 * each))
    assert watch.slow_rate == pytest.approx(0.125e9)
    share.rank = 1
    watch.note([None, watch.slow_rate])  # the first rank warns
    share.rank = 0
    with pytest.warns(UserWarning, match=r"drives of rank 1 write 0\.125 GB/s, and 0\.5 GB/s were planned"):
        watch.note([None, watch.slow_rate])
    watch.note([0.1e9, watch.slow_rate])
    assert [profile.write_bytes_per_second for profile in saved] == [pytest.approx(0.25e9)]
