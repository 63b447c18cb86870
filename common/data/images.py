"""Conversations with images: each is one row, padded; pixels are made by the family's processor when a batch is read.

A message's ``content`` is a string or a list of parts. An image is a part, ``{"type": "image"}`` with ``path``, ``url``
or ``image``, or OpenAI's ``{"type": "image_url", "image_url": {"url": ...}}``; or a part without any of these, or
``<image>`` in a string, which stands for the next one of the record's ``images``. Images are local files, ``data:``
URLs or, in Parquet files, bytes.

An index file on disk has a JSON line for each conversation, with a CRC-32 before it: which of its tokens carry loss,
and the names of its images, which stay where they are.
"""

import base64
import contextlib
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import numpy as np
import torch
from transformers import ProcessorMixin

from common.data.batches import IGNORED, Batches, DataConfig, rounded_width
from common.data.encode import AnswerFinder, check_vocabulary
from common.data.files import file_states, find_files
from common.data.messages import Message
from common.data.pack import draw_rows, tokenizer_identity
from common.data.prepare import open_or_build, padding_id
from common.data.read import DataRecord, extension_of, read_records
from common.data.selection import DataCounts, Tally, nothing_to_train
from common.data.shapes import Chat, examples_of_records
from common.data.template import ChatTemplate
from common.errors import FinetuneError, UserError
from common.files import file_when_complete, read_cached, write_cached
from common.store.errors import described
from common.units import format_count

PLACEHOLDER = "<image>"  # Text in a string that stands for an image
COLUMNS = ("images", "image")  # Columns of a record that hold its images

_KEYS = ("image", "path", "url", "image_url", "bytes")
_CONVERSATIONS = ("messages", "conversations", "prompt", "completion")
_FORMAT_VERSION = 4
_SUM = 9  # bytes of a line's checksum and the space behind it


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
        {**message, "content": list(_parts(message.get("content"), column, where, directory))} for message in messages
    ]
    if left := sum(1 for _ in column):
        if any(part["type"] == "image" for message in result for part in message["content"]):
            raise UserError(f"{where} has {left} more images than places for them in its messages.")
        raise UserError(f"{where} has {left} images, but no {PLACEHOLDER} in its messages to say where they go.")
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
            value = next((part[key] for key in _KEYS if part.get(key)), None)
            yield _image(value, column, where, directory)
        elif kind == "text":
            yield part
        else:
            raise UserError(f"{where}: a part of type {kind!r} cannot be trained on; there are text and image.")


def _image(value: Any, column: Iterator[Any], where: str, directory: Path) -> dict[str, Any]:
    """Return an image as a part with its ``url``; without a value, it is the next one of the column."""
    value = next(column, None) if value is None else value
    if value is None:
        raise UserError(f"{where} has more places for images in its messages than images.")
    while isinstance(value, dict):  # OpenAI's image_url, or what the datasets library makes of an image
        value = next((value[key] for key in ("bytes", "url", "path") if value.get(key)), None)
    if isinstance(value, bytes):
        return {"type": "image", "url": "data:image/any;base64," + base64.b64encode(value).decode()}
    if not isinstance(value, str):
        raise UserError(f"{where}: an image is given as {type(value).__name__}; give a file or a data: URL.")
    if value.startswith("data:"):
        return {"type": "image", "url": value}
    if value.startswith(("http:", "https:")):
        raise UserError(f"{where}: the image {value} is on the network, and nothing is downloaded: give a local file.")
    path = Path(unquote(urlparse(value).path) if value.startswith("file:") else value).expanduser()
    path = path if path.is_absolute() else directory / path
    if not path.is_file():
        raise UserError(f"{where}: there is no image {path}.")
    return {"type": "image", "url": str(path)}


def any_images(files: tuple[str, ...]) -> bool:
    """Return whether the data files hold conversations with images; cached for as long as they stay as they are."""
    paths = find_files(files)
    key = {"files": [list(state) for state in file_states(paths)]}
    cached = read_cached("images", key, _FORMAT_VERSION)
    if cached is not None:
        return bool(cached["present"])
    suspects = [file for file in paths if _names_images(file)]
    present = any(has_images(record.values) for file in suspects for record in read_records(file))
    write_cached("images", key, _FORMAT_VERSION, present=present)
    return present


def _names_images(file: Path) -> bool:
    """Return whether a file may hold images, so that it is worth looking at record by record."""
    if extension_of(file) != file.suffix.lower() or file.suffix.lower() == ".arrow":
        return True
    if file.suffix.lower() == ".parquet":
        import pyarrow.parquet

        with contextlib.suppress(OSError, ValueError):  # the one that reads it says what is wrong
            return "image" in str(pyarrow.parquet.read_schema(file))
    before = b""
    with file.open("rb") as stream:
        while file.suffix.lower() in (".json", ".jsonl") and (block := stream.read(1 << 22)):
            if b'"image' in before + block:
                return True
            before = block[-8:]
    return False


