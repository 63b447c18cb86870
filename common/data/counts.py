"""What is counted while data are prepared: rows and tokens, and the records that are not trained on as written."""

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from common.units import format_count


@dataclass
class Tally:
    """How many records something was done to, and where the first of them is."""

    records: int = 0
    tokens: int = 0
    """Number of tokens that are not trained on because of it."""
    first: str = ""

    def add(self, tokens: int, where: str) -> None:
        """Count one record more, at ``where``, which lost ``tokens``."""
        self.first = self.first or where
        self.records += 1
        self.tokens += tokens


@dataclass(kw_only=True)
class Tallies:
    """Counts of records that are not trained on as they were written, and of how instructions were rendered."""

    cut: Tally = field(default_factory=Tally)
    left_out: Tally = field(default_factory=Tally)
    """Records that are too long, and not to be cut, or without any answer that begins within the row."""
    untrained: Tally = field(default_factory=Tally)
    """Records without any answer to train on, however long the row."""
    empty: Tally = field(default_factory=Tally)
    """Records without text, or whose answer is empty."""
    unseen: Tally = field(default_factory=Tally)
    """Records with text that the chat template leaves out."""
    turns: Tally = field(default_factory=Tally)
    """Instructions that became turns of the chat template."""
    alpaca: Tally = field(default_factory=Tally)
    """Instructions that became Alpaca's text."""

    def tallies(self) -> dict[str, Any]:
        """Return all tallies by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tally)}


@dataclass(kw_only=True)
class DataCounts(Tallies):
    """The header of a file of prepared data."""

    rows: int = 0
    tokens: int = 0
    """Number of tokens, without padding."""
    trainable_tokens: int = 0
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
        tallies = {name: Tally(**value) for name, value in values.items() if isinstance(value, dict)}
        return cls(**(values | tallies))

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
            ("left out", self.empty, "no text, or an empty answer"),
            ("left out", self.unseen, "text that the chat template leaves out (--drop-unseen)"),
            (
                "instructions",
                self.turns,
                "user and assistant turns of the chat template (--chat-template alpaca: texts)",
            ),
            ("instructions", self.alpaca, "Alpaca's texts"),
        )
        return [
            f"{what}: {tally.records:,} {'record' if tally.records == 1 else 'records'}"
            f"{f', {format_count(tally.tokens)} tokens' if tally.tokens else ''}; first {tally.first}; {why}"
            for what, tally, why in lines
            if tally.records
        ]


def nothing_to_train(files: list[Path], counts: DataCounts, changes: list[str]) -> str:
    """Explain that no token of ``files`` is trained on.

    Args:
        counts: what the files have.
        changes: what was cut and left out, from :meth:`DataCounts.changes`.
    """
    named = ", ".join(str(file) for file in files[:3]) + (", ..." if len(files) > 3 else "")
    if not (counts.left_out.records or counts.untrained.records or counts.unseen.records):
        first = f" (the first is {counts.empty.first})" if counts.empty.records else ""
        return f"The data is empty: no record with any text to learn in {named}{first}."
    return f"There is no token to train on in {named}: {'; '.join(changes)}."
