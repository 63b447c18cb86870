"""Dividing a model into records: which parameters move together, and in which order the visits need them."""

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper

from common.errors import UserError
from common.models.adapters.memory import AdapterMemory, adapter_memory
from common.models.attention.memory import AttentionMemory
from common.models.checkpoint.compressed.parameters import CompressedParameter
from common.models.flops import visited_shares
from common.models.structure import decayed_parameters, parameter_names
from common.models.vision import image_memory, tower_parameters
from fuyou.layout.frozen_weights import FrozenDtype
from fuyou.layout.model_layout import ModelLayout, no_bytes
from fuyou.layout.record import Kind, Precision, Record
from fuyou.layout.record_parts import is_matrix
from fuyou.model.chunk_survey import chunk_survey
from fuyou.model.expert_modules import expert_output_bytes
from fuyou.model.streamed_model import StreamedModel

# Frozen parameters up to this fraction of a block's trained ones stay in one record with them, such as the corrections
# of a mixture's routers.
HELD_FRACTION = 0.1
Entry = tuple[tuple[str, ...], Sequence[int], bool]  # Names and shape of a parameter, and whether it decays


@dataclass
class _Group:
    """Parameters that are used together: those of a block, or those on one side of the blocks."""

    frozen: list[Entry] = field(default_factory=list)
    trained: list[Entry] = field(default_factory=list)
    held: frozenset[str] = frozenset()  # First names of the parameters among `trained` that are not trained

    def __bool__(self) -> bool:
        return bool(self.frozen or self.trained)

    def __add__(self, other: "_Group") -> "_Group":
        return _Group(self.frozen + other.frozen, self.trained + other.trained)

    def with_held(self) -> "_Group":
        """Return the group with its frozen parameters held among the trained ones, if they are few.

        They take up optimizer states that they do not need, but what is trained is not taken for adapters.
        """
        if _elements(self.frozen) > HELD_FRACTION * _elements(self.trained):
            return self
        return _Group([], self.trained + self.frozen, frozenset(names[0] for names, *_ in self.frozen))


def _elements(entries: Iterable[Entry]) -> int:
    return sum(math.prod(shape) for _, shape, _ in entries)


@dataclass
class _Groups:
    blocks: list[_Group]
    before: _Group = field(default_factory=_Group)  # Outside the blocks, used before them
    after: _Group = field(default_factory=_Group)  # Outside the blocks, used after them
    both: _Group = field(default_factory=_Group)  # Outside the blocks, used on both sides of them
    tower: _Group = field(default_factory=_Group)  # Of frozen towers


