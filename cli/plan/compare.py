"""``finetune plan --compare``: one table over machines of a file, to choose which to buy."""

import json
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from cli.options.command import parse_command_line
from cli.options.option import naming
from cli.options.settings import Settings
from cli.plan.described import format_days
from cli.plan.out_of_core import DOES_NOT_FIT, Planning, planned_steps
from cli.report.results import RESOURCES
from common.errors import UserError, did_you_mean
from common.files import read_text_file
from common.units import format_count, format_seconds
from fuyou.planner import Plan

WIDTH = 80
_OPTIONS = ("gpu", "drive", "ssds", "host-memory", "device-memory", "nodes", "gpus-per-node", "network")
_NEEDED = ("gpu", "drive")
_PRICE = "price"


@dataclass(frozen=True)
class PlannedMachine:
    """A machine of the file, and its plan."""

    name: str
    price: float | None
    plan: Plan

    def row(self, steps: int) -> tuple[str, ...]:
        """Return the cells of this machine, with the seconds of ``steps`` steps."""
        plan = self.plan
        return (
            self.name,
            format_count(plan.tokens_per_second),
            format_seconds(steps * plan.step_seconds),
            RESOURCES[plan.bound.value],
            "-" if plan.drive_days is None else format_days(plan.drive_days),
            "-" if self.price is None else f"{self.price:,.0f}",
        )


def run_compare(settings: Settings, file: Path) -> int:
    """Plan for every machine of ``file``, print a table, and return the exit status."""
    planned_steps(settings, 1)  # what is mistyped comes out before the simulation
    plannings = []
    for name, price, machine in _machines(settings, file):
        with naming(f"--compare {file}, [{name}]"):
            plannings.append((name, price, Planning(machine)))
    job = plannings[0][2].job()  # the same on all of them
    candidates = [PlannedMachine(name, price, planning.plan(job)) for name, price, planning in plannings]
    fitting = sorted(
        (each for each in candidates if each.plan.fits), key=lambda each: -each.plan.tokens_per_second
    )
    others = [each for each in candidates if not each.plan.fits]
    if settings.json:
        content = [
            {"machine": each.name, "price": each.price, **each.plan.to_json()} for each in fitting + others
        ]
        print(json.dumps({"machines": content}, indent=2))
    else:
        print("\n".join(_table(fitting, others, settings)))
    return 0 if fitting else DOES_NOT_FIT


def _machines(settings: Settings, file: Path) -> Iterator[tuple[str, float | None, Settings]]:
    """Yield each machine's name, its price, and the command line's options with those that describe it."""
    content = _content(file)
    for name, table in content.items():
        where = f"--compare {file}, [{name}]"
        if not isinstance(table, Mapping):
            raise UserError(
                f"--compare {file}: {name} is no table: write [{name}] above the options of a machine."
            )
        unknown = next((key for key in table if key not in (*_OPTIONS, _PRICE)), None)
        if unknown is not None:
            hint = did_you_mean(unknown, (*_OPTIONS, _PRICE)) or f" It has {', '.join((*_OPTIONS, _PRICE))}."
            raise UserError(f"{where}: a machine has no {unknown}.{hint}")
        missing = next((key for key in _NEEDED if key not in table), None)
        if missing is not None:
            raise UserError(f'{where} gives no {missing}: write {missing} = "NAME".')
        price = table.get(_PRICE)
        if price is not None and (
            isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price < 1e12
        ):
            raise UserError(f"{where}: price = {price!r} is not a number above 0.")
        words = [word for key in _OPTIONS if key in table for word in (f"--{key}", str(table[key]))]
        try:
            parsed = parse_command_line(["plan", "--model", "x", *words]).params
            fields = {key.replace("-", "_") for key in _OPTIONS if key in table}
            yield name, price, replace(settings, compare=None, **{field: parsed[field] for field in fields})
        except click.ClickException as error:
            raise UserError(f"{where}: {error.format_message()}") from None
        except UserError as error:
            raise UserError(f"{where}: {error}") from None


def _content(file: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(read_text_file(file.expanduser()))
    except OSError as error:
        raise UserError(f"--compare {file}: cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"--compare {file}: this is not TOML: {error}") from error
    if not content:
        raise UserError(f"--compare {file}: there is no machine in it; examples/machines.toml has the form.")
    return content


def _table(fitting: list[PlannedMachine], others: list[PlannedMachine], settings: Settings) -> Iterator[str]:
    job = (fitting + others)[0].plan.job
    world = job.layout.share.world_size
    what = (
        f"{format_count(job.parameters)} parameters; a step of {job.rows * world:,} x {job.seq_len:,} tokens"
    )
    yield from textwrap.wrap(f"{job.name}: {what}", WIDTH)
    yield ""
    if fitting:
        steps, _ = planned_steps(settings, job.tokens * world) or (1, "")
        length = "step" if steps == 1 else f"{steps:,} steps"
        rows: list[tuple[str, ...]] = [("machine", "tokens/s", length, "bound by", "drive days", "price")]
        rows += [each.row(steps) for each in fitting]
        _, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
        room = WIDTH - sum(widths) - 2 * len(widths)
        longest = min(room, max(len(name) for name, *_ in rows))
        for name, *cells in rows:
            shown = name if len(name) <= room else f"{name[: room - 3]}..."
            yield "  ".join([shown.ljust(longest), *map(str.rjust, cells, widths)])
    for each in others:
        yield from textwrap.wrap(f"{each.name}: does not fit. {' '.join(each.plan.missing)}", WIDTH)
    yield from _worth(fitting)
    yield from _assumed(fitting)


def _worth(fitting: list[PlannedMachine]) -> Iterator[str]:
    rates = {
        each.name: each.plan.tokens_per_second / each.price for each in fitting if each.price is not None
    }
    if len(rates) > 1:
        best = max(rates, key=lambda name: rates[name])
        yield ""
        yield f"most for its price: {best}, {format_count(1000 * rates[best])} tokens/s per 1,000"


def _assumed(fitting: list[PlannedMachine]) -> Iterator[str]:
    assumed: dict[str, list[str]] = {}
    for each in fitting:
        for text in each.plan.assumptions:
            assumed.setdefault(text, []).append(each.name)
    for text, names in assumed.items():
        of = "" if len(names) == len(fitting) else f" ({', '.join(names)})"
        yield from textwrap.wrap(
            f"assumed: {text}{of}", WIDTH, subsequent_indent="  ", break_on_hyphens=False
        )
