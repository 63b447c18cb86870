"""What a sharded model has beyond FSDP2: its collectives, its cached shards, and counts of what it has sent."""

import weakref
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from common.communication import all_gather_object, run_on_all_ranks
from common.errors import FinetuneError
from common.units import format_bytes
from fcdp import fsdp2
from fcdp.cache.cached_shards import (
    AdaptivePlacement,
    AlwaysOnDevice,
    CachedShard,
    CopyStreams,
    DeviceMemory,
    HostCache,
    all_cached,
    fit_into,
)
from fcdp.cache.staleness import OptimizerHooks, StalenessCheck
from fcdp.comms.all_gather import GatherLevels, StagedAllGather
from fcdp.comms.levels import make_levels
from fcdp.comms.rank_level import CommLevel
from fcdp.comms.reduce_scatter import MicroBatches, ReduceLevels, StagedReduction
from fcdp.grouping import ParameterGroup, gathered_again
from fcdp.strategy.strategy import Axis, Format, Routes, Strategy
from fcdp.strategy.topology import Purpose, Topology
from fcdp.traffic import Traffic

ATTRIBUTE = "_fcdp_sharding"  # attribute of the model that holds its :class:`Sharding`


class Sharding:
    """What an FSDP2 model sharded by ``fully_shard`` has beyond FSDP2. Get it with ``fcdp.sharding(model)``.

    Making it installs the collectives of every group on ``model``. Collective; the arguments after ``groups`` are those
    of ``fully_shard``."""

    def __init__(
        self,
        model: nn.Module,
        topology: Topology,
        routes: Routes,
        groups: list[ParameterGroup],
        device_cache_threshold: float = 0.9,
        host_cache_bytes: int | None = None,
    ):
        self.topology = topology
        self.routes = routes
        self.groups = groups  # parameter groups, in the order in which they were sharded
        self.traffic = Traffic()  # bytes that this rank's gathers and reductions have sent
        self._micro_batches = MicroBatches()
        # Whether an optimizer has the shards: until then they are shown after evaluations
        self.has_optimizer = False
        device = topology.device
        ranks = topology.mesh.get_group()
        self._staleness = StalenessCheck(device, ranks)
        self._streams = CopyStreams.on(device)
        memory = DeviceMemory.of(device) if routes.layout.cache == "adaptive" else None
        self._placement = AdaptivePlacement(memory, device_cache_threshold)
        cached, secondary = self._make_cached_shards(host_cache_bytes)
        precision = self.strategy.precision
        gathers = GatherLevels(
            spread=self._levels(routes.spread, "gather")[::-1],
            gather=self._levels(routes.gather, "gather", precision.gather)[::-1],
            secondary=self._levels(routes.secondary, "gather")[::-1],  # in the order in which it is kept
        )
        reductions = ReduceLevels(
            reduce=self._levels(routes.reduce, "reduce", precision.reduce),
            finish=self._levels(routes.finish, "reduce"),
            replicate=self._levels(routes.replicate, "reduce"),
            gather_back=self._levels(routes.replicate, "gather")[::-1],
        )
        self._gathers: list[StagedAllGather] = []
        self._reductions: list[StagedReduction] = []
        index = topology.rank % routes.shards, routes.shards
        for group in groups:
            reduction = StagedReduction(
                group, reductions, topology.rank // routes.shards, self._micro_batches
            )
            if routes.shards > 1:
                shards = cached.get(group), secondary.get(group)
                gather = StagedAllGather(
                    group, index, gathers, *shards, self._streams, self._staleness, self.traffic
                )
                self._gathers.append(gather)
                group.holder.set_custom_all_gather(cast(Any, gather))
                group.holder.set_custom_reduce_scatter(cast(Any, reduction))
            elif routes.replicas > 1:
                group.holder.set_all_reduce_hook(reduction.add_up)
            self._reductions.append(reduction)
        after_step = weakref.WeakMethod(self._placement.end_step)
        self._optimizer_hooks = OptimizerHooks(groups, weakref.WeakMethod(self._before_step), after_step)
        self._set_reshard_after_backward()
        this = weakref.ref(self)

        @torch.compiler.disable
        def before_forward(module: nn.Module, args: Any) -> None:
            if (owner := this()) is not None:
                owner.before_forward()

        @torch.compiler.disable
        def after_forward(module: nn.Module, args: Any, output: Any) -> None:
            if (owner := this()) is not None:
                owner.after_forward(output)

        model.register_forward_pre_hook(before_forward, prepend=True)
        model.register_forward_hook(after_forward)
        setattr(model, ATTRIBUTE, self)

    @property
    def host_cache_bytes(self) -> int:
        return self._cache.nbytes

    @property
    def strategy(self) -> Strategy:
        return self.routes.layout.strategy

    def set_is_last_micro_batch(self, is_last: bool) -> None:
        """Say whether the next backward pass is the step's last one, the default.

        Before the last one, gradients are summed over G's scope only (``.grad`` is not valid if OS's is wider), and
        parameters that the strategy does not shard stay gathered."""
        self._micro_batches.is_last = is_last
        self._set_reshard_after_backward()

    def invalidate(self) -> None:
        """Have all parameters gathered again after a change by neither an optimizer of PyTorch nor ``load_state_dict``.
        Call it on every rank at the same place."""
        for group in self.groups:
            group.dirty = True

    def discard_gradients(self) -> None:
        """Forget gradients summed over micro-batches. Call it where a step is given up half-way."""
        for reduction in self._reductions:
            reduction.partial = None

    def reshard(self) -> None:
        """Turn parameters that stay gathered (frozen ones that P does not shard) into shards again."""
        for group in self.groups:
            fsdp2.adopt_requires_grad(group)
            group.holder.reshard()

    def close(self) -> None:
        """Remove the optimizer hooks and free host memory: from now on nothing is cached.

        Call it on every rank, before ``Topology.close()`` and ``destroy_process_group()``."""
        self._optimizer_hooks.close()
        if self.topology.device.type == "cuda":
            torch.cuda.synchronize()
        for gather in self._gathers:
            gather.forget()
        self._cache.close()

    def inter_node_bytes(
        self, micro_batches: int, *, first_step: bool = False, router_loss: bool = False
    ) -> float:
        """Return the payload that one node should send to others in a step, by the planner's formulas.

        They assume that all that the strategy caches fits, and that every group is quantized where the strategy
        quantizes. Each micro-batch runs every group forward and backward once, without recomputation. In the first step
        frozen parameters are not cached yet."""
        # Imported late: the planner reads models, and a library that brings its own needs none of that.
        from fcdp.planner.workload import Collective, Workload, bytes_per_node, step_collectives

        layout = self.routes.layout
        shards = self.routes.shards
        trainable = [group for group in self.groups if group.trainable]
        elements, trained, again = (
            shards * sum(group.cell_numel for group in groups)
            for groups in (self.groups, trainable, gathered_again(self.groups))
        )
        gathered = shards * sum(group.cell_bytes for group in self.groups)
        spread = shards * sum(group.cell_bytes for group in trainable)
        reduced = shards * sum(group.reduced_cell_bytes for group in trainable)
        workload = Workload(
            parameters=elements,
            trainable=trained,
            blocks=len(self.groups),
            kept_gathered=elements - again,
            compute_bytes=gathered / elements,
            gradient_bytes=reduced / max(trained, 1),
            micro_batches=micro_batches,
            router_loss=router_loss,
        )
        collectives = step_collectives(layout, workload)
        if first_step and gathered > spread and layout.p != layout.os:
            frozen = (gathered - spread) / layout.p.shards
            mesh = layout.os.over(layout.p)
            collectives.append(
                Collective("spread P", "all_gather", mesh, frozen, 1, "spread", self.strategy.ring)
            )
        return bytes_per_node(collectives, layout)[0]

    def _levels(
        self, axes: tuple[Axis, ...], purpose: Purpose, precision: Format = "bf16"
    ) -> list[CommLevel]:
        return make_levels(self.topology, axes, purpose, self.traffic, self.strategy.ring, precision)

    def _make_cached_shards(
        self, host_cache_bytes: int | None
    ) -> tuple[dict[ParameterGroup, CachedShard], dict[ParameterGroup, CachedShard]]:
        """Return the cached shards of P and those of the secondary partition, by group, with memory for each."""
        ranks = self.topology.mesh.get_group()
        budgets = [nbytes for nbytes in all_gather_object(host_cache_bytes, ranks) if nbytes is not None]
        # Every rank must cache the same groups.
        chosen = fit_into(min(budgets, default=None), all_cached(self.routes, self.groups))

        def allocate() -> None:
            self._cache = HostCache([each.nbytes for each in chosen if each.in_host], self.topology.device)

        run_on_all_ranks(allocate, ranks)  # who finds no memory would leave others waiting
        cached: dict[ParameterGroup, CachedShard] = {}
        secondary: dict[ParameterGroup, CachedShard] = {}
        for each in chosen:
            host = self._cache.allocate(each.nbytes) if each.in_host else None
            placement = self._placement if each.in_host else AlwaysOnDevice()
            shard = CachedShard(each, host, self._streams, placement, self.traffic)
            (secondary if each.is_secondary else cached)[each.group] = shard
        return cached, secondary

    def before_forward(self) -> None:
        """Look what has changed since the last forward pass of the root. Called before each."""
        for group in self.groups:
            if not fsdp2.is_sharded(group):
                fsdp2.adopt_requires_grad(group)
            if not group.had_trainable and group.trainable:
                # FSDP2 reads the dtypes of gradients in ``unshard()``
                group.had_trainable = True
                group.holder.reshard()
                group.holder.unshard()
                group.holder.reshard()
                self._set_reshard_after_backward()
        for group in self.groups:
            group.notice(fsdp2.versions(group))
        for gather in self._gathers:
            if gather.secondary is not None:  # a frozen prefix has no backward pass to use it
                gather.secondary.consumed = True
        for group in self.groups:
            if group.dirty:  # what FSDP2 has kept gathered is from before a step, a load or ``invalidate()``
                if not fsdp2.is_sharded(group):
                    group.holder.reshard()
                group.dirty = self.routes.shards > 1  # else no gather will say that it is clean

    def after_forward(self, output: Any) -> None:
        """Reshard after an evaluation, so that an optimizer made now gets the shards.

        Once there is one, what stays gathered is left so: a gather costs time. What is frozen from now to the backward
        pass is noted as that begins: FSDP2 reshards in it."""
        if not torch.is_grad_enabled() and not self.has_optimizer:
            self.reshard()
        for value in tree_leaves(output):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(self._before_backward)

    def _before_backward(self, gradient: torch.Tensor) -> None:
        for group in self.groups:
            if not fsdp2.is_sharded(group):
                fsdp2.adopt_requires_grad(group)

    def _set_reshard_after_backward(self) -> None:
        """Have FSDP2 reshard trainable parameters that P does not shard only after the last micro-batch."""
        if self.routes.keeps_gathered:
            for group in self.groups:
                reshard = self._micro_batches.is_last and group.trainable
                group.holder.set_reshard_after_backward(reshard, recurse=False)

    def _before_step(self) -> None:
        self.has_optimizer = True
        if self._streams is not None:
            # Else the output that was cached last would be held until the next gather
            self._streams.release()
        self._staleness.raise_if_found()
        for reduction in self._reductions:
            if reduction.partial is not None:
                nbytes = reduction.partial.numel() * reduction.partial.element_size()
                raise FinetuneError(
                    f"The optimizer steps while {format_bytes(nbytes)} of gradients per rank of one group are not yet "
                    "summed over all ranks. Call fcdp.sharding(model).set_is_last_micro_batch(True) before the last "
                    "backward of the step, or discard_gradients() if the step was given up."
                )
