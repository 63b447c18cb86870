"""All that is read of FSDP2 beyond its public methods.

The names below are the same from PyTorch 2.11 to 2.13; until 2.12.0 a module had one group at most."""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fcdp.grouping import ParameterGroup


def param_groups(module: nn.Module) -> list[Any]:
    """Return FSDP2's parameter groups of ``module`` itself: one per mesh of a ``shard_placement_fn``."""
    if not isinstance(module, FSDPModule):
        return []
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def managed_parameters(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of the parameters, as registered now, that FSDP2 has sharded in or below ``modules``."""
    return {
        id(parameter)
        for top in modules
        for module in top.modules()
        for group in param_groups(module)
        for parameter in read(group, "").registered()
    }


def find_groups(model: nn.Module) -> list[ParameterGroup]:
    """Return the groups of ``model`` in the order of its modules, except of modules with several, whose collectives
    cannot be replaced."""
    by_id: dict[int, ParameterGroup] = {}
    unit = 0
    outer = "."
    for name, module in model.named_modules():
        groups = param_groups(module)
        if len(groups) == 1 and id(groups[0]) not in by_id:
            if not name.startswith(outer):
                unit = unit + 1
                outer = f"{name}." if name else outer
            by_id[id(groups[0])] = group = read(groups[0], name or "root")
            group.unit = unit
    if groups := param_groups(model):
        by_id[id(groups[0])].unit = unit + 1  # the root's are used until the end
    return list(by_id.values())


def read(fsdp: Any, name: str) -> ParameterGroup:
    """Return what there is to know of FSDP2's group ``fsdp``."""
    places = [(sharded._module_info.module, sharded._module_info.param_name) for sharded in fsdp.fsdp_params]
    return measure(ParameterGroup(name, list(fsdp.modules), places, 0), fsdp)


def measure(group: ParameterGroup, fsdp: Any = None) -> ParameterGroup:
    """Note the sizes of one rank's part of ``group``, which FSDP2 (in ``fsdp``) has just sharded."""
    fsdp = fsdp or param_groups(group.modules[0])[0]
    policy = fsdp.mp_policy
    dtypes = set()
    group.cell_numel = group.cell_bytes = group.reduced_cell_bytes = 0
    for sharded in fsdp.fsdp_params:
        parameter = sharded.sharded_param
        elements = sharded._sharded_param_data.numel()
        dtype = (parameter.is_floating_point() and policy.param_dtype) or parameter.dtype
        dtypes.add(dtype)
        group.cell_numel += elements
        group.cell_bytes += elements * dtype.itemsize
        if parameter.requires_grad:
            group.reduced_cell_bytes += elements * (policy.reduce_dtype or dtype).itemsize
    group.mixes_dtypes = len(dtypes) > 1
    group.kept_after_forward = fsdp.post_forward_mesh_info is None
    group.had_trainable = group.trainable
    return group


def shard_mesh(group: ParameterGroup) -> DeviceMesh | None:
    """Return the ranks that ``group`` is sharded over, in one dimension; None: it is only replicated."""
    info = param_groups(group.modules[0])[0].mesh_info
    if not hasattr(info, "shard_process_group"):
        return None
    mesh: DeviceMesh = info.mesh
    return mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[info.shard_mesh_dim]]


def shard_ranks(group: ParameterGroup) -> list[int]:
    """Return the global ranks that ``group`` is sharded over."""
    mesh = shard_mesh(group)
    return [] if mesh is None else dist.get_process_group_ranks(mesh.get_group())


def is_sharded(group: ParameterGroup) -> bool:
    """Return whether ``group`` shows its shards: it is neither gathered nor partly so."""
    return bool(param_groups(group.modules[0])[0].is_sharded)


def adopt_requires_grad(group: ParameterGroup) -> None:
    """Have the shards of ``group`` require gradients as the parameters do that its modules show now.

    Between gather and release modules show gathered parameters. FSDP2 sets these as the shards are at every gather, so
    what a caller changes on them, by ``requires_grad_``, would be lost.
    """
    for each in param_groups(group.modules[0])[0].fsdp_params:
        shown = each._module_info.module._parameters.get(each._module_info.param_name)
        if shown is not None and shown is not each.sharded_param:
            each.sharded_param.requires_grad_(shown.requires_grad)


def gathered_parameters(group: ParameterGroup) -> list[nn.Parameter]:
    """Return the parameters of ``group`` as its modules show them between gather and release, once gathered."""
    return [
        each._unsharded_param
        for each in param_groups(group.modules[0])[0].fsdp_params
        if hasattr(each, "_unsharded_param")
    ]


def divide_factor(group: ParameterGroup) -> float | None:
    """Return what ``set_gradient_divide_factor`` was called with; None: it was not."""
    factor: float | None = param_groups(group.modules[0])[0].gradient_divide_factor
    return factor


def versions(group: ParameterGroup) -> list[tuple[int, int]]:
    """Return where the rank's part of each parameter lies, and how often autograd has seen it written to."""
    parts = [each._sharded_param_data for each in param_groups(group.modules[0])[0].fsdp_params]
    return [(part.data_ptr(), -1 if part.is_inference() else part._version) for part in parts]


def row_range(parameter: DTensor) -> tuple[int, int]:
    """Return the rows that this rank holds of a sharded parameter, along the last dimension of its mesh."""
    mesh = parameter.device_mesh
    rows = parameter.shape[0]
    part = -(-rows // mesh.size(mesh.ndim - 1))
    start = min(rows, part * mesh.get_local_rank(mesh.ndim - 1))
    return start, min(rows, start + part)
