"""Batches of items: of pairs of answers, of labelled answers, and of texts with a class."""

from abc import abstractmethod

import numpy as np
import torch

from common.data.batches import Batches, DataConfig, rounded_width
from common.data.items.shapes import margin_of
from common.data.packed.packing import STARTS, TRAINED, draw_rows, first_lengths, unpack
from common.data.packed.token_file import TokenFile
from common.data.rows import PADDING
from common.errors import UserError
from common.units import format_count

IGNORED = -100
REFERENCE = "reference_log_probs"  # The batch's log-probabilities under a reference, one per row, fp32 `[R]`


class ItemBatches(Batches):
    """Batches of items, each of which is one or more neighboring rows of a token file.

    The last word of each row of the file is its item's mark.

    Args:
        file: rows of ``config.seq_len`` words, and one more.
        config: of the data; its batch size counts items.
        classifies: whether batches are for a sequence classifier: with ``attention_mask``, and no targets.
    """

    rows_in_file = 1  # Rows of the file that are one item
    what = "rows"  # What items are

    def __init__(self, file: TokenFile, config: DataConfig, classifies: bool = False) -> None:
        header = file.header
        self._file, self._config, self._classifies = file, config, classifies
        self.reference: np.ndarray | None = None
        """Log-probabilities under a reference, fp32, where :meth:`row_numbers` says; None if there are none."""
        self.rows = header.rows // self.rows_in_file
        self.tokens, self.trainable_tokens = header.tokens, header.trainable_tokens
        self.steps_per_epoch = -(-self.rows // config.batch_size)
        self.digest, self.labels_ahead = header.digest, config.labels_ahead
        counts = (
            f"{self.rows:,} {self.what} from {header.files:,} {'file' if header.files == 1 else 'files'}: "
            f"{format_count(header.tokens)} tokens, {format_count(header.trainable_tokens)} of them in answers"
        )
        self.description = "\n".join([counts, *header.changes(config.seq_len, config.truncate)])

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """Return the batch of a step; see the class.

        Rows are as long as the longest of the batch, rounded up. ``input_ids`` are int64
        ``[rows_per_item batch_size, tokens]``, and so are, for a language model, ``labels`` and ``position_ids``, with
        :data:`PADDING`.
        """
        batch = self._batch(step)
        if self.reference is not None:
            batch[REFERENCE] = torch.from_numpy(self.reference[self.row_numbers(step)])
        return batch

    @abstractmethod
    def _batch(self, step: int) -> dict[str, torch.Tensor]:
        """Return the batch of a step from the file."""

    def row_numbers(self, step: int) -> np.ndarray:
        """Return the places of a step's rows in the file, int64 ``[R]``."""
        return self._rows_of(self.drawn(step))

    def row_count(self, steps: int) -> int:
        """Return a number above all those of :meth:`row_numbers` in ``steps`` steps."""
        return self.rows * self.rows_in_file

    def steps_of_new_rows(self, steps: int) -> int:
        """Return how many of the first ``steps`` steps have rows that none before them has: those of an epoch."""
        return min(steps, self.steps_per_epoch)

    def drawn(self, step: int) -> np.ndarray:
        """Return the items of a step, int64 ``[batch_size]``."""
        size = self._config.batch_size
        seed = self._config.seed if self._config.shuffle else None
        return draw_rows(range(step * size, (step + 1) * size), self.rows, seed)

    def _rows_of(self, items: np.ndarray) -> np.ndarray:
        each = self.rows_in_file
        return (each * items[:, None] + np.arange(each)).reshape(-1)

    def _read(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of a step, uint32 ``[R, seq_len]``, and the marks of its items, uint32 ``[batch_size]``."""
        words = self._file.read(self._rows_of(self.drawn(step)))
        return words[:, :-1], words[:: self.rows_in_file, -1].copy()

    def _named(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        lengths = first_lengths(rows)
        rows = rows[:, : rounded_width(int(lengths.max()))]
        ids, labels, _ = unpack(rows)
        places = np.broadcast_to(np.arange(rows.shape[1], dtype=np.int64), rows.shape)
        if self._classifies:
            named = {"input_ids": ids, "attention_mask": (places < lengths[:, None]).astype(np.int64)}
        else:
            if self.labels_ahead:
                labels = np.concatenate([labels[:, 1:], np.full_like(labels[:, :1], IGNORED)], axis=1)
            padding = places >= lengths[:, None]
            named = {"input_ids": ids, "labels": labels, "position_ids": places.copy(), PADDING: padding}
        return {name: torch.from_numpy(value) for name, value in named.items()}

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class PairBatches(ItemBatches):
    """Batches of P pairs: rows 2 i and 2 i + 1 of a batch are the preferred and the rejected answer of its pair i.

    For a classifier, there are ``margins``, fp32 ``[P]``, too.
    """

    rows_per_item = rows_in_file = 2
    what = "pairs"

    def _batch(self, step: int) -> dict[str, torch.Tensor]:
        rows, marks = self._read(step)
        margins = {"margins": torch.from_numpy(margin_of(marks))} if self._classifies else {}
        return self._named(rows) | margins


class AnswerBatches(ItemBatches):
    """Batches of N labelled answers: row 2 i of a batch is a prompt with its answer, and row 2 i + 1 the same prompt
    with the answer of the item before (of the first, with the last one's), from which KTO estimates a distance. That
    is the one before in the batch where batches are shuffled, and in the data where they are not.

    ``desirable``, bool ``[N]``, says which answers are.
    """

    rows_per_item = 2
    what = "answers"

    def __init__(self, file: TokenFile, config: DataConfig, classifies: bool = False) -> None:
        super().__init__(file, config, classifies)
        if min(config.batch_size, self.rows) < 2:
            raise UserError(
                f"kto compares each answer with another one of its batch, and a batch has {config.batch_size} of "
                f"{self.rows:,} answers: it takes at least 2 of both (--batch-size 2)."
            )

    def _batch(self, step: int) -> dict[str, torch.Tensor]:
        rows, marks = self._read(step)
        items, begins = self.drawn(step), ((rows & TRAINED) != 0).argmax(1)
        if self._config.shuffle:
            # Where an epoch ends within the batch, the neighbor may be the same answer again.
            before = [[items[place - back] for back in range(1, len(items))] for place in range(len(items))]
            others = np.array(
                [
                    next((other for other in ahead if other != item), ahead[0])
                    for item, ahead in zip(items, before, strict=True)
                ]
            )
        else:  # held-out data
            others = (items - 1) % self.rows
        both = np.repeat(rows, 2, axis=0)
        for row, begin, answer in zip(both[1::2], begins, self._answers(others), strict=True):
            pasted_answer(row, int(begin), answer, self._file.header.seq_len - 1)
        return self._named(both) | {"desirable": torch.from_numpy(marks.astype(bool))}

    def _answers(self, items: np.ndarray) -> list[np.ndarray]:
        """Return the answers of some items, uint32 each."""
        rows = self._file.read(self._rows_of(items))[:, :-1]
        begins = ((rows & TRAINED) != 0).argmax(1)
        return [row[begin:stop] for row, begin, stop in zip(rows, begins, first_lengths(rows), strict=True)]

    # Each step has new rows, as answers meet other prompts.

    def row_numbers(self, step: int) -> np.ndarray:
        rows = self.rows_per_item * self._config.batch_size
        return np.arange(step * rows, (step + 1) * rows)

    def row_count(self, steps: int) -> int:
        return steps * self.rows_per_item * self._config.batch_size

    def steps_of_new_rows(self, steps: int) -> int:
        return steps


class ClassBatches(ItemBatches):
    """Batches of R texts; ``labels``, int64 ``[R]``, are their classes."""

    what = "texts"

    def _batch(self, step: int) -> dict[str, torch.Tensor]:
        rows, marks = self._read(step)
        return self._named(rows) | {"labels": torch.from_numpy(marks.astype(np.int64))}


def pasted_answer(row: np.ndarray, begin: int, answer: np.ndarray, room: int) -> None:
    """Put another answer into a row of words, in place, from ``begin`` on; what does not fit is cut."""
    pad = row[-1] & ~(STARTS | TRAINED)
    stop = min(begin + len(answer), room)
    row[begin:stop] = answer[: stop - begin]
    if stop < room:
        row[stop:] = pad
        row[stop] |= STARTS
