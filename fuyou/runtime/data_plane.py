"""Where the bytes are and what moves them: buffers on host and device, stores, the optimizer process, the executor.

Everything is allocated here at once, by the memory plan, and given back at once. What each kind of task does to bytes
is one short method each; when it may do it, the schedule has said.
"""

import os
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch

from common.memory.buffers import HostBuffer
from common.memory.heap import Heap
from common.store import Extent, IoThrottle, Layout, Store, remove
from common.store.checksums import ExtentChecksums
from fuyou.layout.checksums import RecordSums, sealed_name
from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.record import Kind, Record, RecordExtents
from fuyou.optimizer.absent_gradients import MissedUpdates
from fuyou.optimizer.adam import Update
from fuyou.optimizer.client import OptimizerLink
from fuyou.optimizer.protocol import (
    BufferRegion,
    CreateRecord,
    ReadStates,
    Setup,
    SharedRegions,
    Updated,
    UpdateRecord,
    WriteRecord,
    Written,
)
from fuyou.ranks.topology import ClusterTopology
from fuyou.runtime.devices import Device, optimizer_threads
from fuyou.runtime.executor import ELSEWHERE, Executor, Handler
from fuyou.runtime.rank_handlers import RankHandlers
from fuyou.runtime.trace import RecordInterval
from fuyou.schedule.memory_plan import HEAP_SLACK_BYTES, MemoryPlan
from fuyou.schedule.tasks import Activation, Op, Task