@dataclass(frozen=True)
class ImageRow:
    """A conversation of a data set: the processor's input, and which tokens of the result are trained on."""

    messages: list[dict[str, Any]]  # Messages, in the form of :func:`with_images`
    trained: list[tuple[int, int]]  # Ranges of tokens that carry loss
    tokens: int
    where: str  # File and line
    options: dict[str, Any]  # Other arguments of the chat template
    cut: int = 0  # Number of tokens that were cut off behind these


def load_processor(checkpoint: Path) -> ProcessorMixin:
    """Return the processor of a vision-language checkpoint, which makes token ids and pixels of conversations."""
    from transformers import AutoProcessor

    advice = ""
    try:
        processor = AutoProcessor.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)
        if not isinstance(processor, ProcessorMixin):
            raise OSError("no processor_config.json or preprocessor_config.json")
    except Exception as error:  # each class of processors fails in its own way
        if "orchvision" in str(error) or "PIL" in str(error) or "Pillow" in str(error):
            advice = " Install what it needs: pip install 'fuyou[images]'."
        raise UserError(
            f"{checkpoint} has no processor that transformers can load, and data with images need one: {error}{advice}"
        ) from error
    if not (getattr(processor, "chat_template", None) or processor.tokenizer.chat_template):
        raise UserError(f"The processor of {checkpoint} has no chat template, and data with images need one.")
    return processor


