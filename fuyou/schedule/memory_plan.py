"""What a run allocates: how many buffers of each kind, and how many bytes they and everything else take."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from transformers import PreTrainedConfig

from common.memory.buffers import round_up
from common.models.vision.memory import NO_IMAGES
from fuyou.layout.frozen_weights import ROW_ELEMENTS, FrozenDtype
from fuyou.layout.model_layout import BatchShape, BufferCounts, ModelLayout
from fuyou.layout.record import PAGE_ELEMENTS, Kind, Record
from fuyou.model.loss.cross_entropy import pass_bytes

#: Optimizer states move and are updated in chunks of this many parameters. Small ones (10 MB of low, mean and variance)
#: keep reads, arithmetic and writes of one block going at the same time; large ones cost less Python per byte, which
#: counts where blocks are large and drives many.
SMALLEST_CHUNK, LARGEST_CHUNK = 1 << 20, 8 << 20
#: A block is cut into about this many chunks, if they come out between the two.
CHUNKS_PER_BLOCK = 32
#: Host memory that describes a parameter (modules, records, tasks): measured on Llamas of 60 to 160 blocks with LoRA.
DESCRIPTION_BYTES = 15 << 10
#: Host memory that is not ours to plan: allocator slack, thread stacks, library caches.
HOST_OVERHEAD_BYTES = 96 << 20
#: Part of that: freed memory that the heap may hold back, beside what computing takes.
HEAP_SLACK_BYTES = 24 << 20
#: Upper bound of Adam's scratch memory in the optimizer process: half a mebibyte per thread, twice that with bf16
#: moments.
ADAM_SCRATCH_BYTES = 20 << 20
#: Device memory in which gradients of other ranks arrive, for each of the two levels: they are added piece by piece.
REDUCTION_BYTES = 32 << 20
#: Device memory for decoding one row of a record in fewer bits, beside the result: see fuyou/layout/frozen_weights.py,
#: and common/models/checkpoint/compressed/tensors.py, whose chunks are as large.
DECODING_BYTES = 20 * ROW_ELEMENTS
#: Copies of the logits that exist at once, in the compute dtype: themselves, their gradient, and one more in families
#: that pass them through a function (soft capping). What the loss makes in fp32 comes in passes:
#: fuyou/model/loss/cross_entropy.py.
LOGIT_COPIES = 3
#: Upper bound of the host's bytes for each number that a caller's own loss is made of: itself, a copy that carries the
#: graph, its gradient, and five more in the caller's loss.
OUTPUT_BYTES = 32
#: Upper bound of the bytes that a router's loss takes for each token and expert: logits, their softmax, that in fp32,
#: masked, and a gradient of each, some of which are there at the same time.
ROUTER_BYTES = 32
#: Hidden states that a micro-batch keeps between two parts of a block's forward pass: the block's input and what
#: attention and the feed-forward network have made of it so far.
PARKED_HIDDEN = 8
#: The head runs over ranges of tokens, each of which makes a whole gradient of its weights: with this many tokens that
#: hardly counts; with few it costs more than all else. Fewer only where memory is short.
HEAD_TOKENS, FEWEST_HEAD_TOKENS = 4096, 64


@dataclass(frozen=True)
class LossInputs:
    """What a loss is computed from, if the caller computes it."""

    outputs: int = 0
    """fp32 numbers that the head makes for each token; 0: the loss is the engine's own cross entropy."""
    reference: bool = False
    """Whether every sequence also passes through the model without its adapters."""

    @property
    def passes(self) -> int:
        """Number of times that each sequence passes forward."""
        return 2 if self.reference else 1

    def covers(self, other: "LossInputs") -> bool:
        """Return whether memory planned for these is enough for ``other``."""
        return self.outputs >= other.outputs and self.reference >= other.reference

    def joined(self, other: "LossInputs") -> "LossInputs":
        """Return the least that covers both."""
        return LossInputs(max(self.outputs, other.outputs), self.reference or other.reference)


ENGINE_LOSS = LossInputs()
"""The engine's own loss."""


