"""ShareGPT's conversations, ``{"from": "human", "value": ...}``, as messages with roles and content.

Its own names of roles are known (and LLaMA-Factory's for tools): any other is an error with file and line.
"""

import json
from typing import Any

from common.errors import UserError, did_you_mean

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "developer": "developer",
    "observation": "tool",
    "tool": "tool",
    "function_response": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
"""Roles by the names that ShareGPT's data sets give them."""
_CALLS = ("function_call", "tool_call")


def is_sharegpt(value: Any) -> bool:
    """Return whether a value is a list of turns with ``from`` and ``value``."""
    return isinstance(value, list) and any(isinstance(turn, dict) and "from" in turn for turn in value)


def messages_of_sharegpt(turns: list[Any], system: Any, where: str) -> list[dict[str, Any]]:
    """Return ShareGPT's turns as messages; a turn's other keys (``weight``) stay.

    Args:
        turns: the conversation.
        system: the record's ``system`` column, which stands before all turns; empty or None: there is none.
        where: file and line, for messages.

    Raises:
        UserError: a turn has no ``from`` or ``value``, or a name that is none of a role.
    """
    messages = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
    for number, turn in enumerate(turns, 1):
        which = f"{where}: turn {number} of the conversation"
        if not isinstance(turn, dict) or not isinstance(turn.get("from"), str) or "value" not in turn:
            raise UserError(f'{which} is not {{"from": ..., "value": ...}}: {str(turn)[:80]}')
        name = turn["from"].strip().lower()
        if name not in ROLES:
            raise UserError(
                f"{which} is from {turn['from']!r}, which is none of {', '.join(ROLES)}.{did_you_mean(name, ROLES)}"
            )
        rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
        said = {"content": turn["value"] or ""} if name not in _CALLS else _call(turn["value"], which)
        messages.append({"role": ROLES[name], **said, **rest})
    return messages


def _call(value: Any, which: str) -> dict[str, Any]:
    """Return the calls of a turn, which is their JSON, as messages have them."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise UserError(f"{which} is a function call that is not JSON ({error}): {str(value)[:80]}") from error
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise UserError(f'{which} is a function call without {{"name": ..., "arguments": ...}}: {str(value)[:80]}')
    functions = [{"name": call["name"], "arguments": call.get("arguments", {})} for call in calls]
    return {"content": "", "tool_calls": [{"type": "function", "function": function} for function in functions]}
