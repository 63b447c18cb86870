"""What every test runs under: one thread, no network, and a plain word where a GPU is missing."""

import gc
import math
import os
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Iterator
from datetime import date
from pathlib import Path

# A shell's background jobs ignore Ctrl-C, and so would the processes whose answer to it is tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from tests.helpers import bits

# Before torch and its libraries are loaded, and inherited by the processes that tests start.
os.environ.update(bits.variables())
# Threads that wait for each other sleep: on a busy machine, spinning makes small tensors several times slower.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import hypothesis
import pytest
import torch
import transformers
from packaging.version import Version

from tests.helpers.processes import forked

# Bit-for-bit comparisons hold for a given number of threads only.
torch.set_num_threads(bits.threads())

# A loaded machine is not a failure, and a test run should say the same thing twice.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")

ROOT, PRODUCT = Path(__file__).parents[1], ("cli", "common", "fcdp", "fuyou")


# Tests that transformers before 5.18 fails, by the end of their ids, and how it does.
OLD_TRANSFORMERS = {
    "test_what_decays_is_what_decays_with_the_trainer[cohere_compass_text]": "it is not built without values",
    "test_a_loss_of_another_kind_is_rejected": "Doge cannot run",
    "test_a_step_of_a_dense_model_waits_for_nothing[opt]": "OPT waits for the device",
    "test_equals_transformers[gpt_oss-mxfp4-dtype0]": "MXFP4 is decoded to bf16 only",
    "test_what_decays_is_what_decays_with_the_trainer[dbrx]": "DBRX's own configuration is rejected",
    "test_other_kinds_of_blocks[gemma4_text]": "Gemma 4 hands values on in a dictionary",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--minutes``, for tests that take longer in all than there is time."""
    text = "start no test after this many minutes; the files are taken in another order each day"
    parser.addoption("--minutes", type=float, help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Note when this process stops to start tests."""
    minutes = config.getoption("--minutes")
    config.stash[_LAST_START] = math.inf if minutes is None else time.monotonic() + 60 * minutes


_LAST_START = pytest.StashKey[float]()


def pytest_report_header() -> str:
    """Say under which setting of ``tests/helpers/bits.py`` the tests run."""
    return f"last bits: {os.environ[bits.NAME]}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that ``--minutes`` leaves no time for."""
    if time.monotonic() > item.config.stash[_LAST_START]:
        pytest.skip("no time was left")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order files by the date for ``--minutes``; skip what is marked ``cuda`` where PyTorch has no GPU, and what fails
    with an old transformers, and report it."""
    if config.getoption("--minutes") is not None:
        today = date.today().isoformat()
        items.sort(key=lambda item: zlib.crc32(f"{today} {item.path.relative_to(ROOT)}".encode()))
    no_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU that PyTorch can use, and there is none")
    is_old = Version(transformers.__version__) < Version("5.18")
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        fault = OLD_TRANSFORMERS.get(item.nodeid.rpartition("::")[2]) if is_old else None
        if fault is not None:
            item.add_marker(pytest.mark.skip(reason=f"with transformers {transformers.__version__}, {fault}"))


def pytest_collection_finish() -> None:
    """What is there before the first test is no garbage, and is not looked through again and again."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _server() -> Iterator[None]:
    """What processes are forked from ends with the tests."""
    yield
    forked.close()


@pytest.fixture(autouse=True)
def _on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What chooses its device alone takes the CPU, which the numbers are compared with, in all tests but those of
    GPUs."""
    if request.node.get_closest_marker("cuda") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(autouse=True)
def _forked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is started here comes without seconds of imports, but where a test asks for a real start."""
    if request.node.get_closest_marker("real_start") is None:
        forked.stand_in(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def _nobody_seeds_an_open_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise where the product seeds CUDA's generators, or lets a library do it, while a run is open."""
    seed_all = torch.cuda.manual_seed_all

    def seed(number: int) -> None:
        opening = sys.modules.get("fuyou.engine.opening")
        if not any(thread.name.startswith("fuyou ") for thread in threading.enumerate()):
            # An open run has lanes; to look for it among all objects takes as long as many a test
            opening = None
        files = {frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe())}
        ours = any(file.startswith(tuple(f"{ROOT}/{name}/" for name in PRODUCT)) for file in files)
        if opening is not None and ours and f"{ROOT}/common/randomness.py" not in files:
            # An object refers to its class: this is several times faster than a look at all objects.
            runs = [user for user in gc.get_referrers(opening.OpenRun) if isinstance(user, opening.OpenRun)]
            assert not any(run.is_open for run in runs), "CUDA's generators are seeded while a run is open"
        seed_all(number)

    monkeypatch.setattr(torch.cuda, "manual_seed_all", seed)
