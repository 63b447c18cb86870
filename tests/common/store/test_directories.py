import errno
import json
import os
import shutil
import uuid
from collections import namedtuple

import pytest

from common.errors import UserError
from common.store import Layout, Store, StoreError, commit_manifest, load_manifest, remove
from common.store.directories import FORMAT, SMALL_FILES_BYTES
from common.store.manifest import read_sealed, write_sealed
from tests.common.store.conftest import memory, noise

MIB = 1 << 20


def a_layout(directories, nbytes=10_000):
    layout = Layout(directories)
    layout.allocate("weights.0", nbytes)
    layout.allocate("weights.1", nbytes)
    return layout


def snapshot(paths):
    return {
        str(file): file.read_bytes() for path in paths for file in sorted(path.rglob("*")) if file.is_file()
    }


def refused(paths, words, layout=None, kind=UserError, **options):
    """``create`` must fail with these words and leave everything as it was."""
    before = snapshot([path for path in paths if path.is_dir()])
    with pytest.raises(kind, match=words):
        Store.create(paths, layout or a_layout(len(paths)), **options)
    assert snapshot([path for path in paths if path.is_dir()]) == before


def test_files_are_preallocated_and_each_directory_says_who_it_is(make_directories):
    paths = make_directories(3)
    layout = a_layout(3, 30 * MIB)
    with Store.create(paths, layout) as store:
        for index, path in enumerate(paths):
            for name, nbytes in layout.file_bytes().items():
                status = (path / name).stat()
                assert status.st_size == nbytes
                assert status.st_blocks * 512 >= nbytes
            identity = read_sealed(path / "store.json")
            assert identity == {
                "format": FORMAT, "store": store.id, "index": index, "count": 3, "complete": True, "replaces": "",
                "layout": json.loads(json.dumps(layout.to_dict())),
            }  # fmt: skip
        assert uuid.UUID(store.id)


def test_directories_that_cannot_be_used(make_directories, tmp_path, monkeypatch):
    good, other = make_directories(2)
    refused([good, tmp_path / "missing"], r"no directory .*missing\. Make it \(mkdir -p")
    (tmp_path / "file").touch()
    refused([good, tmp_path / "file"], "not a directory")
    refused([good, tmp_path / "file" / "below"], "Not a directory")
    refused([good, good], "given twice")
    (tmp_path / "link").symlink_to(good)
    refused([good, tmp_path / "link"], "link and .* are the same directory")
    monkeypatch.setattr(os, "access", lambda path, mode: path != other)
    refused([good, other], "ssd1 is not writable")
    with pytest.raises(UserError, match="at least one directory"):
        Store.create([], a_layout(1))
    with pytest.raises(ValueError, match="for 2 directories, and 1"):
        Store.create([good], a_layout(2))


def test_an_existing_run_is_kept_unless_overwritten(make_directories):
    paths = make_directories(2)
    with Store.create(paths, a_layout(2)) as first:
        first.write(first.layout.extents("weights.0")[0], noise(10_000)).result()
    commit_manifest(paths[0], {"step": 3})
    refused(paths, "holds a run already: add resume=True to continue it or overwrite=True to replace it")
    smaller = Layout(2)
    smaller.allocate("weights.0", 10_000)
    with Store.create(paths, smaller, overwrite=True) as second:
        assert second.id != first.id
        assert load_manifest(paths[0]) is None  # it would have been the old run's
        assert not (paths[0] / "weights.1").exists()
        got = memory(10_000)
        second.read_unchecked(second.layout.extents("weights.0")[0], got).result()
        assert not got.any()


@pytest.mark.parametrize("name", ["weights.1", "manifest.json"])
def test_files_of_others_are_never_touched(make_directories, name):
    paths = make_directories(2)
    (paths[1] / name).write_text("mine")
    refused(paths, f"holds a file {name} that belongs to no run", overwrite=True)


Usage = namedtuple("Usage", "total used free")


