"""Small messages between ranks apart from the collectives: counts, losses, budgets, and which step was committed."""

import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from common.communication import all_gather_object, start_exchange, timeout_of
from fuyou.layout.share import Share


class Agreement:
    """Process groups of gloo for small messages between all ranks. Making one is collective, and so is every call.

    The thread of commits has a separate group: its messages must not mix with those of the caller's thread. A rank
    that is alone agrees with itself, and needs no groups.
    """

    def __init__(self, share: Share):
        self.share = share
        self._group: dist.ProcessGroup | None = None
        self._commits: dist.ProcessGroup | None = None
        if not self.is_alone:
            timeout = timeout_of(dist.distributed_c10d._get_default_group(), torch.device("cpu"))
            self._group = dist.new_group(backend="gloo", timeout=timeout, group_desc="fuyou_agreement")
            self._commits = dist.new_group(backend="gloo", timeout=timeout, group_desc="fuyou_commits")

    @property
    def is_alone(self) -> bool:
        """Whether there are no other ranks."""
        return self.share.world_size == 1

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, which is JSON, in the order of ranks."""
        return [value] if self.is_alone else all_gather_object(value, self._group)

    def all_gather_at_commit(self, value: Any) -> list[Any]:
        """Return every rank's ``value`` as :meth:`all_gather_object` does, in the thread of commits."""
        return all_gather_object(value, self._commits)

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Send tensors to ranks and receive others, in the order in which the other end lists them."""
        if self._group is not None:
            start_exchange(sends, receives, self._group)()

    def close(self) -> None:
        """Let go of the groups, so that ``destroy_process_group`` can end them."""
        self._group = self._commits = None


def rank_name(share: Share, rank: int, host: str | None) -> str:
    node, local_rank = divmod(rank, share.ranks_per_node)
    known = [*([host] if host is not None else []), *([f"rank {local_rank} of it"] if share.ranks_per_node > 1 else [])]
    return f"node {node} ({', '.join(known)})" if known else f"node {node}"


def host() -> str:
    return socket.gethostname()
