"""All buffers of a run, on host and device: allocated at once, by the memory plan, and given back at once."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from common.activity import activity
from common.memory import numa
from common.memory.buffers import HostBuffer
from common.memory.shortage import shortage_explained
from common.units import format_bytes
from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.record import Kind, Record
from fuyou.optimizer.absent_gradients import AbsenceMarks
from fuyou.optimizer.process.protocol import BufferRegion, SharedRegions
from fuyou.runtime.device import Device
from fuyou.schedule.memory_plan import MemoryPlan
from fuyou.schedule.tasks import Activation, Task

_TOUCHED_BYTES = 1 << 30  # Bytes after which a run that is closed stops taking memory


class DeviceBuffers:
    """Equal buffers on the device, as one allocation."""

    def __init__(self, device: Device, slot_bytes: int, count: int):
        self._slot_bytes = slot_bytes
        self._memory = device.allocate(max(1, slot_bytes * count))

    def bytes(self, index: int, nbytes: int) -> torch.Tensor:
        """Return ``uint8 [nbytes]`` at the start of buffer ``index``."""
        start = index * self._slot_bytes
        return self._memory[start : start + nbytes]

    def values(self, index: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``dtype [count]`` at the start of buffer ``index``."""
        return self.bytes(index, count * dtype.itemsize).view(dtype)


