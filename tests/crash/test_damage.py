"""Flipped bits, failing and full drives: found and named, never trained on."""

import re
import time
from pathlib import Path

import pytest

from common.errors import FinetuneError
from common.store.checksums import PartSums, checksum
from fuyou.layout.record_sums import Part, RecordSums
from tests.helpers.crash.drives import Fault
from tests.helpers.crash.points import Reference, check, reference
from tests.helpers.crash.runs import Run, execute
from tests.helpers.flips import flip
from tests.helpers.small_engine import small_engine, train


def test_a_flipped_bit_is_named_and_never_trained_on(tmp_path: Path) -> None:
    with small_engine(tmp_path, lr=1e-3) as engine:
        train(engine, 1)
        engine.flush()
        sealed = engine._run.commits.sums.sealed(engine._run.commits.state.slot)
        names = [one.what for one in sealed]
    assert {"block 0, parameters", "block 2, optimizer states", "head, parameters"} <= set(names)
    victim = next(one for one in sealed if one.what == "block 1, optimizer states")
    file = tmp_path / "fuyou-run" / victim.extent.file
    # Nothing lies between what is checked
    assert sum(one.extent.nbytes for one in sealed) == file.stat().st_size
    flip(file, victim.extent.offset + 12345)
    named = rf"block 1, optimizer states is damaged: bytes .* of {re.escape(str(file))} "
    with small_engine(tmp_path, lr=1e-3, resume=True) as engine:
        with pytest.raises(FinetuneError, match=named):
            train(engine, 2)
        assert engine.committed_step == 1
    flip(file, victim.extent.offset + 12345)

    # Damage that a drive does while training.
    engine = small_engine(tmp_path, lr=1e-3, resume=True, host_cache=0)
    train(engine, 1)
    engine.flush()
    after = engine.committed_step
    flip(tmp_path / "fuyou-run" / f"weights.{engine._run.commits.state.slot}", victim.extent.offset + 12345)
    with pytest.raises(FinetuneError, match="block 1, optimizer states is damaged"):
        train(engine, 2)
    engine.close()
    assert engine.committed_step == after


def test_no_write_is_done_before_its_checksum_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_engine(tmp_path, lr=1e-3) as engine:
        sums: RecordSums = engine._run.commits.sums
        written: list[PartSums] = []

        def slow(record: int, part: Part, slot: int, sums: PartSums) -> None:
            time.sleep(0.1)
            written.append(sums)

        monkeypatch.setattr(sums, "written", slow)
        plane = engine._run.runtime.plane
        record = plane.buffers.layout.records[0]
        values = plane.buffers.host_parameters(record.kind, 0, record.parameter_nbytes)
        plane.stored.write_parameters(record, 1, values).result()
        assert [each.tolist() for each in written] == [[[checksum(values, 0)]]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return reference(Run(tmp_path_factory.mktemp("undisturbed") / "run", {"host_cache": 0}))


@pytest.mark.parametrize(("kind", "action"), [
    ("write", "eio"), ("write", "enospc"), ("read", "eio"), ("sync", "eio"), ("rename", "enospc"),
    ("allocate", "enospc"),
])  # fmt: skip
def test_a_drive_that_fails_is_reported_and_survived(
    kind: str, action: str, expected: Reference, tmp_path: Path
) -> None:
    """At the n-th call of a kind and ever after: one message that names it, nothing hangs, the run can continue."""
    at = {"write": 70, "read": 20, "sync": 26, "rename": 7, "allocate": 2}[kind]
    run = Run(tmp_path / "run", {"host_cache": 0}, fault=Fault(at, action, kind, forever=True))
    first = execute(run)
    assert first.status == 1 and first.expected_error, first.error
    assert {"eio": "Input/output error", "enospc": "No space left on device"}[action] in first.error
    if kind == "allocate":
        assert not list((tmp_path / "run").rglob("weights*"))
        return
    second = execute(Run(tmp_path / "run", {"host_cache": 0, "resume": True}))
    check(first, second, expected, {})


@pytest.mark.parametrize("kind", ["write", "read"])
def test_calls_that_stop_short_are_finished(kind: str, expected: Reference, tmp_path: Path) -> None:
    outcome = execute(Run(tmp_path / "run", {"host_cache": 0}, fault=Fault(1, "short", kind, forever=True)))
    assert outcome.status == 0, outcome.error
    assert outcome.final == expected.outcome.final
