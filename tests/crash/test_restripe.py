"""More or fewer drives, at other places: the run continues bit for bit, and a crash on the way loses nothing."""

import shutil
from collections import namedtuple
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from common.errors import FinetuneError, UserError
from common.store import Layout, Store, StoreError, commit_manifest, load_manifest, remove
from common.store import migration as succession
from common.store.checksums import ExtentChecksums
from common.store.verify import ChecksummedExtent, verify
from fuyou.checkpoint.commits import TrainingState, sealed_records
from fuyou.checkpoint.restripe import Drives, open_run
from tests.helpers.crash.drives import Fault
from tests.helpers.crash.points import Move, Reference, crash_move, move_reference


@pytest.fixture(scope="module", params=[Move((0, 1), (0, 1, 2)), Move((0, 1, 2), (1, 2))], ids=["more", "fewer"])
def moving(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Move, Reference]:
    return request.param, move_reference(tmp_path_factory.mktemp("moved") / "run", request.param)


@pytest.mark.slow
def test_a_crash_while_records_move_leaves_the_old_places_or_the_new_ones(
    moving: tuple[Move, Reference], tmp_path: Path
) -> None:
    move, expected = moving
    tear_down = expected.calls - 60  # where the manifests change places

    def attempt(number: int) -> bool:
        action, power = (("kill all", None), ("tear", number), ("kill all", number))[number % 3]
        return crash_move(tmp_path / str(number), move, Fault(number, action), expected, power, number % 2 == 0)

    points = [*range(3, tear_down, 61), *range(tear_down, expected.calls, 17)]
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(attempt, points))


STATE = TrainingState(7, 1, "", "model", "bf16", "fp32", 2)
SIZES = (5000, 9 << 20, 4096, 17 << 20)


def make_run(ssd: list[Path]) -> dict[str, bytes]:
    """A committed run of a few records on ``ssd``. Returns their contents by name."""
    for path in ssd:
        (path / "run").mkdir(parents=True)
    layout = Layout(len(ssd))
    places = [
        layout.allocate(file, nbytes) for file in ("weights.0", "weights.1", "weights.frozen") for nbytes in SIZES
    ]
    contents, sealed = {}, []
    with Store.create([path / "run" for path in ssd], layout, io="posix") as store:
        for index, place in enumerate(places[len(SIZES) :]):
            what, data = f"record {index}", np.random.default_rng(index).integers(0, 256, place.nbytes, dtype=np.uint8)
            contents[what] = data.tobytes()
            sums = ExtentChecksums(place, store.directories, what)
            store.write(place, data, sums=sums).result()
            sealed.append(ChecksummedExtent(what, place, sums.values))
        store.sync(layout.file_bytes())
        state = {**STATE.to_dict(), "store": store.id, "checksums": [one.to_dict() for one in sealed]}
        commit_manifest(store.directories[0], state)
    return contents


def load(store: Store) -> TrainingState:
    content = load_manifest(store.directories[0])
    assert content is not None and content["store"] == store.id
    return TrainingState.from_dict(content)


def on(ssd: list[Path], leaving: Sequence[Path] = ()) -> Drives:
    return Drives([path / "run" for path in ssd], [path / "run" for path in leaving])


def contents_of(drives: Drives) -> dict[str, bytearray]:
    lock, store, state = open_run(drives, load, io="posix")
    with lock, store:
        assert store.layout == store.layout.restriped(len(drives.folders)) and state.step == 7
        contents = {}
        for one in sealed_records(store, state):
            contents[one.what] = bytearray(one.extent.nbytes)
            store.read_now(one.extent, contents[one.what])
        return contents


@pytest.fixture
def ssd(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"ssd{number}" for number in range(4)]
    for path in paths:
        path.mkdir()
    return paths


def test_records_are_the_same_on_any_drives(ssd: list[Path]) -> None:
    expected = make_run(ssd[:2])
    before, [at, *after] = ssd[:2], [ssd[:3], ssd[1:3], ssd[3:], [ssd[3], ssd[0]], ssd]
    while True:
        leaving = [path for path in before if path not in at]
        assert contents_of(on(at, leaving)) == expected
        assert contents_of(on(at[::-1], leaving)) == expected  # now there is nothing to be moved
        assert [path for path in ssd if list(path.iterdir())] == sorted(at)
        files = sorted(path.name for path in (at[0] / "run").iterdir())
        assert files == ["manifest.json", "store.json", "weights.0", "weights.1", "weights.frozen"]
        sizes = {file.name: file.stat() for file in (at[-1] / "run").glob("weights*")}
        assert all(status.st_blocks * 512 >= status.st_size for status in sizes.values()), "a file lacks its space"
        if not after:
            break
        before, [at, *after] = at, after


