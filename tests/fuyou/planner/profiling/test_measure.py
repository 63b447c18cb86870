"""What is measured is what is there: paces of drives and links come out, operators are all listed, nothing is left."""

import shutil
from pathlib import Path

import pytest
import torch
from emulated.device import emulated_device
from emulated.throttle import IoThrottle
from transformers import CONFIG_MAPPING

from common.models.meta_model import build_meta_model
from common.models.miniature import miniature
from common.scratch import PREFIX
from common.store import Layout
from fuyou.layout.record import Precision
from fuyou.model.model_records import model_records
from fuyou.model.streamed_model import StreamedModel
from fuyou.planner.profiling import ProfiledWorkload
from fuyou.planner.profiling.blocks import BlockBench, _extrapolated, _shortened, random_values
from fuyou.planner.profiling.measure import measure, measure_drives, open_scratch
from fuyou.runtime.device import Device
from tests.helpers.twin import tiny_configs

BF16 = Precision(torch.bfloat16)


def is_pace(measured: float, pace: float) -> bool:
    """Whether a rate is that of a paced drive: never faster, and slower only as far as a busy machine makes it."""
    return 0.3 * pace < measured < 1.15 * pace


def workload(family: str, *directories: Path) -> ProfiledWorkload:
    return ProfiledWorkload(tiny_configs()[family], BF16, 2, 16, directories, 8, 4096)


@pytest.mark.usefixtures("_quick")
def test_an_emulated_device_and_paced_drives_keep_their_rates(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in ("nvme0", "nvme1")]
    for drive in directories:
        drive.mkdir()
    device = emulated_device("emulated:tflops=2,memory=1GiB,link=3GB/s,ssd_read=400MB/s,ssd_write=200MB/s")
    profile = measure(workload("llama", *directories), device)
    assert is_pace(profile.read_bytes_per_second, 800e6)
    assert is_pace(profile.write_bytes_per_second, 400e6)
    assert profile.upload_bytes_per_second == pytest.approx(3e9) == profile.download_bytes_per_second
    assert profile.rates().flops_per_second == pytest.approx(2e12)
    assert profile.adam_parameters_per_second > 1e6
    assert all(not list(drive.iterdir()) for drive in directories)


@pytest.mark.parametrize("cache", [16 << 20, 1 << 40])
def test_writes_go_past_the_fast_cache(cache: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuyou.planner.profiling.measure.PAST_CACHE_SECONDS", 1.5)
    monkeypatch.setattr("fuyou.planner.profiling.measure.SETTLED_SECONDS", 0.4)
    monkeypatch.setattr("fuyou.planner.profiling.measure._FILL_SECONDS", 0.2)
    monkeypatch.setattr("fuyou.planner.profiling.measure._TRANSFER_BYTES", 1 << 20)
    throttle = IoThrottle(80e6, 40e6, cache, 10e6)
    rates = measure_drives([tmp_path], throttle, past_cache=True)
    assert is_pace(rates.burst_write, 40e6)
    assert is_pace(rates.write, 10e6 if cache == 16 << 20 else 40e6)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("_quick")
def test_a_block_that_others_hand_values_is_measured_without_them() -> None:
    """Gemma 3n: several streams, inputs of each layer, shared keys and values."""
    stack = StreamedModel(build_meta_model(miniature(CONFIG_MAPPING["gemma3n_text"]())), torch.device("cpu"))
    layout = model_records(stack, Precision(torch.float32))
    for layer in (0, len(stack.blocks) - 1):
        bench = BlockBench(stack, layout, Device(), 2, 16, 8)
        bench._layer, bench._record = layer, layout.records[layout.blocks[layer][0]]
        bench._weights = random_values(bench._record.numel, torch.float32, torch.device("cpu"))
        bench._gradient = torch.empty_like(bench._weights)
        times = bench.measure()
        assert times["block_backward_seconds"] > 0 and times["head_seconds"] > 0


def test_a_long_micro_batch_is_measured_on_less_of_it() -> None:
    assert _shortened(8, 1024, 1e9) == (8, 1024)
    assert _shortened(8, 1024, 3000) == (2, 1024)
    assert _shortened(8, 1024, 500.7) == (1, 500)
    assert _shortened(8, 1024, 0.1) == (1, 16)
    assert _shortened(1, 8, 0.1) == (1, 8)
    # 0.5 s for any tokens, and 1 ms for each
    assert _extrapolated([(1000, 1.5), (250, 0.75)], 8000) == pytest.approx(8.5)
    assert _extrapolated([(1000, 1.5)], 2000) == pytest.approx(3.0)
    assert _extrapolated([(1000, 1.5), (250, 2.0)], 8000) == 1.5, "noise makes nothing negative"


def test_scratch_files_go_in_every_case(tmp_path: Path) -> None:
    layout, left = Layout(1), tmp_path / f"{PREFIX}killed"  # of a process that was killed
    layout.allocate("bandwidth", 4096)
    with open_scratch([tmp_path], layout, None):
        (folder,) = tmp_path.iterdir()
        shutil.copytree(folder, left)
    assert list(tmp_path.iterdir()) == [left]
    with open_scratch([tmp_path], layout, None):
        assert not left.exists()
    scratch = open_scratch([tmp_path], layout, None)
    scratch.__enter__()
    assert list(tmp_path.iterdir())
    assert not scratch.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert not list(tmp_path.iterdir())
