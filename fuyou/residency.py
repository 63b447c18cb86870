"""Which records live in host memory for the whole run.

Every record is used once per step, in a cyclic order, so it does not matter for the bytes which of them stay; it
matters for when they move. Records outside the blocks come first: the embedding's gradient is complete last and its
parameters are needed first, so nothing hides what its update reads. Of the blocks every so-manieth stays, so that
those which stream are spread over the step.
"""

from collections.abc import Sequence

from fuyou.schedule import StepShape


def spread(blocks: Sequence[int], count: int) -> list[int]:
    """``count`` of ``blocks``, evenly spread, counted from the end of the stack."""
    layers = len(blocks)
    return [blocks[-(-(number + 1) * layers // count) - 1] for number in range(count)]


def resident_records(shape: StepShape, room: int) -> list[int]:
    """Indices of the records whose optimizer states (and low halves), our part, fit in ``room`` bytes together."""
    width, chosen = shape.precision.state_bytes, []
    for record in shape.records:
        nbytes = shape.share.owned(record.numel) * width
        if record.outer and nbytes <= room:
            chosen.append(record.index)
            room -= nbytes
    largest = max(shape.share.owned(shape.records[index].numel) for index in shape.blocks) * width
    return sorted(chosen + spread(shape.blocks, min(len(shape.blocks), room // largest)))
