"""Layout of a model, from which schedules and memory plans are made: its records, their visits, and resident ones."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import chain
from typing import TypeVar

from common.models.adapters.memory import NO_ADAPTERS, AdapterMemory
from common.models.attention.memory import NO_ATTENTION, AttentionMemory
from common.models.vision import NO_IMAGES, ImageMemory
from fuyou.layout.record import Kind, Precision, Record
from fuyou.layout.record_parts import PieceOrder
from fuyou.layout.share import Share

T = TypeVar("T")


class Phase(Enum):
    """Computation of a visit."""

    EMBED_FORWARD = "embedding forward"
    BLOCK_FORWARD = "forward"
    HEAD = "head forward and backward"
    HEAD_EVAL = "head forward"
    BLOCK_BACKWARD = "backward"
    EMBED_BACKWARD = "embedding backward"

    # There is one object for each member; Enum's own hash runs in Python, millions of times
    __hash__ = object.__hash__


BEFORE_HEAD_PHASES = frozenset({Phase.EMBED_FORWARD, Phase.BLOCK_FORWARD})  # Phases before the head
# Phases up to the one in which the loss becomes known; a head's forward and backward pass are one phase.
FORWARD_PHASES = BEFORE_HEAD_PHASES | {Phase.HEAD, Phase.HEAD_EVAL}


REFERENCE_PHASES = BEFORE_HEAD_PHASES | {Phase.HEAD_EVAL}  # Phases of a reference, which is never trained


@dataclass(frozen=True)
class Part:
    """Part of a block's pass during which one piece of the block is on the device."""

    first: bool  # Whether it begins the pass: it takes the block's input
    last: bool  # Whether it ends the pass: it makes the block's output, or the gradient of its input
    recomputes: bool = True  # Whether forward operators run in it
    differentiates: bool = False  # Whether backward operators run in it


@dataclass(frozen=True)
class Visit:
    """One pass of all micro-batches, or of one, through one record's modules."""

    phase: Phase
    record: int
    layer: int | None = None  # Index of the block, 0 to L - 1, or L for the head; None for the embedding
    adapter: int | None = None  # Adapter record that is used with `record`
    tower: int | None = None  # Record of frozen towers that the embedding uses
    trained: tuple[int, ...] = ()  # Records whose gradients a backward visit adds to
    completes: tuple[int, ...] = ()  # Those of them whose gradients are complete afterwards
    passes_on: bool = True  # Whether a backward visit computes the gradient of its input

    part: Part | None = None  # Part of a block in pieces; None for a whole block or outside
    micros: range | None = None  # Numbers of the visit's micro-batches; None: all of them

    @property
    def begins(self) -> bool:
        return self.part is None or self.part.first

    @property
    def ends(self) -> bool:
        return self.part is None or self.part.last

    def micro_batches(self, count: int) -> range:
        """Return the numbers of its micro-batches, of a batch with ``count``."""
        return range(count) if self.micros is None else self.micros

    @cached_property
    def records(self) -> tuple[int, ...]:
        return tuple(index for index in (self.record, self.adapter, self.tower) if index is not None)


_ORDER = {kind: index for index, kind in enumerate((Kind.BLOCK, Kind.NON_BLOCK, Kind.ADAPTER, Kind.TOWER))}


@dataclass(frozen=True)
class BufferCounts:
    """Number of buffers; each kind of record has separate buffers."""

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
    device_saved: int = 0
    host_saved: int = 0
    ssd_saved: int = 0

    def device(self, kind: Kind) -> int:
        return (self.device_blocks, self.device_non_block, self.device_adapters, self.device_towers)[
            _ORDER[kind]
        ]

    def host(self, kind: Kind) -> int:
        return (self.host_blocks, self.host_non_block, self.host_adapters, self.host_towers)[_ORDER[kind]]

    def device_gradients(self, kind: Kind) -> int:
        counts = (
            self.device_block_gradients,
            self.device_non_block_gradients,
            self.device_adapter_gradients,
            0,
        )
        return counts[_ORDER[kind]]

    def host_gradients(self, kind: Kind) -> int:
        counts = (self.host_block_gradients, self.host_non_block_gradients, self.host_adapter_gradients, 0)
        return counts[_ORDER[kind]]


