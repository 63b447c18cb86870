"""Planned figures for six machines, as the table in docs/machines.md: ``finetune --plan`` for each.

python scripts/plan_machines.py            prints the table
python scripts/plan_machines.py --write    puts it into docs/machines.md
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
from common.units import format_bytes, format_count, format_seconds  # noqa: E402

PAGE = ROOT / "docs" / "machines.md"
BEGIN, END = "<!-- planned: written by scripts/plan_machines.py -->", "<!-- end of planned -->"


@dataclass(frozen=True)
class Machine:
    """Hardware that people have, and jobs for it."""

    title: str
    hardware: str
    """Options that describe it to ``--plan``."""
    jobs: tuple[str, ...]
    """Options of a run each."""


MACHINES = (
    Machine("A gaming PC: RTX 3090, 32 GiB, one Samsung 980 PRO 2TB",
            "--gpu rtx-3090 --drive samsung-980-pro-2tb --ssds 1 --host-memory 26GiB",
            ("--model llama-7b --batch-size 32", "--model llama-13b --batch-size 32")),
    Machine("A gaming PC: RTX 4090, 64 GiB, one Samsung 990 PRO 4TB",
            "--gpu rtx-4090 --drive samsung-990-pro-4tb --ssds 1 --host-memory 56GiB",
            ("--model llama-7b --batch-size 64", "--model llama-30b --batch-size 64")),
    Machine("A workstation: RTX 5090, 128 GiB, two Crucial T705 2TB",
            "--gpu rtx-5090 --drive crucial-t705-2tb --ssds 2 --host-memory 112GiB",
            ("--model llama-13b --batch-size 64", "--model llama-65b --batch-size 64")),
    Machine("A workstation: RTX A6000, 256 GiB, two WD_BLACK SN850X 4TB",
            "--gpu rtx-a6000 --drive wd-sn850x-4tb --ssds 2 --host-memory 240GiB",
            ("--model llama-13b --batch-size 64", "--model llama-65b --batch-size 64")),
    Machine("The server of the Fuyou paper: RTX 4090, 768 GiB, twelve Intel P5510 3.84TB",
            "--gpu rtx-4090 --drive intel-p5510-3.84tb --ssds 12 --host-memory 740GiB",
            ("--model gpt3-13b --batch-size 64", "--model gpt3-175b --batch-size 16")),
    Machine("A cloud node: H100 PCIe, 512 GiB, four Intel P5510 3.84TB",
            "--gpu h100-pcie --drive intel-p5510-3.84tb --ssds 4 --host-memory 480GiB",
            ("--model llama-30b --batch-size 128", "--model gpt3-175b --batch-size 128")),
)  # fmt: skip

HEADER = """\
| run | step | tokens/s | bound by | device | host | SSDs | written per day (days the drives are warranted for) |
|---|---|---|---|---|---|---|---|
"""


def planned(machine: Machine, job: str) -> dict[str, Any]:
    """What ``finetune --plan --json`` says."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        finetune(["--plan", *shlex.split(machine.hardware), *shlex.split(job), "--json"])
    content: dict[str, Any] = json.loads(out.getvalue())
    return content


def row(job: str, plan: dict[str, Any]) -> str:
    """A line of the table."""
    if not plan["fits"]:
        return f"| `{job}` | does not fit: {' '.join(plan['missing'])} | | | | | | |\n"
    cells = [
        f"`{job}`", format_seconds(plan["step_seconds"]), format_count(plan["tokens_per_second"]),
        RESOURCES[plan["bound"]],
        format_bytes(plan["device_peak_bytes"]), format_bytes(plan["host_peak_bytes"]),
        format_bytes(plan["ssd_bytes"]),
        f"{format_bytes(plan['ssd_written_bytes_per_day'])}{_life(plan['drive_life_days'])}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |\n"


def tables() -> str:
    """All machines."""
    parts = []
    for machine in MACHINES:
        plans = {job: planned(machine, job) for job in machine.jobs}
        rows = "".join(row(job, plan) for job, plan in plans.items())
        assumed = dict.fromkeys(text for plan in plans.values() for text in plan["assumptions"])
        parts.append(
            f"### {machine.title}\n\n`finetune --plan {machine.hardware} ...`\n\n{HEADER}{rows}\n"
            f"Assumed: {'; '.join(assumed) or 'nothing beyond the presets'}.\n"
        )
    return "\n".join(parts)


def _life(days: float | None) -> str:
    """How long the drives' warranted writes last."""
    return "" if days is None else f" ({days:,.0f} days)"


def put(page: str, text: str) -> str:
    """``page`` with ``text`` between the marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{text}\n{END}{rest.split(END)[1]}"


@click.command()
@click.option("--write", is_flag=True, help="Put the tables into docs/machines.md.")
def main(write: bool) -> None:
    """Print (or write) what is planned for six machines."""
    text = tables()
    if write:
        PAGE.write_text(put(PAGE.read_text(), text))
    else:
        print(text)


if __name__ == "__main__":
    main()
