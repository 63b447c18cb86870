"""Messages between ranks: collectives for small objects, as JSON (PyTorch's own use pickle), and rank to rank."""

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
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
        json.loads(bytes(text[: int(length)].cpu().numpy()))
        for text, length in zip(gathered, lengths, strict=True)
    ]


def run_on_all_ranks(work: Callable[[], Any], group: dist.ProcessGroup | None = None) -> list[Any]:
    """Call ``work`` on every rank and gather its results, JSON; the first failing rank's error is every rank's.
    Collective."""
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
    """Call ``work`` on rank 0 and broadcast its result or error: file systems may look different to other nodes."""
    return run_on_all_ranks(lambda: work() if dist.get_rank() == 0 else None)[0]


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return where ``group`` exchanges tensors: in host memory, unless it has NCCL alone."""
    on_cpu = "cpu:" in dist.get_backend_config(group)
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())


# A function to call before using what a communication has filled, or changing what it sends
Wait = Callable[[], None]


def start_exchange(
    sends: Iterable[tuple[int, torch.Tensor]],
    receives: Iterable[tuple[int, torch.Tensor]],
    group: dist.ProcessGroup,
) -> Wait:
    """Send tensors to ranks and receive others. Messages between two ranks are matched by their order.

    Args:
        sends: ranks of the group with contiguous tensors, which must stay as they are until the exchange is waited for.
        receives: ranks of the group with contiguous tensors to fill. Empty tensors are left out at both ends.

    Returns:
        A function to call before reading what is received. With gloo the host waits, with NCCL the current stream.
    """
    # Receives first: gloo tells a peer that it may send by a message in the same stream as what goes to that peer, and
    # behind a large message both directions would take turns.
    operations = [
        dist.P2POp(dist.irecv, data, group=group, group_peer=source)
        for source, data in receives
        if data.numel()
    ]
    operations += [
        dist.P2POp(dist.isend, data, group=group, group_peer=to) for to, data in sends if data.numel()
    ]
    works = dist.batch_isend_irecv(operations) if operations else []

    def wait() -> None:
        for work in works:
            work.wait()

    return wait


def turns(rank: int, size: int) -> list[tuple[int, int]]:
    """Return the (receiver, sender) of each step, neighbors first, so that not all ranks send to rank 0 first."""
    return [((rank + step) % size, (rank - step) % size) for step in range(1, size)]


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return the timeout of collectives on a device; None if its backend has none."""
    with suppress(RuntimeError, AttributeError):
        timeout: timedelta = group._get_backend(device).options._timeout
        return timeout
    return None