@dataclass(frozen=True)
class KindSizes:
    """The largest sizes among the records of one kind, in bytes or elements; 0 if there is none."""

    records: tuple[Record, ...]
    device_nbytes: int
    device_gradient_nbytes: int
    parameter_nbytes: int
    gradient_nbytes: int
    trained_elements: int
    trained_parameter_nbytes: int
    splits: bool  # Whether master weights of any of them are split

    @staticmethod
    def of(records: Sequence[Record]) -> "KindSizes":
        trained = [record for record in records if record.trainable]
        return KindSizes(
            tuple(records),
            max((record.device_nbytes for record in records), default=0),
            max((record.numel * record.precision.gradient_bytes for record in trained), default=0),
            max((record.parameter_nbytes for record in records), default=0),
            max((record.gradient_nbytes for record in records), default=0),
            max((record.numel for record in trained), default=0),
            max(
                (
                    slot.numel * record.precision.gradient_bytes
                    for record in trained
                    for slot in record.parameters
                ),
                default=0,
            ),
            any(record.precision.split for record in trained),
        )


@dataclass(frozen=True)
class KeyMemory:
    """Bytes for each token of a row that passes through a block in chunks; zeros if rows cannot."""

    keys: int = 0  # Its keys and values
    gradients: int = 0  # Sums of their gradients
    computing: int = 0  # What a later chunk makes of them
    arguments: int = 0  # What blocks are called with, next to hidden states
    # For each query and key: what the family's own attention makes of them; 0: tiles are computed
    pairs: int = 0
    masks: int = 0  # For each query and key: masks
    states: int = 0  # For each chunk, not for each token: states that the next one begins with
    state_gradients: int = 0  # Once: their gradients
    attends_first: bool = False  # Whether a block makes most of what it makes after its keys and values


def no_bytes(seq_len: int) -> int:
    """Return 0: most families pass nothing but hidden states between blocks."""
    return 0


