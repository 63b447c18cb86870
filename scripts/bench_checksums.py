"""What checksums cost: their rate by themselves, and what a step takes with them and without.

One model, all of whose states are streamed and whose batch is small, so that the SSDs are the bound, trains on while
checksums are switched on and off from one block of steps to the next: what else happens to the machine happens to both.
Switched off, every sum is zero; nothing that is read is compared, in either kind of block. All else is as it is.

    python scripts/bench_checksums.py --ssd /mnt/nvme0
"""

import contextlib
import mmap
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import numpy as np
import psutil
import torch
from transformers import LlamaConfig

from common.hardware.machine import cpu_count
from common.store.checksums import checksum
from common.units import format_bytes
from fuyou import Engine

MIB = 1 << 20
PIECE = 4 * MIB
"""Bytes that an I/O thread takes the checksum of at once."""

PATCH = """
import mmap
import common.store.checksums as module
with open({switch!r}, "rb") as file:
    switch = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
take = module.checksum
module.checksum = lambda data, first_page: take(data, first_page) if switch[0] else 0
module.ExtentChecksums._compare = lambda self, expected: None
"""
"""Run by this process and, as ``sitecustomize``, by the optimizer process. The switch is a byte that both have
mapped."""


@click.command()
@click.option("--ssd", type=click.Path(exists=True, file_okay=False), required=True, help="A directory on a drive.")
@click.option("--layers", default=2, show_default=True, help="Of 16.8 M parameters each.")
@click.option("--steps", default=5, show_default=True, help="In each block.")
@click.option("--rounds", default=8, show_default=True, help="Blocks of each kind.")
def main(ssd: str, layers: int, steps: int, rounds: int) -> None:
    """Print rates, every pair of blocks, and the medians."""
    for size, what in ((PIECE, "in cache"), (256 * MIB, "from memory")):
        for threads in dict.fromkeys((1, cpu_count())):
            print(f"checksum {what}, {threads} at once: {rate(size, threads) / 1e9:.1f} GB/s each", flush=True)
    with tempfile.TemporaryDirectory(dir=ssd) as drive, _switch() as switch, _engine(drive, layers) as engine:
        print(f"{engine.parameters / 1e6:.0f} M parameters, all states streamed", flush=True)
        Block(engine, steps)  # the first one does not count
        blocks: dict[bool, list[Block]] = {True: [], False: []}
        for number in range(rounds):
            for on in (True, False) if number % 2 else (False, True):
                switch[0] = on
                blocks[on].append(Block(engine, steps))
            print(f"with {blocks[True][-1]}; without {blocks[False][-1]}", flush=True)
    seconds = {on: [block.seconds for block in blocks[on]] for on in blocks}
    cpu = {on: statistics.median(block.cpu for block in blocks[on]) for on in blocks}
    ratios = sorted(on / off - 1 for on, off in zip(seconds[True], seconds[False], strict=True))
    print(
        f"step: {statistics.median(seconds[True]):.3f} s with, {statistics.median(seconds[False]):.3f} s without; "
        f"{statistics.median(ratios):+.1%} (median of pairs, which are from {ratios[0]:+.1%} to {ratios[-1]:+.1%}); "
        f"{cpu[True] - cpu[False]:+.3f} s of one core"
    )


def rate(size: int, threads: int) -> float:
    """Bytes per second of each of ``threads`` that take checksums of ``size`` bytes of their own, piece by piece."""

    def take(data: np.ndarray) -> float:
        passes = max(1, (1 << 30) // size)
        began = time.perf_counter()
        for _ in range(passes):
            for at in range(0, size, PIECE):
                checksum(data[at : at + PIECE], 0)
        return passes * size / (time.perf_counter() - began)

    with ThreadPoolExecutor(threads) as pool:
        return statistics.median(pool.map(take, [np.full(size, 7, np.uint8) for _ in range(threads)]))


@contextlib.contextmanager
def _switch() -> Iterator[mmap.mmap]:
    """Checksums are taken while its byte is not zero, in this process and in those that are started meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "switch"
        file.write_bytes(b"\1")
        patch = Path(folder) / "sitecustomize.py"
        patch.write_text(PATCH.format(switch=str(file)))
        runpy.run_path(str(patch))
        sys.path.insert(0, folder)  # the optimizer process has our search path
        with file.open("r+b") as opened:
            yield mmap.mmap(opened.fileno(), 1)
        sys.path.remove(folder)


def _engine(drive: str, layers: int) -> Engine:
    config = LlamaConfig(
        vocab_size=512, hidden_size=1024, intermediate_size=4096, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=64,
    )  # fmt: skip
    return Engine(config, ssd=[drive], dtype="bf16", host_memory="2GiB", host_cache=0, batch_shape=(1, 16))


class Block:
    """Some steps, from a standstill to a standstill.

    Attributes:
        seconds: per step.
        cpu: seconds of one core, per step, of this process and the optimizer process.
        nbytes: read and written, per step.
    """

    def __init__(self, engine: Engine, steps: int):
        batch = dict.fromkeys(("input_ids", "labels"), torch.arange(16).view(1, 16))
        began, before, cpu = time.monotonic(), sum(engine.io_bytes()), _cpu_seconds()
        for _ in range(steps):
            engine(**batch).loss.backward()
            engine.step()
        engine.flush()
        self.seconds: float = (time.monotonic() - began) / steps
        self.cpu: float = (_cpu_seconds() - cpu) / steps
        self.nbytes: int = (sum(engine.io_bytes()) - before) // steps

    def __str__(self) -> str:
        return f"{self.seconds:.3f} s per step, {format_bytes(int(self.nbytes / self.seconds))}/s"


def _cpu_seconds() -> float:
    process = psutil.Process()
    times = [one.cpu_times() for one in (process, *process.children())]
    return sum((one.user + one.system for one in times), 0.0)


if __name__ == "__main__":
    main()
