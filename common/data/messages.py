"""Turn conversations as data files write them into messages with the roles and keys that chat templates know.

A turn is ``{"role", "content"}``, or ShareGPT's ``{"from", "value"}``; its content is text or parts. All of them become
messages with ``role``, ``content`` and, where the turn has them, ``reasoning_content`` and ``tool_calls``.
"""

import json
from collections.abc import Iterator
from typing import Any

from common.data.read import parse_json
from common.errors import UserError, did_you_mean

Message = dict[str, Any]

_CALLS = ("function_call", "tool_call")
_NAMES = {
    "system": ("system",),
    "developer": ("developer",),
    "user": ("user", "human", "prompter", "customer"),
    "assistant": (
        "assistant",
        "gpt",
        "chatgpt",
        "bing",
        "bard",
        "model",
        "bot",
        "chatbot",
        "ai",
        "agent",
        *_CALLS,
    ),
    "tool": ("tool", "observation", "function_response", "tool_response", "tool_result"),
    "function": ("function",),
    "ipython": ("ipython",),
    "document": ("document",),
}
# Roles that chat templates know, by the names that data files give them.
ROLES = {name: role for role, names in _NAMES.items() for name in names}
# Names under which a message keeps what the assistant thought.
REASONING = ("reasoning_content", "thinking", "reasoning")
# Keys of turns that other tools read: templates take them, or they change nothing here.
READ_KEYS = {"role", "content", "tool_calls", "tool_call_id", "name", "refusal", *REASONING}
# Keys of calls and of their functions that templates take, or that change nothing here.
_OF_CALL = {"id", "type", "function", "index"}
_OF_FUNCTION = {"name", "arguments", "description"}
# What other tools read in place of "weight" in a turn, a part of its content, or a record, and where:
LOSS_SWITCHES = (
    # axolotl 067b021, prompt_strategies/chat_template.py and core/datasets/transforms/chat_builder.py: the fields of
    # its documents (message_field_training, message_field_training_detail), and "train" of parts
    "train", "training", "train_detail", "training_detail",
    # ms-swift 3602360, swift/template/base.py and swift/loss_scale/base.py
    "loss", "loss_scale",
    # LLaMA-Factory ff6d4d1, v1/core/rendering/rendering.py
    "loss_weight",
    # torchtune 0031bfb, torchtune/data/_messages.py: Message.from_dict
    "masked", "eot", "ipython",
    # NeMo 083822e, gpt_sft_chat_dataset.py (the role without loss) and gpt_sft_dataset.py (packed rows)
    "mask", "loss_mask",
    # NeMo-RL 54bec9d, nemo_rl/data/interfaces.py and llm_message_utils.py
    "loss_multiplier", "token_loss_mask",
    # None of these by default, but what else could it mean?
    "trainable",
)  # fmt: skip
_OTHER_PARTS = ("image", "image_url", "video", "video_url", "audio", "audio_url", "input_audio")


def parsed(text: Any) -> Any:
    """Return what JSON text says; None for what is no JSON text."""
    try:
        return json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None


def messages_of(value: Any, column: str, where: str) -> list[Message]:
    """Return the messages of a conversation, or of a single turn; none for None."""
    turns = [value] if isinstance(value, dict) else [] if value is None else value
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise UserError(
            f'{where}: {column!r} is not a list of {{"role": ..., "content": ...}}: {str(value)[:80]}'
        )
    messages: list[Message] = []
    for number, turn in enumerate(turns, 1):
        which = f"{where}: turn {number} of {column!r}"
        message = _message(turn, which)
        if messages and messages[-1]["role"] == "assistant" and _is_call(turn):
            messages[-1] = _with_call(messages[-1], message, which)
        else:
            messages.append(message)
    return messages


def _is_call(turn: dict[str, Any]) -> bool:
    """Return whether a turn's role says that it is a call."""
    name = turn.get("from") if turn.get("from") is not None else turn.get("role")
    return str(name).strip().lower() in _CALLS


