"""Single flipped bits in what a running engine has on its drives, each read as training and exports read it."""

import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fuyou
from common.store import ALIGNMENT, StoreError
from common.store.checksums import CheckedExtent
from common.store.posix import aligned_bytes
from fuyou.checkpoint.export import StoreReader
from fuyou.layout.record import SLOTS, Record
from fuyou.layout.record_sums import PARTS, Part
from fuyou.optimizer.process.protocol import ReadStates, Setup, SharedRegions
from fuyou.optimizer.process.updater import RecordUpdater


def flip(file: Path, at: int, bit: int = 2) -> None:
    """Change a bit of the byte at offset ``at``."""
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ (1 << bit)]))


@dataclass(frozen=True)
class Page:
    """A page of a record on a drive."""

    record: Record
    part: Part
    checked: CheckedExtent
    file: Path
    start: int  # First byte in the file

    def flip(self, draw: random.Random) -> tuple[int, int]:
        """Flip a random bit of it; return the byte and the bit, to flip it back."""
        at, bit = self.start + draw.randrange(ALIGNMENT), draw.randrange(8)
        flip(self.file, at, bit)
        return at, bit


def pages(engine: fuyou.Engine, slot: int) -> Iterator[Page]:
    """Yield every page of ``slot``, and of frozen records."""
    run = engine._run
    directories = run.files.store.directories
    for record in run.layout.records:
        for part in PARTS if record.trainable else PARTS[:1]:
            checked = run.commits.sums.checked(record.index, part, slot if record.trainable else 0)
            units = -(-checked.extent.nbytes // checked.extent.unit)
            for stripe in range(units):
                row, directory = divmod(stripe, len(directories))
                length = min(checked.extent.unit, checked.extent.nbytes - stripe * checked.extent.unit)
                first = checked.extent.offset + row * checked.extent.unit
                for start in range(first, first + length, ALIGNMENT):
                    yield Page(record, part, checked, directories[directory] / checked.extent.file, start)


class Readers:
    """What reads the records of an engine that is at rest: its lanes, the optimizer process's code, exports."""

    def __init__(self, engine: fuyou.Engine):
        run = engine._run
        self._run, self._plane = run, run.runtime.plane
        trained = [record for record in run.layout.records if record.trainable]
        chunk_elements = run.runtime.memory_plan.chunk_elements
        setup = Setup(
            directories=[str(path) for path in run.files.store.directories],
            records=run.layout.records,
            chunk_elements=chunk_elements,
            ring_chunks=max(len(record.chunks(chunk_elements)) for record in trained),
            shared=SharedRegions(ALIGNMENT, {}, {}),
            threads=1,
        )
        memory = os.memfd_create("shared")
        os.ftruncate(memory, ALIGNMENT)
        pipe: Any = SimpleNamespace()
        self._updater = RecordUpdater(setup, pipe, memory)
        self._export: StoreReader = run.reader()

    def close(self) -> None:
        self._updater._store.close()

    def train(self, page: Page, slot: int) -> None:
        """Read the record's part as a step does."""
        record = page.record
        if page.part == "parameters":
            # The engine's may hold records that it reads no more
            buffer = aligned_bytes(record.parameter_nbytes)
            self._plane.stored.read_parameters(record, slot if record.trainable else 0, buffer).result()
            return
        updater, errors = self._updater, []
        updater._read_states(ReadStates(record.index, slot, page.checked.sums))
        for _ in updater._chunks(record.index):
            memory = updater._read.get()
            assert memory.reading is not None
            errors.append(memory.reading.exception())
            updater._free.put(memory.buffer)
        for error in filter(None, errors):
            raise error

    def export(self, page: Page) -> bytes:
        """Return the record as an export reads it."""
        return self._export._masters(page.record).view(torch.uint8).numpy().tobytes()


def flip_pages(engine: fuyou.Engine, every: int = 1, exports: bool = True) -> Counter[str]:
    """Flip one bit of each page (or of each ``every``-th) that is committed, read it, and flip it back.

    Returns:
        How many flips were made and noticed, by the way of reading.

    Raises:
        AssertionError: a flip in bytes that are read is not noticed, or another record or file is named.
    """
    slot, readers, draw, counts = (
        engine._run.commits.state.slot,
        Readers(engine),
        random.Random(7),
        Counter[str](),
    )
    chosen = list(pages(engine, slot))[::every]
    clean: dict[int, bytes] = {}
    for page in chosen:
        if exports and page.record.index not in clean:
            clean = {page.record.index: readers.export(page)}
        at, bit = page.flip(draw)
        with pytest.raises(StoreError) as caught:
            readers.train(page, slot)
        assert f"{page.checked.what} is damaged: " in str(caught.value)
        assert f" of {page.file} are not" in str(caught.value)
        counts["trained: noticed"] += 1
        if exports:
            counts[f"exported: {_exported(readers, page, clean[page.record.index])}"] += 1
        flip(page.file, at, bit)
        readers.train(page, slot)  # whole again
    readers.close()
    return counts


def _exported(readers: Readers, page: Page, clean: bytes) -> str:
    try:
        exported = readers.export(page)
    except StoreError as error:
        message = str(error)
    else:
        assert page.part == "states" and exported == clean, f"a flip in {page.checked.what} is exported"
        return "not read"
    assert f"{page.checked.what} is damaged: " in message
    return "noticed"


def flip_what_will_be_written(engine: fuyou.Engine) -> int:
    """Flip one bit in every page of the slot that the next step writes. Returns how many."""
    draw, count = random.Random(8), 0
    for page in pages(engine, (engine._run.commits.state.slot + 1) % SLOTS):
        if page.record.trainable:
            page.flip(draw)
            count += 1
    return count
