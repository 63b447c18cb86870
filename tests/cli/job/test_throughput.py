"""A preset without data measures throughput on random tokens, where the machine has its GPU; else it is planned."""

import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli.main import main
from common.hardware import machine
from common.hardware.machine import Gpu
from common.units import format_bytes
from fuyou import Engine
from tests.cli.conftest import Finetune, Outcome
from tests.helpers.accelerator import QueuedDevice

MISSION = (
    "--gpu",
    "4090",
    "--model",
    "llama-10m",
    "--seq-len",
    32,
    "--batch-size",
    2,
    "--host-memory",
    "800MiB",
)
CARD = Gpu(0, "GPU-0", "NVIDIA GeForce RTX 4090", 24 << 30)


@pytest.fixture
def finetune(capfd: pytest.CaptureFixture[str]) -> Finetune:
    """Runs the command as it is typed; the fixture of this name for other tests adds ``--data random``."""

    def run(*words: object) -> Outcome:
        capfd.readouterr()
        return Outcome(main([str(word) for word in words]), *capfd.readouterr())

    return run


@pytest.fixture
def with_4090(monkeypatch: pytest.MonkeyPatch) -> QueuedDevice:
    """A processor that plays an RTX 4090."""
    monkeypatch.setattr(machine, "list_gpus", lambda: [CARD])
    for module in ("resolve", "job"):
        monkeypatch.setattr(f"cli.job.{module}.torch_name", lambda gpu: "cpu" if gpu is CARD else "another")
    return QueuedDevice(protects=False).install(monkeypatch)


@pytest.fixture
def drives() -> list[Path]:
    paths = [Path("nvme0").absolute(), Path("nvme1").absolute()]
    for path in paths:
        path.mkdir()
    return paths


@pytest.mark.parametrize("is_expanded", [True, False])
def test_a_preset_measures_throughput(
    finetune: Finetune,
    with_4090: QueuedDevice,
    drives: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    is_expanded: bool,
) -> None:
    counted: list[tuple[int, int]] = []
    close = Engine.close

    def counting_close(engine: Engine) -> None:
        if engine.step_count:
            counted.append((engine.created_bytes, engine.io_bytes()[1]))
        close(engine)

    monkeypatch.setattr(Engine, "close", counting_close)
    outcome = finetune(*MISSION, "--steps", 3, "--ssd", *(drives if is_expanded else ["nvme*"]))
    assert outcome.status == 0, outcome.err
    first, *lines = outcome.out.splitlines()
    said = re.fullmatch(
        r"llama-10m has random weights, and there are no data: this measures throughput, in 3 steps on random tokens\. "
        r"It writes (.*) to the drives at first and about (.*) per step, (.*) in all\.",
        first,
    )
    assert said is not None, first
    created, written = counted[0]
    assert said.groups() == (
        format_bytes(created),
        format_bytes(written // 3),
        format_bytes(created + written),
    )
    assert any(CARD.name in line for line in lines if line.startswith("machine"))
    assert any("tokens/s" in line for line in lines)
    assert all(list(drive.iterdir()) for drive in drives)
    assert not list(Path("finetune-output/llama-10m").glob("*.safetensors")), (
        "no checkpoint of random weights"
    )


def test_the_number_of_steps_is_small(
    finetune: Finetune, with_4090: QueuedDevice, drives: list[Path]
) -> None:
    outcome = finetune(*MISSION, "--ssd", *drives, "--save")
    assert outcome.status == 0 and "in 10 steps on random tokens" in outcome.out
    assert list(Path("finetune-output/llama-10m").glob("*.safetensors")), "which --save asks for"


def test_elsewhere_it_prints_the_command_of_the_plan(finetune: Finetune, drives: list[Path]) -> None:
    for ssd, missing in (
        ((drives), ""),
        (["/mnt/no-nvme*"], "--ssd /mnt/no-nvme*: nothing matches this pattern. "),
    ):
        outcome = finetune(*MISSION, "--ssd", *ssd, "--steps", 2)
        assert outcome.status == 2 and outcome.out == ""
        said = re.search(
            r"error: (.*)--gpu 4090: .*\. To plan this run for one: (finetune plan .*)$", outcome.err
        )
        assert said is not None and said[1] == missing, outcome.err
        command = shlex.split(said[2])[1:]
        assert command[-2:] == ["--ssds", str(len(ssd))] and "--ssd" not in command
        planned = finetune(*command)
        assert (
            planned.status == 0
            and f"NVIDIA GeForce RTX 4090 (24 GiB) with {'2 x ' * (len(ssd) > 1)}" in planned.out
        )


def test_a_drive_that_is_known_is_planned(
    finetune: Finetune, drives: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = SimpleNamespace(preset=SimpleNamespace(name="wd-sn850x-2tb"))
    monkeypatch.setattr("cli.job.throughput.drive_of", lambda path: drive)
    assert finetune(*MISSION, "--ssd", *drives).err.rstrip().endswith("--drive wd-sn850x-2tb --ssds 2")


def test_what_is_wrong_is_one_line(
    finetune: Finetune, with_4090: QueuedDevice, drives: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = finetune(*MISSION, "--ssd", "nothing*")
    assert (
        outcome.status == 2
        and outcome.err == "finetune: error: --ssd nothing*: nothing matches this pattern.\n"
    )
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100 << 20))
    outcome = finetune(*MISSION, "--ssd", *drives)
    assert outcome.status == 2 and "Too little space" in outcome.err and len(outcome.err.splitlines()) == 1


def test_a_checkpoint_needs_data(finetune: Finetune, checkpoint: Path) -> None:
    outcome = finetune("--model", checkpoint)
    assert outcome.status == 2 and "There is nothing to train on: give --data FILE" in outcome.err
