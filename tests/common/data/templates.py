"""The chat templates that TRL ships, and a tokenizer that knows the marks in templates."""

import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_TRL = find_spec("trl")
_FOLDER = Path(_TRL.submodule_search_locations[0]) / "chat_templates" if _TRL else Path()  # type: ignore[index]
TRL = {file.stem: file.read_text() for file in sorted(_FOLDER.glob("*.jinja"))} if _TRL else {}
_MARK = re.compile(r"<[|/\w▁｜]{1,40}[^<>\s{}'\"]*>|\[\|\w+\|\]|\[gMASK\]|\]~!?b[\]\[]|\[e~\[")
_FIRST = ("<s>", "</s>", "<pad>")
# Tokens of published models that are no special ones: a tokenizer's decode shows them.
_SHOWN = re.compile(r"</?(think|tool_\w+|tools|arg_\w+|function\w*|parameter\w*)\b")


def make_tokenizer(templates: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each byte, and one for each mark in the templates."""
    marks = {word for text in templates for word in _MARK.findall(text)} - {*_FIRST}
    words = [*_FIRST, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in sorted(marks) if _SHOWN.match(mark)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        additional_special_tokens=sorted(mark for mark in marks if not _SHOWN.match(mark)),
    )  # fmt: skip


def tool_conversation(arguments: Any) -> dict[str, Any]:
    """Return a record in which the assistant calls a tool with ``arguments``, and answers."""
    parameters = {"type": "object", "properties": {"city": {"type": "string", "description": "Name"}}}
    call = {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": "How warm is it?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "weather", "tool_call_id": "call12345", "content": "11"},
            {"role": "assistant", "content": "It has 11 degrees."},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "weather", "description": "Look", "parameters": parameters},
            }
        ],
    }
