"""Check and measure everything on a machine with one NVIDIA GPU, in one call.

    python scripts/gpu_check.py --ssd DIR --output DIR --device-memory 24GiB --minutes 9

Sections, those first that say whether the numbers are right: ``versions``, ``command`` (``finetune`` on packed chats in
bf16: on the GPU and on the CPU, killed and resumed, in pieces, int8, nf4, FP8, kvikio, memory at its limit),
``exactness`` (the engine against a plain in-memory loop on the GPU), ``speed`` (LoRA of Llama-3-8B, measured and as
``finetune plan`` plans it), ``ranks`` (FCDP, two ranks on the one GPU, over gloo), ``nccl`` (its calls, and FCDP where
there are two GPUs), ``engine:PRESET`` (training speed at several batch sizes, what bounds it, and the GPU's timeline),
``machine`` (``finetune check``), ``limits`` (``finetune profile``). Each runs in a separate process and gets the least
time that it needs and its share of what is left, so that neither a crash nor a slow section costs the others their
figures. Each row is printed as soon as it is there; results.json and results.md in the output directory grow with it.

``--device cpu --quick`` runs everything that needs no GPU on tiny models: it tests this script, and measures nothing.

What to send back is printed at the end: results.md, or the whole output directory if something failed.
"""

import contextlib
import importlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

import click

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # not installed: run from a checkout

from gpu.journal import DATA_PREFIX, ROOT, STORE_BYTES, Check, Journal, Settings, Skip, describe

LEAST_S = {
    "versions": 15.0, "command": 80.0, "exactness": 65.0, "speed": 120.0, "ranks": 30.0, "nccl": 15.0, "engine": 60.0,
    "machine": 40.0, "limits": 30.0,
}  # fmt: skip
"""Least seconds of a section, as far as there is time, in the order in which they run."""
SHARES = {"command": 3.0, "exactness": 3.0, "speed": 2.0, "ranks": 1.0, "engine": 3.0}
"""Shares of the rest of the time. What a section leaves goes to those after it."""
LARGER = {"gpt3-13b": 12.9e9, "gpt3-6.7b": 6.7e9, "gpt3-2.7b": 2.7e9}
"""Larger models by their parameters, the largest first."""
GRACE_S = 20.0  # How long after its time a section is stopped by force
RESERVE_S = 25.0  # Kept back at the end for the last section's grace


@click.command(help=__doc__)
@click.option(
    "--ssd", required=True, type=click.Path(exists=True, file_okay=False), help="On the drive to measure."
)
@click.option(
    "--output", required=True, type=click.Path(file_okay=False), help="For results.json, results.md, traces."
)
@click.option("--device", default="cuda:0", show_default=True)
@click.option(
    "--device-memory", default="24GiB", show_default=True, help="The engine's at most; 'all': what is free."
)
@click.option("--host-memory", help="What the engine may use. [default: four fifths of what is available]")
@click.option(
    "--preset",
    "presets",
    multiple=True,
    help="Repeatable. [default: gpt3-1.3b, and the largest the drive holds]",
)
@click.option(
    "--batch", "batches", multiple=True, type=int, help="Sequences; repeatable. [default: 16, 64, 256]"
)
@click.option("--seq-len", default=1024, show_default=True)
@click.option("--minutes", default=9.0, show_default=True, help="For everything together.")
@click.option("--sections", help="Only these, by comma: names as above; 'engine' means that of every preset.")
@click.option("--quick", is_flag=True, help="Tiny sizes: test the script.")
@click.option("--run-section", hidden=True)
@click.option("--settings", "settings_text", hidden=True)
def main(
    ssd: str, output: str, device: str, device_memory: str, host_memory: str | None, presets: tuple[str, ...],
    batches: tuple[int, ...], seq_len: int, minutes: float, sections: str | None, quick: bool, run_section: str | None,
    settings_text: str | None,
) -> None:  # fmt: skip
    if run_section is not None and settings_text is not None:
        sys.exit(section(run_section, Settings.from_json(settings_text)))
    settings = Settings(
        output=str(Path(output).resolve()), ssd=str(Path(ssd).resolve()), device=device, quick=quick,
        device_memory=None if device_memory == "all" or device == "cpu" else device_memory, host_memory=host_memory,
        presets=presets or usual_presets(Path(ssd)), batches=tuple(sorted(batches or (16, 64, 256))), seq_len=seq_len,
        command="python " + shlex.join(sys.argv),
    )  # fmt: skip
    if quick:
        settings = replace(
            settings, presets=("tiny",), batches=(2,), seq_len=32, host_memory=host_memory or "600MiB"
        )
    Path(output).mkdir(parents=True, exist_ok=True)
    sys.exit(everything(settings, time.time() + 60 * minutes, sections.split(",") if sections else None))


