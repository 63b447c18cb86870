"""What the ranks tell each other between collectives: counts, losses, budgets, which step counts."""

import socket
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from common.telling import tell
from fuyou.share import Share


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

    def tell(self, value: Any) -> list[Any]:
        """What every rank has told, JSON, in the order of ranks."""
        return tell(value, self._group)

    def tell_at_commit(self, value: Any) -> list[Any]:
        """The same, for the thread of commits."""
        return tell(value, self._commits)

    def close(self) -> None:
        """Let go of the groups, so that ``destroy_process_group`` can end them."""
        self._group = self._commits = None


def rank_name(share: Share, rank: int, host: str) -> str:
    """How messages call a rank."""
    node, local_rank = divmod(rank, share.ranks_per_node)
    which = f", rank {local_rank} of it" if share.ranks_per_node > 1 else ""
    return f"node {node} ({host}{which})"


def host() -> str:
    """The name of this machine."""
    return socket.gethostname()