@dataclass
class _Records:
    precision: Precision
    frozen: FrozenDtype
    compressed: Mapping[str, CompressedParameter]
    shares: Mapping[str, float]
    wide: frozenset[str]  # First names of the parameters that are fp32 although the others are bf16
    records: list[Record] = field(default_factory=list)

    def main(self, name: str, kind: Kind, group: _Group) -> int:
        """Make a record of a whole group, or of its frozen parameters if there are any; return its index."""
        # Towers are on the device together with the embeddings, and there is memory to decode but one record.
        kinds = (Kind.BLOCK, Kind.NON_BLOCK) if self.frozen is FrozenDtype.CHECKPOINT else (Kind.BLOCK,)
        frozen = self.frozen if kind in kinds and group.frozen else FrozenDtype.PLAIN
        compressed: dict[str, CompressedParameter] = {}
        if frozen is FrozenDtype.CHECKPOINT:
            names = [names[0] for names, *_ in group.frozen]
            compressed = {name: self.compressed[name] for name in names if name in self.compressed}
            frozen = frozen if compressed else FrozenDtype.PLAIN
        if not group.frozen:
            precision, entries = self._by_dtype(kind, group)[0]
            return self._add_trained(name, kind, precision, entries, group.held)
        wide = [names[0] for names, *_ in group.frozen if names[0] in self.wide]
        return self._add(
            name,
            kind,
            self.precision,
            group.frozen,
            trainable=False,
            frozen=frozen,
            wide=wide,
            compressed=compressed,
        )

    def adapter(self, name: str, entries: list[Entry]) -> int | None:
        """Make a record of the trained parameters of a group that is frozen otherwise; return its index.

        None: nothing is trained, and there is no such record.
        """
        return (
            self._add(f"{name} adapters", Kind.ADAPTER, self.precision.in_fp32, entries) if entries else None
        )

    def next_to(self, name: str, kind: Kind, group: _Group) -> int | None:
        """Make a record of what :meth:`main` leaves of a group: what is trained next to frozen parameters, or is in the
        other dtype. Return its index, or None if nothing is left."""
        if group.frozen:
            return self.adapter(name, group.trained)
        precision, entries = self._by_dtype(kind, group)[1]
        if not entries:
            return None
        dtype = str(precision.dtype).removeprefix("torch.")
        return self._add_trained(f"{name} in {dtype}", Kind.ADAPTER, precision, entries, group.held)

    def _by_dtype(self, kind: Kind, group: _Group) -> list[tuple[Precision, list[Entry]]]:
        """Return the parameters of a trained group in both dtypes, those of its main record first.

        These are in fp32 if none is in bf16 or, outside the blocks, if that is the larger part: buffers of adapter
        records are as large as the largest.
        """
        fp32 = [entry for entry in group.trained if entry[0][0] in self.wide]
        rest = [entry for entry in group.trained if entry[0][0] not in self.wide]
        parts = [(self.precision, rest), (self.precision.in_fp32, fp32)]
        larger = kind is Kind.NON_BLOCK and _elements(fp32) > _elements(rest)
        return parts[::-1] if fp32 and (larger or not rest) else parts

    def _add_trained(
        self, name: str, kind: Kind, precision: Precision, entries: list[Entry], held: frozenset[str]
    ) -> int:
        """Make a record that is trained, but for what is held; frozen if that is all of it."""
        held = held & {names[0] for names, *_ in entries}
        return self._add(
            name, kind, precision, entries, trainable=len(held) < len(entries) or not entries, held=held
        )

    def _add(self, name: str, kind: Kind, precision: Precision, entries: list[Entry], **options: Any) -> int:
        record = Record.build(len(self.records), name, kind, precision, entries, **options)
        slots = (replace(slot, activity=self.shares.get(slot.name, 1.0)) for slot in record.parameters)
        self.records.append(replace(record, parameters=tuple(slots)))
        return len(self.records) - 1


def model_records(
    stack: StreamedModel,
    precision: Precision,
    frozen: FrozenDtype = FrozenDtype.PLAIN,
    compressed: Mapping[str, CompressedParameter] | None = None,
    kept: Collection[str] = (),
) -> ModelLayout:
    """Divide a model into records, and return its layout.

    There is one record for each block, one for what runs before the blocks, one for what runs after them, and one for
    frozen towers. Where some parameters of these are frozen (``requires_grad`` is False) and some are trained, the
    latter have a separate record of adapters, unless hardly any are frozen. Where a parameter is used on both sides of
    the blocks (tied embeddings), both sides are one record.

    Args:
        precision: dtypes of what is trained.
        frozen: how frozen parameters of blocks are stored.
        compressed: how a compressed checkpoint stores some of them, by name, for :attr:`FrozenDtype.CHECKPOINT`.
        kept: names of parameters that the family keeps in fp32, whose dtype that is.

    Raises:
        UserError: all parameters are frozen.
    """
    if not any(parameter.requires_grad for parameter in stack.model.parameters()):
        raise UserError("All parameters of the model are frozen: there is nothing to train.")
    kinds = BaseTunerLayer | AuxiliaryTrainingWrapper
    adapted = [name for name, module in stack.model.named_modules() if isinstance(module, kinds)]
    wide = frozenset(kept if precision.split else ())
    records = _Records(precision, frozen, compressed or {}, visited_shares(stack.model), wide)
    layout = _build_layout(_group_parameters(stack, wide), records, precision)
    prefix = f"{stack.block_prefix}."
    outside = (stack.model.get_submodule(name) for name in adapted if not name.startswith(prefix))
    return replace(
        layout,
        block_adapter_memory=AdapterMemory.most(adapter_memory(block) for block in stack.blocks),
        non_block_adapter_memory=AdapterMemory.most(adapter_memory(module) for module in outside),
        hidden_size=stack.hidden_size,
        expert_output_bytes=expert_output_bytes(stack),
        carried_bytes=stack.carried_bytes if stack.links else no_bytes,
        key_memory=lambda: chunk_survey(stack).memory,
        image_memory=image_memory(stack.model),
        attention=AttentionMemory.of(stack.model.config, precision.dtype.itemsize),
    )


