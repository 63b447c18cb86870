"""Speed of ``finetune`` with its defaults next to what ``finetune plan`` says: by a profile of this machine, and by the
presets of the GPU and a drive."""

import re
from statistics import median
from typing import Any

import torch

from common.errors import UserError
from common.hardware.presets import gpu_preset
from gpu.journal import ROOT, Check

DRIVE = "samsung-990-pro-4tb"
# The command, on random weights that are made faster than a family's own
START = f"""
import sys
sys.path[1:1] = [{str(ROOT / "scripts")!r}]
import fuyou.model.open_model
from gpu.presets import TiledSource
fuyou.model.open_model.RandomSource = TiledSource
from cli.main import main
sys.exit(main())
"""
_FACTORS = {"": 1.0, "K": 1e3, "M": 1e6}


def run(check: Check) -> None:
    quick = check.settings.quick
    model, batch, length = ("llama-10m", 2, 32) if quick else ("llama-3-8b", 8, 2048)
    root = check.directory("speed")
    words: list[Any] = ["--model", model, "--lora-rank", 16, "--batch-size", batch, "--seq-len", length]
    here: list[Any] = ["--ssd", root, "--gpu", check.settings.device.rpartition(":")[2]]
    if check.settings.host_memory is not None:
        here += ["--host-memory", check.settings.host_memory]
    name = f"{model}, LoRA of rank 16, {batch} x {length} tokens"
    check.note(model=name)
    # First what is worth most
    run_words = [*words, *here, "--steps", 4 if quick else 6, "--no-save", "--output", root / "run"]
    rate = _rate(check.command("run", run_words, part=0.75, start=("-c", START)))
    check.add("rates", name=name, tokens_per_second=rate)
    planned = check.attempt(
        "planned", lambda: _rate(check.command("plan", ["plan", *words, *here], part=0.7))
    )
    check.add("rates", name=name, tokens_per_second=rate, planned=planned, ratio=planned and rate / planned)
    if (preset := _preset(check)) is not None:
        by_name = ["plan", *words, "--gpu", preset, "--drive", DRIVE, "--host-memory", "64GiB"]
        check.attempt("planned_by_preset", lambda: _rate(check.command("preset", by_name)))


def _preset(check: Check) -> str | None:
    """Return the preset of the device, if there is one."""
    try:
        return gpu_preset(torch.cuda.get_device_name(check.settings.device)).name if check.cuda else None
    except UserError:
        return None


def _rate(text: str) -> float:
    """Return the tokens per second of a plan, or the median of a run's steps but the first two."""
    rates = re.findall(r"^step .*?([\d.]+) ?([KM]?) tokens/s", text, re.MULTILINE)
    if not rates:
        raise ValueError(f"no tokens/s in: {text[-300:]}")
    return median(float(number) * _FACTORS[factor] for number, factor in rates[2:] or rates)
