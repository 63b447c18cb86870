"""Data and adapters for trainers of TRL."""

from typing import Any

import datasets
from peft import LoraConfig


def records(kind: str) -> datasets.Dataset:
    rows: list[dict[str, Any]] = [
        {"prompt": f"{i} plus {i} is", "chosen": f" surely {2 * i}.", "rejected": f" maybe {i * i + 1}, no."}
        for i in range(20)
    ]
    if kind.startswith("sft"):
        rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    if kind == "kto":
        sides = ("chosen", "rejected")
        rows = [
            {"prompt": row["prompt"], "completion": row[sides[i % 2]], "label": i % 2 == 0}
            for i, row in enumerate(rows)
        ]
    return datasets.Dataset.from_list(rows)


def adapters() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
