"""Find the answers of a conversation in its rendering, and cut records that are longer than a row, or leave them out.

A plain text continues in the next row. A record with a question does not: its answer would be trained without it. So a
long conversation keeps its beginning, including the system prompt, up to the last answer that fits as a whole; if not
even the first does, that answer is cut at the end of the row, as a completion is, without an end mark.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any, NamedTuple

from common.data.encoding.chat_template import varied
from common.data.selection import Tallies
from common.data.shapes import Chat
from common.errors import UserError


class TokenizedAnswer(NamedTuple):
    """The token ids of a record with a prompt, or of one of its answers with all that comes before it."""

    ids: list[int]
    trained: list[bool]  # Whether each token carries loss
    ends: tuple[int, ...] = ()  # Positions behind its answers where it may be cut, in order

    def before(self, stop: int) -> "TokenizedAnswer":
        return TokenizedAnswer(self.ids[:stop], self.trained[:stop])

    @property
    def teaches(self) -> bool:
        """Whether any token carries loss and has one before it to be predicted from."""
        return any(self.trained[1:])


@dataclass
class RowFitter(Tallies):
    """Makes records fit into rows, and counts those that do not.

    Args:
        truncate: whether long records are cut; else they are left out.
    """

    seq_len: int | None = None
    truncate: bool = True

    def is_long(self, tokens: int) -> bool:
        return self.seq_len is not None and tokens > self.seq_len

    def fit(self, parts: list[TokenizedAnswer], where: str) -> list[TokenizedAnswer]:
        """Return what of a record goes into rows.

        Args:
            parts: the record, or one part for each of its answers.
            where: file and line, for the count.
        """
        tokens = sum(len(part.ids) for part in parts)
        if not any(part.teaches for part in parts):
            self.untrained.add(tokens, where)
            return []
        if not any(self.is_long(len(part.ids)) for part in parts):
            return parts
        kept = self._cut(parts) if self.truncate else []
        (self.cut if kept else self.left_out).add(tokens - sum(len(part.ids) for part in kept), where)
        return kept

    def _cut(self, parts: list[TokenizedAnswer]) -> list[TokenizedAnswer]:
        whole = [part for part in parts if part.teaches and not self.is_long(len(part.ids))]
        if whole:
            return whole
        first = next(part for part in parts if part.teaches)
        shorter = [first.before(end) for end in first.ends if not self.is_long(end)]
        shorter = [part for part in shorter if part.teaches] or [first.before(self.seq_len or 0)]
        return shorter[-1:] if shorter[-1].teaches else []


def run_ends(trained: list[bool]) -> tuple[int, ...]:
    """Return the places behind the runs of tokens that carry loss."""
    place, ends = 0, []
    for carries, run in groupby(trained):
        place += len(list(run))
        if carries:
            ends.append(place)
    return tuple(ends)


# Token ids of messages, given these, the template's options and, as `ask`, whether to prompt for an answer.
Render = Callable[..., list[int]]

_OTHER = "qz0zq"  # Text that no conversation has


class AnswerFinder:
    """Finds answers by rendering parts and variants of a conversation."""

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
            UserError: if the template mixes the answer with the text before it.
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