def test_space_is_summed_per_file_system_and_checked_before_anything_is_written(
    make_directories, monkeypatch
):
    paths = make_directories(2)
    layout = a_layout(2, 50 * MIB)
    needed = 2 * (sum(layout.file_bytes().values()) + SMALL_FILES_BYTES)
    free = needed - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, free))
    refused(paths, rf"Too little space.*ssd0 and .*ssd1 together: .*{needed:,} bytes.*{free:,} bytes", layout)
    refused(paths, "Nothing was written", layout)
    free = needed
    Store.create(paths, layout).close()
    # What is replaced counts as free, to the byte.
    held = sum((path / name).stat().st_blocks * 512 for path in paths for name in layout.file_bytes())
    free = needed - held
    Store.create(paths, layout, overwrite=True).close()
    free = needed - held - 1
    refused(paths, "Too little space", layout, overwrite=True)


def test_space_on_separate_file_systems_is_checked_for_each(make_directories, monkeypatch):
    paths = make_directories(2)
    layout = a_layout(2)
    each = sum(layout.file_bytes().values()) + SMALL_FILES_BYTES
    real = type(paths[0]).stat

    def stat(path, **options):
        values = list(real(path, **options))
        values[2] += "ssd1" in str(path)  # st_dev
        return os.stat_result(values)

    monkeypatch.setattr(type(paths[0]), "stat", stat)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: Usage(0, 0, each if path == paths[0] else each - 1)
    )
    with pytest.raises(UserError, match=r"space for the store\. [^ ]*ssd1: ") as caught:
        Store.create(paths, layout)
    assert "ssd0" not in str(caught.value)
    assert not snapshot(paths)


