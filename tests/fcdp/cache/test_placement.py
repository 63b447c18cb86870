"""The threshold's rule, on a device whose memory in use we set."""

import pytest
import torch

from fcdp.cache.cached_shards import AdaptivePlacement, CachedGroup, CachedShard, DeviceMemory, HostCache
from fcdp.grouping import ParameterGroup
from fcdp.traffic import Traffic


class Device:
    """1000 bytes, of which ``others`` are in use by everything but shares."""

    def __init__(self, threshold: float):
        self.others = 0
        self.placement = AdaptivePlacement(
            DeviceMemory(1000, lambda: self.others + self.placement.held_bytes), threshold
        )


def test_the_peak_of_the_last_step_counts_not_what_is_in_use_now() -> None:
    device = Device(0.9)
    device.others = 700
    device.placement.admit(1)
    device.placement.end_step()
    device.others = 0
    assert device.placement.admit(150)
    assert not device.placement.admit(51)
    assert device.placement.admit(50)
    assert device.placement.held_bytes == 200


def test_shares_leave_when_memory_in_use_passes_the_threshold() -> None:
    device = Device(0.5)
    device.placement.end_step()
    assert device.placement.admit(400)
    assert device.placement.may_stay()
    device.others = 101
    assert not device.placement.may_stay()
    device.placement.leave(400)
    device.placement.end_step()
    assert not device.placement.admit(400)
    assert device.placement.admit(399)


def test_memory_that_others_take_in_the_first_step_counts() -> None:
    """NCCL's buffers: a communicator is made when it is first used."""
    others = [0, 300]
    placement = AdaptivePlacement(DeviceMemory(1000, lambda: 500, lambda: others.pop(0)), 1.0)
    assert not placement.admit(0)
    placement.end_step()
    assert not placement.admit(201)
    assert placement.admit(200)


@pytest.mark.parametrize("cell", [1, 7, 199, 4097])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_a_share_comes_back_from_either_tier_and_through_moves(cell: int, dtype: torch.dtype) -> None:
    nodes, own = 3, 1
    device = Device(1.0)
    traffic = Traffic()
    size = nodes * cell * dtype.itemsize
    device.placement = AdaptivePlacement(DeviceMemory(4 * size, lambda: device.others), 1.0)
    group = CachedGroup(ParameterGroup("", [], [], 0), False, 2, size, True, None)
    host = HostCache([size], torch.device("cpu")).allocate(size)
    share = CachedShard(group, host, None, device.placement, traffic)
    written = torch.randint(0, 99, (nodes, 2, cell)).to(dtype)

    def comes_back() -> bool:
        output = torch.full((nodes, 2, cell), 5).to(dtype)
        share.load(output[:, 0], own, None)
        same = torch.equal(share.cell(output[:, 0], own), written[own, 0])
        expected = torch.full((nodes, 2, cell), 5).to(dtype)
        expected[:, 0] = written[:, 0]
        expected[own, 0] = 5  # FSDP2 has put this rank's cell there itself
        return same and torch.equal(output, expected)

    share.store(written.view(-1, cell), 2 * own, written)
    assert share._device is None and comes_back()
    assert (traffic.device_to_host, traffic.host_to_device) == (size, size // nodes * (nodes - 1))
    device.placement.end_step()
    assert comes_back() and share._device is not None
    device.others = 5 * size
    assert comes_back() and share._device is None
    assert traffic.device_to_host == size, "the host still had the newest copy"
    device.others = 0
    device.placement.end_step()
    device.placement.end_step()
    written = torch.randint(0, 99, (nodes, 2, cell)).to(dtype)
    share.store(written.view(-1, cell), 2 * own, written)
    assert share._device is not None and comes_back()
    device.others = 5 * size
    assert comes_back() and share._device is None
    assert traffic.device_to_host == 2 * size
