"""What the command says and does about data that do not fit, and about what it exports."""

import json
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from common.data import PackedBatches, open_data
from common.data.pack import ID_MASK
from tests.cli.conftest import Finetune
from tests.helpers.command.messages import check

SMALL = ("--batch-size", "2", "--seq-len", "32", "--gpu", "cpu", "--steps", "1")
LONG = [{"role": "user", "content": "Hello there."}, {"role": "assistant", "content": "Well, hello. " * 20}]
SHORT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """A short conversation, and behind an empty line one whose answer is too long."""
    return write(tmp_path / "chats.jsonl", SHORT, None, LONG)


def write(file: Path, *chats: list[dict[str, Any]] | None) -> Path:
    file.write_text(
        "".join("\n" if chat is None else json.dumps({"messages": chat}) + "\n" for chat in chats)
    )
    return file


def test_long_records_are_cut_or_left_out_and_said(finetune: Finetune, checkpoint: Path, chats: Path) -> None:
    command = ("--model", checkpoint, "--data", chats, *SMALL)
    cut = finetune(*command, "--output", "cut")
    assert cut.status == 0, cut.err
    assert (
        f"\n{'':9}cut: 1 record, " in cut.out
        and f"first {chats}, line 3; longer than a row of 32 tokens" in cut.out
    )
    assert finetune(*command, "--output", "cut", "--truncate", "--overwrite").out.count("cut: 1 record") == 1
    dropped = finetune(*command, "--output", "dropped", "--drop-long", "--eval-data", chats)
    assert dropped.status == 0, dropped.err
    assert dropped.out.count(f"\n{'':9}left out: 1 record, ") == 2, "of the data, and of those held out"
    assert dropped.out.count(f"first {chats}, line 3; longer than a row of 32 tokens (--drop-long") == 2

    again = ("--steps", 2, "--schedule", "constant", "--resume")
    constant = ("--schedule", "constant", "--overwrite", "--drop-long", "--output", "dropped")
    assert finetune(*command, *constant).status == 0
    other = finetune(*command, *again, "--truncate", "--output", "dropped")
    check(other, 2, "began with --drop-long, and now it is --truncate.")
    config = Path("dropped/run/config.toml")
    assert "drop-long = true" in config.read_text()
    resumed = finetune("--config", config, "--steps", 2, "--resume")
    assert resumed.status == 0, resumed.err
    check(finetune("--config", config, "--steps", 2, "--resume", "--truncate"), 2, "began with --drop-long")


def test_options_about_data_are_for_runs_with_data(finetune: Finetune, checkpoint: Path) -> None:
    check(finetune("--model", checkpoint, "--drop-long"), 2, "--drop-long", "without --data")
    check(finetune("--plan", "--model", checkpoint, "--drop-long"), 2, "--drop-long", "without --data")


@pytest.mark.parametrize(("option", "value"), [
    ("lr", "inf"), ("lr", "nan"), ("lr", "-inf"), ("weight-decay", "inf"), ("beta1", "nan"), ("beta2", "nan"),
    ("eps", "nan"), ("max-grad-norm", "inf"), ("lora-alpha", "nan"), ("epochs", "inf"),
])  # fmt: skip
def test_numbers_that_are_none(
    finetune: Finetune, checkpoint: Path, tmp_path: Path, option: str, value: str
) -> None:
    check(finetune("--model", checkpoint, *SMALL, f"--{option}", value), 2, f"--{option}", value)
    (tmp_path / "run.toml").write_text(f"{option} = {value}\n")
    check(
        finetune("--config", tmp_path / "run.toml", "--model", checkpoint, *SMALL),
        2,
        f"--{option}",
        "run.toml",
    )


