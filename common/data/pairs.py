"""Batches of pairs of answers to one prompt, of which the first is preferred: ``open_pairs`` for data files."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from common.data.batches import Batches, DataConfig, padding_id, rounded_width
from common.data.counts import nothing_to_train
from common.data.encoding.encoder import EncodedSegment, Encoder
from common.data.encoding.fitting import RowFitter
from common.data.files import find_files, read_records, reading
from common.data.packed.order import draw_rows
from common.data.packed.packing import Padder, cut_documents, first_lengths, unpack
from common.data.packed.token_file import Header, TokenFile, cache_key, remove_unfinished, write_token_file
from common.data.shapes import Example, pairs_of_records
from common.errors import UserError
from common.memory.heap import return_free_memory
from common.store.lock import DirectoryLock
from common.units import format_count


class PairBatches(Batches):
    """Batches of pairs: rows 2 i and 2 i + 1 of a batch are the preferred and the rejected answer of its pair i.

    Args:
        file: rows of pairs, likewise.
        config: of the data; its batch size counts pairs.
    """

    rows_per_item = 2

    def __init__(self, file: TokenFile, config: DataConfig) -> None:
        header = file.header
        self._file, self._config = file, config
        self.rows = header.rows // 2
        self.tokens, self.trainable_tokens = header.tokens, header.trainable_tokens
        self.steps_per_epoch = -(-self.rows // config.batch_size)
        self.digest, self.labels_ahead = header.digest, config.labels_ahead
        counts = (
            f"{self.rows:,} pairs from {header.files:,} {'file' if header.files == 1 else 'files'}: "
            f"{format_count(header.tokens)} tokens, {format_count(header.trainable_tokens)} of them in answers"
        )
        self.description = "\n".join([counts, *header.changes(header.seq_len, config.truncate)])

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """Return ``input_ids``, ``labels`` and ``position_ids`` of a step, int64 ``[2 batch_size, tokens]``.

        Rows are as long as the longest of the batch, rounded up.
        """
        size = self._config.batch_size
        draws, seed = range(step * size, (step + 1) * size), self._config.seed if self._config.shuffle else None
        pairs = draw_rows(draws, self.rows, seed)
        rows = self._file.read(np.stack([2 * pairs, 2 * pairs + 1], axis=1).reshape(-1))
        rows = rows[:, : rounded_width(int(first_lengths(rows).max()))]
        ids, labels, _ = unpack(rows)
        positions = np.broadcast_to(np.arange(rows.shape[1], dtype=np.int64), rows.shape).copy()
        if self.labels_ahead:
            labels = np.concatenate([labels[:, 1:], np.full_like(labels[:, :1], -100)], axis=1)
        named = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(value) for name, value in named.items()}

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def open_pairs(config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache_dir: Path) -> PairBatches:
    """Open batches of the pairs in ``config.files``: tokenized into a file in ``cache_dir``, or found there.

    Raises:
        UserError: a file is missing, cannot be read or understood, or there is no pair in it.
    """
    files = find_files(config.files)
    cache_dir.mkdir(parents=True, exist_ok=True)
    path = cache_dir / f"pairs-{cache_key(files, config.seq_len, tokenizer, config.truncate, packed=False)}.tokens"
    unusable = contextlib.suppress(OSError, ValueError)  # not there, or damaged
    with unusable:
        return PairBatches(TokenFile(path), config)
    with DirectoryLock([cache_dir], patience=math.inf):  # of several ranks on a machine, the first one makes it for all
        with unusable:
            return PairBatches(TokenFile(path), config)
        remove_unfinished(cache_dir)
        _build(path, files, config, tokenizer)
    return_free_memory()
    return PairBatches(TokenFile(path), config)


def _build(path: Path, files: list[Path], config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    fitting = RowFitter(config.seq_len, config.truncate)
    header = Header(seq_len=config.seq_len, files=len(files))
    header.cut, header.left_out, header.untrained = fitting.cut, fitting.left_out, fitting.untrained
    encoder = Encoder(tokenizer, fitting)
    with write_token_file(path, header) as out, reading(path.parent) as scratch:

        def write(row: np.ndarray) -> None:
            header.rows += 1
            out.add(row)

        for file in files:
            for pair in pairs_of_records(read_records(file, scratch), str(file)):
                header.documents += 1
                answers = [_one(encoder, example) for example in pair]
                for answer in answers if all(one is not None for one in answers) else ():
                    assert answer is not None
                    header.tokens += len(answer.ids)
                    header.trainable_tokens += int(answer.trained.sum())
                    # Two rows of one pair are neighbours, whichever is longer.
                    padder = Padder(config.seq_len, padding_id(tokenizer), write, window=1)
                    for piece in cut_documents(iter([answer]), config.seq_len):
                        padder.add(piece)
        if not header.rows:
            changes = header.changes(config.seq_len, config.truncate)
            raise UserError(nothing_to_train(files, is_empty=not header.documents, changes=changes))


def _one(encoder: Encoder, example: Example) -> EncodedSegment | None:
    """Return an answer with its prompt as one row; None if it does not fit into one, or teaches nothing."""
    found: Iterator[EncodedSegment] = encoder.encode([example])
    made = list(found)
    return made[0] if len(made) == 1 and made[0].trained[1:].any() else None
