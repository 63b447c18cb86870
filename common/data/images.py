"""Conversations with images: each is one row, padded; pixels are made by the family's processor when a batch is read.

A message's ``content`` is a string or a list of parts. An image is a part, ``{"type": "image"}`` with ``path``, ``url``
or ``image``, or OpenAI's ``{"type": "image_url", "image_url": {"url": ...}}``; or a part without any of these, or
``<image>`` in a string, which stands for the next one of the record's ``images``. Images are local files, ``data:``
URLs or, in Parquet files, bytes.

An index file on disk has a JSON line for each conversation: which of its tokens carry loss, and the names of its
images, which stay where they are. Its last line has a hash of the file, and counts.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import torch
from transformers import ProcessorMixin

from common.data.batches import IGNORED, Batches, DataConfig, rounded_width
from common.data.encode import AnswerFinder, check_vocabulary
from common.data.files import file_states, find_files
from common.data.messages import Message
from common.data.pack import FORMAT_VERSION, draw_rows, tokenizer_identity
from common.data.prepare import open_or_build, padding_id
from common.data.read import DataRecord, read_records
from common.data.selection import Counts, Tally
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
    cached = read_cached("images", key, FORMAT_VERSION)
    if cached is not None:
        return bool(cached["present"])
    present = any(has_images(record.values) for file in paths for record in read_records(file))
    write_cached("images", key, FORMAT_VERSION, present=present)
    return present


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


class ImageBatches(Batches):
    """Batches of the conversations in an index file, in rows of ``seq_len`` tokens."""

    def __init__(self, path: Path, config: DataConfig, processor: ProcessorMixin) -> None:
        self._encoder, self._config = ImageEncoder(processor), config
        self._pad = padding_id(processor.tokenizer, config.vocab_size)
        self._starts, digest, line = [0], hashlib.blake2b(digest_size=8), b""
        with path.open("rb") as lines:
            for following in lines:
                digest.update(line)
                line = following
                self._starts.append(self._starts[-1] + len(line))
        written, _, text = line.partition(b" ")
        digest.update(text)
        if written != digest.hexdigest().encode():
            raise ValueError(f"{path} is not what was written")
        self._file, self.digest, header = path.open("rb"), digest.hexdigest(), Counts.parse(text)
        self.rows, self.tokens, self.trainable_tokens = header.rows, header.tokens, header.trainable_tokens
        self.steps_per_epoch = -(-header.rows // config.batch_size)
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
        return ImageRow(**json.loads(self._file.readline()))

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
    key = [FORMAT_VERSION, config.seq_len, config.truncate, file_states(files), identity, *config.identity]
    path = cache_dir / f"images-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.jsonl"

    def build(_: object) -> None:
        counts, digest = Counts(config.seq_len, config.truncate), hashlib.blake2b(digest_size=8)
        encoder = ImageEncoder(processor, config.vocab_size)
        with described("writing", path), file_when_complete(path) as out:
            for record in config.selection.read(files):
                for row in _rows(record, encoder, config, counts):
                    if _is_kept(row, counts):
                        line = json.dumps(asdict(row)).encode() + b"\n"
                        digest.update(line)
                        out.write(line)
            counts.check_any_rows(files)
            text = json.dumps(asdict(counts)).encode()
            digest.update(text)
            out.write(digest.hexdigest().encode() + b" " + text)

    return open_or_build(lambda: ImageBatches(path, config, processor), build, files, cache_dir)


def _is_kept(row: ImageRow, counts: Counts) -> bool:
    """Count a row, and return whether it can be trained on."""
    if row.tokens > counts.seq_len:
        counts.left_out.add(row.tokens, row.where)
        return False
    if not any(stop > max(start, 1) for start, stop in row.trained):
        counts.untrained.add(row.tokens, row.where)
        return False
    if row.cut:
        counts.cut.add(row.cut, row.where)
    counts.rows += 1
    counts.tokens += row.tokens
    counts.trainable_tokens += sum(stop - start for start, stop in row.trained)
    counts.longest = max(counts.longest, row.tokens)
    counts.images += sum(part["type"] == "image" for message in row.messages for part in _parts_of(message))
    return True


def _rows(record: DataRecord, encoder: ImageEncoder, config: DataConfig, counts: Counts) -> Iterator[ImageRow]:
    where = record.where
    given, *others = [record.values[column] for column in COLUMNS if record.values.get(column)] or [None]
    if others:
        raise UserError(f"{where} has images in {' and '.join(map(repr, COLUMNS))}: leave one out.")
    rest = {name: value for name, value in record.values.items() if name not in COLUMNS}
    for example in examples_of_records([record._replace(values=rest)]):
        if example.is_empty:
            counts.empty.add(0, where)
        elif not isinstance(example, Chat):
            raise UserError(f"{where} is not a conversation: records with images must be conversations.")
        else:
            chat = replace(example, messages=with_images(example.messages, given, where, record.file.parent))
            limit = config.seq_len if config.truncate else None
            yield from encoder.rows(chat, limit, counts.unseen if config.drop_unseen else None)


def _parts_of(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []
