"""What a run has logged."""

import json
from pathlib import Path
from typing import Any


def history(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "losses.jsonl").read_text().splitlines()]
