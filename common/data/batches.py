"""Batches of tokens for training: ``open_data`` for data files, ``RandomBatches`` where there are none."""

import contextlib
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from common.activity import Activity, activity
from common.data.encoding.encoder import EncodedSegment, Encoder
from common.data.encoding.fitting import RowFitter
from common.data.files import find_files
from common.data.packed.packing import (
    TRAINED,
    Packer,
    Padder,
    cut_documents,
    draw_rows,
    first_lengths,
    padding_of,
    unpack,
)
from common.data.packed.token_file import Header, TokenFile, cache_key, remove_unfinished, write_token_file
from common.data.records import is_text_file
from common.data.rows import PADDING
from common.data.selection import RecordSelection, nothing_to_train
from common.data.shapes import examples_of_records, examples_of_text_file
from common.errors import UserError
from common.memory.meter import return_free_memory
from common.store.lock import DirectoryLock
from common.units import counted, format_bytes, format_count

Opened = TypeVar("Opened", bound="Batches")
WIDTH_MULTIPLE = 64
"""Number of tokens to a multiple of which batches are padded where rows are not packed."""


@dataclass(frozen=True)
class DataConfig:
    """What to train on, and in which portions."""

    files: tuple[str, ...]
    """Files and directories, as the user named them."""
    seq_len: int
    """Tokens per row."""
    batch_size: int
    """Rows per step."""
    seed: int = 0
    """Seed of the order of the rows, which is a new one in every epoch."""
    shuffle: bool = True
    """Whether rows are shuffled; if not, they come in the order in which packing finished them, about the files'."""
    packed: bool = True
    """Whether documents share rows. If not, each has its own row, and batches are as long as their longest row."""
    labels_ahead: bool = False
    """Whether the label of a position is the next token, for models whose own loss does not shift labels."""
    truncate: bool = True
    """Whether records with a prompt that are longer than a row are cut; else they are left out. See
    :mod:`common.data.encoding.fitting`."""
    selection: RecordSelection = field(default_factory=RecordSelection)
    """Which records are taken."""
    every_token: bool = False
    """Whether every token carries loss, those of prompts among them."""
    vocab_size: int | None = None
    """Number of tokens that the model knows, which the data may not exceed; None: as many as there are."""
    drop_unseen: bool = False
    """Whether conversations with text that the chat template leaves out are left out; else they are an error."""

    @property
    def identity(self) -> list[Any]:
        """What the prepared data depend on, other than files, tokenizer, and rows, as JSON."""
        return [*self.selection.identity, self.every_token, self.vocab_size, self.drop_unseen]

    def encoder(self, tokenizer: PreTrainedTokenizerBase, is_alone: bool = False) -> Encoder:
        """Return an encoder of these data; see its arguments."""
        return Encoder(
            tokenizer,
            RowFitter(self.seq_len, self.truncate),
            vocab_size=self.vocab_size,
            every_token=self.every_token,
            is_alone=is_alone,
            drop_unseen=self.drop_unseen,
        )

    def __post_init__(self) -> None:
        if not self.files:
            raise UserError("No data files given.")
        if self.seq_len < 2:
            raise UserError(f"A sequence length of {self.seq_len} leaves nothing to predict; it must be at least 2.")
        if self.batch_size < 1:
            raise UserError(f"The batch size must be at least 1, not {self.batch_size}.")


class Batches(ABC):
    """The batch of step s is a pure function of (data, seed, s): resuming needs nothing but the step number.

    Steps draw from an endless sequence of epochs, each a fresh order of all rows, so a batch at the end of an
    epoch is completed with the first rows of the next, and any number of rows serves any batch size.
    """

    steps_per_epoch: int
    """Steps after which every row was seen: rows / batch size, rounded up."""
    rows: int
    tokens: int
    """Number of tokens of one epoch, without padding."""
    trainable_tokens: int
    """Number of tokens of one epoch that carry loss."""
    description: str
    """Text for the user: a line, and one more for each thing that is not as the files have it."""
    labels_ahead: bool = False
    """Whether the label of a position is the token to predict there; if not, it is the token at that position."""
    packed: bool = False
    """Whether documents share rows."""
    rows_per_item: int = 1
    """Rows of a batch that belong together: 2 of pairs. ``rows`` and batch sizes count what they make up."""

    @abstractmethod
    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """Return ``input_ids``, ``labels`` and ``position_ids`` of a step (from 0), int64 [batch_size, seq_len], and
        which of them are padding, if any can be (:data:`PADDING`).

        Several documents share a row, if they are packed, and ``position_ids`` restart at 0 with each. ``labels`` are
        -100 where no loss is wanted, and as the model's own loss takes them (``labels_ahead``).
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Close the files behind this."""


