"""Records: the units that move between SSDs, host memory and device.

A record holds the parameters of one block, of the embeddings, or of the head. In memory it is one flat buffer of
parameters; on SSD it is that buffer and, beside it, its optimizer states in chunks of ``[low | mean | variance]`` (of
other optimizers, what :mod:`fuyou.layout.optimizer_state` lists), so that one chunk is one contiguous range to read,
update and write back. (``low`` are the low 16 bits of split master weights.)

A record is trained as a whole or frozen as a whole. A block with both kinds of parameters has two records: a frozen
one, which is written when the store is made and only read from then on, and an *adapter record* of all that is trained,
in fp32, whether or not these are adapters.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from common.errors import UserError
from common.memory.buffers import PAGE, round_up
from common.store import Extent, Layout
from fuyou.layout.frozen_weights import FrozenDtype
from fuyou.layout.optimizer_state import ADAMW, OPTIMIZERS, StateComponent, check_optimizer
from fuyou.layout.record_parts import ALIGN_ELEMENTS, Chunk, ParameterSlot
from fuyou.layout.share import ALONE, Share

if TYPE_CHECKING:  # transformers is behind it, which the optimizer process can do without
    from common.models.checkpoint.compressed import CompressedParameter

# Ranges that are read or written on their own are multiples of this many elements: a page even at two bytes each.
PAGE_ELEMENTS = PAGE // 2

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}  # Dtypes by the names that options give them


@dataclass(frozen=True)
class Precision:
    """The dtypes of parameters, gradients and optimizer states."""

    dtype: torch.dtype  # Dtype of forward and backward pass: bfloat16 (with split fp32 master weights) or float32
    # Dtype of moments that are not in 8 bits: float32, or bfloat16 with stochastic rounding.
    optimizer_dtype: torch.dtype
    optimizer: str = ADAMW  # Name of the optimizer, which decides what is kept of each parameter

    @classmethod
    def named(cls, dtype: str, optimizer_dtype: str, optimizer: str = ADAMW) -> "Precision":
        """Return the precision with these dtypes, each ``"bf16"`` or ``"fp32"``.

        Raises:
            UserError: any other name, or an optimizer that there is not.
        """
        check_optimizer(optimizer, optimizer_dtype)
        for option, value in (("dtype", dtype), ("optimizer_dtype", optimizer_dtype)):
            if value not in DTYPES:
                raise UserError(f"{option} must be {' or '.join(DTYPES)}, not {value!r}.")
        return cls(DTYPES[dtype], DTYPES[optimizer_dtype], optimizer)

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Dtypes of parameters and moments."""
        return self.dtype, self.optimizer_dtype

    @property
    def split(self) -> bool:
        """Whether fp32 master weights are split into bf16 weights and the low 16 bits."""
        return self.dtype == torch.bfloat16

    @property
    def parameter_bytes(self) -> int:
        """Bytes per parameter in the compute dtype."""
        return self.dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        """Bytes per parameter of a gradient on its way to the optimizer."""
        return self.dtype.itemsize

    @property
    def in_fp32(self) -> "Precision":
        """The same of parameters that compute in fp32."""
        return replace(self, dtype=torch.float32)

    @cached_property
    def components(self) -> tuple[StateComponent, ...]:
        """What the optimizer keeps of each parameter: low 16 bits of the master weight (if split), moments."""
        return OPTIMIZERS[self.optimizer].components(self.split, self.optimizer_dtype)

    def state_nbytes(self, elements: int) -> int:
        """Return the bytes of the optimizer states of so many elements."""
        return sum(component.nbytes(elements) for component in self.components)

    @cached_property
    def state_bytes(self) -> float:
        """Bytes per parameter of optimizer states."""
        return self.state_nbytes(self.page_elements) / self.page_elements

    @cached_property
    def page_elements(self) -> int:
        """Elements in whose multiples each component of the states, like parameters, is whole pages."""
        elements = PAGE_ELEMENTS
        while any(component.nbytes(elements) % PAGE for component in self.components):
            elements *= 2
        return elements


class Kind(Enum):
    """Kind of a record, which decides the buffers that it passes through: each kind has buffers of its own size."""

    BLOCK = "block"  # Parameters of a block: all of them, or those that are frozen
    NON_BLOCK = "outer"  # Parameters outside the blocks, likewise; may be many times larger than a block
    ADAPTER = "adapter"  # Trained parameters of a block, the embeddings or the head whose other parameters are frozen
    # Frozen parameters of towers, which turn images into input of the embedding; they stay on the device.
    TOWER = "tower"


