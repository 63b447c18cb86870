"""Host buffers: aligned, shared, on huge pages where the kernel gives them, and gone when the last user is."""

import contextlib
import errno
import gc
import os
import re
from pathlib import Path

import pytest
import torch

from common.errors import FinetuneError
from common.memory.buffers import HUGE_PAGE, PAGE, HostBuffer, round_up
from tests.helpers.cudart import FakeCuda

KINDS = pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])
MIB = 1 << 20


def mapped_bytes(address: int) -> dict[str, int]:
    """What the kernel says about the mapping at ``address``; empty if there is none."""
    here = False
    fields = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(head[1], 16) <= address < int(head[2], 16)
        elif here and (field := re.match(r"(\w+): +(\d+) kB", line)):
            fields[field[1]] = int(field[2]) * 1024
    return fields


@KINDS
@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, 2 * MIB, 5 * MIB + 3])
def test_holds_what_was_requested_in_whole_pages(shared: bool, nbytes: int) -> None:
    buffer = HostBuffer(nbytes, shared=shared).touch()
    assert buffer.nbytes == round_up(nbytes, PAGE) == buffer.array.nbytes
    assert buffer.array.ctypes.data % (HUGE_PAGE if shared else PAGE) == 0
    assert not buffer.array.any()
    buffer.array[:] = 7
    assert int(buffer.tensor(torch.int32, 0, buffer.nbytes // 4).double().mean()) == 0x07070707
    buffer.close()


@KINDS
def test_the_memory_goes_with_its_last_view(shared: bool) -> None:
    gc.collect()  # what earlier tests have left
    descriptors = len(os.listdir("/proc/self/fd"))
    buffer = HostBuffer(4 * MIB, shared=shared).touch()
    address = buffer.array.ctypes.data
    view = buffer.tensor(torch.float32, 4096, 10)
    buffer.close()
    del buffer
    gc.collect()
    view += 1  # still there
    assert mapped_bytes(address)["Rss"] >= 4 * MIB
    del view
    gc.collect()
    assert mapped_bytes(address).get("Rss", 0) < 4 * MIB
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda().install(monkeypatch)


@pytest.mark.parametrize(("starts", "pieces"), [
    ([0, 4, 8, 12, 16], [4, 4, 4, 4, 4]),
    ([12, 0, 13, 20], [12, 1, 7]),
    ([], [20]),
    ([0, 3.5, 7, 10.5, 14], [7, 7, 6]),  # a page that two buffers share is registered once
])  # fmt: skip
def test_page_locked_pieces_end_where_buffers_do(
    cuda: FakeCuda, starts: list[float], pieces: list[int]
) -> None:
    buffer = HostBuffer(20 * PAGE)
    buffer.page_lock(int(start * PAGE) for start in starts)
    base = buffer.array.ctypes.data
    assert [nbytes // PAGE for nbytes in cuda.registered.values()] == pieces
    assert [address - base for address in cuda.registered] == [
        sum(pieces[:i]) * PAGE for i in range(len(pieces))
    ]
    buffer.close()
    assert not cuda.registered


@pytest.mark.parametrize("allowed", range(6))
def test_a_rejected_registration_leaves_the_rest_pageable(allowed: int, cuda: FakeCuda) -> None:
    """Whichever is refused: its error is taken, so that no kernel reports it, and everything is given back."""
    cuda.room = allowed * 4 * PAGE
    buffer = HostBuffer(20 * PAGE)
    with contextlib.ExitStack() as stack:
        if allowed < 5:
            words = (
                rf"page-locked {allowed * 16 or '0'} \w+ of 80 KiB of host memory .cudaError 2.*host_memory"
            )
            stack.enter_context(pytest.warns(UserWarning, match=words.replace("host_memory", "host-memory")))
        assert buffer.page_lock(range(0, buffer.nbytes, 4 * PAGE)) == allowed * 4 * PAGE
    assert not cuda.pending
    assert len(cuda.registered) == allowed
    del buffer  # as an exception would
    assert not cuda.registered


def test_taking_shared_memory_writes_nothing_on_old_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 5.14: a byte that is read and written back could be an older one than another thread's."""
    buffer = HostBuffer(8 * PAGE, shared=True)
    monkeypatch.setattr(buffer, "_advise", lambda *_: errno.EINVAL)
    buffer.array.flags.writeable = False
    buffer.touch()
    assert not buffer.array.any()
    buffer.close()


@pytest.mark.parametrize(
    ("number", "advice"), [(errno.EFBIG, "`ulimit -f unlimited`"), (errno.ENOMEM, "lower host_memory")]
)
def test_a_limit_on_files_is_not_a_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    def refused(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "ftruncate", refused)
    with pytest.raises(FinetuneError, match=advice):
        HostBuffer(MIB, shared=True)
