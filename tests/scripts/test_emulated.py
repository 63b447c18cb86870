"""An emulated accelerator takes the time that it says, moves the bytes that a real one would."""

import time
from pathlib import Path
from types import SimpleNamespace

import emulated.device
import pytest
import torch
from emulated.device import EmulatedDevice, EmulatedEvent, EmulatedSpec, emulated_device

from common.errors import UserError
from fuyou import Engine
from fuyou.layout.record import Kind
from fuyou.planner.simulator import TaskRates, simulate
from fuyou.schedule.tasks import Op, Task
from tests.helpers.engines import give_buffers
from tests.helpers.twin import tiny_configs

DEVICE = "emulated:tflops=0.002,memory=1GiB,link=1GB/s,ssd_read=2GB/s,ssd_write=2GB/s"


def test_parts_of_the_specification() -> None:
    spec = EmulatedSpec.parse("emulated:tflops=165,memory=24GiB,link=25GB/s")
    assert spec == EmulatedSpec(165e12, 24 << 30, 25e9)
    paced = EmulatedSpec.parse("emulated: tflops=1, memory=1GiB, link=1GB/s, ssd_read=3GB/s, ssd_write=2GB/s")
    assert paced.throttle is not None
    assert (paced.throttle.read_bytes_per_second, paced.throttle.write_bytes_per_second) == (3e9, 2e9)


@pytest.mark.parametrize(("text", "message"), [
    ("emulated:tflops=165", "lacks memory, link"),
    ("emulated:", "not understood"),
    ("emulated:tflops=fast,memory=1GiB,link=1GB/s", "tflops=fast"),
    ("emulated:tflops=0,memory=1GiB,link=1GB/s", "more than nothing"),
    ("emulated:tflops=1,memory=1GiB,link=1GB/s,ssd_read=1GB/s", "one of the two SSD rates"),
    ("emulated:tflops=1,memory=1GiB,link=1GB/s,drives=3", "drives=3"),
    ("emulated:tflops=1,memory=lots,link=1GB/s", "not a size"),
])  # fmt: skip
def test_specifications_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        EmulatedSpec.parse(text)


def test_streams_run_side_by_side_and_wait_for_events(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(emulated.device, "time", clock)
    device = EmulatedDevice(EmulatedSpec(1e12, 1 << 30, 1e9))
    memory, host = device.allocate(1 << 20), torch.empty(1 << 20, dtype=torch.uint8)
    upload = Task(Op.PARAMETER_UPLOAD, [])
    first, second = Task(Op.COMPUTE, [], flops=100e9), Task(Op.COMPUTE, [], flops=100e9)
    began = clock.now
    device.copy(upload, memory, host)
    device.begin_compute(first)
    assert upload.event is not None and second.event is None
    device.wait_event(second, EmulatedEvent(began, began + 0.4))
    device.begin_compute(second)
    assert clock.now == began, "launching does not block"
    assert device.interval(upload)[1] - device.interval(upload)[0] == pytest.approx(0.001049, rel=0.01)
    assert device.interval(first)[0] == began  # next to the copy
    assert device.interval(second) == pytest.approx((began + 0.4, began + 0.5), abs=1e-6)
    assert not device.has_finished(second)
    device.synchronize()
    assert device.has_finished(second)
    assert clock.now == pytest.approx(began + 0.5)
    reader = Task(Op.PARAMETER_READ, [])
    # The SSD writes to host memory: a thread waits
    device.wait_event(reader, EmulatedEvent(began, began + 0.55))
    assert clock.now == pytest.approx(began + 0.55)


@pytest.mark.parametrize("deferred", [0.0, 0.5])
def test_an_engine_on_it_moves_real_bytes(deferred: float, tmp_path: Path) -> None:
    config = tiny_configs()["llama"]
    tokens = torch.randint(0, 211, (4, 32))
    with Engine(
        config, ssd=[tmp_path], device=emulated_device(DEVICE), dtype="bf16", host_memory="300MiB",
        batch_shape=(4, 32), micro_batch=2, deferred_fraction=deferred,
    ) as engine:  # fmt: skip
        for _ in range(3):
            engine(input_ids=tokens, labels=tokens).loss.backward()
            report = engine.step()
            # The step's FLOPs at 2 GFLOP/s: the accelerator was busy for exactly that long. Of the forward pass's
            # 40,704 per token (34,560 of them in matrices), the 6,912 of the last matrix are not computed again.
            block = 2 + 4 + 2 * (1 - 6912 / 40704)
            flops = sum(
                (block if record.kind is Kind.BLOCK else 6 if record.name == "head" else 0)
                * record.parameter_count
                * 4
                * 32
                for record in engine._run.layout.records
            )
            assert report.bound_seconds["gpu"] == pytest.approx(flops / 2e9, rel=0.05)
            assert report.seconds >= flops / 2e9
        engine.flush()
        assert engine.io_bytes() == engine.planned_io_bytes()
        assert engine.committed_step == 3


@pytest.mark.slow
def test_steps_with_little_host_memory_take_what_the_simulation_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On slow drives that bound the step: the same bytes, and the simulated time."""
    scarce = {"host_blocks": 1, "device_activations": 4, "host_activations": 2, "ssd_activations": 40}
    give_buffers(monkeypatch, scarce)
    config, tokens = tiny_configs()["llama"], torch.zeros(4, 32, dtype=torch.long)
    config.num_hidden_layers = 6
    device = emulated_device("emulated:tflops=1,memory=1GiB,link=1GB/s,ssd_read=3MB/s,ssd_write=3MB/s")
    with Engine(
        config, ssd=[tmp_path], device=device, host_memory="300MiB", host_cache=0, batch_shape=(4, 32), micro_batch=1,
        dtype="bf16",
    ) as engine:  # fmt: skip
        ended = []
        for _ in range(4):
            engine(input_ids=tokens, labels=tokens).loss.backward()
            engine.step()
            ended.append(time.monotonic())
        run = engine._run
        engine.flush()
        assert engine.io_bytes() == engine.planned_io_bytes()
        rates = TaskRates(1e12, 1e9, 1e9, 3e6, 3e6, 1e9)
        planned = simulate(run.layout, engine.memory_plan, rates, steps=4).step_seconds()
    seconds = (ended[-1] - ended[0]) / 3
    assert planned * 0.8 < seconds < planned * 1.6