def usual_presets(ssd: Path) -> tuple[str, ...]:
    """Names of the models that are trained: a small one, and the largest that the drive holds."""
    free = shutil.disk_usage(ssd).free - (6 << 30)
    larger = (name for name, parameters in LARGER.items() if STORE_BYTES * parameters < free)
    return ("gpt3-1.3b", *list(larger)[:1])


def planned(settings: Settings, wanted: list[str] | None) -> list[str]:
    """Names of the sections to run, in order."""
    names = []
    for kind in LEAST_S:
        names += [f"engine:{preset}" for preset in settings.presets] if kind == "engine" else [kind]
    if wanted is None:
        return names
    unknown = [name for name in wanted if name not in names and name not in LEAST_S]
    if unknown:
        raise click.UsageError(f"--sections: {', '.join(unknown)} is none of {', '.join(names)}.")
    return [name for name in names if name in wanted or name.partition(":")[0] in wanted]


def everything(settings: Settings, end: float, wanted: list[str] | None) -> int:
    """Run the sections one after the other; the exit status says whether any failed."""
    names = planned(settings, wanted)
    journal = Journal(Path(settings.output))
    # Chosen sections join earlier results
    results = journal.read() if wanted is not None else {"sections": {}}
    for name in names:
        results["sections"].pop(name, None)
    journal.write({**results, "command": settings.command, "date": date.today().isoformat()})
    failed = 0
    for position, name in enumerate(names):
        now = time.time()
        left = end - RESERVE_S - now
        if left < 10:
            journal.update(name, status="skipped", why="out of time")
            continue
        status = supervised(name, settings.until(now + seconds_of(names[position:], left)), end, journal)
        print(f"[{time.time() - now:6.1f} s] {name}: {status}", flush=True)
        failed += status not in ("done", "skipped")
    remove_data(Path(settings.ssd))
    print("\n" + (Path(settings.output) / "results.md").read_text(), flush=True)
    print(
        f"Send back {settings.output}: results.md and results.json, and what was printed above if something failed."
    )
    return 1 if failed else 0


def seconds_of(names: list[str], left: float) -> float:
    """Return the time of the first of these sections, if ``left`` seconds are left for all."""
    kinds = [name.partition(":")[0] for name in names]
    spare = max(0.0, left - sum(LEAST_S[kind] for kind in kinds))
    shares = [SHARES.get(kind, 0.0) for kind in kinds]
    return min(left, LEAST_S[kinds[0]] + spare * shares[0] / (sum(shares) or 1.0))


def supervised(name: str, settings: Settings, end: float, journal: Journal) -> str:
    """Run one section in a separate process, and stop that when its time is over; returns how it ended."""
    print(f"[        ] {name}: {settings.deadline - time.time():.0f} s at most", flush=True)
    journal.update(name, status="running", data={})
    environment = dict(os.environ, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", PYTHONUNBUFFERED="1")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if name in ("exactness", "ranks", "nccl"):
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # has to be there before CUDA starts
        # All ranks are here, and a container's own name may not resolve
        environment.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    began = time.time()
    process = subprocess.Popen(
        [sys.executable, __file__, "--ssd", settings.ssd, "--output", settings.output, "--run-section", name,
         "--settings", settings.to_json()],
        env=environment, process_group=0,
    )  # fmt: skip
    try:
        process.wait(timeout=max(1.0, min(settings.deadline + GRACE_S, end - 3) - time.time()))
        why = f"its process ended with status {process.returncode}" if process.returncode else None
    except subprocess.TimeoutExpired:
        why = "stopped: its time was over"
    finally:
        # Also what the section has started itself: workers, optimizer processes.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    entry = journal.read()["sections"][name]
    if entry["status"] == "running":  # it could not say how it ended
        journal.update(name, status="failed", why=why or "its process ended without a word")
    journal.update(name, seconds=time.time() - began)
    return str(journal.read()["sections"][name]["status"])


def section(name: str, settings: Settings) -> int:
    """Run one section in this process, and write down how it ended."""
    modules = {"engine": "presets", "limits": "machine", "versions": "machine", "nccl": "ranks"}
    kind = name.partition(":")[0]
    check, journal = Check(name, settings), Journal(Path(settings.output))
    try:
        importlib.import_module(f"gpu.{modules.get(kind, kind)}").run(check)
    except Skip as skip:
        journal.update(name, status="skipped", why=str(skip))
    except BaseException as error:
        journal.update(name, status="failed", why=describe(error))
        raise
    else:
        journal.update(name, status="done")
    return 0


def remove_data(ssd: Path) -> None:
    """Remove what sections have left on the drive."""
    for path in ssd.glob(f"{DATA_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main()
