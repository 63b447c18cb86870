"""``fully_shard``: an ordinary FSDP2 model, sharded and communicating by a strategy.

An ordinary training loop, with one line more under gradient accumulation::

    dist.init_process_group()
    topology = fcdp.Topology.from_environment()
    model = fcdp.fully_shard(model, topology, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for micro_batches in data:
        for index, batch in enumerate(micro_batches):
            fcdp.sharding(model).set_is_last_micro_batch(index == len(micro_batches) - 1)
            model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

Every strategy is made of four features of FSDP2:

* FSDP2 shards over OS's ranks: its mesh.
* A custom all-gather per group spreads, gathers and caches parameters (``comms/all_gather.py``).
* A custom reduce-scatter per group reduces gradients, first inside G's scope, at last beyond it, and over replicas
  (``comms/reduce_scatter.py``); where OS is not sharded, an all-reduce hook.
* Where P is not sharded, FSDP2 does not reshard until the optimizer has stepped; frozen parameters it never reshards.
"""

import dataclasses
from typing import Any, TypeVar, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

from common.errors import UserError
from fcdp.cache.placement import DeviceMemory
from fcdp.grouping import AdapterGroups, ParameterGroup, Unit, find_units, split_units, whole_units
from fcdp.sharding import ATTRIBUTE, Sharding
from fcdp.strategy.names import AUTO, parse_strategy
from fcdp.strategy.routes import Routes
from fcdp.strategy.strategy import Strategy, StrategyMeshes
from fcdp.strategy.topology import Topology

Model = TypeVar("Model", bound=nn.Module)


def fully_shard(
    model: Model,
    topology: Topology,
    strategy: Strategy | str = "fcdp",
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    blocks: list[nn.Module] | None = None,
    adapter_groups: AdapterGroups = "block",
    device_cache_threshold: float = 0.9,
    host_cache_bytes: int | None = None,
    device_memory: DeviceMemory | None = None,
) -> Model:
    """Shard ``model`` in place with FSDP2 and install the strategy's collectives. Collective: all ranks call it alike.

    The result is an FSDP2 model: DTensor parameters, any optimizer of PyTorch, distributed checkpoints, activation
    checkpointing, ``torch.compile`` per block. :func:`sharding` returns what FSDP2 does not have.

    The strategy's scopes are those of trainable parameters. Frozen ones are gathered over P's scope and never reduced;
    where that is narrower than OS's they are gathered beyond it only once.

    Args:
        model: parameters on any device, the meta device included; it is moved to ``topology.device`` shard by shard.
            Which parameters require gradients should be final: it decides which are gathered together.
        topology: the ranks, and which of them share a node.
        strategy: a strategy, or what :func:`fcdp.strategy.names.parse_strategy` understands: a preset's name, or
            P/G/OS.
        mp_policy: FSDP2's policy. Where it has no ``reduce_dtype``, that is set to what FSDP2 has always taken, the
            dtype of the computation: FSDP2's own default is about to change.
        blocks: the modules to shard one by one. None: the elements of every outermost ``nn.ModuleList``.
        adapter_groups: see :data:`fcdp.grouping.AdapterGroups`; without effect where P is sharded as OS is.
        device_cache_threshold: part of device memory up to which cached shards may stay on the device, 0 to 1. 0: none
            ever does, and the device holds what it holds under ZeRO-3 (strategies with an ``adaptive`` cache).
        host_cache_bytes: host memory of this rank for cached shards; None: as much as they need. What does not fit is
            gathered from all over OS's scope at every use, trainable groups first. The smallest of all ranks' numbers
            counts (strategies with a ``host`` or ``adaptive`` cache).
        device_memory: for tests: stands for the device's memory where there is none.

    Raises:
        UserError: no such strategy, one that breaks a rule on this topology, or a threshold that is no
            part of a whole.
    """
    if not 0 <= device_cache_threshold <= 1:
        raise UserError(f"device_cache_threshold is a part of device memory, 0 to 1, not {device_cache_threshold}.")
    layout = _layout(strategy, topology)
    routes = Routes.of(layout)
    units = find_units(model, blocks)
    # Frozen and trainable parameters are gathered apart where something of them is cached from step to step.
    apart = layout.p.shards < layout.os.shards
    groups = split_units(units, adapter_groups) if apart else whole_units(units)
    policy = _explicit(mp_policy or MixedPrecisionPolicy(), model)
    _shard_groups(model, units, groups, routes, topology.shard_mesh(routes.shards), policy)
    result = Sharding(model, topology, routes, groups)
    result.install(device_cache_threshold, host_cache_bytes, device_memory)
    if topology.device.type == "cpu" and routes.shards > 1:
        _prefetch_forward(units, groups)
    setattr(model, ATTRIBUTE, result)
    return model


