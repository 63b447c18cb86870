"""``fully_shard``: an ordinary FSDP2 model whose parameters cross the network as seldom as they can.

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
"""

import dataclasses
import weakref
from typing import Any, Literal, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

from common.errors import FinetuneError, UserError, did_you_mean
from common.units import format_bytes
from fcdp.all_gather import CachedAllGather
from fcdp.grouping import AdapterGroups, ParameterGroup, Unit, find_units, split_units, whole_units
from fcdp.host_cache import CopyStreams, HostCache, Share
from fcdp.placement import DeviceMemory, Placement
from fcdp.rank_level import RankLevel
from fcdp.reduce_scatter import MicroBatches, TwoLevelReduceScatter
from fcdp.staleness import Net, Watch, mark_all
from fcdp.topology import Topology
from fcdp.traffic import Traffic, fcdp_bytes, hybrid_bytes, zero3_bytes

StrategyName = Literal["fcdp", "zero3", "hybrid"]
"""``fcdp``: fully sharded, parameters cached in host memory, two-level reduction. ``zero3``: plain FSDP2 over all
ranks. ``hybrid``: FSDP2 sharded inside each node and replicated across nodes (HSDP, MiCS)."""

_ATTRIBUTE = "_fcdp_sharding"
"""Of the model: its :class:`Sharding` lives as long as it does."""

Model = TypeVar("Model", bound=nn.Module)


def fully_shard(
    model: Model,
    topology: Topology,
    strategy: StrategyName = "fcdp",
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    blocks: list[nn.Module] | None = None,
    adapter_groups: AdapterGroups = "block",
    device_cache_threshold: float = 0.9,
    host_cache_bytes: int | None = None,
    two_level_reduction: bool = True,
    device_memory: DeviceMemory | None = None,
) -> Model:
    """Shard ``model`` in place with FSDP2 and install the strategy's collectives. Collective: all ranks call it alike.

    What comes back is an FSDP2 model: DTensor parameters, any optimizer of PyTorch, distributed checkpoints,
    activation checkpointing, ``torch.compile`` per block. :func:`sharding` has what FSDP2 does not.

    Args:
        model: parameters on any device, the meta device included; it is moved to ``topology.device`` shard by shard.
            Which parameters require gradients should be settled: it decides what travels together.
        strategy: see :data:`StrategyName`.
        mp_policy: FSDP2's. Where it has no ``reduce_dtype``, that is set to what FSDP2 has always taken, the dtype of
            the computation: FSDP2's own default is about to change.
        blocks: the modules to shard one by one. None: the elements of every outermost ``nn.ModuleList``.
        adapter_groups: see :data:`fcdp.grouping.AdapterGroups` (fcdp).
        device_cache_threshold: part of device memory up to which shares may stay on the device, 0 to 1. 0: none ever
            does, and the device holds what it holds under ZeRO-3 (fcdp).
        host_cache_bytes: host memory of this rank for cached shares; None: as much as they need, which is the model in
            compute precision over ranks per node. What does not fit is gathered across nodes at every use, trainable
            groups first. The smallest of all ranks' numbers counts (fcdp).
        two_level_reduction: False: keep FSDP2's own reduce-scatter (fcdp).
        device_memory: for tests: stands for the device's memory where there is none.

    Raises:
        UserError: an unknown strategy, or a threshold that is no part of a whole.
    """
    if strategy not in get_args(StrategyName):
        raise UserError(
            f"There is no strategy {strategy!r}.{did_you_mean(strategy, get_args(StrategyName))} "
            f"Known: {', '.join(get_args(StrategyName))}."
        )
    if not 0 <= device_cache_threshold <= 1:
        raise UserError(f"device_cache_threshold is a part of device memory, 0 to 1, not {device_cache_threshold}.")
    units = find_units(model, blocks)
    groups = split_units(units, adapter_groups) if strategy == "fcdp" else whole_units(units)
    policy = _explicit(mp_policy or MixedPrecisionPolicy(), model)
    mesh = topology.hybrid_mesh() if strategy == "hybrid" else topology.mesh
    for group in groups:
        unit = units[group.unit]
        _measure(group, mesh.size(mesh.ndim - 1), policy)
        keep = group.kept_after_forward = unit.keep_after_forward and group.modules == [unit.module]
        target = group.modules if len(group.modules) > 1 else group.modules[0]
        fsdp2_fully_shard(cast(Any, target), mesh=mesh, mp_policy=policy, reshard_after_forward=not keep)
    if not isinstance(model, FSDPModule):  # every parameter is in some unit, and the root holds none itself
        fsdp2_fully_shard(model, mesh=mesh, mp_policy=policy)
    result = Sharding(model, topology, strategy, groups)
    if strategy == "fcdp" and topology.nodes > 1:  # one node has no network to spare: plain FSDP2
        result._install(device_cache_threshold, host_cache_bytes, two_level_reduction, device_memory)
        if topology.device.type == "cpu":
            _prefetch_forward(units, groups)
    setattr(model, _ATTRIBUTE, result)
    return model