@dataclass(frozen=True)
class Record:
    """The parameters of one block, or of what stands outside the blocks, laid out flat.

    Parameters with weight decay come first, then zero padding to whole pages, then those without, then padding. Padding
    has zero gradients, so it stays zero.
    """

    index: int
    name: str  # `block 7`, `embedding`, `head` or `outer` (both of these), for messages and traces
    kind: Kind
    precision: Precision
    # Whether it has gradients and optimizer states; a frozen record has a single place on SSD, and is only read.
    trainable: bool
    parameters: tuple[ParameterSlot, ...]
    decayed: int  # Elements of the part with weight decay, padding included
    numel: int  # Elements of the whole record, padding included
    frozen: FrozenDtype = FrozenDtype.PLAIN  # Format in which it is stored, if it is frozen
    share: Share = ALONE  # Share of this rank. With several ranks, the record is padded so that all have equal parts.

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
        compressed: "Mapping[str, CompressedParameter] | None" = None,
    ) -> "Record":
        """Lay out parameters in order, those with weight decay first.

        Args:
            index: number of the record.
            name: its name.
            kind: its kind.
            precision: its dtypes.
            parameters: names and shape of each, and whether weight decay applies.
            trainable: whether the record is trained.
            frozen: format in which it is stored otherwise.
            held: first names of parameters that are not trained although the record is.
            compressed: how some of them are stored, by first name, for :attr:`FrozenDtype.CHECKPOINT`.
        """
        own = compressed or {}
        wanted = list(parameters)
        slots: list[ParameterSlot] = []
        pages = precision.page_elements if trainable else PAGE_ELEMENTS
        position = boundary = 0
        for part in (True, False):
            for names, shape, decay in wanted:
                if decay is part:
                    trained, stored = names[0] not in held, own.get(names[0])
                    slot = ParameterSlot(names, tuple(shape), position, decay, trained, stored)
                    slots.append(slot)
                    position = round_up(position + slot.numel, ALIGN_ELEMENTS)
            position = round_up(position, pages)
            if part:
                boundary = position
        return Record(index, name, kind, precision, trainable, tuple(slots), boundary, position, frozen)

    def shared(self, share: Share) -> "Record":
        """Return the record as one rank of several sees it."""
        return replace(self, numel=share.padded(self.numel, self.page_elements), share=share)

    @property
    def page_elements(self) -> int:
        """Elements in whose multiples the record is read and written."""
        return self.precision.page_elements if self.trainable else PAGE_ELEMENTS

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit in which stored parameters are divided among ranks: an element; a byte if encoded."""
        return 1 if self.decoded_nbytes else self.precision.parameter_bytes

    @property
    def units(self) -> int:
        """Units of all parameters, padding included."""
        return self.device_nbytes // self.unit_bytes

    @property
    def used_units(self) -> int:
        """Units up to the end of the last parameter: what follows is padding."""
        if not self.decoded_nbytes:
            return self.used
        return self._stored_nbytes(max(0, self.used - self.decayed))

    @property
    def stored(self) -> int:
        """Units that this rank stores, on SSD and in host memory; all if it is alone."""
        return self.share.stored(self.units)

    @property
    def owned(self) -> int:
        """Elements that this rank updates; all if it is alone."""
        return self.share.owned(self.numel)

    @property
    def used(self) -> int:
        """Elements up to the end of the last parameter: what follows is padding."""
        return max((slot.offset + slot.numel for slot in self.parameters), default=0)

    @property
    def filled_slices(self) -> list[int]:
        """For each rank of a node, the units that it stores, without the padding at the end of the record."""
        return self.share.filled_slices(self.units, self.used_units)

    @property
    def filled_parts(self) -> list[int]:
        """For each node, the elements that it updates of this rank's slice, without the padding at the end."""
        return self.share.filled_parts(self.numel, self.used)

    @property
    def device_nbytes(self) -> int:
        """Bytes of all parameters as they come to the device: whole pages for each rank of a node."""
        return round_up(self._stored_nbytes(self.numel - self.decayed), PAGE * self.share.ranks_per_node)

    @cached_property
    def decoded_nbytes(self) -> int:
        """Bytes of the parameters in the compute dtype, if they are stored otherwise; 0 if they are not."""
        return 0 if self.frozen is FrozenDtype.PLAIN else self.numel * self.precision.parameter_bytes

    @cached_property
    def parameter_nbytes(self) -> int:
        """Bytes of the parameters that this rank stores, on SSD and in host memory."""
        return self.stored * self.unit_bytes

    @property
    def first_byte(self) -> int:
        """First byte that this rank stores, among all parameters as they come to the device."""
        return self.share.stored_start(self.units) * self.unit_bytes

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of the gradient that goes to the optimizer, for what this rank updates."""
        return self.owned * self.precision.gradient_bytes if self.trainable else 0

    @property
    def state_nbytes(self) -> int:
        """Bytes of the optimizer states of what this rank updates."""
        return self.precision.state_nbytes(self.owned) if self.trainable else 0

    @property
    def parameter_count(self) -> int:
        """Number of parameters, without padding."""
        return sum(slot.numel for slot in self.parameters)

    @cached_property
    def active_count(self) -> float:
        """Number of parameters that a token is multiplied with, on average: not those of experts it is not sent to."""
        return sum(slot.numel * slot.activity for slot in self.parameters)

    @property
    def trained_count(self) -> int:
        """Number of parameters that gradients flow to."""
        return sum(slot.numel for slot in self.parameters if slot.name in self.trained_names)

    @cached_property
    def trained_names(self) -> frozenset[str]:
        """First names of the parameters that gradients flow to."""
        return frozenset(slot.name for slot in self.parameters if slot.trained and self.trainable)

    def chunks(self, chunk_elements: int) -> list[Chunk]:
        """Return what this rank owns in chunks, counted from the first element that it owns.

        Args:
            chunk_elements: largest size of a chunk, a multiple of a page.
        """
        first = self.share.owned_start(self.numel)
        result = []
        for start, stop, decay in ((0, self.decayed, True), (self.decayed, self.numel, False)):
            start, stop = max(start, first), min(stop, first + self.owned)
            for at in range(start, stop, chunk_elements):
                result.append(Chunk(at - first, min(at + chunk_elements, stop) - first, decay))
        return result

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return each parameter by its first name, as a view of the flat buffer ``[numel]``."""
        return {slot.name: flat[slot.offset : slot.offset + slot.numel].view(slot.shape) for slot in self.parameters}

    def decode(self, payload: torch.Tensor, flat: torch.Tensor) -> None:
        """Decode a record that is stored otherwise than in the compute dtype.

        Args:
            payload: the record as it comes to the device, ``uint8 [device_nbytes]``.
            flat: ``[numel]``, on the same device, written; what is between parameters may stay as it is.
        """
        if self.frozen is not FrozenDtype.CHECKPOINT:
            self.frozen.decode(payload, self.decayed, flat)
            return
        for slot, stored in self.stored_parameters(payload):
            values = flat[slot.offset : slot.offset + slot.numel]
            if slot.compressed is None:
                values.copy_(stored.view(flat.dtype))
            else:
                slot.compressed.decode(stored, values)

    def stored_parameters(self, payload: torch.Tensor) -> Iterator[tuple[ParameterSlot, torch.Tensor]]:
        """Yield each parameter with its bytes in ``payload``, for a record in the checkpoint's own bytes."""
        position = 0
        for slot in self.parameters:
            plain = slot.numel * self.precision.parameter_bytes
            nbytes = plain if slot.compressed is None else slot.compressed.nbytes
            yield slot, payload[position : position + nbytes]
            position += slot.stored_nbytes(self.precision.dtype)

    def _stored_nbytes(self, rest: int) -> int:
        """Return the bytes of the parameters as they are stored, if ``rest`` elements follow those with decay."""
        if self.frozen is FrozenDtype.CHECKPOINT:
            return self._checkpoint_nbytes
        return self.frozen.used_nbytes(self.decayed, rest, self.precision.dtype)

    @cached_property
    def _checkpoint_nbytes(self) -> int:
        return sum(slot.stored_nbytes(self.precision.dtype) for slot in self.parameters)

    def to_dict(self) -> dict[str, Any]:
        """Return its layout as JSON, without its share, for the model's fingerprint."""
        held = [slot.name for slot in self.parameters if not slot.trained]
        experts = {slot.names[0]: list(slot.experts) for slot in self.parameters if slot.experts is not None}
        compressed = {slot.name: slot.compressed.to_dict() for slot in self.parameters if slot.compressed is not None}
        return {
            "name": self.name,
            "kind": self.kind.value,
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in self.precision.dtypes],
            **({"optimizer": self.precision.optimizer} if self.precision.optimizer != ADAMW else {}),
            "trainable": self.trainable,
            "frozen": self.frozen.value,
            "parameters": [[list(slot.names), list(slot.shape), slot.decay] for slot in self.parameters],
            **({"held": held} if held else {}),
            **({"experts": experts} if experts else {}),
            **({"compressed": compressed} if compressed else {}),
        }


