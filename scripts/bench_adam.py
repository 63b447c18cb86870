"""Claim: the optimizer process keeps up with memory and with the drives.

In memory: AdamW on split weights (14 bytes read and 12 written per parameter), chunk by chunk as the optimizer process
does it, against ``torch._fused_adamw_`` on whole fp32 tensors and against copies that move as many bytes. From SSD:
states read, updated and written back through the real optimizer process, against the same reads and writes side by
side without any Adam. All sides take turns within each round, on the same threads.

    python scripts/bench_adam.py --ssd DIR --parameters 64M --threads 1 --threads 2 --rounds 5
"""

import collections
import contextlib
import datetime
import json
import os
import platform
import queue
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from common.hardware.machine import describe_machine
from common.memory.buffers import HostBuffer, round_up
from common.store import Layout, Store
from common.units import format_count, parse_bytes
from fuyou.layout.record import PAGE_ELEMENTS, Kind, Precision, Record, allocate_extents
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
COPIED_BYTES = 13
"""Bytes per parameter that a copy moves in each direction, so that it moves as many as an update: 14 in and 12 out."""
PARAMETER_BUFFERS, GRADIENT_BUFFERS = 4, 2
OURS = "AdamW on split weights"
PIPELINE, BOUND = "optimizer process", "same reads and writes, no Adam"


@dataclass
class Row:
    """One contender: seconds per pass over all parameters, by round."""

    where: str
    threads: int
    name: str
    seconds: list[float]