class Buffers:
    """Buffers of parameters, gradients and activations.

    Args:
        layout: the model's records.
        plan: how many buffers of which size.
        device: where blocks compute.
        shared_fd: memory file that the optimizer process has open, too; parameters and gradients of the host lie in it.
    """

    def __init__(self, layout: ModelLayout, plan: MemoryPlan, device: Device, shared_fd: int):
        self.layout = layout
        self.plan = plan
        self.device = device
        counts = plan.counts
        self.parameters = {
            kind: DeviceBuffers(device, layout.sizes[kind].device_nbytes, counts.device(kind))
            for kind in Kind
        }
        self.decoded = DeviceBuffers(device, layout.decoded_nbytes, 1)
        """Where a frozen record in fewer bits becomes what computes."""
        # fp32 sums of gradients that several micro-batches (or visits) contribute to
        self.wide = {
            kind: DeviceBuffers(device, layout.sizes[kind].trained_elements * 4, 1)
            for kind in Kind
            if plan.sums_wide(kind)
        }
        # Where there is but one gradient buffer, the sum is rounded in place: the next one waits for its download.
        self.gradients = {
            kind: self.wide[kind]
            if kind in self.wide and counts.device_gradients(kind) == 1
            else DeviceBuffers(
                device, layout.sizes[kind].device_gradient_nbytes, counts.device_gradients(kind)
            )
            for kind in Kind
        }
        self.activation_bytes = {Activation.HIDDEN: plan.activation_bytes, Activation.SAVED: plan.saved_bytes}
        """Bytes of each buffer of activations."""
        self.activations = {
            Activation.HIDDEN: DeviceBuffers(device, plan.activation_bytes, counts.device_activations),
            Activation.SAVED: DeviceBuffers(device, plan.saved_bytes, counts.device_saved),
        }
        self.key_gradients = DeviceBuffers(device, plan.key_gradient_bytes, 1)
        """Sums of the gradients of one row's keys and values, if rows pass in chunks."""
        # By index of the record, with a tensor on the device
        self._absence_marks: dict[int, AbsenceMarks] = {}
        self.shared = self._regions()  # Where host parameters and gradients lie in the shared memory file
        with shortage_explained(self.shared.nbytes):
            os.ftruncate(shared_fd, self.shared.nbytes)
            descriptor = os.dup(shared_fd)
        self.host = HostBuffer(self.shared.nbytes, fd=descriptor)
        self._host_activations = {
            Activation.HIDDEN: HostBuffer(plan.activation_bytes * counts.host_activations),
            Activation.SAVED: HostBuffer(plan.saved_bytes * counts.host_saved),
        }
        with numa.prefer(numa.node_of(device.torch_device)):
            for region in self.shared.regions():  # what a store is filled from
                self.host.touch(region.offset, region.slot_bytes * min(2, region.count))
        self._closing = False
        self._host_buffers = (self.host, *self._host_activations.values())
        self._touched_bytes = 0
        self._touching = ThreadPoolExecutor(1, "touch")
        self._touched = self._touching.submit(self._touch)

    def _touch(self) -> None:
        with numa.prefer(numa.node_of(self.device.torch_device)):
            for buffer in self._host_buffers:
                for start in range(0, buffer.nbytes, _TOUCHED_BYTES):
                    if self._closing:
                        return
                    buffer.touch(start, _TOUCHED_BYTES)
                    self._touched_bytes += min(_TOUCHED_BYTES, buffer.nbytes - start)

    def wait_until_touched(self) -> None:
        """Wait until the system has given all host memory, and page-lock it: before the first step.

        A store is filled meanwhile.

        Raises:
            FinetuneError: the system has no memory left.
        """
        total = sum(buffer.nbytes for buffer in self._host_buffers)
        with activity(f"taking {format_bytes(total)} of host memory") as doing:
            doing.share = lambda: self._touched_bytes / total
            self._touched.result()
        if self.device.page_locks:
            self.host.page_lock(self.shared.starts())
            for activation, buffer in self._host_activations.items():
                buffer.page_lock(range(0, buffer.nbytes, max(1, self.activation_bytes[activation])))

    def _regions(self) -> SharedRegions:
        counts = self.plan.counts
        layout = self.layout
        offset = 0
        regions: list[dict[Kind, BufferRegion]] = []
        for count, size in ((counts.host, "parameter_nbytes"), (counts.host_gradients, "gradient_nbytes")):
            region = {}
            for kind in Kind:
                region[kind] = BufferRegion(offset, getattr(layout.sizes[kind], size), count(kind))
                offset += region[kind].nbytes
            regions.append(region)
        return SharedRegions(offset, regions[0], regions[1])

    def host_parameters(self, kind: Kind, index: int, nbytes: int) -> np.ndarray:
        """Return ``uint8 [nbytes]`` of a host parameter buffer."""
        return self.host.bytes(self.shared.parameters[kind].start(index), nbytes)

    def host_gradients(self, kind: Kind, index: int, nbytes: int) -> np.ndarray:
        """Return ``uint8 [nbytes]`` of a host gradient buffer."""
        return self.host.bytes(self.shared.gradients[kind].start(index), nbytes)

    def host_activation(self, task: Task, index: int) -> np.ndarray:
        """Return the host buffer ``index`` of the activations that ``task`` moves, as many bytes as it moves."""
        start = index * self.activation_bytes[task.activation]
        return self._host_activations[task.activation].bytes(start, task.nbytes)

    def device_activation(self, task: Task, index: int) -> torch.Tensor:
        """Return the device buffer ``index`` of the activations that ``task`` moves, as many bytes as it moves."""
        return self.activations[task.activation].bytes(index, task.nbytes)

    def own_gradient(self, record: Record, index: int) -> torch.Tensor:
        """Return this rank's part, ``uint8``, of the device buffer ``index`` of the record's gradient."""
        start = record.share.owned_start(record.numel) * record.precision.gradient_bytes
        return self.gradients[record.kind].bytes(index, start + record.gradient_nbytes)[start:]

    def absence_marks(self, record: Record) -> AbsenceMarks:
        """Return what marks parameters without a gradient in a record's gradient on the device."""
        if record.index not in self._absence_marks:
            self._absence_marks[record.index] = AbsenceMarks(record, self.device.torch_device)
        return self._absence_marks[record.index]

    def close(self) -> None:
        """Give all memory back, once the device has come to rest."""
        self._closing = True
        self._touching.shutdown()
        try:
            self.device.synchronize()
        finally:  # a device that failed must not keep host memory registered
            for buffer in self._host_buffers:
                buffer.close()
            self.parameters = self.gradients = self.wide = {}
            for name in ("activations", "decoded", "key_gradients"):
                # Gone where an exception ended an earlier call
                vars(self).pop(name, None)
            self.device.release()
