"""The order of streams on CUDA: no two of them touch the same memory at once, and where one is deaf, that shows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from common.communication import Wait
from common.quantization import quantized_nbytes
from fcdp import fsdp2
from fcdp.cache.cached_shards import (
    AdaptivePlacement,
    AlwaysOnDevice,
    CachedGroup,
    CachedShard,
    CopyStreams,
    HostCache,
)
from fcdp.cache.staleness import StalenessCheck
from fcdp.comms.all_gather import GatherLevels, StagedAllGather
from fcdp.comms.levels import HoRing, QuantizedLevel
from fcdp.grouping import ParameterGroup
from fcdp.strategy.strategy import Axis
from fcdp.traffic import Traffic
from tests.helpers.fcdp.streams import Stream, emulated_streams

CELL = 8


class Level:
    """NCCL's collectives as streams see them: on the current one, or for messages on one that waits for it."""

    def __init__(self, axis: Axis):
        self.axis, self.size, self.index = axis, axis.size, 0
        self._nccl = Stream()

    def gather(self, rows: torch.Tensor) -> Wait:
        rows[:, 1:].copy_(rows[:, :1].expand_as(rows[:, 1:]))
        return lambda: None

    def reduce_scatter(self, rows: torch.Tensor, output: torch.Tensor) -> None:
        output.copy_(rows.sum(1))

    def shift(self, cell: torch.Tensor, to: int, place: torch.Tensor, source: int) -> Wait:
        self._nccl.wait_stream(torch.cuda.current_stream())  # type: ignore[arg-type]
        with torch.cuda.stream(self._nccl):  # type: ignore[arg-type]
            place.copy_(cell)
        done = self._nccl.record_event()
        return lambda: torch.cuda.current_stream().wait_event(done)  # type: ignore[arg-type]


class Wandering(AlwaysOnDevice):
    """Shards go to the device and back at every other use."""

    def __init__(self) -> None:
        self._uses = 0

    def may_stay(self) -> bool:
        self._uses += 1
        return self._uses % 2 == 0


class Ranks:
    """A group of FSDP2's, of which this is rank 0 of 2 nodes x 2 ranks."""

    def size(self) -> int:
        return 4


def _gather(placement: Any, secondary_bits: Any = None, is_secondary: bool = False) -> StagedAllGather:
    group = ParameterGroup("", [nn.Linear(1, 1)], [], 0)
    cell = CELL * 4 if secondary_bits is None else quantized_nbytes(CELL, secondary_bits)
    streams: Any = CopyStreams(*(torch.cuda.Stream() for _ in range(3)))
    nbytes = 2 * cell
    host = HostCache([nbytes], torch.device("cpu")).allocate(nbytes)
    cached_group = CachedGroup(group, is_secondary, 2, nbytes, True, secondary_bits)
    shard = CachedShard(cached_group, host, streams, placement, Traffic())
    across, inside = Level(Axis(2, 2)), Level(Axis(1, 2))
    levels = GatherLevels([across], [inside], [inside])
    check = StalenessCheck(torch.device("cpu"), at_once=False)
    cached, secondary = (None, shard) if is_secondary else (shard, None)
    return StagedAllGather(group, (0, 4), levels, cached, secondary, streams, check, Traffic())


class Fsdp2:
    """What FSDP2 does on its streams around an all-gather."""

    def __init__(self, gather: StagedAllGather):
        self.gather, self.parameter = gather, torch.ones(CELL)
        self.compute, self.copy_in, self.gathers = (
            torch.cuda.current_stream(),
            torch.cuda.Stream(),
            torch.cuda.Stream(),
        )

    def unshard(self) -> None:
        self.copy_in.wait_stream(self.compute)
        self.gathers.wait_stream(self.compute)
        with torch.cuda.stream(self.copy_in):
            output, own = self._copied_in()
        self.gathers.wait_stream(self.copy_in)
        with torch.cuda.stream(self.gathers):
            self.gather(output, own, Ranks())  # type: ignore[arg-type]
        self.compute.wait_stream(self.gathers)
        assert output.sum() == 4 * own.sum()

    def unshard_async(self, waits_on: torch.cuda.Stream) -> None:
        output, own = self._copied_in()
        work = self.gather(output, own, Ranks(), async_op=True)  # type: ignore[arg-type]
        assert work is not None
        with torch.cuda.stream(waits_on):
            work.wait()
            assert output.sum() == 4 * own.sum()
        self.compute.wait_stream(waits_on)

    def step(self) -> None:
        self.parameter.add_(1)
        self.gather.group.dirty = True

    def _copied_in(self) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.gather.allocate((4 * CELL,), dtype=torch.float32, device=torch.device("cpu"))
        own = output[:CELL]
        own.copy_(self.parameter)
        return output, own


CASES: dict[str, Callable[[], StagedAllGather]] = {
    "host": lambda: _gather(AdaptivePlacement(None, 0.0)),
    "device": lambda: _gather(AlwaysOnDevice()),
    "moves": lambda: _gather(Wandering()),
    "secondary": lambda: _gather(AlwaysOnDevice(), None, True),
    "quantized": lambda: _gather(AdaptivePlacement(None, 0.0), 8, True),
}


@pytest.fixture(autouse=True)
def _no_fsdp2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp2, "versions", lambda group: [])


def _train(case: str) -> None:
    model = Fsdp2(CASES[case]())
    for _ in range(3):
        for _ in range(4):  # forward and backward of two micro-batches
            model.unshard()
        model.step()


@pytest.mark.parametrize("case", CASES)
def test_gathers_and_caches_are_ordered(case: str) -> None:
    with emulated_streams():
        _train(case)


@pytest.mark.parametrize(
    ("case", "deaf"), [("host", 1), ("host", 2), ("moves", 1), ("device", 1), ("quantized", 1)]
)
def test_a_deaf_copy_stream_is_noticed(case: str, deaf: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Stream.__post_init__

    def make(stream: Stream) -> None:
        made(stream)
        stream.is_deaf = len(streams) == 1 + deaf  # the first one computes

    with emulated_streams() as streams:
        monkeypatch.setattr(Stream, "__post_init__", make)
        with pytest.raises(AssertionError, match="races"):
            _train(case)


def test_an_asynchronous_gather_orders_the_stream_that_waits_for_it() -> None:
    with emulated_streams() as streams:
        model, other = Fsdp2(CASES["host"]()), torch.cuda.Stream()
        model.unshard_async(other)
        made = len(streams)
        for _ in range(3):
            model.unshard_async(other)
        assert len(streams) == made  # PyTorch caches freed memory by stream


@pytest.mark.parametrize("make", [HoRing, lambda intra, inter: QuantizedLevel(HoRing(intra, inter), 8)])
def test_rings_and_quantized_gathers_are_ordered(make: Any) -> None:
    with emulated_streams():
        ring = make(Level(Axis(1, 2)), Level(Axis(2, 3)))
        rows = torch.zeros(1, 6, 40)
        rows[:, 0] = 1
        ring.gather(rows)()
        assert rows[:, :2].sum() > 0
        output = torch.empty(1, 40)
        ring.reduce_scatter(rows, output)
        output.add_(1)
