"""The examples for containers and clusters: their options exist, their shell parses, their units are well-formed."""

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cli.options.command import Finetune

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = {
    name
    for option in Finetune(lambda name, **options: 0).options
    for name in (*option.opts, *option.secondary_opts)
}


@pytest.mark.parametrize("name", ["finetune.slurm", "finetune.service", "Dockerfile", "Dockerfile.cuda"])
def test_options_in_examples_are_ours(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    commands = re.findall(r"(?:^|[ /])finetune(?:-cuda)? ((?:--|\\\n).*(?:\\\n.*)*)", text, re.M)
    used = {word for command in commands for word in re.findall(r"(?<=\s)--[a-z][a-z-]+", f" {command}")}
    assert used and used <= NAMES | {"--rm", "--help", "--check"}, used - NAMES


def test_the_slurm_script_parses_and_asks_for_another_turn_only_when_it_is_not_done(tmp_path: Path) -> None:
    script = EXAMPLES / "finetune.slurm"
    subprocess.run(["bash", "-n", script], check=True)
    for name, text in (
        (
            "finetune",
            'echo "finetune $*" >>calls; mkdir -p out/run; [[ ! -e done ]] || echo ended_after >out/run/run.json',
        ),
        ("scontrol", 'echo "scontrol $*" >>calls'),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "OUTPUT": "out",
        "SLURM_JOB_ID": "7",
    }
    for turn in range(2):
        if turn:
            (tmp_path / "done").touch()
        subprocess.run(["bash", script], cwd=tmp_path, env=environment, check=True)
    calls = [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()]
    assert calls == ["finetune", "scontrol", "finetune"]


def test_the_unit_is_one_that_systemd_reads(tmp_path: Path) -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(EXAMPLES / "finetune.service")
    assert unit["Service"]["SuccessExitStatus"] == "143" and "--resume auto" in unit["Service"]["ExecStart"]
    assert unit["Service"]["RestartPreventExitStatus"] == "2"
    assert unit["Unit"]["ConditionPathIsMountPoint"].startswith("/")
    if shutil.which("systemd-analyze"):
        words = ["systemd-analyze", "verify", "--user", EXAMPLES / "finetune.service"]
        told = subprocess.run(words, capture_output=True, text=True)
        assert "Unknown" not in told.stderr, told.stderr


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_container_files_name_files_that_are_here(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    for source in re.findall(r"-c /src/(\S+)", text):
        assert (EXAMPLES.parent / source).exists()
    assert text.count("\nFROM ") == 1 and 'ENTRYPOINT ["finetune"]' in text
    if shutil.which("hadolint"):
        subprocess.run(["hadolint", EXAMPLES / name], check=True)
