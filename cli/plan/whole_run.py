"""What a whole run comes to: its duration and its writes."""

import math
from pathlib import Path

from cli.options.data_words import data_sets
from cli.options.settings import Settings, expand_pattern
from common.data.files import find_files
from common.units import counted, format_bytes, format_count, format_seconds
from fuyou.planner.forward_pass import forward_seconds
from fuyou.planner.run_plan import RunPlan

BYTES_PER_TOKEN = 4  # Bytes of a data file that make a token, about: English text in JSON


def planned_steps(settings: Settings, tokens_per_step: int) -> tuple[int, str] | None:
    """Return the steps of the run that is planned, and what they were estimated from; None: nothing says it.

    Args:
        settings: of the plan.
        tokens_per_step: of all ranks.

    Raises:
        UserError: a data file is not there.
    """
    if settings.steps is not None:
        return settings.steps, ""
    if not settings.data:
        return None
    words = [word for names, _ in data_sets(settings.data) for word in names]
    files: list[Path] = find_files(tuple(path for word in words for path in expand_pattern("--data", word)))
    tokens = sum(file.stat().st_size for file in files) / BYTES_PER_TOKEN
    steps = max(1, math.ceil(tokens * (settings.epochs or 1) / tokens_per_step))
    return steps, f", estimated: {format_count(tokens)} tokens in {counted(len(files), 'file')} by their size"


def run_rows(result: RunPlan, settings: Settings) -> dict[str, str]:
    """Return lines about the whole run, by their label."""
    rows = {}
    share = result.job.shape.share
    planned = planned_steps(settings, result.job.tokens * share.world_size)
    if planned is not None:
        steps, how = planned
        written = steps * result.written_bytes
        endurance = result.machine.endurance_bytes
        wear = f", {written / endurance:.1%} of the drives' warranted writes" if endurance else ""
        rows["run"] = (
            f"{counted(steps, 'step')} in {format_seconds(steps * result.step_seconds)}{how}; "
            f"{format_bytes(written)} written{wear}"
        )
    if settings.traits.needs_reference:
        seconds = forward_seconds(result)
        passes = "each step's batch" if settings.objective == "kto" else "each batch of the data"
        whole = "" if planned is None else f", at most {format_seconds(planned[0] * seconds)} in all"
        rows["reference"] = f"{passes} passes forward once before the first step, {format_seconds(seconds)} each{whole}"
    return rows
