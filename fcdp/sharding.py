"""A sharded model at work: its collectives, what it keeps, and what it has sent."""

import weakref
from typing import Any, cast

import torch
from torch import nn

from common.errors import FinetuneError
from common.object_collectives import all_gather_object
from common.units import format_bytes
from fcdp.cache.host_cache import CacheEntry, CopyStreams, HostCache
from fcdp.cache.placement import DeviceMemory, OnDevice, Placement
from fcdp.cache.policy import all_kept, within
from fcdp.cache.staleness import OptimizerHooks, StalenessCheck, mark_all
from fcdp.comms.all_gather import CachedShard, GatherLevels, StagedAllGather
from fcdp.comms.levels import make_levels
from fcdp.comms.rank_level import CommLevel
from fcdp.comms.reduce_scatter import MicroBatches, ReduceLevels, StagedReduction
from fcdp.grouping import ParameterGroup
from fcdp.strategy.routes import Axis, Routes
from fcdp.strategy.strategy import Format, Strategy
from fcdp.strategy.topology import Purpose, Topology
from fcdp.traffic import Traffic

ATTRIBUTE = "_fcdp_sharding"
"""Of the model: its :class:`Sharding` lives as long as it does."""


class Sharding:
    """What an FSDP2 model sharded by ``fully_shard`` has beyond FSDP2. Get it with ``fcdp.sharding(model)``."""

    def __init__(self, model: nn.Module, topology: Topology, routes: Routes, groups: list[ParameterGroup]):
        self.topology = topology
        self.routes = routes
        self.groups = groups
        """Parameter groups, in the order in which they were sharded."""
        self.traffic = Traffic()
        """What this rank's gathers and reductions have sent."""
        self.host_cache_bytes = 0
        """Host memory that this rank's shares take."""
        self._micro_batches = MicroBatches()
        self._gathers: list[StagedAllGather] = []
        self._reductions: list[StagedReduction] = []
        self._cache: HostCache | None = None
        self._placement: Placement | None = None
        self._net: StalenessCheck | None = None
        self._watch: OptimizerHooks | None = None
        this = weakref.ref(self)

        def before_forward(module: nn.Module, args: Any) -> None:
            if (owner := this()) is not None:
                owner._adopt_thawed()
                owner._drop_outdated()

        model.register_forward_pre_hook(before_forward, prepend=True)

    @property
    def strategy(self) -> Strategy:
        """What the model is trained with."""
        return self.routes.layout.strategy

    def set_is_last_micro_batch(self, is_last: bool) -> None:
        """Say whether the next backward is the step's last one; it is unless told otherwise.

        Before the last one, gradients are summed over G's scope only and ``.grad`` is not valid, and parameters that
        the strategy does not shard stay gathered.
        """
        self._micro_batches.is_last = is_last
        self._settle()

    def invalidate(self) -> None:
        """Parameters were changed by something else than an optimizer of PyTorch or ``load_state_dict``: gather all
        of them anew. Every rank must call it at the same place."""
        mark_all(self.groups)

    def discard_gradients(self) -> None:
        """Forget sums of micro-batches that will not be finished. Call it where a step is given up half-way."""
        for reduction in self._reductions:
            reduction.partial = None

    def reshard(self) -> None:
        """Have the model's parameters be shards (DTensors) again, for whoever reads them.

        What is frozen and not sharded by P stays gathered otherwise.
        """
        for group in self.groups:
            group.holder.reshard()

    def close(self) -> None:
        """Stop watching optimizers and let go of host memory: from now on nothing is kept from gather to gather.

        Call it on every rank, before ``Topology.close()`` and ``destroy_process_group()``.
        """
        if self._watch is not None:
            self._watch.close()
        if self.topology.device.type == "cuda":
            torch.cuda.synchronize()
        for gather in self._gathers:
            gather.forget()
        if self._cache is not None:
            self._cache.close()

    def inter_node_bytes(self, micro_batches: int, *, first_step: bool = False) -> float:
        """What one node should send to others in a step, in bytes of payload, by the planner's formulas.

        They take it that there is room for all that the strategy keeps, whatever ``host_cache_bytes`` says, and that
        every group is quantised where the strategy quantises.

        Args:
            micro_batches: of the step; each runs every group forward and backward once, without recomputation.
            first_step: nothing is kept yet of what is frozen, either.
        """
        # Imported late: the planner reads models, and a library that brings its own needs none of that.
        from fcdp.planner.collectives import Collective, bytes_per_node, step_collectives
        from fcdp.planner.workload import Workload

        layout, shards = self.routes.layout, self.routes.shards
        trainable = [group for group in self.groups if group.trainable]
        elements, trained, kept = (
            shards * sum(group.cell_numel for group in groups)
            for groups in (self.groups, trainable, [group for group in self.groups if group.kept_after_forward])
        )
        gathered = shards * sum(group.cell_bytes for group in self.groups)
        spread = shards * sum(group.cell_bytes for group in trainable)
        reduced = shards * sum(group.reduced_cell_bytes for group in trainable)
        workload = Workload(
            parameters=elements,
            trainable=trained,
            blocks=len(self.groups),
            kept=kept,
            compute_bytes=gathered / elements,
            gradient_bytes=reduced / max(trained, 1),
            micro_batches=micro_batches,
        )
        collectives = step_collectives(layout, workload)
        if first_step and gathered > spread and layout.p != layout.os:
            frozen = (gathered - spread) / layout.p.shards
            mesh = layout.os.over(layout.p)
            collectives.append(Collective("spread P", "all_gather", mesh, frozen, 1, "spread", self.strategy.ring))
        return bytes_per_node(collectives, layout)[0]

    def on_device(self) -> list[str]:
        """Names of the groups whose share of P is on the device now."""
        return [
            gather.group.name for gather in self._gathers if gather.kept is not None and gather.kept.share.on_device
        ]

    # -- putting it together ----------------------------------------------------------------------------------------

    def install(self, threshold: float, host_cache_bytes: int | None, device_memory: DeviceMemory | None) -> None:
        """Give every group its collectives; see ``fully_shard`` for what the arguments mean. Collective."""
        topology, routes = self.topology, self.routes
        self._net = StalenessCheck(topology.device)
        streams = CopyStreams.on(topology.device)
        kept, secondary = self._columns(streams, threshold, host_cache_bytes, device_memory)
        precision = self.strategy.precision
        gathers = GatherLevels(
            spread=self._levels(routes.spread, "gather")[::-1],
            gather=self._levels(routes.gather, "gather", precision.gather)[::-1],
            secondary=self._levels(routes.secondary, "gather")[::-1],  # as it is kept
        )
        reductions = ReduceLevels(
            reduce=self._levels(routes.reduce, "reduce", precision.reduce),
            finish=self._levels(routes.finish, "reduce"),
            replicate=self._levels(routes.replicate, "reduce"),
            gather_back=self._levels(routes.replicate, "gather")[::-1],
        )
        rank = topology.rank % routes.shards
        for group in self.groups:
            reduction = StagedReduction(group.name, reductions, topology.rank // routes.shards, self._micro_batches)
            if routes.shards > 1:
                gather = StagedAllGather(
                    group, rank, gathers, kept.get(group), secondary.get(group), streams, self._net, self.traffic
                )
                self._gathers.append(gather)
                group.holder.set_custom_all_gather(cast(Any, gather))
                group.holder.set_custom_reduce_scatter(cast(Any, reduction))
            else:
                group.holder.set_all_reduce_hook(reduction.add_up)
            self._reductions.append(reduction)
        self._watch = OptimizerHooks(
            self.groups, weakref.WeakMethod(self._before_step), weakref.WeakMethod(self._after_step)
        )
        self._settle()

    def _levels(self, axes: tuple[Axis, ...], purpose: Purpose, precision: Format = "bf16") -> list[CommLevel]:
        return make_levels(self.topology, axes, purpose, self.traffic, self.strategy.ring, precision)

    def _columns(
        self,
        streams: CopyStreams | None,
        threshold: float,
        host_cache_bytes: int | None,
        device_memory: DeviceMemory | None,
    ) -> tuple[dict[ParameterGroup, CachedShard], dict[ParameterGroup, CachedShard]]:
        """Places for what is kept: shares of P, and second shards."""
        device = self.topology.device
        chosen = within(_smallest(host_cache_bytes), all_kept(self.routes, self.groups))
        self._cache = HostCache([one.nbytes for one in chosen if one.in_host], device)
        self.host_cache_bytes = self._cache.nbytes
        adaptive = self.routes.layout.cache == "adaptive"
        self._placement = Placement((device_memory or DeviceMemory.of(device)) if adaptive else None, threshold)
        kept: dict[ParameterGroup, CachedShard] = {}
        secondary: dict[ParameterGroup, CachedShard] = {}
        for one in chosen:
            host = self._cache.take(one.nbytes) if one.in_host else None
            residence = self._placement if one.in_host else OnDevice()
            share = CacheEntry(one.nbytes, host, streams, residence, self.traffic)
            (secondary if one.is_secondary else kept)[one.group] = CachedShard(one.block, share, one.bits)
        return kept, secondary

    # -- from step to step ------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Where P is not sharded, parameters stay gathered until they change: after the last micro-batch, if ever."""
        if self.routes.keeps_whole:
            for group in self.groups:
                reshard = self._micro_batches.is_last and group.trainable
                group.holder.set_reshard_after_backward(reshard, recurse=False)

    def _before_step(self) -> None:
        if self._net is not None:
            self._net.raise_if_found()
        for reduction in self._reductions:
            if reduction.partial is not None:
                kept = reduction.partial.numel() * reduction.partial.element_size()
                raise FinetuneError(
                    f"The optimizer steps while {format_bytes(kept)} of gradients per rank of one group are not yet "
                    "summed over all ranks. Call fcdp.sharding(model).set_is_last_micro_batch(True) before the last "
                    "backward of the step, or discard_gradients() if the step was given up."
                )

    def _after_step(self) -> None:
        if self._placement is not None:
            self._placement.end_step()

    def _drop_outdated(self) -> None:
        """Make FSDP2 gather what it has kept from before a step, a load or ``invalidate()``."""
        for group in self.groups:
            if group.dirty and group.kept_after_forward:
                group.holder.reshard()
                group.dirty = self.routes.shards > 1  # else no gather will say that it is clean

    def _adopt_thawed(self) -> None:
        """Make FSDP2 look again at groups that were frozen and no longer are.

        It notes the dtypes of gradients when it first runs, from trainable parameters only, and looks again in
        ``unshard()``. Without it, the gradients of a group that was frozen then would come in the wrong dtype.
        """
        for group in self.groups:
            if not group.had_trainable and group.trainable:
                group.had_trainable = True
                group.holder.reshard()
                group.holder.unshard()
                group.holder.reshard()
                self._settle()


def _smallest(budget: int | None) -> int | None:
    """The smallest of all ranks' budgets: what is kept must be the same decision everywhere."""
    return min((value for value in all_gather_object(budget) if value is not None), default=None)
