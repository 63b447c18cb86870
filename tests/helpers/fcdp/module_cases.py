"""What ranks do in the tests of ``fully_shard`` with FSDP2's signature: the same loop with FSDP2's and with ours."""

import os
import shutil
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import PeftModel
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fcdp
from tests.helpers.fcdp.cases import VOCABULARY, Case, digest, make_model
from tests.helpers.fcdp.cases import policy as policy_of
from tests.helpers.fcdp.twin import InOrder

Losses = list[float]


def on_nodes_of_two(topology: fcdp.Topology, call: Callable[..., Any], *args: Any) -> Any:
    """Return ``call(topology, *args)`` while torchrun's variable says that two ranks share a node."""
    return on_nodes_of(topology, 2, call, *args)


def on_nodes_of(topology: fcdp.Topology, ranks: int, call: Callable[..., Any], *args: Any) -> Any:
    """Return ``call(topology, *args)`` while torchrun's variable says that this many ranks share a node."""
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    try:
        return call(topology, *args)
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
        dist.barrier()


def shard(
    model: Any, fully_shard: Any, mesh: DeviceMesh, policy: MixedPrecisionPolicy, **options: Any
) -> Any:
    """As torchtitan does: block by block, norm and head together, the root last."""
    causal = model.base_model.model if isinstance(model, PeftModel) else model
    options |= {"mesh": mesh, "mp_policy": policy}
    for block in causal.model.layers:
        fully_shard(block, **options)
    fully_shard([causal.model.norm, causal.lm_head], **{**options, "reshard_after_forward": False})
    fully_shard(model, **options)
    return model


def ids(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, VOCABULARY, (2, 9), generator=generator)


