"""Batches of conversations with images: each conversation is one row, padded; pixels are made when a batch is read.

An index file on disk has a JSON line for each conversation, with a CRC-32 before it: which of its tokens carry loss,
and the names of its images, which stay where they are.
"""

import contextlib
import hashlib
import json
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from transformers import ProcessorMixin

from common.data.batches import Batches, DataConfig, open_or_build, padding_id, rounded_width
from common.data.files import file_states, find_files
from common.data.images.content import COLUMNS, has_images, with_images
from common.data.images.encoding import ImageEncoder, ImageRow, processor_identity
from common.data.packed.packing import draw_rows
from common.data.packed.token_file import tokenizer_identity
from common.data.records import DataRecord, read_records
from common.data.selection import DataCounts, nothing_to_train
from common.data.shapes import Chat, examples_of_records
from common.errors import FinetuneError, UserError
from common.files import file_when_complete, read_cached, write_cached
from common.store.errors import described
from common.units import format_count

_FORMAT_VERSION = 3
_SUM = 9  # bytes of a line's checksum and the space behind it


@dataclass(kw_only=True)
class _Header(DataCounts):
    """The first line of an index file."""

    images: int = 0
    longest: int = 0  # Number of tokens of the longest row


def any_images(files: tuple[str, ...]) -> bool:
    """Return whether the data files hold conversations with images.

    The files are searched once; what was found is cached for as long as they stay as they are.

    Raises:
        UserError: a file is missing or cannot be read.
    """
    paths = find_files(files)
    key = {"files": [list(state) for state in file_states(paths)]}
    cached = read_cached("images", key, _FORMAT_VERSION)
    if cached is not None:
        return bool(cached["found"])
    suspects = [file for file in paths if _names_images(file)]
    found = any(has_images(record.values) for file in suspects for record in read_records(file))
    write_cached("images", key, _FORMAT_VERSION, found=found)
    return found


def _names_images(file: Path) -> bool:
    match file.suffix.lower():
        case ".arrow" | ".gz" | ".bz2" | ".xz" | ".zst":
            return True  # to be looked at record by record
        case ".parquet":
            import pyarrow.parquet

            with contextlib.suppress(OSError, ValueError):  # the one that reads it says what is wrong
                return "image" in str(pyarrow.parquet.read_schema(file))
            return False
        case ".json" | ".jsonl":
            before = b""
            with file.open("rb") as stream:
                while block := stream.read(1 << 22):
                    if b'"image' in before + block:
                        return True
                    before = block[-8:]
    return False


