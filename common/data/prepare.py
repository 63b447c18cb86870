"""Prepare data files: records become rows in a token file, or a file that was prepared before is opened again."""

import contextlib
import hashlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from common.activity import Activity, activity
from common.data.batches import Batches, DataConfig, PackedBatches
from common.data.encode import EncodedSegment, Encoder, RowFitter
from common.data.examples import Item, examples_of_records
from common.data.files import find_files
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
from common.data.selection import Counts
from common.data.unread_columns import noted
from common.data.workers import EncodedInOrder
from common.errors import UserError
from common.files import TEMPORARY_SUFFIX
from common.memory.meter import return_free_memory
from common.store.directories import DirectoryLock
from common.units import format_bytes

Opened = TypeVar("Opened", bound=Batches)
_SUFFIX = ".tokens"  # End of the names of prepared files


def open_data(config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache_dir: Path) -> PackedBatches:
    """Open batches of the data in ``config.files``: tokenized and packed into a file in ``cache_dir``, or found there.

    The file is used again as long as data files, tokenizer, and what the rows depend on are the same; it takes 4 bytes
    per token.

    Args:
        config: what to train on, and in which portions.
        tokenizer: the model's.
        cache_dir: directory of the file, created if missing.

    Raises:
        UserError: a file is missing, cannot be read or understood, or there is nothing in it to train on.
    """
    kind = config.kind
    pad = padding_id(tokenizer, config.vocab_size) if kind is None or kind.pad is None else kind.pad

    def build(path: Path, files: list[Path], doing: Activity) -> None:
        counts, part = (
            Counts(config.seq_len, config.truncate, len(files)),
            RowFitter(config.seq_len, config.truncate),
        )
        encoder = Encoder(
            tokenizer,
            part,
            vocab_size=config.vocab_size,
            every_token=config.every_token,
            is_alone=kind is not None,
            drop_unseen=config.drop_unseen,
        )
        names = config.selection.columns
        counts.prompt_columns = [
            names.get(name, name) for name in ("prompt", "completion")[: 2 if kind is None else 1]
        ]

        def encoded(records: Iterator[DataRecord]) -> Iterator[EncodedSegment]:
            return encoder.encode(examples_of_records(noted(records, part, None)))

        def rows_of_items(records: Iterator[DataRecord]) -> Iterator[tuple[EncodedSegment, int]]:
            assert kind is not None
            for item in kind.items(noted(records, part, kind)):
                for row in _rows_of_item(item, encoder, kind.name == "texts"):
                    yield row, item.mark

        with write_token_file(path, counts) as add:
            if kind is None:
                packer = (Packer if config.packed else Padder)(config.seq_len, pad, add)
                with EncodedInOrder(config.selection, files, encoded, part, counts, doing) as segments:
                    _pack(segments, counts, packer)
            else:
                with EncodedInOrder(config.selection, files, rows_of_items, part, counts, doing) as rows:
                    for row, mark in rows:
                        add(padded_row(next(cut_documents([row], config.seq_len)), config.seq_len, pad), mark)
            counts.check_any_rows(files)

    name, identity = "data" if kind is None else kind.name, tokenizer_identity(tokenizer)
    return open_or_build(
        lambda path: PackedBatches(TokenFile(path), config), build, config, cache_dir, name, identity
    )


