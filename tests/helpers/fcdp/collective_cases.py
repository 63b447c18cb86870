"""What ranks do in the tests of shaped levels."""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fcdp
from common.quantization import dequantize, quantize, quantized_nbytes
from fcdp.comms.levels import HoRing, QuantizedLevel, pieces
from fcdp.comms.rank_level import RankLevel
from fcdp.strategy.strategy import Axis
from fcdp.traffic import Traffic

SIZES = [1, 4097, 33_001]


def axes(topology: fcdp.Topology) -> list[Axis]:
    """One for each level with more than one rank, fastest first."""
    found, stride = [], 1
    for size in topology.levels.sizes:
        if size > 1:
            found.append(Axis(stride, size))
        stride *= size
    return found


def levels(topology: fcdp.Topology, purpose: Any) -> tuple[list[RankLevel], Traffic]:
    """The same, ready to send."""
    traffic = Traffic()
    return [RankLevel(topology, axis, purpose, traffic) for axis in axes(topology)], traffic


def ring(parts: list[RankLevel]) -> Any:
    """Of all axes."""
    whole: Any = parts[0]
    for part in parts[1:]:
        whole = HoRing(whole, part)
    return whole


def numbers(seed: int, *shape: int) -> torch.Tensor:
    """The same on every rank, of very different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10.0 ** torch.randint(
        -3, 3, shape[-1:], generator=generator
    )


def through_the_wire(cells: torch.Tensor, bits: Any) -> torch.Tensor:
    """What the last dimension is worth after quantization, piece by piece."""
    parts = [cells[..., start:stop] for start, stop in pieces(cells.size(-1))]
    return torch.cat([dequantize(quantize(part, bits), part.size(-1), bits) for part in parts], dim=-1)


def wire_bytes(cell: int, bits: Any) -> int:
    """Of one cell, in the pieces in which it travels."""
    return sum(quantized_nbytes(stop - start, bits) for start, stop in pieces(cell))


def ho_ring(topology: fcdp.Topology) -> None:
    """Gathers what belongs there, two at once, in strided rows; reduces as level after level does, bit for bit; and
    sends as many bytes."""
    for cell in SIZES:
        parts, traffic = levels(topology, "gather")
        whole = ring(parts)
        assert (whole.size, whole.index) == (topology.world_size, topology.rank)
        right = numbers(cell, 2, topology.world_size, cell)
        waits, outputs = [], []
        for sign in (1, -1):
            wide = torch.zeros(2, topology.world_size, 2, cell)
            rows = wide[:, :, 1]
            rows[:, topology.rank] = right[:, topology.rank] * sign
            waits.append(whole.gather(rows))
            outputs.append((wide, sign))
        for wait, (wide, sign) in zip(waits, outputs, strict=True):
            wait()
            assert torch.equal(wide[:, :, 1], right * sign)
            assert not wide[:, :, 0].any()
        inter_node = topology.world_size * (topology.nodes - 1) // topology.nodes // topology.ranks_per_node
        assert traffic.gather_inter_node == 2 * 2 * inter_node * cell * 4
        assert (
            traffic.gather_inter_node + traffic.gather_intra_node
            == 2 * 2 * (topology.world_size - 1) * cell * 4
        )

        mine = torch.randn(
            3, topology.world_size, cell, generator=torch.Generator().manual_seed(topology.rank)
        )
        mine = mine.bfloat16()
        before = mine.clone()
        counts, results = [], []
        for shape in (lambda some: [ring(some)], lambda some: some):
            parts, traffic = levels(topology, "reduce")
            cells = mine
            for level in shape(parts):
                rows = (
                    cells.view(-1, level.size, cell)
                    if level.axis.stride > 1
                    else cells.reshape(-1, level.size, cell)
                )
                cells = torch.empty(rows.size(0), cell, dtype=mine.dtype)
                level.reduce_scatter(rows, cells)
            results.append(cells)
            counts.append((traffic.reduce_intra_node, traffic.reduce_inter_node))
        assert torch.equal(*results)
        assert torch.equal(mine, before)
        assert counts[0] == counts[1]


def gather_quantized(topology: fcdp.Topology, bits: Any, dtype: torch.dtype) -> None:
    """Others' cells come out quantized, the own as it was; exact bytes; also through a ring; bytes as they are."""
    for cell in SIZES:
        parts, traffic = levels(topology, "gather")
        for part in [*parts, *([ring(parts)] if len(parts) > 1 else [])]:
            traffic.gather_intra_node = traffic.gather_inter_node = 0
            level = QuantizedLevel(part, bits)
            right = (
                numbers(cell, 2, level.size, cell)
                .mul_(50)
                .to(torch.int64 if dtype == torch.uint8 else dtype)
                .to(dtype)
            )
            rows = torch.zeros_like(right)
            rows[:, level.index] = right[:, level.index]
            level.gather(rows)()
            expected = right.clone() if dtype == torch.uint8 else through_the_wire(right, bits).to(dtype)
            expected[:, level.index] = right[:, level.index]
            assert torch.equal(rows, expected)
            nbytes = cell if dtype == torch.uint8 else wire_bytes(cell, bits)
            assert traffic.gather_inter_node + traffic.gather_intra_node == 2 * (level.size - 1) * nbytes


