"""Open batches of items: records become a token file of rows with marks, or one that is there is found."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from common.data.batches import DataConfig, open_or_build, padding_id
from common.data.encoding.encoder import EncodedSegment, Encoder
from common.data.files import find_files
from common.data.items.batches import AnswerBatches, ClassBatches, ItemBatches, PairBatches
from common.data.items.shapes import Item, answers_of_records, classes_of_records, labels_of_records, pairs_of_records
from common.data.packed.packing import Padder, cut_documents
from common.data.packed.token_file import Header, TokenFile, TokenFileWriter, cache_key, write_token_file
from common.data.records import DataRecord
from common.data.selection import nothing_to_train
from common.data.shapes import Example, PlainText
from common.errors import UserError

Records = Iterable[tuple[str, DataRecord]]


@dataclass(frozen=True)
class ItemKind:
    """What items are made of, and the batches that they become."""

    name: str
    batches: type[ItemBatches]
    items: Callable[[Records], Iterator[Item]]
    classifies: bool = False  # Whether batches are for a sequence classifier
    pad: int | None = None  # Token to pad with; None: the tokenizer's
    identity: tuple[object, ...] = ()  # What else the rows depend on, as JSON


def pair_kind(classifies: bool = False, pad: int | None = None) -> ItemKind:
    """Return the kind of items that are pairs of answers."""
    return ItemKind("pairs", PairBatches, pairs_of_records, classifies, pad)


def answer_kind() -> ItemKind:
    """Return the kind of items that are labelled answers."""
    return ItemKind("answers", AnswerBatches, answers_of_records)


def class_kind(classes: dict[str, int], pad: int | None = None) -> ItemKind:
    """Return the kind of items that are texts with a class.

    Args:
        classes: numbers of the classes by name.
        pad: token to pad with; None: the tokenizer's.
    """
    items = partial(classes_of_records, classes=classes)
    return ItemKind("texts", ClassBatches, items, True, pad, tuple(classes.items()))


def labels_of_files(config: DataConfig) -> list[str]:
    """Return the names of all classes that data have; see :func:`labels_of_records`."""
    return labels_of_records(config.selection.read(find_files(config.files)))


def open_items(kind: ItemKind, config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache_dir: Path) -> ItemBatches:
    """Open batches of the items in ``config.files``: tokenized into a file in ``cache_dir``, or found there.

    Raises:
        UserError: a file is missing, cannot be read or understood, or there is no item in it.
    """
    files = find_files(config.files)
    cache_dir.mkdir(parents=True, exist_ok=True)
    pad = padding_id(tokenizer, config.vocab_size) if kind.pad is None else kind.pad
    identity = [*config.identity, kind.name, pad, *kind.identity]
    key = cache_key(files, config.seq_len, tokenizer, config.truncate, packed=False, selection=identity)
    path = cache_dir / f"{kind.name}-{key}.tokens"

    def build(_: object) -> None:
        _build(kind, path, files, config, config.encoder(tokenizer, is_alone=True), pad)

    return open_or_build(lambda: kind.batches(TokenFile(path), config, kind.classifies), build, cache_dir)


def _build(kind: ItemKind, path: Path, files: list[Path], config: DataConfig, encoder: Encoder, pad: int) -> None:
    header = Header(seq_len=config.seq_len + 1, files=len(files), **encoder.fitting.tallies())
    with write_token_file(path, header) as out:
        for item in kind.items(config.selection.read(files)):
            if not item.examples:
                header.empty.add(0, item.where)
                continue
            header.documents += 1
            before = {name: tally.records for name, tally in encoder.fitting.tallies().items()}
            rows = [_row(encoder, example, whole=kind.batches is ClassBatches) for example in item.examples]
            for name, tally in encoder.fitting.tallies().items():  # both answers of a pair are one record
                tally.records = min(tally.records, before[name] + 1)
            for row in rows if None not in rows else ():
                assert row is not None
                header.tokens += len(row.ids)
                header.trainable_tokens += int(row.trained.sum())
                header.rows += 1
                _write(out, row, item.mark, config.seq_len, pad)
        if not header.rows:
            raise UserError(nothing_to_train(files, header, header.changes(config.seq_len, config.truncate)))


def _write(out: TokenFileWriter, row: EncodedSegment, mark: int, seq_len: int, pad: int) -> None:
    def write(words: np.ndarray) -> None:
        out.add(np.append(words, np.uint32(mark)))

    padder = Padder(seq_len, pad, write, window=1)  # rows of an item are neighbors, whichever is longer
    for piece in cut_documents(iter([row]), seq_len):
        padder.add(piece)


def _row(encoder: Encoder, example: Example, whole: bool) -> EncodedSegment | None:
    """Return an example as one row; None if it does not fit into one, or teaches nothing."""
    if whole:
        assert isinstance(example, PlainText)
        rows = list(encoder.encode_classified(example))
    else:
        rows = list(encoder.encode([example]))
    if len(rows) > 1:
        raise UserError(
            f"{example.where}: the chat template renders earlier turns in another way once others follow, so that the "
            "answers of this record do not fit into one row: make it one record for each answer."
        )
    return rows[0] if rows else None
