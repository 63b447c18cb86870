"""Entry points: ``fully_shard`` with FSDP2's signature, or for a whole model; ``install``; and ``replace_fsdp2``.

Module by module, as FSDP2's, with collectives installed at the first forward pass::

    for block in model.layers:
        fcdp.fully_shard(block, mesh=mesh, mp_policy=policy)
    fcdp.fully_shard(model, mesh=mesh, mp_policy=policy)

Or at once, with a strategy, and one more line under gradient accumulation::

    topology = fcdp.Topology.from_environment()
    model = fcdp.fully_shard(model, topology, "fcdp", mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for micro_batches in data:
        for index, batch in enumerate(micro_batches):
            fcdp.sharding(model).set_is_last_micro_batch(index == len(micro_batches) - 1)
            model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

Or in a program of others, such as accelerate, transformers' ``Trainer``, TRL, or torchtitan, which shard a model with
the function that they import from PyTorch::

    fcdp.replace_fsdp2()
    trainer = SFTTrainer(...)
    trainer.train()

FSDP2 shards over OS's ranks. A custom all-gather per group spreads, gathers and caches parameters; a custom
reduce-scatter reduces gradients, where OS is not sharded an all-reduce hook. Where P is not sharded, FSDP2 reshards
only after the optimizer's step, and frozen parameters never."""

import dataclasses
import functools
import importlib
import sys
from types import ModuleType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.utils.hooks import RemovableHandle

from common.errors import UserError
from fcdp import fsdp2
from fcdp.grouping import ParameterGroup, find_units, split_modules, split_units
from fcdp.sharding import ATTRIBUTE, Sharding
from fcdp.strategy.strategy import AUTO, Routes, Strategy, parse_strategy
from fcdp.strategy.topology import Topology

Model = TypeVar("Model", bound="nn.Module | list[nn.Module]")
_PENDING = "_fcdp_pending"  # attribute of a sharded module that has not run yet


class _Pending(NamedTuple):
    hook: RemovableHandle  # the hook that installs
    strategy: Strategy | str  # what it installs, should the module be the root


def fully_shard(
    module: Model, topology: Topology | None = None, strategy: Strategy | str = "fcdp", **options: Any
) -> Model:
    """Shard ``module`` in place with FSDP2, and have it communicate by a strategy. Collective, as FSDP2's.

    *Without a topology* it is FSDP2's ``fully_shard`` with its arguments, on a mesh of one or two dimensions: inner
    modules first, the root last. Frozen and trainable parameters of a module become separate groups. At the root's
    first forward pass :func:`install` is called on it with its strategy; for other arguments, call it before.

    *With a topology* it takes a whole model: embedding, blocks and head are sharded one by one, over the ranks of the
    strategy. The result is an FSDP2 model either way: :func:`sharding` returns what FSDP2 does not have.

    Args:
        module: module to shard; without a topology also a list of modules that form one group, as for FSDP2.
        topology: the ranks, and which of them share a node.
        strategy: a strategy, or what :func:`fcdp.strategy.strategy.parse_strategy` reads; see :func:`install`.
        options: without a topology FSDP2's arguments; with one those of :func:`shard_whole_model` and :func:`install`.

    Raises:
        UserError: no such strategy, one that breaks a rule on this topology, or a threshold outside 0 to 1.
    """
    if topology is None:
        check_strategy(strategy)
        return _shard_module(module, strategy, options)
    if not isinstance(module, nn.Module):
        raise UserError(
            "With a topology fully_shard takes one whole model; a list of modules goes with mesh=."
        )
    cache = {
        name: options.pop(name) for name in ("device_cache_threshold", "host_cache_bytes") if name in options
    }
    routes = _routes(strategy, topology, cache.get("device_cache_threshold", 0))
    groups = shard_whole_model(module, topology, routes, **options)
    Sharding(module, topology, routes, groups, **cache)
    return module


# FSDP2's own has it: the way from a module to its state.
fully_shard.state = fsdp2_fully_shard.state  # type: ignore[attr-defined]


