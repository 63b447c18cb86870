"""What a run has logged."""

import json
from pathlib import Path
from typing import Any


def history(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "losses.jsonl").read_text().splitlines()]


def losses(output: Path) -> list[float]:
    return [line["loss"] for line in history(output)]


def metrics(output: Path) -> dict[str, list[float]]:
    """The metrics of all steps by name."""
    values: dict[str, list[float]] = {}
    for line in map(json.loads, (output / "run/metrics.jsonl").read_text().splitlines()):
        for name, value in line.items() if "lr" in line else ():
            values.setdefault(name, []).append(value)
    return values