def _shard_groups(
    model: nn.Module,
    units: list[Unit],
    groups: list[ParameterGroup],
    routes: Routes,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
) -> None:
    """Let FSDP2 shard every group, and at last the model around them."""
    for group in groups:
        unit = units[group.unit]
        _measure(group, routes.shards, policy)
        group.kept_after_forward = routes.keeps_gathered or (unit.keep_after_forward and group.modules == [unit.module])
        target = group.modules if len(group.modules) > 1 else group.modules[0]
        keep = group.kept_after_forward
        fsdp2_fully_shard(cast(Any, target), mesh=mesh, mp_policy=policy, reshard_after_forward=not keep)
    if not isinstance(model, FSDPModule):  # every parameter is in some unit, and the root holds none itself
        fsdp2_fully_shard(model, mesh=mesh, mp_policy=policy)


def sharding(model: nn.Module) -> Sharding:
    """Return the :class:`Sharding` of a model that :func:`fully_shard` has returned.

    Raises:
        UserError: it is not such a model.
    """
    found = getattr(model, ATTRIBUTE, None)
    if not isinstance(found, Sharding):
        raise UserError(f"This {type(model).__name__} was not sharded with fcdp.fully_shard.")
    return found


def _layout(strategy: Strategy | str, topology: Topology) -> StrategyMeshes:
    if isinstance(strategy, str):
        if strategy.strip().lower() == AUTO:
            raise UserError(
                "'auto' needs a plan, for a model, a batch and a cluster: fcdp.planner.plan(workload, cluster) has the "
                "strategy as .choice.layout.strategy."
            )
        strategy = parse_strategy(strategy)
    return strategy.on(topology.levels)


def _explicit(policy: MixedPrecisionPolicy, model: nn.Module) -> MixedPrecisionPolicy:
    """Return ``policy`` with an explicit ``reduce_dtype``."""
    if policy.reduce_dtype is not None:
        return policy
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    dtype = policy.param_dtype or (dtypes.pop() if len(dtypes) == 1 else None)
    return dataclasses.replace(policy, reduce_dtype=dtype)


def _measure(group: ParameterGroup, shards: int, policy: MixedPrecisionPolicy) -> None:
    """Note the size of one rank's part: FSDP2 cuts every parameter along its first dimension, into equal parts."""
    dtypes = set()
    for parameter in group.registered():
        rows = parameter.shape[0] if parameter.dim() else 1
        elements = -(-rows // shards) * (parameter.numel() // max(rows, 1))
        dtype = (parameter.is_floating_point() and policy.param_dtype) or parameter.dtype
        dtypes.add(dtype)
        group.cell_numel += elements
        group.cell_bytes += elements * dtype.itemsize
        if parameter.requires_grad:
            group.reduced_cell_bytes += elements * (policy.reduce_dtype or parameter.dtype).itemsize
    group.mixes_dtypes = len(dtypes) > 1


def _prefetch_forward(units: list[Unit], groups: list[ParameterGroup]) -> None:
    """Have the next unit's groups gathered while a unit computes. On CUDA FSDP2 does so by running ahead; on the CPU
    it has to be asked."""
    by_unit: list[list[FSDPModule]] = [[] for _ in units]
    for group in groups:
        by_unit[group.unit].append(group.holder)
    for index, unit in enumerate(units[:-1]):
        following = next((later for later in by_unit[index + 1 : -1] if later), [])
        if isinstance(unit.module, FSDPModule) and following:
            unit.module.set_modules_to_forward_prefetch(following)
