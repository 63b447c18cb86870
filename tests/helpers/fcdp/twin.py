"""Plain FSDP2 to compare with, also with the one thing changed that bit equality needs: the order of additions.

gloo's reduce-scatter is a ring all-reduce: every piece of the buffer starts its sum at another rank, so what is added
first depends on where a gradient lies. NCCL has its own orders. Two-level reduction adds inside the node first, on
purpose. Floating-point sums differ between these orders, so no two-level reduction can equal gloo's ring bit for bit.
This twin gathers the gradients of all ranks and adds them in plain sight, node by node.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fcdp
from fcdp.grouping import find_units, split_units


class Plain:
    """FSDP2 untouched, unit by unit as ours: ``fsdp2`` over all ranks, ``fsdp2-hybrid`` inside nodes."""

    def __init__(self, model: nn.Module, topology: fcdp.Topology, name: str, policy: MixedPrecisionPolicy):
        mesh = topology.mesh
        if name == "fsdp2-hybrid":
            mesh = init_device_mesh(
                "cpu", (topology.nodes, topology.ranks_per_node), mesh_dim_names=("n", "m")
            )
        units = find_units(model)
        self.is_hybrid = name == "fsdp2-hybrid"
        self.model: Any = model
        self.groups = split_units(units, apart=False)
        for group in self.groups:
            keep = units[group.unit].keep_after_forward
            fully_shard(group.modules[0], mesh=mesh, mp_policy=policy, reshard_after_forward=not keep)

    def set_is_last_micro_batch(self, is_last: bool) -> None:
        if self.is_hybrid:
            self.model.set_requires_all_reduce(is_last)

    def invalidate(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is open."""


class Ring:
    """The reduce-scatter that FSDP2 has itself, as a comm: FSDP2's own class is private."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group)


class InOrder:
    """FSDP2's reduce-scatter, from an all-gather: average in each node, sum over micro-batches, average over nodes."""

    def __init__(self, nodes: int, ranks: int, average: bool = True):
        self.nodes, self.ranks, self.average = nodes, ranks, average
        self.is_last = True
        self.sums: list[torch.Tensor] | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert op == (dist.ReduceOp.AVG if self.average else dist.ReduceOp.SUM)
        everyone = [torch.empty_like(input_tensor) for _ in range(group.size())]
        dist.all_gather(everyone, input_tensor, group=group)
        mine = [gradient.chunk(group.size())[group.rank()] for gradient in everyone]
        in_nodes = []
        for node in range(self.nodes):
            total = mine[node * self.ranks].clone()
            for place in range(1, self.ranks):
                total = total + mine[node * self.ranks + place]
            in_nodes.append(total / (self.ranks if self.average else 1))
        if self.sums is not None:
            in_nodes = [before + now for before, now in zip(self.sums, in_nodes, strict=True)]
        self.sums = None if self.is_last else [total.float() for total in in_nodes]
        total = torch.zeros_like(output_tensor)
        if self.is_last:
            in_nodes = [total.to(output_tensor.dtype) for total in in_nodes]
            total = in_nodes[0]
            for other in in_nodes[1:]:
                total = total + other
            total = total / (self.nodes if self.average else 1)
        output_tensor.copy_(total)