def test_a_drive_that_is_not_there_is_told_and_nothing_is_guessed(ssd: list[Path]) -> None:
    expected = make_run(ssd[:3])
    for drives in (on(ssd[:2]), on(ssd[:2], [ssd[3]]), on([*ssd[:2], ssd[3]])):
        with pytest.raises(UserError, match=r"over 3 directories, and number 3 is not among .* with leave_ssd. If"):
            open_run(drives, load)
    assert contents_of(on(ssd[:3])) == expected


def test_remains_of_a_run_that_has_moved_say_where_it_is(ssd: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = make_run(ssd[:2])
    with monkeypatch.context() as killed:
        killed.setattr(succession, "remove_folder", lambda folder: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            open_run(on(ssd[2:3], ssd[:2]), load)
    with pytest.raises(UserError, match=rf"was moving .* and continues in {ssd[2]}/run\."):
        open_run(on(ssd[:2]), load)
    assert contents_of(on(ssd[2:3], ssd[:2])) == expected
    assert not any(any(path.iterdir()) for path in ssd[:2])


def test_a_run_that_was_being_overwritten_is_not_taken_for_one_that_lacks_a_drive(ssd: list[Path]) -> None:
    make_run(ssd[:3])
    remove([ssd[0] / "run"])
    with pytest.raises(
        UserError, match=rf"{ssd[0]}/run holds no run to continue\. .* number 1 is not among those given"
    ):
        open_run(on(ssd[:3]), load)


def test_too_little_space_is_told_before_anything_is_done(ssd: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots take 26 MiB and some pages, and so do the frozen records. While the new ones are written, both copies of
    the latter and the committed slot are there twice, with 1 MiB for the small files of each of three drives; what the
    other slot takes is given back: 2 x 26 + 3 - 26 = 29 MiB."""
    expected, free = make_run(ssd[:2]), 29 << 20

    def taken() -> int:
        return sum(file.stat().st_blocks * 512 for path in ssd for file in path.rglob("weights*"))

    usage, before = namedtuple("usage", "free"), taken()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(free + before - taken()))
    with pytest.raises(
        UserError, match=r"Too little space to move the run from 2 to 3 drives. .* together: 55.* 55.*free"
    ):
        open_run(on(ssd[:3]), load)
    assert not list(ssd[2].iterdir()) and len(list((ssd[0] / "run").iterdir())) == 5
    free += 200 << 10
    assert contents_of(on(ssd[:3])) == expected


def test_what_belongs_to_no_run_is_not_removed(ssd: list[Path]) -> None:
    make_run(ssd[:2])
    (ssd[1] / "run" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"notes.txt does not belong to a run"):
        open_run(on(ssd[:1], ssd[1:2]), load)
    (ssd[1] / "run" / "notes.txt").unlink()
    make_run(ssd[2:3])
    with pytest.raises(UserError, match="belong to different runs"):
        open_run(on(ssd[:3]), load)
    contents_of(on(ssd[:2]))
    contents_of(on(ssd[2:3]))


def test_damage_is_found_before_anything_is_given_up(ssd: list[Path]) -> None:
    expected = make_run(ssd[:2])
    file = ssd[1] / "run" / "weights.frozen"
    with file.open("r+b") as opened:
        opened.seek(8192)
        opened.write(b"\0" * 8)
    with pytest.raises(StoreError, match=f"record 5 is damaged: .*{file}"):
        open_run(on(ssd[:3]), load)
    assert not list(ssd[2].iterdir())
    with Store.open([path / "run" for path in ssd[:2]], io="posix") as store:
        _, damage = verify(store, sealed_records(store, load(store)))
    assert len(damage) == 1 and len(expected) == 8


def test_a_manifest_without_a_checksum_or_with_another_is_refused(ssd: list[Path]) -> None:
    make_run(ssd[:2])
    with Store.open([path / "run" for path in ssd[:2]], io="posix") as store:
        whole = load(store).to_dict()
        first, second = whole["checksums"][:2]
        for listed, message in (
            (whole["checksums"][1:], "of 7 of the 8 parts"), ([], "of 0 of the 8"),
            ([*whole["checksums"], first], "8 of the 8 parts .* and 1 others"),
            ([{**first, "extent": second["extent"]}, *whole["checksums"][1:]], "of 7 of the 8"),
            ([{**first, "sums": first["sums"][:1]}, *whole["checksums"][1:]], "of 7 of the 8"),
            ([{**first, "extent": [[], {}, None, 1]}], "of 0 of the 8"),
        ):  # fmt: skip
            with pytest.raises(FinetuneError, match=message):
                sealed_records(store, TrainingState.from_dict({**whole, "checksums": listed}))
        assert len(sealed_records(store, TrainingState.from_dict(whole))) == 8
