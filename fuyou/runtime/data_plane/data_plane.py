"""Where the bytes of a run are and what moves them: buffers, stores, the optimizer process, and the executor of tasks.

What each kind of task does to bytes is one short method each; when it may do it, the schedule has said.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future

import torch

from common.memory.meter import Heap
from fuyou.layout.record import Record
from fuyou.runtime.data_plane.buffers import Buffers
from fuyou.runtime.data_plane.optimizer_handlers import OptimizerHandlers
from fuyou.runtime.data_plane.stored_records import Scratch, StoredRecords
from fuyou.runtime.executor import Executor, Handler
from fuyou.schedule.memory_plan import HEAP_SLACK_BYTES
from fuyou.schedule.tasks import Op, Task, known


class DataPlane:
    """Runs all tasks of a run but the computation, and owns what they work on.

    Args:
        scratch: files for what finds no room in host memory.
        handlers: what does all other kinds of task: commits, and exchanges between ranks.
    """

    def __init__(
        self,
        buffers: Buffers,
        stored: StoredRecords,
        optimizer: OptimizerHandlers,
        scratch: Scratch,
        handlers: Mapping[Op, Handler],
    ):
        self.buffers = buffers
        self.stored = stored
        self.optimizer = optimizer
        self._scratch = scratch
        device = buffers.device
        self.heap = Heap(HEAP_SLACK_BYTES + buffers.plan.workspace_bytes * device.shares_host_memory)
        every_handler = {
            **handlers,
            **optimizer.handlers(),
            **scratch.handlers(),
            Op.PARAMETER_READ: self._parameter_read,
            Op.PARAMETER_READ_DEVICE: self._parameter_read_device,
            Op.PARAMETER_UPLOAD: self._parameter_upload,
            Op.PARAMETER_WRITE: self._parameter_write,
            Op.GRADIENT_DOWNLOAD: self._gradient_download,
            Op.ACTIVATION_DOWNLOAD: self._activation_download,
            Op.ACTIVATION_UPLOAD: self._activation_upload,
        }
        self.executor = Executor(every_handler, device.wait_event, device.in_one_order)
        try:
            optimizer.start(self.executor, buffers)
        except BaseException:
            self.close()  # nobody else has this object yet, and its files are on the drives
            raise

    def io_bytes(self) -> tuple[int, int]:
        """Return the bytes read and written so far by the optimizer process and in the scratch files."""
        read, written = self._scratch.io_bytes()
        return self.optimizer.read_bytes + read, self.optimizer.written_bytes + written

    def create(self, record: Record, target: int, buffer: int) -> Callable[[], None]:
        """Write a record's first state, whose split master weights are in host buffers number ``buffer``.

        Returns:
            What waits until it is written, and these buffers are free again.
        """
        waits: list[Callable[[], object]] = []
        if record.trainable:
            waits.append(self.optimizer.create(record, target, buffer))
        if not record.trainable or record.share.nodes > 1:
            slot = target if record.trainable else 0
            nbytes = self.stored.extents[record.index].parameters[slot].nbytes
            values = self.buffers.host_parameters(record.kind, buffer, nbytes)
            waits.append(self.stored.write_parameters(record, slot, values).result)

        def wait() -> None:
            for each in waits:
                each()

        return wait

    def close(self) -> None:
        """Stop all workers, give all memory back, remove the scratch files."""
        self.executor.close()
        self.optimizer.close()
        self._scratch.close()
        self.buffers.close()

    # -- what each kind of task does ------------------------------------------------------------------------------

    def _parameter_read(self, task: Task) -> Future:
        record = self._record(task)
        buffer = self.buffers.host_parameters(record.kind, known(task.target), task.nbytes)
        return self.stored.read_parameters(record, known(task.source), buffer)

    def _parameter_read_device(self, task: Task) -> Future:
        buffer = self.buffers.device.read_buffer(task, self._device_parameters(task))
        return self.stored.read_parameters(self._record(task), known(task.source), buffer)

    def _parameter_upload(self, task: Task) -> None:
        record = self._record(task)
        source = torch.from_numpy(self.buffers.host_parameters(record.kind, known(task.source), task.nbytes))
        self.buffers.device.copy(task, self._device_parameters(task), source)

    def _parameter_write(self, task: Task) -> Future:
        record = self._record(task)
        values = self.buffers.host_parameters(record.kind, known(task.source), task.nbytes)
        return self.stored.write_parameters(record, known(task.target), values)

    def _gradient_download(self, task: Task) -> None:
        record = self._record(task)
        target = torch.from_numpy(self.buffers.host_gradients(record.kind, known(task.target), task.nbytes))
        self.buffers.device.copy(task, target, self.buffers.own_gradient(record, known(task.source)))

    def _activation_download(self, task: Task) -> None:
        target = torch.from_numpy(self.buffers.host_activation(task, known(task.target)))
        self.buffers.device.copy(task, target, self.buffers.device_activation(task, known(task.source)))

    def _activation_upload(self, task: Task) -> None:
        source = torch.from_numpy(self.buffers.host_activation(task, known(task.source)))
        self.buffers.device.copy(task, self.buffers.device_activation(task, known(task.target)), source)

    def _device_parameters(self, task: Task) -> torch.Tensor:
        """Return this rank's part, ``uint8 [nbytes]``, of the device buffer that a task fills."""
        record = self._record(task)
        whole = self.buffers.parameters[record.kind].bytes(
            known(task.target), record.first_byte + task.nbytes
        )
        return whole[record.first_byte :]

    def _record(self, task: Task) -> Record:
        return self.buffers.layout.records[known(task.record)]
