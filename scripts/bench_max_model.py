"""Claim: the largest model that can be trained is limited by the drive's space, not by memory.

Walks up a ladder of GPT models, three steps each (one sequence of 128 tokens), under real memory caps (control groups;
needs root), with this engine and with DeepSpeed ZeRO-Infinity (parameters and optimizer on SSD, built on SSD,
its settings with the least memory), and prints for each cap the largest that trained and what stopped the next.

    python scripts/bench_max_model.py --ssd DIR --caps 2GiB,4GiB,8GiB
    python scripts/bench_max_model.py --ssd DIR --width 1024      # deeper models only, all 1024 wide
"""

import contextlib
import datetime
import json
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parent))

from bench_peers import say, told_how_it_ends, versions
from capped import CappedGroup, make_group, remove_group
from peers.contender import Task
from peers.contenders import zero_infinity
from peers.deepspeed_environment import DeepSpeedEnvironment, work_option
from peers.runner import Contender, ContenderFailedError

from common.errors import UserError
from common.hardware.machine import cpu_count, describe_machine
from common.units import format_bytes, format_count, parse_bytes

SEQ_LEN, STEPS = 128, 3
VOCABULARY, POSITIONS = 50257, 1024
SHAPES = (
    (12, 768), (24, 1024), (24, 1536), (24, 2048), (24, 2560), (32, 2560), (36, 3072), (32, 3584), (32, 4096),
    (40, 5120), (48, 6144),
)  # fmt: skip
"""Layers and width of the ladder: 125 M, 350 M, 760 M, 1.3 B, 2.0 B, 2.7 B, 4.2 B, 5.1 B, 6.6 B, 12.9 B, 22 B."""
DEPTHS = (24, 48, 96, 160, 256, 384, 512, 768)  # Layers of the ladder at one width
SHARES = (0.95, 0.85, 0.7)
"""Parts of the cap beyond its processes' own needs that the engine is given, tried in turn if the kernel kills."""
PARAMETER_BUFFERS = (12, 8, 6, 4)  # ZeRO-Infinity's, tried in turn if the kernel kills
FUYOU, ZERO_INFINITY = 24.2, 18.2
"""Bytes of disk per parameter. ZeRO-Infinity: bf16 and fp32 parameters, two moments, fp32 gradients."""