class InMemory:
    """Arrays of all contenders, on huge pages; what the engine shares with the optimizer process is shared here too.

    Args:
        parameters: elements of each array.
        threads: of every contender.
        chunk_elements: how many the optimizer process would update at once.
    """

    def __init__(self, parameters: int, threads: int, chunk_elements: int):
        torch.set_num_threads(threads)
        self._parameters, self._threads, self._chunk_elements = parameters, threads, chunk_elements
        self._pool = ThreadPoolExecutor(threads)
        library = optimizer_library()  # not as it was tried: that is for another number of threads
        self._adam = ChunkOptimizer(kernels=None if library is None else Kernels(library))
        self._torch, self._step = ChunkOptimizer(), torch.ones(())
        self._update = Update(1, AdamConfig())
        self._hi = self._array(torch.bfloat16, shared=True).normal_(std=0.02)
        self._narrow = self._array(torch.bfloat16, shared=True).normal_(std=1e-3)
        self._lo = self._array(torch.int16).zero_()
        self._mean, self._variance = self._array(torch.float32).zero_(), self._array(torch.float32).zero_()
        self._master, self._wide = self._array(torch.float32), self._array(torch.float32)
        self._master.copy_(self._hi)
        self._wide.copy_(self._narrow)
        self._from = HostBuffer(COPIED_BYTES * parameters).touch()
        self._to = HostBuffer(COPIED_BYTES * parameters).touch()

    def _array(self, dtype: torch.dtype, shared: bool = False) -> torch.Tensor:
        return HostBuffer(self._parameters * dtype.itemsize, shared=shared).touch().tensor(dtype, 0, self._parameters)

    def contenders(self) -> dict[str, Callable[[], None]]:
        """By name: what updates, or moves, everything once."""
        return {
            OURS: lambda: self._split_weights(self._adam),
            "AdamW on split weights, without a compiler": lambda: self._split_weights(self._torch),
            "fused AdamW, fp32 gradient": self._fused,
            "fused AdamW, bf16 gradient": self._converted,
            "copy": self._copy,
            "copy past the caches": self._streaming_copy,
        }

    def _split_weights(self, optimizer: ChunkOptimizer) -> None:
        for start in range(0, self._parameters, self._chunk_elements):
            part = slice(start, start + self._chunk_elements)
            states = OptimizerStates(self._hi, self._lo, (self._mean, self._variance)).part(part)
            optimizer.update(states, self._narrow[part], self._update, decay=True)

    def _fused(self) -> None:
        adam = self._update.adam
        torch._fused_adamw_(
            [self._master], [self._wide], [self._mean], [self._variance], [], [self._step],
            amsgrad=False, lr=adam.lr, beta1=adam.betas[0], beta2=adam.betas[1],
            weight_decay=adam.weight_decay, eps=adam.eps, maximize=False,
        )  # fmt: skip

    def _converted(self) -> None:
        self._wide.copy_(self._narrow)
        self._fused()

    def _copy(self) -> None:
        """PyTorch's: as any program writes, lines are read before they are overwritten."""
        torch.from_numpy(self._to.array).copy_(torch.from_numpy(self._from.array))

    def _streaming_copy(self) -> None:
        """The C library's: large copies are written without reading first, which no arithmetic in PyTorch does."""
        pieces = [np.array_split(buffer.array, self._threads) for buffer in (self._to, self._from)]
        collections.deque(self._pool.map(np.copyto, *pieces), maxlen=0)

    def close(self) -> None:
        self._pool.shutdown()


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
        self._chunk_elements = chunk_elements
        self._messages: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._steps = 0

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
        # The bound's own buffers: of the same kind and as many as the optimizer process has.
        self._buffers = [HostBuffer(chunk_elements * 12).touch() for _ in range(ring_chunks)]
        self._link.set_up(
            Setup(
                directories=[str(path) for path in directories],
                io="posix",
                io_threads=4,
                records=self.records,
                slots=2,
                chunk_elements=chunk_elements,
                ring_chunks=ring_chunks,
                shared=regions,
                threads=threads,
            ),
            self._messages.put,
            self._messages.put,
        )
        for index in range(PARAMETER_BUFFERS + GRADIENT_BUFFERS):
            self._shared.tensor(torch.bfloat16, index * largest, largest // 2).normal_(std=1e-2)
        for target in (0, 1):  # both: first writes into a fresh file are slower
            for record in self.records:
                self._link.send(CreateRecord(record.index, 0, 0, target))
                self._wait_for_one()

    def update(self, steps: int) -> None:
        """Update everything ``steps`` times; returns when all is written.

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
                self._send_update(sent % count, self._steps + sent // count, sent)
                sent += 1
            for message in self._news():
                if isinstance(message, Updated):
                    updated += 1
                else:
                    written[message.record] += 1
        self._steps += steps

    def latency(self) -> float:
        """Seconds from the arrival of a gradient to new weights, when states have been read as far ahead as they can.

        This is what the next forward pass waits for at the end of a step.
        """
        self._link.send(ReadStates(0, self._steps % 2))
        time.sleep(0.3)
        began = time.monotonic()
        self._send_update(0, self._steps, 0)
        ended, waiting = began, 2
        while waiting:
            for message in self._news():
                waiting -= 1
                ended = message.end_time if isinstance(message, Updated) else ended
        # Back to its slot, so that all records are in the same one.
        self._link.send(ReadStates(0, (self._steps + 1) % 2))
        self._send_update(0, self._steps + 1, 0)
        for _ in range(2):
            self._wait_for_one()
        return ended - began

    def _send_update(self, record: int, step: int, number: int) -> None:
        target, update = (step + 1) % 2, Update(step + 1, AdamConfig())
        buffers = number % PARAMETER_BUFFERS, number % GRADIENT_BUFFERS
        self._link.send(UpdateRecord(record, *buffers, target, update))

    def bound(self, steps: int) -> None:
        """The same reads and the same writes, on two threads, each with half of the buffers under way."""
        half = max(1, len(self._buffers) // 2)
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(self._read_all, steps, self._buffers[:half])]
            both.append(pool.submit(self._write_all, steps, self._buffers[-half:]))
            for future in both:
                future.result()

    def _read_all(self, steps: int, buffers: list[HostBuffer]) -> None:
        ahead: collections.deque[Future] = collections.deque()
        for number, (slot, record, start, stop) in enumerate(self._ranges(steps)):
            if len(ahead) == len(buffers):
                ahead.popleft().result()
            width = int(PRECISION.state_bytes)
            target, nbytes = buffers[number % len(buffers)], (stop - start) * width
            extent = self._extents[record].states[slot]
            ahead.append(self._store.read(extent, target.bytes(0, nbytes), start * width, nbytes))
        for future in ahead:
            future.result()

    def _write_all(self, steps: int, buffers: list[HostBuffer]) -> None:
        ahead: collections.deque[list[Future]] = collections.deque()
        for number, (slot, record, start, stop) in enumerate(self._ranges(steps)):
            if len(ahead) == len(buffers):
                for future in ahead.popleft():
                    future.result()
            source, extents = buffers[number % len(buffers)], self._extents[record]
            futures = []
            for extent, width in (
                (extents.states[1 - slot], int(PRECISION.state_bytes)),
                (extents.parameters[1 - slot], 2),
            ):
                nbytes = (stop - start) * width
                futures.append(self._store.write(extent, source.bytes(0, nbytes), start * width, nbytes))
            ahead.append(futures)
        for futures in ahead:
            for future in futures:
                future.result()

    def _ranges(self, steps: int) -> Iterator[tuple[int, int, int, int]]:
        """Slot, record, first and last element of every chunk of every step."""
        for step in range(self._steps, self._steps + steps):
            for record in self.records:
                for chunk in record.chunks(self._chunk_elements):
                    yield step % 2, record.index, chunk.start, chunk.stop

    def _news(self) -> Iterator[Updated | Written]:
        """Messages that have come, at least one."""
        yield self._wait_for_one()
        while not self._messages.empty():
            yield self._wait_for_one()

    def _wait_for_one(self) -> Updated | Written:
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


def measure(rounds: int, contenders: dict[str, Callable[[], None]], where: str, threads: int) -> list[Row]:
    """Each contender once per round, in turn, after one round that does not count."""
    rows = [Row(where, threads, name, []) for name in contenders]
    for number in range(rounds + 1):
        for row, run in zip(rows, contenders.values(), strict=True):
            began = time.monotonic()
            run()
            if number:
                row.seconds.append(time.monotonic() - began)
    return rows


def print_table(rows: list[Row], parameters: int) -> None:
    """Rates, and how the first row compares with each of the others within the same round."""
    ours = rows[0]
    print(f"\n{rows[0].where}, {ours.threads} thread{'s' if ours.threads > 1 else ''}")
    print(f"  {'':32} {'M parameters/s':>14} {'ns/parameter':>12}   ratio (lowest to highest)")
    for row in rows:
        seconds = statistics.median(row.seconds)
        ratios = [theirs / mine for mine, theirs in zip(ours.seconds, row.seconds, strict=True)]
        ratio = "" if row is ours else f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(
            f"  {row.name:32} {parameters / seconds / 1e6:14.0f} {seconds / parameters * 1e9:12.2f}   {ratio}".rstrip()
        )


def processor_name() -> str:
    """As the kernel calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@click.command()
@click.option("--ssd", multiple=True, type=click.Path(exists=True, file_okay=False), help="Once per drive.")
@click.option("--parameters", default="64M", help="Of each measurement.")
@click.option("--threads", multiple=True, type=click.IntRange(min=1), default=(1,))
@click.option("--rounds", default=5, type=click.IntRange(min=1))
@click.option("--steps", default=3, type=click.IntRange(min=1), help="Steps of a round from SSD.")
@click.option("--record", default="16M", help="Parameters of one record, such as a block.")
@click.option("--chunk", default=SMALLEST_CHUNK, help="Parameters read, updated and written at once.")
@click.option("--ring", default=16, type=click.IntRange(min=2), help="State buffers of the optimizer process.")
@click.option("--in-memory/--no-in-memory", default=True)
@click.option("--from-ssd/--no-from-ssd", default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help="Write everything measured here.")
def main(
    ssd: tuple[str, ...],
    parameters: str,
    threads: tuple[int, ...],
    rounds: int,
    steps: int,
    record: str,
    chunk: int,
    ring: int,
    in_memory: bool,
    from_ssd: bool,
    json_file: str | None,
) -> None:
    """Measure the optimizer's rate in memory and from SSD, and what could be reached at best."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # or temporary files would stay
    about: dict[str, Any] = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": f"{processor_name()}, {describe_machine()}",
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}",
        "parameters": round_up(parse_bytes(parameters), PAGE_ELEMENTS),
        "record": round_up(parse_bytes(record), PAGE_ELEMENTS),
        "chunk": round_up(chunk, PAGE_ELEMENTS),
        "ring": ring,
        "rounds": rounds,
        "steps": steps,
    }
    print(f"{about['date']}; {about['machine']}; {about['versions']}")
    count, rows, latencies = about["parameters"], [], {}
    for number in threads:
        if in_memory:
            memory = InMemory(count, number, about["chunk"])
            found = measure(rounds, memory.contenders(), f"In memory, {format_count(count)} parameters", number)
            memory.close()
            print_table(found, count)
            rows += found
            del memory
        if from_ssd:
            found, moved, latencies[number] = measure_ssd(ssd, about, number)
            print_table(found, moved)
            print(f"  from a gradient's arrival to new weights, {format_count(about['record'])} parameters with states "
                  f"read ahead: {latencies[number] * 1e3:.1f} ms")  # fmt: skip
            rows += found
    if json_file:
        content = {**about, "rows": [asdict(row) for row in rows], "latency_seconds": latencies}
        Path(json_file).write_text(json.dumps(content, indent=1))


def measure_ssd(ssd: Sequence[str], about: dict[str, Any], threads: int) -> tuple[list[Row], int, float]:
    """Rows, parameters updated in each round, seconds of latency."""
    steps, rounds = about["steps"], about["rounds"]
    with contextlib.ExitStack() as stack:
        directories = [
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-adam-", dir=path)))
            for path in ssd or [tempfile.gettempdir()]
        ]
        drives = FromSsd(directories, about["parameters"], about["record"], threads, about["chunk"], about["ring"])
        stack.callback(drives.close)
        contenders = {PIPELINE: lambda: drives.update(steps), BOUND: lambda: drives.bound(steps)}
        where = f"From SSD, {steps} steps of {format_count(drives.parameters)} parameters"
        rows = measure(rounds, contenders, where, threads)
        latency = statistics.median(drives.latency() for _ in range(rounds))
        return rows, steps * drives.parameters, latency


if __name__ == "__main__":
    main()
