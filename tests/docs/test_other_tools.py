"""The table of other tools' options: ours exist, theirs too, and the command says the same as the table."""

import dataclasses
import re

import pytest

from cli.options.command import Finetune
from cli.options.config_file import instead_of
from tests.helpers.doc_blocks import ROOT

TABLE = (
    (ROOT / "docs" / "command.md")
    .read_text()
    .partition("## Coming from another tool")[2]
    .partition("\n## ")[0]
)
ROWS = [re.split(r" *\| *", row.strip("| ")) for row in TABLE.splitlines() if row.startswith("| `")]
OURS = {name for option in Finetune(lambda name, **options: 0).options for name in option.opts}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_name_leads_to_an_option_of_its_row(row: list[str]) -> None:
    ours = set(re.findall(r"`(--[a-z-]+)", row[0]))
    theirs = re.findall(r"`(\w+)`", " ".join(row[1:]))
    assert ours and ours <= OURS and theirs
    for name in theirs:
        message = instead_of(name)
        assert message is not None and ours & set(
            re.findall(r"--[a-z-]+", message.partition("Here it is")[2])
        ), name


def test_transformers_and_trl_have_the_names_of_their_column() -> None:
    trl = pytest.importorskip("trl")
    known = {
        field.name
        for arguments in (trl.SFTConfig, trl.ModelConfig, trl.ScriptArguments)
        for field in dataclasses.fields(arguments)
    }
    names = {name for row in ROWS for name in re.findall(r"`(\w+)`", row[1])}
    assert len(names) >= 15 and names <= known, names - known
