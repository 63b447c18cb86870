"""The planned figures in README.md, docs/benchmarks.md and docs/machines.md: ``finetune plan`` for each row.

python scripts/plan_tables.py              prints all tables; takes about four minutes
python scripts/plan_tables.py --write      puts the six machines into docs/machines.md instead
python scripts/plan_tables.py --recipes    puts the recipes there
"""

import contextlib
import io
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(1, str(ROOT))  # not installed: run from a checkout

from cli.main import main as finetune  # noqa: E402
from cli.report.results import RESOURCES  # noqa: E402
from common.files import preset_files  # noqa: E402
from common.units import format_bytes, format_count, format_seconds  # noqa: E402

PAGE = ROOT / "docs" / "machines.md"
BEGIN, END = "<!-- planned: written by scripts/plan_tables.py -->", "<!-- end of planned -->"


def planned(options: str) -> dict[str, Any]:
    """Return the JSON of ``finetune plan`` with these options."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        finetune(["plan", *shlex.split(options), "--json"])
    content: dict[str, Any] = json.loads(out.getvalue())
    return content


def assumptions(plans: list[dict[str, Any]]) -> list[str]:
    """Return what is assumed in some of the plans."""
    return list(dict.fromkeys(text for plan in plans for text in plan["assumptions"]))


# -- models whose blocks are larger than the card, in README.md and docs/benchmarks.md ---------------------------------

CARD = "--gpu 4090 --drive samsung-990-pro-4tb"
_LORA = "--lora-rank 8 --frozen-dtype nf4 --batch-size 16 --seq-len 2048"


@dataclass(frozen=True)
class LargeModel:
    """A model to train on one card."""

    title: str
    options: str  # Options of ``finetune plan`` in addition to :data:`CARD`

    def readme_row(self, plan: dict[str, Any]) -> str:
        """Return the row of README.md."""
        words = self.options.split()
        host = words[words.index("--host-memory") + 1].replace("GiB", " GiB")
        return f"| {self.title} | {host} | {format_count(plan['tokens_per_second'])} tokens/s |"

    def docs_row(self, plan: dict[str, Any]) -> str:
        """Return the row of docs/benchmarks.md."""
        return (
            f"| {self.title} | `{self.options}` | {format_count(plan['parameters'])} "
            f"| {plan['micro_batches']} x {plan['micro_batch']} | {format_seconds(plan['step_seconds'])} "
            f"| {format_count(plan['tokens_per_second'])} | {plan['bound'].replace('_', ' ')} "
            f"| {format_bytes(plan['device_peak_bytes'])} | {format_bytes(plan['host_peak_bytes'])} "
            f"| {format_bytes(plan['ssd_bytes'])} |"
        )


LARGE_MODELS = (
    LargeModel("DeepSeek-V3, LoRA, nf4", f"--ssds 4 --host-memory 128GiB --model deepseek-v3 {_LORA}"),
    LargeModel("Qwen3-235B-A22B, LoRA, nf4", f"--ssds 4 --host-memory 64GiB --model qwen3-235b-a22b {_LORA}"),
    LargeModel("gpt-oss-120b, LoRA, nf4", f"--ssds 4 --host-memory 64GiB --model gpt-oss-120b {_LORA}"),
    LargeModel("Qwen3-30B-A3B, all weights",
               "--ssds 4 --host-memory 64GiB --model qwen3-30b-a3b --batch-size 64 --seq-len 2048"),
    LargeModel("GPT-3 805B, LoRA, nf4", f"--ssds 4 --host-memory 128GiB --model gpt3-805b {_LORA}"),
    LargeModel("Llama-3-8B, all weights, one row of 128 K tokens",
               "--ssds 4 --host-memory 128GiB --model llama-3-8b --batch-size 1 --seq-len 131072"),
    LargeModel("Llama-3-8B, all weights, one row of 512 K tokens",
               "--ssds 4 --host-memory 128GiB --model llama-3-8b --batch-size 1 --seq-len 524288"),
    LargeModel("Llama-3-8B, all weights, one row of 1 M tokens",
               "--ssds 4 --host-memory 128GiB --model llama-3-8b --batch-size 1 --seq-len 1048576"),
    LargeModel("the same on one H100",
               "--gpu h100 --ssds 4 --host-memory 128GiB --model llama-3-8b --batch-size 1 --seq-len 1048576"),
    LargeModel("Qwen3-30B-A3B, LoRA, nf4, one row of 1 M tokens",
               "--ssds 4 --host-memory 128GiB --model qwen3-30b-a3b --lora-rank 8 --frozen-dtype nf4 --batch-size 1 "
               "--seq-len 1048576"),
)  # fmt: skip


def large_model_tables() -> str:
    """Return both tables of large models."""
    plans = [planned(f"{CARD} {model.options}") for model in LARGE_MODELS]
    pairs = list(zip(LARGE_MODELS, plans, strict=True))
    return "\n".join([
        *(model.readme_row(plan) for model, plan in pairs), "",
        *(model.docs_row(plan) for model, plan in pairs), "",
        *(f"* {text}" for text in assumptions(plans)), "", server_sentence(planned(SERVER)),
    ])  # fmt: skip


# -- the paper's server, in README.md --------------------------------------------------------------------------------

SERVER = (
    "--gpu 4090 --drive intel-p5510-3.84tb --ssds 12 --host-memory 768GiB --model gpt3-175b --batch-size 64"
)


def server_sentence(plan: dict[str, Any]) -> str:
    """Return the sentence of README.md: the default, and the fastest point of its frontier, which ``any`` takes."""
    fastest = plan["frontier"][0]
    faster = plan["step_seconds"] / fastest["step_seconds"]
    days = plan["drive_life_days"] / faster * plan["ssd_written_bytes_per_step"] / fastest["written_bytes"]
    flops = plan["flops_per_second"] / 1e12
    return (
        f"GPT-3 175B, all weights, on the Fuyou paper's server, planned with `{SERVER}`: {flops:.0f} TFLOP/s and "
        f"{plan['drive_life_days']:.0f} days of the drives' warranty; {faster * flops:.0f} TFLOP/s and {days:.0f} days "
        "with `--drive-life any`."
    )


# -- six machines, in docs/machines.md --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """Hardware that people have, and jobs for it."""

    title: str
    hardware: str  # Options that describe it to ``--plan``
    jobs: tuple[str, ...]  # Options of a run each


MACHINES = (
    Machine("Gaming PC, 32 GiB",
            "--gpu rtx-3090 --drive samsung-980-pro-2tb --ssds 1 --host-memory 26GiB",
            ("--model llama-7b --batch-size 32", "--model llama-13b --batch-size 32")),
    Machine("Gaming PC, 64 GiB",
            "--gpu rtx-4090 --drive samsung-990-pro-4tb --ssds 1 --host-memory 56GiB",
            ("--model llama-7b --batch-size 64", "--model llama-30b --batch-size 64")),
    Machine("Workstation, 128 GiB",
            "--gpu rtx-5090 --drive crucial-t705-2tb --ssds 2 --host-memory 112GiB",
            ("--model llama-13b --batch-size 64", "--model llama-65b --batch-size 64")),
    Machine("Workstation, 256 GiB",
            "--gpu rtx-a6000 --drive wd-sn850x-4tb --ssds 2 --host-memory 240GiB",
            ("--model llama-13b --batch-size 64", "--model llama-65b --batch-size 64")),
    Machine("Server of the Fuyou paper, 768 GiB",
            "--gpu rtx-4090 --drive intel-p5510-3.84tb --ssds 12 --host-memory 740GiB",
            ("--model gpt3-13b --batch-size 64", "--model gpt3-175b --batch-size 16")),
    Machine("Cloud node, 512 GiB",
            "--gpu h100-pcie --drive intel-p5510-3.84tb --ssds 4 --host-memory 480GiB",
            ("--model llama-30b --batch-size 128", "--model gpt3-175b --batch-size 128")),
)  # fmt: skip

HEADER = """\
| machine, options of `finetune plan` | run | step | tokens/s | bound by | SSDs | written per day (days of warranty) |
|---|---|---|---|---|---|---|
"""


def machine_row(machine: str, job: str, plan: dict[str, Any]) -> str:
    """Return a row of the table of machines."""
    if not plan["fits"]:
        return f"| {machine} | `{job}` | does not fit: {' '.join(plan['missing'])} | | | | |\n"
    days = plan["drive_life_days"]
    cells = [
        machine, f"`{job}`", format_seconds(plan["step_seconds"]), format_count(plan["tokens_per_second"]),
        RESOURCES[plan["bound"]], format_bytes(plan["ssd_bytes"]),
        format_bytes(plan["ssd_written_bytes_per_day"]) + ("" if days is None else f" ({days:,.0f} days)"),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |\n"


def machine_table() -> str:
    """Return the table of all machines, and what is assumed for some of them."""
    rows, plans = [], []
    for machine in MACHINES:
        label = f"{machine.title}: `{machine.hardware}`"
        for job in machine.jobs:
            plans.append(planned(f"{machine.hardware} {job}"))
            rows.append(machine_row(label, job, plans[-1]))
            label = ""
    assumed = "".join(f"* {text}\n" for text in assumptions(plans))
    return f"{HEADER}{''.join(rows)}\nAssumed for some of them:\n\n{assumed}"


# -- recipes on two cards, in docs/machines.md ------------------------------------------------------------------------

BEGIN_RECIPES, END_RECIPES = "<!-- recipes: written by scripts/plan_tables.py -->", "<!-- end of recipes -->"
CARDS = (
    "--gpu rtx-3060-12gb --host-memory 28GiB --drive samsung-990-pro-4tb --ssds 1",
    "--gpu rtx-4090 --host-memory 56GiB --drive samsung-990-pro-4tb --ssds 1",
)


def recipe_table() -> str:
    """Return the planned tokens per second of each recipe on each card, and the bytes of its store."""
    rows = []
    for name, file in sorted(preset_files("recipes").items()):
        preset = name.rpartition("-")[0].replace("llama-3.1", "llama-3")
        # The experts of the published checkpoints have four bits; the presets have no such weights.
        frozen = " --frozen-dtype nf4" if name.startswith("gpt-oss") else ""
        plans = [planned(f"--config {file} --model {preset}{frozen} {card}") for card in CARDS]
        cells = [f"{format_count(plan['tokens_per_second'])} ({RESOURCES[plan['bound']]})" for plan in plans]
        rows.append(f"| `{name}` | {' | '.join(cells)} | {format_bytes(plans[-1]['ssd_bytes'])} |\n")
    return f"| recipe | `{CARDS[0]}` | `{CARDS[1]}` | store |\n|---|---|---|---|\n{''.join(rows)}"


def replace_between(begin: str, end: str, text: str) -> None:
    """Put a text between two marks of docs/machines.md."""
    before, rest = PAGE.read_text().split(begin)
    PAGE.write_text(f"{before}{begin}\n\n{text}\n{end}{rest.split(end)[1]}")


@click.command()
@click.option("--write", is_flag=True, help="Put the six machines into docs/machines.md.")
@click.option("--recipes", is_flag=True, help="Put the recipes into docs/machines.md.")
def main(write: bool, recipes: bool) -> None:
    """Print the planned figures of the docs, or write those of docs/machines.md."""
    if write:
        replace_between(BEGIN, END, machine_table())
    elif recipes:
        replace_between(BEGIN_RECIPES, END_RECIPES, recipe_table())
    else:
        print(f"{large_model_tables()}\n\n{machine_table()}")


if __name__ == "__main__":
    main()
