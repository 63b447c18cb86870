import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.store import StoreError, commit_manifest, load_manifest
from common.store.manifest import MANIFEST_FILE

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
contents = st.dictionaries(st.text(), json_values, max_size=5)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@settings(deadline=None)  # a busy drive is no failure
@given(content=contents)
def test_what_was_committed_is_loaded(directory, content):
    commit_manifest(directory, content)
    assert load_manifest(directory) == content
    assert os.listdir(directory) == [MANIFEST_FILE]


@settings(deadline=None)  # a busy drive is no failure
@given(data=st.data())
def test_damage_is_reported_and_never_believed(directory, data):
    content = {"step": 41, "loss": 1.25, "rng": [1, 2, 3], "name": "run"}
    commit_manifest(directory, content)
    path = directory / MANIFEST_FILE
    whole = bytearray(path.read_bytes())
    if data.draw(st.booleans(), label="truncate"):
        # Without the final line feed it is still whole
        damaged = whole[: data.draw(st.integers(0, len(whole) - 2))]
    else:
        damaged = bytearray(whole)
        damaged[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(damaged)
    try:
        outcome = load_manifest(directory)
    except StoreError as error:
        outcome = str(error)
    assert outcome == content or f"{path} is damaged" in outcome  # a changed blank does no harm


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", '{"content": 3, "blake2b": "x"}', "\xff", "[" * 100_000]
)
def test_other_files_of_that_name_are_damage(tmp_path, text):
    (tmp_path / MANIFEST_FILE).write_text(text, encoding="latin-1")
    with pytest.raises(StoreError, match="damaged"):
        load_manifest(tmp_path)


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_failed_commit_leaves_the_previous_one(tmp_path, monkeypatch, fails):
    commit_manifest(tmp_path, {"step": 1})

    def refuse(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, fails, refuse)
    with pytest.raises(StoreError, match="No space left"):
        commit_manifest(tmp_path, {"step": 2})
    monkeypatch.undo()
    assert load_manifest(tmp_path) == {"step": 1}
    assert os.listdir(tmp_path) == [MANIFEST_FILE]


def test_the_order_is_write_sync_rename_sync_directory(tmp_path, monkeypatch):
    commit_manifest(tmp_path, {"step": 1})
    events = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor):
        events.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        real_fsync(descriptor)

    def rename(old, new):
        assert load_manifest(tmp_path) == {"step": 1}
        events.append(("rename", os.path.basename(new)))
        real_replace(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    commit_manifest(tmp_path, {"step": 2})
    assert events == [("sync", MANIFEST_FILE + ".tmp"), ("rename", MANIFEST_FILE), ("sync", tmp_path.name)]
