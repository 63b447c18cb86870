"""``docs/walks.md`` names files that exist, and in them what is there."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WALKS = (ROOT / "docs" / "walks.md").read_text().split("\n## ")[1:]
STOP = re.compile(r"^\| `(?P<file>[^`|]+\.py)` \| (?P<where>[^|]+) \|", re.MULTILINE)


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.splitlines()[0])
def test_stops_are_few_and_there(walk: str) -> None:
    stops = STOP.findall(walk)
    assert len(stops) == len(re.findall(r"^\|", walk, re.MULTILINE)) - 2, "a row that names no file"
    assert 2 <= len(stops) <= 8
    for file, where in stops:
        source = (ROOT / file).read_text()
        for name in re.findall(r"[\w.]+", where):
            for part in name.split("."):
                assert re.search(rf"\b(def|class) {part}\b|^ *{part}\b[^=\n]* = ", source, re.MULTILINE), (
                    file,
                    name,
                )


def test_no_file_is_a_stop_twice() -> None:
    assert max(Counter(file for walk in WALKS for file, _ in STOP.findall(walk)).values()) == 1


def test_files_next_to_the_tables_are_there() -> None:
    for walk in WALKS:
        for file in re.findall(r"`([\w/]+/\w+\.py)`", walk):
            assert (ROOT / file).exists(), file