def step_of(model: Any, optimizer: torch.optim.Optimizer, step: int, rank: int) -> float:
    data = ids(step, rank)
    loss = model(input_ids=data, labels=data).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _in_order(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(InOrder(2, 2))


def train(topology: fcdp.Topology, case: Case, ours: bool, **options: Any) -> tuple[Losses, str, list[float]]:
    """Losses, digest of the weights, and bytes: counted, and by the formula."""
    mesh = init_device_mesh("cpu", (4,))
    model = shard(
        make_model(case), fcdp.fully_shard if ours else fsdp2_fully_shard, mesh, policy_of(case), **options
    )
    if not ours:
        _in_order(model)
    optimizer = adam(model)
    losses = [step_of(model, optimizer, step, topology.rank) for step in range(case.steps)]
    sent = []
    if ours:
        sharding = fcdp.sharding(model)
        formula = [sharding.inter_node_bytes(1, first_step=not step) for step in range(case.steps)]
        sent = [sharding.traffic.inter_node, sum(formula)]
        assert (sharding.topology.nodes, sharding.topology.ranks_per_node) == (2, 2)
    return losses, digest(model), sent


def train_sharded(topology: fcdp.Topology, strategy: str) -> tuple[Losses, str]:
    """FSDP2's own ``fully_shard``, then ``install``."""
    model = shard(
        make_model(Case()), fsdp2_fully_shard, init_device_mesh("cpu", (4,)), MixedPrecisionPolicy()
    )
    fcdp.install(model, strategy=strategy)
    optimizer = adam(model)
    return [step_of(model, optimizer, step, topology.rank) for step in range(4)], digest(model)


def sent_after_a_frozen_prefix(topology: fcdp.Topology, strategy: str) -> tuple[float, float]:
    """Bytes, counted and by the formula, of a step that trains the head alone and gathers the first block once."""
    model: Any = make_model(Case())
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    shard(model, fsdp2_fully_shard, init_device_mesh("cpu", (4,)), MixedPrecisionPolicy())
    sharding = fcdp.install(model, strategy=strategy)
    step_of(model, adam(model), 0, topology.rank)
    return sharding.traffic.inter_node, sharding.inter_node_bytes(1, first_step=True)


def train_two_dimensions(
    topology: fcdp.Topology, kind: str, ours: bool
) -> tuple[Losses, str, tuple[int, int]]:
    """``tp``: tensor-parallel in the node and sharded between nodes. ``tp-outside``: the other way round. ``hsdp``:
    sharded in the node, replicated between nodes."""
    names = ("tp", "dp") if kind == "tp-outside" else ("dp", "tp")
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    mesh = whole if kind == "hsdp" else whole["dp"]
    model = make_model(Case())
    if kind != "hsdp":
        plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
        for block in cast(Any, model).model.layers:
            parallelize_module(block.mlp, whole["tp"], plan)
    shard(model, fcdp.fully_shard if ours else fsdp2_fully_shard, mesh, MixedPrecisionPolicy())
    optimizer = adam(model)
    rank = dist.get_rank() if kind == "hsdp" else whole["dp"].get_local_rank()
    losses = [step_of(model, optimizer, step, rank) for step in range(4)]
    found = fcdp.sharding(model).topology if ours else None
    return losses, digest(model), (0, 0) if found is None else (found.nodes, found.ranks_per_node)


def train_on_some(topology: fcdp.Topology, ours: bool) -> Losses:
    """Ranks 1 and 2, on two nodes, train; the others never hear of it."""
    mesh = DeviceMesh("cpu", [1, 2])
    if topology.rank in (0, 3):
        return []
    model = shard(
        make_model(Case()), fcdp.fully_shard if ours else fsdp2_fully_shard, mesh, MixedPrecisionPolicy()
    )
    optimizer = adam(model)
    return [step_of(model, optimizer, step, topology.rank) for step in range(3)]


def like_fsdp2(topology: fcdp.Topology, what: str, ours: bool) -> tuple[Losses, str]:
    """Use one of FSDP2's methods, or change parameters in place, between and during steps."""
    mesh = init_device_mesh("cpu", (4,))
    model: Any = shard(
        make_model(Case()), fcdp.fully_shard if ours else fsdp2_fully_shard, mesh, MixedPrecisionPolicy()
    )
    if not ours:
        _in_order(model)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    if what.startswith("factor"):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(float(what.split()[1]))
                module.set_force_sum_reduction_for_comms(True)
                if not ours:
                    module.set_custom_reduce_scatter(InOrder(2, 2, average=False))
    if what == "keep":
        model.set_reshard_after_forward(False)
        model.set_reshard_after_backward(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        if what == "unshard":
            handles = [block.unshard(async_op=True) for block in model.model.layers]
            handles[0].wait()
        if what == "accumulate":
            model.set_requires_gradient_sync(step % 2 == 1)
        data = ids(step, topology.rank)
        loss = model(input_ids=data, labels=data).loss
        losses.append(float(loss))
        loss.backward()
        if what == "keep":  # FSDP2 would continue with the old weights
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        if what != "accumulate" or step % 2:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            if what == "ema":
                torch._foreach_lerp_(average, list(model.parameters()), 0.5)
                for parameter, mean in zip(model.parameters(), average, strict=True):
                    parameter.copy_(mean)
            if what == "local":
                for parameter in model.parameters():
                    parameter.to_local().mul_(0.5)
            if what == "data":
                for parameter in model.parameters():
                    parameter.data.mul_(0.5)
            if what == "state":
                for value in model.state_dict().values():
                    value.mul_(0.5)
            if what == "invalidate":
                for parameter in model.parameters():
                    parameter.to_local().numpy()[:] *= 0.5
                if ours:
                    fcdp.sharding(model).invalidate()
    return losses, digest(model)


def checkpoint(topology: fcdp.Topology, folder: str, first_ours: bool, event: str = "") -> tuple[Losses, str]:
    """Three steps with one of the two, and after a checkpoint of PyTorch's three with the other."""
    losses = []
    for is_second in (False, True):
        ours = first_ours != is_second
        mesh = init_device_mesh("cpu", (4,))
        model = shard(
            make_model(Case()), fcdp.fully_shard if ours else fsdp2_fully_shard, mesh, MixedPrecisionPolicy()
        )
        if not ours:
            _in_order(model)
        optimizer = adam(model)
        if is_second:
            step_of(model, optimizer, 50, topology.rank)  # with something cached, and then outdated
            weights, states = get_state_dict(model, optimizer)
            loaded = {"model": weights, "optimizer": states}
            dcp.load(loaded, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
        losses += [step_of(model, optimizer, step + 3 * is_second, topology.rank) for step in range(3)]
        if not is_second:
            weights, states = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    result = losses, digest(model)
    dist.barrier()
    if topology.rank == 0:
        shutil.rmtree(folder)
    return result
