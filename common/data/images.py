"""Conversations with images: each is one row, padded; pixels are made by the family's processor when a batch is read.

A message's ``content`` is a string or a list of parts. An image is a part, ``{"type": "image"}`` with ``path``, ``url``
or ``image``, or OpenAI's ``{"type": "image_url", "image_url": {"url": ...}}``; or a part without any of these, or
``<image>`` in a string, which stands for the next one of the record's ``images``. Images are local files, ``data:``
URLs or, in Parquet files, bytes.

An index file on disk has a JSON line for each conversation: which of its tokens carry loss, and the names of its
images, which stay where they are, with a hash of each. Its last line has a hash of the file, and counts.
"""

import base64
import contextlib
import hashlib
import io
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import numpy as np
import torch
from transformers import ProcessorMixin

from common.activity import Activity
from common.data.batches import IGNORED, Batches, DataConfig, rounded_width
from common.data.encode import Encoder, RowFitter, TokenizedAnswer, check_vocabulary
from common.data.examples import Chat, examples_of_records
from common.data.files import find_files
from common.data.messages import Message
from common.data.pack import draw_rows, tokenizer_identity
from common.data.prepare import open_or_build, padding_id
from common.data.read import DataRecord, read_records
from common.data.selection import Counts
from common.data.unread_columns import noted
from common.data.workers import EncodedInOrder
from common.errors import FinetuneError, UserError
from common.files import file_when_complete
from common.store.errors import described
from common.units import format_count

PLACEHOLDER = "<image>"  # Text in a string that stands for an image
COLUMNS = ("images", "image")  # Columns of a record that hold its images

_KEYS = ("image", "path", "url", "image_url", "bytes")
# Of an image, for qwen_vl_utils and ms-swift
_SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
_DEEP_MODES = ("I", "F")  # What Pillow's modes of more than 8 bits begin with
_CONVERSATIONS = ("messages", "conversations", "prompt", "completion")


