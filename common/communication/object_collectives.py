"""Collectives for small objects, as JSON. (PyTorch's own use pickle.)"""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from common.errors import FinetuneError, UserError


def all_gather_object(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather a value from every rank, in the order of ranks. Collective.

    Args:
        value: anything that JSON can carry; tuples arrive as lists, floats exactly, NaN and infinities too.
        group: the ranks that take part; None: all.
    """
    if dist.get_world_size(group) == 1:
        return [json.loads(json.dumps(value))]
    device = _device(group)
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(text)], device=device), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(text)] = text
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded, group=group)
    return [
        json.loads(bytes(text[: int(length)].cpu().numpy())) for text, length in zip(gathered, lengths, strict=True)
    ]


def run_on_all_ranks(work: Callable[[], Any], group: dist.ProcessGroup | None = None) -> list[Any]:
    """Call ``work`` on every rank and gather its results, JSON; it fails everywhere or nowhere. Collective.

    Raises:
        UserError, FinetuneError: the first failing rank's error, on every rank; an unexpected one as FinetuneError.
    """
    result: dict[str, Any] = {}
    unexpected: Exception | None = None
    try:
        result["returned"] = work()
    except FinetuneError as error:
        result = {"failed": error.as_written, "status": error.exit_status}
    except Exception as error:  # no memory, say: other ranks would wait for this one
        unexpected = error
        result = {"failed": f"{type(error).__name__}: {error}", "status": FinetuneError.exit_status}
    outcomes = all_gather_object(result, group)
    for outcome in outcomes:
        if "failed" in outcome:
            kind = UserError if outcome["status"] == UserError.exit_status else FinetuneError
            raise kind(outcome["failed"]) from unexpected
    return [outcome["returned"] for outcome in outcomes]


def broadcast_from_rank0(work: Callable[[], Any]) -> Any:
    """Call ``work`` on rank 0 and broadcast its result: network file systems may look different to other nodes.
    Collective.

    Raises:
        UserError, FinetuneError: as :func:`run_on_all_ranks`.
    """
    return run_on_all_ranks(lambda: work() if dist.get_rank() == 0 else None)[0]


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return where ``group`` exchanges tensors: in host memory, unless it has NCCL alone."""
    on_cpu = "cpu:" in dist.get_backend_config(group)
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
