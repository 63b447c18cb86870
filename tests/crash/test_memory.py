"""Memory that is not there, in a control group: predicted where it can be, and survived where it cannot."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from capped import CannotCapError, CappedGroup, make_group, remove_group

from fuyou.optimizer.chunk_update import ChunkOptimizer
from tests.helpers.crash.runs import Run, execute

LIMIT = 256 << 20


@pytest.fixture
def group() -> Iterator[CappedGroup]:
    """Of ``LIMIT`` bytes; empty."""
    try:
        made = make_group(LIMIT)
    except CannotCapError as error:
        pytest.skip(f"no memory control group can be made here: {error}")
    yield made
    remove_group(made)


def join(path: Path) -> None:
    (path / "cgroup.procs").write_text(str(os.getpid()))


@dataclass(frozen=True)
class Capped(Run):
    """What both processes take from now on counts in a group."""

    group: Path = Path()

    def train(self, say: Callable[..., None]) -> None:
        join(self.group)
        super().train(say)


@dataclass(frozen=True)
class Starved(Run):
    """In its second step, the optimizer process takes more than a group has, which it has just got into."""

    group: Path = Path()

    def train(self, say: Callable[..., None]) -> None:
        whole, calls = ChunkOptimizer.update, 0

        def update(*arguments: Any, **named: Any) -> None:
            nonlocal calls
            calls += 1
            if named.get("update", arguments[-1]).step == 2:
                join(self.group)
                bytearray(b"x" * (2 * LIMIT))
            whole(*arguments, **named)

        ChunkOptimizer.update = update  # type: ignore[method-assign]
        super().train(say)


def test_a_run_in_a_group_takes_what_the_group_has(group: CappedGroup, tmp_path: Path) -> None:
    """Its budget is not given: the machine has hundreds of times as much as the group."""
    free, capped = (
        execute(Run(tmp_path / "free")),
        execute(Capped(tmp_path / "run", {"host_memory": None}, group=group.path)),
    )
    assert free.status == capped.status == 0, capped.error
    assert capped.final == free.final and capped.losses == free.losses
    assert group.out_of_memory_kills() == 0


def test_a_run_that_a_group_has_no_room_for_is_rejected_at_the_start(
    group: CappedGroup, tmp_path: Path
) -> None:
    options = {"host_memory": "4GiB", "batch_shape": (256, 4096), "micro_batch": 256}
    outcome = execute(Capped(tmp_path / "run", options, group=group.path))
    assert outcome.status == 1 and outcome.expected_error, outcome.error
    assert "more than this machine lets a process have, 256 MiB" in outcome.error
    assert not list((tmp_path / "run").rglob("weights*"))


def test_an_optimizer_process_that_the_kernel_kills_for_memory_loses_nothing(
    group: CappedGroup, tmp_path: Path
) -> None:
    expected = execute(Run(tmp_path / "whole"))
    starved = execute(Starved(tmp_path / "run", group=group.path))
    assert starved.status == 1 and starved.expected_error, starved.error
    assert "optimizer process was killed (signal 9)" in starved.error and "lower host_memory" in starved.error
    assert group.out_of_memory_kills() == 1
    resumed = execute(Run(tmp_path / "run", {"resume": True}))
    assert (resumed.final, resumed.losses[3]) == (expected.final, expected.losses[3])
