"""The packed token file: a header and rows of words, written once, read with ``pread``; each with a CRC-32 behind it.

Not mapped into memory: touched pages of a mapping would count as memory of the process, and that is bounded.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from transformers import PreTrainedTokenizerBase

from common.data.files import file_states
from common.data.selection import DataCounts
from common.errors import FinetuneError
from common.files import TEMPORARY_SUFFIX, file_when_complete
from common.store.errors import described

FORMAT_VERSION = 6  # Counts changes to anything that decides what is in the file: shapes, templates, packing, layout

_HEADER_BYTES = 4096
_SUM_BYTES = 4
_LONGEST_PLACE = 100  # Characters of at most four bytes, so that the header has room for all tallies


@dataclass(kw_only=True)
class Header(DataCounts):
    """What is in a token file."""

    seq_len: int
    files: int = 0
    documents: int = 0
    skipped_tokens: int = 0  # Number of tokens in pieces without any trained one, which are left out

    def to_json(self) -> bytes:
        """Return the header as JSON, with the ends of long places in files, so that it fits."""
        for tally in self.tallies().values():
            if len(tally.first) > _LONGEST_PLACE:
                tally.first = "..." + tally.first[-_LONGEST_PLACE:]
        return json.dumps(asdict(self), ensure_ascii=False).encode()


def cache_key(
    files: list[Path],
    seq_len: int,
    tokenizer: PreTrainedTokenizerBase,
    truncate: bool,
    packed: bool = True,
    selection: Sequence[Any] = (),
) -> str:
    """Return a hash of everything that the token file depends on."""
    identity = tokenizer_identity(tokenizer)
    text = json.dumps([FORMAT_VERSION, seq_len, truncate, packed, file_states(files), identity, *selection])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of what decides a tokenizer's ids: vocabulary, rules, special tokens, chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        # The last call set these two.
        rules.pop("truncation", None)
        rules.pop("padding", None)
    else:
        rules = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    return hashlib.sha256(json.dumps([rules, special, tokenizer.chat_template]).encode()).hexdigest()


class TokenFile:
    """A packed token file that is read; ``header`` says what is in it."""

    def __init__(self, path: Path) -> None:
        """Open the file and check its header and size.

        Raises:
            ValueError: if this is not a complete token file of this version.
            OSError: if it cannot be opened.
        """
        self._file = path.open("rb", buffering=0)
        try:
            block = os.pread(self._file.fileno(), _HEADER_BYTES, 0)
            if block[-_SUM_BYTES:] != _sum(block[:-_SUM_BYTES]):
                raise ValueError(f"{path} is damaged, or not a token file")
            self.header = Header.parse(block[:-_SUM_BYTES])
            self._row_bytes = self.header.seq_len * 4
            expected = _HEADER_BYTES + self.header.rows * (self._row_bytes + _SUM_BYTES)
            if os.fstat(self._file.fileno()).st_size != expected:
                raise ValueError(f"{path} has the wrong size, expected {expected} bytes")
        except BaseException:
            self._file.close()
            raise

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Read the words of the given rows, uint32 [len(rows), seq_len].

        Raises:
            FinetuneError: if a row is damaged.
            OSError: if it cannot be read.
        """
        words = np.empty((len(rows), self.header.seq_len), dtype=np.uint32)
        for out, row in zip(words, rows.tolist(), strict=True):
            at = _HEADER_BYTES + row * (self._row_bytes + _SUM_BYTES)
            data = self._read(at, self._row_bytes + _SUM_BYTES)
            if data[self._row_bytes :] != _sum(data[: self._row_bytes]):
                raise FinetuneError(
                    f"The packed data are damaged: bytes {at:,} to {at + len(data) - 1:,} of {self._file.name} are not "
                    "what was written there. Delete the file: --resume makes it again from the data, and continues."
                )
            out[:] = np.frombuffer(data, np.uint32, self.header.seq_len)
        return words

    def _read(self, at: int, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        view = memoryview(data)
        while len(view):
            got = os.preadv(self._file.fileno(), [view], at)
            if got == 0:
                raise OSError(f"{self._file.name} ends at byte {at}: it was cut short while in use")
            at, view = at + got, view[got:]
        return data

    def close(self) -> None:
        self._file.close()


class TokenFileWriter:
    """Appends rows to a token file that is being made."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest = file, hashlib.blake2b(digest_size=8)
        file.seek(_HEADER_BYTES)

    def add(self, row: np.ndarray) -> None:
        """Append a row of words, uint32 [seq_len]."""
        self._file.write(row.data)
        self._file.write(_sum(row.data))
        self._digest.update(row.data)

    def finish(self, header: Header) -> None:
        header.digest = self._digest.hexdigest()
        block = header.to_json().ljust(_HEADER_BYTES - _SUM_BYTES)
        self._file.seek(0)
        self._file.write(block + _sum(block))


@contextmanager
def write_token_file(path: Path, header: Header) -> Iterator[TokenFileWriter]:
    """Open a file to add rows to, which takes its name ``path`` only when complete.

    ``header`` is written last, so the caller fills it in on the way. On any error nothing is left behind. Only one
    process at a time may do this in a directory.
    """
    with described("writing", path), file_when_complete(path) as file:
        writer = TokenFileWriter(file)
        yield writer
        writer.finish(header)


def remove_unfinished(directory: Path) -> None:
    """Remove token files that a killed process was writing. Nobody may be writing one there."""
    for unfinished in directory.glob(f"*{TEMPORARY_SUFFIX}"):
        unfinished.unlink(missing_ok=True)


def _sum(data: bytes | bytearray | memoryview) -> bytes:
    return zlib.crc32(data).to_bytes(_SUM_BYTES, "little")