class ImageEncoder:
    """Runs a processor on single conversations of at most ``vocab_size`` different tokens; None: any."""

    def __init__(self, processor: ProcessorMixin, vocab_size: int | None = None) -> None:
        self._processor, self._vocab_size = processor, vocab_size
        self._template = ChatTemplate(processor)

    def rows(self, chat: Chat, limit: int | None = None, drop_unseen: Tally | None = None) -> list[ImageRow]:
        """Return the rows of a conversation, one as a rule, with the tokens that carry loss.

        Some templates render a turn differently once others follow. Such a conversation becomes one row per answer,
        each as the model will see it.

        Args:
            limit: number of tokens; a longer conversation ends behind the last answer within them, if there is one.
            drop_unseen: counts conversations with text that the template leaves out; None: they are an error.
        """
        seen, form = self._template.checked(chat, drop_unseen)
        if seen is None:
            return []
        chat = seen
        finder = AnswerFinder(lambda messages, options, ask=False: self._ids(messages, chat, ask))
        opened = replace(chat, messages=self._opened(chat.messages, chat.where))
        whole = self._ids(opened.messages, chat)
        image_id = getattr(self._processor, "image_token_id", None)  # of images, no embedding is read
        texts = (token for token in whole if token != image_id)
        check_vocabulary(texts, self._vocab_size, self._processor.tokenizer, chat.where)

        def row(count: int, spans: list[tuple[int, int]], tokens: int, cut: int = 0) -> ImageRow:
            return ImageRow(chat.messages[:count], spans, tokens, chat.where, chat.options, cut)

        spans = finder.spans(opened, whole, chat.answers) if form.is_whole else None
        if spans is None:
            rows = []
            for turn in chat.answers:
                ids = self._ids(opened.messages[: turn + 1], chat)
                rows.append(row(turn + 1, [(finder.start(opened, turn, ids), len(ids))], len(ids)))
            return rows
        fitting = [number for number, span in enumerate(spans) if limit is not None and span[1] <= limit]
        if limit is None or len(whole) <= limit or not fitting:
            return [row(len(opened.messages), spans, len(whole))]
        last = fitting[-1]
        return [row(chat.answers[last] + 1, spans[: last + 1], spans[last][1], len(whole) - spans[last][1])]

    def tensors(self, row: ImageRow) -> dict[str, torch.Tensor]:
        """Return the processor's values for a row, each ``[1, tokens]`` or of its images; and ``labels``."""
        values = self._process(self._opened(row.messages, row.where), row.where, row.options)
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

    def _ids(self, messages: list[dict[str, Any]], chat: Chat, ask: bool = False) -> list[int]:
        return self._process(messages, chat.where, chat.options, ask)["input_ids"][0].tolist() if messages else []

    def _process(
        self, messages: list[dict[str, Any]], where: str, options: dict[str, Any], ask: bool = False
    ) -> dict[str, torch.Tensor]:
        try:
            values: Any = self._processor.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=ask, **options
            )
        except Exception as error:  # templates and processors raise any exception
            roles = ", ".join(str(message["role"]) for message in messages)
            raise UserError(
                f"{where}: the checkpoint's processor refuses this conversation (roles {roles}): {error}"
            ) from error
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    @staticmethod
    def _opened(messages: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
        from transformers.image_utils import load_image

        def opened(part: dict[str, Any]) -> dict[str, Any]:
            if part["type"] != "image":
                return part
            try:
                return {"type": "image", "image": load_image(part["url"])}
            except Exception as error:  # Pillow raises many kinds
                raise UserError(f"{where}: the image {part['url'][:80]} cannot be read: {error}") from error

        contents = [message.get("content") for message in messages]
        return [
            {**message, "content": [opened(part) for part in content]} if isinstance(content, list) else message
            for message, content in zip(messages, contents, strict=True)
        ]


@dataclass(kw_only=True)
class _Header(DataCounts):
    """The last line of an index file."""

    images: int = 0
    longest: int = 0  # Number of tokens of the longest row


class ImageBatches(Batches):
    """Batches of the conversations in an index file, in rows of ``seq_len`` tokens."""

    def __init__(self, path: Path, config: DataConfig, processor: ProcessorMixin) -> None:
        self._encoder, self._config, self._path = ImageEncoder(processor), config, path
        self._pad = padding_id(processor.tokenizer, config.vocab_size)
        self._file, lengths, line = path.open("rb"), [0], b""
        try:
            for line in self._file:
                lengths.append(len(line))
            header = _Header.parse(_checked(line))
            self._starts = np.cumsum(lengths[:-1])
            if header.rows != len(lengths) - 2:
                raise ValueError(f"{path} is not complete")
        except BaseException:
            self._file.close()
            raise
        self.rows, self.tokens, self.trainable_tokens = header.rows, header.tokens, header.trainable_tokens
        self.steps_per_epoch = -(-header.rows // config.batch_size)
        self.seq_len = min(config.seq_len, rounded_width(header.longest))
        self.digest = header.digest
        counts = (
            f"{header.rows:,} conversations with {header.images:,} images: {format_count(header.tokens)} tokens, "
            f"{format_count(header.trainable_tokens)} of them trained on, each in a row of {self.seq_len:,} "
            f"({header.tokens / (header.rows * self.seq_len):.1%} full)"
        )
        self.description = "\n".join([counts, *header.changes(config.seq_len, config.truncate)])

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
        self._file.seek(int(self._starts[row]))
        try:
            return ImageRow(**json.loads(_checked(self._file.readline())))
        except ValueError as error:
            raise FinetuneError(
                f"The prepared data are damaged: line {row + 1} of {self._path} is not what was written there. Delete "
                "the file: --resume makes it again from the data, and continues."
            ) from error

    def close(self) -> None:
        """Close the index file."""
        self._file.close()


def open_image_data(config: DataConfig, processor: ProcessorMixin, cache_dir: Path) -> ImageBatches:
    """Return batches of the conversations in ``config.files``, with or without images.

    Lengths and tokens that carry loss are found by running the processor once, and kept in ``cache_dir``.
    """
    files = find_files(config.files)
    cache_dir.mkdir(parents=True, exist_ok=True)
    rules = [type(processor).__name__, processor.to_json_string(), processor.chat_template]
    identity = [tokenizer_identity(processor.tokenizer), json.dumps(rules, default=str)]
    key = [_FORMAT_VERSION, config.seq_len, config.truncate, file_states(files), identity, *config.identity]
    path = cache_dir / f"images-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.jsonl"

    def build(_: object) -> None:
        header, digest = _Header(), hashlib.blake2b(digest_size=8)
        encoder = ImageEncoder(processor, config.vocab_size)
        with described("writing", path), file_when_complete(path) as out:
            for row in _rows(config.selection.read(files), encoder, config, header):
                if _counts(row, header, config.seq_len):
                    line = _line(asdict(row))
                    digest.update(line)
                    out.write(line)
            if not header.rows:
                raise UserError(nothing_to_train(files, header, header.changes(config.seq_len, config.truncate)))
            header.digest = digest.hexdigest()
            out.write(_line(asdict(header)))

    return open_or_build(lambda: ImageBatches(path, config, processor), build, files, cache_dir)


def _counts(row: ImageRow, header: _Header, seq_len: int) -> bool:
    """Count a row, and return whether it can be trained on."""
    if row.tokens > seq_len:
        header.left_out.add(row.tokens, row.where)
        return False
    if not any(stop > max(start, 1) for start, stop in row.trained):
        header.untrained.add(row.tokens, row.where)
        return False
    if row.cut:
        header.cut.add(row.cut, row.where)
    header.rows += 1
    header.tokens += row.tokens
    header.trainable_tokens += sum(stop - start for start, stop in row.trained)
    header.longest = max(header.longest, row.tokens)
    contents = [message.get("content") for message in row.messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    header.images += sum(part["type"] == "image" for part in parts)
    return True


def _rows(
    records: Iterator[tuple[str, DataRecord]], encoder: ImageEncoder, config: DataConfig, header: _Header
) -> Iterator[ImageRow]:
    limit = config.seq_len if config.truncate else None
    for file, (values, position) in records:
        where = f"{file}, {position}"
        given, *others = [values[column] for column in COLUMNS if values.get(column)] or [None]
        if others:
            raise UserError(f"{where} has images in {' and '.join(map(repr, COLUMNS))}: leave one out.")
        record = DataRecord({name: value for name, value in values.items() if name not in COLUMNS}, position)
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