@dataclass(frozen=True)
class Batch:
    """A batch as the engine runs it."""

    rows: int
    """Sequences in the batch."""
    seq_len: int
    micro_rows: int
    """Sequences in one micro-batch; the last one may have fewer."""
    loss: LossInputs = ENGINE_LOSS
    """What the loss is computed from."""

    @property
    def micro_batches(self) -> int:
        return -(-self.rows // self.micro_rows)

    def activations(self, layers: int) -> int:
        """Return how many blocks' inputs there are at once, at most; a reference's stay until the next block only."""
        reference = self.micro_batches + 1 if self.loss.reference else 0
        return (layers + 2) * self.micro_batches + 2 + reference

    @property
    def micro_tokens(self) -> int:
        """Tokens in one micro-batch."""
        return self.micro_rows * self.seq_len

    @property
    def mean_tokens(self) -> float:
        """Average tokens of a micro-batch."""
        return self.rows * self.seq_len / self.micro_batches


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a run: the result of :class:`fuyou.schedule.memory_planner.MemoryPlanner`."""

    counts: BufferCounts
    batch: Batch
    ring_chunks: int
    """Buffers in the optimizer's ring, each for the states of one chunk."""
    chunk_elements: int
    activation_bytes: int
    """Bytes of a block's input for one micro-batch, rounded up to whole pages."""
    kept_bytes: int
    """Bytes of operator outputs that one layer saves for one micro-batch, rounded up likewise; 0 if it saves none."""
    head_columns: int
    """Tokens of each row that go through the head at once."""
    wide_blocks: bool
    """Whether blocks' gradients are summed in fp32 (several micro-batches) before they are rounded to bf16."""
    wide_non_block: bool
    """Whether gradients of outer records are summed in fp32, too: chunks of the head and tied embeddings contribute
    separately."""
    workspace_bytes: int
    """Estimated bytes that computing takes beside all buffers."""
    device_bytes: int
    host_bytes: int
    resident: tuple[int, ...] = ()
    """Records that live in host memory for the whole run, states included."""

    def batch_shape(self, batch: Batch) -> BatchShape:
        """Return ``batch``, which fits into this plan, as the schedule sees it."""
        loss = batch.loss
        return BatchShape(
            batch.micro_batches,
            self.activation_bytes,
            batch.mean_tokens,
            self.kept_bytes,
            own_loss=bool(loss.outputs),
            reference=loss.reference,
        )

    def spills_gradients(self, shape: ModelLayout, held: Collection[int]) -> bool:
        """Return whether the host has too few buffers for the gradients of all records in ``held``, which stay until
        the step has ended, while others pass through."""
        passing = {Kind.BLOCK: 2, Kind.NON_BLOCK: 1, Kind.ADAPTER: 0}
        kinds = Counter(shape.records[index].kind for index in held)
        trained = Counter(shape.records[index].kind for index in shape.trainable)
        return any(min(kinds[kind] + passing[kind], trained[kind]) > self.counts.host_gradients(kind) for kind in kinds)


def activation_elements_per_token(config: PreTrainedConfig) -> float:
    """Return an upper estimate of the elements that one block's forward pass saves per token for its backward pass.

    Attention, norms (which many families compute and save in fp32) and residuals: 20 hidden sizes; the feed-forward
    network: 4 times its width, per active expert.
    """
    text = config.get_text_config()
    hidden = text.hidden_size
    width = getattr(text, "intermediate_size", None) or getattr(text, "ffn_dim", None) or getattr(text, "n_inner", None)
    width = max(width) if isinstance(width, Sequence) else width or 4 * hidden  # some families have one for each layer
    active = getattr(text, "num_experts_per_tok", None)
    if active:
        width = active * (getattr(text, "moe_intermediate_size", None) or width)
    return 20 * hidden + 4 * width


def chunk_elements(shape: ModelLayout) -> int:
    """Return the size of the chunks in which states lie on SSD; it depends on the model and the number of ranks."""
    preferred = min(LARGEST_CHUNK, max(SMALLEST_CHUNK, _largest_trained(shape).owned // CHUNKS_PER_BLOCK))
    return round_up(min(preferred, max(shape.records[index].owned for index in shape.trainable)), PAGE_ELEMENTS)


def _largest_trained(shape: ModelLayout) -> Record:
    """Return the largest record of a block that is trained; if there is none, the last one that is trained."""
    trained = [shape.records[index] for index in shape.trainable]
    return max((r for r in trained if r.kind is Kind.BLOCK), key=lambda r: r.numel, default=trained[-1])


class MemoryCounter:
    """Counts the bytes that buffers and computing take, for one model.

    Args:
        shape: the model's records.
        config: the model's configuration.
        cpu: whether the device is the CPU.
        saved_bytes: bytes of operator outputs that one layer saves for one micro-batch of a batch.
    """

    def __init__(self, shape: ModelLayout, config: PreTrainedConfig, cpu: bool, saved_bytes: Callable[[Batch], int]):
        self._shape, self._config, self._cpu, self._saved_bytes = shape, config, cpu, saved_bytes
        self._adapters = len(shape.of_kind(Kind.ADAPTER))
        self._adapter_states = sum(record.state_nbytes for record in shape.of_kind(Kind.ADAPTER))
        self._chunk_elements = chunk_elements(shape)
        # The rank with most chunks counts for all: they must plan the same.
        ranks = [replace(_largest_trained(shape), share=share) for share in shape.share.everyone()]
        self._block_chunks = max(len(record.chunks(self._chunk_elements)) for record in ranks)

    def count(self, batch: Batch, counts: BufferCounts, ring_blocks: float, columns: int) -> MemoryPlan:
        """Return the plan with these buffers, and with the bytes that it takes.

        Args:
            batch: the batch.
            counts: the buffers.
            ring_blocks: size of the optimizer's ring, in states of whole blocks.
            columns: tokens of each row that go through the head at once.
        """
        shape, several = self._shape, batch.micro_batches > 1
        hidden = shape.hidden_size or self._config.get_text_config().hidden_size
        split = shape.precision.split
        plan = MemoryPlan(
            counts,
            batch,
            ring_chunks=max(2, math.ceil(ring_blocks * self._block_chunks)),
            chunk_elements=self._chunk_elements,
            activation_bytes=round_up(batch.micro_tokens * hidden * shape.precision.parameter_bytes, 4096),
            kept_bytes=round_up(self._saved_bytes(batch), 4096),
            head_columns=columns,
            wide_blocks=split and several and bool(shape.trained_elements(Kind.BLOCK)),
            # Two contributions (head and tied embedding) need no more: their sum is rounded once either way.
            wide_non_block=split
            and (several or columns < batch.seq_len)
            and bool(shape.trained_elements(Kind.NON_BLOCK)),
            workspace_bytes=self._workspace(batch, columns),
            device_bytes=0,
            host_bytes=0,
        )
        device = self._device_bytes(plan)
        host = self._host_bytes(plan) + (device if self._cpu else 0)
        return replace(plan, device_bytes=device, host_bytes=host)

    def adapters_in_memory(self, counts: BufferCounts) -> bool:
        """Return whether adapters are in host memory for the whole run, their optimizer states with them."""
        return 0 < self._adapters <= counts.host_adapters

    def _device_bytes(self, plan: MemoryPlan) -> int:
        shape, batch, counts = self._shape, plan.batch, plan.counts
        width, passing = shape.precision.parameter_bytes, batch.rows * batch.loss.passes
        images = shape.image_memory if shape.images else NO_IMAGES
        gradients = {
            Kind.BLOCK: _gradient_bytes(counts.device_block_gradients, width, plan.wide_blocks),
            Kind.NON_BLOCK: _gradient_bytes(counts.device_non_block_gradients, width, plan.wide_non_block),
        }
        return (
            sum(counts.device(kind) * shape.device_nbytes(kind) for kind in Kind)
            + sum(shape.trained_elements(kind) * nbytes for kind, nbytes in gradients.items())
            + shape.decoded_nbytes
            + (DECODING_BYTES if shape.decoded_nbytes else 0)
            + counts.device_adapter_gradients * shape.device_gradient_nbytes(Kind.ADAPTER)
            + counts.device_activations * plan.activation_bytes
            + counts.device_kept * plan.kept_bytes
            + passing * (shape.carried_bytes(batch.seq_len) + shape.attention.mask_bytes(batch.seq_len))
            + passing * batch.seq_len * images.kept * width
            + plan.workspace_bytes
            + REDUCTION_BYTES * ((shape.share.ranks_per_node > 1) + (shape.share.nodes > 1))
        )

    def _host_bytes(self, plan: MemoryPlan) -> int:
        """Return the host's bytes; the device's come on top where the host is the device."""
        shape, counts, batch = self._shape, plan.counts, plan.batch
        return (
            sum(
                counts.host(kind) * shape.parameter_nbytes(kind)
                + counts.host_gradients(kind) * shape.gradient_nbytes(kind)
                for kind in Kind
            )
            + (self._adapter_states if self.adapters_in_memory(counts) else 0)
            + plan.ring_chunks * plan.chunk_elements * shape.trained_state_bytes
            + counts.host_activations * plan.activation_bytes
            + counts.host_kept * plan.kept_bytes
            + batch.rows * batch.seq_len * batch.loss.outputs * OUTPUT_BYTES * batch.loss.passes
            + (0 if self._cpu else self._encoding_bytes)
            + HOST_OVERHEAD_BYTES
            + DESCRIPTION_BYTES * shape.parameter_tensors
            + ADAM_SCRATCH_BYTES
        )

    def _workspace(self, batch: Batch, columns: int) -> int:
        """Return the bytes that computing takes beside all buffers."""
        shape, width = self._shape, self._shape.precision.parameter_bytes
        tokens, vocabulary = columns * batch.micro_rows, self._config.get_text_config().vocab_size
        logits = tokens * vocabulary * LOGIT_COPIES * width
        logits += pass_bytes(tokens, vocabulary, "cpu" if self._cpu else "cuda", bool(batch.loss.outputs))
        logits += tokens * batch.loss.outputs * 2 * 4  # on the device: a chunk's outputs, or their gradients, in parts
        # An outer gradient is made, transposed or summed on the way, and added to the flat buffer: measured on a CPU,
        # three times its size at once.
        head = logits + 3 * shape.trained_parameter(Kind.NON_BLOCK) * width
        head += tokens * shape.non_block_adapter_memory.per_token + shape.non_block_adapter_memory.fixed
        images = shape.image_memory if shape.images else NO_IMAGES
        return max(
            self._block_workspace(batch) + max(2 * shape.trained_parameter(Kind.BLOCK) * width, head),
            batch.micro_tokens * images.working * width,  # blocks do not run meanwhile
        )

    def _block_workspace(self, batch: Batch) -> int:
        shape = self._shape
        streams = max(1, shape.hidden_size // self._config.get_text_config().hidden_size)
        per_token = streams * activation_elements_per_token(self._config) * shape.precision.parameter_bytes
        per_token += ROUTER_BYTES * shape.router_experts
        adapting = shape.block_adapter_memory
        squares = batch.micro_rows * shape.attention.workspace_bytes(batch.seq_len)
        one = int(batch.micro_tokens * (per_token + adapting.per_token)) + adapting.fixed + squares
        return one if not shape.orders else self._workspace_in_pieces(batch, one)

    def _workspace_in_pieces(self, batch: Batch, one: int) -> int:
        """Return the same for blocks in pieces.

        A block's input, and the gradient of its output, are copied: they are needed beyond the part that begins a pass.
        In a mixture of experts, outputs of all experts are there until they are added up.

        Args:
            batch: the batch.
            one: bytes for one micro-batch that a block computes.
        """
        shape, text = self._shape, self._config.get_text_config()
        hidden = batch.micro_tokens * text.hidden_size * shape.precision.parameter_bytes
        rows = (getattr(text, "num_experts_per_tok", None) or 0) * hidden
        one += 2 * hidden + 3 * rows
        if shape.trained_elements(Kind.BLOCK):
            return batch.micro_batches * one  # all micro-batches go through the backward pass together
        return max(one, batch.micro_batches * (PARKED_HIDDEN * hidden + rows))

    @cached_property
    def _encoding_bytes(self) -> int:
        """Host memory in which a record is put together, and encoded for all ranks of the node, when it is made."""
        several = self._shape.share.ranks_per_node > 1
        return max(
            (
                several * one.device_nbytes + (0 if one.frozen is FrozenDtype.CHECKPOINT else one.decoded_nbytes)
                for one in self._shape.records
                if one.decoded_nbytes
            ),
            default=0,
        )


def _gradient_bytes(buffers: int, width: int, wide: bool) -> int:
    """Return the device's bytes for each element of the largest gradient: one buffer shares the fp32 sum's memory."""
    if not wide:
        return buffers * width
    return 4 if buffers == 1 else 4 + buffers * width
