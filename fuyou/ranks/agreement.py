"""What the ranks tell each other between collectives: counts, losses, budgets, which step counts."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from common.object_collectives import all_gather_object
from fuyou.layout.share import Share


@dataclass
class Agreement:
    """Small things that every rank says, and all hear. Making one is collective, and so is every call.

    The thread of commits has a group of its own: what it says must not mix with what the caller's thread says.
    """

    share: Share
    _group: dist.ProcessGroup | None = field(init=False)
    _commits: dist.ProcessGroup | None = field(init=False)

    def __post_init__(self) -> None:
        self._group = dist.new_group(backend="gloo", group_desc="fuyou_agreement")
        self._commits = dist.new_group(backend="gloo", group_desc="fuyou_commits")

    def all_gather_object(self, value: Any) -> list[Any]:
        """What every rank has told, JSON, in the order of ranks."""
        return all_gather_object(value, self._group)

    def all_gather_at_commit(self, value: Any) -> list[Any]:
        """The same, for the thread of commits."""
        return all_gather_object(value, self._commits)

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Send tensors to ranks and receive others, in the order in which the other end lists them."""
        operations = [dist.P2POp(dist.isend, data, group=self._group, group_peer=to) for to, data in sends]
        operations += [dist.P2POp(dist.irecv, data, group=self._group, group_peer=source) for source, data in receives]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    def close(self) -> None:
        """Let go of the groups, so that ``destroy_process_group`` can end them."""
        self._group = self._commits = None


def rank_name(share: Share, rank: int, host: str | None) -> str:
    """How messages call a rank; ``host`` is None if it is not there."""
    node, local_rank = divmod(rank, share.ranks_per_node)
    known = [*([host] if host is not None else []), *([f"rank {local_rank} of it"] if share.ranks_per_node > 1 else [])]
    return f"node {node} ({', '.join(known)})" if known else f"node {node}"


def host() -> str:
    """The name of this machine."""
    return socket.gethostname()
