"""More or fewer drives, at other places: the run continues bit for bit, and a crash on the way loses nothing."""

import os
import shutil
from collections import namedtuple
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from common.activity import watched_by
from common.errors import FinetuneError, UserError
from common.store import Store, StoreError, commit_manifest, load_manifest, remove
from common.store.checksums import ChecksummedExtent, ExtentChecksums
from common.store.store import verify
from common.units import format_bytes
from fuyou.checkpoint import resume, transfer
from fuyou.checkpoint.commits import TrainingState, sealed_records
from fuyou.checkpoint.resume import resume_run
from fuyou.checkpoint.run_files import RunFiles
from fuyou.checkpoint.shards import Drives
from fuyou.checkpoint.transfer import ShardLayout
from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.record import Precision
from fuyou.layout.record_sums import PARTS, sealed_name
from fuyou.layout.share import Share
from fuyou.model.open_model import OpenModel
from fuyou.runtime.ranks import Agreement
from tests.helpers.crash.drives import Fault
from tests.helpers.crash.points import Move, Reference, crash_move, move_reference
from tests.helpers.crash.runs import tiny_config


@pytest.fixture(
    scope="module", params=[Move((0, 1), (0, 1, 2)), Move((0, 1, 2), (1, 2))], ids=["more", "fewer"]
)
def moving(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Move, Reference]:
    return request.param, move_reference(tmp_path_factory.mktemp("moved") / "run", request.param)


@pytest.mark.slow
def test_a_crash_while_records_move_leaves_the_old_places_or_the_new_ones(
    moving: tuple[Move, Reference], tmp_path: Path
) -> None:
    move, expected = moving
    tear_down = expected.calls - 60  # where the manifests change places

    def attempt(number: int) -> bool:
        action, power = (("kill all", None), ("tear", number), ("kill all", number))[number % 3]
        return crash_move(
            tmp_path / str(number), move, Fault(number, action), expected, power, number % 2 == 0
        )

    points = [*range(3, tear_down, 61), *range(tear_down, expected.calls, 17)]
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(attempt, points))


STATE = TrainingState(7, 1, "", "model", "bf16", "torch.float32", random={"cpu": "abc"}, user={"row": 3})


@pytest.fixture(scope="module")
def layout() -> ModelLayout:
    return OpenModel(tiny_config(), Precision.named("bf16"), torch.device("cpu")).layout


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PIECE_ELEMENTS", 4096)


@pytest.fixture
def ssd(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"ssd{number}" for number in range(4)]
    for path in paths:
        path.mkdir()
    return paths


def make_run(ssd: list[Path], layout: ModelLayout) -> dict[str, bytes]:
    """A committed run of random records on ``ssd``. Returns their contents by name."""
    for path in ssd:
        (path / "run").mkdir(parents=True)
    shard = ShardLayout(layout, Share(), len(ssd), STATE.slot)
    contents, sealed, draw = {}, [], np.random.default_rng(5)
    with Store.create([path / "run" for path in ssd], shard.layout) as store:
        for record in layout.records:
            for part in PARTS:
                what, extent = sealed_name(record, part), shard.extent(record.index, part)
                data = draw.integers(0, 256, extent.nbytes, dtype=np.uint8)
                contents[what] = data.tobytes()
                sums = ExtentChecksums(extent, store.directories, what, shard.ends(record.index, part))
                store.write(extent, data, sums=sums).result()
                sealed.append(ChecksummedExtent(what, extent, sums.parts()))
        store.sync(shard.layout.file_bytes())
        state = replace(STATE, store=store.id, checksums=[each.to_dict() for each in sealed])
        commit_manifest(store.directories[0], state.to_dict())
    return contents


def on(ssd: Sequence[Path], leaving: Sequence[Path] = ()) -> Drives:
    return Drives([path / "run" for path in ssd], [path / "run" for path in leaving])


def opened(drives: Drives, layout: ModelLayout) -> RunFiles:
    return resume_run(drives, layout, STATE, Agreement(Share()), io="posix")


def contents_of(drives: Drives, layout: ModelLayout, step: int = 7) -> dict[str, bytearray]:
    files = opened(drives, layout)
    try:
        expected = replace(STATE, step=step, store=files.store.id, checksums=files.state.checksums)
        assert files.state == expected and len(files.store.directories) == len(drives.folders)
        contents = {}
        for each in sealed_records(files.store, files.state):
            contents[each.what] = bytearray(each.extent.nbytes)
            files.store.read_unchecked(each.extent, contents[each.what]).result()
        return contents
    finally:
        files.close()


