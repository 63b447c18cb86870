"""Whether a record that is used now belongs into host memory, too."""

from collections.abc import Iterator, Sequence
from itertools import chain

from fuyou.layout.record import Record
from fuyou.layout.visits import Visit


def used_from_host(
    record: Record, buffers: int, visits: Sequence[Visit], position: int, records: Sequence[Record]
) -> bool:
    """Return whether something takes ``record`` from host memory: its update, or its next use.

    For its next use it is still there if fewer other records than there are buffers come before that.

    A step goes through its blocks and back: all that comes between two uses of a block is needed sooner again than
    the block itself, so that the buffers which hold what is needed soonest (Belady, 1966) give it up for that. This is
    the reuse distance of Mattson et al. (1970), which is the same in such an order.

    Args:
        record: used by the visit at ``position``.
        buffers: number of buffers of its kind.
        visits: of a pass, which is followed by another one like it.
        position: index of the present visit.
        records: all of the model.
    """
    if visits[position].trained == record.index:
        return True
    others: set[int] = set()
    for index in _used_after(position, visits):
        if index == record.index:
            break
        if records[index].kind is record.kind:
            others.add(index)
            if len(others) >= buffers:
                return False
    return True


def _used_after(position: int, visits: Sequence[Visit]) -> Iterator[int]:
    """Yield the records that are used after a visit, until its own turn comes again in the next pass."""
    for number in chain(range(position + 1, len(visits)), range(position + 1)):
        yield from visits[number].records
