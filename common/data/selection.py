"""Select records of data files, rename their columns, and count what is prepared of them."""

import copy
import hashlib
import itertools
import json
import math
import sys
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Self

from common.data.read import DataRecord, ReadPosition, extension_of, read_records
from common.errors import UserError, did_you_mean
from common.units import counted, format_count

# Columns of the layouts, the more structured first: of the whole or the prompt, and of the answer.
LAYOUTS = (("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"), ("text",))

_NAMES_KEPT = 20  # Names of columns and keys that nothing reads
_SUMS = ("documents", "images", "rows", "tokens", "trainable_tokens", "skipped_tokens")  # Counts that add up
_FIRST_KEPT = 8  # Characters that the tokenizer does not write, and control tokens in texts


@dataclass
class Tally:
    """How many records something was done to, and where the first and the last of them are."""

    records: int = 0
    tokens: int = 0  # Number of tokens that are not trained on because of it
    first: str = ""
    last: str = ""

    def add(self, tokens: int, where: str) -> None:
        """Count a record at ``where``, once for all its rows, and ``tokens`` that it lost."""
        self.first = self.first or where
        self.records += where != self.last
        self.last = where
        self.tokens += tokens

    def merge(self, later: "Tally") -> None:
        """Add what was counted of the records that follow."""
        self.records += later.records - bool(later.first and later.first == self.last)
        self.first = self.first or later.first
        self.last = later.last or self.last
        self.tokens += later.tokens


