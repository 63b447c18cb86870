"""A first day with ``finetune``: tasks of a new user, each of which must end as the docs say.

Every format of data, every interruption, every mistake. Each task is one or more command lines, with the status that
they must end with, what they must print and what they must leave. Nothing is downloaded.

    pytest -m slow tests/cli/first_day -k resume    # the tasks whose names have the word
"""

import contextlib
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.cli.first_day.materials import make_materials
from tests.helpers.doc_blocks import ROOT

pytestmark = pytest.mark.slow
LONGEST_SILENCE_S = 3.0
"""Seconds without a word after which a command is too silent, not counting those in which the machine had no core for
it."""
_GOING_ON = ("so far)\n", " ...\n")
"""Ends of the lines that say what is happening."""
_SERVER = multiprocessing.get_context("forkserver")
"""What command lines are forked from: most of the seconds that they take on two cores are imports."""
_PRELOADED = [
    "cli.main", "cli.train.engine_trainer", "cli.plan.out_of_core", "peft", "datasets", "transformers.models.llama",
]  # fmt: skip
SMALL = "--model models/small --batch-size 2 --seq-len 256 --gpu cpu --lr 1e-3"
"""Options of every run on the small checkpoint."""
TEXTS, BROKEN = f"{SMALL} --data data/texts.jsonl", f"{SMALL} --data data/broken.jsonl"


@dataclass(frozen=True)
class Step:
    """One command line and how it must end."""

    words: str
    """Options of ``finetune``; or, beginning with ``python``, a program."""
    status: int = 0
    says: Sequence[str] = ()
    """What its output must hold."""
    never: Sequence[str] = ("Traceback",)
    """What its output must not hold."""
    leaves: Sequence[str] = ()
    """Files that must be there afterwards, in the task's directory."""
    lacks: Sequence[str] = ()
    """Files that must not be there."""
    send: tuple[signal.Signals, str] | None = None
    """Signal to send, as soon as the output holds a text."""


@dataclass(frozen=True)
class Task:
    """Something that somebody does on a first day."""

    name: str
    steps: Sequence[Step]


def trains(name: str, options: str, *says: str, leaves: Sequence[str] = ("out/model.safetensors",)) -> Task:
    """Return a task that trains two steps on the small checkpoint."""
    return Task(name, [Step(f"{SMALL} --steps 2 --output out {options}", says=says, leaves=leaves)])


def is_refused(name: str, options: str, *says: str, status: int = 2) -> Task:
    """Return a task whose command is refused in one line, before anything is trained."""
    return Task(name, [Step(options, status, says, ("Traceback", "step 1/"))])


LONG = f"{SMALL} --data data/texts.jsonl --steps 400 --schedule constant --no-save --output out"
"""A run that is interrupted."""
README_LOOP = (
    "import fuyou, torch\n"
    "with fuyou.Engine('models/small', ssd='.', lr=1e-3, batch_shape=(2, 32), overwrite=True) as engine:\n"
    "    tokens = torch.randint(0, engine.config.vocab_size, (2, 32))\n"
    "    engine(input_ids=tokens, labels=tokens).loss.backward()\n"
    "    print('step', engine.step().step)\n"
    "    engine.save_pretrained('tuned')\n"
)
LOADS = (
    "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
    "model, tokenizer = (auto.from_pretrained('out') for auto in (AutoModelForCausalLM, AutoTokenizer))\n"
    "made = model.generate(**tokenizer('The', return_tensors='pt'), max_new_tokens=3)\n"
    "print('made', made.shape[1], 'template', bool(tokenizer.chat_template))\n"
)
LOADS_ADAPTER = (
    "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n"
    "base = AutoModelForCausalLM.from_pretrained('models/small')\n"
    "print('adapted', type(PeftModel.from_pretrained(base, 'out')).__name__)\n"
)

