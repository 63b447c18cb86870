"""Collectives recorded as a rank launches them, by communicator, to compare with those of other ranks.

NCCL wants two things that gloo does not ask for, and that its absence here would hide: on each communicator all ranks
launch the same collectives in the same order, and communicators that share ranks are launched in one order everywhere.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

NAMES = (
    "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single",
    "all_reduce", "broadcast", "barrier",
)  # fmt: skip

Launch = tuple[str, str, str, int]
"""Communicator's description, its ranks, the collective, and bytes that this rank gives to it."""


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Yield the list to which this process adds what it launches, in order, until the end of the block."""
    launches: list[Launch] = []

    def note(group: dist.ProcessGroup | None, name: str, nbytes: int) -> None:
        group = group or dist.distributed_c10d._get_default_group()
        ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
        launches.append((group.group_desc, ranks, name, nbytes))

    def watching(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [value for value in args if isinstance(value, torch.Tensor)]
            group = next(
                (value for value in args if isinstance(value, dist.ProcessGroup)), kwargs.get("group")
            )
            note(group, name, max((data.numel() * data.element_size() for data in tensors), default=0))
            return original(*args, **kwargs)

        return call

    exchange = dist.batch_isend_irecv

    def watched_exchange(operations: list[Any]) -> Any:
        sent = sum(
            each.tensor.numel() * each.tensor.element_size() for each in operations if each.op is dist.isend
        )
        note(operations[0].group, "exchange", sent)
        return exchange(operations)

    with ExitStack() as stack:
        for name in NAMES:
            if hasattr(dist, name):
                stack.enter_context(mock.patch.object(dist, name, watching(name)))
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", watched_exchange))
        yield launches


def by_communicator(launches: list[Launch]) -> dict[tuple[str, str], list[tuple[str, int]]]:
    """Return what was launched on each communicator, in order."""
    found: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for description, ranks, name, nbytes in launches:
        found.setdefault((description, ranks), []).append((name, nbytes))
    return found


def check_same_order(ranks: list[list[Launch]], *, sizes: bool = True, one_thread: bool = True) -> None:
    """Assert that all ranks have launched the same in the same order.

    Args:
        ranks: launches of every rank.
        sizes: whether every rank gives as many bytes to a collective.
        one_thread: whether one thread launches everything, so that the order between communicators is one, too.
    """
    assert all(ranks)
    seen: dict[tuple[str, str], Any] = {}
    for launches in ranks:
        for key, sequence in by_communicator(launches).items():
            order = sequence if sizes else [name for name, _ in sequence]
            assert seen.setdefault(key, order) == order, key
    if one_thread:
        orders = [[(description, name) for description, _, name, _ in launches] for launches in ranks]
        assert all(order == orders[0] for order in orders)