class PackedBatches(Batches):
    """Batches of a packed token file. They take the memory of one batch, for data of any size."""

    def __init__(self, file: TokenFile, config: DataConfig) -> None:
        header = file.header
        self._file = file
        self._config = config
        self.rows = header.rows
        self.tokens = header.tokens
        self.trainable_tokens = header.trainable_tokens
        self.steps_per_epoch = -(-header.rows // config.batch_size)
        self.digest = header.digest
        self.labels_ahead, self.packed = config.labels_ahead, config.packed
        self.description = _describe(header, config)

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """Read the rows of a step; see :meth:`Batches.batch`."""
        size = self._config.batch_size
        # Rows that are not packed stay with their like: neighbors, which are about as long.
        rows = self._drawn(range(step * size, (step + 1) * size), group_size=1 if self.packed else size)
        return batch_of_words(self._file.read(rows), self.packed, self.labels_ahead)

    def words(self, draws: range) -> np.ndarray:
        """Read the rows at some places of the endless sequence of epochs, uint32 [len(draws), seq_len]."""
        return self._file.read(self._drawn(draws))

    def _drawn(self, draws: range, group_size: int = 1) -> np.ndarray:
        """Return the rows at some places of the endless sequence of epochs, of which neighbors stay together."""
        seed = self._config.seed if self._config.shuffle else None
        return draw_rows(draws, self.rows, seed, group_size)

    def close(self) -> None:
        """Close the token file."""
        self._file.close()


def batch_of_words(rows: np.ndarray, packed: bool, labels_ahead: bool) -> dict[str, torch.Tensor]:
    """Return a batch of rows of a token file, uint32 [batch_size, seq_len]; see :meth:`Batches.batch`."""
    if not packed:
        rows = rows[:, : rounded_width(int(first_lengths(rows).max()))]
    ids, labels, positions = unpack(rows)
    if not packed:  # padding comes last, where nothing sees it
        positions = np.broadcast_to(np.arange(rows.shape[1], dtype=np.int64), rows.shape).copy()
    if labels_ahead:  # the first token of a document has none, so none is of another document
        labels = _moved_ahead(labels)
    return {
        "input_ids": torch.from_numpy(ids),
        "labels": torch.from_numpy(labels),
        "position_ids": torch.from_numpy(positions),
        PADDING: torch.from_numpy(padding_of(rows)),
    }


class RandomBatches(Batches):
    """Random tokens, to measure throughput with: every row is one document, every step the same amount of work."""

    def __init__(
        self, vocab_size: int, seq_len: int, batch_size: int, seed: int = 0, labels_ahead: bool = False
    ) -> None:
        self._vocab_size = vocab_size
        self.labels_ahead = labels_ahead
        self._shape = (batch_size, seq_len)
        self._seed = seed
        self.rows = batch_size
        self.steps_per_epoch = 1
        self.tokens = batch_size * seq_len
        self.trainable_tokens = batch_size * (seq_len - 1)
        self.description = (
            f"random tokens in rows of {seq_len:,}: no data was given, so this measures throughput and learns nothing"
        )

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """Draw the tokens of a step from the seed and ``step``; see :meth:`Batches.batch`."""
        random = np.random.default_rng((self._seed, step))
        ids = torch.from_numpy(random.integers(self._vocab_size, size=self._shape, dtype=np.int64))
        labels = ids.clone()
        labels[:, 0] = -100
        return {
            "input_ids": ids,
            "labels": torch.from_numpy(_moved_ahead(labels.numpy())) if self.labels_ahead else labels,
            "position_ids": torch.arange(self._shape[1]).repeat(self._shape[0], 1),
        }


def open_data(config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache_dir: Path) -> PackedBatches:
    """Open batches of the data in ``config.files``: tokenized and packed into a file in ``cache_dir``, or found there.

    The file is used again as long as data files, tokenizer, ``seq_len`` and ``truncate`` are the same; it takes 4 bytes
    per token.

    Raises:
        UserError: a file is missing, cannot be read or understood, or there is nothing in it to train on.
    """
    files = find_files(config.files)
    cache_dir.mkdir(parents=True, exist_ok=True)
    key = cache_key(files, config.seq_len, tokenizer, config.truncate, config.packed, config.identity)
    path = cache_dir / f"data-{key}.tokens"

    def build(doing: Activity) -> None:
        doing.what = f"reading {_named(files)}"
        _build(path, files, config, tokenizer, doing)

    return open_or_build(lambda: PackedBatches(TokenFile(path), config), build, cache_dir)


def open_or_build(open_file: Callable[[], Opened], build: Callable[[Activity], None], cache_dir: Path) -> Opened:
    """Return what ``open_file`` opens, built before where it is not there, or damaged."""
    unusable = contextlib.suppress(OSError, ValueError, TypeError)
    with unusable:
        return open_file()
    with (
        activity("waiting for another run that prepares the same data") as doing,
        DirectoryLock([cache_dir], patience=math.inf),  # of several ranks on a machine, the first one makes it for all
    ):
        with unusable:
            return open_file()
        remove_unfinished(cache_dir)
        build(doing)
    _return_free_memory()
    return open_file()


def _named(files: list[Path]) -> str:
    """Return data files as people read them, with their size."""
    size = format_bytes(sum(file.stat().st_size for file in files))
    return f"{files[0].name} ({size})" if len(files) == 1 else f"{len(files):,} data files ({size})"


def _build(
    path: Path, files: list[Path], config: DataConfig, tokenizer: PreTrainedTokenizerBase, doing: Activity
) -> None:
    seq_len, encoder = config.seq_len, config.encoder(tokenizer)
    header = Header(seq_len=seq_len, files=len(files), **encoder.fitting.tallies())
    with write_token_file(path, header) as out:

        def write(row: np.ndarray) -> None:
            header.rows += 1
            out.add(row)

        pad = padding_id(tokenizer, config.vocab_size)
        packer = (Packer if config.packed else Padder)(seq_len, pad, write)
        what, encoded = doing.what, _encode_files(files, encoder, config.selection)
        for piece in cut_documents(_count_documents(encoded, header), seq_len):
            doing.what = f"{what}: {format_count(header.tokens)} tokens so far"
            trained = int(np.count_nonzero(piece & TRAINED))
            if not trained:
                header.skipped_tokens += len(piece)
                continue
            header.tokens += len(piece)
            header.trainable_tokens += trained
            packer.add(piece)
        packer.finish()
        if not header.rows:
            raise UserError(nothing_to_train(files, header, _changes(header, config)))


def _return_free_memory() -> None:
    """Return to the system what reading and tokenizing used: allocators keep 100 MB and more for a next time."""
    if "pyarrow" in sys.modules:  # it has read tables
        sys.modules["pyarrow"].default_memory_pool().release_unused()
    return_free_memory()


def _encode_files(files: list[Path], encoder: Encoder, selection: RecordSelection) -> Iterator[EncodedSegment]:
    """Encode the files in their order: each text file is one document, all others have records."""
    if any(map(is_text_file, files)):
        selection.check_whole_files()
    for name, some in groupby(selection.read(files), lambda pair: pair[0]):
        records = (record for _, record in some)
        is_text = is_text_file(Path(name))
        examples = (examples_of_text_file if is_text else examples_of_records)(records, name)
        yield from encoder.encode(examples)


def _count_documents(documents: Iterator[EncodedSegment], header: Header) -> Iterator[EncodedSegment]:
    for document in documents:
        header.documents += document.ends
        yield document


def rounded_width(length: int) -> int:
    """Round a length up: with few lengths, what is planned and recorded for one batch serves others."""
    return -(-length // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def _moved_ahead(labels: np.ndarray) -> np.ndarray:
    """Give every position the label of the next one, int64 [rows, seq_len]."""
    return np.concatenate([labels[:, 1:], np.full_like(labels[:, :1], -100)], axis=1)


def padding_id(tokenizer: PreTrainedTokenizerBase, vocab_size: int | None) -> int:
    """Return a token id to pad with that the model knows. Padding is never attended to and carries no loss."""
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((int(token) for token in known if token is not None and token < (vocab_size or token + 1)), 0)


def _describe(header: Header, config: DataConfig) -> str:
    fill = header.tokens / (header.rows * header.seq_len)
    counts = (
        f"{counted(header.documents, 'document')} from {counted(header.files, 'file')}: "
        f"{format_count(header.tokens)} tokens, {format_count(header.trainable_tokens)} of them trained on, "
        f"in {counted(header.rows, 'row')} of {header.seq_len:,} ({fill:.1%} full)"
    )
    lines = [counts, *_changes(header, config)]
    if not config.packed:
        lines.append("one document in each row: nothing keeps those that share a row apart in this model")
    return "\n".join(lines)


def _changes(header: Header, config: DataConfig) -> list[str]:
    lines = header.changes(header.seq_len, config.truncate)
    if header.skipped_tokens:
        skipped = format_count(header.skipped_tokens)
        lines.append(f"left out: {skipped} tokens of texts of one token")
    return lines
