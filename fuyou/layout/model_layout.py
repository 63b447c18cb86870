"""The layout of a model, from which schedules and memory plans are made: its records, and the order of visits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from common.models.adapters.memory import NO_ADAPTERS, AdapterMemory
from common.models.attention.memory import NO_ATTENTION, AttentionMemory
from common.models.vision.memory import NO_IMAGES, ImageMemory
from fuyou.layout.pieces import PieceOrder
from fuyou.layout.record import Kind, Precision, Record
from fuyou.layout.share import Share
from fuyou.layout.visits import Part, Phase, Visit


@dataclass(frozen=True)
class BufferCounts:
    """Number of buffers of each kind; each kind of record has buffers of its own."""

    device_blocks: int = 2
    device_non_block: int = 1
    device_adapters: int = 0
    device_towers: int = 0
    device_block_gradients: int = 2
    device_non_block_gradients: int = 1
    device_adapter_gradients: int = 0
    host_blocks: int = 3
    host_non_block: int = 1
    host_adapters: int = 0
    host_towers: int = 0
    host_block_gradients: int = 2
    host_non_block_gradients: int = 1
    host_adapter_gradients: int = 0
    device_activations: int = 4
    host_activations: int = 0
    ssd_activations: int = 0
    device_kept: int = 0
    host_kept: int = 0
    ssd_kept: int = 0

    def device(self, kind: Kind) -> int:
        """Return the number of buffers on the device for parameters of records of this kind."""
        return {
            Kind.BLOCK: self.device_blocks,
            Kind.NON_BLOCK: self.device_non_block,
            Kind.ADAPTER: self.device_adapters,
            Kind.TOWER: self.device_towers,
        }[kind]

    def host(self, kind: Kind) -> int:
        """Return the number of buffers in host memory for parameters of records of this kind."""
        return {
            Kind.BLOCK: self.host_blocks,
            Kind.NON_BLOCK: self.host_non_block,
            Kind.ADAPTER: self.host_adapters,
            Kind.TOWER: self.host_towers,
        }[kind]

    def device_gradients(self, kind: Kind) -> int:
        """Return the number of buffers on the device for gradients of records of this kind."""
        return {
            Kind.BLOCK: self.device_block_gradients,
            Kind.NON_BLOCK: self.device_non_block_gradients,
            Kind.ADAPTER: self.device_adapter_gradients,
            Kind.TOWER: 0,
        }[kind]

    def host_gradients(self, kind: Kind) -> int:
        """Return the number of buffers in host memory for gradients of records of this kind."""
        return {
            Kind.BLOCK: self.host_block_gradients,
            Kind.NON_BLOCK: self.host_non_block_gradients,
            Kind.ADAPTER: self.host_adapter_gradients,
            Kind.TOWER: 0,
        }[kind]


@dataclass(frozen=True)
class _KindSizes:
    """The largest sizes among the records of one kind, kept because planning asks for them thousands of times."""

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
    """Return the bytes that link blocks in most families: none."""
    return 0


@dataclass(frozen=True)
class ModelLayout:
    """The records of a model, the order in which a step visits them, and what else decides how much memory it takes."""

    records: tuple[Record, ...]
    embedding: int  # Index of the record that the embeddings are in
    head: int  # Index of the record that the head is in; the same as `embedding` where they are tied
    # Indices of the records of block 0 .. L - 1: one each, or one for each of its pieces.
    blocks: tuple[tuple[int, ...], ...]
    precision: Precision  # Precision of everything but adapters; its dtype is that of activations, too
    # For each block, the index of its adapter record; empty if no block has one.
    block_adapters: tuple[int | None, ...] = ()
    embedding_adapter: int | None = None  # Index of the embeddings' adapter record
    head_adapter: int | None = None  # Index of the head's adapter record
    tower: int | None = None  # Index of the record of frozen towers, which the embedding uses
    # Memory that adapters take while a block computes, in the block that needs most.
    block_adapter_memory: AdapterMemory = NO_ADAPTERS
    # Memory that adapters take outside the blocks; tokens are those that go through the head at once.
    non_block_adapter_memory: AdapterMemory = NO_ADAPTERS
    hidden_size: int = 0  # Elements of the hidden states between blocks, per token; 0: as in the configuration
    # Bytes on the device that link blocks, beside hidden states, for a row of so many tokens.
    carried_bytes: Callable[[int], int] = no_bytes
    # Memory that images take, per token; it counts where batches come with images.
    image_memory: ImageMemory = NO_IMAGES
    images: bool = False  # Whether batches come with images
    # Whether batches come with a mask that hides tokens: attention is then given one of all pairs of tokens.
    padded: bool = False
    attention: AttentionMemory = NO_ATTENTION  # Memory that grows with the square of a row's length
    expert_output_bytes: int = 0  # Bytes, for each token, of outputs of experts while a whole block computes
    # Number of experts that routers choose among, if their loss is a part of the loss; otherwise 0.
    router_experts: int = 0
    # For each block, the order in which its pieces are needed; empty if all blocks are one record each.
    orders: tuple[PieceOrder, ...] = ()
    piece_bytes: int | None = None  # Bytes of the largest piece that was asked for; None: blocks are not in pieces
    # Weights of a compressed checkpoint in the compute dtype, as pieces would cut its tensors of all experts.
    widened: int = 0
    # Whether PyTorch compiles blocks: nothing of them is saved, and all their gradients come at once.
    compiled: bool = False
    # Elements (up to 4 bytes) in memory while a store is filled, as rows are not read alone; 0: unknown source.
    read_whole: int = 0

    @property
    def share(self) -> Share:
        """Share of this rank in every record."""
        return self.records[0].share

    def shared(self, share: Share) -> "ModelLayout":
        """Return the layout as one rank of several sees it."""
        return replace(self, records=tuple(record.shared(share) for record in self.records))

    def of_kind(self, kind: Kind) -> tuple[Record, ...]:
        """Return all records of one kind."""
        return self._kinds[kind].records

    def device_nbytes(self, kind: Kind) -> int:
        """Return the bytes on the device of the largest record of this kind; 0 if there is none."""
        return self._kinds[kind].device_nbytes

    def device_gradient_nbytes(self, kind: Kind) -> int:
        """Return the bytes on the device of the largest gradient of this kind; 0 if there is none."""
        return self._kinds[kind].device_gradient_nbytes

    def parameter_nbytes(self, kind: Kind) -> int:
        """Return the bytes in host memory of the largest record of this kind; 0 if there is none."""
        return self._kinds[kind].parameter_nbytes

    def gradient_nbytes(self, kind: Kind) -> int:
        """Return the bytes in host memory of the largest gradient of this kind; 0 if there is none."""
        return self._kinds[kind].gradient_nbytes

    def trained_elements(self, kind: Kind) -> int:
        """Return the elements of the largest trained record of this kind; 0 if there is none."""
        return self._kinds[kind].trained_elements

    def trained_parameter(self, kind: Kind) -> int:
        """Return the elements of the largest single parameter in a trained record of this kind; 0 if there is none."""
        return self._kinds[kind].trained_parameter

    @cached_property
    def _kinds(self) -> dict[Kind, "_KindSizes"]:
        return {kind: _KindSizes.of([record for record in self.records if record.kind is kind]) for kind in Kind}

    @cached_property
    def decoded_nbytes(self) -> int:
        """Bytes of the largest record that is decoded into the compute dtype on the device; 0 if there is none."""
        return max(record.decoded_nbytes for record in self.records)

    @property
    def parameters(self) -> int:
        """Number of parameters of the model and its adapters."""
        return sum(record.parameter_count for record in self.records)

    @cached_property
    def parameter_tensors(self) -> int:
        """Number of parameters, counted as tensors."""
        return sum(len(record.parameters) for record in self.records)

    @cached_property
    def trained_precision(self) -> Precision:
        """Precision of those trained records that have most optimizer states per parameter."""
        return max((self.records[index].precision for index in self.trainable), key=lambda one: one.state_bytes)

    @cached_property
    def trainable(self) -> tuple[int, ...]:
        """Indices of all records that are trained."""
        return tuple(record.index for record in self.records if record.trainable)

    @cached_property
    def trainable_blocks(self) -> tuple[int, ...]:
        """Indices of the trained records of the blocks, from the first block on."""
        both = (index for layer, block in enumerate(self.blocks) for index in (*block, self._adapter(layer)))
        return tuple(index for index in both if index in self.trainable)

    def with_precision(self, precision: Precision) -> "ModelLayout":
        """Return the layout of the model in another precision; adapters stay in fp32, with that precision's moments."""
        records = tuple(
            replace(record, precision=precision.in_fp32 if record.kind is Kind.ADAPTER else precision)
            for record in self.records
        )
        return replace(self, records=records, precision=precision)

    @property
    def largest_block(self) -> int:
        """Number of the block with most parameters."""
        return max(range(len(self.blocks)), key=self.block_parameters)

    def block_parameters(self, layer: int) -> int:
        """Return the number of parameters of a block, those of its adapters not counted."""
        return sum(self.records[index].parameter_count for index in self.blocks[layer])

    def active_parameters(self, layer: int) -> float:
        """Return the number of those that a token is multiplied with, on average."""
        return sum(self.records[index].active_count for index in self.blocks[layer])

    @property
    def block_elements(self) -> int:
        """Elements of the records of the largest block, padding included."""
        return max(sum(self.records[index].numel for index in block) for block in self.blocks)

    def visits(
        self, train: bool, micro_batches: int = 1, own_loss: bool = False, together: int | None = None
    ) -> tuple[Visit, ...]:
        """Return the visits of a step, in order. The backward pass ends with the first record that is trained.

        All micro-batches go through a visit, but for blocks in pieces. There, each pass that is under way keeps a
        micro-batch's insides of the block on the device. In a forward pass that is what lies between two operators, so
        that many can go on together. In a backward pass it is all that was saved: if the pieces are frozen, one
        micro-batch after the other has all of them pass. If they are trained, there must be only one gradient.

        Args:
            train: whether there is a backward pass.
            micro_batches: number of micro-batches of the batch.
            own_loss: whether the caller computes the loss from what the head gives, so that the head runs twice: for
                that, and again with the gradients that come back.
            together: micro-batches that go through a block in pieces together in a forward pass; None: all.
        """
        key = train, micro_batches, own_loss, min(together or micro_batches, micro_batches)
        if key not in self._visits:
            self._visits[key] = tuple(self._list_visits(*key))
        return self._visits[key]

    @cached_property
    def _visits(self) -> dict[tuple[bool, int, bool, int], tuple[Visit, ...]]:
        """Visits that were asked for: thousands, of blocks in pieces, which planning asks for in every step."""
        return {}

    def _list_visits(self, train: bool, micro_batches: int, own_loss: bool, together: int) -> list[Visit]:
        layers = range(len(self.blocks))
        groups = [range(first, min(first + together, micro_batches)) for first in range(0, micro_batches, together)]
        forward = [Visit(Phase.EMBED_FORWARD, self.embedding, None, self.embedding_adapter, self.tower)]
        forward += [visit for layer in layers for visit in self._block_forward(layer, groups)]
        if not train or own_loss:
            forward.append(Visit(Phase.HEAD_EVAL, self.head, len(layers), self.head_adapter))
        if not train:
            return forward
        head = Visit(Phase.HEAD, self.head, len(layers), self.head_adapter)
        embedding = Visit(Phase.EMBED_BACKWARD, self.embedding, None, self.embedding_adapter, self.tower)
        backward = [self._trains(head)]
        backward += [visit for layer in reversed(layers) for visit in self._block_backward(layer, micro_batches)]
        backward.append(self._trains(embedding))
        last = max((index for index, visit in enumerate(backward) if visit.trained is not None), default=0)
        ending = (backward[last].phase, backward[last].layer)
        ends = [(one.phase, one.layer) == ending for one in backward]
        backward = [
            replace(visit, passes_on=False) if end and visit.passes_on else visit
            for index, (visit, end) in enumerate(zip(backward, ends, strict=True))
            if index <= last or end
        ]
        if backward[-1].phase is Phase.EMBED_BACKWARD and backward[-1].trained == backward[0].trained:
            backward[0] = replace(backward[0], completes=False)
        return forward + backward

    def _block_forward(self, layer: int, groups: Sequence[range]) -> list[Visit]:
        records, adapter = self.blocks[layer], self._adapter(layer)
        if len(records) == 1:
            return [Visit(Phase.BLOCK_FORWARD, records[0], layer, adapter)]
        stages = self.orders[layer].forward
        parts = [Part(not index, index == len(stages) - 1) for index in range(len(stages))]
        visits = [
            Visit(Phase.BLOCK_FORWARD, records[piece], layer, adapter, part=part)
            for piece, part in zip(stages, parts, strict=True)
        ]
        if len(groups) == 1:
            return visits
        return [replace(visit, micros=group) for group in groups for visit in visits]

    def _block_backward(self, layer: int, micro_batches: int) -> list[Visit]:
        records, adapter = self.blocks[layer], self._adapter(layer)
        if len(records) == 1:
            return [self._trains(Visit(Phase.BLOCK_BACKWARD, records[0], layer, adapter))]
        stages = self.orders[layer].backward
        trained = [piece for piece, index in enumerate(records) if self.records[index].trainable]
        holds = self.orders[layer].holds_gradient(trained)
        visits = []
        for index, stage in enumerate(stages):
            part = Part(not index, index == len(stages) - 1, stage.recomputes, stage.differentiates)
            visit = Visit(Phase.BLOCK_BACKWARD, records[stage.piece], layer, adapter, part=part)
            visits.append(self._trains(visit) if holds[index] or adapter is not None else visit)
        if not trained:
            alone = [range(micro, micro + 1) for micro in range(micro_batches)]
            visits = [replace(visit, micros=micros) for micros in alone for visit in visits]
        ends = {*{visit.trained: index for index, visit in enumerate(visits)}.values()}
        return [visit if index in ends else replace(visit, completes=False) for index, visit in enumerate(visits)]

    def _adapter(self, layer: int) -> int | None:
        return self.block_adapters[layer] if self.block_adapters else None

    def _trains(self, visit: Visit) -> Visit:
        """Return a ``visit`` of the backward pass, with the one of its records that is trained."""
        trained = next((index for index in visit.records if index in self.trainable), None)
        return replace(visit, trained=trained)


@dataclass(frozen=True)
class Recomputation:
    """The part of the blocks' forward pass that the backward pass computes again."""

    layers: frozenset[int] = frozenset()  # Blocks that save outputs of operators, beside their input
    saved: float = 0.0  # Fraction of the forward pass's FLOPs that is not computed again in these blocks
    unneeded: float = 0.0  # Fraction that is not computed again in all other blocks: what no backward pass reads

    def fraction(self, layer: int) -> float:
        """Return the fraction of a block's forward FLOPs that is computed again."""
        return 1.0 - (self.saved if layer in self.layers else self.unneeded)


FULL_RECOMPUTATION = Recomputation()  # All of every block is computed again
