"""Finding levels inside a node: groups of GPUs that NVLink connects with each other but not with the others."""

from collections.abc import Sequence

from common.hardware.machine import nvlink_peers


def linked_gpus(count: int) -> int:
    """Return how many GPUs form a group inside a node; 1 where there are no groups, one for all, or unequal ones.

    Args:
        count: GPUs that ranks use, the first ones of this machine.
    """
    peers = nvlink_peers()
    if len(peers) < count:
        return 1
    return group_size([{peer for peer in linked if peer < count} for linked in peers[:count]])


def group_size(peers: Sequence[set[int]]) -> int:
    """Return the size of groups, if consecutive GPUs form equal groups and every GPU is linked to its whole group and
    to nothing else; else 1. GPUs that are all linked to all form no level of their own.

    Args:
        peers: for each GPU, the GPUs that it is linked to.
    """
    count = len(peers)
    size = len(peers[0]) + 1 if peers else 1
    if size == count or count % size:
        return 1
    for index, linked in enumerate(peers):
        first = index - index % size
        if linked != set(range(first, first + size)) - {index}:
            return 1
    return size
