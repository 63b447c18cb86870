"""Data are prepared on several processors: the file and the counts are those of a single one."""

import itertools
import os
import random
import signal
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from common.activity import Activity
from common.data import DataConfig, open_data
from common.data.examples import class_kind, pair_kind
from common.data.pack import TokenFile
from common.data.selection import Counts, RecordSelection
from common.data.workers import EncodedInOrder
from common.errors import FinetuneError, UserError
from tests.common.data.conftest import (
    MARKED_TEMPLATE,
    PLAIN_TEMPLATE,
    REWRITING_TEMPLATE,
    make_tokenizer,
    write_records,
)
from tests.common.data.templates import tool_conversation

RECORDS = 180
WORDS = [
    "The",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "answers",
    "a",
    "question",
    "Paris",
]
TOOLS = "{{ tools }}" + PLAIN_TEMPLATE.replace(
    "{{ m['content'] }}", "{{ m['content'] }}{{ m['tool_calls'] }}"
)


def _text(rng: random.Random, most: int = 30) -> str:
    extra = rng.choice(["", "", "", "\u0301", "\u4e2d\u6587", "</s>", chr(rng.randint(0x370, 0x3FF))])
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most))) + extra


def _chat(rng: random.Random) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    for _ in range(rng.randint(1, 4)):
        turns += [{"role": "user", "content": _text(rng)}, {"role": "assistant", "content": _text(rng)}]
    if rng.random() < 0.2:
        turns[-1]["weight"] = 0
    turns[0][f"key {rng.randint(0, 40)}"] = 1
    return {"messages": turns, f"column {rng.randint(0, 40)}": "x"}


def _answers(rng: random.Random) -> dict[str, Any]:
    return {"prompt": _text(rng), "chosen": _text(rng, 90), "rejected": _text(rng)}


# Records, the template, and what else the data depend on.
SHAPES: dict[str, tuple[Callable[[random.Random], dict[str, Any]], str, dict[str, Any]]] = {
    "text": (lambda rng: {"text": _text(rng, 90)}, PLAIN_TEMPLATE, {}),
    "chats": (_chat, PLAIN_TEMPLATE, {}),
    "marked": (_chat, MARKED_TEMPLATE, {"truncate": False}),
    "rewritten": (_chat, REWRITING_TEMPLATE, {"packed": False}),
    "every-token": (_chat, PLAIN_TEMPLATE, {"every_token": True}),
    "tools": (lambda rng: tool_conversation({"city": _text(rng, 3)}), TOOLS, {"drop_unseen": True}),
    "completions": (lambda rng: {"prompt": _text(rng), "completion": _text(rng, 80)}, PLAIN_TEMPLATE, {}),
    "instructions": (lambda rng: {"instruction": _text(rng), "output": _text(rng)}, PLAIN_TEMPLATE, {}),
    "pairs": (_answers, PLAIN_TEMPLATE, {"kind": pair_kind()}),
    "classes": (
        lambda rng: {"text": _text(rng, 90), "label": rng.choice("ab")},
        PLAIN_TEMPLATE,
        {"kind": class_kind({"a": 0, "b": 1}), "selection": RecordSelection(held_out=0.1)},
    ),
}  # fmt: skip


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return what sets the number of processes, which take over after 16 records."""
    monkeypatch.setattr("common.data.workers._RECORDS", 8)
    monkeypatch.setattr("common.data.workers._FIRST_BATCHES", 2)
    return lambda count: monkeypatch.setattr("common.data.workers.process_count", lambda files: count)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_file_is_the_same_for_any_number_of_processes(
    shape: str, tmp_path: Path, processes: Callable[[int], None]
) -> None:
    record, template, options = SHAPES[shape]
    rng = random.Random(shape)
    files = [
        write_records(tmp_path / f"{number}.jsonl", [record(rng) for _ in range(RECORDS // 2)])
        for number in range(2)
    ]
    config = replace(DataConfig(tuple(files), 256, 2), **options)
    contents = []
    for count in (1, 2, 3):
        processes(count)
        folder = tmp_path / f"cache{count}"
        open_data(config, make_tokenizer(template), folder).close()
        [path] = folder.glob("*.tokens")
        contents.append(path.read_bytes())
        assert TokenFile(path).header.rows > 5
    assert contents[0] == contents[1] == contents[2]


def test_the_first_fault_in_the_files_is_raised(tmp_path: Path, processes: Callable[[int], None]) -> None:
    rng = random.Random(0)
    records = [_chat(rng) for _ in range(RECORDS)]
    records[70]["messages"][0]["role"] = "nobody"
    records[100] = {"other": "x"}
    file = Path(write_records(tmp_path / "data.jsonl", records))
    file.write_text(file.read_text() + "{")
    lines = file.read_text().split("\n")
    for fault, number in (
        ("role 'nobody'", 71),
        ("has the columns other", 101),
        ("is not JSON", RECORDS + 1),
    ):
        said = []
        for count in (1, 2, 3):
            processes(count)
            with pytest.raises(UserError, match=f"line {number}.* {fault}") as raised:
                open_data(
                    DataConfig((str(file),), 256, 2), make_tokenizer(PLAIN_TEMPLATE), tmp_path / "cache"
                )
            said.append(str(raised.value))
        assert said[0] == said[1] == said[2]
        assert not list((tmp_path / "cache").glob("*.tokens*"))
        lines[number - 1] = lines[0]
        file.write_text("\n".join(lines))


def _processes(records: Iterable[Any]) -> list[int]:
    return [os.getpid() for _ in records]


def test_a_killed_process_is_an_error_and_none_is_left(
    tmp_path: Path, processes: Callable[[int], None]
) -> None:
    file, first = (
        Path(write_records(tmp_path / "a.jsonl", [{"text": str(n)} for n in range(RECORDS)])),
        os.getpid(),
    )

    def encode(records: Any) -> Any:
        for record in records:
            if os.getpid() != first and record.values["text"] == "100":
                os.kill(os.getpid(), signal.SIGKILL)
            yield os.getpid()

    processes(3)
    with (
        pytest.raises(FinetuneError, match="A process that encodes the data was killed"),
        EncodedInOrder(RecordSelection(), [file], encode, Counts(), Counts(), Activity("")) as results,
    ):
        list(results)
    results = EncodedInOrder(RecordSelection(), [file], _processes, Counts(), Counts(), Activity(""))
    with results as processes_of_records:
        children = list(itertools.islice(processes_of_records, 60))  # as if interrupted
    assert len(set(children) - {first}) > 1
    for child in set(children) - {first}:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


def test_the_part_that_is_done_is_that_of_the_files(tmp_path: Path, processes: Callable[[int], None]) -> None:
    """A file is read some 8 KB at a time."""
    records = [{"text": "x" * 10_000} for _ in range(RECORDS)]
    file, doing = Path(write_records(tmp_path / "a.jsonl", records)), Activity("reading")
    for count in (1, 2):
        processes(count)
        with EncodedInOrder(
            RecordSelection(), [file], lambda records: [0 for _ in records], Counts(), Counts(), doing
        ) as results:
            shares = [doing.share() for _ in results]
        expected = [number // 8 * 8 / RECORDS for number in range(RECORDS)]
        assert shares == pytest.approx(expected, abs=3 / RECORDS)
    assert asdict(Counts()) == asdict(Counts().take())
