"""How many buffers of each kind the budgets hold: everything that a run needs is counted before anything is allocated.

What must be there comes first (one buffer of each kind makes the engine work, serially), then what lets transfers and
computation overlap, then activations in the fastest tier that has room, then parameters that need not be read twice,
then optimizer states that need not be read at all.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from transformers import PreTrainedConfig

from common.errors import UserError
from common.memory.buffers import round_up
from common.models.vision.memory import NO_IMAGES
from common.units import format_bytes
from fuyou.layout.frozen_weights import ROW_ELEMENTS, FrozenDtype
from fuyou.layout.model_layout import BufferCounts, ModelLayout
from fuyou.layout.record import PAGE_ELEMENTS, Kind, Record
from fuyou.layout.resident import resident_records
from fuyou.model.loss import pass_bytes

#: Optimizer states move and are updated in chunks of this many parameters. Small ones (10 MB of lo, mean and variance)
#: keep reads, arithmetic and writes of one block going at the same time; large ones cost less Python per byte, which
#: counts where blocks are large and drives many.
SMALLEST_CHUNK, LARGEST_CHUNK = 1 << 20, 8 << 20
#: A block is cut into about this many chunks, if they come out between the two.
CHUNKS_PER_BLOCK = 32
#: What describes a parameter in training: modules, records, tasks. Measured on Llamas of 60 to 160 blocks with LoRA.
DESCRIPTION_BYTES = 15 << 10
#: Taken off the host budget for what is not ours to plan: allocator slack, thread stacks, library caches.
HOST_OVERHEAD_BYTES = 96 << 20
#: Of that, what the heap may keep of what was freed, beside what computing takes.
HEAP_SLACK_BYTES = 24 << 20
#: Adam's scratch memory in the optimizer process, from above: half a mebibyte per thread, twice that with bf16 moments.
ADAM_SCRATCH_BYTES = 20 << 20
#: Device memory in which gradients of other ranks arrive, for each of the two levels: they are added piece by piece.
REDUCTION_BYTES = 32 << 20
#: What bringing back one row of a record in fewer bits takes beside the result: see fuyou/layout/frozen_weights.py, and
#: common/models/checkpoint/compressed/tensors.py, whose chunks are as large.
DECODING_BYTES = 20 * ROW_ELEMENTS
#: How often the logits exist at once, in the compute dtype: themselves, their gradient, and one more in families that
#: pass them through a function (soft capping). What the loss makes in fp32 comes in passes: fuyou/model/loss.py.
LOGIT_COPIES = 3
#: What a router's loss takes for each token and expert, from above: logits, their softmax, that in fp32, masked,
#: and a gradient of each, some of which are there at the same time.
ROUTER_BYTES = 32
#: The head runs over ranges of tokens, each of which makes a whole gradient of its weights: with this many tokens that
#: hardly counts; with few it costs more than all else. Fewer only where memory is short.
HEAD_TOKENS, FEWEST_HEAD_TOKENS = 4096, 64


@dataclass(frozen=True)
class Batch:
    """A batch as the engine runs it."""

    rows: int
    """Sequences in the batch."""
    seq_len: int
    micro_rows: int
    """Sequences in one micro-batch; the last one may have fewer."""

    @property
    def micro_batches(self) -> int:
        return -(-self.rows // self.micro_rows)

    @property
    def micro_tokens(self) -> int:
        return self.micro_rows * self.seq_len

    @property
    def mean_tokens(self) -> float:
        """Of a micro-batch, on average."""
        return self.rows * self.seq_len / self.micro_batches


@dataclass(frozen=True)
class MemoryPlan:
    """What is allocated: the result of :func:`plan_memory`."""

    counts: BufferCounts
    batch: Batch
    ring_chunks: int
    chunk_elements: int
    activation_bytes: int
    """Of one micro-batch's block input, rounded up to whole pages."""
    kept_bytes: int
    """Of what one layer keeps of one micro-batch beside its input, rounded up likewise; 0 if that is nothing."""
    head_columns: int
    """Tokens of each row that go through the head at once."""
    wide_blocks: bool
    """Whether blocks' gradients are summed in fp32 (several micro-batches) before they are rounded to bf16."""
    wide_non_block: bool
    """The same for outer records, to which chunks of the head and tied embeddings contribute separately."""
    workspace_bytes: int
    """Estimate of what computing takes beside all buffers."""
    device_bytes: int
    host_bytes: int
    resident: tuple[int, ...] = ()
    """Records that live in host memory for the whole run, states included."""

    def spills_gradients(self, shape: ModelLayout, held: Collection[int]) -> bool:
        """Whether there is no room on the host for the gradients of all records in ``held``, which stay until the step
        has ended, while others pass through."""
        passing = {Kind.BLOCK: 2, Kind.NON_BLOCK: 1, Kind.ADAPTER: 0}
        kinds = Counter(shape.records[index].kind for index in held)
        trained = Counter(shape.records[index].kind for index in shape.trainable)
        return any(min(kinds[kind] + passing[kind], trained[kind]) > self.counts.host_gradients(kind) for kind in kinds)


