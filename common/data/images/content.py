"""Bring the images of conversations, which data files write in several ways, into one form.

A message's ``content`` is a string or a list of parts. An image is a part, ``{"type": "image"}`` with ``path``, ``url``
or ``image``, or OpenAI's ``{"type": "image_url", "image_url": {"url": ...}}``; or a part without any of these, or
``<image>`` in a string, which stands for the next one of the record's ``images``. Images are local files, ``data:``
URLs or, in Parquet files, bytes.
"""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from common.data.messages import Message
from common.errors import UserError

PLACEHOLDER = "<image>"  # Text in a string that stands for an image

_KEYS = ("image", "path", "url", "image_url", "bytes")
COLUMNS = ("images", "image")
"""Columns of a record that hold its images."""
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

    Raises:
        UserError: an image does not exist, or placeholders and images differ in number.
    """
    column = iter(given if isinstance(given, list) else [given] if given else [])
    result = [
        {**message, "content": list(_parts(message.get("content"), column, where, directory))} for message in messages
    ]
    left = sum(1 for _ in column)
    if left and not any(part["type"] == "image" for message in result for part in message["content"]):
        raise UserError(f"{where} has {left} images, but no {PLACEHOLDER} in its messages to say where they go.")
    if left:
        raise UserError(f"{where} has {left} more images than places for them in its messages.")
    return result


def _parts(content: Any, column: Iterator[Any], where: str, directory: Path) -> Iterator[dict[str, Any]]:
    if isinstance(content, str | None):
        for number, text in enumerate((content or "").split(PLACEHOLDER)):
            if number:
                yield _next_image(column, where, directory)
            if text:
                yield {"type": "text", "text": text}
        return
    for part in content:
        kind = part.get("type")
        if kind in ("image", "image_url"):
            value = next((part[key] for key in _KEYS if part.get(key)), None)
            yield _next_image(column, where, directory) if value is None else _image(value, where, directory)
        elif kind == "text":
            yield part
        else:
            raise UserError(f"{where}: a part of type {kind!r} cannot be trained on; there are text and image.")


def _next_image(column: Iterator[Any], where: str, directory: Path) -> dict[str, Any]:
    value = next(column, None)
    if value is None:
        raise UserError(f"{where} has more places for images in its messages than images.")
    return _image(value, where, directory)


def _image(value: Any, where: str, directory: Path) -> dict[str, Any]:
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