def test_records_are_the_same_on_any_drives(ssd: list[Path], layout: ModelLayout) -> None:
    expected = make_run(ssd[:2], layout)
    before, [at, *after] = ssd[:2], [ssd[:3], ssd[1:3], ssd[3:], [ssd[3], ssd[0]], ssd]
    while True:
        leaving = [path for path in before if path not in at]
        assert contents_of(on(at, leaving), layout) == expected
        assert contents_of(on(at[::-1], leaving), layout) == expected  # now there is nothing to be moved
        assert [path for path in ssd if list(path.iterdir())] == sorted(at)
        files = sorted(path.name for path in (at[0] / "run").iterdir())
        assert [file for file in files if file != "manifest.json"] == ["store.json", "weights.0", "weights.1"]
        sizes = {file.name: file.stat() for file in (at[-1] / "run").glob("weights*")}
        assert all(status.st_blocks * 512 >= status.st_size for status in sizes.values()), (
            "a file lacks its space"
        )
        if not after:
            break
        before, [at, *after] = at, after


def test_a_drive_that_is_missing_is_reported_and_nothing_is_guessed(
    ssd: list[Path], layout: ModelLayout
) -> None:
    expected = make_run(ssd[:3], layout)
    for drives in (on(ssd[:2]), on(ssd[:2], [ssd[3]]), on([*ssd[:2], ssd[3]])):
        with pytest.raises(
            UserError, match=r"over 3 directories, and number 3 is not among .* with leave_ssd. If"
        ):
            opened(drives, layout)
    assert contents_of(on(ssd[:3]), layout) == expected


@pytest.fixture
def interrupted(ssd: list[Path], layout: ModelLayout, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The contents of a run that was killed while it moved from the first two drives to the third: both copies are
    whole."""
    expected = make_run(ssd[:2], layout)
    with monkeypatch.context() as killed:
        killed.setattr(resume._Resumption, "_clear", lambda self, chosen: len(chosen.replaced) and 1 / 0)
        with pytest.raises(ZeroDivisionError):
            opened(on(ssd[2:3], ssd[:2]), layout)
    return expected


def test_remains_of_a_run_that_has_moved_are_not_taken_for_a_run(
    interrupted: dict[str, bytes], ssd: list[Path], layout: ModelLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removal(folder: Path, **options: Any) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as killed:
        killed.setattr(resume, "remove_folder", removal)
        with pytest.raises(ZeroDivisionError):
            opened(on(ssd[2:3], ssd[:2]), layout)
    with pytest.raises(UserError, match=r"has moved: name the drives that it has moved to"):
        opened(on(ssd[:2]), layout)
    assert contents_of(on(ssd[2:3], ssd[:2]), layout) == interrupted
    assert not any(any(path.iterdir()) for path in ssd[:2])


@pytest.mark.parametrize("step", [7, 9])
def test_of_two_copies_the_newer_one_counts(
    step: int, interrupted: dict[str, bytes], ssd: list[Path], layout: ModelLayout
) -> None:
    """Who changed his mind, and continued on the old drives, has a successor that is older."""
    folder = ssd[0] / "run"
    content = load_manifest(folder)
    assert content is not None
    commit_manifest(folder, {**content, "step": step})
    assert contents_of(on(ssd[2:3], ssd[:2]), layout, step) == interrupted
    assert not any(any(path.iterdir()) for path in ssd[:2])


def test_a_run_that_was_being_overwritten_is_not_taken_for_one_that_lacks_a_drive(
    ssd: list[Path], layout: ModelLayout
) -> None:
    make_run(ssd[:3], layout)
    remove([ssd[0] / "run"])
    with pytest.raises(
        UserError, match=rf"{ssd[0]}/run holds no run to continue\. .* number 1 is not among those given"
    ):
        opened(on(ssd[:3]), layout)


def test_too_little_space_is_reported_before_anything_is_done(
    ssd: list[Path], layout: ModelLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both copies are there at once, with 1 MiB for the small files of each of three drives."""
    expected = make_run(ssd[:2], layout)
    needed = sum(ShardLayout(layout, Share(), 3, 1).layout.file_bytes().values()) * 3 + (3 << 20)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(needed - 1))
    message = f"Too little space to move the run, whose old copy stays .* together: .*{needed:,} bytes.*{needed - 1:,}"
    with pytest.raises(UserError, match=message):
        opened(on(ssd[:3]), layout)
    assert not list(ssd[2].iterdir()) and len(list((ssd[0] / "run").iterdir())) == 4
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(needed))
    told: list[str] = []
    watcher: Any = SimpleNamespace(began=lambda activity: told.append(activity.what), ended=lambda: None)
    with watched_by(watcher):
        assert contents_of(on(ssd[:3]), layout) == expected
    where = ", ".join(map(str, ssd[:3]))
    assert told == [f"moving the run: {format_bytes(needed - (3 << 20))} are copied to {where}"]


def test_a_copy_that_fails_leaves_nothing(
    ssd: list[Path], layout: ModelLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make_run(ssd[:2], layout)
    with monkeypatch.context() as failing:
        failing.setattr(
            resume, "check_extent", lambda *_: (_ for _ in ()).throw(StoreError("It is damaged."))
        )
        with pytest.raises(
            FinetuneError, match=r"does not return what was written to it; .* It is damaged\."
        ):
            opened(on(ssd[1:3], ssd[:1]), layout)
    assert [len(list(path.iterdir())) for path in ssd] == [1, 1, 0, 0]
    assert contents_of(on(ssd[:2]), layout) == expected


def test_what_belongs_to_no_run_is_not_removed(ssd: list[Path], layout: ModelLayout) -> None:
    make_run(ssd[:2], layout)
    (ssd[1] / "run" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"notes.txt does not belong to a run"):
        opened(on(ssd[1:3], ssd[:1]), layout)
    (ssd[1] / "run" / "notes.txt").unlink()
    make_run(ssd[2:3], layout)
    for drives in (on(ssd[:3]), on(ssd[2:3], ssd[:2])):
        with pytest.raises(UserError, match="holds another run than the one that continues here"):
            opened(drives, layout)
    contents_of(on(ssd[:2]), layout)
    contents_of(on(ssd[2:3]), layout)


def test_damage_is_detected_before_anything_is_given_up(ssd: list[Path], layout: ModelLayout) -> None:
    make_run(ssd[:2], layout)
    file = ssd[1] / "run" / "weights.1"
    with file.open("r+b") as damaged:
        damaged.seek(-8, os.SEEK_END)
        damaged.write(b"\0" * 8)
    with pytest.raises(StoreError, match=rf"is damaged: .*{file}.*finetune verify"):
        opened(on(ssd[:3]), layout)
    assert not list(ssd[2].iterdir())
    with Store.open([path / "run" for path in ssd[:2]]) as store:
        content = load_manifest(store.directories[0])
        assert content is not None
        _, damage = verify(store, sealed_records(store, TrainingState.from_dict(content)))
    assert len(damage) == 1


@pytest.mark.parametrize("what", ["embedding, parameters", "block 0, optimizer states"])
def test_damage_after_the_check_is_not_copied(
    what: str, ssd: list[Path], layout: ModelLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make_run(ssd[:2], layout)
    content = load_manifest(ssd[0] / "run")
    assert content is not None
    (entry,) = [
        entry for entry in map(ChecksummedExtent.from_dict, content["checksums"]) if entry.what == what
    ]
    file, original = ssd[0] / "run" / entry.extent.file, transfer.RecordTransfer.fill

    def flip() -> None:
        with file.open("r+b") as opened_file:
            opened_file.seek(entry.extent.offset + 200)
            byte = opened_file.read(1)[0]
            opened_file.seek(-1, os.SEEK_CUR)
            opened_file.write(bytes([byte ^ 1]))

    def fill_after_flip(mover: transfer.RecordTransfer, store: Store) -> list[ChecksummedExtent]:
        flip()
        return original(mover, store)

    with monkeypatch.context() as patched:
        patched.setattr(transfer.RecordTransfer, "fill", fill_after_flip)
        with pytest.raises(StoreError, match=f"{what} is damaged: .*{file} "):
            opened(on(ssd[:3]), layout)
    assert not list(ssd[2].iterdir())
    flip()
    assert contents_of(on(ssd[:3]), layout) == expected


def test_a_manifest_without_a_checksum_or_with_another_is_rejected(
    ssd: list[Path], layout: ModelLayout
) -> None:
    count = len(make_run(ssd[:2], layout))
    with Store.open([path / "run" for path in ssd[:2]]) as store:
        whole = load_manifest(store.directories[0])
        assert whole is not None
        first, second = whole["checksums"][:2]
        for listed, message in (
            (whole["checksums"][1:], f"of {count - 1} of the {count} parts"), ([], f"of 0 of the {count}"),
            ([*whole["checksums"], first], f"{count} of the {count} parts .* and 1 others"),
            ([{**first, "extent": second["extent"]}, *whole["checksums"][1:]], f"of {count - 1} of the {count}"),
            ([{**first, "sums": first["sums"][:1]}, *whole["checksums"][1:]], f"of {count - 1} of the {count}"),
            ([{**first, "extent": [[], {}, None, 1]}], f"of 0 of the {count}"),
        ):  # fmt: skip
            with pytest.raises(FinetuneError, match=message):
                sealed_records(store, TrainingState.from_dict({**whole, "checksums": listed}))
        assert len(sealed_records(store, TrainingState.from_dict(whole))) == count
