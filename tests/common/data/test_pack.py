"""The packer against a twin in plain lists, and its words against their meaning."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.data.encode import EncodedSegment
from common.data.pack import (
    ID_MASK,
    STARTS,
    TRAINED,
    Packer,
    TokenFile,
    cut_documents,
    unpack,
    write_token_file,
)
from common.data.selection import Counts
from common.errors import FinetuneError

PAD = 7


def twin_packer(pieces: list[list[int]], seq_len: int, window: int) -> list[list[int]]:
    """Best fit, oldest first among equals, over at most ``window`` open rows; lists only, no sorting."""
    done, rows = [], []
    for piece in pieces:
        fitting = [row for row in rows if seq_len - len(row) >= len(piece)]
        if fitting:
            row = max(fitting, key=len)  # the first of the longest
        else:
            row = []
            rows.append(row)
        row += piece
        while rows and (len(rows) > window or max(map(len, rows)) == seq_len):
            fullest = max(rows, key=len)
            rows = [row for row in rows if row is not fullest]
            done.append(fullest)
    while rows:
        fullest = max(rows, key=len)
        rows = [row for row in rows if row is not fullest]
        done.append(fullest)
    return done


def twin_labels(pieces: list[np.ndarray], seq_len: int) -> tuple[list[int], list[int], list[int]]:
    """ids, labels and positions of one row of pieces and padding."""
    ids, labels, positions = [], [], []
    for piece in pieces:
        for position, word in enumerate(piece.tolist()):
            ids.append(word % 2**30)
            labels.append(word % 2**30 if word & 2**30 and position else -100)
            positions.append(position)
    rest = seq_len - len(ids)
    return ids + [PAD] * rest, labels + [-100] * rest, positions + list(range(rest))


def make_pieces(lengths: list[int]) -> list[np.ndarray]:
    """Pieces whose ids count up from 100, so that each token is known again; every third carries no loss."""
    numbers, pieces = iter(range(100, 10**9)), []
    for length in lengths:
        piece = np.array([next(numbers) for _ in range(length)], dtype=np.uint32)
        piece[(piece % 3 > 0)] |= TRAINED
        piece[0] = (piece[0] & ID_MASK) | STARTS
        pieces.append(piece)
    return pieces


def pack(pieces: list[np.ndarray], seq_len: int, window: int) -> list[np.ndarray]:
    rows: list[np.ndarray] = []
    packer = Packer(seq_len, PAD, rows.append, window)
    for piece in pieces:
        packer.add(piece)
    packer.finish()
    return rows


@st.composite
def packings(draw: st.DrawFn) -> tuple[list[int], int, int]:
    seq_len = draw(st.integers(2, 40))
    lengths = draw(st.lists(st.integers(1, seq_len), min_size=1, max_size=60))
    return lengths, seq_len, draw(st.integers(1, 8))


@given(packings())
def test_packer_equals_plain_twin(packing: tuple[list[int], int, int]) -> None:
    lengths, seq_len, window = packing
    pieces = make_pieces(lengths)
    rows = pack(pieces, seq_len, window)
    twin = twin_packer([piece.tolist() for piece in pieces], seq_len, window)
    assert [row[: len(expected)].tolist() for row, expected in zip(rows, twin, strict=True)] == twin

    by_first = {int(piece[0]): piece for piece in pieces}
    ids, labels, positions = unpack(np.stack(rows))
    for number, words in enumerate(twin):
        in_row = [by_first[word] for word in words if word & 2**31]
        expected = twin_labels(in_row, seq_len)
        assert (ids[number].tolist(), labels[number].tolist(), positions[number].tolist()) == expected


def test_packer_fills_rows_and_stays_within_its_window() -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(1, 200, 3000).tolist()
    closed_at: list[int] = []
    packer = Packer(256, PAD, lambda row: closed_at.append(1), window=16)
    most = 0
    for piece in make_pieces(lengths):
        packer.add(piece)
        most = max(most, len(packer._rows))
    packer.finish()
    assert most <= 16
    assert sum(lengths) / (len(closed_at) * 256) > 0.96


def segments_of(lengths: list[list[int]]) -> Iterator[EncodedSegment]:
    """Documents given as lengths of their segments; ids count up over all."""
    numbers = iter(range(10**9))
    for document in lengths:
        for position, length in enumerate(document):
            ids = np.array([next(numbers) for _ in range(length)], dtype=np.uint32)
            yield EncodedSegment(ids, np.ones(length, dtype=bool), ends=position == len(document) - 1)


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=4), max_size=12), st.integers(3, 17))
def test_cut_keeps_every_token_in_order(lengths: list[list[int]], seq_len: int) -> None:
    pieces = list(cut_documents(segments_of(lengths), seq_len))
    assert [int(word & ID_MASK) for piece in pieces for word in piece] == list(range(sum(map(sum, lengths))))
    expected_ends = np.cumsum([sum(document) for document in lengths if sum(document)]).tolist()
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    assert set(expected_ends) <= set(ends), "a piece reaches over the end of a document"
    for piece in pieces:
        assert len(piece) <= seq_len
        assert (piece & STARTS != 0).tolist() == [True] + [False] * (len(piece) - 1)
        assert (piece & TRAINED != 0).tolist() == [False] + [True] * (len(piece) - 1)
    # As few pieces as possible, and a piece of one token only where the whole document is one token.
    assert len(pieces) == sum(-(-sum(document) // seq_len) for document in lengths)
    assert sum(len(piece) == 1 for piece in pieces) == sum(sum(document) == 1 for document in lengths)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 18])
def test_segments_do_not_matter(length: int) -> None:
    at_once = [piece.tolist() for piece in cut_documents(segments_of([[length]]), 8)]
    one_by_one = [piece.tolist() for piece in cut_documents(segments_of([[1] * length]), 8)]
    assert at_once == one_by_one


def test_rows_that_were_exchanged_or_copied_are_not_read(tmp_path: Path) -> None:
    """As by a drive that writes to another place."""
    file, rows = tmp_path / "a.tokens", np.arange(12, dtype=np.uint32).reshape(4, 3)
    with write_token_file(file, Counts(seq_len=3, files=1)) as add:
        for row in rows:
            add(row)
    content = file.read_bytes()
    size = 4 * (3 + 1) + 4
    start = len(content) - 4 * size
    parts = [content[at : at + size] for at in range(start, len(content), size)]
    for order in itertools.product(range(4), repeat=4):
        file.write_bytes(content[:start] + b"".join(parts[number] for number in order))
        read = TokenFile(file)
        for row, number in enumerate(order):
            if row == number:
                assert read.read(np.array([row]))[0].tolist() == [rows[row].tolist()]
            else:
                with pytest.raises(FinetuneError, match="The packed data are damaged"):
                    read.read(np.array([row]))
        read.close()