def reduce_quantized(topology: fcdp.Topology, bits: Any) -> None:
    """One hop: every cell but the own is quantized once; sums in fp32 in the order of ranks; exact bytes."""
    everywhere = Axis(1, topology.world_size)
    for axis in dict.fromkeys([*axes(topology), everywhere]):
        for cell in SIZES:
            traffic = Traffic()
            level = QuantizedLevel(RankLevel(topology, axis, "reduce", traffic), bits)
            senders = numbers(cell, level.size, 3, level.size, cell)
            mine = senders[level.index].clone()
            output = torch.empty(3, cell)
            level.reduce_scatter(mine, output)
            assert torch.equal(mine, senders[level.index])
            places = [
                sent[:, level.index] if rank == level.index else through_the_wire(sent[:, level.index], bits)
                for rank, sent in enumerate(senders)
            ]
            expected = places[0].clone()
            for place in places[1:]:
                expected += place
            assert torch.equal(output, expected)
            step = senders[:, :, level.index].abs().amax() / (127 if bits == 8 else 7)
            assert (output - senders[:, :, level.index].sum(0)).abs().max() <= (
                level.size - 1
            ) * step / 2 * 1.001
            sent = traffic.reduce_intra_node + traffic.reduce_inter_node
            assert sent == 3 * (level.size - 1) * wire_bytes(cell, bits)
            if axis == everywhere:
                others = topology.world_size - topology.ranks_per_node
                assert traffic.reduce_inter_node == 3 * others * wire_bytes(cell, bits)


class Block(nn.Module):
    """A trainable layer and two frozen ones, one of which may have its own dtype."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.trained, self.plain = nn.Linear(70, 90), nn.Linear(90, 70).requires_grad_(False)
        self.other = nn.Linear(70, 70, dtype=dtype).requires_grad_(False)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.other(self.plain(self.trained(data)).to(self.other.weight.dtype)).float()
        return result


class Blocks(nn.Module):
    def __init__(self, dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([Block(dtype), Block(dtype)])

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            data = block(data)
        return data.square().mean()


def frozen_weights(topology: fcdp.Topology, dtype: torch.dtype) -> tuple[float, bool]:
    """How far the frozen weights of a block are from exact ones when ZeRO-topo has gathered them, as a forward does
    and as a backward does; and whether their group mixes dtypes."""
    model: Any = Blocks(dtype)
    frozen = [parameter for parameter in model.blocks[0].parameters() if not parameter.requires_grad]
    exact = [parameter.detach().clone().float() for parameter in frozen]
    model = fcdp.fully_shard(model, topology, "zero-topo", mp_policy=MixedPrecisionPolicy())
    model(torch.ones(2, 70)).backward()
    sharding = fcdp.sharding(model)
    group = next(group for group in sharding.groups if not group.trainable)
    far = []
    for _ in range(2):
        group.holder.unshard()
        now = [parameter.detach().float() for parameter in group.registered()]
        far += [
            float((one - then).abs().max() / then.abs().max()) for one, then in zip(now, exact, strict=True)
        ]
        group.holder.reshard()
    sharding.close()
    return max(far), group.mixes_dtypes