class ImageBatches(Batches):
    """Batches of the conversations in an index file. Memory is that of a batch, and 8 bytes per conversation.

    Attributes:
        seq_len: tokens of every row, padding included.
    """

    def __init__(self, path: Path, config: DataConfig, processor: ProcessorMixin) -> None:
        """Open the index file and check that it is complete.

        Raises:
            ValueError: not a complete index file.
            OSError: it cannot be opened.
        """
        self._encoder, self._config, self._path = ImageEncoder(processor), config, path
        self._pad = padding_id(processor.tokenizer, config.vocab_size)
        self._file = path.open("rb")
        try:
            header = _Header.parse(_checked(self._file.readline()))
            self._starts = np.fromfile(path.with_suffix(".starts"), np.int64)
            if len(self._starts) != header.rows:
                raise ValueError(f"{path} is not complete")
        except BaseException:
            self._file.close()
            raise
        self.rows, self.tokens, self.trainable_tokens = header.rows, header.tokens, header.trainable_tokens
        self.steps_per_epoch = -(-header.rows // config.batch_size)
        self.seq_len = min(config.seq_len, rounded_width(header.longest))
        self.digest = header.digest
        self.description = _describe(header, self.seq_len, config)

    def batch(self, step: int) -> dict[str, Any]:
        """Return ``input_ids``, ``labels`` and ``attention_mask`` of step ``step`` (from 0), ``[batch_size, seq_len]``
        with padding on the right; and what else the processor makes, in the same shape if it is about tokens, or as a
        list with one entry for each row (None for a row without images), see :mod:`common.data.rows`."""
        size = self._config.batch_size
        draws = range(step * size, (step + 1) * size)
        rows = draw_rows(draws, self.rows, self._config.seed if self._config.shuffle else None)
        return self._collate([self._encoder.tensors(self._read(int(row))) for row in rows])

    def _collate(self, made: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
        batch: dict[str, Any] = {}
        for number, row in enumerate(made):
            shape = row["input_ids"].shape
            row.setdefault("attention_mask", torch.ones(shape, dtype=torch.int64))
            for name, value in row.items():
                if value.shape != shape:
                    batch.setdefault(name, [None] * len(made))[number] = value
                    continue
                if name not in batch:
                    filler = {"input_ids": self._pad, "labels": -100}.get(name, 0)
                    batch[name] = torch.full((len(made), self.seq_len), filler, dtype=value.dtype)
                batch[name][number, : shape[1]] = value[0]
        return batch

    def _read(self, row: int) -> ImageRow:
        self._file.seek(int(self._starts[row]))
        try:
            return ImageRow(**json.loads(_checked(self._file.readline())))
        except ValueError as error:
            raise FinetuneError(
                f"The prepared data are damaged: line {row + 2} of {self._path} is not what was written there. Delete "
                "the file: --resume makes it again from the data, and continues."
            ) from error

    def close(self) -> None:
        """Close the index file."""
        self._file.close()


def open_image_data(config: DataConfig, processor: ProcessorMixin, cache_dir: Path) -> ImageBatches:
    """Return batches of the conversations in ``config.files``, with or without images.

    Each is run through the processor once, to find out how long it is and what of it is trained on; what comes out of
    that is kept in ``cache_dir`` for as long as data files, processor and ``seq_len`` are the same.

    Raises:
        UserError: a file or an image is missing or cannot be understood, or nothing is left to train on.
    """
    files = find_files(config.files)
    cache_dir.mkdir(parents=True, exist_ok=True)
    path = cache_dir / f"images-{_cache_key(files, config, processor)}.jsonl"

    def build(_: object) -> None:
        _build(path, files, config, ImageEncoder(processor, config.vocab_size))

    return open_or_build(lambda: ImageBatches(path, config, processor), build, cache_dir)


def _cache_key(files: list[Path], config: DataConfig, processor: ProcessorMixin) -> str:
    identity = [tokenizer_identity(processor.tokenizer), processor_identity(processor)]
    return hashlib.sha256(
        json.dumps(
            [_FORMAT_VERSION, config.seq_len, config.truncate, file_states(files), identity, *config.identity]
        ).encode()
    ).hexdigest()[:16]


def _build(path: Path, files: list[Path], config: DataConfig, encoder: ImageEncoder) -> None:
    lines, seq_len = path.with_suffix(".lines"), config.seq_len
    try:
        with described("writing", lines), lines.open("wb") as out:
            header = _Header()
            sizes = _write_rows(_rows(config.selection.read(files), encoder, config, header), header, seq_len, out)
        if not header.rows:
            raise UserError(nothing_to_train(files, header, header.changes(seq_len, config.truncate)))
        first = _line(asdict(header))
        starts = len(first) + np.cumsum([0, *sizes[:-1]], dtype=np.int64)
        with described("writing", path), file_when_complete(path) as whole, lines.open("rb") as written:
            whole.write(first)
            shutil.copyfileobj(written, whole)
            starts.tofile(path.with_suffix(".starts"))
    finally:
        lines.unlink(missing_ok=True)


def _write_rows(rows: Iterator[ImageRow], header: _Header, seq_len: int, out: BinaryIO) -> list[int]:
    """Write the rows that can be trained on, a line each, and count them; return the lines' lengths."""
    digest, sizes = hashlib.blake2b(digest_size=8), []
    for row in rows:
        if row.tokens > seq_len:
            header.left_out.add(row.tokens, row.where)
        elif not any(stop > max(start, 1) for start, stop in row.trained):
            header.untrained.add(row.tokens, row.where)
        else:
            if row.cut:
                header.cut.add(row.cut, row.where)
            header.rows += 1
            header.tokens += row.tokens
            header.trainable_tokens += row.trained_tokens
            header.longest = max(header.longest, row.tokens)
            header.images += sum(map(_count_images, row.messages))
            line = _line(asdict(row))
            digest.update(line)
            sizes.append(out.write(line))
    header.digest = digest.hexdigest()
    return sizes


def _count_images(message: dict[str, Any]) -> int:
    content = message.get("content")
    return sum(part["type"] == "image" for part in content) if isinstance(content, list) else 0


def _rows(
    records: Iterator[tuple[str, DataRecord]], encoder: ImageEncoder, config: DataConfig, header: _Header
) -> Iterator[ImageRow]:
    limit = config.seq_len if config.truncate else None
    for file, (values, place) in records:
        where = f"{file}, {place}"
        given = next((values[column] for column in COLUMNS if values.get(column)), None)
        record = DataRecord({name: value for name, value in values.items() if name not in COLUMNS}, place)
        for example in examples_of_records([record], file):
            if example.is_empty:
                header.empty.add(0, where)
                continue
            if not isinstance(example, Chat):
                raise UserError(f"{where} is not a conversation: records with images must be conversations.")
            example = replace(example, messages=with_images(example.messages, given, where, Path(file).parent))
            yield from encoder.rows(example, limit, header.unseen if config.drop_unseen else None)


def _line(content: dict[str, Any]) -> bytes:
    text = json.dumps(content).encode()
    return b"%08x " % zlib.crc32(text) + text + b"\n"


def _checked(line: bytes) -> bytes:
    text = line[_SUM:].rstrip(b"\n")
    if not line.endswith(b"\n") or line[:_SUM] != b"%08x " % zlib.crc32(text):
        raise ValueError("a line is damaged")
    return text


def _describe(header: _Header, seq_len: int, config: DataConfig) -> str:
    text = (
        f"{header.rows:,} conversations with {header.images:,} images: {format_count(header.tokens)} tokens, "
        f"{format_count(header.trainable_tokens)} of them trained on, each in a row of {seq_len:,} "
        f"({header.tokens / (header.rows * seq_len):.1%} full)"
    )
    return "\n".join([text, *header.changes(config.seq_len, config.truncate)])
