"""Share of each rank in every record.

A cluster of N nodes with M ranks each (W = N M) keeps one copy of the parameters in every *node* and one copy of the
optimizer states in all of it. A record is cut into M slices, of which rank m of each node stores one on its SSDs; each
slice is cut into N parts, of which the rank of node n owns one: it updates those parameters and keeps their states. So
the parts owned by the ranks with the same number in their nodes make up the slice that each of them stores:

    record  | slice 0                | slice 1                |      M slices
            | part 0     | part 1    | part 0     | part 1    |      N parts in each
    owner     node 0       node 1      node 0       node 1
              rank 0       rank 0      rank 1       rank 1

A single rank stores and owns all of every record.
"""

from dataclasses import dataclass

from common.memory.buffers import round_up


@dataclass(frozen=True)
class Share:
    """A rank among all ranks, which decides its part of every record; the default is a single rank."""

    nodes: int = 1  # Number of nodes, N
    ranks_per_node: int = 1  # Number of ranks in each node, M
    node: int = 0
    local_rank: int = 0  # Number of this rank in its node

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def rank(self) -> int:
        """Return the number of this rank; ranks are numbered node by node."""
        return self.node * self.ranks_per_node + self.local_rank

    def padded(self, numel: int, page_elements: int) -> int:
        """Return the elements of a record after padding, so that every part is a multiple of ``page_elements``."""
        return round_up(numel, self.world_size * page_elements)

    def stored(self, numel: int) -> int:
        """Return the elements of a padded record whose parameters this rank stores."""
        return numel // self.ranks_per_node

    def stored_start(self, numel: int) -> int:
        """Return the first element that this rank stores, within the record."""
        return self.local_rank * self.stored(numel)

    def owned(self, numel: int) -> int:
        """Return the elements of a padded record that this rank updates."""
        return numel // self.world_size

    def owned_start(self, numel: int) -> int:
        """Return the first element that this rank updates, within the record."""
        return self.stored_start(numel) + self.node * self.owned(numel)

    def everyone(self) -> "list[Share]":
        """Return the shares of all ranks, in order."""
        return [
            Share(self.nodes, self.ranks_per_node, node, local_rank)
            for node in range(self.nodes)
            for local_rank in range(self.ranks_per_node)
        ]


ALONE = Share()  # The share of a rank that is alone