class Sharding:
    """What an FSDP2 model sharded by :func:`fully_shard` has beyond FSDP2. Get it with :func:`sharding`."""

    def __init__(self, model: nn.Module, topology: Topology, strategy: StrategyName, groups: list[ParameterGroup]):
        self.topology = topology
        self.strategy: StrategyName = strategy
        self.groups = groups
        """Parameter groups, in the order in which they were sharded."""
        self.traffic = Traffic()
        """What this rank's gathers and reductions have sent (fcdp)."""
        self.host_cache_bytes = 0
        """Host memory that this rank's shares take (fcdp)."""
        self._model = weakref.ref(model)
        self._micro_batches = MicroBatches()
        self._gathers: list[CachedAllGather] = []
        self._reductions: list[TwoLevelReduceScatter] = []
        self._cache: HostCache | None = None
        self._placement: Placement | None = None
        self._net: Net | None = None
        self._watch: Watch | None = None
        this = weakref.ref(self)

        def before_forward(module: nn.Module, args: Any) -> None:
            if (owner := this()) is not None:
                owner._adopt_thawed()

        model.register_forward_pre_hook(before_forward, prepend=True)

    def set_is_last_micro_batch(self, is_last: bool) -> None:
        """Say whether the next backward is the step's last one; it is unless told otherwise.

        Before the last one, gradients are summed inside each node only and ``.grad`` is not valid (fcdp, hybrid).
        ``zero3`` reduces each micro-batch across all ranks: that is what it costs.
        """
        self._micro_batches.is_last = is_last
        model = self._model()
        if self.strategy == "hybrid" and model is not None:
            cast(FSDPModule, model).set_requires_all_reduce(is_last)

    def invalidate(self) -> None:
        """Parameters were changed by something else than an optimizer of PyTorch or ``load_state_dict``: gather all
        of them anew. Every rank must call it at the same place."""
        mark_all(self.groups)

    def discard_gradients(self) -> None:
        """Forget sums of micro-batches that will not be finished. Call it where a step is given up half-way."""
        for reduction in self._reductions:
            reduction.partial = None

    def close(self) -> None:
        """Stop watching optimizers and let go of host memory: from now on every gather goes across nodes.

        Call it on every rank, before ``Topology.close()`` and ``destroy_process_group()``.
        """
        if self._watch is not None:
            self._watch.close()
        if self.topology.device.type == "cuda":
            torch.cuda.synchronize()
        for gather in self._gathers:
            gather.share = None
        if self._cache is not None:
            self._cache.close()

    def bytes_across_nodes(self, micro_batches: int, *, first_step: bool = False, gloo: bool = False) -> float:
        """What one node should send to others in a step, in bytes of payload, by the formulas of ``traffic.py``.

        Args:
            micro_batches: of the step; each runs every group forward and backward once, without recomputation.
            first_step: nothing is cached yet (fcdp).
            gloo: FSDP2's own reduce-scatter runs on gloo, where it is an all-reduce.
        """
        topology = self.topology
        in_mesh = topology.ranks_per_node if self.strategy == "hybrid" else topology.world_size
        reduced = in_mesh * sum(group.reduced_cell_bytes for group in self.groups)
        if self.strategy == "hybrid":
            return hybrid_bytes(topology.nodes, reduced=reduced)
        if self.strategy == "zero3":
            uses = sum(group.cell_bytes * (1 if group.kept_after_forward else 2) for group in self.groups)
            return zero3_bytes(
                in_mesh, gathered=in_mesh * uses * micro_batches, reduced=reduced * micro_batches, all_reduce=gloo
            )
        dirty = in_mesh * sum(group.cell_bytes for group in self.groups if first_step or group.trainable)
        return fcdp_bytes(topology.nodes, gathered=dirty, reduced=reduced)

    def on_device(self) -> list[str]:
        """Names of the groups whose share is on the device now."""
        return [gather.group.name for gather in self._gathers if gather.share is not None and gather.share.on_device]

    def _install(
        self,
        threshold: float,
        host_cache_bytes: int | None,
        two_level_reduction: bool,
        device_memory: DeviceMemory | None,
    ) -> None:
        topology = self.topology
        sizes = [topology.nodes * group.cell_bytes for group in self.groups]
        cached = self._choose_cached(sizes, _smallest(host_cache_bytes))
        self._cache = HostCache([sizes[index] for index in cached], topology.device)
        self.host_cache_bytes = self._cache.nbytes
        self._placement = Placement(device_memory or DeviceMemory.of(topology.device), threshold)
        self._net = Net(topology.device)
        streams = CopyStreams.on(topology.device)
        gather_inside = RankLevel(lambda: topology.gather_groups, "inside", "gather", self.traffic)
        gather_across = RankLevel(lambda: topology.gather_groups, "across", "gather", self.traffic)
        reduce_inside = RankLevel(lambda: topology.reduce_groups, "inside", "reduce", self.traffic)
        reduce_across = RankLevel(lambda: topology.reduce_groups, "across", "reduce", self.traffic)
        for index, group in enumerate(self.groups):
            share = None
            if index in cached:
                share = Share(self._cache.take(sizes[index]), streams, self._placement, self.traffic)
            comm = CachedAllGather(group, gather_inside, gather_across, share, streams, self._net, self.traffic)
            self._gathers.append(comm)
            holder = cast(FSDPModule, group.modules[0])
            holder.set_custom_all_gather(cast(Any, comm))
            if two_level_reduction:
                reduction = TwoLevelReduceScatter(group.name, reduce_inside, reduce_across, self._micro_batches)
                self._reductions.append(reduction)
                holder.set_custom_reduce_scatter(cast(Any, reduction))
        self._watch = Watch(self.groups, weakref.WeakMethod(self._before_step), weakref.WeakMethod(self._after_step))

    def _choose_cached(self, sizes: list[int], budget: int | None) -> list[int]:
        """Which groups have a place in the host cache, by index: frozen ones first, they save most."""
        if budget is None:
            return list(range(len(sizes)))
        chosen = []
        for index in sorted(range(len(sizes)), key=lambda index: self.groups[index].trainable):
            if sizes[index] <= budget:
                chosen.append(index)
                budget -= sizes[index]
        return sorted(chosen)

    def _before_step(self) -> None:
        if self._net is not None:
            self._net.raise_if_found()
        for reduction in self._reductions:
            if reduction.partial is not None:
                kept = reduction.partial.numel() * reduction.partial.element_size()
                raise FinetuneError(
                    f"The optimizer steps while {format_bytes(kept)} of gradients per rank of one group are summed "
                    "inside the nodes only. Call fcdp.sharding(model).set_is_last_micro_batch(True) before the last "
                    "backward of the step, or discard_gradients() if the step was given up."
                )

    def _after_step(self) -> None:
        if self._placement is not None:
            self._placement.end_step()

    def _adopt_thawed(self) -> None:
        """Make FSDP2 look again at groups that were frozen and no longer are.

        It notes the dtypes of gradients when it first runs, from trainable parameters only, and looks again in
        ``unshard()``. Without it, the gradients of a group that was frozen then would come in the wrong dtype.
        """
        for group in self.groups:
            if not group.had_trainable and group.trainable:
                group.had_trainable = True
                holder = cast(FSDPModule, group.modules[0])
                holder.unshard()
                holder.reshard()