@dataclass(frozen=True)
class ModelLayout:
    """Records of a model, the order in which a step visits them, and what else decides its memory."""

    records: tuple[Record, ...]
    embedding: int  # Index of the record that the embeddings are in
    head: int  # Index of the record that the head is in; the same as `embedding` where they are tied
    blocks: tuple[tuple[int, ...], ...]  # Records of each block: one, or one per piece
    precision: Precision  # Its dtype is that of activations; some records are in fp32
    block_adapters: tuple[int | None, ...] = ()  # For each block, its adapter record; empty if none has one
    embedding_adapter: int | None = None  # Index of the embeddings' adapter record
    head_adapter: int | None = None  # Index of the head's adapter record
    tower: int | None = None  # Index of the record of frozen towers, which the embedding uses
    block_adapter_memory: AdapterMemory = NO_ADAPTERS  # Of adapters in the block that needs the most
    non_block_adapter_memory: AdapterMemory = NO_ADAPTERS  # By tokens that go through the head at once
    # Elements of the hidden states between blocks, per token; 0: as in the configuration
    hidden_size: int = 0
    carried_bytes: Callable[[int], int] = no_bytes  # Device bytes per row passed on besides hidden states
    key_memory: Callable[[], KeyMemory] = KeyMemory  # Of the block that needs the most
    image_memory: ImageMemory = NO_IMAGES  # Memory of images, per token, in batches with images
    images: bool = False  # Whether batches come with images
    padded: bool = False  # Whether batches have a mask that hides tokens, so that attention gets a dense mask
    attention: AttentionMemory = NO_ATTENTION  # Memory that grows with the square of a row's length
    expert_output_bytes: int = 0  # Bytes, for each token, of outputs of experts while a whole block computes
    router_experts: int = 0  # Number of experts of routers whose loss is added; otherwise 0
    orders: tuple[PieceOrder, ...] = ()  # For each block, the order of its pieces; empty if all are whole
    piece_bytes: int | None = None  # Requested size of the largest piece; None: blocks are not in pieces
    # Weights of a compressed checkpoint in the compute dtype: pieces would cut their tensors
    widened: int = 0
    read_whole: int = 0  # Elements (up to 4 bytes) in memory while filling, if rows are not read alone

    @property
    def share(self) -> Share:  # the same in every record
        return self.records[0].share

    def shared(self, share: Share) -> "ModelLayout":
        """Return the layout as one rank of several sees it."""
        return replace(self, records=tuple(record.shared(share) for record in self.records))

    def of_kind(self, kind: Kind) -> tuple[Record, ...]:
        return self.sizes[kind].records

    @cached_property
    def sizes(self) -> dict[Kind, KindSizes]:
        return {
            kind: KindSizes.of([record for record in self.records if record.kind is kind]) for kind in Kind
        }

    @cached_property
    def decoded_nbytes(self) -> int:
        """Return the bytes of the largest record that is decoded on the device; 0 if there is none."""
        return max(record.decoded_nbytes for record in self.records)

    @property
    def parameters(self) -> int:
        return sum(record.parameter_count for record in self.records)

    @cached_property
    def parameter_tensors(self) -> int:
        return sum(len(record.parameters) for record in self.records)

    @cached_property
    def trained_precision(self) -> Precision:
        """Return the precision of the trained records with the most state bytes per parameter."""
        return max(
            (self.records[index].precision for index in self.trainable),
            key=lambda precision: precision.state_bytes,
        )

    @cached_property
    def trainable(self) -> tuple[int, ...]:
        return tuple(record.index for record in self.records if record.trainable)

    @cached_property
    def trainable_blocks(self) -> tuple[tuple[int, ...], ...]:
        """Return the trained records of blocks; an adapter record comes with the block's, or with its last piece."""
        result: list[tuple[int, ...]] = []
        for layer, block in enumerate(self.blocks):
            trained: list[tuple[int, ...]] = [(index,) for index in block if index in self.trainable]
            adapter = self._adapter(layer)
            if adapter is not None and adapter in self.trainable:
                trained[-1:] = [(*chain(*trained[-1:]), adapter)]
            result += trained
        return tuple(result)

    @property
    def adapters(self) -> tuple[Record, ...]:
        """Return the records of what is trained next to frozen parameters, without those of another dtype."""
        outer = ((self.embedding,), self.embedding_adapter), ((self.head,), self.head_adapter)
        pairs = chain(outer, zip(self.blocks, self.block_adapters, strict=False))
        next_to_frozen = {
            adapter
            for records, adapter in pairs
            if adapter is not None and not any(index in self.trainable for index in records)
        }
        return tuple(self.records[index] for index in sorted(next_to_frozen))

    @property
    def largest_block(self) -> int:
        return max(range(len(self.blocks)), key=self.block_parameters)

    def block_parameters(self, layer: int) -> int:
        """Return the number of parameters of a block, without adapters."""
        return sum(self.records[index].parameter_count for index in self.blocks[layer])

    def active_parameters(self, layer: int) -> float:
        """Return the number of a block's parameters that a token is multiplied with on average."""
        return sum(self.records[index].active_count for index in self.blocks[layer])

    @property
    def block_elements(self) -> int:
        return max(sum(self.records[index].numel for index in block) for block in self.blocks)

    def visits(
        self, train: bool, micro_batches: int = 1, own_loss: bool = False, together: int | None = None
    ) -> tuple[Visit, ...]:
        """Return the visits of a step, in order. The backward pass ends with the first trained record.

        All micro-batches go through a visit together, except for blocks in pieces, where each pass keeps its
        activations on the device. In a forward pass these are small, so that several can run together. In a backward
        pass they are all saved tensors: with frozen pieces the micro-batches run one after the other; trained pieces
        have only one gradient.

        Args:
            train: whether there is a backward pass.
            own_loss: whether the caller computes the loss from the head's outputs, so that the head runs twice.
            together: micro-batches that go through a block in pieces together in a forward pass; None for all.
        """
        key = train, micro_batches, own_loss, min(together or micro_batches, micro_batches)
        if key not in self._visits:
            self._visits[key] = tuple(self._list_visits(*key))
        return self._visits[key]

    @cached_property
    def _visits(self) -> dict[tuple[bool, int, bool, int], tuple[Visit, ...]]:
        return {}  # cached: planning asks for thousands of visits in every step

    def _list_visits(self, train: bool, micro_batches: int, own_loss: bool, together: int) -> list[Visit]:
        layers = range(len(self.blocks))
        groups = [
            range(first, min(first + together, micro_batches)) for first in range(0, micro_batches, together)
        ]
        forward = [Visit(Phase.EMBED_FORWARD, self.embedding, None, self.embedding_adapter, self.tower)]
        forward += [visit for layer in layers for visit in self._block_forward(layer, groups)]
        if not train or own_loss:
            forward.append(Visit(Phase.HEAD_EVAL, self.head, len(layers), self.head_adapter))
        if not train:
            return forward
        head = Visit(Phase.HEAD, self.head, len(layers), self.head_adapter)
        embedding = Visit(Phase.EMBED_BACKWARD, self.embedding, None, self.embedding_adapter, self.tower)
        backward = [self._trains(head)]
        backward += [
            visit for layer in reversed(layers) for visit in self._block_backward(layer, micro_batches)
        ]
        backward.append(self._trains(embedding))
        last = max((index for index, visit in enumerate(backward) if visit.trained), default=0)
        ending = (backward[last].phase, backward[last].layer)
        ends = [(visit.phase, visit.layer) == ending for visit in backward]
        backward = [
            replace(visit, passes_on=False) if end and visit.passes_on else visit
            for index, (visit, end) in enumerate(zip(backward, ends, strict=True))
            if index <= last or end
        ]
        return forward + _completed(backward)

    def _block_forward(self, layer: int, groups: Sequence[range]) -> list[Visit]:
        records = self.blocks[layer]
        adapter = self._adapter(layer)
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
        records = self.blocks[layer]
        adapter = self._adapter(layer)
        if len(records) == 1:
            return [self._trains(Visit(Phase.BLOCK_BACKWARD, records[0], layer, adapter))]
        stages = self.orders[layer].backward
        trained = [piece for piece, index in enumerate(records) if self.records[index].trainable]
        holds = self.orders[layer].holds_gradient(trained)
        visits = []
        for index, stage in enumerate(stages):
            part = Part(not index, index == len(stages) - 1, stage.recomputes, stage.differentiates)
            visit = Visit(Phase.BLOCK_BACKWARD, records[stage.piece], layer, adapter, part=part)
            visits.append(self._trains(visit, holds[index]))
        if not trained:
            alone = [range(micro, micro + 1) for micro in range(micro_batches)]
            visits = [replace(visit, micros=micros) for micros in alone for visit in visits]
        return visits

    def _adapter(self, layer: int) -> int | None:
        return self.block_adapters[layer] if self.block_adapters else None

    def _trains(self, visit: Visit, holds: bool = True) -> Visit:
        """Return the visit with what it trains; ``holds``: whether the record's gradient is on the device."""
        trained = [index for index in visit.records if index in self.trainable]
        return replace(visit, trained=tuple(index for index in trained if holds or index != visit.record))


