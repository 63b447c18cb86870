"""Prepare data files: records become rows in a token file, or a file that was prepared before is opened again."""

import contextlib
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from common.activity import Activity, activity
from common.data.batches import (
    Batches,
    ClassBatches,
    DataConfig,
    ItemBatches,
    PackedBatches,
    PairBatches,
)
from common.data.encode import EncodedSegment, Encoder, RowFitter
from common.data.files import file_states, find_files
from common.data.items import Item, classes_of_records, labels_of_records, pairs_of_records
from common.data.pack import (
    FORMAT_VERSION,
    TRAINED,
    Packer,
    Padder,
    TokenFile,
    cut_documents,
    padded_row,
    tokenizer_identity,
    write_token_file,
)
from common.data.read import DataRecord
from common.data.selection import Counts, Tally
from common.data.shapes import PlainText, examples_of_records
from common.errors import UserError
from common.files import TEMPORARY_SUFFIX
from common.memory.meter import return_free_memory
from common.store.directories import DirectoryLock
from common.units import format_bytes, format_count

Opened = TypeVar("Opened", bound=Batches)


@dataclass(frozen=True)
class ItemKind:
    """What items are made of, and the batches that they become."""

    name: str
    batches: type[ItemBatches]
    items: Callable[[Iterable[DataRecord]], Iterator[Item]]
    classifies: bool = False  # Whether batches are for a sequence classifier
    pad: int | None = None  # Token to pad with; None: the tokenizer's
    identity: tuple[object, ...] = ()  # What else the rows depend on, as JSON


def pair_kind(classifies: bool = False, pad: int | None = None) -> ItemKind:
    """Return the kind of items that are pairs of answers."""
    return ItemKind("pairs", PairBatches, pairs_of_records, classifies, pad)


def class_kind(classes: dict[str, int], pad: int | None = None) -> ItemKind:
    """Return the kind of items that are texts with a class, given the numbers of the classes by name."""
    items = partial(classes_of_records, classes=classes)
    return ItemKind("texts", ClassBatches, items, True, pad, tuple(classes.items()))


def labels_of_files(config: DataConfig) -> list[str]:
    """Return the names of all classes that data have; see :func:`labels_of_records`."""
    return labels_of_records(config.selection.read(find_files(config.files)))


def open_data(config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache_dir: Path) -> PackedBatches:
    """Open batches of the data in ``config.files``: tokenized and packed into a file in ``cache_dir``, or found there.

    The file is used again as long as data files, tokenizer, ``seq_len`` and ``truncate`` are the same; it takes 4 bytes
    per token.

    Args:
        config: what to train on, and in which portions.
        tokenizer: the model's.
        cache_dir: directory of the file, created if missing.

    Raises:
        UserError: a file is missing, cannot be read or understood, or there is nothing in it to train on.
    """
    return _open(lambda file: PackedBatches(file, config), None, config, tokenizer, cache_dir)


def open_items(kind: ItemKind, config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache_dir: Path) -> ItemBatches:
    """Open batches of the items in ``config.files``; see :func:`open_data`."""
    return _open(lambda file: kind.batches(file, config, kind.classifies), kind, config, tokenizer, cache_dir)


