"""Claim: the store moves records as fast as ``fio`` moves blocks, with the same block size and depth.

``blocks`` compares like with like: both use a few buffers of one stripe unit, which processor caches can hold. The
others move what the engine moves, states chunk by chunk through private buffers and parameters record by record
through shared ones, which caches cannot hold: that costs where drives are virtual and their data copied. ``fio`` reads
and writes the very same files with blocks of one stripe unit and as many in flight as the store has threads; of its
engines, the best in a few rounds of their own is the reference. Then both take turns.

    python scripts/bench_io.py --ssd DIR --size 4GiB --rounds 5
"""

import contextlib
import datetime
import itertools
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

import click
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(1, str(ROOT))  # not installed: run from a checkout

from common.errors import FinetuneError, UserError  # noqa: E402
from common.hardware.machine import describe_machine, huge_pages_enabled  # noqa: E402
from common.memory.buffers import HostBuffer  # noqa: E402
from common.store import Layout, Store  # noqa: E402
from common.store.layout import LARGEST_UNIT  # noqa: E402
from common.units import format_bytes, parse_bytes  # noqa: E402

Direction = Literal["read", "write", "mixed"]
DIRECTIONS: tuple[Direction, ...] = ("read", "write", "mixed")
FIO_ENGINES = ("libaio", "io_uring", "psync")
FILE = "records"
CHOOSING_ROUNDS = 3
PAUSE_S = 0.3


@dataclass(frozen=True)
class Kind:
    """How the engine moves one kind of record."""

    name: str
    record_bytes: int
    """For a block of 12 Mi parameters, as in models of 350 M."""
    transfer_bytes: int
    """What one call of the store moves."""
    buffers: int | None
    """Transfers that may be under way at once. None: two more than I/O calls, so no more memory than fio's."""
    shared: bool
    """Whether the buffers are shared with another process."""


KINDS = (
    Kind("blocks", 10 * (12 << 20), LARGEST_UNIT, buffers=None, shared=False),
    Kind("states", 10 * (12 << 20), 10 << 20, buffers=9, shared=False),
    Kind("parameters", 2 * (12 << 20), 2 * (12 << 20), buffers=3, shared=True),
)


@dataclass
class Row:
    """One line of the table; rates in bytes per second."""

    case: str
    reference: str
    """The engine of fio that the store is compared with."""
    tries: dict[str, list[float]]
    """Rates of each engine, by which the reference was chosen."""
    fio: list[float]
    """Rates of the reference, round by round."""
    ours: list[float]

    def ratios(self) -> list[float]:
        """Ours over the reference, round by round."""
        return [ours / fio for ours, fio in zip(self.ours, self.fio, strict=True)]


