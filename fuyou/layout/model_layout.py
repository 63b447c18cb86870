"""What a schedule is made for: which records a step uses and trains, in which order, with how many buffers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from common.models.adapters.memory import NO_ADAPTERS, AdapterMemory
from common.models.attention.memory import NO_ATTENTION, AttentionMemory
from common.models.vision.memory import NO_IMAGES, ImageMemory
from fuyou.layout.record import Kind, Precision, Record
from fuyou.layout.share import Share
from fuyou.layout.visits import Phase, Visit


@dataclass(frozen=True)
class BufferCounts:
    """How many buffers of each kind there are; each kind of record has buffers of its own."""

    device_blocks: int = 2
    device_outer: int = 1
    device_adapters: int = 0
    device_towers: int = 0
    device_block_gradients: int = 2
    device_outer_gradients: int = 1
    device_adapter_gradients: int = 0
    host_blocks: int = 3
    host_outer: int = 1
    host_adapters: int = 0
    host_towers: int = 0
    host_block_gradients: int = 2
    host_outer_gradients: int = 1
    host_adapter_gradients: int = 0
    device_activations: int = 4
    host_activations: int = 0
    ssd_activations: int = 0
    device_kept: int = 0
    host_kept: int = 0
    ssd_kept: int = 0

    def device(self, kind: Kind) -> int:
        """Buffers on the device for parameters of records of this kind."""
        return {
            Kind.BLOCK: self.device_blocks, Kind.OUTER: self.device_outer, Kind.ADAPTER: self.device_adapters,
            Kind.TOWER: self.device_towers,
        }[kind]  # fmt: skip

    def host(self, kind: Kind) -> int:
        """The same on the host."""
        return {
            Kind.BLOCK: self.host_blocks, Kind.OUTER: self.host_outer, Kind.ADAPTER: self.host_adapters,
            Kind.TOWER: self.host_towers,
        }[kind]  # fmt: skip

    def device_gradients(self, kind: Kind) -> int:
        """Buffers on the device for gradients of records of this kind."""
        return {
            Kind.BLOCK: self.device_block_gradients, Kind.OUTER: self.device_outer_gradients,
            Kind.ADAPTER: self.device_adapter_gradients, Kind.TOWER: 0,
        }[kind]  # fmt: skip

    def host_gradients(self, kind: Kind) -> int:
        """The same on the host."""
        return {
            Kind.BLOCK: self.host_block_gradients, Kind.OUTER: self.host_outer_gradients,
            Kind.ADAPTER: self.host_adapter_gradients, Kind.TOWER: 0,
        }[kind]  # fmt: skip


@dataclass(frozen=True)
class _KindSizes:
    """The largest of each that records of one kind have: planning asks for them thousands of times."""

    records: tuple[Record, ...]
    device_nbytes: int
    device_gradient_nbytes: int
    parameter_nbytes: int
    gradient_nbytes: int
    trained_elements: int
    trained_parameter: int

    @staticmethod
    def of(records: Sequence[Record]) -> "_KindSizes":
        trained = [record for record in records if record.trainable]
        return _KindSizes(
            tuple(records),
            max((record.device_nbytes for record in records), default=0),
            max((record.numel * record.precision.gradient_bytes for record in trained), default=0),
            max((record.parameter_nbytes for record in records), default=0),
            max((record.gradient_nbytes for record in records), default=0),
            max((record.numel for record in trained), default=0),
            max((slot.numel for record in trained for slot in record.parameters), default=0),
        )


def no_bytes(seq_len: int) -> int:
    """What most families keep because it links blocks beside hidden states."""
    return 0


@dataclass(frozen=True)
class ModelLayout:
    """What a step of this model looks like: which records it uses, and which of them are trained."""

    records: tuple[Record, ...]
    embedding: int
    """Index of the record that the embeddings are in."""
    head: int
    """Index of the record that the head is in; the same as ``embedding`` where they are tied."""
    blocks: tuple[int, ...]
    """Indices of the records of block 0 .. L - 1."""
    precision: Precision
    """Of what is neither frozen nor an adapter; its dtype is that of activations."""
    block_adapters: tuple[int | None, ...] = ()
    """For each block, the index of the record that is trained beside its frozen one; empty if no block has any."""
    embedding_adapter: int | None = None
    """Index of the record that is trained beside the embedding's frozen one."""
    head_adapter: int | None = None
    """Index of the record that is trained beside the head's frozen one."""
    tower: int | None = None
    """Index of the record of frozen towers, which the embedding uses."""
    block_adapting: AdapterMemory = NO_ADAPTERS
    """What adapters take while the block computes that needs most for them."""
    outer_adapting: AdapterMemory = NO_ADAPTERS
    """The same outside the blocks; tokens are those that go through the head at once."""
    hidden_size: int = 0
    """Elements of the hidden states between blocks, per token; 0: as many as the configuration says."""
    carried_bytes: Callable[[int], int] = no_bytes
    image_memory: ImageMemory = NO_IMAGES
    """What images take, per token; counted where batches come with ``images``."""
    images: bool = False
    """What a row of so many tokens keeps on the device because it links blocks beside hidden states."""
    attention: AttentionMemory = NO_ATTENTION
    """What grows with the square of a row's length."""
    router_experts: int = 0
    """That routers choose among, if their loss is a part of the loss; else 0."""

    @property
    def share(self) -> Share:
        """What of every record is this rank's."""
        return self.records[0].share

    def shared(self, share: Share) -> "ModelLayout":
        """The same model as one rank of several sees it."""
        return replace(self, records=tuple(record.shared(share) for record in self.records))

    def of_kind(self, kind: Kind) -> tuple[Record, ...]:
        """All records of one kind."""
        return self._kinds[kind].records

    def device_nbytes(self, kind: Kind) -> int:
        """Bytes on the device of the largest record of this kind; 0 if there is none."""
        return self._kinds[kind].device_nbytes

    def device_gradient_nbytes(self, kind: Kind) -> int:
        """Bytes on the device of the largest gradient of this kind; 0 if there is none."""
        return self._kinds[kind].device_gradient_nbytes

    def parameter_nbytes(self, kind: Kind) -> int:
        """Bytes in host memory of the largest record of this kind; 0 if there is none."""
        return self._kinds[kind].parameter_nbytes

    def gradient_nbytes(self, kind: Kind) -> int:
        """Bytes in host memory of the largest gradient of this kind; 0 if there is none."""
        return self._kinds[kind].gradient_nbytes

    def trained_elements(self, kind: Kind) -> int:
        """Elements of the largest record of this kind that is trained; 0 if there is none."""
        return self._kinds[kind].trained_elements

    def trained_parameter(self, kind: Kind) -> int:
        """Elements of the largest single parameter in a trained record of this kind; 0 if there is none."""
        return self._kinds[kind].trained_parameter

    @cached_property
    def _kinds(self) -> dict[Kind, "_KindSizes"]:
        return {kind: _KindSizes.of([record for record in self.records if record.kind is kind]) for kind in Kind}

    @cached_property
    def decoded_nbytes(self) -> int:
        """Bytes of the largest record that is brought back into the compute dtype on the device; 0 if there is none."""
        return max(record.decoded_nbytes for record in self.records)

    @cached_property
    def parameter_tensors(self) -> int:
        """How many parameters there are, as the model counts them: tensors."""
        return sum(len(record.parameters) for record in self.records)

    @cached_property
    def trained_state_bytes(self) -> int:
        """Bytes of optimizer states per parameter, of the records that have most."""
        return max(self.records[index].precision.state_bytes for index in self.trainable)

    @cached_property
    def trainable(self) -> tuple[int, ...]:
        """Indices of all records that are trained."""
        return tuple(record.index for record in self.records if record.trainable)

    @cached_property
    def trainable_blocks(self) -> tuple[int, ...]:
        """Indices of what is trained in the blocks, from the first block up."""
        both = (index for layer, block in enumerate(self.blocks) for index in (block, self._adapter(layer)))
        return tuple(index for index in both if index in self.trainable)

    def with_precision(self, precision: Precision) -> "ModelLayout":
        """The same model trained in another precision; adapters stay in fp32, with its moments."""
        adapters = Precision(torch.float32, precision.optimizer_dtype)
        records = tuple(
            replace(record, precision=adapters if record.kind is Kind.ADAPTER else precision) for record in self.records
        )
        return replace(self, records=records, precision=precision)

    def visits(self, train: bool) -> list[Visit]:
        """The visits of a step, in order. What nothing trainable lies below is not visited in the backward pass."""
        layers = range(len(self.blocks))
        forward = [Visit(Phase.EMBED_FORWARD, self.embedding, None, self.embedding_adapter, self.tower)]
        forward += [Visit(Phase.BLOCK_FORWARD, self.blocks[i], i, self._adapter(i)) for i in layers]
        if not train:
            return [*forward, Visit(Phase.HEAD_EVAL, self.head, len(layers), self.head_adapter)]
        backward = [Visit(Phase.HEAD, self.head, len(layers), self.head_adapter)]
        backward += [Visit(Phase.BLOCK_BACKWARD, self.blocks[i], i, self._adapter(i)) for i in reversed(layers)]
        backward += [Visit(Phase.EMBED_BACKWARD, self.embedding, None, self.embedding_adapter, self.tower)]
        backward = [self._trains(visit) for visit in backward]
        last = max((index for index, visit in enumerate(backward) if visit.trained is not None), default=0)
        backward = backward[: last + 1]
        backward[-1] = replace(backward[-1], passes_on=False)
        if backward[-1].phase is Phase.EMBED_BACKWARD and backward[-1].trained == backward[0].trained:
            backward[0] = replace(backward[0], completes=False)
        return forward + backward

    def _adapter(self, layer: int) -> int | None:
        return self.block_adapters[layer] if self.block_adapters else None

    def _trains(self, visit: Visit) -> Visit:
        """``visit`` of the backward pass, with the one of its records that is trained."""
        trained = next((index for index in visit.records if index in self.trainable), None)
        return replace(visit, trained=trained)


@dataclass(frozen=True)
class BatchShape:
    """What the schedule needs to know of a batch."""

    micro_batches: int
    """M, how many micro-batches the batch is split into."""
    activation_bytes: int
    """Size of one micro-batch's block input."""
    tokens: float
    """Tokens in one micro-batch, on average."""
    kept_bytes: int = 0
    """Size of what one layer keeps of one micro-batch beside its input."""


@dataclass(frozen=True)
class Recomputation:
    """What of a block's forward pass the backward pass computes again."""

    layers: frozenset[int] = frozenset()
    """Blocks that keep outputs of operators, beside their input."""
    saved: float = 0.0
    """Fraction of the forward pass's FLOPs that these save."""
    unneeded: float = 0.0
    """The same in all other blocks, which leave out what no backward pass reads."""

    def fraction(self, layer: int) -> float:
        """Of a block's forward FLOPs, what is computed again."""
        return 1.0 - (self.saved if layer in self.layers else self.unneeded)


#: Everything is computed again.
FULL_RECOMPUTATION = Recomputation()
