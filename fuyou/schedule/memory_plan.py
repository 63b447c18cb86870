"""What a run allocates: the number of buffers of each kind, and the bytes of these and everything else."""

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property

from transformers import PreTrainedConfig

from common.memory.buffers import round_up
from common.models.vision import NO_IMAGES
from fuyou.layout.cutting import filling_bytes
from fuyou.layout.frozen_weights import ROW_ELEMENTS, ROWS_ON_ACCELERATORS, FrozenDtype
from fuyou.layout.model_layout import BufferCounts, KeyMemory, KindSizes, ModelLayout
from fuyou.layout.record import Kind, Record
from fuyou.optimizer.gradient_sum import squares_bytes
from fuyou.schedule.batch import Batch, BatchShape
from fuyou.schedule.workspace import Workspace

#: Optimizer states move and are updated in chunks of this many parameters. Small ones (10 MB of low, mean and variance)
#: keep reads, arithmetic and writes of one block going at the same time; large ones cost less Python per byte, which
#: counts where blocks are large and drives many.
SMALLEST_CHUNK = 1 << 20
LARGEST_CHUNK = 8 << 20
#: A block is cut into about this many chunks, if they come out between the two.
CHUNKS_PER_BLOCK = 32
#: Host memory that describes a parameter (modules, records, tasks): measured on Llamas of 60 to 160 blocks with LoRA.
DESCRIPTION_BYTES = 15 << 10
#: Host memory that is not ours to plan: allocator slack, thread stacks, library caches.
HOST_OVERHEAD_BYTES = 96 << 20
#: Part of that: freed memory that the heap may hold back, besides what computing takes.
HEAP_SLACK_BYTES = 24 << 20
#: Upper bound of Adam's scratch memory in the optimizer process: half a mebibyte per thread, twice that with moments in
#: fewer bits.
ADAM_SCRATCH_BYTES = 20 << 20
#: Device memory in which gradients of other ranks arrive, for each of the two levels: they are added piece by piece.
REDUCTION_BYTES = 32 << 20
#: Device memory for decoding one row of a record in fewer bits, besides the result: see fuyou/layout/frozen_weights.py,
#: and common/models/checkpoint/compressed/tensors.py, whose chunks are as large.
DECODING_BYTES = 20 * ROW_ELEMENTS
#: Upper bound of the host's bytes for each number that a caller's own loss is made of: itself, a copy that carries the
#: graph, its gradient, and five more in the caller's loss.
OUTPUT_BYTES = 32
#: The head runs over ranges of tokens, each of which makes a whole gradient of its weights: with this many tokens that
#: hardly counts; with few it costs more than all else. Fewer only where memory is short.
HEAD_TOKENS = 4096
FEWEST_HEAD_TOKENS = 64


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a run: the result of :class:`fuyou.schedule.memory_planner.MemoryPlanner`."""

    counts: BufferCounts
    batch: Batch
    ring_chunks: int  # Buffers in the optimizer's ring, each for the states of one chunk
    chunk_elements: int
    activation_bytes: int  # Bytes of a block's input for one micro-batch, rounded up to whole pages
    saved_bytes: int  # Bytes of operator outputs that one layer saves for one micro-batch, rounded up
    head_columns: int  # Tokens of each row that go through the head at once
    wide_blocks: bool  # Whether blocks' gradients are summed in fp32, then rounded to bf16
    wide_non_block: bool  # Whether gradients outside the blocks are summed in fp32, too
    wide_adapters: bool  # Whether those of adapter records are
    workspace_bytes: int  # Estimated bytes that computing takes besides all buffers
    device_bytes: int
    host_bytes: int
    key_gradient_bytes: int = 0  # Bytes of the sums of one row's gradients of keys and values in a block
    resident: tuple[int, ...] = ()  # Records that live in host memory for the whole run, states included

    def sums_wide(self, kind: Kind) -> bool:
        """Return whether gradients of a kind are summed in fp32, then rounded to bf16."""
        wide = {
            Kind.BLOCK: self.wide_blocks,
            Kind.NON_BLOCK: self.wide_non_block,
            Kind.ADAPTER: self.wide_adapters,
        }
        return wide.get(kind, False)

    def batch_shape(self, batch: Batch) -> BatchShape:
        """Return ``batch``, which fits into this plan, as the schedule sees it."""
        loss = batch.loss
        return BatchShape(
            batch.micro_batches,
            self.activation_bytes,
            batch.mean_tokens,
            self.saved_bytes,
            own_loss=bool(loss.outputs),
            reference=loss.reference,
            together=self.batch.most_together,
            chunks=batch.chunks,
        )

    def spills_gradients(self, layout: ModelLayout, held: Collection[int]) -> bool:
        """Return whether the gradients of all records in ``held``, which stay until the step has ended, exceed the
        host's buffers."""
        passing = {Kind.BLOCK: 2, Kind.NON_BLOCK: 1, Kind.ADAPTER: 2}
        kinds = Counter(layout.records[index].kind for index in held)
        trained = Counter(layout.records[index].kind for index in layout.trainable)
        return any(
            min(kinds[kind] + passing[kind], trained[kind]) > self.counts.host_gradients(kind)
            for kind in kinds
        )


