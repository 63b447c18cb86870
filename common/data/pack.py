"""Pack documents into rows of ``seq_len`` tokens in one pass and bounded memory, keep them in a file, and draw them.

A token is one 32-bit word: the id, and two bits from which labels and positions follow. The file is a header and rows:
words, a number that goes with them (a class, or a pair's margin), and a CRC-32 that begins with the row's number. It is
written once, and not mapped into memory: touched pages of a mapping would count as memory of the process, and that is
bounded.
"""

import hashlib
import json
import os
import zlib
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from common.data.encode import EncodedSegment
from common.data.selection import Counts
from common.errors import FinetuneError
from common.files import check_regular, file_when_complete
from common.store.checksums import GOLDEN_STEP, mixed_words
from common.store.errors import described

# Counts changes to anything that decides what is in the file: shapes, templates, packing, layout
FORMAT_VERSION = 22

ID_MASK = np.uint32((1 << 30) - 1)
TRAINED = np.uint32(1 << 30)  # Bit of a token that carries loss
# Bit of the first token of a document, of a later piece of a document, or of the padding
STARTS = np.uint32(1 << 31)

_HELD_WORDS = 1 << 24  # Number of words of open rows that are held in memory, 64 MiB
_HEADER_BYTES = 1 << 16  # Room for all counts, with the longest names that files have
_SUM_BYTES = 4

_MASK = (1 << 64) - 1


def draw_rows(draws: range, rows: int, seed: int | None, group_size: int = 1) -> np.ndarray:
    """Return the rows at some places of an endless sequence of epochs, each of which has each of ``rows`` once.

    Args:
        draws: places in that sequence.
        seed: chooses a new order for every epoch; None leaves the rows in theirs.
        group_size: number of neighbouring rows that stay together; rows left over come last in an epoch.
    """
    chosen = []
    while draws:
        epoch, start = divmod(draws[0], rows)
        positions = np.arange(start, min(start + len(draws), rows))
        if seed is not None:
            groups = rows // group_size
            inside = positions < groups * group_size
            if inside.any():
                at, within = np.divmod(positions[inside], group_size)
                positions[inside] = shuffled(at, groups, (seed, epoch)) * group_size + within
        chosen.append(positions)
        draws = draws[len(positions) :]
    return np.concatenate(chosen)


def shuffled(indices: np.ndarray, count: int, key: tuple[int, int]) -> np.ndarray:
    """Return where a random permutation of ``range(count)``, chosen by ``key``, sends ``indices`` (int64, any shape).

    This is the swap-or-not shuffle (Hoang, Morris, Rogaway, CRYPTO 2012): in each round every index has a partner, and
    a coin that both share decides whether they trade places. Each element is computed independently.
    """
    at = indices.astype(np.int64)
    rounds = 16 + 6 * max(count - 1, 1).bit_length()
    state = _mix_int(_mix_int(key[0] & _MASK) ^ (key[1] & _MASK))
    for _ in range(rounds):
        state = _mix_int(state)
        partner = (state % count - at) % count
        coin = _mix(np.maximum(at, partner).astype(np.uint64) ^ np.uint64(state)) & np.uint64(1)
        at = np.where(coin == 1, partner, at)
    return at


