"""Claims: beside busy processes a run keeps its share of the processors, and alone it is as fast as ever.

The demo's own job, as before (OpenMP's threads spin for 300,000 rounds, bf16 on every processor) and as it is now (they
do while nobody else needs the processors, ``--dtype auto``), in turns, on two processors that N busy processes share,
which this script starts and ends. What else runs on the machine is measured, too: the load is a column.

    python scripts/bench_contention.py --ssd DIR
    python scripts/bench_contention.py --ssd DIR --busy 0 --rounds 5 --steps 12
    python scripts/bench_contention.py --ssd DIR --hide-bf16                  as on a processor without AMX
    python scripts/bench_contention.py --ssd DIR --also "one thread: OMP_NUM_THREADS=1 --dtype fp32"
    python scripts/bench_contention.py --ssd DIR --demo                       the whole of finetune --demo, as it is
"""

import contextlib
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(1, str(ROOT))  # not installed: run from a checkout


from cli.train.demo import DemoSize, write_checkpoint, write_data  # noqa: E402

WARM_STEPS = 2
"""Left out of every median."""
WAITING_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
DEFAULT_SPINNING = {"GOMP_SPINCOUNT": "300000"}
"""What GNU's library does where nothing is set."""
HIDE_BF16 = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}


@dataclass(frozen=True)
class Way:
    """One way to run the job."""

    name: str
    environment: Mapping[str, str]
    arguments: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Way":
        """Read ``NAME: VARIABLE=VALUE --option value``."""
        name, _, rest = text.partition(":")
        words = shlex.split(rest)
        first = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
        return cls(name.strip(), dict(word.split("=", 1) for word in words[:first]), tuple(words[first:]))


@dataclass(frozen=True)
class Run:
    """What one run took."""

    seconds: float
    """Per step, median."""
    cpu_seconds: float
    """Of all its processes together, user and system."""
    whole_seconds: float
    load: float
    """Of the machine, over the minute that ended with the run."""
    dtype: str


OLD = Way("before", DEFAULT_SPINNING, ("--dtype", "bf16"))
NEW = Way("now", {}, ())


def say(what: str) -> None:
    """Show how far it has come."""
    print(what, file=sys.stderr, flush=True)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep ``count`` processes computing beside us, on our processors."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def command(words: list[str], way: Way, hidden: Mapping[str, str], folder: Path) -> tuple[float, float]:
    """Run ``finetune``; return the seconds it took, and those of its processes' processors.

    Raises:
        SystemExit: it failed; what it said is shown.
    """
    clean = {name: value for name, value in os.environ.items() if name not in WAITING_VARIABLES}
    environment = {**clean, "PYTHONPATH": str(ROOT), **hidden, **way.environment}
    began, before = time.monotonic(), os.times()
    log = folder / "log.txt"
    with log.open("w") as out:
        status = subprocess.run(
            [sys.executable, "-P", "-m", "cli.main", *words], env=environment, stdout=out, stderr=subprocess.STDOUT
        ).returncode
    after = os.times()
    if status:
        sys.exit(f"{way.name}: exit status {status}\n{log.read_text()[-2000:]}")
    used = after.children_user - before.children_user + after.children_system - before.children_system
    return time.monotonic() - began, used


def train(way: Way, job: list[str], hidden: Mapping[str, str], folder: Path) -> Run:
    """Run the job once."""
    report = folder / "report.json"
    output = folder / "tuned"
    words = [*job, *way.arguments, "--output", str(output), "--report", str(report), "--no-save"]
    whole, used = command(words, way, hidden, folder)
    steps = json.loads(report.read_text())["step_seconds"][WARM_STEPS:]
    say(f"{way.name}: {', '.join(f'{step:.2f}' for step in steps)} s; {used:.0f} s of processors, {whole:.0f} s in all")
    dtype = json.loads((output / "run" / "run.json").read_text())["calls"][-1]["computing_in"]
    shutil.rmtree(output)
    return Run(statistics.median(steps), used, whole, os.getloadavg()[0], dtype)


@click.command()
@click.option("--ssd", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path), help="A place.")
@click.option("--busy", "counts", multiple=True, type=int, default=(0, 2), help="Busy processes beside it.")
@click.option("--rounds", default=3, help="Each runs every way once, in turns.")
@click.option("--steps", default=8, help="Of each run; the first two are left out.")
@click.option("--cpus", default=2, help="Processors for all of it; 0: all there are.")
@click.option("--also", multiple=True, help='Another way to run it: "NAME: VARIABLE=VALUE --option value".')
@click.option("--job", help="Options of another job than the demo's: '--model llama-10m --gpu cpu'.")
@click.option("--hide-bf16", is_flag=True, help="Hide the processor's instructions for bf16 from the library.")
@click.option("--demo", is_flag=True, help="Time the whole of finetune --demo instead, as it is now.")
def main(
    ssd: Path, counts: tuple[int, ...], rounds: int, steps: int, cpus: int, also: tuple[str, ...], job: str | None,
    hide_bf16: bool, demo: bool,
) -> None:  # fmt: skip
    """Measure what other processes cost a run, old and new in turns."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started ends with us
    if cpus:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cpus])  # inherited by all that is started here
    hidden = HIDE_BF16 if hide_bf16 else {}
    folder = ssd.resolve() / "bench-contention"
    folder.mkdir(exist_ok=True)
    try:
        size = DemoSize()
        if job is None and not demo:
            write_checkpoint(folder / "checkpoint", size)
            write_data(folder / "data.jsonl")
        words = shlex.split(job or "") or [
            "--model", str(folder / "checkpoint"), "--data", str(folder / "data.jsonl"), "--gpu", "cpu",
            "--host-memory", str(size.host_memory), "--batch-size", str(size.batch_size), "--seq-len",
            str(size.seq_len), "--lr", "1e-3",
        ]  # fmt: skip
        print(f"{len(os.sched_getaffinity(0))} processors; load before it began {os.getloadavg()[0]:.1f}", flush=True)
        for count in counts:
            with busy(count):
                if demo:
                    for _ in range(rounds):
                        whole, used = command(["--demo", "--output", str(folder / "demo")], NEW, hidden, folder)
                        print(f"{count} busy: the demo took {whole:.0f} s, {used:.0f} s of processor time; load "
                              f"{os.getloadavg()[0]:.1f}", flush=True)  # fmt: skip
                    continue
                ways = [OLD, NEW, *map(Way.parse, also)]
                runs: dict[str, list[Run]] = {way.name: [] for way in ways}
                for _ in range(rounds):
                    for way in ways:
                        runs[way.name].append(train(way, [*words, "--steps", str(steps)], hidden, folder))
            if not demo:
                print("\n".join(table(count, runs)), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def table(count: int, runs: Mapping[str, list[Run]]) -> Iterator[str]:
    """Lines of Markdown: a way each, its rounds side by side."""
    yield f"\n| {count} busy beside it | dtype | s per step, by round | median | processor seconds of a run | load |"
    yield "|---|---|---|---|---|---|"
    for name, each in runs.items():
        rounds = ", ".join(f"{run.seconds:.2f}" for run in each)
        median, used = (statistics.median(getattr(run, what) for run in each) for what in ("seconds", "cpu_seconds"))
        loads = f"{min(run.load for run in each):.1f} to {max(run.load for run in each):.1f}"
        yield f"| {name} | {each[0].dtype} | {rounds} | {median:.2f} | {used:.0f} | {loads} |"


if __name__ == "__main__":
    main()
