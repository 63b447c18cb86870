"""What ranks do in the tests of shaped collectives."""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import fcdp
from common.quantisation import dequantise, quantise, quantised_nbytes
from fcdp.collectives import BITS, HoRing, QuantisedLevel, ShapedAllGather, ShapedReduceScatter
from fcdp.collectives.quantised import pieces
from fcdp.rank_level import RankLevel
from fcdp.reduce_scatter import MicroBatches, TwoLevelReduceScatter
from fcdp.traffic import Traffic

SIZES = [1, 7, 4097, 66_001]


def levels(topology: fcdp.Topology, purpose: Any, traffic: Traffic) -> tuple[RankLevel, RankLevel]:
    """Inside and across."""
    groups = (lambda: topology.gather_groups) if purpose == "gather" else (lambda: topology.reduce_groups)
    return RankLevel(groups, "inside", purpose, traffic), RankLevel(groups, "across", purpose, traffic)


def everyone(topology: fcdp.Topology, cell: int, dtype: torch.dtype) -> torch.Tensor:
    """Cells ``[N, M, c]``, the same numbers on every rank, of very different magnitudes."""
    generator = torch.Generator().manual_seed(cell)
    cells = torch.randn(topology.nodes, topology.ranks_per_node, cell, generator=generator)
    cells *= 10.0 ** torch.randint(-3, 3, (cell,), generator=generator)
    return cells.mul_(100).to(dtype) if dtype != torch.uint8 else cells.to(torch.int64).to(dtype)


def wire_bytes(cell: int, bits: int) -> int:
    """Of one cell, in the pieces in which it travels."""
    return sum(quantised_nbytes(stop - start, cast(Any, bits)) for start, stop in pieces(cell))


def through_the_wire(cells: torch.Tensor, bits: Any) -> torch.Tensor:
    """What the last dimension is worth after quantisation, piece by piece."""
    parts = [cells[..., start:stop] for start, stop in pieces(cells.size(-1))]
    return torch.cat([dequantise(quantise(part, bits), part.size(-1), bits) for part in parts], dim=-1)


def gather(topology: fcdp.Topology, ring: Any, precision: Any, dtype: torch.dtype) -> None:
    """FSDP2's call, two of them under way at once."""
    for cell in SIZES:
        traffic = Traffic()
        comm = ShapedAllGather(*levels(topology, "gather", traffic), ring, precision)
        right = everyone(topology, cell, dtype)
        works = []
        for sign in (1, -1) if dtype != torch.uint8 else (1, 1):
            output = comm.allocate([right.numel()], dtype=dtype, device=torch.device("cpu")).zero_()
            own = output.view_as(right)[topology.node, topology.local_rank]
            own.copy_(right[topology.node, topology.local_rank] * sign)
            works.append((sign, output, comm(output, own, cast(Any, None), async_op=True)))
        bits = BITS.get(precision) if dtype != torch.uint8 else None
        expected = right if bits is None else through_the_wire(right, bits).to(dtype)
        for sign, output, work in works:
            assert work is not None
            work.wait()
            assert torch.equal(output.view_as(right), expected * sign), cell
        nbytes = cell * right.element_size() if bits is None else wire_bytes(cell, bits)
        nodes, ranks = topology.nodes, topology.ranks_per_node
        assert traffic.gather_across == 2 * (nodes - 1) * nbytes
        assert traffic.gather_inside == 2 * nodes * (ranks - 1) * nbytes


def reduce(topology: fcdp.Topology, average: bool) -> None:
    """HO-Ring adds what the two-level reduction adds, in the same order, and sends the same bytes."""
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    for cell in SIZES:
        generator = torch.Generator().manual_seed(topology.rank)
        mine = torch.randn(topology.world_size * cell, generator=generator).to(torch.bfloat16)
        before = mine.clone()
        results, counts = [], []
        for build in (
            lambda inside, across: TwoLevelReduceScatter("it", inside, across, MicroBatches()),
            lambda inside, across: ShapedReduceScatter(inside, across, "hierarchical"),
            lambda inside, across: ShapedReduceScatter(inside, across, "ho"),
        ):
            traffic = Traffic()
            comm: Any = build(*levels(topology, "reduce", traffic))
            output = torch.full((cell,), torch.nan, dtype=torch.bfloat16)
            comm(output, mine, None, op)
            results.append(output)
            counts.append((traffic.reduce_inside, traffic.reduce_across))
        assert torch.equal(mine, before)
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])
        assert counts[0] == counts[1] == counts[2]