def activation_elements_per_token(config: PreTrainedConfig) -> float:
    """Elements that one block's forward pass saves for its backward pass, per token: an estimate from above.

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
    """Elements of the chunks in which states lie on SSD: by the model and the number of ranks alone."""
    wanted = min(LARGEST_CHUNK, max(SMALLEST_CHUNK, _largest_trained(shape).owned // CHUNKS_PER_BLOCK))
    return round_up(min(wanted, max(shape.records[index].owned for index in shape.trainable)), PAGE_ELEMENTS)


def _largest_trained(shape: ModelLayout) -> Record:
    """The largest record of a block that is trained; if there is none, whatever is."""
    trained = [shape.records[index] for index in shape.trainable]
    return max((r for r in trained if r.kind is Kind.BLOCK), key=lambda r: r.numel, default=trained[-1])


class MemoryPlanner:
    """Counts memory for one model on one machine.

    Args:
        shape: the model's records.
        config: the model's configuration.
        device_limit: bytes of device memory for everything.
        host_limit: bytes of host memory for everything; on a CPU this includes the device's.
        cpu: whether the device is the CPU.
        deferred: records whose gradients wait on the host for the next forward pass, as far as there is room.
        speculative: whether all other gradients are kept until the step has ended, in the room that is left when all
            parameters are in host memory: that saves writing them, which is half of what a parameter saves.
        host_cache: most bytes of host memory for what is only kept there to save reading and writing it; None: as many
            as there are left.
        kept_layers: blocks that keep operator outputs beside their input.
        kept_bytes: what one of them keeps of one micro-batch of such a batch.
    """

    def __init__(
        self,
        shape: ModelLayout,
        config: PreTrainedConfig,
        device_limit: int,
        host_limit: int,
        cpu: bool,
        *,
        deferred: int = 0,
        speculative: bool = False,
        host_cache: int | None = None,
        kept_layers: int = 0,
        kept_bytes: Callable[[Batch], int] = lambda batch: 0,
    ):
        self.shape = shape
        self.config = config
        self.device_limit = device_limit
        self.host_limit = host_limit
        self.cpu = cpu
        self.deferred, self.speculative = deferred, speculative
        self.host_cache = host_cache
        self._kept_layers, self._kept_bytes = kept_layers, kept_bytes
        self.adapters = len(shape.of_kind(Kind.ADAPTER))
        self._adapter_states = sum(record.state_nbytes for record in shape.of_kind(Kind.ADAPTER))
        self.chunk_elements = chunk_elements(shape)
        # Of the rank that has most: all must plan the same.
        ranks = [replace(_largest_trained(shape), share=share) for share in shape.share.everyone()]
        self.block_chunks = max(len(record.chunks(self.chunk_elements)) for record in ranks)

    def plan(self, rows: int, seq_len: int, micro_rows: int | None) -> MemoryPlan:
        """The best plan that fits: micro-batches as large as the device takes (or as asked), then buffers.

        Raises:
            UserError: not even one buffer of each kind fits; says how much would.
        """
        sizes = [micro_rows] if micro_rows else _halvings(rows)
        best: MemoryPlan | None = None
        for size in sizes:
            batch = Batch(rows, seq_len, min(size, rows))
            for device in _device_ladder():
                plan = self._fit(batch, self._wanted(device))
                if plan is not None:
                    if best is None or device.device_blocks > best.counts.device_blocks:
                        best = plan
                    break
            if best is not None and best.counts.device_blocks > 1:
                break  # smaller micro-batches would only cost speed
        if best is None:
            raise self._too_small([Batch(rows, seq_len, min(size, rows)) for size in sizes])
        return best

    def _fit(self, batch: Batch, device: BufferCounts) -> MemoryPlan | None:
        activations = (len(self.shape.blocks) + 2) * batch.micro_batches + 2
        kept = self._kept(batch)
        device = self._wanted(_with_kept(device, kept))
        widths = [
            columns
            for columns in _head_ladder(batch)
            if self._count(batch, device, 0.0, columns).device_bytes <= self.device_limit
        ]
        for (in_host, passing), (counts, ring), columns in itertools.product(
            self._adapter_ladder(), _host_ladder(device), widths
        ):
            counts = replace(self._wanted(counts), host_adapters=in_host, host_adapter_gradients=passing)
            plan = self._count(batch, counts, ring, columns)
            if plan.host_bytes > self.host_limit:
                continue
            spare = self.device_limit - plan.device_bytes
            if self.cpu:
                spare = min(spare, self.host_limit - plan.host_bytes)
            extra = min(activations - counts.device_activations, spare // plan.activation_bytes)
            counts = replace(counts, device_activations=counts.device_activations + max(0, extra))
            if counts.device_activations < activations:
                staged = self._count(batch, replace(counts, host_activations=2), ring, columns)
                if staged.host_bytes > self.host_limit:
                    counts = replace(counts, device_activations=max(4, counts.device_activations - 2))
                    staged = self._count(batch, replace(counts, host_activations=2), ring, columns)
                    if staged.host_bytes > self.host_limit:
                        continue
                missing = activations - counts.device_activations
                room = (self.host_limit - staged.host_bytes) // plan.activation_bytes
                counts = replace(counts, host_activations=2 + min(missing, room))
                if counts.host_activations < missing + 1:
                    counts = replace(counts, ssd_activations=activations)
            counts = self._place_kept(batch, counts, ring, columns, kept)
            block_bytes = self.shape.gradient_nbytes(Kind.BLOCK)
            if block_bytes:
                room = self.host_limit - self._count(batch, counts, ring, columns).host_bytes
                held = max(0, min(room // block_bytes, self.deferred, len(self.shape.blocks)))
                counts = replace(counts, host_block_gradients=counts.host_block_gradients + held)
            return self._cache(self._count(batch, counts, ring, columns), ring)
        return None

    def _cache(self, plan: MemoryPlan, ring: float) -> MemoryPlan:
        """``plan`` with what is left of the host's memory as a cache: parameters, which save twice their size in
        every step; and when all of them are there, states, which save it once (twice if not every step is committed).
        """
        layers, outer, counts = len(self.shape.blocks), len(self.shape.of_kind(Kind.NON_BLOCK)), plan.counts
        block_bytes, non_block_bytes = (self.shape.parameter_nbytes(kind) for kind in (Kind.BLOCK, Kind.NON_BLOCK))
        free = self.host_limit - plan.host_bytes
        room = free if self.host_cache is None else min(free, self.host_cache)
        more = max(0, min(room // block_bytes, layers - counts.host_blocks))
        counts = replace(counts, host_blocks=counts.host_blocks + more)
        room, free = room - more * block_bytes, free - more * block_bytes
        if self.speculative:
            gradients, free = self._kept_gradients(counts, free)
            counts, room = replace(counts, **gradients), min(room, free)
        missing = max(0, outer - counts.host_non_block)
        resident: tuple[int, ...] = ()
        if counts.host_blocks >= layers and missing * non_block_bytes <= room:
            counts = replace(counts, host_non_block=counts.host_non_block + missing)
            room -= missing * non_block_bytes
            resident = tuple(resident_records(self.shape, room))
        plan = self._count(plan.batch, counts, ring, plan.head_columns)
        states = sum(self.shape.records[index].state_nbytes for index in resident)
        if self._in_memory(counts):
            resident += tuple(record.index for record in self.shape.of_kind(Kind.ADAPTER))
        return replace(plan, resident=resident, host_bytes=plan.host_bytes + states)

    def _kept_gradients(self, counts: BufferCounts, room: int) -> tuple[dict[str, int], int]:
        """Host buffers for all gradients of a step, as far as they fit in ``room``; and the room that is left."""
        names = {Kind.NON_BLOCK: "host_non_block_gradients", Kind.BLOCK: "host_block_gradients"}
        found = {}
        for kind, name in names.items():
            nbytes, there = self.shape.gradient_nbytes(kind), counts.host_gradients(kind)
            trained = sum(record.trainable for record in self.shape.of_kind(kind))
            more = max(0, min(room // nbytes, trained - there)) if nbytes else 0
            found[name] = there + more
            room -= more * nbytes
        return found, room

    def _wanted(self, counts: BufferCounts) -> BufferCounts:
        """``counts`` without gradients of what is frozen, and with what adapters need on the device."""
        none = {
            name: 0
            for kind, names in (
                (Kind.BLOCK, ("device_block_gradients", "host_block_gradients")),
                (Kind.NON_BLOCK, ("device_non_block_gradients", "host_non_block_gradients")),
            )
            if not self.shape.trained_elements(kind)
            for name in names
        }
        few = min(2, self.adapters)
        towers = len(self.shape.of_kind(Kind.TOWER))
        return replace(
            counts, device_adapters=few, device_adapter_gradients=few, device_towers=towers, host_towers=towers, **none
        )

    def _adapter_ladder(self) -> list[tuple[int, int]]:
        """Host buffers for adapters and for their gradients: all of them, as a rule; else as many as pass through."""
        if not self.adapters:
            return [(0, 0)]
        waiting = self.adapters if self.speculative else min(self.adapters, self.deferred + 2)
        return [(self.adapters, waiting), (min(3, self.adapters), min(2, self.adapters))]

    def _in_memory(self, counts: BufferCounts) -> bool:
        """Whether adapters are in host memory for the whole run, their optimizer states with them."""
        return 0 < self.adapters <= counts.host_adapters

    def _kept(self, batch: Batch) -> int:
        """How many buffers of kept outputs a step fills."""
        return self._kept_layers * batch.micro_batches if self._kept_bytes(batch) else 0

    def _place_kept(self, batch: Batch, counts: BufferCounts, ring: float, columns: int, kept: int) -> BufferCounts:
        """Give kept outputs what is left of the device, then of the host, then the SSDs."""
        if counts.device_kept == kept:
            return counts
        plan = self._count(batch, counts, ring, columns)
        spare = self.device_limit - plan.device_bytes
        if self.cpu:
            spare = min(spare, self.host_limit - plan.host_bytes)
        more = min(kept - counts.device_kept, max(0, spare) // plan.kept_bytes)
        counts = replace(counts, device_kept=counts.device_kept + more)
        missing = kept - counts.device_kept
        if not missing:
            return replace(counts, host_kept=0)
        room = (self.host_limit - self._count(batch, counts, ring, columns).host_bytes) // plan.kept_bytes
        counts = replace(counts, host_kept=counts.host_kept + max(0, min(missing + 1 - counts.host_kept, room)))
        return counts if counts.host_kept > missing else replace(counts, ssd_kept=kept)

    @cached_property
    def _encoding_bytes(self) -> int:
        """Host memory in which a record is put together, and encoded for all ranks of the node, when it is made."""
        several = self.shape.share.ranks_per_node > 1
        return max(
            (
                several * one.device_nbytes + (0 if one.frozen is FrozenDtype.CHECKPOINT else one.decoded_nbytes)
                for one in self.shape.records
                if one.decoded_nbytes
            ),
            default=0,
        )

    def _block_workspace(self, batch: Batch) -> int:
        streams = max(1, self.shape.hidden_size // self.config.get_text_config().hidden_size)
        per_token = streams * activation_elements_per_token(self.config) * self.shape.precision.parameter_bytes
        per_token += ROUTER_BYTES * self.shape.router_experts
        adapting = self.shape.block_adapter_memory
        squares = batch.micro_rows * self.shape.attention.workspace_bytes(batch.seq_len)
        return int(batch.micro_tokens * (per_token + adapting.per_token)) + adapting.fixed + squares

    def _count(self, batch: Batch, counts: BufferCounts, ring_blocks: float, columns: int) -> MemoryPlan:
        """What ``counts`` take, with ``columns`` tokens of each row going through the head at once."""
        shape, precision, several = self.shape, self.shape.precision, batch.micro_batches > 1
        width = precision.parameter_bytes
        text = self.config.get_text_config()
        activation = round_up(batch.micro_tokens * (shape.hidden_size or text.hidden_size) * width, 4096)
        kept = round_up(self._kept_bytes(batch), 4096) if self._kept_layers else 0

        tokens, vocabulary = columns * batch.micro_rows, text.vocab_size
        logits = tokens * vocabulary * LOGIT_COPIES * width + pass_bytes(
            tokens, vocabulary, "cpu" if self.cpu else "cuda"
        )
        # An outer gradient is made, transposed or summed on the way, and added to the flat buffer: measured on a CPU,
        # three times its size at once.
        head = logits + 3 * shape.trained_parameter(Kind.NON_BLOCK) * width
        head += tokens * shape.non_block_adapter_memory.per_token + shape.non_block_adapter_memory.fixed
        workspace = self._block_workspace(batch) + max(2 * shape.trained_parameter(Kind.BLOCK) * width, head)
        images = shape.image_memory if shape.images else NO_IMAGES
        workspace = max(workspace, batch.micro_tokens * images.working * width)  # blocks do not run meanwhile

        trained = {kind: shape.trained_elements(kind) for kind in (Kind.BLOCK, Kind.NON_BLOCK)}
        wide_blocks = precision.split and several and bool(trained[Kind.BLOCK])
        # Two contributions (head and tied embedding) need no more: their sum is rounded once either way.
        wide_non_block = precision.split and (several or columns < batch.seq_len) and bool(trained[Kind.NON_BLOCK])
        chunk = self.chunk_elements
        ring_chunks = max(2, math.ceil(ring_blocks * self.block_chunks))
        device = (
            sum(counts.device(kind) * shape.device_nbytes(kind) for kind in Kind)
            + trained[Kind.BLOCK] * _gradient_bytes(counts.device_block_gradients, width, wide_blocks)
            + trained[Kind.NON_BLOCK] * _gradient_bytes(counts.device_non_block_gradients, width, wide_non_block)
            + shape.decoded_nbytes
            + (DECODING_BYTES if shape.decoded_nbytes else 0)
            + counts.device_adapter_gradients * shape.device_gradient_nbytes(Kind.ADAPTER)
            + counts.device_activations * activation
            + counts.device_kept * kept
            + batch.rows * (shape.carried_bytes(batch.seq_len) + shape.attention.mask_bytes(batch.seq_len))
            + batch.rows * batch.seq_len * images.kept * width
            + workspace
            + REDUCTION_BYTES * ((shape.share.ranks_per_node > 1) + (shape.share.nodes > 1))
        )
        host = (
            sum(
                counts.host(kind) * shape.parameter_nbytes(kind)
                + counts.host_gradients(kind) * shape.gradient_nbytes(kind)
                for kind in Kind
            )
            + (self._adapter_states if self._in_memory(counts) else 0)
            + ring_chunks * chunk * shape.trained_state_bytes
            + counts.host_activations * activation
            + counts.host_kept * kept
            + (0 if self.cpu else self._encoding_bytes)
            + HOST_OVERHEAD_BYTES
            + DESCRIPTION_BYTES * shape.parameter_tensors
            + ADAM_SCRATCH_BYTES
            + (device if self.cpu else 0)
        )
        return MemoryPlan(
            counts, batch, ring_chunks, chunk, activation, kept, columns, wide_blocks, wide_non_block, workspace,
            device, host,
        )  # fmt: skip

    def _too_small(self, batches: list[Batch]) -> UserError:
        counts, ring = list(_host_ladder(list(_device_ladder())[-1]))[-1]
        in_host, passing = self._adapter_ladder()[-1]
        counts = replace(
            self._wanted(counts), host_activations=2, host_adapters=in_host, host_adapter_gradients=passing
        )
        plans = [
            self._count(batch, _with_kept(counts, self._kept(batch)), ring, columns)
            for batch in batches
            for columns in _head_ladder(batch)
        ]
        # Not always the smallest micro-batch: a batch that is not split needs no fp32 sums.
        least = min(plans, key=lambda plan: plan.host_bytes if self.cpu else plan.device_bytes)
        batch = least.batch
        needs = []
        if least.device_bytes > self.device_limit:
            needs.append(
                f"--device-memory of at least {_mebibytes(least.device_bytes)} "
                f"(it is {format_bytes(self.device_limit)})"
            )
        if least.host_bytes > self.host_limit:
            needs.append(
                f"--host-memory of at least {_mebibytes(least.host_bytes)} (it is {format_bytes(self.host_limit)})"
            )
        smaller = "" if batch.micro_rows == 1 or len(batches) > 1 else " A smaller --micro-batch needs less."
        block, outer = (max(r.numel for r in self.shape.of_kind(kind)) for kind in (Kind.BLOCK, Kind.NON_BLOCK))
        towers = sum(record.numel for record in self.shape.of_kind(Kind.TOWER))
        beside = f", {towers:,} of them in towers that stay on the device" if towers else ""
        return UserError(
            f"One block of this model ({block:,} parameters; {outer + towers:,} outside the blocks{beside}) with a "
            f"micro-batch of {batch.micro_rows} x {batch.seq_len} tokens needs {' and '.join(needs)}.{smaller}"
        )


def _gradient_bytes(buffers: int, width: int, wide: bool) -> int:
    """Bytes on the device for each element of the largest gradient: a single buffer shares the fp32 sum's memory."""
    if not wide:
        return buffers * width
    return 4 if buffers == 1 else 4 + buffers * width