@dataclass
class Counts:
    """What a file of prepared data holds, and which records are not in it as they were written."""

    seq_len: int = sys.maxsize  # Tokens of a row
    truncate: bool = True  # Whether records that are longer are cut; else they are left out
    files: int = 0
    documents: int = 0
    images: int = 0
    rows: int = 0
    longest: int = 0  # Number of tokens of the longest row of a conversation with images
    tokens: int = 0  # Number of tokens, without padding
    trainable_tokens: int = 0
    skipped_tokens: int = 0  # Number of tokens in pieces without any trained one, which are left out
    digest: str = ""  # Hash of all rows in order: equal data have equal hashes, wherever they lie
    # Name of the file, which has a hash of all that it is made of: it may have taken another's
    name: str = ""
    cut: Tally = field(default_factory=Tally)
    # Records that are too long, or without an answer in the row
    left_out: Tally = field(default_factory=Tally)
    # Records without any answer to train on, however long the row
    untrained: Tally = field(default_factory=Tally)
    empty: Tally = field(default_factory=Tally)  # Records without text, or whose answer is empty
    alike: Tally = field(default_factory=Tally)  # Pairs whose answers are the same in their rows
    unseen: Tally = field(default_factory=Tally)  # Records with text that the chat template leaves out
    endless: Tally = field(default_factory=Tally)  # Records with an answer that no special token ends
    turns: Tally = field(default_factory=Tally)  # Instructions that became turns of the chat template
    alpaca: Tally = field(default_factory=Tally)  # Instructions that became Alpaca's text
    prompts: Tally = field(default_factory=Tally)  # Prompts that are texts, though there is a chat template
    unknown: Tally = field(default_factory=Tally)  # Records with text for which the tokenizer has no token
    # Records with characters that the tokenizer does not write
    unwritten: Tally = field(default_factory=Tally)
    characters: list[str] = field(default_factory=list)  # The first of these characters
    control: Tally = field(default_factory=Tally)  # Records whose texts hold names of control tokens
    controls: list[str] = field(default_factory=list)  # The first of these names
    # Columns that these come from
    prompt_columns: list[str] = field(default_factory=lambda: ["prompt", "completion"])
    unread: dict[str, int] = field(default_factory=dict)  # How often there is what nothing reads, by its name
    stops: list[int] = field(default_factory=list)  # Tokens that end answers, at which generation has to stop

    @classmethod
    def parse(cls, text: bytes) -> Self:
        """Read what was written as JSON."""
        values = json.loads(text)
        tallies = {
            name: Tally(**value)
            for name, value in values.items()
            if isinstance(value, dict) and name != "unread"
        }
        return cls(**(values | tallies))

    def stop_at(self, tokens: Iterable[int]) -> None:
        """Note tokens that end answers."""
        for token in tokens:
            if token not in self.stops:
                insort(self.stops, token)

    def add_unwritten(self, characters: Iterable[str], where: str) -> None:
        """Count a record with characters that the tokenizer does not write; only the first ones are kept."""
        self.unwritten.add(0, where)
        _keep_first(self.characters, sorted(set(characters)))

    def add_control(self, names: Iterable[str], where: str) -> None:
        """Count a record whose texts hold names of control tokens; only the first ones are kept."""
        self.control.add(0, where)
        _keep_first(self.controls, sorted(set(names)))

    def add_unread(self, name: str) -> None:
        """Count what nothing reads."""
        self.unread[name] = self.unread.get(name, 0) + 1

    def take(self) -> Self:
        """Return what is counted, and count again from zero."""
        taken = copy.copy(self)
        vars(self).update(vars(type(self)(self.seq_len, self.truncate)))
        return taken

    def merge(self, later: "Counts") -> None:
        """Add what was counted of the records that follow; of many names that nothing reads, the first ones are
        kept."""
        for name, value in vars(later).items():
            mine = getattr(self, name)
            if isinstance(value, Tally):
                mine.merge(value)
            elif name in _SUMS:
                setattr(self, name, mine + value)
        self.longest = max(self.longest, later.longest)
        _keep_first(self.characters, later.characters)
        _keep_first(self.controls, later.controls)
        self.stop_at(later.stops)
        for name, count in later.unread.items():
            name = name if name in self.unread or len(self.unread) < _NAMES_KEPT else "others"
            self.unread[name] = self.unread.get(name, 0) + count

    def changes(self) -> list[str]:
        """Describe what is cut and what is left out, each with the place of the first such record."""
        longer = f"longer than a row of {self.seq_len:,} tokens"
        if self.truncate:
            too_long = f"{longer}, with no room for an answer (a larger --seq-len has it)"
        else:
            too_long = f"{longer} (--drop-long; --truncate keeps what fits of them)"
        what_fits = "the answers that fit are kept, with all before them"
        if not self.trainable_tokens:  # texts of classes
            what_fits = "what fits of the text is kept"
        kept = f"{longer}: {what_fits} (--drop-long drops them)"
        turns = "user and assistant turns of the chat template (--chat-template alpaca: texts)"
        endless = (
            "no token of the tokenizer ends the answer, so the model does not learn to stop: give --chat-template "
            "zephyr, which ends answers with EOS, or another whose marks the tokenizer knows"
        )
        as_turns = " ".join(map("=".join, zip(("instruction", "output"), self.prompt_columns, strict=False)))
        prompts = f"texts, without the chat template (--columns {as_turns}: turns of the chat template)"
        unknown = "the tokenizer has no token for a part of the text, and writes its unknown token there"
        characters, controls = map(_first_ones, (self.characters, self.controls))
        unwritten = f"the tokenizer leaves out characters, or writes white space for them: {characters}"
        control = f"what the texts have of these is no text but the tokenizer's control tokens: {controls}"
        lines = (
            ("cut", self.cut, kept),
            ("left out", self.left_out, too_long),
            ("left out", self.untrained, "no completion, output or message of the assistant to train on"),
            ("left out", self.empty, "no text, or an empty answer"),
            (
                "left out",
                self.alike,
                f"chosen and rejected are the same, within rows of {self.seq_len:,} tokens",
            ),
            ("left out", self.unseen, "text that the chat template leaves out (--drop-unseen)"),
            ("without an end", self.endless, endless),
            ("instructions", self.turns, turns),
            ("instructions", self.alpaca, "Alpaca's texts"),
            ("prompts", self.prompts, prompts),
            ("unknown", self.unknown, unknown),
            ("not written", self.unwritten, unwritten),
            ("control tokens", self.control, control),
        )
        skipped = [f"left out: {format_count(self.skipped_tokens)} tokens of texts of one token"]
        unread = [f"not read: {', '.join(f'{name} ({count:,})' for name, count in self.unread.items())}"]
        return [
            f"{what}: {counted(tally.records, 'record')}"
            f"{f', {format_count(tally.tokens)} tokens' if tally.tokens else ''}; first {tally.first}; {why}"
            for what, tally, why in lines
            if tally.records
        ] + (skipped * bool(self.skipped_tokens) + unread * bool(self.unread))

    def check_any_rows(self, files: Sequence[Path]) -> None:
        """Reject ``files`` of which no token is trained on."""
        if self.rows:
            return
        named = ", ".join(str(file) for file in files[:3]) + (", ..." if len(files) > 3 else "")
        if not any(tally.records for tally in (self.left_out, self.untrained, self.alike, self.unseen)):
            first = f" (the first is {self.empty.first})" if self.empty.records else ""
            raise UserError(f"The data is empty: no record with any text to learn in {named}{first}.")
        raise UserError(f"There is no token to train on in {named}: {'; '.join(self.changes())}.")