def reduce_quantised(topology: fcdp.Topology, bits: Any) -> None:
    """One hop: every cell but the own is quantised once; sums in fp32 in the order of ranks; exact bytes."""
    for name in ("inside", "across"):
        for cell in SIZES:
            traffic = Traffic()
            inside, across = levels(topology, "reduce", traffic)
            level = inside if name == "inside" else across
            generator = torch.Generator().manual_seed(cell)
            senders = torch.randn(level.size, 3, level.size, cell, generator=generator)
            mine = senders[level.index].clone()
            output = torch.empty(3, cell)
            QuantisedLevel(level, bits).reduce_scatter(mine, output)
            assert torch.equal(mine, senders[level.index])
            places = [
                sent[:, level.index] if rank == level.index else through_the_wire(sent[:, level.index], bits)
                for rank, sent in enumerate(senders)
            ]
            expected = places[0].clone()
            for place in places[1:]:
                expected += place
            assert torch.equal(output, expected)
            if level.size > 1:
                step = senders[:, :, level.index].abs().amax() / (127 if bits == 8 else 7)
                assert (output - senders[:, :, level.index].sum(0)).abs().max() <= (level.size - 1) * step / 2 * 1.001
            sent = traffic.reduce_inside if name == "inside" else traffic.reduce_across
            assert sent == 3 * (level.size - 1) * wire_bytes(cell, bits)


def shape(model: Any, topology: fcdp.Topology, ring: Any, gather: Any, reduce: Any) -> None:
    """Replace FSDP2's collectives over all ranks by shaped ones."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            traffic = Traffic()
            gathering = ShapedAllGather(*levels(topology, "gather", traffic), ring, gather)
            module.set_custom_all_gather(cast(Any, gathering))
            reducing = ShapedReduceScatter(*levels(topology, "reduce", traffic), ring, reduce)
            module.set_custom_reduce_scatter(cast(Any, reducing))


def mixed_dtype_group(topology: fcdp.Topology) -> bool:
    """A group of fp32 and frozen bf16 parameters is gathered as bytes, and comes out as it was."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).bfloat16().requires_grad_(False))
    whole = [parameter.detach().clone() for parameter in model.parameters()]
    torch.distributed.fsdp.fully_shard(model, mesh=topology.mesh, reshard_after_forward=False)
    seen: list[torch.dtype] = []

    class Watched(ShapedAllGather):
        def __call__(self, output_tensor: torch.Tensor, *rest: Any, **options: Any) -> Any:
            seen.append(output_tensor.dtype)
            return super().__call__(output_tensor, *rest, **options)

    for parameter in whole:
        dist.broadcast(parameter, 0)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), whole, strict=True):
            parameter.to_local().copy_(value.chunk(topology.world_size)[topology.rank])
    model.set_custom_all_gather(cast(Any, Watched(*levels(topology, "gather", Traffic()), "ho", "int8")))
    model.unshard()
    same = all(torch.equal(now, then) for now, then in zip(model.parameters(), whole, strict=True))
    return same and seen == [torch.uint8]


def ring_alone(topology: fcdp.Topology) -> None:
    """Cells need not be contiguous rows: a column of other data may lie between them."""
    inside, across = levels(topology, "gather", Traffic())
    ring = HoRing(inside, across)
    right = everyone(topology, 33, torch.float32)
    wide = torch.zeros(*right.shape[:2], 40)
    ring.own(wide[..., 3:36]).copy_(ring.own(right))
    ring.gather(wide[..., 3:36])()
    assert torch.equal(wide[..., 3:36], right)
    assert not wide[..., :3].any() and not wide[..., 36:].any()