def test_a_run_that_has_diverged_exports_nothing(finetune: Finetune, checkpoint: Path, data: Path) -> None:
    command = ("--model", checkpoint, "--data", data, *SMALL, "--output", "out")
    assert finetune(*command).status == 0
    outcome = finetune(*command, "--overwrite", "--lr", "1e39")
    check(
        outcome, 1, "Nothing was exported", "holds a NaN or an infinity", "allow_nonfinite=True", "--resume"
    )
    assert sorted(file.name for file in Path("out").iterdir()) == ["losses.jsonl", "run", "store"]


def test_held_out_records_of_weighted_data_sets_are_not_trained_on(
    finetune: Finetune, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def opened(*args: Any) -> PackedBatches:
        batches = open_data(*args)
        texts.append(tokenizer.decode((batches.words(range(batches.rows)) & ID_MASK).flatten().tolist()))
        return batches

    monkeypatch.setattr("cli.job.data.open_data", opened)
    words, names = [], set()
    for letter, count in (("a", 25), ("b", 40), ("c", 7)):
        file = tmp_path / f"{letter}.jsonl"
        file.write_text("".join(f'{{"text": "{letter}{number:03} and so on"}}\n' for number in range(count)))
        names |= {f"{letter}{number:03}" for number in range(min(count, 30))}
        words.append(f"{file}={count}")
    command = ("--model", checkpoint, "--data", *words, *SMALL, "--no-save", "--max-records", 30)
    done = finetune(*command, "--eval-split", "40%")
    assert done.status == 0, done.err
    *trained, held_out = (re.findall(r"[abc]\d{3}", text) for text in texts)
    assert [len(part) for part in trained] == [15, 18, 5] and len(held_out) == 10 + 12 + 2
    assert sorted([*held_out, *(name for part in trained for name in part)]) == sorted(names)

    (tmp_path / "few.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    few = finetune("--model", checkpoint, "--data", tmp_path / "few.jsonl", *SMALL, "--eval-split", "2%")
    check(few, 2, "--eval-split 0.02 of 2 records leaves none to evaluate with")


def test_a_template_with_the_date_writes_the_runs_first_day_for_good(
    finetune: Finetune, own_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another day, and with tokens that have to be made again, the data are the same."""
    (own_checkpoint / "chat_template.jinja").write_text(
        "{{ strftime_now('%d %b %Y') }}{% for m in messages %}\n{{ m['role'] }} {{ m['content'] }}{% endfor %}"
    )
    file = write(tmp_path / "chats.jsonl", SHORT)
    command = ("--model", own_checkpoint, "--data", file, *SMALL, "--schedule", "constant", "--output", "out")

    class Day(date):
        today = classmethod(lambda cls: cls(2024, 7, cls.number))  # type: ignore[assignment]
        number = 26

    monkeypatch.setattr("cli.job.resumed.date", Day)
    assert finetune(*command).status == 0
    Day.number = 27
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "other"))
    resumed = finetune(*command, "--steps", 2, "--resume")
    assert resumed.status == 0, resumed.err
    shown = [finetune(*command, "--show-data", 1, *words).out for words in (("--overwrite",), ("--resume",))]
    assert [("26 Jul 2024" in out, "27 Jul 2024" in out) for out in shown] == [(False, True), (True, False)]


def test_a_folder_named_data_in_the_output_is_the_user_s(
    finetune: Finetune, checkpoint: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there can be no cache, and tokens are kept with the run."""
    (tmp_path / "no-directory").touch()
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "no-directory"))
    notes = {"out/data/notes.tmp": "mine", "out/run/tokens/notes.tmp": "mine, too"}
    for name, text in notes.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    stale = tmp_path / "out/run/tokens/data-0123456789abcdef.tokens.tmp"
    stale.touch()
    done = finetune("--model", checkpoint, "--data", chats, *SMALL, "--output", tmp_path / "out")
    assert done.status == 0, done.err
    assert {name: (tmp_path / name).read_text() for name in notes} == notes
    assert [path.name for path in (tmp_path / "out/data").iterdir()] == ["notes.tmp"]
    assert list((tmp_path / "out/run/tokens").glob("*.tokens")) and not stale.exists()