def open_or_build(
    open_file: Callable[[Path], Opened],
    build: Callable[[Path, list[Path], Activity], None],
    config: DataConfig,
    cache_dir: Path,
    name: str,
    identity: str,
) -> Opened:
    """Return what ``open_file`` opens in ``cache_dir``, built of the data files before where it is absent or damaged.

    Args:
        open_file: opens a file.
        build: writes it, given the data files.
        config: of the data.
        cache_dir: the directory, created if missing.
        name: what the file's name begins with.
        identity: what the content depends on other than ``config``.
    """
    cache_dir.mkdir(parents=True, exist_ok=True)
    files = find_files(config.files)
    states = [(str(file), file.stat()) for file in files]
    # Tools that copy may keep the time of a change (mtime), but not that of the copy (ctime).
    seen = [(name, state.st_size, state.st_mtime_ns, state.st_ctime_ns) for name, state in states]
    key = hashlib.sha256(json.dumps([FORMAT_VERSION, seen, identity, *config.identity]).encode()).hexdigest()
    path = cache_dir / f"{name}-{key[:16]}{_SUFFIX}"
    unusable = contextlib.suppress(OSError, ValueError, TypeError)
    with unusable:
        return open_file(path)
    with (
        activity("waiting for another run that prepares the same data") as doing,
        # Of several ranks on a machine, the first one makes it for all
        DirectoryLock([cache_dir], patience=math.inf),
    ):
        with unusable:
            return open_file(path)
        unfinished_files = re.compile(rf"\w+-[0-9a-f]{{16}}{re.escape(_SUFFIX + TEMPORARY_SUFFIX)}")
        for unfinished in cache_dir.glob(f"*{TEMPORARY_SUFFIX}"):  # of a process that was killed
            if unfinished_files.fullmatch(unfinished.name):
                unfinished.unlink(missing_ok=True)
        size = format_bytes(sum(state.st_size for _, state in states))
        doing.what = f"reading {files[0].name if len(files) == 1 else f'{len(files):,} data files'} ({size})"
        doing.since = time.monotonic()
        build(path, files, doing)
        for file, (_, before) in zip(files, states, strict=True):
            if _is_changed(file, before):
                path.unlink()
                raise UserError(
                    f"{file} has changed while it was read: start again once nothing writes to it."
                )
    # Allocators keep 100 MB and more of what reading and tokenizing used, for a next time.
    if "pyarrow" in sys.modules:  # it has read tables
        sys.modules["pyarrow"].default_memory_pool().release_unused()
    return_free_memory()
    return open_file(path)


def _is_changed(file: Path, before: os.stat_result) -> bool:
    try:
        now = file.stat()
    except OSError:
        return True
    names = ("st_size", "st_mtime_ns", "st_ctime_ns", "st_ino")
    return any(getattr(now, name) != getattr(before, name) for name in names)


def _pack(documents: Iterable[EncodedSegment], counts: Counts, packer: Packer | Padder) -> None:
    for piece in cut_documents(documents, counts.seq_len):
        trained = int(np.count_nonzero(piece & TRAINED))
        if not trained:
            counts.skipped_tokens += len(piece)
            continue
        counts.tokens += len(piece)
        counts.trainable_tokens += trained
        packer.add(piece)
    packer.finish()


def _rows_of_item(item: Item, encoder: Encoder, is_classified: bool) -> list[EncodedSegment]:
    """Return the rows of an item if all of them fit and teach something, and count them."""
    counts = encoder.fitting
    rows = list[EncodedSegment]()
    if not item.examples:
        counts.empty.add(0, item.where)
    for example in item.examples:
        segments = list((encoder.encode_classified if is_classified else encoder.encode)([example]))
        if len(segments) > 1:
            raise UserError(
                f"{example.where}: the chat template renders earlier turns in another way once others follow, so that "
                "the answers of this record do not fit into one row: make it one record for each answer."
            )
        rows += segments
    if len(rows) < len(item.examples):
        return []
    if len(rows) == 2 and np.array_equal(rows[0].ids, rows[1].ids):  # the gradients of both would cancel
        counts.alike.add(0, item.where)
        return []
    counts.tokens += sum(len(row.ids) for row in rows)
    counts.trainable_tokens += sum(int(row.trained.sum()) for row in rows)
    return rows


def padding_id(tokenizer: PreTrainedTokenizerBase, vocab_size: int | None) -> int:
    """Return a token id to pad with that the model knows. Padding is never attended to and carries no loss."""
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((int(token) for token in known if token is not None and token < (vocab_size or token + 1)), 0)
