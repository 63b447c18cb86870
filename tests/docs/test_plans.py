"""One of the plans in README and docs is still what ``finetune plan`` prints."""

import pytest

from tests.helpers.doc_blocks import ROOT
from tests.helpers.scripts import load_script


@pytest.mark.slow
def test_a_planned_row_is_still_what_is_planned() -> None:
    script = load_script("plan_tables")
    model = next(row for row in script.LARGE_MODELS if "qwen3-30b-a3b" in row.options)
    plan = script.planned(f"{script.CARD} {model.options}")
    readme, docs = (
        " ".join((ROOT / page).read_text().split()) for page in ("README.md", "docs/benchmarks.md")
    )
    assert model.readme_row(plan) in readme
    assert model.docs_row(plan) in docs
    assert all(f"* {text}" in docs for text in plan["assumptions"])
    for text in (readme, docs):
        assert f"finetune plan {script.CARD}" in text
        assert all(row.title in text for row in script.LARGE_MODELS)


@pytest.mark.slow
def test_the_plan_for_the_papers_server_is_still_what_is_planned() -> None:
    script = load_script("plan_tables")
    plan = script.planned(script.SERVER)
    assert script.server_sentence(plan) in " ".join((ROOT / "README.md").read_text().split())
