"""The plans in README and docs are those that scripts/plan_mixtures.py wrote down, and one of them still comes out."""

import json

import pytest

from tests.helpers.doc_blocks import ROOT
from tests.helpers.scripts import load_script

SCRIPT = load_script("plan_mixtures")
PLANS = json.loads(SCRIPT.FIGURES.read_text())


def test_the_tables_have_the_figures_that_were_planned() -> None:
    readme, docs = (ROOT / "README.md").read_text(), (ROOT / "docs/benchmarks.md").read_text()
    assert len(PLANS) == len(SCRIPT.ROWS)
    for text, rows in ((readme, SCRIPT.readme_rows(PLANS)), (docs, SCRIPT.docs_rows(PLANS))):
        assert "\n".join(rows) in text
    for assumption in {one for plan in PLANS for one in plan["assumptions"]}:
        assert f"* {assumption}" in docs
    assert SCRIPT.COMMAND in readme and SCRIPT.COMMAND in docs


def test_a_plan_still_comes_out() -> None:
    number = min(range(len(PLANS)), key=lambda index: PLANS[index]["parameters"])
    planned = SCRIPT.ROWS[number].plan()
    assert planned["tokens_per_second"] == pytest.approx(PLANS[number]["tokens_per_second"], rel=1e-6)
