"""Claim: every family of transformers' causal language models trains exactly, or is refused before it starts.

Builds every family small with random weights, trains it three steps in memory and through the engine on the CPU, and
compares losses and weights:

    python scripts/sweep_families.py --write docs/families.md
    python scripts/sweep_families.py --names llama,gemma4_text --packed
    python scripts/sweep_families.py --part 2/3 --json findings.json
    python scripts/sweep_families.py --shapes --write docs/families.md

With --shapes it plans every family at its default shape, and published models at theirs, instead.

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
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).parent))

from families.children import run_forked
from families.shapes import (
    PUBLISHED,
    ROWS,
    TOKENS,
    UNKNOWN,
    ShapePlan,
    plan_shapes,
    published,
    shapes_section,
)
from families.trial import EXACT_LOSS, EXACT_WEIGHT, Finding, Mode, try_family

# Before the first product, here and in the processes that are forked: MKL's sums would depend on where in memory a
# matrix begins (seen on AMD), and weights of a loaded checkpoint begin anywhere.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

BAD = ("wrong", "crash", "hang")
ORDER = (*BAD, "refused", "untrainable", "exact")
BY_HAND = "\n## Rows in chunks\n"  # Begins what --write keeps of a page
AT_SHAPES = "\n## At the shapes that models have\n"  # Begins what --shapes writes, to the page's end


def names_of(names: str | None, part: str | None, more: Iterable[str] = ()) -> list[str]:
    """Choose families: those named, or every N-th from the K-th; ``today/3`` takes another third every day."""
    every = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *more]
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
            finding = Finding(
                name, "hang" if failure == "hang" else "crash", late if failure == "hang" else failure
            )
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
@click.option(
    "--shapes", is_flag=True, help="Plan families and published models at the shapes that they have."
)
@click.option("--unproven", is_flag=True, help="Without the engine's own proof: shows what that refuses.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Families at a time.")
@click.option("--seconds", default=60.0, show_default=True, help="That a family may take.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the findings here.")
@click.option("--write", type=click.Path(path_type=Path), help="Write a page with all findings here.")
def main(
    names: str | None, part: str | None, packed: bool, bf16: bool, lora: bool, micro_batches: int, chunk: int | None,
    shapes: bool, unproven: bool, jobs: int, seconds: float, json_path: Path | None, write: Path | None,
) -> None:  # fmt: skip
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    began = time.monotonic()
    if shapes:
        _plan_all(names_of(names, part, published()), jobs, seconds, json_path, write)
    mode = Mode(packed, bf16, lora, micro_batches, chunk, unproven)
    findings = sweep(names_of(names, part), mode, jobs, seconds)
    if json_path is not None:
        json_path.write_text(
            json.dumps([finding.to_dict() for finding in findings], indent=1), encoding="utf-8"
        )
    if write is not None:
        _, heading, by_hand = (
            write.read_text(encoding="utf-8").partition(BY_HAND) if write.exists() else ("", "", "")
        )
        write.write_text(page(findings, mode) + heading + by_hand, encoding="utf-8")
    click.echo(
        f"{len(findings)} families, {mode.name}: {summary(findings)} ({time.monotonic() - began:.0f} s)"
    )
    sys.stdout.flush()
    os._exit(any(finding.verdict in BAD for finding in findings))


def _plan_all(
    names: list[str], jobs: int, seconds: float, json_path: Path | None, write: Path | None
) -> NoReturn:
    """Plan models at the shapes that they have, and end the process."""
    began, plans = time.monotonic(), list[ShapePlan]()
    for plan in plan_shapes(names, jobs, seconds):
        plans.append(plan)
        if plan.reason:
            click.echo(f"{plan.name}, {plan.way}: {plan.reason}", err=True)
    plans.sort(key=lambda plan: (names.index(plan.name), plan.way))
    if json_path is not None:
        json_path.write_text(json.dumps([plan.to_dict() for plan in plans], indent=1), encoding="utf-8")
    if write is not None:
        before = write.read_text(encoding="utf-8").partition(AT_SHAPES)[0] if write.exists() else ""
        write.write_text(before + AT_SHAPES + _shapes_text(plans), encoding="utf-8")
    refused = sum(1 for plan in plans if plan.reason)
    taken = time.monotonic() - began
    click.echo(f"{len(plans)} plans: {len(plans) - refused} planned, {refused} refused ({taken:.0f} s)")
    sys.stdout.flush()
    os._exit(any(plan.crashed for plan in plans))


def _shapes_text(plans: list[ShapePlan]) -> str:
    how = (
        "Plans of `python scripts/sweep_families.py --shapes --write docs/families.md`: every family at transformers' "
        f"default configuration, and published models at that of their config.json (numbers: {PUBLISHED.name}), LoRA "
        f"of rank 16 and all weights, {ROWS} rows of {TOKENS:,} tokens in bf16, or in fp32 where the family keeps "
        "parameters so, on a 4090 with 64 GiB of host memory and four 990 PRO of 4 TB. Each plan has 2 GiB of memory."
    )
    unknown = f"Not in transformers, whose code is needed: {', '.join(UNKNOWN)}."
    lines = ["", *_wrapped(how), "", *_wrapped(unknown), ""]
    for line in shapes_section(plans):
        lines += [line] if line.startswith("|") else _wrapped(line, "  ") or [""]
    return "\n".join(lines) + "\n"


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
        these = sorted(
            (finding for finding in findings if finding.verdict == verdict), key=lambda one: one.name
        )
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
