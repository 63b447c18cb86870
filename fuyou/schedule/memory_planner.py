"""Divide the memory of device and host among buffers, before anything is allocated.

The minimum comes first (one buffer of each kind makes the engine work, serially), then buffers that let transfers and
computation overlap, then activations in the fastest tier with room, then parameters that need not be read twice, then
optimizer states that need not be read at all.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from transformers import PreTrainedConfig

from common.errors import UserError
from common.models.task_type import TaskType, task_type_of
from common.units import format_bytes
from fuyou.layout.model_layout import BufferCounts, ModelLayout, resident_records
from fuyou.layout.record import Kind
from fuyou.schedule.batch import ENGINE_LOSS, Batch, LossInputs
from fuyou.schedule.memory_plan import FEWEST_HEAD_TOKENS, HEAD_TOKENS, MemoryCounter, MemoryPlan


class MemoryPlanner:
    """Plans the memory of one model on one machine.

    Args:
        host_limit: bytes of host memory; on a CPU this includes the device's.
        deferred: number of records of a kind whose gradients wait on the host for the next forward pass, if there is
            room.
        speculative: whether all other gradients stay until the step has ended, in memory left when all parameters
            are in host memory: that saves writing them, which is half of what a parameter saves.
        host_cache: maximum bytes of host memory that only save reading and writing; None for all that is left.
        saving_layers: number of blocks that save operator outputs besides their input.
        saved_bytes: bytes of outputs that one of them saves for one micro-batch of a batch.
    """

    def __init__(
        self,
        layout: ModelLayout,
        config: PreTrainedConfig,
        device_limit: int,
        host_limit: int,
        cpu: bool,
        *,
        deferred: int = 0,
        speculative: bool = False,
        host_cache: int | None = None,
        saving_layers: int = 0,
        saved_bytes: Callable[[Batch], int] = lambda batch: 0,
    ):
        self.layout = layout
        self._config = config
        self.device_limit = device_limit
        self.host_limit = host_limit
        self.cpu = cpu
        self._deferred = deferred
        self._speculative = speculative
        self.host_cache = host_cache
        self._saving_layers = saving_layers
        self._saved_bytes = saved_bytes if saving_layers else lambda batch: 0
        self._adapters = len(layout.of_kind(Kind.ADAPTER))

    def plan(
        self,
        rows: int,
        seq_len: int,
        micro_rows: int | None,
        loss: LossInputs = ENGINE_LOSS,
        chunk: int | None = None,
    ) -> MemoryPlan:
        """Return the best plan that fits: micro-batches as large as the device takes (or as given), then buffers.

        Args:
            micro_rows: sequences that are computed at once; None for as many as fit.
            chunk: tokens of a row that pass at once; None for whole rows if they fit, else as many tokens as fit.

        Raises:
            UserError: if not even one buffer of each kind fits; says how much would. Or rows cannot pass in chunks.
        """
        if chunk is None or chunk >= seq_len:
            try:
                return self._plan(self._whole_rows(rows, seq_len, micro_rows, loss))
            except UserError:
                sizes = [size for power in range(10, 40) if (size := 1 << power) < seq_len]
                if (
                    chunk is not None
                    or not sizes
                    or self._block_is_too_large()
                    or self._chunk_obstacle() is not None
                ):
                    raise
        else:
            sizes = [chunk]
            if obstacle := self._chunk_obstacle(chunk):
                raise UserError(f"Rows cannot pass in chunks {obstacle}. Leave --chunk out.")
        return self._plan([Batch(rows, seq_len, 1, loss, chunk=size) for size in reversed(sizes)])

    def _block_is_too_large(self) -> bool:
        """Return whether a block's parameters alone, as stored and decoded, exceed the device's memory, so that shorter
        rows do not help."""
        return self.layout.sizes[Kind.BLOCK].device_nbytes + self.layout.decoded_nbytes > self.device_limit

    def _chunk_obstacle(self, chunk: int | None = None) -> str | None:
        """Return why rows cannot pass in chunks; None if they can. Runs the blocks of a new model without values."""
        layout = self.layout
        obstacles = {
            "through blocks in pieces": bool(layout.orders),
            "with one label for each": task_type_of(self._config) is TaskType.SEQUENCE_CLASSIFICATION,
            "with images": layout.images,
            "behind a mask that hides tokens": layout.padded,
            "through this model, whose blocks do not show what they keep of earlier tokens": (
                not layout.orders and not (layout.key_memory().keys or layout.key_memory().states)
            ),
        }
        if chunk is not None and chunk < 3 and not any(obstacles.values()) and layout.key_memory().states:
            return (
                # Chunks of one change them in place
                "of fewer than 3 tokens through this model, which carries states"
            )
        return next((words for words, holds in obstacles.items() if holds), None)

    def _whole_rows(self, rows: int, seq_len: int, micro_rows: int | None, loss: LossInputs) -> list[Batch]:
        # In 1, 2, 3, 4, 6, 8, 12, ... equal parts, down to single sequences.
        parts = (factor << power for power in range(rows.bit_length() + 1) for factor in (2, 3))
        even = sorted({rows, 1, *(-(-rows // count) for count in parts)}, reverse=True)
        sizes = [micro_rows] if micro_rows else even
        return self._batches([Batch(rows, seq_len, min(size, rows), loss) for size in sizes])

    def _plan(self, batches: list[Batch]) -> MemoryPlan:
        counter = MemoryCounter(self.layout, self._config, self.cpu, self._saved_bytes)
        best: MemoryPlan | None = None
        for batch in batches:
            if best is not None and best.counts.device_blocks > 1 and not self._as_often(batch, best.batch):
                break  # smaller micro-batches would only cost speed
            for device in _device_ladder(bool(self.layout.orders)):
                plan = self._fit(counter, batch, device)
                if plan is not None:
                    if best is None or device.device_blocks > best.counts.device_blocks:
                        best = plan
                    break
        if best is None:
            raise self._too_small(counter, batches)
        return best

    def _as_often(self, batch: Batch, best: Batch) -> bool:
        """Return whether pieces come to the device as often for ``batch`` as for ``best``: with less memory per batch,
        more of them may stay there."""
        trained = bool(self.layout.sizes[Kind.BLOCK].trained_elements)
        return bool(self.layout.orders) and batch.passes_in_pieces(trained) == best.passes_in_pieces(trained)

    def _batches(self, sizes: list[Batch]) -> list[Batch]:
        """Return ``sizes``, best first. For blocks in pieces, with every number of micro-batches that may go through
        them together, ordered by how often pieces come to the device."""
        if not self.layout.orders:
            return sizes
        trained = bool(self.layout.sizes[Kind.BLOCK].trained_elements)
        batches = [
            replace(size, most_together=most) for size in sizes for most in _halvings(size.micro_batches)
        ]
        return sorted(batches, key=lambda size: size.passes_in_pieces(trained))

    def _fit(self, counter: MemoryCounter, batch: Batch, device: BufferCounts) -> MemoryPlan | None:
        saved = self._saved_buffers(batch)
        device = self._needed(_with_saved(device, saved, batch))

        @functools.cache
        def fits_device(columns: int) -> bool:
            return counter.count(batch, device, 0.0, columns).device_bytes <= self.device_limit

        for (adapters, passing), (counts, ring), columns in itertools.product(
            self._adapter_ladder(), _host_ladder(device), _head_ladder(batch)
        ):
            if not fits_device(columns):
                continue
            counts = replace(self._needed(counts), host_adapters=adapters, host_adapter_gradients=passing)
            filler = _Filler(self, counter, batch, ring, columns)
            filled = filler.add_activations(counts) if filler.host_room(counts) >= 0 else None
            if filled is not None:
                filled = filler.add_deferred_gradients(
                    filler.add_saved_outputs(filled, saved), self._deferred
                )
                return filler.add_cache(filled, self.host_cache, self._speculative)
        return None

    def _needed(self, counts: BufferCounts) -> BufferCounts:
        """Return ``counts`` without gradients of frozen records, and with device buffers for adapters."""
        sizes = self.layout.sizes
        if not sizes[Kind.BLOCK].trained_elements:
            counts = replace(counts, device_block_gradients=0, host_block_gradients=0)
        if not sizes[Kind.NON_BLOCK].trained_elements:
            counts = replace(counts, device_non_block_gradients=0, host_non_block_gradients=0)
        few = min(2, self._adapters)
        towers = len(self.layout.of_kind(Kind.TOWER))
        return replace(
            counts,
            device_adapters=few,
            device_adapter_gradients=few,
            device_towers=towers,
            host_towers=towers,
        )

    def _adapter_ladder(self) -> list[tuple[int, int]]:
        """Return numbers of host buffers for adapters and for their gradients: all of them, else a few."""
        if not self._adapters:
            return [(0, 0)]
        waiting = self._adapters if self._speculative else min(self._adapters, self._deferred + 2)
        return [(self._adapters, waiting), (min(3, self._adapters), min(2, self._adapters))]

    def _saved_buffers(self, batch: Batch) -> int:
        if batch.chunks > 1:  # the keys and values of a row
            return len(self.layout.blocks) * batch.rows + batch.loss.reference
        return self._saving_layers * batch.micro_batches if self._saved_bytes(batch) else 0

    def _too_small(self, counter: MemoryCounter, batches: list[Batch]) -> UserError:
        counts, ring = list(_host_ladder(list(_device_ladder(False))[-1]))[-1]
        adapters, passing = self._adapter_ladder()[-1]
        counts = replace(
            self._needed(counts), host_activations=2, host_adapters=adapters, host_adapter_gradients=passing
        )
        plans = [
            counter.count(batch, _with_saved(counts, self._saved_buffers(batch), batch), ring, columns)
            for batch in batches
            for columns in _head_ladder(batch)
        ]
        # Not always the smallest micro-batch: a batch that is not split needs no fp32 sums.
        least = min(plans, key=lambda plan: plan.host_bytes if self.cpu else plan.device_bytes)
        batch = least.batch
        needs = " and ".join(
            f"{option} of at least {-(-needed // (1 << 20))}MiB (it is {format_bytes(limit)})"
            for option, needed, limit in (
                ("--device-memory", least.device_bytes, self.device_limit),
                ("--host-memory", least.host_bytes, self.host_limit),
            )
            if needed > limit
        )
        sizes = {batch.micro_rows for batch in batches}
        smaller = "" if batch.micro_rows == 1 or len(sizes) > 1 else " A smaller --micro-batch needs less."
        tokens = f"{batch.seq_len} tokens"
        if batch.chunks > 1:
            smaller = " A smaller --chunk needs less."
            tokens = f"{batch.columns} of {batch.seq_len} tokens"
        block, outer = (
            max(r.numel for r in self.layout.of_kind(kind)) for kind in (Kind.BLOCK, Kind.NON_BLOCK)
        )
        towers = sum(record.numel for record in self.layout.of_kind(Kind.TOWER))
        in_towers = f", {towers:,} of them in towers that stay on the device" if towers else ""
        return UserError(
            f"One block of this model ({block:,} parameters; {outer + towers:,} outside the blocks{in_towers}) with a "
            f"micro-batch of {batch.micro_rows} x {tokens} needs {needs}.{smaller}"
        )


@dataclass(frozen=True)
class _Filler:
    """Adds buffers to the minimum, as far as memory goes, the most useful first."""

    planner: MemoryPlanner
    counter: MemoryCounter
    batch: Batch
    ring: float  # Size of the optimizer's ring, in states of whole blocks
    columns: int  # Tokens of each row that go through the head at once

    def plan(self, counts: BufferCounts) -> MemoryPlan:
        return self.counter.count(self.batch, counts, self.ring, self.columns)

    def host_room(self, counts: BufferCounts) -> int:
        """Return the bytes that ``counts`` leave of the host; negative if they do not fit."""
        return self.planner.host_limit - self.plan(counts).host_bytes

    def device_room(self, counts: BufferCounts) -> int:
        """Return the bytes that ``counts`` leave of the device; negative if they do not fit."""
        plan = self.plan(counts)
        room = self.planner.device_limit - plan.device_bytes
        return min(room, self.planner.host_limit - plan.host_bytes) if self.planner.cpu else room

    def add_activations(self, counts: BufferCounts) -> BufferCounts | None:
        """Put the blocks' inputs on the device, else the host, else the SSDs; None if they do not fit."""
        nbytes = self.plan(counts).activation_bytes
        total = self.batch.activations(len(self.planner.layout.blocks))
        more = min(total - counts.device_activations, self.device_room(counts) // nbytes)
        counts = replace(counts, device_activations=counts.device_activations + max(0, more))
        if counts.device_activations >= total:
            return counts
        room = self.host_room(replace(counts, host_activations=2))
        if room < 0:
            counts = replace(counts, device_activations=max(4, counts.device_activations - 2))
            room = self.host_room(replace(counts, host_activations=2))
            if room < 0:
                return None
        missing = total - counts.device_activations
        counts = replace(counts, host_activations=2 + min(missing, room // nbytes))
        return counts if counts.host_activations > missing else replace(counts, ssd_activations=total)

    def add_saved_outputs(self, counts: BufferCounts, total: int) -> BufferCounts:
        """Put ``total`` buffers of saved outputs on the device, else the host, else the SSDs."""
        if counts.device_saved == total:
            return counts
        nbytes = self.plan(counts).saved_bytes
        more = min(total - counts.device_saved, max(0, self.device_room(counts)) // nbytes)
        counts = replace(counts, device_saved=counts.device_saved + more)
        missing = total - counts.device_saved
        if not missing:
            return replace(counts, host_saved=0)
        more = max(0, min(missing + 1 - counts.host_saved, self.host_room(counts) // nbytes))
        counts = replace(counts, host_saved=counts.host_saved + more)
        return counts if counts.host_saved > missing else replace(counts, ssd_saved=total)

    def add_deferred_gradients(self, counts: BufferCounts, deferred: int) -> BufferCounts:
        nbytes = self.planner.layout.sizes[Kind.BLOCK].gradient_nbytes
        if not nbytes:
            return counts
        more = max(
            0, min(self.host_room(counts) // nbytes, deferred, len(self.planner.layout.of_kind(Kind.BLOCK)))
        )
        return replace(counts, host_block_gradients=counts.host_block_gradients + more)

    def add_cache(self, counts: BufferCounts, limit: int | None, speculative: bool) -> MemoryPlan:
        """Return the plan that caches in ``limit`` bytes of the host's rest.

        Parameters come first, which save twice their size in every step; when all are cached, states, which save their
        size (twice if not every step is committed). In between, with ``speculative`` updates, gradients that stay.
        """
        blocks, outer = (len(self.planner.layout.of_kind(kind)) for kind in (Kind.BLOCK, Kind.NON_BLOCK))
        block_bytes, non_block_bytes = (
            self.planner.layout.sizes[kind].parameter_nbytes for kind in (Kind.BLOCK, Kind.NON_BLOCK)
        )
        free = self.host_room(counts)
        room = free if limit is None else min(free, limit)
        more = max(0, min(room // block_bytes, blocks - counts.host_blocks))
        counts = replace(counts, host_blocks=counts.host_blocks + more)
        room = room - more * block_bytes
        free = free - more * block_bytes
        if speculative:
            counts, free = self._add_all_gradients(counts, free)
            room = min(room, free)
        missing = max(0, outer - counts.host_non_block)
        resident: tuple[int, ...] = ()
        if counts.host_blocks >= blocks and missing * non_block_bytes <= room:
            counts = replace(counts, host_non_block=counts.host_non_block + missing)
            room -= missing * non_block_bytes
            resident = tuple(resident_records(self.planner.layout, room))
        plan = self.plan(counts)
        states = sum(self.planner.layout.records[index].state_nbytes for index in resident)
        if self.counter.adapters_in_memory(counts):
            adapters = self.planner.layout.of_kind(Kind.ADAPTER)
            resident += tuple(record.index for record in adapters if record.trainable)
        return replace(plan, resident=resident, host_bytes=plan.host_bytes + states)

    def _add_all_gradients(self, counts: BufferCounts, room: int) -> tuple[BufferCounts, int]:
        """Return ``counts`` with host buffers for a step's gradients, as far as they fit in ``room``, and the rest of
        it."""
        names = {Kind.NON_BLOCK: "host_non_block_gradients", Kind.BLOCK: "host_block_gradients"}
        for kind, name in names.items():
            nbytes = self.planner.layout.sizes[kind].gradient_nbytes
            there = counts.host_gradients(kind)
            trained = sum(record.trainable for record in self.planner.layout.of_kind(kind))
            more = max(0, min(room // nbytes, trained - there)) if nbytes else 0
            counts = replace(counts, **{name: there + more})
            room -= more * nbytes
        return counts, room


def _halvings(rows: int) -> list[int]:
    sizes = [rows]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def _head_ladder(batch: Batch) -> list[int]:
    """Return numbers of tokens of each row that may go through the head at once, the preferred first."""
    most, fewest = (
        max(1, min(batch.columns, tokens // batch.micro_rows)) for tokens in (HEAD_TOKENS, FEWEST_HEAD_TOKENS)
    )
    return [width for width in _halvings(most) if width > fewest] + [fewest]


def _device_ladder(pieces: bool) -> Iterator[BufferCounts]:
    """Yield the device's buffers, from full overlap to the minimum; more for ``pieces``, whose uploads and computation
    alternate in being longer.
    """
    if pieces:
        for blocks in (24, 16, 12, 8, 6, 4, 3):
            yield BufferCounts(device_blocks=blocks, device_block_gradients=2, device_activations=6)
    yield BufferCounts(device_blocks=2, device_block_gradients=2, device_activations=6)
    yield BufferCounts(device_blocks=2, device_block_gradients=1, device_activations=6)
    yield BufferCounts(device_blocks=2, device_block_gradients=1, device_activations=4)
    yield BufferCounts(device_blocks=1, device_block_gradients=1, device_activations=4)


def _with_saved(counts: BufferCounts, saved: int, batch: Batch) -> BufferCounts:
    """Return ``counts`` with the fewest buffers that let ``saved`` outputs pass: two on the host, and two on the device
    (one for the keys and values of a row in chunks)."""
    near = min(saved, 1 if batch.chunks > 1 else 2)
    return replace(counts, device_saved=near, host_saved=2 if saved > near else 0)


def _host_ladder(device: BufferCounts) -> Iterator[tuple[BufferCounts, float]]:
    """Yield the host's buffers for ``device``, best first, with the size of the optimizer's ring in blocks' states.

    A ring of three blocks lets the SSDs read states while a forward pass leaves them idle; two chunks are the minimum.
    """
    for blocks, gradients, ring in (
        (4, 2, 3.0),
        (4, 2, 2.0),
        (3, 2, 1.0),
        (3, 1, 0.5),
        (2, 1, 0.25),
        (1, 1, 0.0),
    ):
        yield replace(device, host_blocks=blocks, host_block_gradients=gradients), ring
