"""Render conversations with a tokenizer's chat template, and refuse content that it would silently drop or garble.

Templates are programs, each of which supports what its author thought of: whether one takes tools, or content of
several parts, is found by rendering them.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from common.data.shapes import Chat
from common.errors import UserError

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """A tokenizer's chat template.

    Args:
        tokenizer: the tokenizer; without a template, every conversation is refused.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def marks_answers(self, chat: Chat) -> bool:
        """Return whether the template itself marks the tokens that the assistant generates."""
        if not self._tokenizer.is_fast:  # only fast ones know which characters a token comes from
            return False
        return bool(_GENERATION_MARK.search(self._source(chat)))

    def render(self, chat: Chat, stop: int | None = None, *, ask: bool = False) -> list[int]:
        """Return the token ids of the first ``stop`` messages; with ``ask``, also the prompt for an answer."""
        messages = chat.messages[:stop]
        if not messages:
            return []
        out: Any = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=ask, return_dict=True, **chat.options
        )
        return list(out["input_ids"])

    def render_marked(self, chat: Chat, stop: int | None = None) -> tuple[list[int], list[bool]]:
        """Return the token ids of the first ``stop`` messages, and for each whether the template marks it."""
        out: Any = self._tokenizer.apply_chat_template(
            chat.messages[:stop], return_dict=True, return_assistant_tokens_mask=True, **chat.options
        )
        return list(out["input_ids"]), [bool(bit) for bit in out["assistant_masks"]]

    def adapted(self, chat: Chat) -> Chat:
        """Return ``chat`` in the form that this template takes.

        Content of several texts becomes one text where the template would write a Python list, and a call's arguments
        an object where it would put JSON into a string of JSON.

        Raises:
            UserError: there is no template, or it drops a part of the conversation.
        """
        if self._tokenizer.chat_template is None:
            raise UserError(
                f"{chat.where} is a conversation, but the tokenizer has no chat template. Give one with "
                "--chat-template (chatml, llama-3, ... or a file), or records with text or with prompt and completion "
                "strings."
            )
        messages = chat.messages
        if any(isinstance(message.get("content"), list) for message in messages):
            chat = self._with_text(chat)
        if any(message.get("tool_calls") for message in messages):
            chat = self._with_calls(chat)
        for name in chat.options:
            self._check_option(chat, name)
        return chat

    def _source(self, chat: Chat) -> str:
        return str(self._tokenizer.get_chat_template(tools=chat.options.get("tools")))

    def _text(self, chat: Chat) -> str | None:
        """Return the text that the template writes; None if it refuses."""
        try:
            return str(self._tokenizer.apply_chat_template(chat.messages, tokenize=False, **chat.options))
        except Exception:  # templates raise any exception
            return None

    def _with_text(self, chat: Chat) -> Chat:
        """Join content of several texts, if need be."""
        contents = [message["content"] for message in chat.messages if isinstance(message.get("content"), list)]
        written = self._text(chat)
        if written is not None and not any(str(content) in written for content in contents if content):
            return chat
        for part in (part for content in contents for part in content):
            if (
                not isinstance(part, dict)
                or part.get("type", "text") != "text"
                or not isinstance(part.get("text"), str)
            ):
                raise UserError(
                    f"{chat.where}: content has a part {str(part)[:80]}, and the tokenizer's chat template takes text "
                    'only: write the text as a string, or as parts {"type": "text", "text": ...}.'
                )
        return _changed(chat, _with_joined_texts)

    def _with_calls(self, chat: Chat) -> Chat:
        """Turn arguments of calls into objects, if need be.

        Raises:
            UserError: the template leaves calls out.
        """
        written = self._text(chat)
        if written is None:
            other = _changed(chat, _with_parsed_arguments)
            return other if self._text(other) is not None else chat  # which it refuses later, with its own message
        without = _changed(chat, lambda message: {k: v for k, v in message.items() if k != "tool_calls"})
        if self._text(without) == written:
            raise UserError(
                f"{chat.where}: the assistant calls tools, and the tokenizer's chat template leaves tool_calls out. "
                "Use the tokenizer of a model that calls tools, or write the call as content."
            )
        texts = [text for message in chat.messages for text in _argument_texts(message)]
        if any(json.dumps(text, ensure_ascii=False) in written for text in texts):
            return _changed(chat, _with_parsed_arguments)
        return chat

    def _check_option(self, chat: Chat, name: str) -> None:
        """Refuse an option that the template does not read."""
        if name in ("tools", "documents"):
            written = self._text(chat)  # None: it refuses, and says why when it is rendered
            rest = {key: value for key, value in chat.options.items() if key != name}
            read = written is None or written != self._text(replace(chat, options=rest))
        else:  # a switch may well make no difference to one conversation
            read = bool(re.search(rf"\b{re.escape(name)}\b", self._source(chat)))
        if not read:
            raise UserError(
                f"{chat.where} has {name}, and the tokenizer's chat template leaves them out: the model would never "
                f"see them. Use the tokenizer of a model whose template takes {name}, or take {name} out of the data."
            )


def _changed(chat: Chat, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Chat:
    return replace(chat, messages=[change(message) for message in chat.messages])


def _with_joined_texts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return message | {"content": "".join(part["text"] for part in content)} if isinstance(content, list) else message


def _functions(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the functions that a message calls in the usual format."""
    calls = message.get("tool_calls")
    found = [call.get("function", call) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [function for function in found if isinstance(function, dict)]


def _argument_texts(message: dict[str, Any]) -> list[str]:
    """Return arguments that are JSON objects in a string, as in OpenAI's format."""
    texts = [function.get("arguments") for function in _functions(message)]
    return [text for text in texts if isinstance(text, str) and isinstance(_parsed(text), dict)]


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if not _argument_texts(message):
        return message
    message = json.loads(json.dumps(message))
    for function in _functions(message):
        if isinstance(function.get("arguments"), str) and isinstance(_parsed(function["arguments"]), dict):
            function["arguments"] = _parsed(function["arguments"])
    return message


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