def _keep_first(kept: list[str], seen: Iterable[str]) -> None:
    kept += [each for each in seen if each not in kept][: _FIRST_KEPT - len(kept)]


def _first_ones(kept: list[str]) -> str:
    return ", ".join([*map(repr, kept), *["..."][: len(kept) // _FIRST_KEPT]])


@dataclass(frozen=True)
class RecordSelection:
    """A selection of the records of data sets, in their order.

    A held-out part is drawn evenly: the records of a data set are divided into windows of ``1 / held_out`` records, and
    one of each window is held out. Which one depends on nothing but its number in its data set, so that training and
    evaluation, and every run on the same data, agree about it.
    """

    # Names of the record shapes, and the files' columns
    columns: Mapping[str, str] = field(default_factory=dict)
    # Number of records to take at most of each data set, from the first on; None: all
    limit: int | None = None
    held_out: float = 0.0  # Part of the records that is held out for evaluation
    takes_held_out: bool = False  # Whether the part that is held out is taken, or all others
    # Number of files of each data set, numbered separately; empty for one
    files_of_sets: tuple[int, ...] = ()

    def read(self, files: Sequence[Path], position: ReadPosition | None = None) -> Iterator[DataRecord]:
        """Read what is taken of the records of ``files``; ``position`` follows how far they are read."""
        if any(extension_of(file) == ".txt" for file in files) and (
            self.held_out or self.limit or self.columns
        ):
            raise UserError(
                "A .txt file is one text without records: --eval-split, --max-records and --columns are for the other "
                'formats. Give --eval-data for evaluation, or write the text as records, {"text": ...}.'
            )
        rest = list(files)
        records = 0
        taken = 0
        for size in self.files_of_sets or (len(rest),):
            numbered = enumerate(record for file in rest[:size] for record in read_records(file, position))
            for number, record in itertools.islice(numbered, self.limit):
                records += 1
                if not self.held_out or self._is_held_out(number) is self.takes_held_out:
                    taken += 1
                    yield self._renamed(record) if self.columns else record
            rest = rest[size:]
        if records and not taken:
            raise UserError(
                f"--eval-split {self.held_out:.4g} of {counted(records, 'record')} leaves none to "
                f"{'evaluate with' if self.takes_held_out else 'train on'}. Give another part, or --eval-data."
            )

    def _is_held_out(self, number: int) -> bool:
        part = Fraction(self.held_out).limit_denominator(1_000_000)
        window = math.floor(number * part)
        first = math.ceil(window / part)
        end = math.ceil((window + 1) / part)
        drawn = int.from_bytes(hashlib.blake2b(str(window).encode(), digest_size=8).digest(), "big") % (
            end - first
        )
        return number == first + drawn

    def _renamed(self, record: DataRecord) -> DataRecord:
        values = record.values
        for column in self.columns.values():
            if column not in values:
                raise UserError(
                    f"{record.where} has no column {column!r} (--columns); its columns are "
                    f"{', '.join(values)}.{did_you_mean(column, values)}"
                )
        taken = {name: values[column] for name, column in self.columns.items()}
        # Who names columns means their layout, though the record may have another that would win.
        layouts = [set(layout) for layout in LAYOUTS if not self.columns.keys().isdisjoint(layout)]
        others = {name for layout in LAYOUTS for name in layout} - set().union(*layouts) if layouts else set()
        rest = {
            name: value for name, value in values.items() if name not in others | set(self.columns.values())
        }
        replaced = (others | self.columns.keys()) & values.keys() - set(self.columns.values())
        return record._replace(
            values={**rest, **taken}, replaced={name: values[name] for name in sorted(replaced)}
        )