def install(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    strategy: Strategy | str = "fcdp",
    *,
    topology: Topology | None = None,
    device_cache_threshold: float = 0.9,
    host_cache_bytes: int | None = None,
) -> Sharding:
    """Have a model that FSDP2's (or our) ``fully_shard`` has sharded communicate by a strategy. Collective.

    Groups that FSDP2 has sharded over other ranks than most (experts, say) keep FSDP2's collectives.

    Args:
        model: the FSDP2 root.
        mesh: the mesh that it was sharded with. None: that of most of its parameters.
        strategy: as for :func:`fully_shard`, with optimizer states sharded over all ranks that FSDP2 shards over.
        topology: which of these ranks share a node. None: :meth:`Topology.from_mesh` finds it.
        device_cache_threshold: part of device memory, 0 to 1, up to which an ``adaptive`` cache keeps shards there.
        host_cache_bytes: host memory of this rank for cached shards; None: as much as they need. The rest is gathered
            at every use, trainable groups first. The smallest of all ranks' numbers counts.

    Raises:
        UserError: the model is not FSDP2's, has been installed on before, or has no group on these ranks; or the
            strategy shards optimizer states over fewer of them.
    """
    if not isinstance(model, FSDPModule):
        raise UserError(
            f"This {type(model).__name__} is not sharded: call fully_shard on it, its inner modules first."
        )
    if hasattr(model, ATTRIBUTE):
        raise UserError(f"This {type(model).__name__} has its collectives: install() is called once.")
    for module in model.modules():
        if (pending := module.__dict__.pop(_PENDING, None)) is not None:
            pending.hook.remove()
    sharded = fsdp2.find_groups(model)
    topology = topology or Topology.from_mesh(mesh or _mesh_of_most(sharded))
    groups = [group for group in sharded if fsdp2.shard_ranks(group) == topology.ranks]
    if not groups:
        raise UserError(
            f"No parameter of this {type(model).__name__} is sharded over the ranks {topology.ranks}."
        )
    routes = _routes(strategy, topology, device_cache_threshold)
    if routes.shards != topology.world_size:
        raise UserError(
            f"{routes.layout.strategy.name} shards optimizer states over {routes.shards} of the {topology.world_size} "
            "ranks that FSDP2 shards over. Give fully_shard a mesh of two dimensions, (replicas, "
            f"{routes.shards}), or a topology."
        )
    for group in groups:
        # What FSDP2 decides for its root at the first forward pass is wanted now.
        by_default = model in group.modules and cast(Any, model)._get_fsdp_state()._auto_reshard_after_forward
        if routes.keeps_gathered or by_default:
            group.holder.set_reshard_after_forward(False, recurse=False)
            group.kept_after_forward = True
    return Sharding(model, topology, routes, groups, device_cache_threshold, host_cache_bytes)


def sharding(model: nn.Module) -> Sharding:
    """Return the :class:`Sharding` of a model that :func:`fully_shard` has sharded, or :func:`install` changed."""
    state = getattr(model, ATTRIBUTE, None)
    if state is None and _PENDING in model.__dict__:
        state = install(model, strategy=model.__dict__[_PENDING].strategy)
    if not isinstance(state, Sharding):
        raise UserError(f"This {type(model).__name__} was not sharded with fcdp.fully_shard.")
    return state


def _shard_module(module: Model, strategy: Strategy | str, options: dict[str, Any]) -> Model:
    """Do what FSDP2's ``fully_shard`` does, with frozen parameters apart from trainable ones."""
    modules = cast("list[nn.Module]", [module] if isinstance(module, nn.Module) else list(module))
    for each in modules:
        if hasattr(each, ATTRIBUTE):
            raise UserError("fully_shard goes from inner modules to outer ones, before any of them has run.")
    ignored = {id(parameter) for parameter in options.get("ignored_params") or ()}
    claimed = fsdp2.managed_parameters(modules) | ignored
    for group in split_modules("", modules, claimed, 0, modules[0])[:-1]:
        if group.modules != modules:
            fsdp2_fully_shard(cast(Any, group.modules), **options)
    result = fsdp2_fully_shard(cast(Any, module), **options)

    # The root, the first FSDP2 module to run forward, gets its collectives before it does.
    @torch.compiler.disable
    def before_forward(module: nn.Module, args: Any) -> None:
        if fsdp2.find_groups(module):
            install(module, strategy=strategy).before_forward()
        else:  # it has no parameters, or none that anyone may gather for FSDP2
            module.__dict__.pop(_PENDING).hook.remove()

    for each in modules:
        hook = each.register_forward_pre_hook(before_forward, prepend=True)
        setattr(each, _PENDING, _Pending(hook, strategy))
    return cast(Model, result)


