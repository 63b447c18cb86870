"""The way to device memory, tested without a device: a stand-in for kvikio, and CPU tensors that pretend."""

import builtins
import ctypes

import numpy as np
import pytest
import torch

from common.errors import UserError
from common.store import ALIGNMENT, Layout, Store, StoreError, kvikio_backend
from common.store.kvikio_backend import KvikioFile
from common.store.posix import PosixFile
from tests.common.store.conftest import noise
from tests.helpers.kvikio import LazyFuture, install, on_device

MIB = 1 << 20
SIZES = [1, 199, 4095, 4096, 4097, 5 * MIB + 13]


@pytest.fixture
def stand_in(monkeypatch):
    """kvikio, as far as the store uses it, and a CUDA driver. Returns its settings."""
    return install(monkeypatch)


def make(paths, io):
    layout = Layout(len(paths))
    extents = [layout.allocate("weights.0", nbytes) for nbytes in SIZES]
    return Store.create(paths, layout, io=io), extents


@pytest.mark.parametrize("directories", [1, 3])
def test_device_tensors_get_what_host_memory_wrote(stand_in, make_directories, directories):
    store, extents = make(make_directories(directories), "kvikio")
    with store:
        assert stand_in == {"num_threads": 4 * directories, "auto_direct_io_read": True}
        for extent in extents:
            data = noise(extent.nbytes, extent.nbytes)
            store.write(extent, data).result()
            back = torch.zeros(extent.nbytes, dtype=torch.uint8)
            store.read_unchecked(extent, on_device(back)).result()
            np.testing.assert_array_equal(back.numpy(), data)
        large = extents[-1]
        part = torch.zeros(5000, dtype=torch.int16)  # any dtype; a range of the extent
        store.read_unchecked(large, on_device(part), offset=MIB, nbytes=10_000).result()
        np.testing.assert_array_equal(part.view(torch.uint8).numpy(), data[MIB : MIB + 10_000])


def test_device_tensors_that_cannot_be_right_are_rejected(stand_in, make_directories):
    store, extents = make(make_directories(1), "kvikio")
    with store:
        with pytest.raises(ValueError, match="whole pages"):
            store.read_unchecked(
                extents[-1], on_device(torch.zeros(100, dtype=torch.uint8)), offset=1, nbytes=100
            )
        with pytest.raises(ValueError, match="contiguous"):
            store.read_unchecked(extents[1], on_device(torch.zeros(300, 2)[:, 0]))
        with pytest.raises(ValueError, match="needs a buffer"):
            store.read_unchecked(extents[1], on_device(torch.zeros(198, dtype=torch.uint8)))


def test_the_posix_backend_rejects_device_tensors(make_directories):
    store, extents = make(make_directories(1), "posix")
    with store, pytest.raises(TypeError, match="cannot read device memory"):
        store.read_unchecked(extents[0], on_device(torch.zeros(1)))


def test_nothing_is_written_from_device_tensors(stand_in, make_directories):
    store, extents = make(make_directories(1), "kvikio")
    with store, pytest.raises(TypeError, match="cannot write device memory"):
        store.write(extents[0], on_device(torch.zeros(1)))


@pytest.mark.parametrize("outcome", ["error", "short"])
def test_failures_name_the_place(stand_in, tmp_path, monkeypatch, outcome):
    path = tmp_path / "weights.0"
    path.write_bytes(bytes(8 * ALIGNMENT))
    file = KvikioFile(path, PosixFile(path))

    def get(future):
        if outcome == "error":
            raise RuntimeError("POSIX error on pread: EOF")
        return 100

    monkeypatch.setattr(LazyFuture, "get", get)
    with pytest.raises(StoreError) as caught:
        file.read(ALIGNMENT, torch.zeros(2 * ALIGNMENT, dtype=torch.uint8))
    for part in ("reading 8 KiB at offset 4096 of weights.0", str(tmp_path), "io posix"):
        assert part in str(caught.value)
    assert ("EOF" if outcome == "error" else "only 100 bytes") in str(caught.value)
    with pytest.raises(StoreError, match=r"kvikio cannot open missing .*No such file"):
        KvikioFile(tmp_path / "missing", PosixFile(path))


def test_kvikio_without_the_package_is_a_clear_error(make_directories, monkeypatch):
    real = builtins.__import__

    def no_kvikio(name, *rest, **named):
        if name.startswith("kvikio"):
            raise ImportError("No module named 'kvikio'")
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", no_kvikio)
    paths = make_directories(1)
    with pytest.raises(UserError, match=r"pip install 'fuyou\[cuda\]'.*io posix"):
        make(paths, "kvikio")
    assert not list(paths[0].iterdir())


def test_kvikio_without_a_driver_is_a_clear_error(stand_in, make_directories, monkeypatch):
    def no_driver(name):
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", no_driver)
    with pytest.raises(UserError, match=r"no CUDA driver was found"):
        make(make_directories(1), "kvikio")


@pytest.mark.skipif(
    not torch.cuda.is_available() or kvikio_backend.why_unavailable() is not None,
    reason=f"needs a CUDA device and kvikio: {kvikio_backend.why_unavailable() or 'torch sees no CUDA device'}",
)
def test_on_a_real_device(make_directories):
    store, extents = make(make_directories(2), "kvikio")
    with store:
        for extent in extents:
            data = torch.from_numpy(noise(extent.nbytes, extent.nbytes))
            store.write(extent, data.numpy()).result()
            back = torch.zeros(extent.nbytes, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            store.read_unchecked(extent, back).result()
            assert torch.equal(back.cpu(), data)