FORMATS = [
    trains("compressed JSON lines", "--data data/texts.jsonl.gz", "40 documents from 1 file"),
    trains("a CSV file in Alpaca's columns", "--data data/alpaca.csv", "documents from 1 file"),
    trains("a directory of save_to_disk", "--data data/saved", "40 documents"),
    trains("columns of other names", "--data data/questions.jsonl --columns prompt=question completion=answer"),
    Task(
        "ShareGPT, with a template by name, and the result used",
        [
            Step(f"{SMALL} --data data/sharegpt.jsonl --chat-template chatml --steps 2 --output out"),
            Step(f"python {LOADS}", says=("made", "template True")),
        ],
    ),
    trains("tool calls", "--data data/tools.jsonl --chat-template chatml", leaves=["out/chat_template.jinja"]),
    trains("data sets by weight", "--data data/texts.jsonl=0.7 data/book.txt=0.3", "0.7 of all rows", "0.3 of all"),
    trains("a part held out", "--data data/texts.jsonl --eval-split 10%", "held out 4 documents", "eval at step 2"),
    Task(
        "a look at the data",
        [Step(f"{SMALL} --data data/sharegpt.jsonl --chat-template chatml --show-data 1 --output out",
              says=("row 1", "«Paris.<|im_end|>»"), never=("Traceback", "row 2", "«What"))],
    ),
]  # fmt: skip
MISTAKES = [
    is_refused("a model that is not there", "--model llama-7x --data random", "llama-7x", "Did you mean"),
    is_refused("a broken line", f"{SMALL} --data data/broken.jsonl --steps 2", "broken.jsonl, line 2 is not JSON"),
    is_refused("a longer warm-up than the run", f"{BROKEN} --steps 5 --warmup 200", "--warmup 200"),
    is_refused("more memory than there is", f"{SMALL} --data random --steps 5 --host-memory 900TiB", "more than this"),
    is_refused("weights that lack a tensor", "--model models/lacking --data data/broken.jsonl --gpu cpu --seq-len 64",
               "lack", status=1),
    is_refused("a push without a token", f"{BROKEN} --steps 2 --push-to-hub me/tuned", "hf auth login"),
    is_refused("a rate without its unit", "--plan --nodes 2 --gpu 4090 --drive p5510 --network 25 --model gpt3-13b",
               "--network 25 is not a rate with its unit"),
    Task(
        "a finished run met again",
        [
            Step(f"{SMALL} --steps 2 --data data/texts.jsonl --output out"),
            Step(f"{SMALL} --steps 2 --data data/texts.jsonl --output out", 2, ("--overwrite", "--resume")),
            Step(f"{SMALL} --steps 2 --data data/texts.jsonl --output out --resume", 0, ("all 2 steps are done",)),
            Step(f"{SMALL} --steps 2 --data data/texts.jsonl --output out --resume --lora-rank 4", 2,
                 ("began with no --lora-rank, and now it is --lora-rank 4",)),
            Step(f"{SMALL} --steps 4 --data data/texts.jsonl --output out --resume", 0,
                 ("extended from 2 steps to 4", "step 4/4")),
        ],
    ),
]  # fmt: skip
INTERRUPTIONS = [
    Task(
        "Ctrl-C, then --resume, and the weights of a run that is not done",
        [
            Step(LONG, 130, ("is committed. To continue: finetune",), send=(signal.SIGINT, "step 3/")),
            Step(LONG.replace("--no-save", "--resume --export"), 0, ("of 400 left it",), ("Traceback", "loss "),
                 leaves=["out/model.safetensors"]),
            Step(LONG.replace("400", "30") + " --resume --overwrite", 2, ("give one of them",)),
        ],
    ),
    Task("SIGTERM is no success", [Step(LONG, 143, ("is committed",), send=(signal.SIGTERM, "step 2/"))]),
    Task(
        "kill -9, then --resume auto; and --resume auto where there is nothing",
        [
            Step(f"{LONG} --resume auto", -9, send=(signal.SIGKILL, "step 3/")),
            Step(f"{LONG.replace('400', '20')} --resume auto --log-every 10 --max-hours 1", 0, ("resume   after step",),
                 ("Traceback", "step 1/", "step 19/")),
        ],
    ),
    Task(
        "a time limit",
        [Step(f"{LONG} --max-hours 0.0001 --save-every 1", 0, ("--max-hours 0.0001", "To continue: finetune"))],
    ),
    Task("Ctrl-C before training", [Step(LONG, 130, ("stopped",), send=(signal.SIGINT, "steps    400"))]),
]  # fmt: skip
USES = [
    Task(
        "adapters, loaded by peft",
        [
            Step(f"{TEXTS} --steps 2 --lora-rank 4 --output out", leaves=["out/adapter_config.json", "out/README.md"]),
            Step(f"python {LOADS_ADAPTER}", says=("adapted PeftModel",)),
        ],
    ),
    Task(
        "an adapter trained further",
        [
            Step(f"{TEXTS} --steps 2 --lora-rank 4 --output first"),
            Step(f"{TEXTS} --steps 2 --adapter first --output out", says=("those of first, trained further",),
                 leaves=["out/adapter_config.json"]),
            Step(f"python {LOADS_ADAPTER}", says=("adapted PeftModel",)),
            Step(f"{TEXTS} --steps 4 --adapter first --lora-rank 8 --output other", 2, ("both say what the adapters",)),
            Step("--model first --data data/texts.jsonl", 2, ("holds a PEFT adapter", "--adapter first")),
        ],
    ),
    Task(
        "checkpoints on the way, the best one, and an early end",
        [Step(f"{TEXTS} --lr 1 --eval-split 10% --eval-every 1 --patience 2 --save-every 1 --keep 1 --steps 30 "
              "--schedule constant --output out", says=("ended early",), never=("Traceback", "step 30/"),
              leaves=["out/checkpoints", "out/run/index.html"])],
    ),
    Task(
        "the loop of the README, twice in one directory",
        [Step(f"python {README_LOOP}", says=("step 1",), leaves=["tuned/config.json"], lacks=["fuyou"])] * 2,
    ),
    Task(
        "a plan, with the options of the run",
        [Step("--plan --gpu 4090 --drive p5510 --ssds 2 --host-memory 64GiB --model llama-7b --steps 1000 --lr 1e-5 "
              "--data data/texts.jsonl --html plan.html", says=("run ", "1,000 steps"), leaves=["plan.html"])],
    ),
    Task(
        "few lines, and what is on the drives verified",
        [
            Step(f"{TEXTS} --steps 2 --log-every 2 --output out", never=("Traceback", "step 1/")),
            Step("--verify out", says=("all as written",)),
        ],
    ),
]  # fmt: skip
TASKS = [*FORMATS, *MISTAKES, *INTERRUPTIONS, *USES]


