"""Pack documents into rows of ``seq_len`` tokens, in one pass and bounded memory, and draw rows in random order.

A token is one 32-bit word: the id, and two bits from which labels and positions follow.

A token is one 32-bit word: the id, and two bits from which labels and positions follow.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from common.data.encoding.encoder import EncodedSegment

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
        places = np.arange(start, min(start + len(draws), rows))
        if seed is not None:
            groups = rows // group_size
            inside = places < groups * group_size
            if inside.any():
                at, within = np.divmod(places[inside], group_size)
                places[inside] = shuffled(at, groups, (seed, epoch)) * group_size + within
        chosen.append(places)
        draws = draws[len(places) :]
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
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = value ^ (value >> np.uint64(31))
    return mixed


ID_MASK = np.uint32((1 << 30) - 1)
TRAINED = np.uint32(1 << 30)  # Bit of a token that carries loss
STARTS = np.uint32(1 << 31)  # Bit of the first token of a document, of a later piece of a document, or of the padding


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
            piece, held = held[:size].copy(), held[size:]
            piece[0] = (piece[0] & ID_MASK) | STARTS
            yield piece


class Packer:
    """Packs pieces by best fit over a bounded window of open rows.

    A piece goes into the open row with the least room that still holds it (of equals, the oldest). If none does, a row
    is opened, and when that makes more than ``window`` of them, the fullest is closed. The result depends only on the
    order of the pieces. Memory: ``4 * seq_len * (window + 1)`` bytes.
    """

    def __init__(self, seq_len: int, pad: int, write: Callable[[np.ndarray], object], window: int = 64) -> None:
        """Start without rows; ``write`` receives every finished one, uint32 [seq_len]."""
        self._seq_len = seq_len
        self._pad = pad
        self._write = write
        self._window = window
        self._open: list[tuple[int, int]] = []  # (tokens free, age), sorted
        self._rows: dict[int, np.ndarray] = {}  # by age
        self._opened = 0

    def add(self, piece: np.ndarray) -> None:
        """Place one piece, of 1 to ``seq_len`` words."""
        fits = bisect_left(self._open, (len(piece), -1))
        if fits < len(self._open):
            free, age = self._open.pop(fits)
        else:
            free, age = self._seq_len, self._opened
            self._opened += 1
            self._rows[age] = np.full(self._seq_len, self._pad, dtype=np.uint32)
        used = self._seq_len - free
        self._rows[age][used : used + len(piece)] = piece
        insort(self._open, (free - len(piece), age))
        while self._open and (self._open[0][0] == 0 or len(self._open) > self._window):
            self._close()

    def finish(self) -> None:
        """Close all open rows, the fullest first."""
        while self._open:
            self._close()

    def _close(self) -> None:
        free, age = self._open.pop(0)
        row = self._rows.pop(age)
        if free:
            row[self._seq_len - free] |= STARTS  # the padding is its own document
        self._write(row)


class Padder:
    """Gives every piece its own row, for models in which nothing keeps the documents of a row apart.

    Pieces of similar length come one after another: ``window`` of them are sorted at a time. Memory: ``4 * seq_len *
    window`` bytes.
    """

    def __init__(self, seq_len: int, pad: int, write: Callable[[np.ndarray], object], window: int = 1024) -> None:
        """Start without rows; ``write`` receives every one, uint32 [seq_len]."""
        self._seq_len, self._pad, self._write, self._window = seq_len, pad, write, window
        self._held: list[np.ndarray] = []

    def add(self, piece: np.ndarray) -> None:
        """Take one piece, of 1 to ``seq_len`` words."""
        self._held.append(piece)
        if len(self._held) == self._window:
            self.finish()

    def finish(self) -> None:
        """Write the pieces that are held, the shortest first."""
        for piece in sorted(self._held, key=len):
            row = np.full(self._seq_len, self._pad, dtype=np.uint32)
            row[: len(piece)] = piece
            if len(piece) < self._seq_len:
                row[len(piece)] |= STARTS
            self._write(row)
        self._held = []


def first_lengths(rows: np.ndarray) -> np.ndarray:
    """Return the length of the first document of each row, int64 [rows], given words uint32 [rows, seq_len]."""
    starts = (rows[:, 1:] & STARTS) != 0
    return np.where(starts.any(1), starts.argmax(1) + 1, rows.shape[1])


def padding_of(rows: np.ndarray) -> np.ndarray:
    """Return which words are padding, bool [rows, seq_len]: a row's last document if nothing in it carries loss."""
    places = np.arange(rows.shape[1], dtype=np.int64)
    last = rows.shape[1] - 1 - ((rows & STARTS) != 0)[:, ::-1].argmax(1)
    within = places >= last[:, None]
    trained = ((rows & TRAINED != 0) & within).any(1)
    padding: np.ndarray = within & ~trained[:, None]
    return padding


def unpack(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ``input_ids``, ``labels`` and ``position_ids``, int64 [rows, seq_len], of words uint32 [rows, seq_len]."""
    ids = (rows & ID_MASK).astype(np.int64)
    labels = np.where(rows & TRAINED, ids, -100)
    places = np.arange(rows.shape[1], dtype=np.int64)
    starts = np.maximum.accumulate(np.where(rows & STARTS, places, 0), axis=1)
    return ids, labels, places - starts
