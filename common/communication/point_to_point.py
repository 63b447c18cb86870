"""Messages from rank to rank: what all point-to-point collectives of the project are made of."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

Wait = Callable[[], None]  # A function to call before using what a communication has filled, or changing what it sends


def start_exchange(
    sends: Iterable[tuple[int, torch.Tensor]], receives: Iterable[tuple[int, torch.Tensor]], group: dist.ProcessGroup
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
        dist.P2POp(dist.irecv, data, group=group, group_peer=source) for source, data in receives if data.numel()
    ]
    operations += [dist.P2POp(dist.isend, data, group=group, group_peer=to) for to, data in sends if data.numel()]
    works = dist.batch_isend_irecv(operations) if operations else []

    def wait() -> None:
        for work in works:
            work.wait()

    return wait


def turns(rank: int, size: int) -> list[tuple[int, int]]:
    """Return to whom ``rank`` of ``size`` sends and from whom it receives, step by step.

    Every rank begins with its neighbour, so that not all of them send to rank 0 first.
    """
    return [((rank + step) % size, (rank - step) % size) for step in range(1, size)]