class Bench:
    """A store full of records of one kind, and both ways to move them."""

    def __init__(self, kind: Kind, directories: Sequence[Path], size: int, threads: int) -> None:
        self._kind, self._threads = kind, threads
        layout = Layout(len(directories))
        records = [layout.allocate(FILE, kind.record_bytes) for _ in range(max(2, size // kind.record_bytes))]
        self._transfers = [
            (record, start, min(kind.transfer_bytes, record.nbytes - start))
            for record in records
            for start in range(0, record.nbytes, kind.transfer_bytes)
        ]
        self.unit = records[0].unit
        buffers = kind.buffers or (threads + 2) * len(directories)
        self._buffers = [HostBuffer(kind.transfer_bytes, shared=kind.shared).touch() for _ in range(buffers)]
        for buffer in self._buffers:  # drives may be quick with zeros
            buffer.array[:] = np.random.default_rng(0).integers(0, 256, buffer.nbytes, dtype=np.uint8)
        self._store = Store.create(directories, layout, io="posix", threads=threads)

    def ours(self, direction: Direction) -> float:
        """Move every record once, and return bytes per second; ``mixed`` reads and writes transfers in turns."""
        free: SimpleQueue[HostBuffer] = SimpleQueue()
        for buffer in self._buffers:
            free.put(buffer)
        futures = []
        begin = time.perf_counter()
        for number, (record, start, nbytes) in enumerate(self._transfers):
            buffer = free.get()
            writes = direction == "write" or (direction == "mixed" and number % 2 == 1)
            move = self._store.write if writes else self._store.read
            future = move(record, buffer.array, start, nbytes)
            future.add_done_callback(lambda _, done=buffer: free.put(done))  # type: ignore[misc]
            futures.append(future)
        for future in futures:
            future.result()
        return sum(nbytes for *_, nbytes in self._transfers) / (time.perf_counter() - begin)

    def fio(self, engine: str, direction: Direction) -> float:
        """The same with ``fio``: as many bytes of the same files.

        Raises:
            FinetuneError: it failed.
        """
        jobs = self._threads if engine == "psync" else 1
        each = self._store.layout.file_bytes()[FILE] // jobs // self.unit * self.unit
        command = [
            "fio", "--output-format=json", "--group_reporting", "--thread", "--direct=1", "--allow_file_create=0",
            f"--ioengine={engine}", f"--iodepth={self._threads if jobs == 1 else 1}", f"--numjobs={jobs}",
            f"--bs={self.unit}", f"--size={each}", f"--offset_increment={each}",
            # In turns, "rw" would read what it has just written; this reads or writes every block once.
            f"--rw={'randrw' if direction == 'mixed' else direction}", "--rwmixread=50",
        ]  # fmt: skip
        for number, directory in enumerate(self._store.directories):
            command += [f"--name={number}", f"--filename={directory / FILE}"]
        done = subprocess.run(command, env={**os.environ, **HUGE_PAGES_FOR_FIO}, capture_output=True, text=True)
        if done.returncode:
            raise FinetuneError(f"fio failed: {(done.stderr or done.stdout).strip()}")
        return rate_of(done.stdout)

    def close(self) -> None:
        """Close store and buffers; the files stay."""
        self._store.close()
        for buffer in self._buffers:
            buffer.close()


HUGE_PAGES_FOR_FIO = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""fio's own huge pages must be reserved beforehand; this gives its buffers the kind that ours have."""


def rate_of(output: str) -> float:
    """Bytes per second in fio's JSON for one group of jobs, which may follow warnings."""
    [job] = json.loads(output[output.index("{\n") :])["jobs"]
    both = job["read"], job["write"]
    return float(sum(way["io_bytes"] for way in both) / max(way["runtime"] for way in both) * 1000)


def measure(bench: Bench, case: str, direction: Direction, engines: Sequence[str], rounds: int) -> Row:
    """Choose the engine, then compare it with the store in rounds of their own, who comes first changing each time.

    The best of several noisy medians would be a lucky one; so the rates that choose are not those that are compared.
    """
    tries = {engine: [_rested(bench.fio, engine, direction) for _ in range(CHOOSING_ROUNDS)] for engine in engines}
    reference = max(tries, key=lambda engine: statistics.median(tries[engine]))
    row = Row(case, reference, tries, [], [])
    for number in range(rounds):
        for turn in (number, number + 1):
            if turn % 2:
                row.ours.append(_rested(bench.ours, direction))
            else:
                row.fio.append(_rested(bench.fio, reference, direction))
    return row


def _rested(run: Callable[..., float], *arguments: str) -> float:
    """A virtual drive can be faster after a pause, such as fio makes while it starts: all shall have one."""
    time.sleep(PAUSE_S)
    return run(*arguments)


def usable_engines(directory: Path) -> list[str]:
    """Those of fio's engines that work here."""
    file = directory / "probe"
    file.write_bytes(bytes(4096))
    probe = ["fio", "--name=probe", f"--filename={file}", "--size=4096", "--rw=read", "--output=/dev/null"]
    found = [
        engine
        for engine in FIO_ENGINES
        if not subprocess.run([*probe, f"--ioengine={engine}"], capture_output=True).returncode
    ]
    file.unlink()
    if not found:
        raise UserError(f"fio runs with none of {', '.join(FIO_ENGINES)} in {directory}.")
    return found


def describe() -> dict[str, str]:
    """Where and with what this was measured."""
    version = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    huge = huge_pages_enabled() and platform.libc_ver() >= ("glibc", "2.35")
    return {
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
        "versions": f"Linux {platform.release()}, Python {platform.python_version()}, {version}",
        "fio's buffers": "transparent huge pages" if huge else "plain 4 KiB pages",
    }


@contextlib.contextmanager
def folders(ssds: Sequence[Path]) -> Iterator[list[Path]]:
    """New directories that go with everything in them: one in each of ``ssds``, or three if there is but one."""
    with contextlib.ExitStack() as stack:
        tops = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-io-", dir=ssd))) for ssd in ssds]
        made = tops if len(tops) > 1 else [tops[0] / str(number) for number in range(3)]
        for path in made:
            path.mkdir(exist_ok=True)
        yield made


def run(ssds: Sequence[Path], size: int, rounds: int, threads: int, kinds: Sequence[str]) -> list[Row]:
    """Measure all cases, printing each as it is known."""
    print(f"{'case':<35} {'unit':>8} {'fio GB/s':>9} {'with':<8} {'ours GB/s':>9}  ours/fio (min-max)")
    rows, firsts = [], []
    with folders(ssds) as paths:
        engines = usable_engines(paths[0])
        for count, kind in itertools.product((1, len(paths)), KINDS):
            if kind.name not in kinds:
                continue
            directories = [path / kind.name for path in paths[:count]]
            for directory in directories:
                directory.mkdir()
            bench = Bench(kind, directories, size, threads)
            try:
                firsts.append((bench.ours("write"), bench.ours("write")))
                for direction in DIRECTIONS:
                    drives = "1 directory" if count == 1 else f"{count} directories"
                    row = measure(bench, f"{drives}, {kind.name}, {direction}", direction, engines, rounds)
                    rows.append(row)
                    ratios = row.ratios()
                    print(
                        f"{row.case:<35} {format_bytes(bench.unit):>8}"
                        f" {statistics.median(row.fio) / 1e9:>9.2f} {row.reference:<8}"
                        f" {statistics.median(row.ours) / 1e9:>9.2f}"
                        f"  {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
                        flush=True,
                    )
            finally:
                bench.close()
                for directory in directories:
                    shutil.rmtree(directory)
    new, old = (statistics.median(rates) / 1e9 for rates in zip(*firsts, strict=True))
    print(
        f"First write into new extents: {new:.2f} GB/s; the second: {old:.2f} GB/s (medians of {len(firsts)} stores)."
    )
    return rows


@click.command()
@click.option("--ssd", "ssds", multiple=True, required=True, type=click.Path(exists=True, file_okay=False))
@click.option("--size", default="4GiB", help="Bytes that each measurement moves.")
@click.option("--rounds", default=5, type=click.IntRange(1))
@click.option("--threads", default=4, type=click.IntRange(1), help="I/O calls in flight per directory.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice([kind.name for kind in KINDS]))
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write the figures there.")
def main(
    ssds: tuple[str, ...], size: str, rounds: int, threads: int, kinds: tuple[str, ...], json_path: str | None
) -> None:
    """The store's bandwidth against fio's, on one directory and on all (three sub-directories, if there is but one)."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it cleans up, as after Ctrl-C
    try:
        if shutil.which("fio") is None:
            raise UserError("fio is not installed: apt install fio")
        about = describe()
        print("; ".join(f"{value}" if name != "fio's buffers" else f"{name}: {value}" for name, value in about.items()))
        kinds = kinds or tuple(kind.name for kind in KINDS)
        rows = run([Path(ssd) for ssd in ssds], parse_bytes(size), rounds, threads, kinds)
    except FinetuneError as error:
        print(f"bench_io: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    if json_path:
        content: dict[str, Any] = {**about, "rounds": rounds, "threads": threads, "rows": [asdict(row) for row in rows]}
        Path(json_path).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
