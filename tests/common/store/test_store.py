"""The store against a twin that is nothing but byte arrays."""

import itertools
import os
import time
from concurrent.futures import wait

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.store import ALIGNMENT, Layout, Store, StoreError
from tests.common.store.conftest import memory, noise

MIB = 1 << 20
SIZES = [1, 199, 4095, 4096, 4097, 8192, 20_000, 5 * MIB + 13, 9 * MIB]
FILES = ["weights.0", "weights.1", "scratch"]


def make_store(paths, sizes=SIZES, files=FILES, **options):
    """A store with an extent of every size in every file, alternately; and those extents."""
    layout = Layout(len(paths))
    extents = [layout.allocate(file, nbytes) for nbytes, file in itertools.product(sizes, files)]
    return Store.create(paths, layout, **options), extents


class Twin:
    """A store and what it must hold."""

    def __init__(self, paths):
        self.store, self.extents = make_store(paths)
        self.bytes = {extent: np.zeros(extent.nbytes, np.uint8) for extent in self.extents}

    def check_all(self, store=None):
        for extent, expected in self.bytes.items():
            got = memory(extent.nbytes)
            (store or self.store).read_unchecked(extent, got).result()
            np.testing.assert_array_equal(got, expected)


@pytest.fixture(scope="module", params=[1, 2, 3, 5])
def twin(request, tmp_path_factory):
    paths = [tmp_path_factory.mktemp(f"ssd{index}") for index in range(request.param)]
    made = Twin(paths)
    yield made
    made.check_all()  # after all that the examples did, everything is where it should be
    made.store.close()


@st.composite
def operations(draw):
    """(extent, write?, offset, length, misalignment, seed), with ranges as fractions so that they fit any extent."""
    return draw(st.tuples(
        st.integers(0, len(SIZES) * len(FILES) - 1), st.booleans(), st.floats(0, 1), st.floats(0, 1),
        st.sampled_from([0, 0, 1, 64, 4095]), st.integers(0, 1000),
    ))  # fmt: skip


