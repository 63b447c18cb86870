"""Records: the units that move between SSDs, host memory, and device.

A record holds the parameters of one block, of the embeddings, or of the head. In memory it is one flat buffer of
parameters; on SSD it is that buffer, and optimizer states in chunks of ``[low | mean | variance]`` (for other
optimizers, see :mod:`fuyou.layout.record_parts`), so that one chunk is one contiguous range to read, update, and
write back. (``low`` are the low bits of split master weights.)

A record is trained as a whole or frozen as a whole. A block with both kinds of parameters has two records: a frozen
one, written once when the store is created, and an *adapter record* of all trained parameters in fp32, whether or not
these are adapters.

Some families keep a few parameters in fp32 for any dtype of the rest (``_keep_in_fp32_modules_strict``). Where these
are frozen they are *wide*: fp32 numbers, bit for bit, in a record of bf16. Where they are trained, each dtype has a
record; of a block, that in fp32 is the adapter record, and outside the blocks, the smaller one.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from common.errors import UserError, did_you_mean
from common.memory.buffers import PAGE, round_up
from common.store import Extent, Layout
from fuyou.layout.frozen_weights import FrozenDtype
from fuyou.layout.record_parts import (
    ADAMW,
    ADAMW_8BIT,
    ALIGN_ELEMENTS,
    Chunk,
    ParameterSlot,
    StateComponent,
    state_components,
)
from fuyou.layout.share import ALONE, Share

if TYPE_CHECKING:  # transformers is behind it, which the optimizer process can do without
    from common.models.checkpoint.compressed.parameters import CompressedParameter


PAGE_ELEMENTS = PAGE // 2  # Unit of ranges that are read or written: a page even at two bytes each

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}  # Dtypes by the names that options give them


@dataclass(frozen=True)
class Precision:
    """Dtypes of parameters, gradients, and optimizer states."""

    # Dtype of forward and backward pass: bfloat16 (with split fp32 master weights) or float32
    dtype: torch.dtype
    optimizer: str = ADAMW  # Name of the optimizer, which decides what is kept of each parameter

    @classmethod
    def named(cls, dtype: str, optimizer: str = ADAMW) -> "Precision":
        """Return the precision with a dtype, ``"bf16"`` or ``"fp32"``, and an optimizer.

        Raises:
            UserError: if a name or the optimizer is unknown.
        """
        for option, value, choices in (
            ("dtype", dtype, DTYPES),
            ("optimizer", optimizer, (ADAMW, ADAMW_8BIT)),
        ):
            if value not in choices:
                raise UserError(
                    f"{option} must be {' or '.join(choices)}, not {value!r}.{did_you_mean(str(value), choices)}"
                )
        return cls(DTYPES[dtype], optimizer)

    @property
    def split(self) -> bool:
        """Whether fp32 master weights are split into bf16 weights and low bits."""
        return self.dtype == torch.bfloat16

    @property
    def parameter_bytes(self) -> int:
        return self.dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        return self.dtype.itemsize

    @property
    def in_fp32(self) -> "Precision":
        return replace(self, dtype=torch.float32)

    @cached_property
    def components(self) -> tuple[StateComponent, ...]:
        """Return the components of the optimizer states: low bits (if split), then moments."""
        return state_components(self.optimizer, self.split)

    @property
    def low_dtype(self) -> torch.dtype:
        """Return the dtype of the low bits of split master weights."""
        return self.components[0].dtype

    @property
    def moment_dtype(self) -> torch.dtype:
        return self.components[int(self.split)].dtype

    def state_nbytes(self, elements: int) -> int:
        """Return the bytes of the optimizer states of this many elements."""
        return sum(component.nbytes(elements) for component in self.components)

    @cached_property
    def state_bytes(self) -> float:
        return self.state_nbytes(self.page_elements) / self.page_elements

    @cached_property
    def page_elements(self) -> int:
        """Return the elements in whose multiples all state components and parameters are whole pages."""
        elements = PAGE_ELEMENTS
        while any(component.nbytes(elements) % PAGE for component in self.components):
            elements *= 2
        return elements


class Kind(Enum):
    """Kind of a record; each kind has buffers of its size."""

    BLOCK = "block"  # Parameters of a block: all of them, or those that are frozen
    NON_BLOCK = "outer"  # Parameters outside the blocks; may be many times larger than a block
    # Trained parameters of a block, the embeddings or the head whose other parameters are frozen, or have another dtype
    ADAPTER = "adapter"
    TOWER = "tower"  # Frozen parameters of towers (image encoders), which stay on the device

    __hash__ = object.__hash__  # as of Phase


@dataclass(frozen=True)
class Record:
    """Parameters of one block, or of what is outside the blocks, laid out flat.

    Parameters with weight decay come first, then zero padding to whole pages, then those without, then padding. Padding
    has zero gradients, so it stays zero.
    """

    index: int
    name: str  # `block 7`, `embedding`, `head` or `outer` (both of these), for messages and traces
    kind: Kind
    precision: Precision
    trainable: bool  # Whether it has gradients and states; a frozen record has one extent, and is only read
    parameters: tuple[ParameterSlot, ...]
    decayed: int  # Elements of the part with weight decay, padding included
    numel: int  # Elements of the whole record, padding included
    frozen: FrozenDtype = FrozenDtype.PLAIN  # Format in which it is stored, if it is frozen
    # Share of this rank. With several ranks, the record is padded so that all have equal parts.
    share: Share = ALONE

    @staticmethod
    def build(
        index: int,
        name: str,
        kind: Kind,
        precision: Precision,
        parameters: Iterable[tuple[tuple[str, ...], Sequence[int], bool]],
        *,
        trainable: bool = True,
        frozen: FrozenDtype = FrozenDtype.PLAIN,
        held: Collection[str] = (),
        wide: Collection[str] = (),
        compressed: "Mapping[str, CompressedParameter] | None" = None,
    ) -> "Record":
        """Lay out parameters in order, those with weight decay first.

        Args:
            parameters: names and shape of each, and whether weight decay applies.
            frozen: storage format, if not trainable.
            held: first names of parameters that are not trained although the record is.
            wide: first names of parameters that are fp32 in a frozen record of bf16. They are no matrices: see
                :attr:`ParameterSlot.decay`.
            compressed: storage of some of them, by first name, for :attr:`FrozenDtype.CHECKPOINT`.
        """
        entries = list(parameters)
        slots: list[ParameterSlot] = []
        pages = precision.page_elements if trainable else PAGE_ELEMENTS
        position = boundary = 0
        for part in (True, False):
            for names, shape, decay in entries:
                if decay is part:
                    trained = names[0] not in held
                    stored = (compressed or {}).get(names[0])
                    slot = ParameterSlot(
                        names, tuple(shape), position, decay, trained, stored, wide=names[0] in wide
                    )
                    slots.append(slot)
                    position = round_up(position + slot.span, ALIGN_ELEMENTS)
            position = round_up(position, pages)
            if part:
                boundary = position
        return Record(index, name, kind, precision, trainable, tuple(slots), boundary, position, frozen)

    def shared(self, share: Share) -> "Record":
        """Return the record as one rank of several sees it; of one that is shared already, too."""
        end = max((slot.offset + slot.span for slot in self.parameters), default=0)
        alone = round_up(max(end, self.decayed), self.page_elements)  # without the padding for another share
        return replace(self, numel=share.padded(alone, self.page_elements), share=share)

    @property
    def page_elements(self) -> int:
        """Return the elements in whose multiples the record is read and written."""
        return self.precision.page_elements if self.trainable else PAGE_ELEMENTS

    @property
    def unit_bytes(self) -> int:
        """Return the bytes of a unit that is shared among ranks: an element, or a byte if encoded."""
        return 1 if self.decoded_nbytes else self.precision.parameter_bytes

    @property
    def units(self) -> int:
        return self.device_nbytes // self.unit_bytes

    @property
    def stored(self) -> int:
        """Return the units that this rank stores on SSD and in host memory."""
        return self.share.stored(self.units)

    @property
    def owned(self) -> int:
        return self.share.owned(self.numel)

    @property
    def used(self) -> int:
        return max((slot.offset + slot.span for slot in self.parameters), default=0)

    @property
    def filled_slices(self) -> list[int]:
        """Return, for each rank of a node, the units that it stores without the record's final padding.

        Padding is zero, and need not be sent.
        """
        used = self._stored_nbytes(max(0, self.used - self.decayed)) if self.decoded_nbytes else self.used
        return [
            max(0, min(self.stored, used - rank * self.stored)) for rank in range(self.share.ranks_per_node)
        ]

    @property
    def filled_parts(self) -> list[int]:
        """Return, for each node, the elements of this rank's slice that it updates, without final padding."""
        used = self.used - self.share.stored_start(self.numel)
        return [max(0, min(self.owned, used - node * self.owned)) for node in range(self.share.nodes)]

    @property
    def device_nbytes(self) -> int:
        """Return the bytes of all parameters on the device: whole pages for each rank of a node."""
        return round_up(self._stored_nbytes(self.numel - self.decayed), PAGE * self.share.ranks_per_node)

    @cached_property
    def decoded_nbytes(self) -> int:
        """Return the bytes of the parameters in the compute dtype, if stored otherwise; else 0."""
        return 0 if self.frozen is FrozenDtype.PLAIN else self.numel * self.precision.parameter_bytes

    @cached_property
    def parameter_nbytes(self) -> int:
        return self.stored * self.unit_bytes

    @property
    def first_byte(self) -> int:
        return self.share.stored_start(self.units) * self.unit_bytes

    @property
    def gradient_nbytes(self) -> int:
        return self.owned * self.precision.gradient_bytes if self.trainable else 0

    @property
    def state_nbytes(self) -> int:
        """Return the bytes of the optimizer states of what this rank updates."""
        return self.precision.state_nbytes(self.owned) if self.trainable else 0

    @property
    def first_nbytes(self) -> int:
        """Return the bytes that are written to a new store: all but moments, which are zero."""
        low = (
            self.precision.components[0].nbytes(self.owned) if self.trainable and self.precision.split else 0
        )
        return self.parameter_nbytes + low

    @property
    def parameter_count(self) -> int:
        return sum(slot.numel for slot in self.parameters)

    @cached_property
    def active_count(self) -> float:
        """Return the number of parameters that a token is multiplied with, on average over experts."""
        return sum(slot.numel * slot.activity for slot in self.parameters)

    @property
    def trained_count(self) -> int:
        return sum(slot.numel for slot in self.parameters if slot.trained and self.trainable)

    @cached_property
    def trained_names(self) -> frozenset[str]:
        return frozenset(slot.name for slot in self.parameters if slot.trained and self.trainable)

    def chunks(self, chunk_elements: int) -> list[Chunk]:
        """Return the chunks that this rank updates, relative to its first element.

        Args:
            chunk_elements: largest size of a chunk, a multiple of a page.
        """
        first = self.share.owned_start(self.numel)
        result = []
        for start, stop, decay in ((0, self.decayed, True), (self.decayed, self.numel, False)):
            start = max(start, first)
            stop = min(stop, first + self.owned)
            for at in range(start, stop, chunk_elements):
                result.append(Chunk(at - first, min(at + chunk_elements, stop) - first, decay))
        return result

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return views of the flat buffer ``[numel]``, one per parameter, by first name."""
        flats = flat, flat.view(torch.float32) if any(slot.wide for slot in self.parameters) else flat
        return {
            name: flats[wide].as_strided(shape, strides, flats[wide].storage_offset() + offset)
            for name, shape, strides, offset, wide in self._places
        }

    @cached_property
    def _places(self) -> list[tuple[str, tuple[int, ...], tuple[int, ...], int, bool]]:
        """Name, shape, strides, and offset in numbers of its width of each parameter, and whether it is wide."""
        strides = (torch.empty(slot.shape, device="meta").stride() for slot in self.parameters)
        return [
            (slot.name, slot.shape, stride, slot.offset // (2 if slot.wide else 1), slot.wide)
            for slot, stride in zip(self.parameters, strides, strict=True)
        ]

    @cached_property
    def padding(self) -> list[tuple[int, int]]:
        """Ranges ``[start, stop)`` of the elements between and behind parameters."""
        slots = sorted(self.parameters, key=lambda slot: slot.offset)
        ends = [0, *(slot.offset + slot.numel for slot in slots)]
        starts = [*(slot.offset for slot in slots), self.numel]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    @cached_property
    def part_starts(self) -> dict[str, list[int]]:
        """First element of each parameter, by name, in each rank's part of the record."""
        starts = {}
        for slot in self.parameters:
            stop = slot.offset + slot.numel
            following = (slot.offset // self.owned + 1) * self.owned
            starts[slot.name] = [
                *range(slot.offset, min(slot.offset + 1, stop)),
                *range(following, stop, self.owned),
            ]
        return starts

    def decode(self, payload: torch.Tensor, flat: torch.Tensor) -> None:
        """Decode a record that is not stored in the compute dtype.

        Args:
            payload: ``uint8 [device_nbytes]``.
            flat: ``[numel]`` on the same device, written except for the padding.
        """
        if self.frozen is not FrozenDtype.CHECKPOINT:
            self.frozen.decode(payload, self.decayed, flat)
            return
        for slot, stored in self.stored_parameters(payload):
            values = flat[slot.offset : slot.offset + slot.span]
            if slot.compressed is None:
                values.copy_(stored.view(flat.dtype))
            else:
                slot.compressed.decode(stored, values)

    def stored_parameters(self, payload: torch.Tensor) -> Iterator[tuple[ParameterSlot, torch.Tensor]]:
        """Yield each parameter with its bytes in ``payload``, for :attr:`FrozenDtype.CHECKPOINT`."""
        position = 0
        for slot in self.parameters:
            plain = slot.span * self.precision.parameter_bytes
            nbytes = plain if slot.compressed is None else slot.compressed.nbytes
            yield slot, payload[position : position + nbytes]
            position += slot.stored_nbytes(self.precision.dtype)

    def _stored_nbytes(self, rest: int) -> int:
        if self.frozen is FrozenDtype.CHECKPOINT:
            return sum(slot.stored_nbytes(self.precision.dtype) for slot in self.parameters)
        return self.frozen.used_nbytes(self.decayed, rest, self.precision.dtype)

    def to_dict(self) -> dict[str, Any]:
        """Return the layout as JSON, without the share, for the model's fingerprint."""
        held = [slot.name for slot in self.parameters if not slot.trained]
        experts = {slot.names[0]: list(slot.experts) for slot in self.parameters if slot.experts is not None}
        compressed = {
            slot.name: slot.compressed.to_dict() for slot in self.parameters if slot.compressed is not None
        }
        wide = [slot.name for slot in self.parameters if slot.wide]
        return {
            "name": self.name,
            "kind": self.kind.value,
            # The second: of moments, once
            "dtypes": [str(self.precision.dtype).removeprefix("torch."), "float32"],
            **({"optimizer": self.precision.optimizer} if self.precision.optimizer != ADAMW else {}),
            "trainable": self.trainable,
            "frozen": self.frozen.value,
            "parameters": [[list(slot.names), list(slot.shape), slot.decay] for slot in self.parameters],
            **({"held": held} if held else {}),
            **({"wide": wide} if wide else {}),
            **({"experts": experts} if experts else {}),
            **({"compressed": compressed} if compressed else {}),
        }


@dataclass(frozen=True)
class RecordExtents:
    """Extents of a record on SSD: a pair per slot; if frozen, one extent of parameters."""

    parameters: tuple[Extent, ...]
    states: tuple[Extent, ...]


SLOTS = 2  # Slots of each trained record: steps write the one that the last commit does not use
FROZEN_FILE = "weights.frozen"  # Name of the file, in every SSD directory, that holds all frozen records


def weights_file(slot: int) -> str:
    """Return the name of the file, on every SSD, with slot ``slot`` of all trained records."""
    return f"weights.{slot}"


def allocate_extents(layout: Layout, records: Sequence[Record]) -> list[RecordExtents]:
    """Return every record's extents in all slots, the same in engine and optimizer process."""
    extents: list[tuple[list[Extent], list[Extent]]] = [([], []) for _ in records]
    for record, (parameters, _) in zip(records, extents, strict=True):
        if not record.trainable:
            parameters.append(layout.allocate(FROZEN_FILE, record.parameter_nbytes))
    for slot in range(SLOTS):
        for record, (parameters, states) in zip(records, extents, strict=True):
            if record.trainable:
                parameters.append(layout.allocate(weights_file(slot), record.parameter_nbytes))
                states.append(layout.allocate(weights_file(slot), record.state_nbytes))
    return [RecordExtents(tuple(parameters), tuple(states)) for parameters, states in extents]
