"""Claim: what TRL's own tests of its trainers show in memory, they show of the engine, or it is refused by a sentence.

Runs the tests of the SFT, DPO, KTO and Reward trainers in TRL's repository (a checkout; its packages have no tests),
once as they are and once with an engine wherever a trainer is given a model. What they load from the Hub is made first,
by TRL's own programs (``scripts/trl_tests/standins.py``); nothing is loaded from a network:

    python scripts/trl_suite.py path/to/trl work-folder
    python scripts/trl_suite.py path/to/trl work-folder --steps 2 --select "TestDPOTrainer and not vlm"

It continues where it ended: a test whose finding is in the folder is not run again. Ends with status 1 if a test that
passes in memory fails on the engine.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import click

SCRIPTS = Path(__file__).parent
TESTS = ("sft", "dpo", "kto", "reward")
PLACES = {"memory": (), "engine": ("--on-engine",)}
_MADE = "made.json"


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of processes that find the stand-ins, and nothing else."""
    paths = os.pathsep.join((str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")))
    return {
        **os.environ, "PYTHONPATH": paths, "HF_HOME": str(folder), "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip


def make_stand_ins(trl_folder: Path, folder: Path) -> None:
    """Make models and data, once."""
    if (folder / _MADE).exists():
        return
    program = (
        "import json, sys; from pathlib import Path; from trl_tests.standins import make; trl, folder = map(Path, "
        "sys.argv[1:]); failed = make(trl, folder / 'hub', folder / 'data'); "
        f"(folder / '{_MADE}').write_text(json.dumps(failed))"
    )
    words = [sys.executable, "-c", program, str(trl_folder.resolve()), str(folder)]
    subprocess.run(words, env=environment(folder), check=True, stdout=subprocess.DEVNULL)
    for name, reason in json.loads((folder / _MADE).read_text()).items():
        click.echo(f"no stand-in by {name}: {reason}")


def run(trl_folder: Path, folder: Path, place: str, select: str, steps: int | None) -> None:
    """Run the tests that have no finding yet in ``folder``."""
    words = [
        sys.executable,
        "-P",  # TRL is the package that is installed, not the checkout's
        "-m",
        "pytest",
        "-p",
        "trl_tests.plugin",
        "-p",
        "no:cacheprovider",
        "-q",
        "--tb=no",
        "-m",
        "not slow",
        "-k",
        select,
        "--stand-ins",
        str(folder / "data"),
        "--findings",
        str(findings(folder, place)),
        *PLACES[place],
        *(() if steps is None else ("--steps", str(steps))),
        *(f"tests/test_{name}_trainer.py" for name in TESTS),
    ]
    subprocess.run(words, cwd=trl_folder, env=environment(folder), check=False)


def findings(folder: Path, place: str) -> Path:
    """Return the file with what became of each test, a line of JSON each."""
    return folder / f"{place}.jsonl"


def read(path: Path) -> dict[str, dict[str, str]]:
    """Return findings by the name of the test."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["test"]: line for line in lines}


def tell(folder: Path) -> bool:
    """Print how many tests passed where, and why others did not; return whether none has failed on the engine alone."""
    memory, engine = read(findings(folder, "memory")), read(findings(folder, "engine"))
    passed = [test for test, result in memory.items() if result["became"] == "passed"]
    for name in TESTS:
        of_trainer = [test for test in passed if f"test_{name}_trainer" in test]
        became = Counter(engine[test]["became"] if test in engine else "not run" for test in of_trainer)
        click.echo(f"{name}: {len(of_trainer)} pass in memory; on the engine " + _listed(became))
    reasons: Counter[tuple[str, str]] = Counter(
        (engine[test]["became"], engine[test]["reason"])
        for test in passed
        if test in engine and engine[test]["became"] != "passed"
    )
    for (kind, reason), count in reasons.most_common():
        click.echo(f"{count} {kind}: {reason}")
    click.echo("in memory: " + _listed(Counter(result["became"] for result in memory.values())))
    return not any(kind == "failed" for kind, _ in reasons)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {became}" for became, count in counts.most_common()) or "none"


@click.command(help=__doc__)
@click.argument("trl_folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--select", default="not VLM and not vlm", help="tests, as pytest's -k")
@click.option("--steps", type=int, help="steps of each training at most")
@click.option("--only", type=click.Choice([*PLACES, "report"]), help="run one half, or only tell what was found")
def main(trl_folder: Path, folder: Path, select: str, steps: int | None, only: str | None) -> None:
    """Run the tests, and say what became of them."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    make_stand_ins(trl_folder, folder)
    for variant in PLACES:
        if only in (None, variant):
            run(trl_folder, folder, variant, select, steps)
    if not tell(folder):
        sys.exit(1)


if __name__ == "__main__":
    main()