def has_images(record: dict[str, Any]) -> bool:
    """Return whether a record of a data file holds a conversation with images."""
    if any(record.get(column) for column in COLUMNS):
        return True
    turns = [turn for name in _CONVERSATIONS if isinstance(value := record.get(name), list) for turn in value]
    contents = [turn.get("content", turn.get("value")) for turn in turns if isinstance(turn, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") in ("image", "image_url") for part in parts)


def with_images(messages: list[Message], given: Any, where: str, directory: Path) -> list[Message]:
    """Return messages that have lists of parts as contents, and whose images have one ``url`` each: the absolute path
    of an existing file, or a ``data:`` URL.

    Args:
        messages: from :func:`common.data.messages.messages_of`.
        given: the record's column of images, in the order of their places; empty if there is none.
        where: file and line, for error messages.
        directory: the data file's, to which relative paths refer.
    """
    column = iter(given if isinstance(given, list) else [given] if given else [])
    result = [
        {**message, "content": list(_parts(message.get("content"), column, where, directory))}
        for message in messages
    ]
    if left := sum(1 for _ in column):
        raise UserError(
            f"{where} has {left} more images than places for them in its messages ({PLACEHOLDER} in a text is one)."
        )
    return result


def _parts(content: Any, column: Iterator[Any], where: str, directory: Path) -> Iterator[dict[str, Any]]:
    if isinstance(content, str | None):
        for number, text in enumerate((content or "").split(PLACEHOLDER)):
            if number:
                yield _image(None, column, where, directory)
            if text:
                yield {"type": "text", "text": text}
        return
    for part in content:
        kind = part.get("type")
        if kind in ("image", "image_url"):
            _check_size(part, where)
            value = next((part[key] for key in _KEYS if part.get(key)), None)
            yield _image(value, column, where, directory)
        elif kind == "text":
            yield part
        else:
            raise UserError(
                f"{where}: a part of type {kind!r} cannot be trained on; there are text and image."
            )


def _image(value: Any, column: Iterator[Any], where: str, directory: Path) -> dict[str, Any]:
    """Return an image as a part with its ``url``; without a value, it is the next one of the column."""
    value = next(column, None) if value is None else value
    if value is None:
        raise UserError(f"{where} has more places for images in its messages than images.")
    while isinstance(value, dict):  # OpenAI's image_url, or what the datasets library makes of an image
        _check_size(value, where)
        value = next((value[key] for key in ("bytes", "url", "path") if value.get(key)), None)
    if isinstance(value, bytes):
        _check_depth(io.BytesIO(value), where)
        return {"type": "image", "url": "data:image/any;base64," + base64.b64encode(value).decode()}
    if not isinstance(value, str):
        raise UserError(f"{where}: an image is given as {type(value).__name__}; give a file or a data: URL.")
    if value.startswith("data:"):
        with contextlib.suppress(ValueError):  # the processor says what is wrong with it
            _check_depth(io.BytesIO(base64.b64decode(value.partition(",")[2])), where)
        return {"type": "image", "url": value}
    if value.startswith(("http:", "https:")):
        raise UserError(
            f"{where}: the image {value} is on the network, and nothing is downloaded: give a local file."
        )
    path = Path(unquote(urlparse(value).path) if value.startswith("file:") else value).expanduser()
    path = path if path.is_absolute() else directory / path
    if not path.is_file():
        raise UserError(f"{where}: there is no image {path}.")
    _check_depth(path, where)
    return {"type": "image", "url": str(path)}


def _check_size(part: dict[str, Any], where: str) -> None:
    if key := next((key for key in _SIZES if part.get(key) is not None), None):
        raise UserError(
            f"{where}: an image has {key!r}, and the checkpoint's processor decides the size of all images: leave it "
            "out, and set sizes in preprocessor_config.json."
        )


def _check_depth(file: Path | io.BytesIO, where: str) -> None:
    """Refuse gray images of more than 8 bits: processors make white of all that is above 255."""
    from PIL import Image

    try:
        with Image.open(file) as picture:
            mode = picture.mode
    except Exception:  # the processor says what is wrong with it
        return
    if mode.startswith(_DEEP_MODES):
        named = file if isinstance(file, Path) else "an image"
        raise UserError(
            f"{where}: {named} has more than 8 bits per pixel (mode {mode}), which processors cut at 255: save it in 8 "
            "bits."
        )


def any_images(files: tuple[str, ...]) -> bool:
    """Return whether the data files hold conversations with images."""
    return any(has_images(record.values) for file in find_files(files) for record in read_records(file))


@dataclass(frozen=True)
class ImageRow:
    """A conversation of a data set: the processor's input, and which tokens of the result are trained on."""

    messages: list[dict[str, Any]]  # Messages, in the form of :func:`with_images`
    trained: list[list[int]]  # First token and end of each range that carries loss
    tokens: int
    where: str  # File and line
    options: dict[str, Any]  # Other arguments of the chat template
    digests: list[str]  # A hash of each image that is a file

    @property
    def files(self) -> list[Path]:
        """The images that are files, in the order of their places."""
        parts = [
            part for message in self.messages for part in message["content"] if part.get("type") == "image"
        ]
        return [Path(part["url"]) for part in parts if not part["url"].startswith("data:")]

    def check_images(self) -> None:
        """Refuse images that are not those that the data were prepared with.

        Raises:
            UserError: names the first one.
        """
        for file, digest in zip(self.files, self.digests, strict=True):
            if _digest_of(file) != digest:
                raise UserError(
                    f"{self.where}: the image {file} has changed since the data were prepared. Put it back, or begin "
                    "a new run."
                )


def _digest_of(image: Path) -> str:
    """Return a hash of what is in a file; empty if it cannot be read, which the processor reports."""
    with contextlib.suppress(OSError):
        return hashlib.blake2b(image.read_bytes(), digest_size=8).hexdigest()
    return ""


class ImageEncoder:
    """Finds the rows of conversations and the tokens that carry loss with a processor, and counts them."""

    def __init__(self, processor: ProcessorMixin, config: DataConfig, counts: RowFitter) -> None:
        self._processor = processor
        self._config = config
        self.counts = counts
        self._encoder = Encoder(processor.tokenizer, counts, drop_unseen=config.drop_unseen, source=processor)
        self._image_ids = {
            getattr(processor, "image_token_id", None),
            *getattr(processor, "image_token_ids", ()),
        }

    def rows(self, record: DataRecord) -> Iterator[ImageRow]:
        """Return the rows of a record, one as a rule; see :meth:`Encoder.parts`.

        A conversation that is too long ends behind the last answer that fits; without any, it is left out.
        """
        counts = self.counts
        given = self._chat(record)
        if given is None:
            counts.empty.add(0, record.where)
            return
        chat, parts = self._encoder.parts(given)
        for turn, part in zip(chat.answers or [0], map(self._without_images, parts), strict=False):
            # Of images, no embedding is read
            texts = (token for token in part.ids if token not in self._image_ids)
            check_vocabulary(texts, self._config.vocab_size, self._processor.tokenizer, record.where)
            tokens = len(part.ids)
            messages = chat.messages if part.ends else chat.messages[: turn + 1]
            fitting = [end for end in part.ends if not counts.is_long(end)]
            if counts.is_long(tokens) and counts.truncate and fitting:
                tokens = fitting[-1]
                messages = chat.messages[: chat.answers[len(fitting) - 1] + 1]
            if not part.teaches:
                counts.untrained.add(tokens, record.where)
                continue
            if counts.is_long(tokens):
                counts.left_out.add(tokens, record.where)
                continue
            if tokens < len(part.ids):
                counts.cut.add(len(part.ids) - tokens, record.where)
            counts.rows += 1
            counts.tokens += tokens
            counts.trainable_tokens += sum(part.trained[:tokens])
            counts.longest = max(counts.longest, tokens)
            counts.images += sum(
                piece["type"] == "image" for message in messages for piece in message["content"]
            )
            edges = np.flatnonzero(np.diff([0, *part.trained[:tokens], 0]))
            row = ImageRow(messages, edges.reshape(-1, 2).tolist(), tokens, record.where, chat.options, [])
            yield replace(row, digests=[_digest_of(file) for file in row.files])

    def _without_images(self, part: TokenizedAnswer) -> TokenizedAnswer:
        """Return a conversation without loss on an answer's images, whose tokens only keep room for embeddings."""
        texts = [token not in self._image_ids for token in part.ids]
        return part._replace(trained=[a and b for a, b in zip(part.trained, texts, strict=True)])

    def _chat(self, record: DataRecord) -> Chat | None:
        """Return the conversation of a record with its images; None if it is empty."""
        given, *others = [record.values[column] for column in COLUMNS if record.values.get(column)] or [None]
        if others:
            raise UserError(
                f"{record.where} has images in {' and '.join(map(repr, COLUMNS))}: leave one out."
            )
        rest = {name: value for name, value in record.values.items() if name not in COLUMNS}
        [example] = examples_of_records([record._replace(values=rest)])
        if example.is_empty:
            return None
        if not isinstance(example, Chat):
            raise UserError(
                f"{record.where} is not a conversation: records with images must be conversations."
            )
        images = with_images(example.messages, given, record.where, record.file.parent)
        return replace(example, messages=images)

    def tensors(self, row: ImageRow) -> dict[str, torch.Tensor]:
        """Return the processor's values for a row, each ``[1, tokens]`` or of its images; and ``labels``."""
        try:
            out: Any = self._processor.apply_chat_template(
                row.messages, tokenize=True, return_dict=True, return_tensors="pt", **row.options
            )
        except Exception as error:  # templates and processors raise any exception
            raise UserError(f"{row.where} cannot be read any more: {error}") from error
        values = {name: value for name, value in out.items() if isinstance(value, torch.Tensor)}
        ids = values["input_ids"]
        if ids.shape[1] != row.tokens:
            raise FinetuneError(
                f"{row.where} had {row.tokens} tokens when the data were prepared and has {ids.shape[1]} now: its "
                "images have changed. Put them back, or start a new run."
            )
        values["labels"] = torch.full_like(ids, IGNORED)
        for start, stop in row.trained:
            values["labels"][:, start:stop] = ids[:, start:stop]
        return values


def _check_unchanged(line: bytes, prepared_ns: int) -> None:
    """Refuse a line of an index that was written before one of its images was changed, or exchanged.

    Raises:
        ValueError: the index is outdated.
    """
    row = ImageRow(**json.loads(line))
    for file, digest in zip(row.files, row.digests, strict=True):
        # Tools that copy may keep the time of a change (mtime), but not that of the copy (ctime).
        changed_ns = max(file.stat().st_ctime_ns, file.lstat().st_ctime_ns)  # a link may be another one now
        if changed_ns > prepared_ns and _digest_of(file) != digest:
            raise ValueError(f"{file} has changed")


class ImageBatches(Batches):
    """Batches of the conversations in an index file, in rows of ``seq_len`` tokens."""

    def __init__(self, path: Path, config: DataConfig, processor: ProcessorMixin) -> None:
        self._encoder = ImageEncoder(processor, config, RowFitter())
        self._config = config
        self._pad = padding_id(processor.tokenizer, config.vocab_size)
        self._starts = [0]
        digest = hashlib.blake2b(digest_size=8)
        line = b""
        with path.open("rb") as lines:
            prepared_ns = os.fstat(lines.fileno()).st_mtime_ns
            for following in lines:
                if line:
                    _check_unchanged(line, prepared_ns)
                digest.update(line)
                line = following
                self._starts.append(self._starts[-1] + len(line))
        written, _, text = line.partition(b" ")
        digest.update(text)
        if written != digest.hexdigest().encode():
            raise ValueError(f"{path} is not what was written")
        self._path = path
        self._file = path.open("rb")
        self.digest = digest.hexdigest()
        header = Counts.parse(text)
        self.rows = header.rows
        self.tokens = header.tokens
        self.trainable_tokens = header.trainable_tokens
        self.steps_per_epoch = -(-header.rows // config.batch_size)
        self.stops = header.stops
        self.seq_len = min(config.seq_len, rounded_width(header.longest))
        counts = (
            f"{header.rows:,} conversations with {header.images:,} images: {format_count(header.tokens)} tokens, "
            f"{format_count(header.trainable_tokens)} of them trained on, each in a row of {self.seq_len:,} "
            f"({header.tokens / (header.rows * self.seq_len):.1%} full)"
        )
        self.description = "\n".join([counts, *header.changes()])

    def batch(self, step: int) -> dict[str, Any]:
        """Return ``input_ids``, ``labels`` and ``attention_mask`` of step ``step`` (from 0), ``[batch_size, seq_len]``
        with padding on the right; and what else the processor makes, in the same shape if it is about tokens, or as a
        list with one entry for each row (None for a row without images), see :mod:`common.data.rows`."""
        size = self._config.batch_size
        draws = range(step * size, (step + 1) * size)
        numbers = draw_rows(draws, self.rows, self._config.seed if self._config.shuffle else None)
        batch: dict[str, Any] = {}
        for number, row in enumerate(self._encoder.tensors(self._read(int(row))) for row in numbers):
            shape = row["input_ids"].shape
            row.setdefault("attention_mask", torch.ones(shape, dtype=torch.int64))
            for name, value in row.items():
                if value.shape != shape:
                    batch.setdefault(name, [None] * size)[number] = value
                    continue
                if name not in batch:
                    filler = {"input_ids": self._pad, "labels": IGNORED}.get(name, 0)
                    batch[name] = torch.full((size, self.seq_len), filler, dtype=value.dtype)
                batch[name][number, : shape[1]] = value[0]
        return batch

    def _read(self, row: int) -> ImageRow:
        self._file.seek(self._starts[row])
        read = ImageRow(**json.loads(self._file.readline()))
        try:
            read.check_images()
        except UserError:
            self._path.unlink(missing_ok=True)  # so that a new run prepares the data again
            raise
        return read

    def close(self) -> None:
        """Close the index file."""
        self._file.close()


def open_image_data(config: DataConfig, processor: ProcessorMixin, cache_dir: Path) -> ImageBatches:
    """Return batches of the conversations in ``config.files``, with or without images.

    Lengths and tokens that carry loss are found by running the processor once, and kept in ``cache_dir``.
    """

    def build(path: Path, files: list[Path], doing: Activity) -> None:
        counts, digest = Counts(config.seq_len, config.truncate), hashlib.blake2b(digest_size=8)
        encoder = ImageEncoder(processor, config, part := RowFitter(config.seq_len, config.truncate))

        def encoded(records: Iterator[DataRecord]) -> Iterator[ImageRow]:
            return itertools.chain.from_iterable(map(encoder.rows, noted(records, part, None)))

        with (
            described("writing", path),
            file_when_complete(path) as out,
            EncodedInOrder(config.selection, files, encoded, part, counts, doing) as rows,
        ):
            for row in rows:
                line = json.dumps(asdict(row)).encode() + b"\n"
                digest.update(line)
                out.write(line)
            counts.check_any_rows(files)
            text = json.dumps(asdict(counts)).encode()
            digest.update(text)
            out.write(digest.hexdigest().encode() + b" " + text)

    def open_file(path: Path) -> ImageBatches:
        return ImageBatches(path, config, processor)

    rules = [tokenizer_identity(processor.tokenizer), type(processor).__name__, processor.to_json_string()]
    identity = json.dumps([*rules, processor.chat_template], default=str)
    return open_or_build(open_file, build, config, cache_dir, "images", identity)