def _with_call(message: Message, call: Message, which: str) -> Message:
    """Return an answer with the call in the next turn: a model writes both, and several calls, before it stops."""
    if call.get("weight", 1) != message.get("weight", 1):
        raise UserError(
            f"{which} is a call of the turn before, and carries loss with it: give both one weight."
        )
    rest = {
        key: value for key, value in call.items() if key not in ("role", "content", "tool_calls", "weight")
    }
    if both := sorted(rest.keys() & message.keys()):
        raise UserError(f"{which} is a call of the turn before, and both have {both[0]!r}: leave one out.")
    return message | rest | {"tool_calls": [*message.get("tool_calls", ()), *call["tool_calls"]]}


def _message(turn: dict[str, Any], which: str) -> Message:
    # As in transformers, keys that are null are not there: most templates ignore them, or write None.
    message = {key: value for key, value in turn.items() if value is not None}
    sharegpt = "from" in message
    name, content = (
        message.pop(key, None) for key in (("from", "value") if sharegpt else ("role", "content"))
    )
    # Of two contents, which one would be meant? And a content under another name would be left out.
    if not isinstance(name, str) or {"role", "value"} & set(message) or (sharegpt and "content" in message):
        raise UserError(f'{which} is not {{"role": ..., "content": ...}}: {str(turn)[:80]}')
    role = ROLES.get(name.strip().lower())
    if role is None:
        raise UserError(
            f"{which} has the role {name!r}, none of {', '.join(ROLES)}.{did_you_mean(name, ROLES)}"
        )
    rest = message
    message = {"role": role}
    if name.strip().lower() in _CALLS:
        if content is None:
            raise UserError(
                f'{which} has no content, where a call has {{"name": ..., "arguments": ...}}: {str(turn)[:80]}'
            )
        message |= {"content": "", "tool_calls": _calls(content, which)}
    elif content is not None:
        message["content"] = content
    calls = [
        call for key in ("tool_calls", "function_call") if rest.get(key) for call in _calls(rest[key], which)
    ]
    rest = {key: value for key, value in rest.items() if key not in ("tool_calls", "function_call")}
    message |= rest | ({"tool_calls": calls} if calls else {})
    if not {"content", "tool_calls", "refusal", *REASONING} & set(message):
        raise UserError(f'{which} has no content (write "" for an empty one): {str(turn)[:80]}')
    if isinstance(message.get("content"), list):
        message = _with_parts(message, which)
    elif role in ("tool", "function", "ipython") and isinstance(message.get("content"), dict):
        message["content"] = json.dumps(message["content"], ensure_ascii=False)
    for key in ("content", *REASONING):
        if not isinstance(message.get(key, ""), str | list):
            raise UserError(
                f"{which}: {key!r} is {json.dumps(message[key], default=str)[:80]}, expected text."
            )
    _check_weight(message, which)
    return message