def sharding(model: nn.Module) -> Sharding:
    """The :class:`Sharding` of a model that :func:`fully_shard` has returned.

    Raises:
        UserError: it has not.
    """
    found = getattr(model, _ATTRIBUTE, None)
    if not isinstance(found, Sharding):
        raise UserError(f"This {type(model).__name__} was not sharded with fcdp.fully_shard.")
    return found


def _explicit(policy: MixedPrecisionPolicy, model: nn.Module) -> MixedPrecisionPolicy:
    """``policy`` with its ``reduce_dtype`` said."""
    if policy.reduce_dtype is not None:
        return policy
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    dtype = policy.param_dtype or (dtypes.pop() if len(dtypes) == 1 else None)
    return dataclasses.replace(policy, reduce_dtype=dtype)


def _measure(group: ParameterGroup, shards: int, policy: MixedPrecisionPolicy) -> None:
    """Note the bytes of one rank's part: FSDP2 cuts every parameter along its first dimension, into equal parts."""
    for parameter in group.registered():
        rows = parameter.shape[0] if parameter.dim() else 1
        elements = -(-rows // shards) * (parameter.numel() // max(rows, 1))
        floating = parameter.is_floating_point()
        group.cell_bytes += elements * ((floating and policy.param_dtype) or parameter.dtype).itemsize
        if parameter.requires_grad:
            group.reduced_cell_bytes += elements * (policy.reduce_dtype or parameter.dtype).itemsize


def _smallest(budget: int | None) -> int | None:
    """The smallest of all ranks' budgets: which groups are cached must be the same decision everywhere."""
    budgets: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(budgets, budget)
    return min((value for value in budgets if value is not None), default=None)


def _prefetch_forward(units: list[Unit], groups: list[ParameterGroup]) -> None:
    """While a unit computes, have the next one's groups gathered. On CUDA FSDP2 does so by running ahead; on the CPU
    it has to be asked."""
    by_unit: list[list[FSDPModule]] = [[] for _ in units]
    for group in groups:
        by_unit[group.unit].append(cast(FSDPModule, group.modules[0]))
    for index, unit in enumerate(units[:-1]):
        following = next((later for later in by_unit[index + 1 : -1] if later), [])
        if isinstance(unit.module, FSDPModule) and following:
            unit.module.set_modules_to_forward_prefetch(following)
