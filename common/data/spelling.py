"""Spell the same message in several ways: content as text or parts, arguments as JSON text or objects, other names."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from common.data.messages import REASONING, Message, parsed

Change = Callable[[Message], Message]


def texts_of(message: Message) -> list[tuple[str, str]]:
    """Return the texts of a message, each with the name of its field."""
    texts: list[tuple[str, str]] = []
    map_texts(message, lambda name, text: texts.append((name, text)) or text)  # type: ignore[func-returns-value]
    return [(name, text) for name, text in texts if text.strip()]


def varied(message: Message, mark: str) -> Message:
    """Return a message with other texts: ``mark`` in each of them."""
    return map_texts(message, lambda _, text: mark if text.strip() else text)


def map_texts(message: Message, change: Callable[[str, str], str]) -> Message:
    """Return a message with changed texts, given the name of the field of each, and the text."""
    result = dict(message)
    for name in (*REASONING, "content", "refusal"):
        value = message.get(name)
        if isinstance(value, str):
            result[name] = change(name, value)
        elif isinstance(value, list):
            result[name] = [
                {**part, "text": change(name, part["text"])} if isinstance(part.get("text"), str) else part
                for part in value
            ]

    def changed(function: dict[str, Any]) -> dict[str, Any]:
        result = {**function, "name": change("tool_calls", function["name"])}
        if "arguments" in function:
            arguments, inner = function["arguments"], parsed(function["arguments"])
            value = leaves(inner if isinstance(inner, dict) else arguments, change)
            result["arguments"] = json.dumps(value, ensure_ascii=False) if isinstance(inner, dict) else value
        return result

    return _with_functions(result, changed)


def _with_functions(message: Message, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Message:
    if not message.get("tool_calls"):
        return message
    return {
        **message,
        "tool_calls": [{**call, "function": change(call["function"])} for call in message["tool_calls"]],
    }


def leaves(value: Any, change: Callable[[str, str], str]) -> Any:
    """Return a value with changed texts in it."""
    if isinstance(value, dict):
        return {key: leaves(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [leaves(item, change) for item in value]
    return change("tool_calls", value) if isinstance(value, str) else value


def joined(message: Message) -> Message:
    """Return a message whose parts, if all are texts, are one text."""
    content = message.get("content")
    if not isinstance(content, list) or not all(isinstance(part.get("text"), str) for part in content):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}


def _parted(message: Message) -> Message:
    content = message.get("content")
    return (
        {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
    )


def _arguments_as_text(function: dict[str, Any]) -> dict[str, Any]:
    given = function.get("arguments")
    return (
        {**function, "arguments": json.dumps(given, ensure_ascii=False)}
        if isinstance(given, dict)
        else function
    )


def _arguments_parsed(function: dict[str, Any]) -> dict[str, Any]:
    inner = parsed(function.get("arguments"))
    return {**function, "arguments": inner} if isinstance(inner, dict) else function


def _reasoning_as(name: str, message: Message) -> Message:
    given = next((message[key] for key in REASONING if key in message), None)
    rest = {key: value for key, value in message.items() if key not in REASONING}
    return message if given is None else {**rest, name: given}


def _role_as(role: str, other: str, message: Message) -> Message:
    return {**message, "role": other} if message["role"] == role else message


# Spellings of arguments of calls: the first is taken with which all texts appear. A template that takes both writes
# objects by its own rules; one that takes only text fails with objects, or writes them as Python does.
SPELLINGS: tuple[Change, ...] = (
    partial(_with_functions, change=_arguments_parsed),
    partial(_with_functions, change=_arguments_as_text),
)
# Other forms of the same messages, which are tried in this order where a text would not appear.
CHANGES: tuple[Change, ...] = (
    _parted,
    *(partial(_reasoning_as, name) for name in REASONING),
    partial(_role_as, "developer", "system"),
    partial(_role_as, "function", "tool"),
    partial(_role_as, "ipython", "tool"),
    lambda message: {"content": "", **message},
)
