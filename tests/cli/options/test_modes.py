"""Options that a mode does not read are refused by name, never ignored."""

import pytest

from cli.main import main
from cli.options.command import build_command
from cli.options.modes import ADVICE, REFUSALS
from cli.options.option import Mode

OPTIONS = {option.name: option for option in build_command(lambda **options: 0).options}
BY_NAME = ("--plan", "--model", "llama-7b", "--gpu", "4090", "--drive", "p5510")


@pytest.mark.parametrize("mode", Mode)
def test_what_is_reported_about_options_that_a_mode_does_not_read(mode: Mode) -> None:
    assert "{names}" in REFUSALS[mode]
    for name in ADVICE.get(mode, {}):
        assert mode not in OPTIONS[name].declaration.modes
    asked_by = {"demo", "verify", "check", "profile", "plan"}
    assert mode is Mode.TRAIN or any(mode in OPTIONS[name].declaration.modes for name in asked_by)


def test_every_option_is_for_something() -> None:
    assert [name for name, option in OPTIONS.items() if not option.declaration.modes] == ["version"]


@pytest.mark.parametrize(("words", "message"), [
    ((*BY_NAME, "--ssd", "."), "hardware by name and cannot be combined with --ssd."),
    ((*BY_NAME, "--overwrite", "--lr", "1", "--report", "x"), "cannot be combined with --overwrite and --report."),
    ((*BY_NAME, "--gpus-per-node", "2"), "cannot be combined with --gpus-per-node."),
    (("--plan", "--model", "llama-7b", "--steps", "5", "--report", "x"), "cannot be combined with --report."),
    (("--profile", "--report", "x"), "--profile trains nothing and cannot be combined with --report."),
    (("--profile", "--overwrite", "--sample", "x"), "cannot be combined with --overwrite and --sample."),
    (("--profile", "--nodes", "2", "--ssd", "."), "measures the network and cannot be combined with --ssd."),
    (("--check", "--report", "x", "--overwrite", "--sample", "y"), "combined with --report, --overwrite and --sample."),
    (("--check", "--lr", "1"), "--check trains nothing and cannot be combined with --lr."),
    (("--verify", ".", "--lr", "1"), "--verify trains nothing and cannot be combined with --lr."),
    (("--model", "llama-10m", "--drive", "p5510", "--network", "1Gbit/s"), "Only --plan reads --drive and --network"),
])  # fmt: skip
def test_what_would_do_nothing_is_rejected(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