def _mix_int(value: int) -> int:
    return int(_mix(np.array([value], dtype=np.uint64))[0])


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply splitmix64 (Steele, Lea, Flood 2014): a well-mixed 64-bit word for each; uint64 arithmetic wraps."""
    return mixed_words(value + GOLDEN_STEP)


def cut_documents(documents: Iterable[EncodedSegment], seq_len: int) -> Iterator[np.ndarray]:
    """Cut documents into pieces of at most ``seq_len`` words, uint32: longer ones into consecutive pieces.

    The first token of a piece carries no loss: there is nothing before it to predict it from. So a piece of one token
    would be useless, and where one would be left over, the piece before gives up its last token.
    """
    held = np.empty(0, dtype=np.uint32)
    for document in documents:
        held = np.concatenate([held, document.ids | np.where(document.trained, TRAINED, np.uint32(0))])
        # Two tokens more than a piece: with any next record, more than one will be left over.
        while len(held) >= seq_len + 2 or (document.ends and len(held)):
            size = seq_len - 1 if len(held) == seq_len + 1 else seq_len
            piece = held[:size].copy()
            held = held[size:]
            piece[0] = (piece[0] & ID_MASK) | STARTS
            yield piece


def padded_row(piece: np.ndarray, seq_len: int, pad: int) -> np.ndarray:
    """Return a piece as a row, uint32 [seq_len], whose padding is a separate document."""
    row = np.full(seq_len, pad, dtype=np.uint32)
    row[: len(piece)] = piece
    if len(piece) < seq_len:
        row[len(piece)] |= STARTS
    return row


class Packer:
    """Packs pieces by best fit over a bounded window of open rows.

    A piece goes into the open row with the least room that still holds it (of equals, the oldest). If none does, a row
    is opened, and when that makes more than ``window`` of them, the fullest is closed. The result depends only on the
    order of the pieces. Open rows take 64 MiB at most, but at least one is open.
    """

    def __init__(
        self, seq_len: int, pad: int, write: Callable[[np.ndarray], object], window: int = 64
    ) -> None:
        self._seq_len = seq_len
        self._pad = pad
        self._write = write
        self._window = max(1, min(window, _HELD_WORDS // seq_len))
        self._open: list[tuple[int, int]] = []  # (tokens free, age), sorted
        self._rows: dict[int, list[np.ndarray]] = {}  # pieces by age of the row
        self._opened = 0

    def add(self, piece: np.ndarray) -> None:
        """Take one piece, of 1 to ``seq_len`` words."""
        fits = bisect_left(self._open, (len(piece), -1))
        if fits < len(self._open):
            free, age = self._open.pop(fits)
        else:
            free = self._seq_len
            age = self._opened
            self._opened += 1
        self._rows.setdefault(age, []).append(piece)
        insort(self._open, (free - len(piece), age))
        while self._open and (self._open[0][0] == 0 or len(self._open) > self._window):
            self._close()

    def finish(self) -> None:
        """Close all open rows, the fullest first."""
        while self._open:
            self._close()

    def _close(self) -> None:
        _, age = self._open.pop(0)
        self._write(padded_row(np.concatenate(self._rows.pop(age)), self._seq_len, self._pad))


class Padder:
    """Gives every piece its own row, for models in which nothing keeps the documents of a row apart.

    Pieces of similar length come one after another: ``window`` of them, or 64 MiB, are sorted at a time.
    """

    def __init__(
        self, seq_len: int, pad: int, write: Callable[[np.ndarray], object], window: int = 1024
    ) -> None:
        self._seq_len = seq_len
        self._pad = pad
        self._write = write
        self._window = window
        self._held: list[np.ndarray] = []
        self._words = 0

    def add(self, piece: np.ndarray) -> None:
        """Take one piece, of 1 to ``seq_len`` words."""
        self._held.append(piece)
        self._words += len(piece)
        if len(self._held) == self._window or self._words >= _HELD_WORDS:
            self.finish()

    def finish(self) -> None:
        """Write the pieces that are held, the shortest first."""
        for piece in sorted(self._held, key=len):
            self._write(padded_row(piece, self._seq_len, self._pad))
        self._held = []
        self._words = 0


def first_lengths(rows: np.ndarray) -> np.ndarray:
    """Return the length of the first document of each row, int64 [rows], given words uint32 [rows, seq_len]."""
    starts = (rows[:, 1:] & STARTS) != 0
    return np.where(starts.any(1), starts.argmax(1) + 1, rows.shape[1])


def padding_of(rows: np.ndarray) -> np.ndarray:
    """Return which words are padding, bool [rows, seq_len]: a row's last document if nothing in it carries loss."""
    positions = np.arange(rows.shape[1], dtype=np.int64)
    last = rows.shape[1] - 1 - ((rows & STARTS) != 0)[:, ::-1].argmax(1)
    within = positions >= last[:, None]
    trained = ((rows & TRAINED != 0) & within).any(1)
    padding: np.ndarray = within & ~trained[:, None]
    return padding


