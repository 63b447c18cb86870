"""A whole model sharded at once: its units are found, and FSDP2 shards them one by one."""

import dataclasses
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

from fcdp import fsdp2
from fcdp.grouping import AdapterGroups, ParameterGroup, Unit, find_units, split_units, whole_units
from fcdp.strategy.routes import Routes
from fcdp.strategy.topology import Topology


def shard_whole_model(
    model: nn.Module,
    topology: Topology,
    routes: Routes,
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    blocks: list[nn.Module] | None = None,
    adapter_groups: AdapterGroups = "block",
) -> list[ParameterGroup]:
    """Shard ``model`` in place with FSDP2 over OS's ranks, and return its groups in the order they were sharded in.

    The strategy's scopes are those of trainable parameters. Frozen ones are gathered over P's scope and never reduced;
    where that is narrower than OS's they are gathered beyond it only once.

    Args:
        model: parameters on any device, the meta device included; it is moved to ``topology.device`` shard by shard.
            Which parameters require gradients should be final: it decides which are gathered together.
        mp_policy: FSDP2's policy. Where it has no ``reduce_dtype``, that is set to what FSDP2 has always taken, the
            dtype of the computation: FSDP2's own default is about to change.
        blocks: the modules to shard one by one. None: the elements of every outermost ``nn.ModuleList``.
        adapter_groups: see :data:`fcdp.grouping.AdapterGroups`; without effect where P is sharded as OS is.
    """
    units = find_units(model, blocks)
    # Frozen and trainable parameters are gathered apart where something of them is cached from step to step.
    apart = routes.layout.p.shards < routes.shards
    groups = split_units(units, adapter_groups) if apart else whole_units(units)
    policy = _explicit(mp_policy or MixedPrecisionPolicy(), model)
    mesh = topology.shard_mesh(routes.shards)
    for group in groups:
        unit = units[group.unit]
        keep = routes.keeps_gathered or (unit.keep_after_forward and group.modules == [unit.module])
        target = group.modules if len(group.modules) > 1 else group.modules[0]
        fsdp2_fully_shard(cast(Any, target), mesh=mesh, mp_policy=policy, reshard_after_forward=not keep)
        fsdp2.measure(group)
    if not isinstance(model, FSDPModule):  # every parameter is in some unit, and the root holds none itself
        fsdp2_fully_shard(model, mesh=mesh, mp_policy=policy)
    if topology.device.type == "cpu" and routes.shards > 1:
        _prefetch_forward(units, groups)
    return groups


def _explicit(policy: MixedPrecisionPolicy, model: nn.Module) -> MixedPrecisionPolicy:
    """Return ``policy`` with an explicit ``reduce_dtype``."""
    if policy.reduce_dtype is not None:
        return policy
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    dtype = policy.param_dtype or (dtypes.pop() if len(dtypes) == 1 else None)
    return dataclasses.replace(policy, reduce_dtype=dtype)


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