@dataclass(frozen=True)
class Rung:
    """One size of the ladder."""

    layers: int
    width: int

    @property
    def parameters(self) -> int:
        return (
            self.layers * (12 * self.width**2 + 13 * self.width) + (VOCABULARY + POSITIONS + 2) * self.width
        )

    @property
    def model(self) -> dict[str, Any]:
        return {
            "model_type": "gpt2", "vocab_size": VOCABULARY, "n_positions": POSITIONS, "n_layer": self.layers,
            "n_embd": self.width, "n_head": self.width // 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        }  # fmt: skip


@dataclass
class Try:
    """What became of one size under one cap."""

    rung: Rung
    seconds: list[float] = field(default_factory=list)  # Of its steps
    peak_bytes: int | None = None  # Most memory charged to the group, page cache included
    note: str = ""
    problem: str = ""  # Empty if it trained


@dataclass
class Row:
    """The outcome for one system under one cap."""

    cap: int
    system: str
    largest: Try | None
    stopped: Try | None  # The next size up, or None at the end of the ladder


@dataclass(frozen=True)
class Options:
    """What the command line says about every try."""

    ssd: Path
    threads: int
    time_limit_s: float
    leave_bytes: int


@contextlib.contextmanager
def memory_group(cap: int) -> Iterator[CappedGroup]:
    """A control group with ``cap`` bytes of memory and no swap."""
    group = make_group(cap)
    try:
        yield group
    finally:
        remove_group(group)


class System:
    """One of the two, as the ladder sees it."""

    name = ""

    def __init__(self, options: Options):
        self.options = options

    def attempt(self, rung: Rung, cap: int) -> Try:
        """Three steps of one size under one cap."""
        raise NotImplementedError

    def _run(
        self,
        rung: Rung,
        cap: int,
        python: Path,
        module: str,
        settings: dict[str, Any],
        variables: dict[str, str],
    ) -> Try:
        result = Try(rung)
        with (
            memory_group(cap) as group,
            tempfile.TemporaryDirectory(dir=self.options.ssd, prefix="bench-max-") as folder,
        ):
            task = Task(rung.model, 1, SEQ_LEN, self.options.threads, folder, settings)
            enter = f'echo $$ > {shlex.quote(str(group.path / "cgroup.procs"))} && exec "$@"'
            deadline = time.monotonic() + self.options.time_limit_s
            try:
                with Contender(
                    python, module, task, {"OMP_NUM_THREADS": str(self.options.threads), **variables},
                    prefix=["sh", "-c", enter, "sh"], timeout_s=self.options.time_limit_s, watch=False,
                ) as contender:  # fmt: skip
                    for _ in range(STEPS):
                        contender.limit_to(deadline)
                        result.seconds.append(contender.step().seconds)
            except ContenderFailedError as error:
                kills = group.out_of_memory_kills()
                result.problem = f"killed by the cap ({kills} processes)" if kills else str(error)
            result.peak_bytes = group.memory_peak()
        return result

    def _room(self, bytes_per_parameter: float, rung: Rung) -> bool:
        free = shutil.disk_usage(self.options.ssd).free - self.options.leave_bytes
        return bytes_per_parameter * rung.parameters <= free

    def _no_room(self, bytes_per_parameter: float, rung: Rung) -> Try:
        free = shutil.disk_usage(self.options.ssd).free - self.options.leave_bytes
        need = format_bytes(bytes_per_parameter * rung.parameters)
        return Try(rung, problem=f"disk: needs {need}, {format_bytes(free)} may be used")


class Fuyou(System):
    """This engine: host memory is the cap less what its processes hold before they have a model."""

    name = "fuyou"
    _baseline: int | None = None

    def attempt(self, rung: Rung, cap: int) -> Try:
        if not self._room(FUYOU, rung):
            return self._no_room(FUYOU, rung)
        if self._baseline is None:
            self._baseline = self._measure_baseline()
        result = Try(
            rung, problem=f"the cap is below what two Python processes take, {format_bytes(self._baseline)}"
        )
        for share in SHARES:
            budget = int((cap - self._baseline) * share)
            if budget <= 0:
                break
            result = self._run(rung, cap, Path(sys.executable), "peers.streamed", {"host_memory": budget}, {})
            result.note = f"host memory {format_bytes(budget)}"
            if not result.problem.startswith("killed by the cap"):
                break
        return result

    def _measure_baseline(self) -> int:
        with tempfile.TemporaryDirectory(dir=self.options.ssd, prefix="bench-max-") as folder:
            rung = Rung(2, 256)
            task = Task(rung.model, 1, SEQ_LEN, self.options.threads, folder, {"host_memory": 1 << 30})
            with Contender(Path(sys.executable), "peers.streamed", task, {}, watch=False) as contender:
                baseline: int = contender.facts["baseline_bytes"]
        say(f"fuyou's processes hold {format_bytes(baseline)} before they have a model")
        return baseline


class ZeroInfinity(System):
    """DeepSpeed with parameters and optimizer on SSD."""

    name = "zero-infinity"

    def __init__(self, options: Options, environment: DeepSpeedEnvironment):
        super().__init__(options)
        self._environment = environment

    def attempt(self, rung: Rung, cap: int) -> Try:
        if not self._room(ZERO_INFINITY, rung):
            return self._no_room(ZERO_INFINITY, rung)
        python, variables = self._environment.python, self._environment.variables
        first: Try | None = None
        for buffers in PARAMETER_BUFFERS:
            settings = zero_infinity(VOCABULARY * rung.width, pipeline=False, low_memory=True)
            settings["offload_param"]["buffer_count"] = buffers
            result = self._run(rung, cap, python, "peers.deepspeed_offload", settings, variables)
            result.note = f"{buffers} parameter buffers"
            if not result.problem:
                return result
            first = first or result
            if not result.problem.startswith("killed by the cap"):
                break  # too few buffers to run with: what stopped the most of them is what counts
        assert first is not None
        return first


def climb(ladder: list[Rung], cap: int, attempt: Callable[[Rung, int], Try], known: Try | None) -> Row:
    """Walk up until one fails. ``known`` trained under a smaller cap: the walk continues above it."""
    largest, stopped = known, None
    for rung in ladder:
        if known is not None and rung.parameters <= known.rung.parameters:
            continue
        result = attempt(rung, cap)
        if result.problem:
            stopped = result
            break
        largest = result
    return Row(cap, "", largest, stopped)


def print_table(rows: list[Row]) -> None:
    """Aligned, one line per cap and system."""
    print(f"\n{'cap':>9} {'system':14} {'largest':>8} {'layers x width':>15} {'s/step':>7} {'group peak':>10}  "
          f"{'settings':32} next size stopped by")  # fmt: skip
    for row in rows:
        largest, stopped = row.largest, row.stopped
        figures = f"{'none':>8} {'':>15} {'':>7} {'':>10}  {'':32}"
        if largest is not None:
            peak = format_bytes(largest.peak_bytes) if largest.peak_bytes else "-"
            median = sorted(largest.seconds)[len(largest.seconds) // 2]
            figures = (f"{format_count(largest.rung.parameters):>8} {largest.rung.layers:>7} x {largest.rung.width:<5}"
                       f" {median:>7.2f} {peak:>10}  {largest.note:32}")  # fmt: skip
        why = (
            f"{format_count(stopped.rung.parameters)}: {stopped.problem}" if stopped else "end of the ladder"
        )
        print(f"{format_bytes(row.cap):>9} {row.system:14} {figures} {why}")


@click.command(help=__doc__)
@click.option("--ssd", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@work_option
@click.option("--caps", default="2GiB,4GiB,8GiB", show_default=True)
@click.option("--systems", default="fuyou,zero-infinity", show_default=True)
@click.option(
    "--width", type=click.IntRange(min=64), help="One width, growing depth; without it, GPT-3's shapes."
)
@click.option("--largest", help="Leave out sizes above this number of parameters: 2.1G, say.")
@click.option("--threads", type=click.IntRange(min=1), default=cpu_count(), show_default=True)
@click.option("--time-limit", type=float, default=240.0, show_default=True, help="Seconds for one try.")
@click.option("--leave", default="4GB", show_default=True, help="Space to leave free on the drive.")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures here."
)
def main(
    ssd: Path, work: Path, caps: str, systems: str, width: int | None, largest: str | None, threads: int,
    time_limit: float, leave: str, json_path: Path | None,
) -> None:  # fmt: skip
    with told_how_it_ends("bench_max_model"):
        if width and width % 64:
            raise UserError(f"--width must be a multiple of 64 (heads are 64 wide), not {width}.")
        ladder = [Rung(*shape) for shape in ([(depth, width) for depth in DEPTHS] if width else SHAPES)]
        if largest:
            ladder = [rung for rung in ladder if rung.parameters <= parse_bytes(largest)]
        options = Options(ssd.resolve(), threads, time_limit, parse_bytes(leave))
        limits = sorted(parse_bytes(cap) for cap in caps.split(","))
        run(ladder, limits, systems.split(","), options, work.expanduser().resolve(), json_path)


def run(
    ladder: list[Rung],
    limits: list[int],
    names: list[str],
    options: Options,
    work: Path,
    json_path: Path | None,
) -> None:
    """Climb with each system under each cap, small caps first."""
    known = {Fuyou.name, ZeroInfinity.name}
    if set(names) - known:
        raise UserError(
            f"There is no system {', '.join(set(names) - known)}. There are: {', '.join(sorted(known))}."
        )
    environment = DeepSpeedEnvironment(work, say) if ZeroInfinity.name in names else None
    facts = {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"), "machine": describe_machine(),
        "disk": f"{format_bytes(shutil.disk_usage(options.ssd).free)} free in {options.ssd}",
        "versions": versions(environment),
    }  # fmt: skip
    for key, value in facts.items():
        print(f"{key}: {value}")
    if environment:
        print(f"DeepSpeed's environment: {environment.folder} (kept); its settings: "
              + json.dumps(zero_infinity(VOCABULARY * 1024, pipeline=False, low_memory=True)))  # fmt: skip
    print(f"{STEPS} steps of 1 x {SEQ_LEN} tokens, {options.threads} compute threads, "
          f"{options.time_limit_s:.0f} s per try")  # fmt: skip
    rows: list[Row] = []
    for name in names:
        system: System
        if name == Fuyou.name:
            system = Fuyou(options)
        else:
            assert environment is not None
            system = ZeroInfinity(options, environment)

        def attempt(rung: Rung, cap: int, system: System = system) -> Try:
            say(f"{format_bytes(cap)} {system.name} {format_count(rung.parameters)} ...")
            result = system.attempt(rung, cap)
            say(f"  {result.problem or f'{min(result.seconds):.1f} s per step'} {result.note}")
            return result

        best: Try | None = None
        for cap in limits:
            row = climb(ladder, cap, attempt, best)
            row.system, best = name, row.largest
            rows.append(row)
    rows.sort(key=lambda row: row.cap)
    print_table(rows)
    if json_path:
        json_path.write_text(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
