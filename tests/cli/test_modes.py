"""Options that a mode does not read are refused by name, never ignored."""

import pytest

from cli.main import main
from cli.options import modes
from cli.options.command import build_command
from cli.options.modes import Mode

OPTIONS = {option.name for option in build_command(lambda **options: 0).params if option.expose_value}
MODES = {name: mode for name, mode in vars(modes).items() if isinstance(mode, Mode)}
BY_NAME = ("--plan", "--model", "llama-7b", "--gpu", "4090", "--drive", "p5510")


@pytest.mark.parametrize("name", MODES)
def test_the_table_speaks_of_options_that_there_are(name: str) -> None:
    mode = MODES[name]
    assert mode.takes <= OPTIONS and mode.instead.keys() <= OPTIONS
    assert not mode.takes & mode.instead.keys()
    assert mode.takes & {"demo", "verify", "check", "profile", "plan"}


def test_every_option_is_for_something() -> None:
    taken = modes.training(OPTIONS).takes | modes.ALWAYS
    for mode in MODES.values():
        taken |= mode.takes
    assert taken == OPTIONS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*BY_NAME, "--ssd", "."), "hardware by name and cannot be combined with --ssd."),
        ((*BY_NAME, "--lr", "1e-3", "--no-save", "--seed", "0"), "cannot be combined with --lr and --no-save."),
        ((*BY_NAME, "--gpus-per-node", "2"), "cannot be combined with --gpus-per-node."),
        (("--plan", "--model", "llama-7b", "--steps", "5"), "cannot be combined with --steps."),
        (("--profile", "--report", "x"), "--profile trains nothing and cannot be combined with --report."),
        (("--profile", "--overwrite", "--sample", "x"), "cannot be combined with --overwrite and --sample."),
        (("--profile", "--nodes", "2", "--ssd", "."), "measures the network and cannot be combined with --ssd."),
        (
            ("--check", "--report", "x", "--overwrite", "--sample", "y"),
            "combined with --report, --overwrite and --sample.",
        ),
        (("--check", "--lr", "1"), "--check trains nothing and cannot be combined with --lr."),
        (("--verify", ".", "--lr", "1"), "--verify trains nothing and cannot be combined with --lr."),
        (
            ("--model", "llama-10m", "--drive", "p5510", "--trainable", "0.1"),
            "Only --plan reads --drive and --trainable",
        ),
    ],
)
def test_what_would_do_nothing_is_refused(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