def unpack(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ``input_ids``, ``labels`` and ``position_ids``, int64 [rows, seq_len], of words uint32 [rows, seq_len]."""
    ids = (rows & ID_MASK).astype(np.int64)
    labels = np.where(rows & TRAINED, ids, -100)
    positions = np.arange(rows.shape[1], dtype=np.int64)
    starts = np.maximum.accumulate(np.where(rows & STARTS, positions, 0), axis=1)
    return ids, labels, positions - starts


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of what decides a tokenizer's ids: vocabulary, rules, special tokens, chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        last_call = ("truncation", "padding")  # what the last call has set
        rules: Any = {
            name: rule for name, rule in json.loads(backend.to_str()).items() if name not in last_call
        }
    else:
        rules = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    side = ["left"] if tokenizer.truncation_side == "left" else []
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, *side]
    return hashlib.sha256(json.dumps([rules, special, tokenizer.chat_template]).encode()).hexdigest()


class TokenFile:
    """A file of rows that is read; ``header`` says what is in it."""

    def __init__(self, path: Path) -> None:
        """Open the file and check its header and size."""
        check_regular(path)
        self._file = path.open("rb", buffering=0)
        try:
            self.header = Counts.parse(_checked(self._file.read(_HEADER_BYTES)).rstrip())
            if self.header.name != path.name:
                raise ValueError(f"{path} was {self.header.name}, which is made of other data")
            self._row_bytes = 4 * (self.header.seq_len + 1) + _SUM_BYTES
            if os.fstat(self._file.fileno()).st_size != _HEADER_BYTES + self.header.rows * self._row_bytes:
                raise ValueError(f"{path} has the wrong size")
        except BaseException:
            self._file.close()
            raise

    def read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Read the words of the given rows, uint32 [len(rows), seq_len], and their labels, uint32 [len(rows)]."""
        words = np.empty((len(rows), self.header.seq_len + 1), dtype=np.uint32)
        for out, row in zip(words, rows.tolist(), strict=True):
            at = _HEADER_BYTES + row * self._row_bytes
            try:
                out[:] = np.frombuffer(
                    _checked(os.pread(self._file.fileno(), self._row_bytes, at), row), np.uint32
                )
            except ValueError as error:
                raise FinetuneError(
                    f"The packed data are damaged: bytes {at:,} to {at + self._row_bytes - 1:,} of {self._file.name} "
                    "are not what was written there. Delete the file: --resume makes it again from the data, and "
                    "continues."
                ) from error
        return words[:, :-1], words[:, -1].copy()

    def close(self) -> None:
        self._file.close()


@contextmanager
def write_token_file(path: Path, counts: Counts) -> Iterator[Callable[..., None]]:
    """Write a file that takes its name ``path`` only when complete: what this yields appends a row of words, and the
    number that goes with it, if any.

    ``counts`` is written last, so the caller fills it in on the way, its rows apart. On any error nothing is left
    behind. Only one process at a time may do this in a directory.
    """
    digest = hashlib.blake2b(digest_size=8)
    with described("writing", path), file_when_complete(path) as file:

        def add(row: np.ndarray, label: int = 0) -> None:
            tokens, number = row.tobytes(), np.uint32(label).tobytes()
            file.write(tokens + number + _sum(tokens + number, counts.rows))
            counts.rows += 1
            digest.update(tokens + number if label else tokens)  # of texts, that of earlier versions

        file.seek(_HEADER_BYTES)
        yield add
        counts.digest = digest.hexdigest()
        counts.name = path.name
        block = json.dumps(asdict(counts), ensure_ascii=False).encode().ljust(_HEADER_BYTES - _SUM_BYTES)
        file.seek(0)
        file.write(block + _sum(block))


def _sum(data: bytes, row: int = 0) -> bytes:
    return zlib.crc32(data, row).to_bytes(_SUM_BYTES, "little")


def _checked(data: bytes, row: int = 0) -> bytes:
    content = data[:-_SUM_BYTES]
    if _sum(content, row) != data[-_SUM_BYTES:]:
        raise ValueError("not what was written")
    return content
