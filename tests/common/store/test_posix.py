import errno
import os

import numpy as np
import pytest

from common.store import StoreError
from common.store.layout import ALIGNMENT
from common.store.posix import BOUNCE_BYTES, PosixFile
from tests.common.store.conftest import memory, noise

PAGES = 600  # more than two bounce buffers
FILE_BYTES = PAGES * ALIGNMENT


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights.0"
    path.write_bytes(noise(FILE_BYTES, seed=9).tobytes())
    opened = PosixFile(path)
    yield opened
    opened.close()


LENGTHS = [
    1,
    199,
    4095,
    4096,
    4097,
    BOUNCE_BYTES - 1,
    BOUNCE_BYTES,
    BOUNCE_BYTES + 1,
    2 * BOUNCE_BYTES + 4097,
]


@pytest.mark.parametrize("nbytes", LENGTHS)
@pytest.mark.parametrize("misaligned_by", [0, 1, 512, 4095])
@pytest.mark.parametrize("offset", [0, 4096, 4095, 8193])
def test_reads_any_range_into_any_address(file, nbytes, misaligned_by, offset):
    whole = noise(FILE_BYTES, seed=9)
    around = memory(nbytes + 64, misaligned_by)
    around[nbytes:] = 77
    file.read(offset, around[:nbytes])
    np.testing.assert_array_equal(around[:nbytes], whole[offset : offset + nbytes])
    assert (around[nbytes:] == 77).all()


@pytest.mark.parametrize("nbytes", LENGTHS)
@pytest.mark.parametrize("misaligned_by", [0, 1, 512, 4095])
def test_writes_any_length_from_any_address_and_pads_the_last_page_with_zeros(file, nbytes, misaligned_by):
    twin = noise(FILE_BYTES, seed=9)
    data = memory(nbytes, misaligned_by)
    data[:] = noise(nbytes, seed=1)
    file.write(2 * ALIGNMENT, data)
    end = 2 * ALIGNMENT + nbytes
    twin[2 * ALIGNMENT : end] = data
    twin[end : -(-end // ALIGNMENT) * ALIGNMENT] = 0
    np.testing.assert_array_equal(np.fromfile(file.path, np.uint8), twin)


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_calls_that_stop_short_are_continued_from_whole_pages(file, monkeypatch, call):
    real = getattr(os, call)
    asked = []

    def short(descriptor, buffers, offset):
        assert offset % ALIGNMENT == 0
        asked.append(len(buffers[0]))
        return real(descriptor, [buffers[0][: 5 * ALIGNMENT]], offset) - (
            100 if len(buffers[0]) > 5 * ALIGNMENT else 0
        )

    monkeypatch.setattr(os, call, short)
    data = memory(20 * ALIGNMENT)
    if call == "preadv":
        file.read(ALIGNMENT, data)
        monkeypatch.undo()
        np.testing.assert_array_equal(data, noise(FILE_BYTES, seed=9)[ALIGNMENT : 21 * ALIGNMENT])
    else:
        data[:] = noise(data.nbytes, seed=2)
        file.write(ALIGNMENT, data)
        monkeypatch.undo()
        np.testing.assert_array_equal(np.fromfile(file.path, np.uint8)[ALIGNMENT : 21 * ALIGNMENT], data)
    assert asked == [(20 - 4 * done) * ALIGNMENT for done in range(5)]  # 4 pages each, then the last 4 in one


def test_a_truncated_file_is_reported(file):
    os.truncate(file.path, 3 * ALIGNMENT + 10)
    with pytest.raises(StoreError, match=r"offset 12288 of weights.0 .* truncated \(it has 12298 bytes\)"):
        file.read(ALIGNMENT, memory(10 * ALIGNMENT))


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "Free some"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EXDEV, "on another file system"),
        (errno.EIO, "failing"),
        (errno.EROFS, "read-only"),
        (errno.EPERM, "permitted. Look at its owner"),
        (errno.EDQUOT, "Free some"),
    ],
)
def test_rejections_name_place_amount_and_reason(file, monkeypatch, number, words):
    def refuse(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwritev", refuse)
    monkeypatch.setattr(os, "fdatasync", refuse)
    with pytest.raises(StoreError) as caught:
        file.write(3 * ALIGNMENT, memory(2 * ALIGNMENT))
    assert os.strerror(number) in str(caught.value)
    for part in (
        "writing 8 KiB",
        "offset 12288",
        "weights.0",
        str(file.path.parent),
        os.strerror(number),
        words,
    ):
        assert part in str(caught.value)
    with pytest.raises(StoreError, match=r"syncing of weights\.0"):
        file.sync()


@pytest.mark.parametrize("refused_by", ["open", "preadv"])
def test_without_direct_io_it_goes_through_the_page_cache(file, monkeypatch, refused_by):
    real_open, real_preadv = os.open, os.preadv
    direct = set()

    def open_(path, flags, *rest, **named):
        if flags & os.O_DIRECT and refused_by == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        descriptor = real_open(path, flags, *rest, **named)
        if flags & os.O_DIRECT:
            direct.add(descriptor)
        return descriptor

    def preadv(descriptor, *rest):
        if descriptor in direct:
            direct.remove(descriptor)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_preadv(descriptor, *rest)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "preadv", preadv)
    buffered = PosixFile(file.path)
    assert not buffered.direct
    data = memory(3 * ALIGNMENT + 5, 1)
    buffered.read(ALIGNMENT, data)
    np.testing.assert_array_equal(data, noise(FILE_BYTES, seed=9)[ALIGNMENT : ALIGNMENT + data.nbytes])
    buffered.write(0, data)
    buffered.sync()
    buffered.close()
    np.testing.assert_array_equal(np.fromfile(file.path, np.uint8)[: data.nbytes], data)


def test_a_failing_drive_is_not_taken_for_one_without_direct_io(file, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StoreError, match=r"opening of weights\.0"):
        PosixFile(file.path)
    assert len(os.listdir("/proc/self/fd")) == before