@pytest.mark.parametrize("number", [28, 5])
@pytest.mark.parametrize("after", [0, 3])
def test_a_creation_that_fails_half_way_leaves_nothing(make_directories, monkeypatch, number, after):
    paths = make_directories(2)
    real, calls = os.posix_fallocate, []

    def fallocate(*arguments):
        calls.append(arguments)
        if len(calls) > after:
            raise OSError(number, os.strerror(number))
        real(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    refused(paths, r"preallocating .* of weights\.[01] in .*ssd[01] failed", kind=StoreError)
    monkeypatch.undo()
    Store.create(paths, a_layout(2)).close()


def test_a_file_system_without_preallocation_will_do(make_directories, monkeypatch):
    def fallocate(*arguments):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    with Store.create(make_directories(1), a_layout(1)) as store:
        store.write(store.layout.extents("weights.1")[0], noise(10_000)).result()


def test_what_a_crash_during_creation_left_is_replaced_without_asking(make_directories):
    paths = make_directories(2)
    Store.create(paths, a_layout(2)).close()
    identity = read_sealed(paths[1] / "store.json")
    write_sealed(paths[1] / "store.json", {**identity, "complete": False})
    (paths[0] / "store.json").unlink()
    for name in ("weights.0", "weights.1"):
        (paths[0] / name).unlink()
    with pytest.raises(UserError, match="never finished"):
        Store.open([paths[1]])
    Store.create(paths, a_layout(2, 99)).close()


def test_open_needs_every_directory_of_one_run_once(make_directories, tmp_path):
    first, second, third, other = make_directories(4)
    run = [first, second, third]
    Store.create(run, a_layout(3)).close()
    with pytest.raises(UserError, match=r"ssd3 holds no run to continue"):
        Store.open([first, second, third, other])
    Store.create([other], a_layout(1)).close()
    for paths, words in [
        ([first, third], r"striped over 3 directories, and number 2 is not among those given"),
        ([third], "number 1, 2 is not among"),
        ([first, second, other], "belong to different runs"),
        ([first, second, third, other], "belong to different runs"),
        ([first, second, third, second], "given twice"),
        ([first, second, third, tmp_path / "missing"], "no directory"),
    ]:
        with pytest.raises(UserError, match=words):
            Store.open(paths)
    shutil.copytree(second, tmp_path / "copy")
    with pytest.raises(UserError, match="one is a copy of the other"):
        Store.open([first, second, third, tmp_path / "copy"])
    with Store.open([third, first, tmp_path / "copy"]):
        pass  # moved to another place, it is the same run


def test_open_rejects_other_formats_and_damage(make_directories):
    paths = make_directories(2)
    Store.create(paths, a_layout(2)).close()
    path = paths[1] / "store.json"
    good = read_sealed(path)
    write_sealed(path, {**good, "format": FORMAT + 6})
    with pytest.raises(
        UserError, match=f"format {FORMAT + 6}, and this version of the program reads format {FORMAT}"
    ):
        Store.open(paths)
    path.write_text(path.read_text().replace(good["store"], "0" * 32))
    with pytest.raises(StoreError, match=r"store\.json is damaged"):
        Store.open(paths)
    write_sealed(path, good)
    commit_manifest(paths[0], {"step": 1})
    os.truncate(paths[1] / "weights.1", 4096)
    with pytest.raises(StoreError, match=r"weights\.1 has 4,096 bytes instead of 8,192"):
        Store.open(paths)
    (paths[1] / "weights.1").unlink()
    with pytest.raises(StoreError, match=r"weights\.1 is gone, and the run cannot be continued"):
        Store.open(paths)


def test_remove_deletes_the_store_and_nothing_else(make_directories):
    paths = make_directories(2)
    Store.create(paths, a_layout(2)).close()
    commit_manifest(paths[0], {"step": 1})
    (paths[1] / "notes.txt").write_text("mine")
    remove(paths)
    assert os.listdir(paths[0]) == []
    assert os.listdir(paths[1]) == ["notes.txt"]
    remove(paths)  # nothing there: nothing to do


def test_an_interrupted_removal_can_be_repeated(make_directories, monkeypatch):
    paths = make_directories(1)
    Store.create(paths, a_layout(1)).close()
    commit_manifest(paths[0], {"step": 1})
    real = type(paths[0]).unlink

    def unlink(path, missing_ok=False):
        if path.name == "weights.1":
            raise OSError(5, "Input/output error")
        real(path, missing_ok)

    monkeypatch.setattr(type(paths[0]), "unlink", unlink)
    with pytest.raises(StoreError, match=r"removal of weights\.1"):
        remove(paths)
    monkeypatch.undo()
    assert load_manifest(paths[0]) is None
    with pytest.raises(UserError, match=r"is no longer a run: .*its removal was interrupted.*overwrite=True"):
        Store.open(paths)
    remove(paths)
    assert os.listdir(paths[0]) == []


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_files_that_are_another_stores_too_are_read_but_not_written(make_directories, tmp_path, link):
    """As ``cp -l`` and ``cp -s`` make them: a continued run would change the original."""
    [path], copy = make_directories(1), tmp_path / "copy"
    layout = a_layout(1)
    Store.create([path], layout).close()
    shutil.copytree(path, copy)
    for name in layout.file_bytes():
        (copy / name).unlink()
        link(path / name, copy / name)
    with pytest.raises(UserError, match=r"change that run, too.*: cp (\S+) \S+\.new && mv \S+\.new \1\. "):
        Store.open([copy])
    with Store.open([copy], writes=False) as store:
        assert store.layout == layout
    for name in layout.file_bytes():
        shutil.copy(copy / name, copy / f"{name}.new")
        os.replace(copy / f"{name}.new", copy / name)
    Store.open([copy]).close()
    Store.open([path]).close()


def test_a_store_that_is_only_read_may_be_on_a_read_only_file_system(make_directories, monkeypatch):
    [path] = make_directories(1)
    Store.create([path], a_layout(1)).close()
    before, can_access = os.open, os.access

    def open_read_only(name, flags, *rest, **named):
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(name))
        return before(name, flags, *rest, **named)

    monkeypatch.setattr(os, "open", open_read_only)
    monkeypatch.setattr(os, "access", lambda name, mode: not mode & os.W_OK and can_access(name, mode))
    Store.open([path], writes=False).close()
    with pytest.raises(UserError, match="not writable"):
        Store.open([path])
