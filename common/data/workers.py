"""Encode records on all processors: forked processes read the same files, and each encodes every n-th batch of records.

Batches are the same for any number of processes, and their results come in the order of the files, with what was
counted of them. Nothing else passes between processes: records are not sent, and what packs and writes is the caller.
"""

import contextlib
import fcntl
import gc
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Generic, TypeVar

import torch

from common.activity import Activity
from common.data.read import DataRecord, ReadPosition, extension_of
from common.data.selection import Counts, RecordSelection
from common.errors import FinetuneError
from common.hardware.machine import cpu_count, memory_available_bytes
from common.units import format_count

Result = TypeVar("Result")
_RECORDS = 256  # Records of a batch
_CHARACTERS = 1 << 20  # Characters of text in a batch, but for its last record
# Batches that are encoded before there are other processes: what is found out there, all know
_FIRST_BATCHES = 4
_SMALL_BYTES = 4 << 20  # Bytes of data files for which other processes are not worth their start
_MEMORY = 512 << 20  # Bytes of memory for each process
_MOST_PROCESSES = 16  # Each reads all records, so that more of them gain little
_READ_IN_ORDER = (".jsonl", ".csv", ".tsv", ".txt")
_PIPE_BYTES = 1 << 20  # Bytes of results that wait for their turn, if the system allows


def process_count(files: Sequence[Path]) -> int:
    """Return how many processes encode the records of ``files``: one for each processor, if the data are large."""
    # Few records, each encoded on all processors
    is_text = any(extension_of(file) == ".txt" for file in files)
    if is_text or multiprocessing.current_process().daemon or _nbytes(files) < _SMALL_BYTES:
        return 1
    return max(1, min(cpu_count(), memory_available_bytes() // _MEMORY, _MOST_PROCESSES))


class EncodedInOrder(Generic[Result]):
    """A context that gives what is made of the records of data files, in their order. At its end all processes end.

    Args:
        selection: chooses the records.
        files: data files.
        encode: yields what is made of some records, and counts in ``part``. What it yields depends on nothing else.
        part: counts of a batch, reset after each.
        total: where these are added.
        doing: shows the part of the files that is encoded.

    Raises:
        FinetuneError: a process was killed.
    """

    def __init__(
        self,
        selection: RecordSelection,
        files: Sequence[Path],
        encode: Callable[[Iterator[DataRecord]], Iterable[Result]],
        part: Counts,
        total: Counts,
        doing: Activity,
    ) -> None:
        self._selection = selection
        self._files = files
        self._encode = encode
        self._part = part
        self._total = total
        self._doing = doing
        self._what = doing.what
        self._size = _nbytes(files)
        self._read = 0  # Bytes of the files of which all is encoded
        # Of other formats, what is read says little: a value as a whole, and tables column by column.
        if selection.limit is None and all(extension_of(file) in _READ_IN_ORDER for file in files):
            doing.share = lambda: min(1.0, self._read / max(1, self._size))

    def __enter__(self) -> Iterator[Result]:
        self._results = self._all_results()
        return self._results

    def __exit__(self, *exception: object) -> None:
        self._results.close()

    def _all_results(self) -> Generator[Result, None, None]:
        processes = process_count(self._files)
        position = ReadPosition()
        batches = 0
        for batch in self._batches(position, _FIRST_BATCHES if processes > 1 else None):
            yield from self._encode(batch)
            self._add(self._part.take(), position.bytes)
            batches += 1
        if processes > 1 and batches == _FIRST_BATCHES:
            yield from self._results_of(processes)

    def _add(self, part: Counts, read: int) -> None:
        self._total.merge(part)
        self._read = read
        self._doing.what = f"{self._what}, {format_count(self._total.documents)} documents"

    def _batches(self, position: ReadPosition, count: int | None = None) -> Iterator[Iterator[DataRecord]]:
        """Yield the records in batches, each to be used up before the next."""
        records = self._selection.read(self._files, position)
        for first in itertools.islice(records, count):
            yield _limited(itertools.chain([first], records))

    def _results_of(self, count: int) -> Iterator[Result]:
        """Yield the results of all but the first batches, from ``count`` processes."""
        context = multiprocessing.get_context("fork")  # tokenizers and processors need not be sent
        with contextlib.ExitStack() as stack:
            receivers = list[Connection]()
            for number in range(count):
                receiver, sender = context.Pipe(duplex=False)
                with contextlib.suppress(OSError):
                    fcntl.fcntl(sender.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
                stack.callback(receiver.close)
                receivers.append(receiver)
                arguments = number, count, sender, list(receivers)
                process = context.Process(target=self._serve, args=arguments, daemon=True)
                with sender, _no_threads_of_tokenizers(), warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # a child of a process with threads
                    process.start()
                stack.callback(process.join)
                stack.callback(process.kill)
            for receiver in itertools.cycle(receivers):
                try:
                    results, part, read = _raised(receiver.recv())
                except EOFError as error:
                    raise FinetuneError(
                        "A process that encodes the data was killed, as when memory is short. Start again, with "
                        "fewer other programs, or fewer processors (taskset)."
                    ) from error
                yield from results
                if part is None:
                    return
                self._add(part, read)

    def _serve(self, number: int, count: int, sender: Connection, receivers: list[Connection]) -> None:
        """Send the results of batches ``number``, ``number + count``, ..., in a separate process."""
        for receiver in receivers:  # so that the end of the first process is noticed
            receiver.close()
        _begin_process()
        position = ReadPosition()
        try:
            for index, batch in enumerate(self._batches(position), -_FIRST_BATCHES):
                if index < 0 or index % count != number:
                    for _ in batch:
                        pass
                    continue
                results = list(self._encode(batch))
                sender.send((results, self._part.take(), position.bytes))
            sender.send(((), None, 0))
        except BrokenPipeError:
            return
        except BaseException as error:
            sender.send(_sendable(error))


def _nbytes(files: Sequence[Path]) -> int:
    """Return the bytes of files, without those that are gone: reading these says it better."""
    total = 0
    for file in files:
        with contextlib.suppress(OSError):
            total += file.stat().st_size
    return total


def _limited(records: Iterator[DataRecord]) -> Iterator[DataRecord]:
    characters = 0
    for record in itertools.islice(records, _RECORDS):
        yield record
        characters += sum(len(value) for value in record.values.values() if isinstance(value, str))
        if characters >= _CHARACTERS:
            return


def _raised(message: object) -> tuple[Iterable, Counts | None, int]:  # type: ignore[type-arg]
    if isinstance(message, BaseException):
        raise message
    return message  # type: ignore[return-value]


def _sendable(error: BaseException) -> BaseException:
    with contextlib.suppress(Exception):
        pickle.loads(pickle.dumps(error))
        return error
    return FinetuneError(f"{type(error).__name__}: {error}")


def _begin_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Another thread may have held a lock of these when this process began.
    sys.stdout = sys.stderr = os.fdopen(os.dup(2), "w")
    torch.set_num_threads(1)
    gc.freeze()  # memory that is not touched is shared


@contextlib.contextmanager
def _no_threads_of_tokenizers() -> Iterator[None]:
    """Let a process that begins in this context use no threads of tokenizers, which do not exist there."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