def _open(
    batches: Callable[[TokenFile], Opened],
    kind: ItemKind | None,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    cache_dir: Path,
) -> Opened:
    files, is_alone = find_files(config.files), kind is not None
    pad = padding_id(tokenizer, config.vocab_size) if kind is None or kind.pad is None else kind.pad
    cache_dir.mkdir(parents=True, exist_ok=True)
    identity = [FORMAT_VERSION, config.seq_len, config.truncate, config.packed and not is_alone, file_states(files)]
    identity += [tokenizer_identity(tokenizer), *config.identity]
    identity += [] if kind is None else [kind.name, pad, *kind.identity]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    path = cache_dir / f"{'data' if kind is None else kind.name}-{key}.tokens"

    def build(doing: Activity) -> None:
        counts = RowFitter(config.seq_len, config.truncate, len(files))
        encoder = Encoder(
            tokenizer,
            counts,
            vocab_size=config.vocab_size,
            every_token=config.every_token,
            is_alone=is_alone,
            drop_unseen=config.drop_unseen,
        )
        records = config.selection.read(files)
        with write_token_file(path, counts) as add:
            if kind is None:
                packer = (Packer if config.packed else Padder)(config.seq_len, pad, add)
                _pack(encoder.encode(examples_of_records(records)), counts, packer, doing)
            else:
                for item in kind.items(records):
                    for row in _rows_of_item(item, kind, encoder):
                        add(padded_row(next(cut_documents([row], config.seq_len)), config.seq_len, pad), item.mark)
            counts.check_any_rows(files)

    return open_or_build(lambda: batches(TokenFile(path)), build, files, cache_dir)


def open_or_build(
    open_file: Callable[[], Opened], build: Callable[[Activity], None], files: list[Path], cache_dir: Path
) -> Opened:
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
        for unfinished in cache_dir.glob(f"*{TEMPORARY_SUFFIX}"):  # of a process that was killed
            unfinished.unlink(missing_ok=True)
        size = format_bytes(sum(file.stat().st_size for file in files))
        doing.what = f"reading {files[0].name if len(files) == 1 else f'{len(files):,} data files'} ({size})"
        build(doing)
    # Allocators keep 100 MB and more of what reading and tokenizing used, for a next time.
    if "pyarrow" in sys.modules:  # it has read tables
        sys.modules["pyarrow"].default_memory_pool().release_unused()
    return_free_memory()
    return open_file()


def _pack(documents: Iterable[EncodedSegment], counts: Counts, packer: Packer | Padder, doing: Activity) -> None:

    def count() -> Iterator[EncodedSegment]:
        for document in documents:
            counts.documents += document.ends
            yield document

    what = doing.what
    for piece in cut_documents(count(), counts.seq_len):
        doing.what = f"{what}: {format_count(counts.tokens)} tokens so far"
        trained = int(np.count_nonzero(piece & TRAINED))
        if not trained:
            counts.skipped_tokens += len(piece)
            continue
        counts.tokens += len(piece)
        counts.trainable_tokens += trained
        packer.add(piece)
    packer.finish()


def _rows_of_item(item: Item, kind: ItemKind, encoder: Encoder) -> list[EncodedSegment]:
    """Return the rows of an item if all of them fit and teach something, and count them."""
    counts, rows = encoder.fitting, list[EncodedSegment]()
    if not item.examples:
        counts.empty.add(0, item.where)
        return []
    counts.documents += 1
    tallies = [value for value in vars(counts).values() if isinstance(value, Tally)]
    before = [tally.records for tally in tallies]
    for example in item.examples:
        if kind.batches is ClassBatches and isinstance(example, PlainText):
            segments = list(encoder.encode_classified(example))
        else:
            segments = list(encoder.encode([example]))
        if len(segments) > 1:
            raise UserError(
                f"{example.where}: the chat template renders earlier turns in another way once others follow, so that "
                "the answers of this record do not fit into one row: make it one record for each answer."
            )
        rows += segments
    for tally, records in zip(tallies, before, strict=True):  # both answers of a pair are one record
        tally.records = min(tally.records, records + 1)
    if len(rows) < len(item.examples):
        return []
    counts.tokens += sum(len(row.ids) for row in rows)
    counts.trainable_tokens += sum(int(row.trained.sum()) for row in rows)
    return rows


def padding_id(tokenizer: PreTrainedTokenizerBase, vocab_size: int | None) -> int:
    """Return a token id to pad with that the model knows. Padding is never attended to and carries no loss."""
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((int(token) for token in known if token is not None and token < (vocab_size or token + 1)), 0)
