"""Claim: training from SSD costs what the larger of computing and the drive costs; what else there is costs more.

Trains the same models on the same tokens with plain PyTorch in memory, this engine, DeepSpeed ZeRO-Infinity, DeepSpeed
with CPU offload and FSDP2 with CPU offload. In every round each contender runs as a fresh process, in turn; medians,
spread and ratios are over the steps of all rounds. Everyone computes on the same threads with the same malloc
settings. DeepSpeed gets a separate environment below --work, made on first use (needs g++ and libaio-dev).

    python scripts/bench_peers.py --ssd DIR --models 125m,350m --rounds 3
    python scripts/bench_peers.py --ssd DIR --models 1.3b --rounds 1
"""

import contextlib
import datetime
import json
import os
import platform
import shlex
import shutil
import signal
import statistics
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
import torch

sys.path.insert(0, str(Path(__file__).parent))

from peers.contender import Task
from peers.contenders import INTERPRETER_BYTES, TUNED_MALLOC, Entry, entries
from peers.deepspeed_environment import DeepSpeedEnvironment, work_option
from peers.drive import DriveRates, measure_drive
from peers.runner import Contender, ContenderFailedError

from common.errors import FinetuneError, UserError
from common.hardware.machine import cpu_count, describe_machine, memory_available_bytes
from common.models.meta_model import build_meta_model
from common.models.presets import load_config
from common.units import format_bytes, parse_bytes

MODELS = {"125m": ("gpt2-125m", 4, 256), "350m": ("gpt2-350m", 4, 256), "1.3b": ("gpt3-1.3b", 1, 128)}
"""Preset, sequences and tokens per sequence."""
SPARE_BYTES = 512 << 20
DISK_BYTES_PER_PARAMETER = 26


@dataclass
class Result:
    """What a contender did with one model."""

    entry: Entry
    seconds: list[float] = field(default_factory=list)  # Of every measured step, all rounds
    losses: list[float] = field(default_factory=list)
    read: list[int] = field(default_factory=list)  # Bytes per step
    written: list[int] = field(default_factory=list)
    peak_bytes: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    startup_s: float = 0.0
    problem: str = ""  # Why it has no figures, or fewer

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Options:
    """What the command line says about every run."""

    ssd: Path
    rounds: int
    warmup: int
    steps: int
    threads: int
    environment: dict[str, str]
    host_memory: int | None
    streamed_memory: int | None
    dtype: str = "bf16"
    deepspeed: dict[str, Any] = field(default_factory=dict)  # Merged into ZeRO-Infinity's settings