def _calls(value: Any, which: str) -> list[dict[str, Any]]:
    given = parsed(value) if isinstance(value, str) else value
    listed = given if isinstance(given, list) else [given]
    calls = [{"type": "function", "function": call} if _is_function(call) else call for call in listed]
    if not calls or not all(isinstance(call, dict) and _is_function(call.get("function")) for call in calls):
        raise UserError(
            f'{which} is a function call that is not {{"name": ..., "arguments": ...}}: {str(value)[:80]}'
        )
    for function in (call["function"] for call in calls):
        others = function.keys() - _OF_FUNCTION
        if others and "arguments" not in function:
            raise UserError(
                f"{which} is a function call with {', '.join(map(repr, sorted(others)))} and without 'arguments', "
                "which templates look for: rename it."
            )
    for arguments in (call["function"].get("arguments") for call in calls):
        if isinstance(arguments, str) and not arguments.lstrip().startswith("{"):
            continue
        try:
            value = parse_json(arguments) if isinstance(arguments, str) else arguments
            json.dumps(value, default=str, allow_nan=False)  # Python reads NaN, and 1e400 as Infinity
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{which} has arguments that are not JSON ({error}): {str(arguments)[:80]}"
            ) from error
    return [_with_arguments(call) for call in calls]


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with an object as arguments where it has none, which servers write as null, "null", or ""."""
    arguments = call["function"].get("arguments")
    is_text = isinstance(arguments, str) and arguments.strip() not in ("", "null")
    has_any = is_text or (arguments is not None and not isinstance(arguments, str))
    return call if has_any else {**call, "function": {**call["function"], "arguments": {}}}


def other_keys(message: Message) -> Iterator[tuple[str, str]]:
    """Yield the keys that only a template might read, each with what it is of: turns, or their calls."""
    yield from ((key, "turns") for key in message.keys() - READ_KEYS)
    for call in message.get("tool_calls", ()):
        yield from ((key, "calls") for key in call.keys() - _OF_CALL)
        yield from ((key, "calls") for key in call["function"].keys() - _OF_FUNCTION)


def _is_function(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str)


def _with_parts(message: Message, which: str) -> Message:
    """Return a message whose parts are texts (and images), with reasoning and calls moved to their own keys."""
    content: list[Any] = []
    moved: dict[str, Any] = {}
    for part in message["content"]:
        part = {"text": part} if isinstance(part, str) else part
        given = (
            {key: value for key, value in part.items() if value is not None} if isinstance(part, dict) else {}
        )
        if switch := next((key for key in ("weight", *LOSS_SWITCHES) if key in given), None):
            raise UserError(
                f"{which}: a part of its content has {switch!r}, and the parts of a turn carry loss together. Make it "
                'several turns, and write "weight": 0 for one that carries no loss.'
            )
        kind = given.get("type", "text" if given and {"text", "value"} >= set(given) else None)
        if kind in _OTHER_PARTS:
            content.append(part)
            continue
        text = next((given[key] for key in ("text", "value", str(kind)) if key in given), None)
        if kind in ("reasoning", "thinking") and isinstance(text, str):
            key = next((name for name in REASONING if name in message), REASONING[0])
            moved[key] = str((message | moved).get(key, "")) + text
        elif kind in _CALLS:
            moved["tool_calls"] = [*(message | moved).get("tool_calls", ()), *_calls(text, which)]
        elif kind in ("text", "input_text", "output_text") and isinstance(text, str):
            content.append({"type": "text", "text": text})
        else:
            raise UserError(
                f"{which}: content has a part {str(part)[:80]}, none of text, reasoning, tool_call."
            )
    return {**message, "content": content or "", **moved}


def _check_weight(message: Message, which: str) -> None:
    if switch := next((key for key in LOSS_SWITCHES if key in message), None):
        raise UserError(f'{which} has {switch!r}. Write "weight": 0 for a turn that carries no loss.')
    weight = message.get("weight")
    allowed = (0, 1) if message["role"] == "assistant" else (0,)
    if weight is not None and (isinstance(weight, bool) or weight not in allowed):
        shown = json.dumps(weight, default=str)
        raise UserError(
            f"{which} (role {message['role']}) has the weight {shown}: it is 0 (no loss) or 1, and 1 of the assistant "
            "alone."
        )


def has_text(message: Message) -> bool:
    """Return whether a message says or calls anything."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "image") for part in content)
    return bool(content.strip() or any(message.get(key) for key in ("tool_calls", *REASONING, "refusal")))


def same_turns(left: list[Message], right: list[Message]) -> bool:
    """Return whether messages have the same roles and contents, white space around them apart."""
    return [(turn["role"], _bare(turn)) for turn in left] == [(turn["role"], _bare(turn)) for turn in right]


def _bare(message: Message) -> str:
    content = message.get("content") or ""
    return (
        "".join(part.get("text", "") for part in content) if isinstance(content, list) else content
    ).strip()
