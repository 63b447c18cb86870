"""Plans of models whose blocks are larger than the card, as tables of Markdown: README.md's, and that of the docs.

    python scripts/plan_mixtures.py

Each row is one command, which anyone can repeat; nothing of it has run on a GPU. The figures are also written to
docs/measurements/plans_in_pieces.json, which tests hold against both tables. Takes about three minutes.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from common.units import format_bytes, format_count, format_seconds

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs/measurements/plans_in_pieces.json"
COMMAND = "finetune --plan --gpu 4090 --drive samsung-990-pro-4tb"


@dataclass(frozen=True)
class Planned:
    """One run that is planned."""

    title: str
    how: str
    """What is trained."""
    options: str
    """Options of ``finetune --plan`` beside those of :data:`COMMAND`."""

    @property
    def host_memory(self) -> str:
        words = self.options.split()
        return words[words.index("--host-memory") + 1].replace("GiB", " GiB")

    def plan(self) -> dict[str, Any]:
        """Plan it, as the command does."""
        words = [*COMMAND.split()[1:], *self.options.split(), "--json"]
        run = subprocess.run([sys.executable, "-m", "cli.main", *words], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        if run.returncode:
            raise click.ClickException(f"{self.title} does not fit: {run.stdout}")
        planned: dict[str, Any] = json.loads(run.stdout)
        return planned


_LORA = "--lora-rank 8 --frozen-dtype nf4 --batch-size 16 --seq-len 2048"
ROWS = (
    Planned("DeepSeek-V3", "LoRA, nf4", f"--ssds 4 --host-memory 128GiB --model deepseek-v3 {_LORA}"),
    Planned("Qwen3-235B-A22B", "LoRA, nf4", f"--ssds 4 --host-memory 64GiB --model qwen3-235b-a22b {_LORA}"),
    Planned("gpt-oss-120b", "LoRA, nf4", f"--ssds 4 --host-memory 64GiB --model gpt-oss-120b {_LORA}"),
    Planned(
        "Qwen3-30B-A3B",
        "all weights",
        "--ssds 4 --host-memory 64GiB --model qwen3-30b-a3b --batch-size 64 --seq-len 2048",
    ),
    Planned("GPT-3 805B", "LoRA, nf4", f"--ssds 4 --host-memory 128GiB --model gpt3-805b {_LORA}"),
)


def readme_rows(plans: list[dict[str, Any]]) -> list[str]:
    """Return the rows of README.md's table."""
    return [
        f"| {row.title}, {row.how} | {row.host_memory} | {format_count(plan['tokens_per_second'])} tokens/s |"
        for row, plan in zip(ROWS, plans, strict=True)
    ]


def docs_rows(plans: list[dict[str, Any]]) -> list[str]:
    """Return the rows of the table in docs/benchmarks.md."""
    return [
        f"| {row.title}, {row.how} | `{row.options}` | {format_count(plan['parameters'])} "
        f"| {plan['micro_batches']} x {plan['micro_batch']} | {format_seconds(plan['step_seconds'])} "
        f"| {format_count(plan['tokens_per_second'])} | {plan['bound'].replace('_', ' ')} "
        f"| {format_bytes(plan['device_peak_bytes'])} | {format_bytes(plan['host_peak_bytes'])} "
        f"| {format_bytes(plan['ssd_bytes'])} |"
        for row, plan in zip(ROWS, plans, strict=True)
    ]


@click.command()
@click.option("--only", type=int, multiple=True, help="Numbers of rows, from 1, to be planned anew. Default: all.")
def main(only: tuple[int, ...]) -> None:
    """Plan every row, write the figures down, and print both tables."""
    plans = json.loads(FIGURES.read_text()) if only else [{} for _ in ROWS]
    for number, row in enumerate(ROWS, 1):
        if not only or number in only:
            plans[number - 1] = row.plan()
    FIGURES.write_text(json.dumps(plans, indent=1) + "\n")
    assumptions = dict.fromkeys(text for plan in plans for text in plan["assumptions"])
    print("\n".join([*readme_rows(plans), "", *docs_rows(plans), "", *(f"* {text}" for text in assumptions)]))


if __name__ == "__main__":
    main()