class ModelBenchmark:
    """All contenders on one model."""

    def __init__(
        self, name: str, contenders: list[str], options: Options, deepspeed: DeepSpeedEnvironment | None
    ):
        preset, self.rows, self.seq_len = MODELS[name]
        self.options, self.deepspeed = options, deepspeed
        self.model = tomllib.loads(files("configs").joinpath(f"models/{preset}.toml").read_text())
        meta = build_meta_model(load_config(preset)[0])
        sizes = [parameter.numel() for parameter in meta.parameters()]
        self.parameters = sum(sizes)
        every = entries(max(sizes))
        for key, entry in every.items():
            if key.startswith("zero-infinity"):
                every[key] = replace(entry, settings=merged(entry.settings, options.deepspeed))
        self.results = {key: Result(every[key]) for key in every if key in contenders}

    def run(self) -> None:
        """All rounds."""
        for number in range(self.options.rounds):
            for result in self.results.values():
                if not result.problem:
                    say(f"  round {number + 1}: {result.entry.name} ...")
                    self._turn(result)

    def _turn(self, result: Result) -> None:
        options = self.options
        reason = self._too_large(result)
        if reason:
            result.problem = reason
            return
        try:
            settings = self._settings(result.entry)
        except UserError as error:
            result.problem = str(error)
            return
        python, variables = Path(sys.executable), dict(options.environment)
        if result.entry.deepspeed:
            assert self.deepspeed is not None
            python, variables = self.deepspeed.python, {**variables, **self.deepspeed.variables}
        with tempfile.TemporaryDirectory(dir=options.ssd, prefix="bench-peers-") as folder:
            task = Task(
                self.model, self.rows, self.seq_len, options.threads, folder, settings, dtype=options.dtype
            )  # fmt: skip
            try:
                with Contender(python, result.entry.module, task, variables) as contender:
                    for _ in range(options.warmup):
                        contender.step()
                    for _ in range(options.steps):
                        step = contender.step()
                        result.seconds.append(step.seconds)
                        result.losses.append(step.loss)
                        result.read.append(step.read_bytes)
                        result.written.append(step.written_bytes)
                    result.peak_bytes = max(result.peak_bytes, contender.peak_bytes)
                    result.facts, result.startup_s = contender.facts, contender.startup_s
            except ContenderFailedError as error:
                result.problem = str(error)

    def _too_large(self, result: Result) -> str:
        available = memory_available_bytes() - SPARE_BYTES
        entry: Entry | None = result.entry
        while entry is not None:
            need = int(entry.bytes_per_parameter * self.parameters) + INTERPRETER_BYTES
            if need <= available:
                result.entry = entry
                break
            entry = entry.tight
        else:
            return (
                f"skipped: needs about {format_bytes(need)} ({result.entry.bytes_per_parameter} bytes per parameter), "
                f"{format_bytes(available)} are available"
            )
        free = shutil.disk_usage(self.options.ssd).free
        if entry is not None and entry.on_ssd and free < DISK_BYTES_PER_PARAMETER * self.parameters:
            return f"skipped: {format_bytes(free)} free in {self.options.ssd}"
        return ""

    def _settings(self, entry: Entry) -> dict[str, Any]:
        """The contender's settings, with the amount of memory filled in.

        Raises:
            UserError: it is to have as much as another, which has not run.
        """
        memory = entry.settings.get("host_memory")
        if memory == "streamed" and self.options.streamed_memory:
            return {**entry.settings, "host_memory": self.options.streamed_memory}
        if memory != "equal":
            return entry.settings
        if self.options.host_memory:
            return {**entry.settings, "host_memory": self.options.host_memory}
        peaks = [self.results[key].peak_bytes for key in self.results if key.startswith("zero-infinity")]
        streamed = self.results.get("fuyou")
        peaks = [peak for peak in peaks if peak]
        if not peaks or streamed is None or not streamed.facts:
            raise UserError("skipped: ZeRO-Infinity and fuyou did not run before it; give --host-memory")
        return {**entry.settings, "host_memory": min(peaks) - streamed.facts["baseline_bytes"]}

    def table(self, drive: DriveRates) -> list[dict[str, Any]]:
        """One row per contender, in numbers."""
        base = self.results.get("in-memory")
        memory_s = base.median if base and base.seconds else None
        rows: list[dict[str, Any]] = []
        for result in self.results.values():
            row: dict[str, Any] = {
                "contender": result.entry.name,
                "what": result.entry.what,
                "problem": result.problem,
            }
            if result.seconds:
                read, written = statistics.mean(result.read), statistics.mean(result.written)
                on_ssd = result.entry.on_ssd
                compute = memory_s or 0.0
                row |= {
                    "seconds": result.median, "least": min(result.seconds), "most": max(result.seconds),
                    "all_seconds": result.seconds, "losses": result.losses,
                    "ratio": result.median / memory_s if memory_s else None,
                    "peak_bytes": result.peak_bytes, "read_bytes": read, "written_bytes": written,
                    "bound_s": max(compute, drive.seconds_together(read, written) if on_ssd else 0.0),
                    "bound_apart_s": max(compute, drive.seconds_apart(read, written) if on_ssd else 0.0),
                    "startup_s": result.startup_s, "facts": result.facts,
                }  # fmt: skip
            rows.append(row | {"settings": result.entry.settings, "steps": len(result.seconds)})
        return rows


def print_table(title: str, rows: list[dict[str, Any]], parameters: int) -> None:
    """The table of one model, aligned, with what was left out below it."""
    print(f"\n{title}")
    print(f"{'contender':24} {'s/step':>8} {'spread':>15} {'/memory':>8} {'PSS':>9} {'read':>8} {'written':>8}"
          f" {'B/par':>11} {'bound':>7} {'/bound':>7} {'r+w':>7} {'/r+w':>6}")  # fmt: skip
    for row in rows:
        if not row["steps"]:
            continue
        ratio = f"{row['ratio']:.2f}x" if row["ratio"] else "-"
        per = f"{row['read_bytes'] / parameters:.1f}+{row['written_bytes'] / parameters:.1f}"
        bounds = "".join(
            f" {row[key]:>7.2f} {row['seconds'] / row[key]:>{width}.2f}"
            if row[key]
            else f" {'-':>7} {'-':>{width}}"
            for key, width in (("bound_s", 7), ("bound_apart_s", 6))
        )
        print(f"{row['contender']:24} {row['seconds']:>8.2f} {row['least']:>7.2f}-{row['most']:<7.2f} {ratio:>8}"
              f" {row['peak_bytes'] / 2**30:>5.2f}GiB {row['read_bytes'] / 1e9:>6.2f}GB"
              f" {row['written_bytes'] / 1e9:>6.2f}GB"
              f" {per:>11}{bounds}")  # fmt: skip
    for row in rows:
        if row["problem"]:
            print(f"  {row['contender']}: {row['problem']}")


