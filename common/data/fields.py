"""Read a record's fields strictly: JSON means what JSON says, and text is text."""

import json
import math
from collections.abc import Mapping
from typing import Any

from common.errors import UserError

# Columns of the layouts, the more structured first: of the whole or the prompt, and of the answer.
LAYOUTS: tuple[tuple[str, str | None], ...] = (
    ("messages", None),
    ("conversations", None),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("text", None),
)


def require_text(record: Mapping[str, Any], field: str, where: str) -> str:
    """Return a field that must be text; empty if it is missing or null.

    Args:
        where: file and line, for the message.

    Raises:
        UserError: if it is a number, a truth value, a date, bytes, a list, or an object.
    """
    value = record.get(field)
    if value is None or isinstance(value, str):
        return value or ""
    kinds = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    kind, shown = kinds.get(type(value), f"of type {type(value).__name__}"), str(value)[:80]
    advice = f' Write "{json.dumps(value)}", in quotes, if it is text.' if isinstance(value, int | float) else ""
    raise UserError(f"{where}: {field!r} is {kind}, where text is expected: {shown}.{advice}")


def structured(record: Mapping[str, Any], field: str, where: str) -> Any:
    """Return a field that holds a list or an object; text is parsed as JSON, which tables use for such values.

    Blank text is None. Text that begins as neither is returned as it is.

    Raises:
        UserError: if it begins like a list or an object, and is not JSON.
    """
    value = record.get(field)
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text[:1] not in ("[", "{"):
        return value if text else None
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: {field!r} is text that is not JSON ({error}): {text[:80]}") from error


def parse_json(text: str) -> Any:
    """Parse JSON by the letter of its standard.

    Raises:
        ValueError: this is not JSON, an object has a key twice, a number has no finite value, or a text holds half
            a surrogate pair, which is no character. The position is known if it is a ``json.JSONDecodeError``.
        RecursionError: if it is nested too deeply.
    """
    value = JSON.decode(text)
    check_characters(text, value)
    return value


def check_characters(text: str, value: Any) -> None:
    """Refuse half surrogate pairs in ``value``, parsed from ``text``: neither UTF-8 nor tokenizers have them.

    Raises:
        ValueError: if there is one.
    """
    if "\\ud" in text.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])[1:-1]
            raise ValueError(f"{half} is half of a surrogate pair, and no character") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return values


def _constant(name: str) -> float:
    raise ValueError(f"JSON has no {name}")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits} is too large a number")
    return value


# Strict decoder; :func:`check_characters` completes it.
JSON = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_constant, parse_float=_finite)
