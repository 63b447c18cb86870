"""Device memory of an engine that holds NaN as soon as the schedule has given it up."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from unittest import mock

import fuyou
from fuyou.layout.record import Kind
from fuyou.schedule.tasks import ComputeTask, Op, Task, known

Place = tuple[Kind, int]
"""A buffer of parameters on the device."""
NAN_BYTE = 0xFF
"""Bytes of which bf16 and fp32 are NaN."""


@contextmanager
def evicted_is_nan(engine: fuyou.Engine) -> Iterator[list[Place]]:
    """Overwrite each buffer of parameters on the device when the last computation has used what is in it, and the
    buffer of what is decoded after each visit; yields the buffers, in the order in which they were overwritten.

    Until something else is uploaded to it, a buffer would hold the right values for the one that still reads them.
    """
    plane = engine._run.runtime.plane
    users: dict[Place, Task] = {}
    """What has used each buffer last, of the tasks that are submitted."""
    leaves: dict[Task, list[Place]] = {}
    """Buffers that are given up when a task ends."""
    overwritten: list[Place] = []

    def overwrite(place: Place) -> None:
        kind, index = place
        plane.buffers.parameters[kind].bytes(index, plane.buffers.layout.sizes[kind].device_nbytes).fill_(
            NAN_BYTE
        )
        overwritten.append(place)

    def submit(
        tasks: Iterable[Task], submit: Callable[[Iterable[Task]], None] = plane.executor.submit
    ) -> None:
        listed = list(tasks)
        records = plane.buffers.layout.records
        for task in listed:
            if isinstance(task, ComputeTask):
                users.update({(records[index].kind, buffer): task for index, buffer in task.places.items()})
            elif task.op in (Op.PARAMETER_UPLOAD, Op.PARAMETER_READ_DEVICE):
                place = records[known(task.record)].kind, known(task.target)
                before, users[place] = users.get(place), task
                if isinstance(before, ComputeTask) and before.done:
                    overwrite(place)
                elif isinstance(before, ComputeTask):
                    leaves.setdefault(before, []).append(place)
        submit(listed)

    def end_compute(task: Task, end: Callable[[Task], None] = plane.buffers.device.end_compute) -> None:
        end(task)
        for place in leaves.pop(task, ()):
            overwrite(place)
        if isinstance(task, ComputeTask) and task.last and plane.buffers.layout.decoded_nbytes:
            plane.buffers.decoded.bytes(0, plane.buffers.layout.decoded_nbytes).fill_(NAN_BYTE)

    with (
        mock.patch.object(plane.executor, "submit", submit),
        mock.patch.object(plane.buffers.device, "end_compute", end_compute),
    ):
        yield overwritten
