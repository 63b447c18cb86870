"""Options in files: read, overridden by the command line, printed again, and refused with a reason."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from cli.main import main
from cli.options.command import Finetune, parse_command_line
from cli.options.config_file import effective_config


def parse(*words: object) -> dict[str, Any]:
    got: dict[str, Any] = {}
    Finetune(lambda name, **options: got.update(options)).main(
        [str(word) for word in words], standalone_mode=False
    )
    got.pop("config")
    return got


def write(text: str) -> Path:
    file = Path("run.toml")
    file.write_text(text)
    return file


def test_a_file_says_what_a_command_line_says() -> None:
    file = write(
        'model = "m"\n[data]\ndata = ["a b.jsonl", "c.txt"]\nbatch_size = 4\n[memory]\nssd = "/mnt/nvme0"\ngpu = "0"\n'
        'host-memory = "1.5GiB"\ndeterministic = true\n[training]\nlr = 2e-5\nwarmup = 0.03\n'
        'optimizer-dtype = "fp32"\n[output]\nresume = "auto"\nno-save = true\n'
    )
    typed = ("--model", "m", "--data", "a b.jsonl", "c.txt", "--batch-size", 4, "--ssd", "/mnt/nvme0", "--gpu", 0,
             "--host-memory", "1.5GiB", "--deterministic", "--lr", "2e-5", "--warmup", "0.03", "--resume",
             "auto", "--no-save")  # fmt: skip
    assert parse("--config", file) == parse(*typed)
    assert parse("--config", file, "--save") == parse(*typed[:-1])


def test_the_command_line_wins() -> None:
    file = write(
        'model = "m"\nssd = ["a", "b"]\nlr = 1\nepochs = 3\noverwrite = true\ndeterministic = true\nseed = 7\n'
    )
    got = parse("--ssd", "c", "--lr", 2, "--steps", 5, "--resume", "--no-deterministic", "--config", file)
    assert (got["ssd"], got["lr"], got["steps"], got["epochs"]) == (("c",), 2, 5, None)
    assert (got["resume"], got["overwrite"], got["deterministic"], got["seed"]) == (True, False, False, 7)


def test_what_is_written_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--model", 'with "quotes" and \\', "--data", "ä.jsonl", "b", "--warmup", "3%", "--host-memory", "64GiB",
             "--no-save", "--lr", "1e-5", "--levels", "2,4", "--eps", ".5"]  # fmt: skip
    file = write(effective_config(parse_command_line(words)))
    assert parse("--config", file) == parse(*words)
    assert effective_config(parse_command_line(["--config", str(file)])) == file.read_text().replace(
        "lr = 1e-5", "lr = 1e-05"
    )
    assert parse("--config", write(effective_config(parse_command_line([])))) == parse()
    assert "export" not in Path("run.toml").read_text()


def test_a_second_file_is_refused_instead_of_read_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "qwen3-8b-lora", "--config=run.toml"]) == 2
    assert "--config can be given once" in capsys.readouterr().err


def test_paths_that_no_longer_depend_on_the_folder() -> None:
    Path("texts").mkdir()
    words = ["--model", "llama-10m", "--data", "texts", "--output", "out", "--lr", "3"]
    content = tomllib.loads(effective_config(parse_command_line(words), of_run=True))
    here = str(Path.cwd())
    assert (content["model"]["model"], content["data"]["data"]) == ("llama-10m", [f"{here}/texts"])
    assert content["output"]["output"] == f"{here}/out"


def test_a_file_of_one_command_serves_another(capsys: pytest.CaptureFixture[str]) -> None:
    """What the other command has no option for is left out, and so are commands that were flags."""
    words = ["--model", "llama-7b", "--lora-rank", "8"]
    file = write(effective_config(parse_command_line(words)).replace("[other]", "[other]\nplan = false"))
    assert main(["plan", "--config", str(file), "--cluster", "a800-hdr", "--json"]) == 0
    assert '"fits"' in capsys.readouterr().out
    assert parse_command_line(["chat", "--config", str(file)]).params["model"] == "llama-7b"
    file.write_text("plan = true\n")
    assert main(["--config", str(file)]) == 2
    assert "plan is a command: finetune plan." in capsys.readouterr().err


@pytest.mark.parametrize(("text", "message"), [
    ("[training]\nbatch_sise = 1\n", "no option 'batch_sise'. Did you mean 'batch-size'?"),
    ("[trainin]\nlr = 1\n", "no table [trainin]. Did you mean 'training'?"),
    ("lr = 1\n[training]\nlr = 2\n", "'lr' is set twice"),
    ("save = true\nno-save = false\n", "'no-save' is set twice"),
    ("deterministic = 1\n", "deterministic is either true or false, not 1"),
    ("steps = true\n", "steps = true is not a value for --steps"),
    ("steps = [1, 2]\n", "steps takes one value, not a list"),
    ("steps = 0\n", "'--steps': 0 is not in the range x>=1. (It is in run.toml.)"),
    ("host-memory = 'lots'\n", "'lots' is not a size"),
    ("steps = \n", "run.toml: this is not TOML: Invalid value (at line 1, column 9)"),
    ("optimizer-dtype = 'bf16'\n", "optimizer-dtype was removed; fp32 is the only choice now"),
    ("on-nonfinite = 'skip'\n", "on-nonfinite was removed; stop is the only choice now"),
    ("optimizer = 'lion'\n", "'lion' is not one of 'adamw', 'adamw8bit'. (It is in run.toml.)"),
    ("steps = 1\nepochs = 1\nmodel = 'm'\n", "--steps and --epochs exclude each other"),
])  # fmt: skip
def test_mistakes(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(write(text))]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and err.startswith("finetune: error: ")


def test_a_byte_order_mark_is_no_part_of_a_file() -> None:
    assert parse("--config", write("\ufeffsteps = 3\n")) == parse("--steps", 3)
