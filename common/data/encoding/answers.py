"""Find where the answers of a conversation are in its rendering, which the template does not say."""

import contextlib
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from common.data.encoding.chat_template import varied
from common.data.shapes import Chat
from common.errors import UserError

Render = Callable[..., list[int]]
"""Token ids of messages, given these, the template's options and, as ``ask``, whether to prompt for an answer."""

_OTHER = "qz0zq"
"""Text that no conversation has."""


class AnswerFinder:
    """Finds answers by rendering parts and variants of a conversation.

    Args:
        render: what makes token ids of messages.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._header: list[int] | None = None

    def spans(self, chat: Chat, whole: list[int], turns: list[int]) -> list[tuple[int, int]] | None:
        """Find where in ``whole`` some turns are, by rendering growing prefixes of the conversation.

        Returns:
            None if a turn is rendered differently once others follow.
        """
        spans = []
        for turn in turns:
            last = turn + 1 == len(chat.messages)
            after = whole if last else self._render(chat.messages[: turn + 1], chat.options)
            if whole[: len(after)] != after:
                return None
            spans.append((self.start(chat, turn, after), len(after)))
        return spans

    def start(self, chat: Chat, turn: int, ids: list[int]) -> int:
        """Return where an answer begins in ``ids``, the rendering that ends with it: behind the prompt for it.

        Raises:
            UserError: the template mixes the answer with what comes before it.
        """
        history, answer, options = chat.messages[:turn], chat.messages[turn], chat.options
        with contextlib.suppress(Exception):  # no template has to render what is no whole conversation
            asked = self._render(history, options, ask=True)
            start = common_prefix(asked, ids)
            if history and start == len(asked):
                return start
            if history and start >= common_prefix(self._render(history, options), asked):  # differs in the header alone
                return start
        # What comes before is rendered differently now. Vary the answer, then the rest, and see where ids change.
        first = common_prefix(ids, self._render([*history, varied(answer, _OTHER)], options))
        others = [varied(message, _OTHER) for message in history]
        last = len(ids) - common_prefix(ids[::-1], self._render([*others, answer], options)[::-1]) if history else 0
        if last > first:
            raise UserError(f"{chat.where}: the chat template mixes turn {turn + 1} with those before it.")
        return max(last, self._behind_header(ids[:first], options))

    def _behind_header(self, ids: list[int], options: dict[str, Any]) -> int:
        """Return where the header of an answer ends that is the last one in ``ids``; their number if there is none."""
        if self._header is None:
            self._header = self._prompt_for_answer(options)
        starts = [at for at, token in enumerate(ids) if self._header and token == self._header[0]]
        return starts[-1] + common_prefix(self._header, ids[starts[-1] :]) if starts else len(ids)

    def _prompt_for_answer(self, options: dict[str, Any]) -> list[int]:
        """Return what the template writes for the assistant to continue; nothing if that cannot be found out."""
        probe = [{"role": "user", "content": _OTHER}]
        try:
            asked = self._render(probe, options, ask=True)
            return asked[common_prefix(self._render(probe, options), asked) :]
        except Exception:  # nor does it have to take a question alone
            return []


def common_prefix(left: list[int], right: list[int]) -> int:
    """Return the number of tokens that both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