class DeviceBuffers:
    """Equal buffers on the device, as one allocation."""

    def __init__(self, device: Device, slot_bytes: int, count: int):
        self._slot_bytes = slot_bytes
        self._memory = device.allocate(max(1, slot_bytes * count))

    def bytes(self, index: int, nbytes: int) -> torch.Tensor:
        """``uint8 [nbytes]`` at the start of buffer ``index``."""
        start = index * self._slot_bytes
        return self._memory[start : start + nbytes]

    def values(self, index: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """``dtype [count]`` at the start of buffer ``index``."""
        return self.bytes(index, count * dtype.itemsize).view(dtype)


class DataPlane:
    """All buffers of a run, and the handlers of all tasks but the computation.

    Args:
        shape: the model's records.
        plan: how many buffers of which size.
        device: where blocks compute.
        store: the training store, open.
        extents: each record's place in it.
        slots: how many slots the store has.
        link: the optimizer process, up but not set up.
        scratch: one directory per SSD for what does not outlive the run: activations and waiting gradients.
        commit: called with a COMMIT task when everything of its step is written.
        update_of: what the update of a step is, asked for when it starts.
        spill_gradients: whether gradients may have to wait on SSD.
        resident: records whose states stay in host memory.
        throttle: makes the drives look slower.
        locks: descriptors that the optimizer process holds as well.
        sums: told of everything that is written, asked about what is read.
        missed: told which parameters an update has left alone, asked which earlier ones have.
        topology: the other ranks, if there are any.
    """

    def __init__(
        self,
        shape: ModelLayout,
        plan: MemoryPlan,
        device: Device,
        store: Store,
        extents: Sequence[RecordExtents],
        slots: int,
        link: OptimizerLink,
        scratch: Sequence[Path],
        commit: Callable[[Task], None],
        update_of: Callable[[int], Update],
        spill_gradients: bool,
        resident: Collection[int] = (),
        throttle: IoThrottle | None = None,
        locks: Sequence[int] = (),
        sums: RecordSums | None = None,
        missed: MissedUpdates | None = None,
        topology: ClusterTopology | None = None,
    ):
        self._sums = RecordSums(shape.records, extents) if sums is None else sums
        self._missed = MissedUpdates(shape.records, {}) if missed is None else missed
        self.shape, self.plan, self.device, self.store = shape, plan, device, store
        self._extents, self._link, self._update_of = extents, link, update_of
        self._scratch_directories, self._throttle = list(scratch), throttle
        counts = plan.counts
        self.parameters = {kind: DeviceBuffers(device, shape.device_nbytes(kind), counts.device(kind)) for kind in Kind}
        #: Where a frozen record in fewer bits becomes what computes.
        self.decoded = DeviceBuffers(device, shape.decoded_nbytes, 1)
        #: fp32 sums of gradients that several micro-batches (or visits) contribute to.
        self.wide = {
            kind: DeviceBuffers(device, shape.trained_elements(kind) * 4, 1)
            for kind, wanted in ((Kind.BLOCK, plan.wide_blocks), (Kind.OUTER, plan.wide_outer))
            if wanted
        }
        # Where there is but one gradient buffer, the sum is rounded in place: the next one waits for its download.
        self.gradients = {
            kind: self.wide[kind]
            if kind in self.wide and counts.device_gradients(kind) == 1
            else DeviceBuffers(device, shape.device_gradient_nbytes(kind), counts.device_gradients(kind))
            for kind in Kind
        }
        self._activation_bytes = {
            Activation.HIDDEN: plan.activation_bytes, Activation.KEPT: plan.kept_bytes,
        }  # fmt: skip
        self.activations = {
            Activation.HIDDEN: DeviceBuffers(device, plan.activation_bytes, counts.device_activations),
            Activation.KEPT: DeviceBuffers(device, plan.kept_bytes, counts.device_kept),
        }
        self.shared = self._regions()
        assert link.shared_fd is not None
        os.ftruncate(link.shared_fd, self.shared.nbytes)
        self.host = HostBuffer(self.shared.nbytes, fd=os.dup(link.shared_fd)).touch()
        self._host_activations = {
            Activation.HIDDEN: HostBuffer(plan.activation_bytes * counts.host_activations).touch(),
            Activation.KEPT: HostBuffer(plan.kept_bytes * counts.host_kept).touch(),
        }
        if device.page_locks:
            self.host.page_lock()
            for buffer in self._host_activations.values():
                buffer.page_lock()
        self._scratch, self._activation_extents, self._gradient_extents = self._make_scratch(spill_gradients)
        self.heap = Heap(HEAP_SLACK_BYTES + plan.workspace_bytes * device.shares_host_memory)
        self._lock = threading.Lock()
        self._updating: dict[int, Task] = {}
        self._writing: dict[int, Task] = {}
        self._early: set[int] = set()
        self._created: dict[int, threading.Event] = {}
        self.optimizer_read_bytes = self.optimizer_written_bytes = 0
        self._ssd_intervals: list[RecordInterval] = []
        self._adam_intervals: list[RecordInterval] = []
        self.ranks = RankHandlers(self, topology) if topology is not None else None
        self.executor = Executor(self._handlers(commit), device.wait_event)
        setup = Setup(
            directories=[str(path) for path in store.directories],
            io="posix",
            io_threads=4,
            records=[record.to_dict() for record in shape.records],
            slots=slots,
            chunk_elements=plan.chunk_elements,
            ring_chunks=plan.ring_chunks,
            shared=self.shared,
            share=shape.share,
            resident=sorted(resident),
            throttle=throttle,
            threads=max(1, optimizer_threads(device) // shape.share.ranks_per_node),
        )
        try:
            link.set_up(setup, self._heard, self.executor.fail, locks)
        except BaseException:
            self.close()  # nobody else has this object yet, and its files are on the drives
            raise

    def _handlers(self, commit: Callable[[Task], None]) -> dict[Op, Handler]:
        """Who does which tasks."""
        return {
            **(self.ranks.handlers() if self.ranks is not None else {}),
            Op.PARAMETER_READ: self._parameter_read,
            Op.PARAMETER_UPLOAD: self._parameter_upload,
            Op.GRADIENT_DOWNLOAD: self._gradient_download,
            Op.GRADIENT_WRITE: self._gradient_write,
            Op.GRADIENT_READ: self._gradient_read,
            Op.STATE_READ: self._state_read,
            Op.UPDATE: self._update,
            Op.STATE_WRITE: self._state_write,
            Op.RESIDENT_WRITE: self._resident_write,
            Op.PARAMETER_WRITE: self._parameter_write,
            Op.ACTIVATION_DOWNLOAD: self._activation_download,
            Op.ACTIVATION_WRITE: self._activation_write,
            Op.ACTIVATION_READ: self._activation_read,
            Op.ACTIVATION_UPLOAD: self._activation_upload,
            Op.COMMIT: commit,
        }

    # -- buffers --------------------------------------------------------------------------------------------------

    def _regions(self) -> SharedRegions:
        counts, shape, offset = self.plan.counts, self.shape, 0
        regions: list[dict[Kind, BufferRegion]] = []
        for count, nbytes in (
            (counts.host, shape.parameter_nbytes), (counts.host_gradients, shape.gradient_nbytes),
        ):  # fmt: skip
            region = {}
            for kind in Kind:
                region[kind] = BufferRegion(offset, nbytes(kind), count(kind))
                offset += region[kind].nbytes
            regions.append(region)
        return SharedRegions(offset, regions[0], regions[1])

    def _make_scratch(
        self, spill_gradients: bool
    ) -> tuple[Store | None, dict[Activation, list[Extent]], dict[int, Extent]]:
        layout, counts = Layout(len(self._scratch_directories)), self.plan.counts
        activations = {
            kind: [layout.allocate("activations", self._activation_bytes[kind]) for _ in range(count)]
            for kind, count in ((Activation.HIDDEN, counts.ssd_activations), (Activation.KEPT, counts.ssd_kept))
        }
        gradients: dict[int, Extent] = {}
        if spill_gradients:
            gradients = {
                index: layout.allocate("gradients", self.shape.records[index].gradient_nbytes)
                for index in self.shape.trainable
            }
        if not any(activations.values()) and not gradients:
            return None, activations, gradients
        for path in self._scratch_directories:
            path.mkdir(exist_ok=True)
        scratch = Store.create(
            self._scratch_directories,
            layout,
            io="posix",
            overwrite=True,
            throttle=self._throttle,
            clocks=self.store.directories,
        )
        return scratch, activations, gradients

    def host_parameters(self, kind: Kind, index: int, nbytes: int) -> np.ndarray:
        """``uint8 [nbytes]`` of a host parameter buffer."""
        return self.host.bytes(self.shared.parameters[kind].start(index), nbytes)

    def host_gradients(self, kind: Kind, index: int, nbytes: int) -> np.ndarray:
        """``uint8 [nbytes]`` of a host gradient buffer."""
        return self.host.bytes(self.shared.gradients[kind].start(index), nbytes)

    def _host_activation(self, task: Task, index: int) -> np.ndarray:
        start = index * self._activation_bytes[task.activation]
        return self._host_activations[task.activation].bytes(start, task.nbytes)

    def io_bytes(self) -> tuple[int, int]:
        """Bytes read and written so far by the optimizer process and in the scratch store; ends with this object."""
        scratch = (self._scratch.bytes_read, self._scratch.bytes_written) if self._scratch is not None else (0, 0)
        return self.optimizer_read_bytes + scratch[0], self.optimizer_written_bytes + scratch[1]

    def create(self, record: Record, target: int) -> None:
        """Write a record's first state, of which ``hi`` and ``lo`` are in host buffers 0; blocks until written."""
        if not record.trainable:
            values = self.host_parameters(record.kind, 0, record.parameter_nbytes)
            self._write_parameters(record, 0, values).result()
            return
        event = self._created[record.index] = threading.Event()
        self._link.send(CreateRecord(record.index, 0, 0, target))
        while not event.wait(0.2):
            if self.executor.failure is not None:
                raise self.executor.failure
        if record.share.nodes > 1:
            nbytes = self._extents[record.index].parameters[target].nbytes
            self._write_parameters(record, target, self.host_parameters(record.kind, 0, nbytes)).result()

    def _write_parameters(self, record: Record, slot: int, values: np.ndarray) -> Future:
        """Write what the optimizer process does not: all of a record's parameters, or all that this rank stores."""
        place = self._extents[record.index].parameters[slot]
        sums = ExtentChecksums(place, self.store.directories, sealed_name(record, "parameters"))
        noted: Future[None] = Future()

        def note(done: Future) -> None:
            try:
                done.result()
                self._sums.written(record.index, slot, sums.values)
            except BaseException as error:
                noted.set_exception(error)
            else:
                noted.set_result(None)

        self.store.write(place, values, sums=sums).add_done_callback(note)
        return noted  # and not the write's own, which is done before the checksum is known to a commit

    def close(self) -> None:
        """Stop all workers, give all memory back, remove the scratch files."""
        self.executor.close()
        self._link.close()
        if self._scratch is not None:
            self._scratch.close()
            remove(self._scratch_directories)
            for path in self._scratch_directories:
                path.rmdir()
        try:
            self.device.synchronize()
        finally:  # a device that failed must not keep host memory registered
            self.host.close()
            for buffer in self._host_activations.values():
                buffer.close()
            self.parameters = self.gradients = self.wide = {}
            del self.activations, self.decoded
            self.device.release()

    # -- what each kind of task does ------------------------------------------------------------------------------

    def _parameter_read(self, task: Task) -> Future:
        record = self.shape.records[task.record]
        buffer = self.host_parameters(record.kind, task.target, task.nbytes)
        place, sums = self._extents[task.record].parameters[task.source], None
        expected = self._sums.expected(task.record, "parameters", task.source, task.step)
        if expected is not None:
            sums = ExtentChecksums(place, self.store.directories, sealed_name(record, "parameters"), expected)
        return self.store.read(place, buffer, sums=sums)

    def _parameter_upload(self, task: Task) -> None:
        record = self.shape.records[task.record]
        source = torch.from_numpy(self.host_parameters(record.kind, task.source, task.nbytes))
        target = self.parameters[record.kind].bytes(task.target, record.first_byte + task.nbytes)[record.first_byte :]
        self.device.copy(task, target, source)

    def _gradient_download(self, task: Task) -> None:
        record = self.shape.records[task.record]
        target = torch.from_numpy(self.host_gradients(record.kind, task.target, task.nbytes))
        start = record.share.owned_start(record.numel) * record.precision.gradient_bytes
        source = self.gradients[record.kind].bytes(task.source, start + task.nbytes)[start:]
        self.device.copy(task, target, source)

    def _gradient_write(self, task: Task) -> Future:
        assert self._scratch is not None
        buffer = self.host_gradients(self.shape.records[task.record].kind, task.source, task.nbytes)
        return self._scratch.write(self._gradient_extents[task.record], buffer)

    def _gradient_read(self, task: Task) -> Future:
        assert self._scratch is not None
        buffer = self.host_gradients(self.shape.records[task.record].kind, task.target, task.nbytes)
        return self._scratch.read(self._gradient_extents[task.record], buffer)

    def _state_read(self, task: Task) -> None:
        expected = self._sums.expected(task.record, "states", task.source, task.step)
        self._link.send(ReadStates(task.record, task.source, expected, there=not task.nbytes))

    def _update(self, task: Task) -> object:
        with self._lock:
            self._updating[task.record] = task
        update, missed = self._update_of(task.step), self._missed.before(task.record, task.step)
        self._link.send(UpdateRecord(task.record, task.source, task.gradient, task.target, update, missed))
        return ELSEWHERE

    def _state_write(self, task: Task) -> object | None:
        with self._lock:
            if task.record in self._early:
                self._early.remove(task.record)
                return None
            self._writing[task.record] = task
        return ELSEWHERE

    def _resident_write(self, task: Task) -> object:
        with self._lock:
            self._writing[task.record] = task
        self._link.send(WriteRecord(task.record, task.source, task.target))
        return ELSEWHERE

    def _parameter_write(self, task: Task) -> Future:
        record = self.shape.records[task.record]
        return self._write_parameters(record, task.target, self.host_parameters(record.kind, task.source, task.nbytes))

    def _activation_download(self, task: Task) -> None:
        target = torch.from_numpy(self._host_activation(task, task.target))
        self.device.copy(task, target, self.activations[task.activation].bytes(task.source, task.nbytes))

    def _activation_upload(self, task: Task) -> None:
        source = torch.from_numpy(self._host_activation(task, task.source))
        self.device.copy(task, self.activations[task.activation].bytes(task.target, task.nbytes), source)

    def _activation_write(self, task: Task) -> Future:
        assert self._scratch is not None
        place = self._activation_extents[task.activation][task.target]
        return self._scratch.write(place, self._host_activation(task, task.source), 0, task.nbytes)

    def _activation_read(self, task: Task) -> Future:
        assert self._scratch is not None
        place = self._activation_extents[task.activation][task.source]
        return self._scratch.read(place, self._host_activation(task, task.target), 0, task.nbytes)

    def _heard(self, message: object) -> None:
        """A message of the optimizer process, in the link's thread."""
        if isinstance(message, Updated):
            self._missed.updated(message.record, message.absent)
            with self._lock:
                task = self._updating.pop(message.record)
                self._adam_intervals += [RecordInterval(message.record, *one) for one in message.adam_intervals]
            self.executor.finish(task, message.began)
        elif isinstance(message, Written):
            self._sums.written(message.record, message.slot, message.parameters, message.states)
            self.optimizer_read_bytes, self.optimizer_written_bytes = message.read_bytes, message.written_bytes
            created = self._created.pop(message.record, None)
            if created is not None:
                created.set()
                return
            with self._lock:
                self._ssd_intervals += [RecordInterval(message.record, *one) for one in message.ssd_intervals]
                write = self._writing.pop(message.record, None)
                if write is None:
                    self._early.add(message.record)
            if write is not None:
                self.executor.finish(write)

    def take_ssd_intervals(self) -> list[RecordInterval]:
        """When the optimizer process had I/O under way, since the last call."""
        with self._lock:
            taken, self._ssd_intervals = self._ssd_intervals, []
        return taken

    def take_adam_intervals(self) -> list[RecordInterval]:
        """When it was computing, since the last call."""
        with self._lock:
            taken, self._adam_intervals = self._adam_intervals, []
        return taken
