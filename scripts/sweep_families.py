"""Claim: every family of transformers' causal language models trains exactly, or is refused before it starts.

Builds every family small with random weights, trains it three steps in memory and through the engine on the CPU, and
compares losses and weights:

    python scripts/sweep_families.py --write docs/families.md
    python scripts/sweep_families.py --names llama,gemma4_text --packed
    python scripts/sweep_families.py --part 2/3 --json findings.json

Ends with status 1 if a family is wrong, crashes or hangs.
"""

import datetime
import json
import os
import sys
import textwrap
import time
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).parent))

from families.children import run_forked
from families.trial import EXACT_LOSS, EXACT_WEIGHT, Finding, Mode, try_family

# Before the first product, here and in the processes that are forked: MKL's sums would depend on where in memory a
# matrix begins (seen on AMD), and weights of a loaded checkpoint begin anywhere.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

BAD = ("wrong", "crash", "hang")
ORDER = (*BAD, "refused", "untrainable", "exact")
BY_HAND = "\n## Rows in chunks\n"  # Begins what --write keeps of a page


def names_of(names: str | None, part: str | None) -> list[str]:
    """Choose families: those named, or every N-th from the K-th; ``today/3`` takes another third every day."""
    every = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if names:
        unknown = [name for name in names.split(",") if name not in every]
        if unknown:
            raise click.UsageError(f"transformers {transformers.__version__} has no {', '.join(unknown)}.")
        return names.split(",")
    if not part:
        return every
    which, _, count = part.partition("/")
    parts = int(count)
    first = datetime.date.today().toordinal() % parts if which == "today" else int(which) - 1
    if not 0 <= first < parts:
        raise click.UsageError(f"--part {part}: give 1/{parts} to {parts}/{parts}, or today/{parts}.")
    return every[first::parts]


def sweep(names: list[str], mode: Mode, jobs: int, seconds: float) -> list[Finding]:
    """Try every family, and say how each went."""
    findings = {}
    for name, result, failure in run_forked(names, partial(_work, mode=mode), jobs=jobs, seconds=seconds):
        if result is not None:
            finding = Finding(**result)
        else:
            late = f"took more than {seconds:.0f} s"
            finding = Finding(name, "hang" if failure == "hang" else "crash", late if failure == "hang" else failure)
        findings[name] = finding
        if finding.verdict != "exact":
            click.echo(f"{name}: {finding.verdict}: {finding.reason} {finding.tensor}".rstrip(), err=True)
    return [findings[name] for name in names]


def _work(name: str, mode: Mode) -> dict[str, Any]:
    return try_family(name, mode).to_dict()


def table(findings: list[Finding]) -> str:
    """Lay the findings out, the bad ones first."""
    lines = ["| family | verdict | loss differs by | weights differ by | |", "|---|---|---|---|---|"]
    for finding in sorted(findings, key=lambda one: (ORDER.index(one.verdict), one.name)):
        compared = finding.verdict in ("exact", "wrong")
        loss = _figure(finding.loss_difference) if compared else ""
        weight = _figure(finding.weight_difference) if compared else ""
        reason = " ".join(finding.reason.split()).replace("|", "\\|")
        if finding.verdict == "wrong":
            reason += f" ({finding.tensor})"
        lines.append(f"| {finding.name} | {finding.verdict} | {loss} | {weight} | {reason} |")
    return "\n".join(lines)


def _figure(value: float) -> str:
    return f"{value:.0e}" if value else "0"


def summary(findings: list[Finding]) -> str:
    """Count the verdicts."""
    counts = Counter(finding.verdict for finding in findings)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in reversed(ORDER) if counts[verdict])


@click.command(help=__doc__)
@click.option("--names", help="Families, separated by commas; all of them if left out.")
@click.option("--part", metavar="K/N", help="The K-th of N parts; today/N takes them in turn by the date.")
@click.option("--packed", is_flag=True, help="Rows of two documents, against each document alone.")
@click.option("--bf16", is_flag=True, help="Compute in bf16.")
@click.option("--lora", is_flag=True, help="Train adapters.")
@click.option("--micro-batches", type=click.IntRange(1), default=1, show_default=True)
@click.option("--chunk", type=click.IntRange(1), help="Tokens of a row that are computed at once.")
@click.option("--unproven", is_flag=True, help="Without the engine's own proof: shows what that refuses.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Families at a time.")
@click.option("--seconds", default=60.0, show_default=True, help="That a family may take.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the findings here.")
@click.option("--write", type=click.Path(path_type=Path), help="Write a page with all findings here.")
def main(
    names: str | None, part: str | None, packed: bool, bf16: bool, lora: bool, micro_batches: int, chunk: int | None,
    unproven: bool, jobs: int, seconds: float, json_path: Path | None, write: Path | None,
) -> None:  # fmt: skip
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    began = time.monotonic()
    mode = Mode(packed, bf16, lora, micro_batches, chunk, unproven)
    findings = sweep(names_of(names, part), mode, jobs, seconds)
    if json_path is not None:
        json_path.write_text(json.dumps([finding.to_dict() for finding in findings], indent=1), encoding="utf-8")
    if write is not None:
        _, heading, by_hand = write.read_text(encoding="utf-8").partition(BY_HAND) if write.exists() else ("", "", "")
        write.write_text(page(findings, mode) + heading + by_hand, encoding="utf-8")
    click.echo(f"{len(findings)} families, {mode.name}: {summary(findings)} ({time.monotonic() - began:.0f} s)")
    sys.stdout.flush()
    os._exit(any(finding.verdict in BAD for finding in findings))


def page(findings: list[Finding], mode: Mode) -> str:
    """Make the page that goes to the documentation."""
    versions = f"transformers {transformers.__version__} and torch {torch.__version__.partition('+')[0]}"
    words = " ".join(sys.argv[1:]) or "--write docs/families.md"
    lines = [
        "# Families", "",
        *_wrapped(f"Made by `python scripts/sweep_families.py {words}`, with {versions}."), "",
        *_wrapped(
            "Every name of transformers' mapping of causal language models, small and with random weights, trains "
            f"three steps in memory and through the engine ({mode.name}, on the CPU). Of these {len(findings)} "
            f"families: {summary(findings)}."
        ),
    ]  # fmt: skip
    for verdict in reversed(ORDER):
        these = sorted((finding for finding in findings if finding.verdict == verdict), key=lambda one: one.name)
        if these:
            lines += ["", f"## {verdict.capitalize()}", "", *_wrapped(_MEANING[verdict]), ""]
        if verdict == "exact":
            lines += _wrapped(", ".join(finding.name for finding in these) + ".")
        else:
            for case in these:
                sentence = " ".join(case.reason.split()).partition(". ")[0].removesuffix(".")
                lines += _wrapped(f"* **{case.name}**: {sentence}.", "  ")
    return "\n".join(lines) + "\n"


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


_MEANING = {
    "exact": f"Losses are equal to {EXACT_LOSS:.0e} and weights to {EXACT_WEIGHT:.0e}, mostly to the bit.",
    "refused": "The engine stops with this sentence before anything is written.",
    "untrainable": "Transformers' own code does not train it in memory, from token ids alone.",
    "wrong": "Other numbers, without an error. There must be none.",
    "crash": "Another error than a refusal. There must be none.", "hang": "Not done in time. There must be none.",
}  # fmt: skip


if __name__ == "__main__":
    main()
