"""Records that are longer than a row: cut so that every token trained on keeps what comes before it, or left out.

A plain text goes on in the next row. A record with a question does not: its answer would be trained without it. So a
long conversation keeps its beginning, the system prompt among it, up to the last answer that fits as a whole; where not
even the first does, that one is cut at the end of the row, as a completion is, and nothing says that it ends there.
"""

from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple


class TokenizedAnswer(NamedTuple):
    """Token ids of a record with a prompt, or of one of its answers with all that comes before it."""

    ids: list[int]
    trained: list[bool]
    """For each token, whether it carries loss."""
    ends: tuple[int, ...] = ()
    """Places behind its answers, in order, where it may be cut; where there is one answer, none are needed."""

    def before(self, stop: int) -> "TokenizedAnswer":
        """The first ``stop`` tokens."""
        return TokenizedAnswer(self.ids[:stop], self.trained[:stop])

    @property
    def teaches(self) -> bool:
        """Whether a token carries loss that has one before it to be predicted from."""
        return any(self.trained[1:])


@dataclass
class Tally:
    """How many records something was done to, and where the first of them is."""

    records: int = 0
    tokens: int = 0
    """That are not trained on because of it."""
    first: str = ""

    def add(self, tokens: int, where: str) -> None:
        """Count one record more, at ``where``, which lost so many ``tokens``."""
        self.first = self.first or where
        self.records += 1
        self.tokens += tokens


@dataclass
class RowFitter:
    """Makes records fit into rows, and counts those that do not.

    Args:
        seq_len: tokens of a row; None: any number.
        truncate: whether long records are cut; else they are left out.
    """

    seq_len: int | None = None
    truncate: bool = True
    cut: Tally = field(default_factory=Tally)
    left_out: Tally = field(default_factory=Tally)
    """Too long, and not to be cut, or without any answer that begins within the row."""
    untrained: Tally = field(default_factory=Tally)
    """Without any answer to train on, however long the row."""

    def is_long(self, tokens: int) -> bool:
        """Whether so many tokens are more than a row takes."""
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
    """Places behind the runs of tokens that carry loss."""
    place, ends = 0, []
    for carries, run in groupby(trained):
        place += len(list(run))
        if carries:
            ends.append(place)
    return tuple(ends)