@dataclass
class Ended:
    """How a command line has ended."""

    status: int
    output: str
    longest_silence: float
    """Seconds without a word, but for those in which the last line says what is happening, or no core was free."""


class OwnTime:
    """Time that passes for a process and those that it has started: not while one of them waits for a core.

    Linux counts that for each process (``/proc/PID/schedstat``); elsewhere it is all of the time.
    """

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._time, self._waited = time.monotonic(), self._waiting()

    def passed(self) -> float:
        """Return the seconds since the last call."""
        now, waited = time.monotonic(), self._waiting()
        lost = max((waited[pid] - self._waited.get(pid, 0.0) for pid in waited), default=0.0)
        seconds = max(0.0, now - self._time - lost)
        self._time, self._waited = now, waited
        return seconds

    def _waiting(self) -> dict[int, float]:
        """Return how long each process has waited for a core so far, in seconds."""
        found = {}
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            for process in (self._process, *self._process.children(recursive=True)):
                found[process.pid] = float(Path(f"/proc/{process.pid}/schedstat").read_text().split()[1]) / 1e9
        return found


def run_step(step: Step, directory: Path, output: Path) -> Ended:
    """Run one command line to its end, and watch what it says and when.

    Args:
        step: the command line.
        directory: where it runs.
        output: file for what it says.
    """
    output.touch()
    process = _SERVER.Process(target=_run_here, args=(step.words, str(directory), str(output)))
    process.start()
    assert process.pid is not None
    clock, said, silent, silence, sent = OwnTime(process.pid), "", 0.0, 0.0, step.send is None
    while process.is_alive():
        process.join(0.05)
        text, passed = output.read_text(errors="replace"), clock.passed()
        silent = 0.0 if text != said or said.endswith(_GOING_ON) else silent + passed
        said, silence = text, max(silence, silent)
        if not sent and step.send is not None and step.send[1] in said:
            os.kill(process.pid, step.send[0])
            sent = True
    assert process.exitcode is not None
    return Ended(process.exitcode, output.read_text(errors="replace"), silence)


def _run_here(words: str, directory: str, output: str) -> None:
    """Run a command line in this process, which is forked from one that has imported everything."""
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True)
    os.chdir(directory)
    if words.startswith("python "):
        paths = {**os.environ, "PYTHONPATH": str(ROOT)}
        sys.exit(subprocess.run([sys.executable, "-c", words.removeprefix("python ")], env=paths).returncode)
    from cli.main import main as finetune

    sys.argv = ["finetune", *words.split()]
    sys.exit(finetune())


def faults(step: Step, ended: Ended, directory: Path) -> list[str]:
    """Return everything that is not as it should be."""
    problems = [] if ended.status == step.status else [f"status {ended.status} instead of {step.status}"]
    problems += [f"does not say {text!r}" for text in step.says if text not in ended.output]
    problems += [f"says {text!r}" for text in step.never if text in ended.output]
    if ended.longest_silence > LONGEST_SILENCE_S and not step.words.startswith("python "):
        problems.append(f"says nothing for {ended.longest_silence:.1f} s")
    problems += [f"leaves no {name}" for name in step.leaves if not (directory / name).exists()]
    return problems + [f"leaves {name}" for name in step.lacks if (directory / name).exists()]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with the models and the data of all tasks."""
    folder = tmp_path_factory.mktemp("first-day")
    make_materials(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(folder / "hub"))  # where nobody has logged in
        patch.delenv("HF_TOKEN", raising=False)
        patch.setenv("FINETUNE_CACHE", str(folder / "cache"))
        _SERVER.set_forkserver_preload(_PRELOADED)
        yield folder


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_task(task: Task, work: Path, tmp_path: Path) -> None:
    for name in ("models", "data"):
        (tmp_path / name).symlink_to(work / name)
    for number, step in enumerate(task.steps, 1):
        ended = run_step(step, tmp_path, tmp_path / f"{number}.log")
        wrong = faults(step, ended, tmp_path)
        assert not wrong, f"$ finetune {step.words[:200]}\n{ended.output}"