def merged(settings: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """``settings`` with what ``overrides`` says differently, sections one level down merged too."""
    return settings | {
        key: settings.get(key, {}) | value if isinstance(value, dict) else value
        for key, value in overrides.items()
    }


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def versions(deepspeed: DeepSpeedEnvironment | None) -> dict[str, str]:
    """Of everything that matters."""
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    versions["python"] = platform.python_version()
    if deepspeed:
        versions["deepspeed"] = deepspeed.version
    return versions


@contextlib.contextmanager
def told_how_it_ends(script: str) -> Iterator[None]:
    """An error is one line. SIGTERM and SIGHUP clean up as Ctrl-C does."""

    def interrupt(number: int, _: object) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except FinetuneError as error:
        say(f"{script}: {error.as_written}")
        sys.exit(1)
    except KeyboardInterrupt:
        say(f"{script}: interrupted; all files are removed.")
        sys.exit(130)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@click.command(help=__doc__)
@click.option(
    "--ssd",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory on the drive to measure.",
)
@work_option
@click.option("--models", default="125m,350m", show_default=True, help=f"Of {', '.join(MODELS)}.")
@click.option("--contenders", default=",".join(entries(1)), show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--warmup", type=click.IntRange(min=0), default=2, show_default=True)
@click.option(
    "--steps", type=click.IntRange(min=1), default=3, show_default=True, help="Measured steps per round."
)
@click.option("--threads", type=click.IntRange(min=1), default=cpu_count(), show_default=True)
@click.option(
    "--malloc",
    type=click.Choice(["tuned", "default"]),
    default="tuned",
    show_default=True,
    help="Whether malloc keeps what is freed, for all contenders.",
)
@click.option(
    "--dtype", type=click.Choice(["bf16", "fp32"]), default="bf16", show_default=True,
    help="Of computation; CPUs without bf16 units are slow in bf16.",
)  # fmt: skip
@click.option("--host-memory", help="Of fuyou-cached; without it, as much as ZeRO-Infinity took.")
@click.option("--streamed-memory", help="Of fuyou; without it, the least that overlaps everything.")
@click.option(
    "--deepspeed",
    "overrides",
    default="{}",
    metavar="JSON",
    help='Merged into ZeRO-Infinity\'s settings, for trying others: \'{"zero": {"sub_group_size": 1e8}}\'.',
)
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures here."
)
def main(
    ssd: Path, work: Path, models: str, contenders: str, rounds: int, warmup: int, steps: int, threads: int,
    malloc: str, dtype: str, host_memory: str | None, streamed_memory: str | None, overrides: str,
    json_path: Path | None,
) -> None:  # fmt: skip
    with told_how_it_ends("bench_peers"):
        chosen, names = contenders.split(","), models.split(",")
        for given, known in ((chosen, list(entries(1))), (names, list(MODELS))):
            for name in given:
                if name not in known:
                    raise UserError(f"There is no {name!r}. There are: {', '.join(known)}.")
        environment = {"OMP_NUM_THREADS": str(threads), **(TUNED_MALLOC if malloc == "tuned" else {})}
        options = Options(
            ssd.resolve(), rounds, warmup, steps, threads, environment,
            parse_bytes(host_memory) if host_memory else None,
            parse_bytes(streamed_memory) if streamed_memory else None,
            dtype, json.loads(overrides),
        )  # fmt: skip
        torch.set_num_threads(1)
        run(names, chosen, options, work.expanduser().resolve(), json_path)


def run(names: list[str], wanted: list[str], options: Options, work: Path, json_path: Path | None) -> None:
    """Everything the command line asks for."""
    needs_deepspeed = any(entries(1)[name].deepspeed for name in wanted)
    deepspeed = DeepSpeedEnvironment(work, say) if needs_deepspeed else None
    facts = {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"), "machine": describe_machine(),
        "load": os.getloadavg()[0], "versions": versions(deepspeed), "environment": options.environment,
    }  # fmt: skip
    for key, value in facts.items():
        print(f"{key}: {value}")
    if deepspeed:
        print(f"DeepSpeed's environment: {deepspeed.folder} (kept)")
    print(f"rounds {options.rounds}, each {options.warmup} warm-up and {options.steps} measured steps, "
          f"{options.threads} compute threads, {options.dtype}, fp32 masters, a checkpoint per block")  # fmt: skip
    tables = {}
    for name in names:
        benchmark = ModelBenchmark(name, wanted, options, deepspeed)
        benchmark.run()
        say(f"{name}: measuring the drive ...")
        drive = measure_drive(options.ssd)
        rows = benchmark.table(drive)
        print_table(
            f"{name}: {benchmark.parameters / 1e6:.0f} M parameters, batch {benchmark.rows} x {benchmark.seq_len}; "
            f"drive through the store: reads {drive.read / 1e9:.2f} GB/s, writes {drive.write / 1e9:.2f} GB/s",
            rows, benchmark.parameters,
        )  # fmt: skip
        for row in rows:
            print(f"  {row['contender']}: {row['what']}; settings {json.dumps(row['settings'])}; "
                  f"{json.dumps(row.get('facts', {}))}")  # fmt: skip
        tables[name] = {"parameters": benchmark.parameters, "drive": asdict(drive), "rows": rows}
        if json_path:
            json_path.write_text(json.dumps({**facts, "options": vars(replace(options)), "models": tables},
                                            default=str, indent=1))  # fmt: skip
    print("\nbound: larger of the in-memory step and the drive's time for the bytes moved, reads and writes together; "
          "r+w: reads and writes one after the other.")  # fmt: skip


if __name__ == "__main__":
    main()
