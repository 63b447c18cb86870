"""Clipping by speculation: the numbers of the in-memory loop, whenever it clips, and what it costs."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from fuyou.engine.runtime import Runtime
from fuyou.optimizer.clipping import ClipBy, ClipStatistics, clip_by_named, speculation_obstacle
from fuyou.schedule.tasks import Op, StepList
from tests.helpers.engines import (
    ONE_OF_EACH,
    OPTIONS,
    SCARCE,
    batches,
    check,
    compare,
    directories,
    engine,
    give_buffers,
    train,
)
from tests.helpers.twin import Twin, save_checkpoints

SPECULATION: dict[str, Any] = {"clip_by": "speculation"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoints(tmp_path_factory.mktemp("checkpoints"), ["llama", "gpt2"])  # untied, tied


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> list[StepList]:
    """All that engines have run."""
    seen: list[StepList] = []
    original = Runtime.submit

    def submit(self: Runtime, tasks: StepList) -> None:
        seen.append(tasks)
        original(self, tasks)

    monkeypatch.setattr(Runtime, "submit", submit)
    return seen


def moved(lists: list[StepList], op: Op) -> int:
    return sum(task.nbytes for tasks in lists for task in tasks.tasks if task.op is op)


@pytest.mark.parametrize(("dtype", "clip", "fraction"), [
    ("bf16", 1.2, 0.34), ("fp32", 0.5, 0.0),
], ids=["clipped in two steps of five, some deferred", "always clipped, fp32"])  # fmt: skip
def test_gradients_that_wait_on_ssd(
    dtype: str, clip: float, fraction: float, checkpoints: Path, tmp_path: Path, lists: list[StepList],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    give_buffers(monkeypatch, {**SCARCE, **ONE_OF_EACH, "host_non_block_gradients": 1})
    ssd = directories(tmp_path, 1)
    options = {"deferred_fraction": fraction, **SPECULATION}
    check(checkpoints / "llama", ssd, dtype=dtype, micro_batch=1, clip=clip, steps=5, **options)
    assert moved(lists, Op.GRADIENT_WRITE) > 0
    assert moved(lists, Op.GRADIENT_READ) > 0


def test_records_in_host_memory_and_a_break_after_a_clipped_step(
    checkpoints: Path, tmp_path: Path, lists: list[StepList]
) -> None:
    """Steps 1 and 4 of five are clipped; the run is closed after step 4, before its updates have been done again."""
    feed = batches(5, packed=True)
    twin = Twin(str(checkpoints / "gpt2"), bf16=True, max_grad_norm=1.5, **OPTIONS)
    expected = [twin.step(batch, 3) for batch in feed]
    drives = directories(tmp_path, 2)
    options = {"host_cache": None, "micro_batch": 3, "max_grad_norm": 1.5, **SPECULATION}
    with engine(checkpoints / "gpt2", drives, **options) as trained:
        assert len(trained.memory_plan.resident) == len(trained._run.layout.records)
        losses = train(trained, feed[:4])
    assert ClipStatistics.of_run(drive / "fuyou-run" for drive in drives) == ClipStatistics(2, 4)
    with engine(checkpoints / "gpt2", drives[::-1], resume=True, **options) as trained:
        assert trained.step_count == 4
        losses += train(trained, feed[4:])
        assert losses == expected
        compare(trained, twin)
        assert trained.io_bytes() == trained.planned_io_bytes()
    records = len(trained._run.layout.records)
    updates = Counter(task.step for tasks in lists for task in tasks.tasks if task.op is Op.UPDATE)
    assert updates == {1: 2 * records, 2: records, 3: records, 4: 2 * records, 5: records}


def test_nothing_is_kept_on_ssd_or_done_again_where_clipping_never_strikes(
    checkpoints: Path, tmp_path: Path, lists: list[StepList]
) -> None:
    check(
        checkpoints / "gpt2", directories(tmp_path, 1), dtype="bf16", micro_batch=2, clip=1e9, **SPECULATION
    )
    assert moved(lists, Op.GRADIENT_WRITE) == moved(lists, Op.GRADIENT_READ) == 0
    updates = [(task.step, task.record) for tasks in lists for task in tasks.tasks if task.op is Op.UPDATE]
    assert len(updates) == len(set(updates)) > 5


def test_what_is_in_the_way() -> None:
    assert speculation_obstacle(commit_every=1, ranks=1) is None
    for options, text in (({"commit_every": 2}, "--commit-every"), ({"ranks": 2}, "ranks")):
        why = speculation_obstacle(**{"commit_every": 1, "ranks": 1, **options})
        assert why is not None and text in why
    assert [clip_by_named(name) for name in ("auto", "deferral", "speculation")] == [None, *ClipBy]
    with pytest.raises(UserError, match="not 'guess'"):
        clip_by_named("guess")


def test_an_engine_rejects_what_cannot_be(checkpoints: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not possible"):
        engine(
            checkpoints / "llama", directories(tmp_path, 1), max_grad_norm=1.0, commit_every=2, **SPECULATION
        )


def test_how_often_it_is_expected_to_strike(tmp_path: Path) -> None:
    assert ClipStatistics().share == 1 / 8
    assert ClipStatistics(0, 992).share == 1 / 1000
    assert ClipStatistics(99, 92).share == 1.0
    assert ClipStatistics.of_run([tmp_path, tmp_path / "nowhere"]) == ClipStatistics()
    (tmp_path / "manifest.json").write_text(json.dumps({"step": 3}))  # not sealed, so not believed
    assert ClipStatistics.of_run([tmp_path]) == ClipStatistics()