def _completed(visits: Sequence[Visit]) -> list[Visit]:
    """Return the visits of a backward pass, each with the gradients that no later one adds to."""
    last = {index: number for number, visit in enumerate(visits) for index in visit.trained}
    return [
        replace(visit, completes=tuple(index for index in visit.trained if last[index] == number))
        for number, visit in enumerate(visits)
    ]


@dataclass(frozen=True)
class Recomputation:
    """Part of the blocks' forward pass that the backward pass computes again."""

    layers: frozenset[int] = frozenset()  # Blocks that save outputs of operators besides their input
    saved: float = 0.0  # Fraction of the forward pass's FLOPs that is not computed again in these blocks
    # Fraction that is not computed again in all other blocks: what no backward pass reads
    unneeded: float = 0.0

    def saving_nothing(self) -> "Recomputation":
        """Return it for blocks that save their input alone."""
        return replace(self, layers=frozenset(), saved=0.0)

    def fraction(self, layer: int) -> float:
        """Return the fraction of a block's forward FLOPs that is computed again."""
        return 1.0 - (self.saved if layer in self.layers else self.unneeded)


FULL_RECOMPUTATION = Recomputation()  # All of every block is computed again


def evenly_spaced(blocks: Sequence[T], count: int) -> list[T]:
    """Return ``count`` of ``blocks``, evenly spaced, counted from the last."""
    layers = len(blocks)
    return [blocks[-(-(number + 1) * layers // count) - 1] for number in range(count)]


def resident_records(layout: ModelLayout, room: int) -> list[int]:
    """Return the records, other than adapters, whose optimizer states fit in ``room`` bytes together."""
    chosen = []
    for record in layout.of_kind(Kind.NON_BLOCK):
        if record.trainable and record.state_nbytes <= room:
            chosen.append(record.index)
            room -= record.state_nbytes
    blocks = [record for record in layout.of_kind(Kind.BLOCK) if record.trainable]
    if not blocks:
        return chosen
    count = min(len(blocks), room // max(record.state_nbytes for record in blocks))
    return sorted(chosen + evenly_spaced([record.index for record in blocks], count))


def interleaved(layout: ModelLayout, fraction: float) -> frozenset[int]:
    """Return the records with deferred updates: ``fraction`` of the blocks, evenly spaced; all records if it is 1.

    Blocks are counted from the end of the stack, where the next forward pass leaves the most time.
    """
    if fraction >= 1:
        return frozenset(layout.trainable)
    blocks = layout.trainable_blocks
    return frozenset(chain.from_iterable(evenly_spaced(blocks, round(fraction * len(blocks)))))


def most_of_a_kind(layout: ModelLayout, records: Collection[int]) -> int:
    """Return how many of the records are of the most frequent kind."""
    return max(Counter(layout.records[index].kind for index in records).values(), default=0)
