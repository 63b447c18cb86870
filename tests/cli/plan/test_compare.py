"""``finetune plan --compare``: machines of a file in one table, and why one of them is too small."""

import json
from pathlib import Path

import pytest

from cli.plan.described import format_days
from cli.report.results import RESOURCES
from common.units import format_count, format_seconds
from tests.cli.conftest import Finetune

EXAMPLE = Path(__file__).parents[3] / "examples" / "machines.toml"
MODEL = ("--model", "llama-10m", "--batch-size", 4, "--seq-len", 128)
SMALL = """[good]
gpu = "rtx-4090"
drive = "samsung-990-pro-2tb"
ssds = 2
host-memory = "32GiB"
price = 4000

[tiny]
gpu = "rtx-4090"
drive = "samsung-990-pro-2tb"
host-memory = "64MiB"
"""


def test_the_example(finetune: Finetune) -> None:
    outcome = finetune("plan", "--compare", EXAMPLE, *MODEL)
    assert outcome.status == 0, outcome.err
    lines = outcome.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("llama-10m: ") and lines[0].endswith("a step of 4 x 128 tokens")
    assert lines[2].split() == ["machine", "tokens/s", "step", "bound", "by", "drive", "days", "price"]
    rows = {line.split()[0]: line for line in lines[3:7]}
    assert rows.keys() == {"gaming-pc", "workstation", "two-gaming-pcs", "server"}
    hardware = ("--gpu", "rtx-4090", "--drive", "samsung-990-pro-4tb", "--ssds", 4, "--host-memory", "112GiB")
    alone = json.loads(finetune("plan", *hardware, *MODEL, "--json").out)
    for cell in (
        format_count(alone["tokens_per_second"]), format_seconds(alone["step_seconds"]), RESOURCES[alone["bound"]],
        format_days(alone["drive_life_days"]), "5,000",
    ):  # fmt: skip
        assert f" {cell}" in rows["workstation"]
    planned = json.loads(finetune("plan", "--compare", EXAMPLE, *MODEL, "--json").out)["machines"]
    assert [each["machine"] for each in planned] == list(rows), "the fastest first"
    rates = [each["tokens_per_second"] for each in planned]
    assert rates == sorted(rates, reverse=True)
    best = max(planned, key=lambda each: each["tokens_per_second"] / each["price"])
    rate = format_count(1000 * best["tokens_per_second"] / best["price"])
    assert f"most for its price: {best['machine']}, {rate} tokens/s per 1,000" in lines


def test_a_machine_on_which_it_does_not_fit_is_a_row_that_says_why(finetune: Finetune) -> None:
    Path("machines.toml").write_text(SMALL)
    outcome = finetune("plan", "--compare", "machines.toml", *MODEL, "--steps", 100)
    assert outcome.status == 0
    assert "100 steps" in outcome.out and "\ngood " in outcome.out
    text = " ".join(outcome.out.split())
    assert "tiny: does not fit. " in text and "--host-memory of at least" in text
    Path("machines.toml").write_text(SMALL[SMALL.index("[tiny]") :])
    outcome = finetune("plan", "--compare", "machines.toml", *MODEL)
    assert outcome.status == 1 and "tiny: does not fit. " in outcome.out and "tokens/s" not in outcome.out


@pytest.mark.parametrize(("before", "after", "message"), [
    ('"rtx-4090"', '"rtx-4091"', "[good]: --gpu: 'rtx-4091' is not a GPU preset"),
    ('"samsung-990-pro-2tb"', '"disk"', "[good]: --drive: 'disk' is not a drive preset"),
    ('gpu = "rtx-4090"\n', "", '[good] gives no gpu: write gpu = "NAME".'),
    ("ssds = 2", "ssds = 0", "[good]: Invalid value for '--ssds'"),
    ("ssds", "ssd", "[good]: a machine has no ssd. Did you mean 'ssds'"),
    ("4000", "-1", "[good]: price = -1 is not a number above 0."),
    ("ssds = 2", 'network = "1Gbit/s"', "[good]: --network does nothing without --nodes"),
    ("[good]", "good", "this is not TOML"),
    ("[good]", "good = 1\n[other]", "good is no table"),
    (SMALL, "", "there is no machine in it"),
])  # fmt: skip
def test_mistakes_name_the_machine(finetune: Finetune, before: str, after: str, message: str) -> None:
    Path("machines.toml").write_text(SMALL.replace(before, after, 1))
    outcome = finetune("plan", "--compare", "machines.toml", *MODEL)
    assert outcome.status == 2 and message in outcome.err and outcome.out == ""
    assert len(outcome.err.splitlines()) == 1


@pytest.mark.parametrize(("words", "message"), [
    (("--compare", "none.toml"), "cannot be read"),
    (("--compare", EXAMPLE, "--gpu", "4090"), "--compare and --gpu exclude each other"),
    (("--compare", EXAMPLE, "--nodes", 2), "--compare and --nodes exclude each other"),
])  # fmt: skip
def test_mistakes_on_the_command_line(finetune: Finetune, words: tuple[object, ...], message: str) -> None:
    outcome = finetune("plan", *MODEL, *words)
    assert outcome.status == 2 and message in outcome.err
