"""What ranks tell each other in words: small things, as JSON. (PyTorch's own collectives for objects use pickle.)"""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from common.errors import FinetuneError, UserError


def all_gather_object(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What every rank has told, in the order of ranks. Collective.

    Args:
        value: JSON; tuples are heard as lists, floats exactly, NaN and infinities too.
        group: the ranks that take part; None: all.
    """
    device = _device(group)
    words = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(words)], device=device), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(words)] = words
    heard = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(heard, padded, group=group)
    return [
        json.loads(bytes(text[: int(length)].cpu().numpy())) for text, length in zip(heard, lengths, strict=True)
    ]  # fmt: skip


def run_on_all_ranks(work: Callable[[], Any]) -> list[Any]:
    """Call ``work`` on every rank, and tell what it returns, JSON; it fails everywhere or nowhere. Collective.

    Raises:
        UserError, FinetuneError: that of the first rank that has one, on every rank.
    """
    mine: dict[str, Any] = {}
    try:
        mine["returned"] = work()
    except FinetuneError as error:
        mine = {"failed": str(error), "status": error.exit_status}
    everyone = all_gather_object(mine)
    for told in everyone:
        if "failed" in told:
            kind = UserError if told["status"] == UserError.exit_status else FinetuneError
            raise kind(told["failed"])
    return [told["returned"] for told in everyone]


def broadcast_from_rank0(work: Callable[[], Any]) -> Any:
    """Call ``work`` on rank 0 and tell all what it returns; for what network file systems may not show all nodes the
    same. Collective.

    Raises:
        UserError, FinetuneError: as :func:`run_on_all_ranks`.
    """
    return run_on_all_ranks(lambda: work() if dist.get_rank() == 0 else None)[0]


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Where ``group`` can exchange tensors: host memory, unless it has NCCL alone."""
    on_cpu = "cpu:" in dist.get_backend_config(group)
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