def chunk_elements(layout: ModelLayout) -> int:
    """Return the size of the chunks of states on SSD, which depends on the model and the number of ranks."""
    trained = [layout.records[index] for index in layout.trainable]
    preferred = min(LARGEST_CHUNK, max(SMALLEST_CHUNK, _largest_trained(layout).owned // CHUNKS_PER_BLOCK))
    pages = max(record.page_elements for record in trained)
    return round_up(min(preferred, max(record.owned for record in trained)), pages)


def _largest_trained(layout: ModelLayout) -> Record:
    """Return the largest trained record of a block; without one, the last trained record."""
    trained = [layout.records[index] for index in layout.trainable]
    return max((r for r in trained if r.kind is Kind.BLOCK), key=lambda r: r.numel, default=trained[-1])


class MemoryCounter:
    """Counts the bytes of buffers and computing for one model.

    Args:
        saved_bytes: bytes of operator outputs that one layer saves for one micro-batch of a batch.
    """

    def __init__(
        self, layout: ModelLayout, config: PreTrainedConfig, cpu: bool, saved_bytes: Callable[[Batch], int]
    ):
        self._layout = layout
        self._config = config
        self._cpu = cpu
        self._saved_bytes = saved_bytes
        self._workspace = Workspace(layout, config, cpu)
        self._adapters = len(layout.of_kind(Kind.ADAPTER))
        self._adapter_states = sum(record.state_nbytes for record in layout.of_kind(Kind.ADAPTER))
        self._chunk_elements = chunk_elements(layout)
        # The rank with most chunks counts for all: they must plan the same.
        ranks = [replace(_largest_trained(layout), share=share) for share in layout.share.everyone()]
        self._block_chunks = max(len(record.chunks(self._chunk_elements)) for record in ranks)

    def count(self, batch: Batch, counts: BufferCounts, ring_blocks: float, columns: int) -> MemoryPlan:
        """Return the plan with these buffers, and its bytes.

        Args:
            ring_blocks: size of the optimizer's ring, in states of whole blocks.
            columns: tokens of each row that go through the head at once.
        """
        layout = self._layout
        several = batch.micro_batches > 1
        chunked = batch.chunks > 1
        hidden = layout.hidden_size or self._config.get_text_config().hidden_size
        plan = MemoryPlan(
            counts,
            batch,
            ring_chunks=max(2, math.ceil(ring_blocks * self._block_chunks)),
            chunk_elements=self._chunk_elements,
            activation_bytes=round_up(batch.micro_tokens * hidden * layout.precision.parameter_bytes, 4096),
            saved_bytes=round_up(self._row_bytes(batch) if chunked else self._saved_bytes(batch), 4096),
            key_gradient_bytes=self._keys.gradients * batch.seq_len + self._keys.state_gradients
            if chunked
            else 0,
            head_columns=columns,
            wide_blocks=several and layout.sizes[Kind.BLOCK].splits,
            # Two contributions (head and tied embedding) need no more: their sum is rounded once either way.
            wide_non_block=(several or columns < batch.columns) and layout.sizes[Kind.NON_BLOCK].splits,
            wide_adapters=(several or columns < batch.columns) and layout.sizes[Kind.ADAPTER].splits,
            workspace_bytes=self._workspace.nbytes(batch, columns),
            device_bytes=0,
            host_bytes=0,
        )
        device = self._device_bytes(plan)
        host = self._host_bytes(plan) + (device if self._cpu else 0)
        return replace(plan, device_bytes=device, host_bytes=host)

    def adapters_in_memory(self, counts: BufferCounts) -> bool:
        """Return whether adapters and their optimizer states are in host memory for the whole run."""
        return 0 < self._adapters <= counts.host_adapters

    def _device_bytes(self, plan: MemoryPlan) -> int:
        layout = self._layout
        batch = plan.batch
        counts = plan.counts
        width = layout.precision.parameter_bytes
        passing = batch.rows * batch.loss.passes
        images = layout.image_memory if layout.images else NO_IMAGES
        return (
            sum(counts.device(kind) * layout.sizes[kind].device_nbytes for kind in Kind)
            + sum(
                _gradient_bytes(counts.device_gradients(kind), layout.sizes[kind], plan.sums_wide(kind))
                for kind in Kind
            )
            + layout.decoded_nbytes
            + (DECODING_BYTES * (1 if self._cpu else ROWS_ON_ACCELERATORS) if layout.decoded_nbytes else 0)
            + counts.device_activations * plan.activation_bytes
            + counts.device_saved * plan.saved_bytes
            + passing * self._passed_bytes(batch)
            + plan.key_gradient_bytes
            + passing * batch.seq_len * images.passed * width
            + plan.workspace_bytes
            + REDUCTION_BYTES * ((layout.share.ranks_per_node > 1) + (layout.share.nodes > 1))
            + self._squares_bytes()
        )

    def _row_bytes(self, batch: Batch) -> int:
        return self._keys.keys * batch.seq_len + self._keys.states * batch.chunks

    def _passed_bytes(self, batch: Batch) -> int:
        """Return the bytes of what blocks are called with for one row, as far as it is counted."""
        if batch.chunks > 1:
            pairs = batch.seq_len * (batch.seq_len + batch.columns) // 2
            return batch.seq_len * self._keys.arguments + pairs * self._keys.masks
        attention = self._layout.attention
        return self._layout.carried_bytes(batch.seq_len) + attention.mask_bytes(
            batch.seq_len, self._layout.padded
        )

    @cached_property
    def _keys(self) -> KeyMemory:
        return self._layout.key_memory()

    def _squares_bytes(self) -> int:
        if self._cpu or self._layout.share.world_size == 1:
            return 0
        return squares_bytes(max(self._layout.sizes[kind].trained_elements for kind in Kind))

    def _host_bytes(self, plan: MemoryPlan) -> int:
        layout = self._layout
        counts = plan.counts
        batch = plan.batch
        return (
            sum(
                counts.host(kind) * layout.sizes[kind].parameter_nbytes
                + counts.host_gradients(kind) * layout.sizes[kind].gradient_nbytes
                for kind in Kind
            )
            + (self._adapter_states if self.adapters_in_memory(counts) else 0)
            + plan.ring_chunks * layout.trained_precision.state_nbytes(plan.chunk_elements)
            + counts.host_activations * plan.activation_bytes
            + counts.host_saved * plan.saved_bytes
            + batch.rows * batch.seq_len * batch.loss.outputs * OUTPUT_BYTES * batch.loss.passes
            + self._filling_bytes(plan)
            + HOST_OVERHEAD_BYTES
            + DESCRIPTION_BYTES * layout.parameter_tensors
            + ADAM_SCRATCH_BYTES
        )

    def _filling_bytes(self, plan: MemoryPlan) -> int:
        encoding = 0 if self._cpu else self._encoding_bytes
        if not self._layout.orders:
            return encoding
        idle = ADAM_SCRATCH_BYTES + (plan.workspace_bytes if self._cpu else 0)
        return max(0, encoding + self._source_bytes - idle)

    @cached_property
    def _source_bytes(self) -> int:
        return filling_bytes(self._layout.records) + 4 * self._layout.read_whole

    @cached_property
    def _encoding_bytes(self) -> int:
        several = self._layout.share.ranks_per_node > 1
        return max(
            (
                several * record.device_nbytes
                + (0 if record.frozen is FrozenDtype.CHECKPOINT else record.decoded_nbytes)
                for record in self._layout.records
                if record.decoded_nbytes
            ),
            default=0,
        )


def _gradient_bytes(buffers: int, sizes: KindSizes, wide: bool) -> int:
    """Return the device bytes of the gradients of a kind: one buffer shares the fp32 sum's memory."""
    total = 4 * sizes.trained_elements if wide else 0
    return total + (0 if wide and buffers == 1 else buffers * sizes.device_gradient_nbytes)
