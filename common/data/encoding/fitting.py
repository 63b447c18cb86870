"""Make records that are longer than a row fit: cut them so that answers keep what comes before them, or leave them out.

A plain text continues in the next row. A record with a question does not: its answer would be trained without it. So a
long conversation keeps its beginning, the system prompt among it, up to the last answer that fits as a whole; where not
even the first does, that one is cut at the end of the row, as a completion is, and nothing says that it ends there.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from common.data.counts import Tallies


class TokenizedAnswer(NamedTuple):
    """The token ids of a record with a prompt, or of one of its answers with all that comes before it."""

    ids: list[int]
    trained: list[bool]
    """Whether each token carries loss."""
    ends: tuple[int, ...] = ()
    """Places behind its answers, in order, where it may be cut; may be empty where there is one answer."""

    def before(self, stop: int) -> "TokenizedAnswer":
        """Return the first ``stop`` tokens."""
        return TokenizedAnswer(self.ids[:stop], self.trained[:stop])

    @property
    def teaches(self) -> bool:
        """Whether any token carries loss and has one before it to be predicted from."""
        return any(self.trained[1:])


@dataclass
class RowFitter(Tallies):
    """Makes records fit into rows, and counts those that do not.

    Args:
        seq_len: tokens of a row; None: any number.
        truncate: whether long records are cut; else they are left out.
    """

    seq_len: int | None = None
    truncate: bool = True

    def is_long(self, tokens: int) -> bool:
        """Return whether ``tokens`` are more than a row takes."""
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
