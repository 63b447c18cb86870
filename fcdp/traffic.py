"""Bytes that ranks send, counted where they are sent. ``planner/workload.py`` says what they should be."""

from dataclasses import dataclass
from typing import Literal


@dataclass
class Traffic:
    """Bytes that one rank has sent and copied so far, counted at the call, not when it is done."""

    gather_inter_node: int = 0  # parameter bytes sent to other nodes
    gather_intra_node: int = 0  # parameter bytes sent to ranks of the same node
    reduce_inter_node: int = 0  # gradient bytes sent to other nodes
    reduce_intra_node: int = 0  # gradient bytes sent to ranks of the same node
    host_to_device: int = 0  # bytes read from the host cache
    device_to_host: int = 0  # bytes written to the host cache
    hits: int = 0  # gathers that began with what the rank had cached
    misses: int = 0  # gathers that began with this rank's cell alone

    @property
    def inter_node(self) -> int:
        return self.gather_inter_node + self.reduce_inter_node

    def sent(self, purpose: Literal["gather", "reduce"], crosses_nodes: bool, nbytes: int) -> None:
        name = f"{purpose}_{'inter' if crosses_nodes else 'intra'}_node"
        setattr(self, name, getattr(self, name) + nbytes)
