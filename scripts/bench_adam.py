"""Claim: the optimizer process keeps up with memory and with the drives.

In memory: AdamW on split weights (14 bytes read and 12 written per parameter), chunk by chunk as the optimizer process
does it, against ``torch._fused_adamw_`` on whole fp32 tensors and against a copy that moves as many bytes. From SSD:
states read, updated and written back through the real optimizer process, against the same reads and writes without any
Adam. All contenders alternate within each round, on the same threads.

    python scripts/bench_adam.py --ssd DIR --parameters 64M --threads 1 --threads 2 --rounds 5
"""

import contextlib
import os
import queue
import signal
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import click
import torch

from common.hardware.machine import describe_machine
from common.memory.buffers import HostBuffer, round_up
from common.store import Extent, Layout, Store
from common.units import format_count, parse_bytes
from fuyou.layout.record import PAGE_ELEMENTS, Kind, Precision, Record, RecordExtents, allocate_extents
from fuyou.optimizer.adam import AdamConfig, Update
from fuyou.optimizer.chunk_update import ChunkOptimizer
from fuyou.optimizer.kernels import Kernels, optimizer_library
from fuyou.optimizer.moments import OptimizerStates
from fuyou.optimizer.process.client import OptimizerLink
from fuyou.optimizer.process.protocol import (
    BufferRegion,
    CreateRecord,
    ReadStates,
    Setup,
    SharedRegions,
    Updated,
    UpdateRecord,
    Written,
)
from fuyou.schedule.memory_plan import SMALLEST_CHUNK

PRECISION = Precision(torch.bfloat16, torch.float32)
STATE_BYTES = int(PRECISION.state_bytes)
COPIED_BYTES = 13
"""Bytes per parameter that a copy moves in each direction, so that it moves as many as an update: 14 in and 12 out."""
PARAMETER_BUFFERS, GRADIENT_BUFFERS = 4, 2


def in_memory(parameters: int, threads: int, chunk_elements: int) -> dict[str, Callable[[], object]]:
    """Return, by name, what updates or moves everything once, on arrays on huge pages."""
    torch.set_num_threads(threads)

    def array(dtype: torch.dtype, shared: bool = False) -> torch.Tensor:
        return HostBuffer(parameters * dtype.itemsize, shared=shared).touch().tensor(dtype, 0, parameters)

    library = optimizer_library()  # not as it was tried: that is for another number of threads
    step, update = torch.ones(()), Update(1, AdamConfig())
    hi = array(torch.bfloat16, shared=True).normal_(std=0.02)  # what the engine shares with the process is shared here
    gradient = array(torch.bfloat16, shared=True).normal_(std=1e-3)
    lo = array(torch.int16).zero_()
    mean, variance = array(torch.float32).zero_(), array(torch.float32).zero_()
    master, wide = array(torch.float32).copy_(hi), array(torch.float32)
    source, target = (HostBuffer(COPIED_BYTES * parameters).touch() for _ in range(2))

    def split_weights(optimizer: ChunkOptimizer) -> None:
        for start in range(0, parameters, chunk_elements):
            part = slice(start, start + chunk_elements)
            states = OptimizerStates(hi, lo, (mean, variance)).part(part)
            optimizer.update(states, gradient[part], update, decay=True)

    def fused() -> None:
        adam = update.adam
        wide.copy_(gradient)
        torch._fused_adamw_(
            [master], [wide], [mean], [variance], [], [step], amsgrad=False, lr=adam.lr, beta1=adam.betas[0],
            beta2=adam.betas[1], weight_decay=adam.weight_decay, eps=adam.eps, maximize=False,
        )  # fmt: skip

    compiled, plain = ChunkOptimizer(kernels=None if library is None else Kernels(library)), ChunkOptimizer()
    return {
        "AdamW on split weights": lambda: split_weights(compiled),
        "AdamW on split weights, without a compiler": lambda: split_weights(plain),
        "fused AdamW, bf16 gradient": fused,
        "copy": lambda: torch.from_numpy(target.array).copy_(torch.from_numpy(source.array)),
    }


