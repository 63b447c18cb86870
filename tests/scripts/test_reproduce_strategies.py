"""What of the papers' tables our planner gives back, pinned, so that a change of its model shows here."""

import pytest

from fcdp.strategy.strategy import PRESETS
from scripts.reproduce_strategies import (
    AMSP_TABLE_IV,
    FRONTIER_TWO_NODES,
    PARO_TABLE_1,
    amsp_plan,
    by_the_text,
    fcdp_memory,
    largest,
    paro_printed,
    paro_table_2,
    paro_table_3,
    topo_memory,
)


def test_paros_table_2_is_the_same_in_every_cell() -> None:
    rows = [line for line in paro_table_2().splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 8
    assert all(row.endswith(" yes  |") for row in rows), rows


def test_figure_5s_claims_hold_and_only_the_entries_named_differ_from_table_3() -> None:
    text = paro_table_3()
    claims = text.split("| claim")[1].split("Where")[0]
    assert claims.count("| yes") == 7
    assert "| no" not in claims
    differing = {
        line.split()[1] for line in text.splitlines() if line.split()[1:2] and line.split()[1] in paro_printed()
        and " x " in line
    }  # fmt: skip
    assert differing == {"zero1", "mics", "paro-igg", "paro-nig"}


def test_the_principles_of_the_text_contradict_the_table_where_we_say_so() -> None:
    for column, exceptions in enumerate(({"III"}, {"III", "ING", "GNG", "GIG"}, {"INI", "IIG"}, {"NNG"})):
        marked = {name for name, marks in PARO_TABLE_1.items() if marks[column] == "y"}
        assert by_the_text(column) ^ marked == exceptions


@pytest.mark.parametrize(("model", "gpus"), [("llama-7b", 8), ("llama-7b", 512), ("llama-13b", 8)])
def test_amsps_choices_that_come_out(model: str, gpus: int) -> None:
    choice = amsp_plan(model, gpus, "communication").choice
    assert choice is not None
    assert choice.name == AMSP_TABLE_IV[model][0]


def test_largest_models_on_two_frontier_nodes() -> None:
    gib = 64 * 2**30
    assert int(largest(PRESETS["zero3"], FRONTIER_TWO_NODES, gib) / 1e9) == 68
    assert round(largest(PRESETS["zero++"], FRONTIER_TWO_NODES, gib) / 1e9) == 55


def test_scopes_of_zero_topos_table_iv_and_memory_of_fcdp() -> None:
    rows = [line for line in topo_memory().splitlines() if line.startswith("| zero")]
    assert len(rows) == 6
    assert all("| yes " in row for row in rows)
    fcdp = next(line for line in fcdp_memory().splitlines() if line.startswith("| FCDP"))
    assert fcdp.split("|")[2:6] == [
        " 1.9                     ",
        " 1.88 ",
        " 60                          ",
        " 60   ",
    ]