def _mesh_of_most(groups: list[ParameterGroup]) -> DeviceMesh:
    """Return the mesh that most elements are sharded over."""
    sizes: dict[tuple[int, ...], int] = {}
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    for group in groups:
        mesh, ranks = fsdp2.shard_mesh(group), tuple(fsdp2.shard_ranks(group))
        if mesh is not None:
            sizes[ranks] = sizes.get(ranks, 0) + group.cell_numel * len(ranks)
            meshes[ranks] = mesh
    if not sizes:
        raise UserError(
            "No parameter of this model is sharded by FSDP2 in a group that is the only one of its module."
        )
    return meshes[max(sizes, key=lambda ranks: sizes[ranks])]


def check_strategy(strategy: Strategy | str) -> Strategy:
    """Return the strategy that ``strategy`` is or names, except ``auto``."""
    if isinstance(strategy, str):
        if strategy.strip().lower() == AUTO:
            raise UserError(
                "'auto' needs a plan, for a model, a batch and a cluster: fcdp.planner.plan(workload, cluster) has the "
                "strategy as .choice.layout.strategy."
            )
        return parse_strategy(strategy)
    return strategy


def _routes(strategy: Strategy | str, topology: Topology, device_cache_threshold: float) -> Routes:
    if not 0 <= device_cache_threshold <= 1:
        raise UserError(
            f"device_cache_threshold is a part of device memory, 0 to 1, not {device_cache_threshold}."
        )
    return Routes.of(check_strategy(strategy).on(topology.levels))


def shard_whole_model(
    model: nn.Module,
    topology: Topology,
    routes: Routes,
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    blocks: list[nn.Module] | None = None,
) -> list[ParameterGroup]:
    """Shard ``model`` in place with FSDP2 over OS's ranks, and return its groups in the order they were sharded in.

    Frozen parameters are gathered over P's scope and never reduced; beyond that scope they are gathered only once.

    Args:
        model: on any device, also meta. Which parameters require gradients decides which are gathered together.
        topology: the nodes and ranks.
        routes: the strategy on that topology.
        mp_policy: FSDP2's policy. Its ``reduce_dtype`` is by default the dtype of the computation.
        blocks: the modules to shard one by one. None: the elements of every outermost ``nn.ModuleList``.
    """
    units = find_units(model, blocks)
    # Frozen and trainable parameters are gathered apart where something of them is cached from step to step.
    apart = routes.layout.p.shards < routes.shards
    groups = split_units(units, apart)
    policy = mp_policy or MixedPrecisionPolicy()
    if policy.reduce_dtype is None:
        dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
        dtype = policy.param_dtype or (dtypes.pop() if len(dtypes) == 1 else None)
        policy = dataclasses.replace(policy, reduce_dtype=dtype)
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
        # The next unit is gathered while a unit computes, as FSDP2 does on CUDA by running ahead.
        by_unit: list[list[FSDPModule]] = [[] for _ in units]
        for group in groups:
            by_unit[group.unit].append(group.holder)
        for index, unit in enumerate(units[:-1]):
            following = next((later for later in by_unit[index + 1 : -1] if later), [])
            if isinstance(unit.module, FSDPModule) and following:
                unit.module.set_modules_to_forward_prefetch(following)
    return groups


class Replacement:
    """What :func:`replace_fsdp2` has replaced, until :meth:`undo` or the end of a ``with`` block."""

    def __init__(self, ours: Any):
        # Others import ``fully_shard`` from these. The rest of PyTorch keeps its function.
        names = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")
        modules: list[Any] = [importlib.import_module(name) for name in names]
        modules += [
            module
            for name, module in sorted(sys.modules.items())
            if isinstance(module, ModuleType) and name.split(".")[0] not in ("torch", "fcdp")
        ]
        self._replaced = [
            (module, name)
            for module in modules
            for name, value in vars(module).items()
            if value is fsdp2_fully_shard
        ]
        for module, name in self._replaced:
            setattr(module, name, ours)

    def undo(self) -> None:
        """Put PyTorch's function back where it was. What has been sharded meanwhile stays as it is."""
        for module, name in self._replaced:
            setattr(module, name, fsdp2_fully_shard)
        self._replaced.clear()

    def __enter__(self) -> "Replacement":
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


def replace_fsdp2(strategy: Strategy | str = "fcdp") -> Replacement:
    """Have everyone who shards with FSDP2 from now on get :func:`fcdp.fully_shard` instead.

    It is replaced in PyTorch and in all modules that have imported it. Models are FSDP2 models, and communicate by
    ``strategy``, one that :func:`fcdp.install` takes, from their first forward pass on."""
    check_strategy(strategy)
    ours: Any = functools.partial(fully_shard, strategy=strategy)
    functools.update_wrapper(ours, fully_shard)
    return Replacement(ours)
