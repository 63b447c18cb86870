"""Records: what moves between the tiers. One record is one block's parameters (or the embeddings', or the head's).

In memory a record is one flat buffer of parameters; on SSD it is that buffer and, beside it, its optimizer states in
chunks of ``[low | mean | variance]``, so that one chunk is one contiguous range to read, update and write back.

A record is trained as a whole or frozen as a whole. Where a module has both, it has two records: the frozen one is
written when the store is made and only read from then on; the other, an *adapter* whatever it is made of, holds what is
trained, in fp32.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

import torch

from common.errors import UserError
from common.memory.buffers import PAGE, round_up
from common.models.checkpoint.compressed import CompressedParameter
from common.store import Extent, Layout
from fuyou.layout.frozen_weights import FrozenDtype
from fuyou.layout.share import ALONE, Share

#: Every parameter starts on a multiple of this many elements: 256 bytes in bf16, enough for any vector unit and for
#: bit-reproducible BLAS, and no chunk ever ends in a scalar tail.
ALIGN_ELEMENTS = 128
#: Ranges that are read or written on their own are multiples of this many elements: one page even at two bytes each.
PAGE_ELEMENTS = PAGE // 2


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""By the names that people type."""


@dataclass(frozen=True)
class Precision:
    """How parameters, gradients and optimizer states are kept."""

    dtype: torch.dtype
    """What forward and backward compute in: bfloat16 (with fp32 masters as two halves) or float32."""
    optimizer_dtype: torch.dtype
    """Of the two moments: float32, or bfloat16 with stochastic rounding."""

    @classmethod
    def named(cls, dtype: str, optimizer_dtype: str) -> "Precision":
        """From ``"bf16"`` or ``"fp32"`` for each.

        Raises:
            UserError: any other name.
        """
        for option, value in (("dtype", dtype), ("optimizer_dtype", optimizer_dtype)):
            if value not in DTYPES:
                raise UserError(f"{option} must be {' or '.join(DTYPES)}, not {value!r}.")
        return cls(DTYPES[dtype], DTYPES[optimizer_dtype])

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Of parameters and moments."""
        return self.dtype, self.optimizer_dtype

    @property
    def split(self) -> bool:
        """Whether masters are kept as bf16 weights and the low 16 bits."""
        return self.dtype == torch.bfloat16

    @property
    def parameter_bytes(self) -> int:
        """Bytes per parameter of what computes."""
        return self.dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        """Bytes per parameter of a gradient on its way to the optimizer."""
        return self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes per parameter of what only the optimizer needs: ``low`` (if split), mean, variance."""
        return (2 if self.split else 0) + 2 * self.optimizer_dtype.itemsize


class Kind(Enum):
    """Which buffers a record passes through: each kind has its own, of the size of its largest record."""

    BLOCK = "block"
    """Of the stack: all of a block's parameters, or those of them that are frozen."""
    NON_BLOCK = "outer"
    """Outside the stack, likewise: may be many times larger than a block."""
    ADAPTER = "adapter"
    """What is trained of modules whose other parameters are frozen."""
    TOWER = "tower"
    """What is frozen of what turns images into input of the embedding: stays on the device."""


@dataclass(frozen=True)
class ParameterSlot:
    """Where one parameter lies in its record."""

    names: tuple[str, ...]
    """Name in the model, then the names of parameters tied to it."""
    shape: tuple[int, ...]
    offset: int
    """First element within the record."""
    decay: bool
    """Whether weight decay applies."""
    trained: bool = True
    """Whether gradients flow to it, if its record is trained."""
    compressed: CompressedParameter | None = None
    """How it is kept where its record is kept in the checkpoint's own bytes; None: as it computes."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def kept_nbytes(self, dtype: torch.dtype) -> int:
        """Bytes in a record that is kept in the checkpoint's own bytes, and otherwise in ``dtype``."""
        nbytes = self.numel * dtype.itemsize if self.compressed is None else self.compressed.nbytes
        return round_up(nbytes, ALIGN_ELEMENTS)


@dataclass(frozen=True)
class Chunk:
    """A range of a record that is updated at once: ``[start, stop)`` in elements, all decayed or none."""

    start: int
    stop: int
    decay: bool


