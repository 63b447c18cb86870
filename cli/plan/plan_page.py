"""``--plan --html``: a planned step and its memory on a page."""

import json
from collections.abc import Sequence
from pathlib import Path

from cli.report.page.html import bars, lanes, page, preformatted, section
from cli.report.results import RESOURCES
from common.files.atomic import replace_file
from common.store.errors import described
from common.units import format_bytes, format_count, format_seconds
from fuyou.planner.run_plan import RunPlan


def write_plan_page(result: RunPlan, lines: Sequence[str], path: Path) -> None:
    """Write the page of a plan.

    Args:
        result: the plan.
        lines: the same for people, as it is printed.
        path: of the file.

    Raises:
        StoreError: the system refused.
    """
    with described("writing", path):
        replace_file(path, plan_page(result, lines))


def plan_page(result: RunPlan, lines: Sequence[str]) -> str:
    """Return the page of a plan; of one that does not fit, what is missing."""
    sections = []
    if result.memory is not None:
        whole = result.step_seconds
        busy = [
            (RESOURCES[resource.value], seconds / whole, f"{format_seconds(seconds)}, {seconds / whole:.0%}")
            for resource, seconds in result.busy.items()
        ]
        sections.append(section("a step", bars([*busy, ("the step", 1.0, format_seconds(whole))])))
        if result.simulation is not None:
            begin, end = result.simulation.step_ends[-2:]
            busy_then = {
                RESOURCES[one.value]: spans
                for one, spans in result.simulation.intervals.items()
                if one.value in RESOURCES
            }
            sections.append(section("when", lanes(busy_then, begin, end)))
        sections.append(section("memory", _memory(result)))
    sections.append(section("the plan in words", preformatted("\n".join(lines)), wide=True))
    subtitle = (
        f"{format_count(result.job.parameters)} parameters on {result.machine.device} with {result.machine.drives}"
    )
    return page(f"plan: {result.job.name}", subtitle, sections, json.dumps(result.to_json()).replace("</", "<\\/"))


def _memory(result: RunPlan) -> str:
    rows = []
    for name, used, there in (
        ("device", result.device_peak_bytes, result.machine.device_bytes),
        ("host", result.host_peak_bytes, result.machine.host_bytes),
        ("SSD", result.ssd_bytes, result.machine.store_bytes),
    ):
        of = "" if there is None else f" of {format_bytes(there)}"
        rows.append((name, used / there if there else 0.0, f"{format_bytes(used)}{of}"))
    return bars(rows)
