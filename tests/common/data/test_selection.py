"""Which records are taken: the first ones, all but those held out, under other names."""

import contextlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.data import DataConfig
from common.data.selection import RecordSelection
from common.errors import UserError

of_any = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., list[Path]]:
    """Makes files of this many records, ``{"n": ...}`` each, numbered through."""

    def make(*counts: int) -> list[Path]:
        numbers, paths = itertools.count(), []
        for place, count in enumerate(counts):
            paths.append(tmp_path / f"{place}.jsonl")
            paths[-1].write_text("".join(f'{{"n": {next(numbers)}}}\n' for _ in range(count)))
        return paths

    return make


def taken(selection: RecordSelection, files: list[Path]) -> list[int]:
    return [record.values["n"] for record in selection.read(files)]


def both(files: list[Path], part: float, **options: Any) -> tuple[list[int], list[int]]:
    """What is trained on, and what is held out."""
    rest, held_out = (RecordSelection(held_out=part, takes_held_out=out, **options) for out in (False, True))
    return taken(rest, files), taken(held_out, files)


@of_any
@given(part=st.integers(1, 500).map(lambda thousandths: thousandths / 1000), count=st.integers(0, 700))
def test_a_split_holds_its_share_exactly_and_all_records_once(files: Any, part: float, count: int) -> None:
    paths = files(count)
    selection = RecordSelection(held_out=part, takes_held_out=True)
    held_out = [number for number in range(count) if selection._is_held_out(number)]
    assert abs(len(held_out) - count * part) <= 1
    if 0 < len(held_out) < count:
        rest, out = both(paths, part)
        assert (sorted(rest + out), out) == (list(range(count)), held_out)


@pytest.mark.parametrize(("part", "held_out"), [(0.4, 40), (0.35, 35), (0.02, 2), (0.5, 50), (0.3, 30)])
def test_shares_of_a_hundred(files: Any, part: float, held_out: int) -> None:
    assert len(both(files(100), part)[1]) == held_out


def test_what_is_held_out_of_the_first_records_stays_held_out_when_there_are_more(files: Any) -> None:
    few, many = both(files(50), 0.1)[1], both(files(500), 0.1)[1]
    assert few == [number for number in many if number < 50] and len(few) == 5
    assert [number // 10 for number in many] == list(range(50)), "one of each ten"


@of_any
@given(
    sets=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=4),
    part=st.sampled_from([0.1, 0.25, 0.4, 0.5]),
    limit=st.none() | st.integers(1, 60),
)
def test_data_sets_apart_hold_out_what_they_hold_out_together(
    files: Any, sets: list[list[int]], part: float, limit: int | None
) -> None:
    """Training opens each data set of a mixture, evaluation all at once: no record is in both, none in neither."""
    paths = files(*(count for counts in sets for count in counts))
    sizes = tuple(len(counts) for counts in sets)
    trained, rest = [], list(paths)
    for size in sizes:
        with contextlib.suppress(UserError):  # all of it is held out
            trained += taken(RecordSelection(limit=limit, held_out=part), rest[:size])
        rest = rest[size:]
    held_out = []
    with contextlib.suppress(UserError):  # nothing is
        held_out = taken(RecordSelection({}, limit, part, True, sizes), paths)
    everything = taken(RecordSelection(limit=limit, files_of_sets=sizes), paths)
    assert sorted(trained + held_out) == everything
    assert len(everything) == sum(min(sum(counts), limit or 10**9) for counts in sets)


def test_a_split_of_too_few_records_is_rejected(files: Any) -> None:
    with pytest.raises(
        UserError, match=r"split 0\.02 of 3 records leaves none to evaluate with\. Give another part"
    ):
        both(files(3), 0.02)
    part = next(1 / size for size in range(2, 50) if RecordSelection(held_out=1 / size)._is_held_out(0))
    with pytest.raises(UserError, match="of 1 record leaves none to train on"):
        both(files(1), part)
    assert both(files(0), 0.5) == ([], [])


def test_no_more_than_the_limit(files: Any) -> None:
    paths = files(4, 6)
    assert taken(RecordSelection(limit=3), paths) == [0, 1, 2]
    assert taken(RecordSelection(limit=30), paths) == list(range(10))


def test_columns_by_other_names(tmp_path: Path) -> None:
    selection = RecordSelection({"prompt": "question", "completion": "answer"})
    file = tmp_path / "f.jsonl"
    file.write_text('{"question": "a", "answer": "b", "prompt": "no", "id": 3}\n{"questions": 1}\n')
    records = selection.read([file])
    assert next(records).values == {"prompt": "a", "completion": "b", "id": 3}
    with pytest.raises(
        UserError, match=r"f.jsonl, line 2 has no column 'question' .*Did you mean 'questions'"
    ):
        next(records)


def test_named_columns_decide_the_layout(tmp_path: Path) -> None:
    """Though the record has another one as well, that would win, or parts of one that are still needed."""
    file = tmp_path / "a.jsonl"
    file.write_text(
        '{"q": "Q", "a": "A", "messages": [], "text": "T", "instruction": "I", "input": "N", "chosen": "C"}\n'
    )
    for columns, taken in (
        ({"prompt": "q", "completion": "a"}, {"prompt", "completion", "input", "chosen"}),
        ({"output": "a"}, {"output", "instruction", "input", "chosen", "q"}),
        ({"text": "q"}, {"text", "a", "input", "chosen"}),
        ({"rejected": "q"}, {"rejected", "a", "messages", "text", "instruction", "input", "chosen"}),
    ):
        [record] = RecordSelection(columns).read([file])
        assert set(record.values) == taken


def test_selections_differ_in_what_prepared_data_depend_on() -> None:
    selections = [
        RecordSelection(), RecordSelection({"text": "a"}), RecordSelection(limit=1), RecordSelection(held_out=0.1),
        RecordSelection(held_out=0.1, takes_held_out=True), RecordSelection(files_of_sets=(1, 1)),
    ]  # fmt: skip
    identities = {
        json.dumps(DataConfig(("a.jsonl",), 8, 1, selection=selection).identity) for selection in selections
    }
    assert len(identities) == len(selections)
