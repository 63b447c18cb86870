"""What the machine is, and what it can do at most: what ``finetune check`` and ``finetune profile`` say."""

import subprocess
import sys

from gpu.journal import ROOT, Check


def run(check: Check) -> None:
    words = {"machine": ["--check", "--ssd", check.ssd], "limits": ["--profile", "--output", check.directory("limits")]}
    if check.name == "limits":
        words["limits"] += ["--gpu", check.settings.device.rpartition(":")[2]]
    command = [sys.executable, "-m", "cli.main", *map(str, words[check.name])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=max(10.0, check.left()))
    check.note(text=done.stdout + done.stderr)
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {done.stderr[-300:]}")
