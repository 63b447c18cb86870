"""Batches of tokens for training: of token files, of several of them with weights, and of random tokens."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from common.data.examples import ItemKind
from common.data.pack import TokenFile, draw_rows, first_lengths, padding_of, shuffled, unpack
from common.data.rows import PADDING
from common.data.selection import RecordSelection
from common.errors import UserError
from common.units import counted, format_count

IGNORED = -100
REFERENCE = "reference_log_probs"  # The batch's log-probabilities under a reference, one per row, fp32 `[R]`
# Number of rows in a row of which every data set has its part exactly: weights count to a thousandth
BLOCK = 1000
WIDTH_MULTIPLE = 64  # Number of tokens to a multiple of which batches are padded where rows are not packed


@dataclass(frozen=True)
class DataConfig:
    """What to train on, and in which portions."""

    files: tuple[str, ...]  # Files and directories, as the user named them
    seq_len: int  # Tokens per row
    batch_size: int  # Rows per step
    seed: int = 0  # Seed of the order of the rows, which is a new one in every epoch
    # Whether rows are shuffled; if not, they come as packing finished them: about as in the files
    shuffle: bool = True
    packed: bool = True  # Whether documents share rows; if not, batches are as long as their longest row
    kind: ItemKind | None = None  # What items are, which have rows to themselves; None: documents
    # Whether a position's label is the next token, for models whose loss does not shift labels
    labels_ahead: bool = False
    # Whether records with a prompt that are longer than a row are cut; else they are left out
    truncate: bool = True
    selection: RecordSelection = field(default_factory=RecordSelection)  # Which records are taken
    every_token: bool = False  # Whether every token carries loss, those of prompts among them
    # Number of tokens that the model knows, which the data may not exceed; None: any
    vocab_size: int | None = None
    # Whether chats with text that the template leaves out are left out; else they are an error
    drop_unseen: bool = False

    @property
    def identity(self) -> list[Any]:
        """What the prepared data depend on, other than files and tokenizer, as JSON."""
        rows = [self.seq_len, self.truncate, self.packed, self.every_token, self.vocab_size, self.drop_unseen]
        kind = [] if self.kind is None else [self.kind.name, self.kind.pad, *self.kind.identity]
        return [*rows, asdict(self.selection), kind]

    def __post_init__(self) -> None:
        if not self.files:
            raise UserError("No data files given.")
        if self.seq_len < 2:
            raise UserError(
                f"A sequence length of {self.seq_len} leaves nothing to predict; it must be at least 2."
            )
        if self.batch_size < 1:
            raise UserError(f"The batch size must be at least 1, not {self.batch_size}.")


class Batches(ABC):
    """The batch of step s is a pure function of (data, seed, s): resuming needs nothing but the step number.

    Steps draw from an endless sequence of epochs, each a fresh order of all rows, so a batch at the end of an
    epoch is completed with the first rows of the next, and any number of rows serves any batch size.
    """

    steps_per_epoch: int  # Steps after which every row was seen: rows / batch size, rounded up
    rows: int
    tokens: int  # Number of tokens of one epoch, without padding
    trainable_tokens: int  # Number of tokens of one epoch that carry loss
    # Text for the user: a line, and one more for each thing that is not as the files have it
    description: str
    stops: Sequence[int] = ()  # Tokens that end answers, at which generation has to stop
    # Whether a position's label is the token to predict there, not the token at that position
    labels_ahead: bool = False
    packed: bool = False  # Whether documents share rows
    # Rows of a batch that belong together: 2 of pairs; `rows` and batch sizes count these groups
    rows_per_item: int = 1

    @abstractmethod
    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """Return ``input_ids``, ``labels`` and ``position_ids`` of a step (from 0), int64 [batch_size, seq_len], and
        which of them are padding, if any can be (:data:`PADDING`).

        Several documents share a row, if they are packed, and ``position_ids`` restart at 0 with each. ``labels`` are
        -100 where no loss is wanted, and as the model's own loss takes them (``labels_ahead``).
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Close the files behind this."""


class RandomBatches(Batches):
    """Random tokens, to measure throughput with: every row is one document, every step the same amount of work."""

    def __init__(
        self, vocab_size: int, seq_len: int, batch_size: int, seed: int = 0, labels_ahead: bool = False
    ) -> None:
        self._vocab_size = vocab_size
        self._shape = (batch_size, seq_len)
        self._seed = seed
        self.labels_ahead = labels_ahead
        self.rows = batch_size
        self.steps_per_epoch = 1
        self.tokens = batch_size * seq_len
        self.trainable_tokens = batch_size * (seq_len - 1)
        self.description = (
            f"random tokens in rows of {seq_len:,}: this measures throughput and learns nothing"
        )

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """Draw the tokens of a step from the seed and ``step``; see :meth:`Batches.batch`."""
        ids = np.random.default_rng((self._seed, step)).integers(
            self._vocab_size, size=self._shape, dtype=np.int64
        )
        labels = ids.copy()
        labels[:, 0] = IGNORED
        labels = _moved_ahead(labels) if self.labels_ahead else labels
        positions = torch.arange(self._shape[1]).repeat(self._shape[0], 1)
        return {
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "position_ids": positions,
        }


class PackedBatches(Batches):
    """Batches of a token file: of documents that share rows, or have one each where nothing would keep them apart; or
    of items, whose rows are neighbors. They take the memory of one batch, for data of any size.

    Attributes:
        reference: log-probabilities of an item's rows under a reference, fp32, by :meth:`row_numbers`; None if none.
    """

    def __init__(self, file: TokenFile, config: DataConfig) -> None:
        header = file.header
        kind = config.kind
        self._file = file
        self._config = config
        self.reference: np.ndarray | None = None
        self.packed = config.packed and kind is None
        self.labels_ahead = config.labels_ahead
        self.rows_per_item = 1 if kind is None else kind.rows
        self.rows = header.rows // self.rows_per_item
        self.seq_len = header.seq_len
        self.tokens = header.tokens
        self.trainable_tokens = header.trainable_tokens
        self.digest = header.digest
        self.steps_per_epoch = -(-self.rows // config.batch_size)
        self.stops = header.stops
        files = counted(header.files, "file")
        tokens = format_count(header.tokens)
        trained = format_count(header.trainable_tokens)
        lines = header.changes()
        if kind is None:
            fill = header.tokens / (header.rows * header.seq_len)
            counts = (
                f"{counted(header.documents, 'document')} from {files}: {tokens} tokens, {trained} of them trained on, "
                f"in {counted(header.rows, 'row')} of {header.seq_len:,} ({fill:.1%} full)"
            )
            if not self.packed:
                lines.append(
                    "one document in each row: nothing keeps those that share a row apart in this model"
                )
        else:
            # Texts of classes have none
            answers = f", {trained} of them in answers" if header.trainable_tokens else ""
            counts = f"{self.rows:,} {kind.name} from {files}: {tokens} tokens{answers}"
        self.description = "\n".join([counts, *lines])

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """Read the rows of a step; see :meth:`Batches.batch` and :meth:`ItemKind.values`."""
        numbers = self.row_numbers(step)
        kind = self._config.kind
        rows, marks = self._file.read(numbers)
        batch = batch_of_words(rows, self.packed, self.labels_ahead, kind is not None and kind.classifies)
        if kind is not None:
            values = kind.values(marks[:: self.rows_per_item].copy())
            batch |= {name: torch.from_numpy(value) for name, value in values.items()}
        if self.reference is not None:
            batch[REFERENCE] = torch.from_numpy(self.reference[numbers])
        return batch

    def row_numbers(self, step: int) -> np.ndarray:
        """Return the numbers of a step's rows in the file, int64 ``[R]``."""
        size = self._config.batch_size
        # Documents that are not packed stay with their like: neighbors, which are about as long.
        alike = size if not self.packed and self._config.kind is None else 1
        items = self._drawn(range(step * size, (step + 1) * size), alike)
        return (self.rows_per_item * items[:, None] + np.arange(self.rows_per_item)).reshape(-1)

    def words(self, draws: range) -> np.ndarray:
        """Read the rows at some places of the endless sequence of epochs, uint32 [len(draws), seq_len]."""
        return self._file.read(self._drawn(draws))[0]

    def _drawn(self, draws: range, group_size: int = 1) -> np.ndarray:
        return draw_rows(draws, self.rows, self._config.seed if self._config.shuffle else None, group_size)

    def close(self) -> None:
        """Close the token file."""
        self._file.close()


