"""What is counted while data are prepared: rows and tokens, and the records that are not trained on as written."""

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Self

from common.units import format_count


@dataclass
class Tally:
    """How many records something was done to, and where the first of them is."""

    records: int = 0
    tokens: int = 0
    """Number of tokens that are not trained on because of it."""
    first: str = ""

    def add(self, tokens: int, where: str) -> None:
        """Count one record more, at ``where``, which lost so many ``tokens``."""
        self.first = self.first or where
        self.records += 1
        self.tokens += tokens


TALLIES = ("cut", "left_out", "untrained", "empty")
"""Names of the tallies of :class:`DataCounts`."""


@dataclass(kw_only=True)
class DataCounts:
    """The header of a file of prepared data."""

    rows: int = 0
    tokens: int = 0
    """Number of tokens, without padding."""
    trainable_tokens: int = 0
    cut: Tally = field(default_factory=Tally)
    left_out: Tally = field(default_factory=Tally)
    untrained: Tally = field(default_factory=Tally)
    """Records that are not there as they were written; see :class:`common.data.encoding.fitting.RowFitter`."""
    empty: Tally = field(default_factory=Tally)
    """Records without any text, such as blank ones and conversations without messages."""
    digest: str = ""
    """Hash of all rows in order: equal data have equal hashes, wherever they lie."""

    @classmethod
    def parse(cls, text: bytes) -> Self:
        """Read what was written as JSON.

        Raises:
            ValueError: it is something else.
        """
        values = json.loads(text)
        if not isinstance(values, dict) or set(values) != {field.name for field in fields(cls)}:
            raise ValueError("not the header of prepared data")
        return cls(**(values | {name: Tally(**values[name]) for name in TALLIES}))

    def changes(self, seq_len: int, truncate: bool) -> list[str]:
        """Describe what is cut and what is left out, each with the place of the first such record."""
        longer = f"longer than a row of {seq_len:,} tokens"
        if truncate:
            too_long = f"{longer}, with no room for an answer (a larger --seq-len has it)"
        else:
            too_long = f"{longer} (--drop-long; --truncate keeps what fits of them)"
        kept = f"{longer}: the answers that fit are kept, with all before them (--drop-long drops them)"
        lines = (
            ("cut", self.cut, kept),
            ("left out", self.left_out, too_long),
            ("left out", self.untrained, "no completion, output or message of the assistant to train on"),
            ("left out", self.empty, "no text in them"),
        )
        return [
            f"{what}: {tally.records:,} {'record' if tally.records == 1 else 'records'}, {format_count(tally.tokens)} "
            f"tokens; first {tally.first}; {why}"
            for what, tally, why in lines
            if tally.records
        ]


def nothing_to_train(files: list[Path], is_empty: bool, changes: list[str]) -> str:
    """Explain that no token of ``files`` is trained on.

    Args:
        is_empty: whether no record has any text.
        changes: what was cut and left out, from :meth:`DataCounts.changes`.
    """
    named = ", ".join(str(file) for file in files[:3]) + (", ..." if len(files) > 3 else "")
    if is_empty:
        return f"The data is empty: no record with any text in {named}."
    why = changes or ["no completion, output or message of the assistant"]
    return f"There is no token to train on in {named}: {'; '.join(why)}."