def a_range(extent, write, start, length):
    """A range that the rules allow: reads begin and end anywhere, writes cover whole pages or reach the end."""
    offset = min(int(start * extent.nbytes), extent.nbytes - 1)
    nbytes = max(1, int(length * (extent.nbytes - offset)))
    if write:
        offset -= offset % ALIGNMENT
        end = -(-(offset + nbytes) // ALIGNMENT) * ALIGNMENT
        nbytes = min(end, extent.nbytes) - offset
    return offset, nbytes


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(operations=st.lists(operations(), min_size=1, max_size=12))
def test_random_interleavings_equal_plain_byte_arrays(twin, operations):
    reads, writes = [], []
    touched = set()
    for index, write, start, length, misaligned_by, seed in operations:
        extent = twin.extents[index]
        if extent in touched:  # transfers of one extent are ordered by their caller
            wait([future for future, *_ in reads + writes])
        touched.add(extent)
        offset, nbytes = a_range(extent, write, start, length)
        buffer = memory(nbytes, misaligned_by)
        if write:
            buffer[:] = noise(nbytes, seed)
            twin.bytes[extent][offset : offset + nbytes] = buffer
            writes.append((twin.store.write(extent, buffer, offset, nbytes),))
        else:
            expected = twin.bytes[extent][offset : offset + nbytes].copy()
            reads.append((twin.store.read_unchecked(extent, buffer, offset, nbytes), buffer, expected))
    for (future,) in writes:
        future.result()
    for future, buffer, expected in reads:
        future.result()
        np.testing.assert_array_equal(buffer, expected)


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("directories", [1, 2, 3, 5])
def test_bytes_lie_where_striping_says_and_tails_are_zero(make_directories, directories, nbytes):
    paths = make_directories(directories)
    store, (before, extent, after) = make_store(paths, [nbytes], ["weights.0"] * 3)
    with store:
        data = noise(nbytes, seed=nbytes)
        for neighbour in (before, after):
            store.write(neighbour, np.full(nbytes, 255, np.uint8)).result()
        store.write(extent, data).result()
        store.sync(["weights.0"])
    raw = [np.fromfile(path / "weights.0", np.uint8) for path in paths]
    assert {file.nbytes for file in raw} == {store.layout.file_bytes()["weights.0"]}
    for stripe, start in enumerate(range(0, nbytes, extent.unit)):
        chunk = data[start : start + extent.unit]
        at = extent.offset + stripe // directories * extent.unit
        there = raw[stripe % directories][at:]
        np.testing.assert_array_equal(there[: chunk.nbytes], chunk)
        assert not there[chunk.nbytes : -(-chunk.nbytes // ALIGNMENT) * ALIGNMENT].any()


def test_requests_that_cannot_be_right_are_rejected_at_once(make_directories):
    store, (extent, _) = make_store(make_directories(2), [9000, 9000], ["weights.0"])
    foreign = Layout(2)
    for _ in range(3):
        beyond = foreign.allocate("weights.0", 9000)
    with store:
        for arguments, words in [
            ((extent, memory(8999)), "needs a buffer"),
            ((extent, memory(9000), 1), "cuts a page"),
            ((extent, memory(9000), 0, 4097), "cuts a page"),
            ((extent, memory(9000), -4096), "not inside"),
            ((extent, memory(9000), 0, 9001), "not inside"),
            ((extent, memory(9000), 0, 0), "not inside"),
            ((beyond, memory(9000)), "not in this store"),
            ((foreign.allocate("other", 1), memory(1)), "not in this store"),
            ((extent, np.zeros((100, 100), np.uint8)[:, :90]), "contiguous"),
        ]:
            with pytest.raises(ValueError, match=words):
                store.write(*arguments)
        for buffer, words in [
            (bytes(9000), "read-only"),
            ([0] * 9000, "bytes-like object is required"),
            (object(), "bytes-like object is required"),
        ]:
            with pytest.raises(TypeError, match=words):
                store.read_unchecked(extent, buffer)
        with pytest.raises(KeyError, match=r"weights\.7"):
            store.sync(["weights.7"])
        assert (store.bytes_read, store.bytes_written) == (0, 0)


def test_a_failed_write_is_done_only_when_its_other_pieces_are(make_directories, monkeypatch):
    store, (extent,) = make_store(make_directories(2), [16 * MIB], ["weights.0"], threads=1)
    real, active = os.pwritev, []

    def pwritev(descriptor, buffers, offset):
        if "/ssd1/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        active.append(offset)
        time.sleep(0.2)
        try:
            return real(descriptor, buffers, offset)
        finally:
            active.remove(offset)

    with store:
        monkeypatch.setattr(os, "pwritev", pwritev)
        future = store.write(extent, memory(16 * MIB))
        with pytest.raises(
            StoreError, match=r"4 MiB at offset 0 of weights\.0 in .*ssd1 failed: No space left"
        ):
            future.result()
        assert not active
        monkeypatch.undo()
        store.write(extent, memory(16 * MIB)).result()  # and the store continues working


def test_a_failed_read_lets_go_of_its_buffer(make_directories, monkeypatch):
    import mmap

    store, (extent,) = make_store(make_directories(1), [MIB], ["weights.0"])
    mapping = mmap.mmap(-1, MIB)

    def refuse(*arguments):
        raise OSError(5, "Input/output error")

    with store:
        monkeypatch.setattr(os, "preadv", refuse)
        future = store.read_unchecked(extent, mapping)
        assert isinstance(future.exception(), StoreError)
        assert "failing" in str(future.exception())
        mapping.close()  # BufferError if anything still held it


def test_sync_reaches_every_file_in_every_directory_and_reports_failure(make_directories, monkeypatch):
    paths = make_directories(3)
    store, _ = make_store(paths, [1])
    synced, real = [], os.fdatasync

    def fdatasync(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    with store:
        monkeypatch.setattr(os, "fdatasync", fdatasync)
        store.sync(name for name in ("weights.0", "scratch"))
        assert sorted(synced) == sorted(
            str(path / name) for path in paths for name in ("weights.0", "scratch")
        )
        store.sync([])
        assert len(synced) == 6

        def refuse(descriptor):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "fdatasync", refuse)
        with pytest.raises(StoreError, match=r"syncing of weights\.1 .* failing"):
            store.sync(["weights.1"])


def test_close_waits_for_what_is_running_and_may_be_repeated(make_directories):
    store, (extent,) = make_store(make_directories(2), [9 * MIB], ["weights.0"])
    descriptors = len(os.listdir("/proc/self/fd"))
    data = memory(9 * MIB)
    data[:] = noise(9 * MIB)
    future = store.write(extent, data)
    store.close()
    assert future.done()
    assert future.exception() is None
    store.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors - 2
    for call in (
        lambda: store.read_unchecked(extent, data),
        lambda: store.write(extent, data),
        lambda: store.sync(["weights.0"]),
    ):
        with pytest.raises(StoreError, match="closed"):
            call()


@pytest.mark.parametrize("what", ["deleted or moved", "replaced by another file"])
def test_a_file_that_is_gone_is_noticed_before_a_commit(tmp_path, what):
    """Writes to it succeed, and are lost when it is closed."""
    store, _ = make_store([tmp_path], [4096], ["weights.0"])
    with store:
        store.sync(["weights.0"])
        (tmp_path / "weights.0").rename(tmp_path / "elsewhere")
        if what.startswith("replaced"):
            (tmp_path / "weights.0").write_bytes(bytes(4096))
        with pytest.raises(StoreError, match=f"weights.0 was {what} while the run was writing to it"):
            store.sync(["weights.0"])


def test_a_store_without_its_identity_is_not_committed(tmp_path):
    store, _ = make_store([tmp_path], [4096], ["weights.0"])
    with store:
        (tmp_path / "store.json").unlink()
        with pytest.raises(StoreError, match=r"store.json was deleted while the run was at work"):
            store.sync(["weights.0"])
