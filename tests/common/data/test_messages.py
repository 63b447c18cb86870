"""Conversations as data files write them, as messages."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from common.data.examples import Chat, examples_of_records
from common.data.messages import messages_of
from common.data.read import DataRecord
from common.errors import UserError


def turn(name: str, value: Any, **more: Any) -> dict[str, Any]:
    return {"from": name, "value": value, **more}


def chat_of(record: dict[str, Any]) -> Chat:
    (chat,) = examples_of_records([DataRecord(record, Path("data.jsonl"), "line 1")])
    assert isinstance(chat, Chat)
    return chat


@pytest.mark.parametrize(("turns", "told"), [
    ([turn("human", "a"), turn("gtp", "b")], "data.jsonl, line 1: turn 2 .* the role 'gtp'.*Did you mean 'gpt'"),
    ([turn("human", "a"), {"from": "gpt"}], "line 1: turn 2 .* has no content"),
    ([turn("human", "a"), turn("gpt", None)], "line 1: turn 2 .* has no content"),
    ([turn("human", "a"), {"role": "user", "text": "a"}], "turn 2 .* has no content"),
    ([turn("human", "a"), {"role": "gpt", "value": "a"}], "turn 2 .* is not"),
    ([turn("human", "a", content="b")], "turn 1 .* is not"),
    ([turn("human", "a", role="user")], "turn 1 .* is not"),
    ([turn("human", "a"), turn("gpt", "b", train=False)], """turn 2 .* has 'train'. Write "weight": 0"""),
    ([turn("human", "a"), turn("function_call", {"name": "f", "arguments": '{"a": 1, "a": 2}'})],
     "turn 2 .* arguments that are not JSON .*the key 'a' occurs twice"),
    *(([turn("human", "a"), turn("function_call", {"name": "f", "arguments": arguments})],
       "data.jsonl, line 1: turn 2 .* arguments that are not JSON .*Out of range float values")
      for arguments in ('{"a": 1e400}', '{"a": [NaN]}', {"a": [float("inf")]}, {"a": {"b": float("nan")}})),
    ([turn("human", "a"), turn("function_call", json.dumps({"name": "f", "arguments": {"a": float("nan")}}))],
     "turn 2 .* arguments that are not JSON"),
    *(([turn("human", "a"), turn("function_call", {"name": "f", key: {"a": 1}})],
       f"turn 2 .* is a function call with '{key}' and without 'arguments'")
      for key in ("parameters", "input", "args")),
    ([turn("human", "a"), turn("gpt", "b", weight=0), turn("tool_call", {"name": "f"})],
     "turn 3 .* is a call of the turn before, .*: give both one weight"),
    ([turn("human", "a"), turn("gpt", "b", thinking="c"), turn("tool_call", {"name": "f"}, thinking="d")],
     "turn 3 .* and both have 'thinking'"),
    ([turn("human", "a"), {"role": "tool_call", "name": "f", "arguments": {}}],
     "turn 2 .* has no content, where a call"),
    ([turn("human", "a"), turn("function_call", "{")], "turn 2 .* is a function call that is not .*: {$"),
    ([turn("human", "a"), turn("function_call", "[]")], r"turn 2 .* is a function call that is not .*: \[\]$"),
])  # fmt: skip
def test_turns_that_are_not_understood(turns: list[dict[str, Any]], told: str) -> None:
    with pytest.raises(UserError, match=told):
        chat_of({"conversations": turns})


CALL = {"name": "weather", "arguments": '{"city": "Rome"}'}
CALLS = [{"type": "function", "function": CALL}]


@pytest.mark.parametrize(("written", "message"), [
    ({"role": "GPT", "content": "a"}, {"content": "a"}),
    ({"role": "assistant", "content": None, "function_call": CALL}, {"tool_calls": CALLS}),
    ({"role": "assistant", "content": [{"type": "reasoning", "value": "why"}, {"type": "text", "value": "a"}]},
     {"content": [{"type": "text", "text": "a"}], "reasoning_content": "why"}),
    ({"role": "assistant", "content": [{"type": "tool_call", "value": json.dumps(CALL)}]},
     {"content": "", "tool_calls": CALLS}),
    ({"role": "assistant", "content": ["a", "b"]}, {"content": [{"type": "text", "text": text} for text in "ab"]}),
    ({"role": "assistant", "content": "", "thinking": "why"}, {"content": "", "thinking": "why"}),
])  # fmt: skip
def test_one_turn(written: dict[str, Any], message: dict[str, Any]) -> None:
    assert messages_of([written], "messages", "line 1") == messages_of(written, "messages", "line 1")
    assert messages_of([written], "messages", "line 1") == [{"role": "assistant", **message}]


@pytest.mark.parametrize("name", ["tool_call", "Function_Call"])
def test_calls_belong_to_the_answer_before_them(name: str) -> None:
    """As ms-swift writes them: in separate turns, the model would learn to stop in between."""
    calls = [turn(name, CALL), turn(name, json.dumps(CALL))]
    thought = turn("gpt", "I look.", thinking="why")
    for before, rest in (([], {"content": ""}), ([thought], {"content": "I look.", "thinking": "why"})):
        chat = chat_of({"conversations": [turn("human", "a"), *before, *calls, turn("observation", "11")]})
        assert chat.messages[1:-1] == [{"role": "assistant", **rest, "tool_calls": CALLS * 2}]
    untrained = [turn("gpt", "I look.", weight=0), turn(name, CALL, weight=0), turn("gpt", "b")]
    assert chat_of({"conversations": [turn("human", "a"), *untrained]}).answers == [2]


@pytest.mark.parametrize(
    "content",
    [3, True, {"a": 1}, [3], [{"type": "sound", "text": "a"}], [{"type": "text"}], [{"text": "a", "score": 1}],
     [{"type": ["text"], "text": "a"}], datetime.date(2024, 1, 1), b"a"],
)  # fmt: skip
def test_content_that_is_no_text(content: Any) -> None:
    with pytest.raises(UserError, match=r"line 1: turn 1 of 'messages'.*(expected text|none of text)"):
        messages_of([{"role": "user", "content": content}], "messages", "line 1")


@pytest.mark.parametrize("arguments", [None, "", " ", "null", {}, "{}"])
def test_a_call_without_arguments_has_an_empty_object(arguments: Any) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": arguments}}
    [message] = messages_of(
        [{"role": "assistant", "content": "", "tool_calls": [call]}], "messages", "line 1"
    )
    assert message["tool_calls"][0]["function"]["arguments"] in ({}, "{}")
    assert call["function"]["arguments"] is arguments
