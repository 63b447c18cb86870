"""The packed token file: a header and rows of words, written once, read with ``pread``.

Not mapped into memory: touched pages of a mapping would count as memory of the process, and that is bounded.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO

import numpy as np
from transformers import PreTrainedTokenizerBase

FORMAT_VERSION = 1
"""Counts changes to anything that decides what is in the file: shapes, templates, packing, layout."""

_HEADER_BYTES = 4096


@dataclass
class Header:
    """What is in a token file."""

    seq_len: int
    files: int = 0
    documents: int = 0
    rows: int = 0
    tokens: int = 0
    """Without padding."""
    trainable_tokens: int = 0
    skipped_tokens: int = 0
    """In pieces without any trainable token, which are left out: computing them would change nothing."""


def cache_key(files: list[Path], seq_len: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """Changes with everything that the token file depends on; files are known by path, size and time of change."""
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    text = json.dumps([FORMAT_VERSION, seq_len, stats, tokenizer_identity(tokenizer)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of what decides the ids that a tokenizer gives: vocabulary, rules, special tokens, chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        # These two are whatever the last call set them to.
        rules.pop("truncation", None)
        rules.pop("padding", None)
    else:
        rules = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    return hashlib.sha256(json.dumps([rules, special, tokenizer.chat_template]).encode()).hexdigest()


class TokenFile:
    """Reads a token file. ``header`` says what is in it."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            ValueError: not a complete token file of this version.
            OSError: it cannot be opened.
        """
        self._file = path.open("rb", buffering=0)
        try:
            values = json.loads(os.pread(self._file.fileno(), _HEADER_BYTES, 0).decode())
            if not isinstance(values, dict) or set(values) != {field.name for field in fields(Header)}:
                raise ValueError(f"{path} is not a token file")
            self.header = Header(**values)
            expected = _HEADER_BYTES + self.header.rows * self.header.seq_len * 4
            if os.fstat(self._file.fileno()).st_size != expected:
                raise ValueError(f"{path} has the wrong size, expected {expected} bytes")
        except BaseException:
            self._file.close()
            raise

    def read(self, rows: np.ndarray) -> np.ndarray:
        """The words of the given rows, uint32 [len(rows), seq_len]."""
        words = np.empty((len(rows), self.header.seq_len), dtype=np.uint32)
        for out, row in zip(words, rows.tolist(), strict=True):
            at, view = _HEADER_BYTES + row * out.nbytes, out.data.cast("B")
            while len(view):
                got = os.preadv(self._file.fileno(), [view], at)
                if got == 0:
                    raise OSError(f"{self._file.name} ends at byte {at}: it was cut short while in use")
                at, view = at + got, view[got:]
        return words

    def close(self) -> None:
        self._file.close()


@contextmanager
def write_token_file(path: Path, header: Header) -> Iterator[BinaryIO]:
    """A file to append rows to, which takes its name ``path`` only when complete.

    ``header`` is written last, so the caller fills it in on the way. On any error nothing is left behind.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as file:
            file.seek(_HEADER_BYTES)
            yield file
            file.flush()
            file.seek(0)
            file.write(json.dumps(asdict(header)).encode().ljust(_HEADER_BYTES))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