@dataclass(frozen=True)
class Record:
    """The parameters of one block, or of what stands outside the stack, laid out flat.

    Layout: the parameters that are decayed, zero padding to a page, those that are not, padding. Padding has zero
    gradients, so it stays zero.
    """

    index: int
    name: str
    """``block 7``, ``embedding``, ``head`` or ``outer``: for messages and traces."""
    kind: Kind
    precision: Precision
    trainable: bool
    """Whether it has gradients and optimizer states; a frozen one has a single place on SSD, and is only read."""
    parameters: tuple[ParameterSlot, ...]
    decayed: int
    """Elements in the decayed part, padding included."""
    numel: int
    """Elements of the whole record, padding included."""
    frozen: FrozenDtype = FrozenDtype.PLAIN
    """How it is kept if it is frozen."""
    share: Share = ALONE
    """What of it is this rank's. Where there are several ranks, it is padded so that all have equal parts."""

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
        compressed: Mapping[str, CompressedParameter] | None = None,
    ) -> "Record":
        """Lay out ``(names, shape, decay)`` in order, decayed ones first.

        Args:
            held: first names of those that are not trained though the record is.
            compressed: some of them by first name, for :attr:`FrozenDtype.CHECKPOINT`.
        """
        own = compressed or {}
        wanted = list(parameters)
        slots: list[ParameterSlot] = []
        position = boundary = 0
        for part in (True, False):
            for names, shape, decay in wanted:
                if decay is part:
                    slot = ParameterSlot(
                        names, tuple(shape), position, decay, names[0] not in held, own.get(names[0])
                    )  # fmt: skip
                    slots.append(slot)
                    position = round_up(position + slot.numel, ALIGN_ELEMENTS)
            position = round_up(position, PAGE_ELEMENTS)
            if part:
                boundary = position
        return Record(index, name, kind, precision, trainable, tuple(slots), boundary, position, frozen)

    def shared(self, share: Share) -> "Record":
        """The same record as one rank of several sees it."""
        return replace(self, numel=share.padded(self.numel), share=share)

    @property
    def unit_bytes(self) -> int:
        """Bytes of the units in which what is kept of the parameters is cut up among ranks: an element's; one, if it is
        encoded in fewer bits."""
        return 1 if self.decoded_nbytes else self.precision.parameter_bytes

    @property
    def units(self) -> int:
        """Of all parameters, padding included."""
        return self.device_nbytes // self.unit_bytes

    @property
    def used_units(self) -> int:
        """Up to the end of the last parameter: what follows is padding."""
        if not self.decoded_nbytes:
            return self.used
        return self._kept_nbytes(max(0, self.used - self.decayed))

    @property
    def stored(self) -> int:
        """Units that this rank keeps, on SSD and in host memory: all, where it is alone."""
        return self.share.stored(self.units)

    @property
    def owned(self) -> int:
        """Elements that this rank updates: all, where it is alone."""
        return self.share.owned(self.numel)

    @property
    def used(self) -> int:
        """Elements up to the end of the last parameter: what follows is padding."""
        return max((slot.offset + slot.numel for slot in self.parameters), default=0)

    @property
    def filled_slices(self) -> list[int]:
        """Units, without the padding at the end, that each rank of a node stores."""
        return self.share.filled_slices(self.units, self.used_units)

    @property
    def filled_parts(self) -> list[int]:
        """Elements, likewise, of this rank's slice that each node updates."""
        return self.share.filled_parts(self.numel, self.used)

    @property
    def device_nbytes(self) -> int:
        """Bytes of all parameters, as they come to the device: so many pages for each rank of a node."""
        return round_up(self._kept_nbytes(self.numel - self.decayed), PAGE * self.share.ranks_per_node)

    @property
    def decoded_nbytes(self) -> int:
        """Bytes of the parameters as they compute, if they come in fewer."""
        return 0 if self.frozen is FrozenDtype.PLAIN else self.numel * self.precision.parameter_bytes

    @property
    def parameter_nbytes(self) -> int:
        """Bytes of the parameters that this rank keeps, on SSD and in host memory."""
        return self.stored * self.unit_bytes

    @property
    def first_byte(self) -> int:
        """Of these among all parameters as they come to the device."""
        return self.share.stored_start(self.units) * self.unit_bytes

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of the gradient on its way to the optimizer, of what this rank updates."""
        return self.owned * self.precision.gradient_bytes if self.trainable else 0

    @property
    def state_nbytes(self) -> int:
        """Bytes of what only the optimizer needs, of what this rank updates."""
        return self.owned * self.precision.state_bytes if self.trainable else 0

    @property
    def parameter_count(self) -> int:
        """Parameters without padding."""
        return sum(slot.numel for slot in self.parameters)

    @property
    def trained_count(self) -> int:
        """Those of them that gradients flow to."""
        return sum(slot.numel for slot in self.parameters if slot.name in self.trained_names)

    @cached_property
    def trained_names(self) -> frozenset[str]:
        """First names of the parameters that gradients flow to."""
        return frozenset(slot.name for slot in self.parameters if slot.trained and self.trainable)

    def chunks(self, chunk_elements: int) -> list[Chunk]:
        """What this rank owns, in ranges of at most ``chunk_elements`` (a multiple of a page), counted from the first
        element that it owns."""
        first = self.share.owned_start(self.numel)
        result = []
        for start, stop, decay in ((0, self.decayed, True), (self.decayed, self.numel, False)):
            start, stop = max(start, first), min(stop, first + self.owned)
            for at in range(start, stop, chunk_elements):
                result.append(Chunk(at - first, min(at + chunk_elements, stop) - first, decay))
        return result

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each parameter by its first name, as a view of the flat buffer ``[numel]``."""
        return {slot.name: flat[slot.offset : slot.offset + slot.numel].view(slot.shape) for slot in self.parameters}

    def decode(self, payload: torch.Tensor, flat: torch.Tensor) -> None:
        """Bring back what is kept in another way than it computes.

        Args:
            payload: all of it as it comes to the device, ``uint8 [device_nbytes]``.
            flat: ``[numel]``, on the same device. Between parameters it may stay as it is.
        """
        if self.frozen is not FrozenDtype.CHECKPOINT:
            self.frozen.decode(payload, self.decayed, flat)
            return
        for slot, kept in self.kept(payload):
            values = flat[slot.offset : slot.offset + slot.numel]
            if slot.compressed is None:
                values.copy_(kept.view(flat.dtype))
            else:
                slot.compressed.decode(kept, values)

    def kept(self, payload: torch.Tensor) -> Iterator[tuple[ParameterSlot, torch.Tensor]]:
        """Each parameter with its bytes in ``payload``, of a record in the checkpoint's own bytes."""
        position = 0
        for slot in self.parameters:
            plain = slot.numel * self.precision.parameter_bytes
            nbytes = plain if slot.compressed is None else slot.compressed.nbytes
            yield slot, payload[position : position + nbytes]
            position += slot.kept_nbytes(self.precision.dtype)

    def _kept_nbytes(self, rest: int) -> int:
        """Bytes of the parameters as they are kept, if ``rest`` elements follow the decayed ones."""
        if self.frozen is FrozenDtype.CHECKPOINT:
            return self._checkpoint_nbytes
        return self.frozen.used_nbytes(self.decayed, rest, self.precision.dtype)

    @cached_property
    def _checkpoint_nbytes(self) -> int:
        return sum(slot.kept_nbytes(self.precision.dtype) for slot in self.parameters)

    def to_dict(self) -> dict[str, Any]:
        held = [slot.name for slot in self.parameters if not slot.trained]
        compressed = {slot.name: slot.compressed.to_dict() for slot in self.parameters if slot.compressed is not None}
        return {
            "name": self.name,
            "kind": self.kind.value,
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in self.precision.dtypes],
            "trainable": self.trainable,
            "frozen": self.frozen.value,
            "parameters": [[list(slot.names), list(slot.shape), slot.decay] for slot in self.parameters],
            **({"held": held} if held else {}),
            **({"compressed": compressed} if compressed else {}),
        }

    @staticmethod
    def from_dict(index: int, content: dict[str, Any]) -> "Record":
        return Record.build(
            index,
            content["name"],
            Kind(content["kind"]),
            Precision(*(getattr(torch, name) for name in content["dtypes"])),
            [(tuple(names), shape, decay) for names, shape, decay in content["parameters"]],
            trainable=content["trainable"],
            frozen=FrozenDtype(content["frozen"]),
            held=content.get("held", ()),
            compressed={
                name: CompressedParameter.from_dict(one) for name, one in content.get("compressed", {}).items()
            },
        )


@dataclass(frozen=True)
class RecordExtents:
    """Where a record lies on SSD: one pair of extents per slot, or the parameters alone, once, if it is frozen."""

    parameters: tuple[Extent, ...]
    states: tuple[Extent, ...]


#: Name of the file, in every SSD directory, that holds all frozen records.
FROZEN_FILE = "weights.frozen"


def weights_file(slot: int) -> str:
    """Name of the file, in every SSD directory, that holds slot ``slot`` of all records that are trained."""
    return f"weights.{slot}"


def allocate_extents(layout: Layout, records: Sequence[Record], slots: int) -> list[RecordExtents]:
    """Give every record its place in every slot. Deterministic: both processes compute the same places."""
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


def wants_decay(name: str, shape: Sequence[int]) -> bool:
    """Weight decay is for matrices: not for biases, nor for the gains of norms (all of them one-dimensional)."""
    return len(shape) > 1 and not name.endswith("bias")
