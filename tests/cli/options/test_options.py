"""The command line as people, and shells, write it."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

from cli.main import main
from cli.options.all_options import AllOptions
from cli.options.command import COMMANDS, MOST_USED, Finetune, repeat_option
from cli.options.schedule import Warmup
from cli.options.settings import Settings, expand_pattern
from common.errors import UserError
from common.options import option_fields, spelled
from fuyou.config import OPTION_NAMES
from scripts.options_page import options_page

ROOT = Path(__file__).parents[3]


def parse(*words: str) -> dict[str, Any]:
    """The options that a command line sets, by name."""
    got: dict[str, Any] = {}
    Finetune(lambda name, **options: got.update(options)).main(list(words), standalone_mode=False)
    return got


@pytest.mark.parametrize(("typed", "seen"), [
    ("--ssd a b c", "--ssd=a --ssd=b --ssd=c"),
    ("--ssd a --ssd b", "--ssd=a --ssd=b"),
    ("--ssd=a b --gpu 0", "--ssd=a --ssd=b --gpu 0"),
    ("--gpu 4090 --ssd a b --model m", "--gpu 4090 --ssd=a --ssd=b --model m"),
    ("--data x --ssd a b --data y z", "--data=x --ssd=a --ssd=b --data=y --data=z"),
    ("--model m", "--model m"),
    ("--ssd - x", "--ssd=- --ssd=x"),
])  # fmt: skip
def test_words_after_an_option_that_takes_several(typed: str, seen: str) -> None:
    assert repeat_option(typed.split(), {"--ssd", "--data"}) == seen.split()


@pytest.mark.parametrize(("words", "lr"), [
    ([], 1e-5),
    (["--lora-rank", "8"], 2e-4),
    (["--lora-rank", "8", "--objective", "dpo", "--data", "pairs.jsonl"], 1e-5),
    (["--lora-rank", "8", "--lr", "0"], 0.0),
])  # fmt: skip
def test_default_learning_rates(words: list[str], lr: float) -> None:
    assert Settings.of_options(parse("--model", "m", *words), ()).highest_lr == lr


@pytest.mark.parametrize("words", [["--ssd"], ["--ssd", "--gpu", "cpu"], ["--model", "m", "--data"]])
def test_an_option_without_its_word(words: list[str]) -> None:
    with pytest.raises(click.BadOptionUsage, match="requires an argument"):
        parse(*words)


def test_a_quoted_star(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvme1", "nvme0", "other", "odd[1]"):
        (tmp_path / name).mkdir()
    assert expand_pattern("--ssd", f"{tmp_path}/nvme*") == [f"{tmp_path}/nvme0", f"{tmp_path}/nvme1"]
    assert expand_pattern("--ssd", f"{tmp_path}/odd[1]") == [f"{tmp_path}/odd[1]"]
    assert expand_pattern("--ssd", f"{tmp_path}/absent") == [f"{tmp_path}/absent"]
    with pytest.raises(UserError, match="nothing matches"):
        expand_pattern("--ssd", f"{tmp_path}/sda*")
    for number in (0, 2):
        (tmp_path / f"a-0000{number}-of-00003.jsonl").touch()
    with pytest.raises(UserError, match=r"--data: .*a-00001-of-00003 is missing, 1 file of 3 in all"):
        expand_pattern("--data", f"{tmp_path}/*.jsonl")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand_pattern("--ssd", "~/nvme?") == [f"{tmp_path}/nvme0", f"{tmp_path}/nvme1"]


@pytest.mark.parametrize(("words", "message"), [
    (["--modle", "x"], "--model"),
    (["--learning_rate", "1e-4"], "No such option: --learning_rate. Here it is --lr."),
    (["--load-in-4bit"], "--frozen-dtype nf4"),
    (["x"], "There is no command 'x'."),
    (["--steps", "0"], "'--steps'"),
    (["--host-memory", "lots"], "'lots' is not a size"),
    (["--host-memory", "0GiB"], "more than 0 bytes"),
    (["--schedule", "cosin"], "'cosine', 'linear', 'constant'"),
    ([], "--model"),
    (["--model", "m"], "There is nothing to train on: give --data FILE, or --data random"),
    (["--model", "m", "--data", "random", "--epochs", "2"], "--epochs does nothing without --data: add that."),
    (["--model", "m", "--resume", "--overwrite"], "give one of them"),
    (["--model", "m", "--ssd", "/nowhere/nvme*"], "nothing matches this pattern"),
])  # fmt: skip
def test_rejects_with_status_2_and_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("finetune: error: ")
    assert err.count("\n") == 1
    assert message in err


def help_of(*words: str) -> str:
    script = (
        f"import sys; from cli.main import main; main({[*words, '--help']}); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False", "PyTorch takes seconds to import"
    return done.stdout


def test_the_help_of_all_commands_is_short() -> None:
    text = help_of()
    assert text.count("\n") <= 50
    for name in COMMANDS:
        assert f"\n  {name} " in text


def test_the_help_of_train_leads_with_what_most_people_need() -> None:
    text = help_of("train")
    headings = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == [
        "Most used:", "Model:", "Data:", "Memory:", "Cluster:", "Training:", "Objective:", "Adapters:", "Output:",
        "Planning:", "Other:",
    ]  # fmt: skip
    for heading, after in zip(headings, [*headings[1:], "False"], strict=True):
        assert "\n\n  $ " in text.split(f"\n{heading}\n")[1].split(f"\n{after}\n")[0], heading
    shown = re.findall(
        r"^  (--[a-z-]+)", text.split("\nMost used:\n")[1].split("\nModel:\n")[0], re.MULTILINE
    )
    assert shown == [spelled(name) for name in MOST_USED] and len(shown) == 10
    assert "--ssd /mnt/nvme* --model gpt3-175b" in text and "--export" not in text


def test_completion(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for typed, wanted in {
        "--mod": "plain,--model", "--model llama-7": "plain,llama-7b", "--gpu rtx-409": "plain,rtx-4090",
        "--data a.jsonl b": "file,b", "--schedule lin": "plain,linear", "ver": "plain,verify",
        "plan --driv": "plain,--drive", "recipe qwen3-8b-l": "plain,qwen3-8b-lora", "--resume ": "plain,auto",
        "--chat-template chat": "plain,chatml", "--data ": "file,", "--log-to ": "plain,tensorboard",
    }.items():  # fmt: skip
        monkeypatch.setenv("_FINETUNE_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", f"finetune {typed}")
        monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) + typed.endswith(" ")))
        with pytest.raises(SystemExit):
            main([])
        assert wanted in capsys.readouterr().out.splitlines(), typed


def test_every_field_of_a_group_is_an_option_with_a_help() -> None:
    declared = {field.name for field in option_fields(AllOptions)}
    helps = {option.name: option.help for option in Finetune(lambda name: 0).options}
    assert all(helps.values())
    assert declared == helps.keys()
    more = {"command", "verify", "arguments", "context", "changes", "started_at"}
    assert declared == {field.name for field in fields(Settings)} - more - (OPTION_NAMES - declared)


def test_the_page_of_all_options_is_up_to_date() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    assert page == options_page(), "run python scripts/options_page.py > docs/options.md"


def test_the_settings_of_a_command_line(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).touch()
    options = parse("--model", "m", "--data", f"{tmp_path}/*.txt", "--warmup", "3%", "--beta1", "0.8")
    settings = Settings.of_options(options, ("--model", "m"))
    assert settings.data == (f"{tmp_path}/a.txt", f"{tmp_path}/b.txt")
    assert settings.warmup == Warmup(0.03, is_fraction=True) and str(settings.warmup) == "0.03"
    assert settings == Settings(
        model="m", data=settings.data, warmup=settings.warmup, beta1=0.8, arguments=("--model", "m")
    )


def test_options_under_the_names_of_the_engine() -> None:
    settings = Settings(model="m", beta1=0.8, commit_every=3, lr=1.0)
    names = ("lr", "betas", "max_grad_norm", "commit_every", "topology")
    taken = {"lr": 1.0, "betas": (0.8, 0.999), "max_grad_norm": None, "commit_every": 3}
    assert settings.named(names) == taken
    given = settings.named(OPTION_NAMES)
    assert given["commit_every"] == 3
    assert given.keys() >= {"lr", "betas", "eps", "weight_decay", "max_grad_norm", "clip_by", "dtype", "seed"}
    assert given.keys() >= {"micro_batch", "host_memory", "device_memory", "host_cache", "io", "frozen_dtype"}


@pytest.mark.parametrize(("typed", "tokens"), [("96", 96), ("64K", 65_536), ("1m", 1_048_576)])
def test_tokens_of_a_sequence(typed: str, tokens: int) -> None:
    assert parse("--seq-len", typed)["seq_len"] == tokens


@pytest.mark.parametrize("typed", ["1", "0K", "1G", "1.5K"])
def test_what_is_no_number_of_tokens(typed: str) -> None:
    with pytest.raises(click.BadParameter):
        parse("--seq-len", typed)


NAMING_FILES = [
    (name, option.opts[0])
    for name in COMMANDS
    for option in Finetune(lambda *_: None).get_command(None, name).options
    if "DIR" in (option.metavar or "") or "FILE" in (option.metavar or "")
]


@pytest.mark.parametrize(("command", "option"), NAMING_FILES)
def test_an_empty_name_is_not_the_current_directory(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a shell variable that is not set."""
    assert main([command, option, ""]) == 2
    assert f"{option} is empty: is a variable of the shell not set?" in capsys.readouterr().err
