"""The way to device memory, tested without a device: a stand-in for kvikio, and CPU tensors that pretend."""

import builtins
import ctypes
import os

import numpy as np
import pytest
import torch

from common.errors import UserError
from common.store import ALIGNMENT, Layout, Store, StoreError
from common.store.backends import kvikio_backend, measure
from common.store.backends.kvikio_backend import KvikioFile
from common.store.backends.posix import PosixFile
from common.store.layout import LARGEST_UNIT
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
def test_device_tensors_travel_and_host_memory_sees_the_same(stand_in, make_directories, directories):
    store, extents = make(make_directories(directories), "kvikio")
    with store:
        assert store.device_reads and store.device_writes
        assert stand_in == {
            "num_threads": 4 * directories, "auto_direct_io_read": True, "auto_direct_io_write": True,
        }  # fmt: skip
        for extent in extents:
            data = noise(extent.nbytes, extent.nbytes)
            store.write(extent, on_device(torch.from_numpy(data.copy()))).result()
            on_host = np.zeros(extent.nbytes, np.uint8)
            store.read_now(extent, on_host)
            np.testing.assert_array_equal(on_host, data)
            back = torch.zeros(extent.nbytes, dtype=torch.uint8)
            store.read_now(extent, on_device(back))
            np.testing.assert_array_equal(back.numpy(), data)
        large = extents[-1]
        part = torch.zeros(5000, dtype=torch.int16)  # any dtype; a range of the extent
        store.read_now(large, on_device(part), offset=MIB, nbytes=10_000)
        np.testing.assert_array_equal(part.view(torch.uint8).numpy(), data[MIB : MIB + 10_000])


def test_device_tensors_that_cannot_be_right_are_refused(stand_in, make_directories):
    store, extents = make(make_directories(1), "kvikio")
    with store:
        with pytest.raises(ValueError, match="whole pages"):
            store.read(extents[-1], on_device(torch.zeros(100, dtype=torch.uint8)), offset=1, nbytes=100)
        with pytest.raises(ValueError, match="contiguous"):
            store.read(extents[1], on_device(torch.zeros(300, 2)[:, 0]))
        with pytest.raises(ValueError, match="needs a buffer"):
            store.read(extents[1], on_device(torch.zeros(198, dtype=torch.uint8)))


def test_the_posix_backend_refuses_device_tensors(make_directories):
    store, extents = make(make_directories(1), "posix")
    with store, pytest.raises(TypeError, match=r"cannot read device memory.*kvikio is not in use"):
        store.read(extents[0], on_device(torch.zeros(1)))


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
    store, _ = make(paths, "auto")
    with store:
        assert not store.device_reads and not store.device_writes


def test_kvikio_without_a_driver_is_a_clear_error(stand_in, make_directories, monkeypatch):
    def no_driver(name):
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", no_driver)
    with pytest.raises(UserError, match=r"no CUDA driver was found"):
        make(make_directories(1), "kvikio")


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        (measure.DeviceRates(kvikio_read=2, kvikio_write=2, posix_read=1, posix_write=1), (True, True)),
        (measure.DeviceRates(kvikio_read=2, kvikio_write=1, posix_read=1, posix_write=2), (True, False)),
        (measure.DeviceRates(kvikio_read=1, kvikio_write=1, posix_read=2, posix_write=2), (False, False)),
        (None, (False, False)),
    ],
)
def test_auto_takes_the_faster_way_for_each_direction(stand_in, make_directories, monkeypatch, rates, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(measure, "measure_device_rates", lambda *arguments: rates)
    store, extents = make(make_directories(1), "auto")
    with store:
        assert (store.device_reads, store.device_writes) == expected
        for allowed, transfer in ((expected[0], store.read), (expected[1], store.write)):
            tensor = on_device(torch.zeros(199, dtype=torch.uint8))
            if allowed:
                transfer(extents[1], tensor).result()
            else:
                with pytest.raises(TypeError, match="device memory"):
                    transfer(extents[1], tensor)


def test_measuring_moves_real_bytes_and_cleans_up(stand_in, tmp_path):
    kvikio_backend.configure(2)
    rates = measure.measure_device_rates(tmp_path, 2, torch.device("cpu"), nbytes=4 * LARGEST_UNIT)
    assert rates is not None
    assert min(vars(rates).values()) > 0
    assert list(tmp_path.iterdir()) == []


def test_measuring_that_fails_is_no_failure(stand_in, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert measure.measure_device_rates(tmp_path, 2, torch.device("cpu")) is None

    def broken(future):
        raise RuntimeError("cuFile is not having it")

    monkeypatch.setattr(LazyFuture, "get", broken)
    assert measure.measure_device_rates(tmp_path, 2, torch.device("cpu"), nbytes=4 * LARGEST_UNIT) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(
    not torch.cuda.is_available() or kvikio_backend.why_unavailable() is not None,
    reason=f"needs a CUDA device and kvikio: {kvikio_backend.why_unavailable() or 'torch sees no CUDA device'}",
)
@pytest.mark.parametrize("io", ["kvikio", "auto"])
def test_on_a_real_device(make_directories, io):
    store, extents = make(make_directories(2), io)
    with store:
        for extent in extents:
            data = torch.from_numpy(noise(extent.nbytes, extent.nbytes))
            device_data = data.cuda()
            torch.cuda.synchronize()
            if store.device_writes:
                store.write(extent, device_data).result()
            else:
                store.write(extent, data.numpy()).result()
            if store.device_reads:
                back = torch.zeros(extent.nbytes, dtype=torch.uint8, device="cuda")
                torch.cuda.synchronize()
                store.read_now(extent, back)
                assert torch.equal(back.cpu(), data)
            on_host = np.zeros(extent.nbytes, np.uint8)
            store.read_now(extent, on_host)
            np.testing.assert_array_equal(on_host, data.numpy())
