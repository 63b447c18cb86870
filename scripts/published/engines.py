"""Engines that the papers ran on, as the planner's estimates take them: DeepSpeed's, and AMSP's."""

import math
from dataclasses import dataclass, replace

from common.errors import UserError
from fcdp.planner import Collective, Engine, Workload, step_collectives
from fcdp.planner.cost import PASSES
from fcdp.strategy.strategy import StrategyMeshes


@dataclass(frozen=True)
class OtherEngine(Engine):
    """An engine that sends by the tensor or the bucket, and waits for some of it."""

    tensors: int = 0  # number of tensors, each gathered and reduced alone where P is sharded; 0: by block
    bucket_bytes: float = 0.0  # of gradients and of new P where P is not sharded; 0: by block
    hidden: frozenset[str] = frozenset({"gather", "scatter", "reduce", "spread"})  # what computing overlaps
    gathers_again: bool = False  # whether parameters are gathered to compute activations again, too
    select_and_drop: bool = False  # see :func:`select_and_drop`

    @property
    def overlaps(self) -> bool:
        return bool(self.hidden)

    def collectives(
        self, layout: StrategyMeshes, workload: Workload, checkpointing: bool
    ) -> list[Collective]:
        collectives = (select_and_drop if self.select_and_drop else step_collectives)(layout, workload)
        if self.gathers_again and checkpointing:
            forward = [collective for collective in collectives if collective.phase == "forward"]
            collectives += [replace(each, purpose="gather P, again", phase="backward") for each in forward]
        return collectives

    def pieces(self, collective: Collective, is_gathered: bool, workload: Workload) -> int:
        if is_gathered and collective.phase in PASSES:
            return self.tensors or workload.units
        return math.ceil(collective.nbytes / self.bucket_bytes) if self.bucket_bytes else workload.units

    def hides(self, collective: Collective) -> bool:
        """Return whether something computes meanwhile; ``scatter``: a reduction in every micro-batch."""
        if collective.phase in ("reduce", "spread"):
            return collective.phase in self.hidden
        return ("gather" if collective.operation == "all_gather" else "scatter") in self.hidden


def select_and_drop(layout: StrategyMeshes, workload: Workload) -> list[Collective]:
    """Return a step's collectives in AMSP (IV-C), whose ranks hold whole tensors of optimizer states: all-reduces of G
    of which each rank keeps its part, and broadcasts of new P."""
    p, g, os, ring = layout.p, layout.g, layout.os, layout.strategy.ring
    if g not in (p, os) or not g.holds(p):
        raise UserError(f"{layout.strategy.name}: AMSP has G sharded as P or as OS (IV-C3), not over {g}.")
    world, times = layout.levels.whole, workload.micro_batches
    gradients, new = workload.gradient_bytes * workload.trainable, workload.compute_bytes * workload.trainable
    gathers = [each for each in step_collectives(layout, workload) if each.purpose.startswith("gather")]
    others = [
        Collective("reduce G", "reduce_scatter", p, gradients, times, "backward", ring),
        Collective(
            "reduce G, keep a part",
            "all_reduce",
            g.over(p),
            gradients / p.shards,
            times - 1,
            "backward",
            ring,
        ),
        Collective("reduce G, last", "all_reduce", world.over(p), gradients / p.shards, 1, "reduce", ring),
        Collective("spread new P", "broadcast", os.over(p), new / p.shards, 1, "spread", ring),
    ]
    return gathers + [each for each in others if each.mesh.shards > 1 and each.times]