def batch_of_words(
    rows: np.ndarray, packed: bool, labels_ahead: bool, classifies: bool = False
) -> dict[str, torch.Tensor]:
    """Return a batch of rows of a token file, uint32 [batch_size, seq_len]; see :meth:`Batches.batch`.

    For a sequence classifier, these are ``input_ids`` and ``attention_mask``.
    """
    if packed:
        ids, labels, positions = unpack(rows)
        padding = padding_of(rows)
    else:  # padding comes last, where nothing sees it
        lengths = first_lengths(rows)
        rows = rows[:, : rounded_width(int(lengths.max()))]
        ids, labels, _ = unpack(rows)
        positions = np.broadcast_to(np.arange(rows.shape[1], dtype=np.int64), rows.shape).copy()
        padding = positions >= lengths[:, None]
    if labels_ahead:  # the first token of a document has none, so none is of another document
        labels = _moved_ahead(labels)
    if classifies:
        values = {"input_ids": ids, "attention_mask": (~padding).astype(np.int64)}
    else:
        values = {"input_ids": ids, "labels": labels, "position_ids": positions, PADDING: padding}
    return {name: torch.from_numpy(value) for name, value in values.items()}


def rounded_width(length: int) -> int:
    """Round a length up: with few lengths, what is planned and recorded for one batch serves others."""
    return -(-length // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def _moved_ahead(labels: np.ndarray) -> np.ndarray:
    return np.concatenate([labels[:, 1:], np.full_like(labels[:, :1], IGNORED)], axis=1)


class MixedBatches(Batches):
    """Batches whose rows come from several data sets, in shuffled order. The batch of step s is a pure function of s.

    Each data set goes through its own epochs, in its own order. An epoch of the mixture is as many rows as all
    data sets have together, so that in it a data set of a small weight is not seen to its end, and one of a large
    weight more than once.

    Args:
        parts: the data sets, of one row length.
        weights: how much of the rows is to come from each, in any unit.
        batch_size: rows of a batch.
        seed: seed of the order.
    """

    def __init__(
        self, parts: Sequence[PackedBatches], weights: Sequence[float], batch_size: int, seed: int
    ) -> None:
        self._parts = list(parts)
        self._size = batch_size
        self._seed = seed
        self._counts = counts_of(weights)
        self.rows = sum(part.rows for part in parts)
        self.tokens = sum(part.tokens for part in parts)
        self.trainable_tokens = sum(part.trainable_tokens for part in parts)
        self.steps_per_epoch = -(-self.rows // batch_size)
        self.labels_ahead = parts[0].labels_ahead
        self.packed = parts[0].packed
        self.stops = sorted({token for part in parts for token in part.stops})
        identity = json.dumps([[part.digest for part in parts], self._counts.tolist()])
        self.digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self.description = "\n".join(
            f"{count / BLOCK:.3g} of all rows: {part.description}"
            for count, part in zip(self._counts, parts, strict=True)
        )

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """Read the rows of a step; see :meth:`Batches.batch`."""
        first = step * self._size
        blocks = range(first // BLOCK, (first + self._size - 1) // BLOCK + 1)
        sources = np.concatenate([self._block(number) for number in blocks])[first % BLOCK :][: self._size]
        words = np.empty((self._size, self._parts[0].seq_len), np.uint32)
        for number, part in enumerate(self._parts):
            chosen = sources == number
            if chosen.any():
                begin = self._drawn_before(number, first)
                words[chosen] = part.words(range(begin, begin + int(chosen.sum())))
        return batch_of_words(words, self.packed, self.labels_ahead)

    def _block(self, number: int) -> np.ndarray:
        """Return the data set of each row of a block, int64 [BLOCK]."""
        sources = np.repeat(np.arange(len(self._counts)), self._counts)
        return sources[shuffled(np.arange(BLOCK), BLOCK, (self._seed, -1 - number))]

    def _drawn_before(self, number: int, draw: int) -> int:
        whole, rest = divmod(draw, BLOCK)
        return whole * int(self._counts[number]) + int((self._block(whole)[:rest] == number).sum())

    def close(self) -> None:
        """Close all token files."""
        for part in self._parts:
            part.close()


def counts_of(weights: Sequence[float]) -> np.ndarray:
    """Return how many of :data:`BLOCK` rows come from each data set: largest remainders, int64 [len(weights)].

    Raises:
        UserError: a weight is not positive, or less than a thousandth of all.
    """
    total = sum(weights)
    if not all(weight > 0 for weight in weights):
        shown = ", ".join(f"{weight:g}" for weight in weights)
        raise UserError(f"--data: weights are {shown}: each must be more than 0.")
    exact = np.array(weights) * BLOCK / total
    counts = np.floor(exact).astype(np.int64)
    for number in np.argsort(counts - exact, kind="stable")[: BLOCK - int(counts.sum())]:
        counts[number] += 1
    if not counts.all():
        raise UserError(
            f"--data: the smallest weight is {min(weights) / total:.2g} of the total; the least is a thousandth."
        )
    return counts
