"""Bytes that ranks send: counted where they are sent, and what theory says they should be.

All formulas are per node and optimizer step, one way (sent), in bytes of payload. N nodes, M ranks in each, W = N * M.
A model's bytes are those of its padded flat shards, W * sum(shard), in the dtype that travels.
"""

from dataclasses import dataclass, field
from typing import Literal

Level = Literal["inside", "across"]


@dataclass
class Traffic:
    """What one rank has sent and copied so far. Counted at the call, not when done."""

    gather_across: int = 0
    """Parameter bytes sent to other nodes."""
    gather_inside: int = 0
    """Parameter bytes sent to ranks of the same node."""
    reduce_across: int = 0
    """Gradient bytes sent to other nodes."""
    reduce_inside: int = 0
    """Gradient bytes sent to ranks of the same node."""
    host_to_device: int = 0
    """Bytes read from the host cache."""
    device_to_host: int = 0
    """Bytes written to the host cache."""
    hits: int = 0
    """Gathers that found the cache clean: nothing crossed nodes."""
    misses: int = 0
    """Gathers that went across nodes."""
    misses_by_group: dict[str, int] = field(default_factory=dict)
    """The same by name of the parameter group."""

    @property
    def across(self) -> int:
        """All bytes sent to other nodes."""
        return self.gather_across + self.reduce_across

    def sent(self, purpose: Literal["gather", "reduce"], level: Level, nbytes: int) -> None:
        """Count ``nbytes`` sent by this rank."""
        name = f"{purpose}_{level}"
        setattr(self, name, getattr(self, name) + nbytes)


def ring_share(ranks: int) -> float:
    """Part of the data that crosses one link of a ring in an all-gather or a reduce-scatter over ``ranks``."""
    return (ranks - 1) / ranks


def fcdp_bytes(nodes: int, *, gathered: int, reduced: int) -> float:
    """FCDP: every node receives (N-1)/N of the dirty parameters once and of the gradients once, and sends as much.

    Args:
        nodes: N.
        gathered: bytes of dirty parameters in compute precision: all on the first step, then the trainable ones.
        reduced: bytes of gradients in reduce precision.
    """
    return ring_share(nodes) * (gathered + reduced)


def zero3_bytes(world_size: int, *, gathered: int, reduced: int, all_reduce: bool) -> float:
    """Plain FSDP2, whose flat rings cross the border of a node once in each direction.

    Args:
        world_size: W.
        gathered: bytes of parameters in compute precision, times how often each is gathered in the step.
        reduced: bytes of gradients in reduce precision, times micro-batches.
        all_reduce: the backend makes a reduce-scatter of a full all-reduce, as gloo does: twice the bytes.
    """
    return ring_share(world_size) * (gathered + (2 if all_reduce else 1) * reduced)


def hybrid_bytes(nodes: int, *, reduced: int) -> float:
    """Hybrid sharding: parameters stay in the node; gradients are all-reduced across nodes, each rank its own shard.

    Args:
        nodes: N.
        reduced: bytes of gradients in reduce precision.
    """
    return 2 * ring_share(nodes) * reduced
