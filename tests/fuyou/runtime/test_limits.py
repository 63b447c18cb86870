"""Budgets of device memory, and what is reported when a device has none left."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from common.errors import FinetuneError, UserError
from fuyou.runtime.device import CudaDevice, Device, explain_out_of_memory, memory_limits

GIB = 1 << 30


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """Return a card of 24 GiB, of which 20 are free as the driver sees it, and PyTorch has 3 that it does not use."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB + 5)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5)
    device = CudaDevice.__new__(CudaDevice)
    device.torch_device = torch.device("cuda", 0)
    return device


def test_a_cards_budget_is_what_it_has_free(card: CudaDevice) -> None:
    free = 23 * GIB * 19 // 20 - (256 << 20)
    assert memory_limits(card, "1MiB", None)[1] == free, "PyTorch's cache is free"
    assert memory_limits(card, "1MiB", "24GiB")[1] == free, "what is on the box is not there"
    assert memory_limits(card, "1MiB", "8GiB")[1] == 8 * GIB


def test_only_a_users_own_budget_caps_the_allocator(
    card: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that is a little short takes what else is free; a cap of an earlier run in this process is lifted."""
    set_: list[float] = []
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: set_.append(fraction)
    )
    card.cap_memory(6 * GIB)
    card.cap_memory(None)
    assert set_ == [0.25, 1.0]


def test_the_default_budget_of_a_small_control_group_leaves_room_for_the_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for available, budget in ((100 * GIB, 80 * GIB), (GIB, 768 << 20), (300 << 20, 200 << 20)):
        monkeypatch.setattr("fuyou.runtime.device.memory_available_bytes", lambda now=available: now)
        assert memory_limits(Device(), None, None)[0] == budget


def test_a_processor_has_its_part_of_the_hosts_budget() -> None:
    assert memory_limits(Device(), "4MiB", None)[1] == 4 << 20
    assert memory_limits(Device(), "4MiB", "1MiB")[1] == 1 << 20


def test_one_memory_of_host_and_device_is_counted_once(
    card: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a DGX Spark, where the driver calls free what the kernel does."""
    monkeypatch.setattr("fuyou.runtime.device.memory_available_bytes", lambda: 20 * GIB)
    monkeypatch.setattr("fuyou.runtime.device.memory_limit_bytes", lambda: 24 * GIB)
    apart = memory_limits(card, None, None)
    assert sum(apart) > 20 * GIB, "a card has memory in addition"
    card.is_integrated = True
    assert memory_limits(card, None, None) == (8 * GIB, 8 * GIB)
    assert memory_limits(card, "12GiB", None) == (6 * GIB, 6 * GIB)
    assert memory_limits(card, "12GiB", "8GiB") == (4 * GIB, 8 * GIB)
    with pytest.raises(UserError, match=r"device.memory 8 GiB leaves nothing for the host of 8 GiB"):
        memory_limits(card, "8GiB", "8GiB")


@pytest.mark.parametrize("is_integrated", [0, 1])
def test_the_driver_tells_whether_a_device_shares_the_hosts_memory(
    monkeypatch: pytest.MonkeyPatch, is_integrated: int
) -> None:
    names = ("set_device", "get_device_name", "reset_peak_memory_stats", "current_stream", "set_stream")
    for name in names:
        monkeypatch.setattr(torch.cuda, name, lambda *_: Mock())
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: Mock())
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Mock())
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(is_integrated=is_integrated)
    )
    assert CudaDevice(0).is_integrated == bool(is_integrated)


def test_running_out_says_what_to_lower(card: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of 23.5 GiB"
        )

    message = r"\(CUDA out of memory\)\. Lower device_memory .* smaller micro_batch"
    with pytest.raises(FinetuneError, match=message), explain_out_of_memory():
        fail()
    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(FinetuneError, match="no memory left"):
        card.allocate(2 * GIB)