def _group_parameters(stack: StreamedModel, wide: frozenset[str]) -> _Groups:
    groups = _Groups([_Group() for _ in stack.blocks])
    towers = set(tower_parameters(stack.model))
    prefix = f"{stack.block_prefix}."
    decayed = decayed_parameters(stack.model)
    for names in parameter_names(stack.model):
        parameter = stack.model.get_parameter(names[0])
        shape = tuple(parameter.shape)
        if names[0].startswith(prefix):
            group = groups.blocks[int(names[0].removeprefix(prefix).partition(".")[0])]
        elif names[0] in towers and not parameter.requires_grad:
            group = groups.tower
        else:
            sides = {stack.runs_before_blocks(name) for name in names}
            group = groups.both if len(sides) == 2 else groups.before if True in sides else groups.after
        # Of what is frozen, matrices come first: they may be stored in fewer bits.
        matrix = is_matrix(names[0], shape) and names[0] not in wide
        decays = names[0] in decayed if parameter.requires_grad else matrix
        (group.trained if parameter.requires_grad else group.frozen).append((names, shape, decays))
    groups.blocks = [group.with_held() for group in groups.blocks]
    return groups


def _build_layout(groups: _Groups, records: _Records, precision: Precision) -> ModelLayout:
    blocks = groups.blocks
    before = groups.before
    after = groups.after
    both = groups.both
    tower = groups.tower
    if both or not before or not after:
        # In the model's order, as far as that goes: what is tied is the embedding, which comes first.
        whole = (both + before + after).with_held()
        embedding = head = records.main("outer", Kind.NON_BLOCK, whole)
    else:
        whole = _Group()
        before = before.with_held()
        after = after.with_held()
        embedding = records.main("embedding", Kind.NON_BLOCK, before)
        head = records.main("head", Kind.NON_BLOCK, after)
    layers = tuple(records.main(f"block {layer}", Kind.BLOCK, group) for layer, group in enumerate(blocks))
    if whole and not whole.frozen:
        embedding_adapter = head_adapter = records.next_to("outer", Kind.NON_BLOCK, whole)
    elif whole.frozen and both.trained:
        embedding_adapter = head_adapter = records.adapter("outer", whole.trained)
    elif whole:
        embedding_adapter = records.adapter("embedding", before.trained)
        head_adapter = records.adapter("head", after.trained)
    else:
        embedding_adapter = records.next_to("embedding", Kind.NON_BLOCK, before)
        head_adapter = records.next_to("head", Kind.NON_BLOCK, after)
    adapters = tuple(
        records.next_to(f"block {layer}", Kind.BLOCK, group) for layer, group in enumerate(blocks)
    )
    towers = records.main("towers", Kind.TOWER, tower) if tower.frozen else None
    return ModelLayout(
        tuple(records.records),
        embedding,
        head,
        tuple((index,) for index in layers),
        precision,
        block_adapters=adapters if any(index is not None for index in adapters) else (),
        embedding_adapter=embedding_adapter,
        head_adapter=head_adapter,
        tower=towers,
    )


def fingerprint(records: Sequence[Record], computation: object = None) -> str:
    """Return a hash of the layout of all records, and of all else of the computation a checkpoint does not say.

    A store can only be used with the model that it was made for.
    """
    content = json.dumps([[record.to_dict() for record in records], computation], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:32]