def _mebibytes(nbytes: int) -> str:
    return f"{-(-nbytes // (1 << 20))}MiB"


def _halvings(rows: int) -> list[int]:
    """``rows``, and each half of it down to 1."""
    sizes = [rows]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def _head_ladder(batch: Batch) -> list[int]:
    """Tokens of each row that go through the head at once: what runs well, and each half of it down to the fewest."""
    most, fewest = (
        max(1, min(batch.seq_len, tokens // batch.micro_rows)) for tokens in (HEAD_TOKENS, FEWEST_HEAD_TOKENS)
    )
    return [width for width in _halvings(most) if width > fewest] + [fewest]


def _device_ladder() -> Iterator[BufferCounts]:
    """From what overlaps everything on the device to what just works."""
    yield BufferCounts(device_blocks=2, device_block_gradients=2, device_activations=6)
    yield BufferCounts(device_blocks=2, device_block_gradients=1, device_activations=6)
    yield BufferCounts(device_blocks=2, device_block_gradients=1, device_activations=4)
    yield BufferCounts(device_blocks=1, device_block_gradients=1, device_activations=4)


def _with_kept(counts: BufferCounts, kept: int) -> BufferCounts:
    """With the least that ``kept`` buffers of kept outputs need: two on the device, and two on the way from there."""
    near = min(kept, 2)
    return replace(counts, device_kept=near, host_kept=2 if kept > near else 0)


def _host_ladder(device: BufferCounts) -> Iterator[tuple[BufferCounts, float]]:
    """The same for the host, with the size of the optimizer's ring in blocks' states.

    A ring of three blocks lets the SSDs read states while a forward pass leaves them idle; two chunks are the least.
    """
    for blocks, gradients, ring in ((4, 2, 3.0), (4, 2, 2.0), (3, 2, 1.0), (3, 1, 0.5), (2, 1, 0.25), (1, 1, 0.0)):
        yield replace(device, host_blocks=blocks, host_block_gradients=gradients), ring