class FromSsd:
    """A store of records and an optimizer process that works on it, driven as the engine drives it.

    Args:
        directories: empty ones, one per drive.
        parameters: in all records.
        record_elements: parameters of a record (a block of a model).
        threads: of the optimizer process.
        chunk_elements, ring_chunks: see ``Setup``.
    """

    def __init__(
        self,
        directories: list[Path],
        parameters: int,
        record_elements: int,
        threads: int,
        chunk_elements: int,
        ring_chunks: int,
    ):
        shape = (record_elements // PAGE_ELEMENTS, PAGE_ELEMENTS)
        count = max(2, round(parameters / (shape[0] * shape[1])))
        self.records = [
            Record.build(i, f"block {i}", Kind.BLOCK, PRECISION, [((f"{i}.weight",), shape, True)])
            for i in range(count)
        ]
        self.parameters = sum(record.numel for record in self.records)
        self._chunk_elements, self._steps = chunk_elements, 0
        self._messages: queue.SimpleQueue[object] = queue.SimpleQueue()
        layout = Layout(len(directories))
        self._extents = allocate_extents(layout, self.records, 2)
        self._store = Store.create(directories, layout, io="posix")
        largest = 2 * self.records[0].numel
        regions = SharedRegions(
            (PARAMETER_BUFFERS + GRADIENT_BUFFERS) * largest,
            {Kind.BLOCK: BufferRegion(0, largest, PARAMETER_BUFFERS)},
            {Kind.BLOCK: BufferRegion(PARAMETER_BUFFERS * largest, largest, GRADIENT_BUFFERS)},
        )
        self._link = OptimizerLink()
        self._link.wait_until_up()
        assert self._link.shared_fd is not None
        os.ftruncate(self._link.shared_fd, regions.nbytes)
        self._shared = HostBuffer(regions.nbytes, fd=os.dup(self._link.shared_fd)).touch()
        # For the bound: of the same kind and number as those of the optimizer process.
        self._buffers = [HostBuffer(chunk_elements * 12).touch() for _ in range(ring_chunks)]
        setup = Setup(
            directories=[str(path) for path in directories], io="posix", io_threads=4, records=self.records, slots=2,
            chunk_elements=chunk_elements, ring_chunks=ring_chunks, shared=regions, threads=threads,
        )  # fmt: skip
        self._link.set_up(setup, self._messages.put, self._messages.put)
        for index in range(PARAMETER_BUFFERS + GRADIENT_BUFFERS):
            self._shared.tensor(torch.bfloat16, index * largest, largest // 2).normal_(std=1e-2)
        for target in (0, 1):  # both: first writes into a fresh file are slower
            for record in self.records:
                self._link.send(CreateRecord(record.index, 0, 0, target))
                self._next_message()

    def update(self, steps: int) -> None:
        """Update everything ``steps`` times; return when all is written.

        States are announced as soon as their last write is done, and gradients are there as soon as their buffers are
        free: drives and Adam are all that there is to wait for.
        """
        count, total = len(self.records), steps * len(self.records)
        announced = sent = updated = 0
        written = [0] * count  # times, by record

        def is_written(number: int) -> bool:
            return number < 0 or written[number % count] > number // count

        while not all(times == steps for times in written):
            while announced < total and is_written(announced - count):
                self._link.send(ReadStates(announced % count, (self._steps + announced // count) % 2))
                announced += 1
            while sent < min(announced, updated + GRADIENT_BUFFERS) and is_written(sent - PARAMETER_BUFFERS):
                step = self._steps + sent // count
                buffers = sent % PARAMETER_BUFFERS, sent % GRADIENT_BUFFERS
                update = Update(step + 1, AdamConfig())
                self._link.send(UpdateRecord(sent % count, *buffers, (step + 1) % 2, update))
                sent += 1
            message = self._next_message()
            if isinstance(message, Updated):
                updated += 1
            else:
                written[message.record] += 1
        self._steps += steps

    def bound(self, steps: int) -> None:
        """Do the same reads and the same writes without any Adam, on two threads with half of the buffers each."""

        def read(extents: RecordExtents, slot: int, buffer: HostBuffer, start: int, stop: int) -> list[Future]:
            return [_move(self._store.read, extents.states[slot], buffer, start, stop, STATE_BYTES)]

        def write(extents: RecordExtents, slot: int, buffer: HostBuffer, start: int, stop: int) -> list[Future]:
            return [
                _move(self._store.write, extents.states[1 - slot], buffer, start, stop, STATE_BYTES),
                _move(self._store.write, extents.parameters[1 - slot], buffer, start, stop, 2),
            ]

        def stream(submit: Callable[..., list[Future]], buffers: list[HostBuffer]) -> None:
            ahead: deque[list[Future]] = deque()
            for number, (slot, record, start, stop) in enumerate(self._chunks(steps)):
                for future in ahead.popleft() if len(ahead) == len(buffers) else ():
                    future.result()
                ahead.append(submit(self._extents[record], slot, buffers[number % len(buffers)], start, stop))
            for future in (future for futures in ahead for future in futures):
                future.result()

        half = max(1, len(self._buffers) // 2)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(stream, (read, write), (self._buffers[:half], self._buffers[-half:])))

    def _chunks(self, steps: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield slot, record, first and last element of every chunk of every step."""
        for step in range(self._steps, self._steps + steps):
            for record in self.records:
                for chunk in record.chunks(self._chunk_elements):
                    yield step % 2, record.index, chunk.start, chunk.stop

    def _next_message(self) -> Updated | Written:
        message = self._messages.get()
        if isinstance(message, BaseException):
            raise message
        assert isinstance(message, Updated | Written)
        return message

    def close(self) -> None:
        """End the process and close the store; the files are the caller's."""
        self._link.close()
        self._store.close()
        self._shared.close()


def _move(
    function: Callable[..., Future], extent: Extent, buffer: HostBuffer, start: int, stop: int, width: int
) -> Future:
    """Read or write a range of elements of ``width`` bytes."""
    return function(extent, buffer.bytes(0, (stop - start) * width), start * width, (stop - start) * width)


def compare(rounds: int, contenders: dict[str, Callable[[], object]], parameters: int, title: str) -> None:
    """Run each contender once per round after one round that does not count; print rates and ratios to the first."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            began = time.monotonic()
            run()
            if number:
                seconds[name].append(time.monotonic() - began)
    ours = next(iter(seconds.values()))
    print(f"\n{title}\n  {'':44} M parameters/s   ratio (lowest to highest)")
    for name, measured in seconds.items():
        ratios = [theirs / mine for mine, theirs in zip(ours, measured, strict=True)]
        ratio = "" if measured is ours else f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"  {name:44} {parameters / statistics.median(measured) / 1e6:14.0f}   {ratio}".rstrip(), flush=True)


@click.command()
@click.option("--ssd", multiple=True, type=click.Path(exists=True, file_okay=False), help="Once per drive.")
@click.option("--parameters", default="64M", help="Of each measurement.")
@click.option("--threads", multiple=True, type=click.IntRange(min=1), default=(1,))
@click.option("--rounds", default=5, type=click.IntRange(min=1))
@click.option("--steps", default=3, type=click.IntRange(min=1), help="Steps of a round from SSD.")
@click.option("--record", default="16M", help="Parameters of one record, such as a block.")
@click.option("--chunk", default=SMALLEST_CHUNK, help="Parameters read, updated and written at once.")
@click.option("--ring", default=16, type=click.IntRange(min=2), help="State buffers of the optimizer process.")
def main(
    ssd: tuple[str, ...],
    parameters: str,
    threads: tuple[int, ...],
    rounds: int,
    steps: int,
    record: str,
    chunk: int,
    ring: int,
) -> None:
    """Measure the optimizer's rate in memory and from SSD, and what could be reached at best."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # or temporary files would stay
    count, block, chunk = (round_up(n, PAGE_ELEMENTS) for n in (parse_bytes(parameters), parse_bytes(record), chunk))
    print(f"{describe_machine()}; torch {torch.__version__}")
    for number in threads:
        many = f"{number} thread{'s' if number > 1 else ''}"
        compare(rounds, in_memory(count, number, chunk), count, f"In memory, {format_count(count)} parameters, {many}")
        with contextlib.ExitStack() as stack:
            directories = [
                Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-adam-", dir=path)))
                for path in ssd or [tempfile.gettempdir()]
            ]
            drives = FromSsd(directories, count, block, number, chunk, ring)
            stack.callback(drives.close)
            contenders: dict[str, Callable[[], object]] = {
                "optimizer process": lambda drives=drives: drives.update(steps),  # type: ignore[misc]
                "same reads and writes, no Adam": lambda drives=drives: drives.bound(steps),  # type: ignore[misc]
            }
            title = f"From SSD, {steps} steps of {format_count(drives.parameters)} parameters, {many}"
            compare(rounds, contenders, steps * drives.parameters, title)


if __name__ == "__main__":
    main()