@dataclass(frozen=True)
class RecordExtents:
    """The places of a record on SSD: a pair of extents per slot; if it is frozen, one extent of parameters."""

    parameters: tuple[Extent, ...]
    states: tuple[Extent, ...]


FROZEN_FILE = "weights.frozen"  # Name of the file, in every SSD directory, that holds all frozen records


def weights_file(slot: int) -> str:
    """Return the name of the file, in every SSD directory, that holds slot ``slot`` of all trained records."""
    return f"weights.{slot}"


def allocate_extents(layout: Layout, records: Sequence[Record], slots: int) -> list[RecordExtents]:
    """Return every record's places in all slots. Engine and optimizer process compute the same places."""
    places: list[tuple[list[Extent], list[Extent]]] = [([], []) for _ in records]
    for record, (parameters, _) in zip(records, places, strict=True):
        if not record.trainable:
            parameters.append(layout.allocate(FROZEN_FILE, record.parameter_nbytes))
    for slot in range(slots):
        for record, (parameters, states) in zip(records, places, strict=True):
            if record.trainable:
                parameters.append(layout.allocate(weights_file(slot), record.parameter_nbytes))
                states.append(layout.allocate(weights_file(slot), record.state_nbytes))
    return [RecordExtents(tuple(parameters), tuple(states)) for parameters, states in places]
