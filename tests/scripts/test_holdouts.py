"""Hold-outs: enough of them, split by name alone, and scored as docs/papers.md says."""

import re
from pathlib import Path
from statistics import median

import pytest
from published.holdouts import DATA, holdouts, judges, score

PAGE = Path(__file__).parents[2] / "docs/papers.md"
ROWS = [row for source in DATA["source"] for row in source["rows"]]


def test_there_are_enough_values_of_enough_sources_and_each_says_where_it_is_from() -> None:
    names = [row[0] for row in ROWS]
    assert len(set(names)) == len(names) >= 40
    assert len({source["repository"] for source in DATA["source"]}) >= 8
    for source in DATA["source"]:
        assert source["path"] and re.fullmatch(r"[0-9a-f]{40}", source["commit"])
        assert len({len(row) for row in source["rows"]}) == 1


def test_the_split_depends_on_names_alone() -> None:
    chosen = [row[0] for row in ROWS if judges(row[0])]
    assert 0.4 * len(ROWS) <= len(chosen) <= 0.6 * len(ROWS)
    assert judges("titan H100 8B, 8, compiled")
    assert not judges("titan H100 8B, 8, eager")


@pytest.mark.slow
def test_the_page_has_the_score_of_values_that_judge() -> None:
    kinds = {
        "all that fit": lambda value: True,
        "H100, H200": lambda value: value.hardware.startswith("h100"),
        "A100, A800": lambda value: value.hardware.startswith("a"),
        "RTX 4090, products with fp16 sums": lambda value: value.hardware == "rtx-4090",
        "of these, mixtures (gpt-oss-20b)": lambda value: value.mixture,
    }
    values = [value for value in holdouts() if judges(value.name) and value.fits]
    for kind, belongs in kinds.items():
        chosen = [value for value in values if belongs(value)]
        ratios = [value.planned / value.published for value in chosen]
        middle = median(abs(value.error) for value in chosen)
        row = f"| {kind} | {len(chosen)} | {middle:.0%} | {min(ratios):.2f} to {max(ratios):.2f} |"
        assert row in PAGE.read_text(), row
    assert score(values)["median_error"] <= 0.12
