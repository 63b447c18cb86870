"""From a model to its records: which parameters move together, and in which order the visits need them."""

import hashlib
import json
from collections.abc import Sequence

from common.errors import UserError
from common.models.structure import fp32_parameters, parameter_names
from fuyou.records import Precision, Record, wants_decay
from fuyou.schedule import StepShape
from fuyou.stack import StreamedModel

#: Names, shape, and whether weight decay applies.
Entry = tuple[tuple[str, ...], Sequence[int], bool]


def model_records(stack: StreamedModel, precision: Precision) -> StepShape:
    """One record per block, one for what runs before the blocks, one for what runs after.

    Where a parameter is used on both sides (tied embeddings), both sides are one record.

    Raises:
        UserError: the family keeps parameters in fp32 that bf16 training would round.
    """
    kept = fp32_parameters(stack.model)
    if kept and precision.split:
        raise UserError(
            f"{type(stack.model).__name__} insists on fp32 for {len(kept)} parameters ({kept[0]}, ...): train it with "
            "--dtype fp32."
        )
    blocks: list[list[Entry]] = [[] for _ in stack.blocks]
    before: list[Entry] = []
    after: list[Entry] = []
    tied = False
    prefix = f"{stack.block_prefix}."
    for names in parameter_names(stack.model):
        shape = tuple(stack.model.get_parameter(names[0]).shape)
        entry = (names, shape, wants_decay(names[0], shape))
        if names[0].startswith(prefix):
            blocks[int(names[0].removeprefix(prefix).partition(".")[0])].append(entry)
            continue
        sides = {stack.runs_before_blocks(name) for name in names}
        tied = tied or len(sides) == 2
        (before if True in sides else after).append(entry)
    if tied or not after or not before:
        outer = [Record.build(0, "outer", True, before + after)]
    else:
        outer = [Record.build(0, "embedding", True, before), Record.build(1, "head", True, after)]
    records = outer + [
        Record.build(len(outer) + layer, f"block {layer}", False, entries) for layer, entries in enumerate(blocks)
    ]
    return StepShape(tuple(records), 0, len(outer) - 1, tuple(range(len(outer), len(records))), precision)


def fingerprint(records: Sequence[Record]) -> str:
    """Identifies the layout of all records: a store can only be used with the model that it was made for."""
    content = json.dumps([record.to_dict() for record in records], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:32]
