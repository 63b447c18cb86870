"""What a GPU does differently: copies that are queued and done later, its own kernels, memory that it must lock.

Most of it needs a GPU and is skipped elsewhere. That the engine waits for queued copies wherever it has to is tested
without one, by a processor that plays the device and copies late.
"""

import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.errors import FinetuneError
from common.memory.buffers import HostBuffer
from fuyou.optimizer.gradient_sum import sum_of_squares
from fuyou.runtime.device import open_device
from fuyou.schedule.tasks import Op, Task
from tests.helpers import kvikio
from tests.helpers.accelerator import QueuedDevice
from tests.helpers.engines import batches, engine, give_buffers, train
from tests.helpers.engines import check as check_exact
from tests.helpers.twin import tiny_configs

STEPS = 4
SCARCE = {"device_activations": 4, "host_activations": 2, "ssd_activations": 40}
SCARCE_SAVED = {"device_saved": 2, "host_saved": 2, "ssd_saved": 12}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    for name in ("llama", "llama-tied", "gpt2"):
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(tiny_configs()[name]).save_pretrained(root / name)
    return root


def check(
    model: Path, ssd: Path, monkeypatch: pytest.MonkeyPatch, *, device: str = "cpu", dtype: str = "bf16",
    micro_batch: int = 1, clip: float | None = None, counts: dict[str, int] | None = None, kept: int = 0,
    io: str = "posix",
) -> None:  # fmt: skip
    """The engine equals the plain loop on the same device."""
    give_buffers(monkeypatch, counts or {})
    check_exact(
        model, [ssd], dtype=dtype, micro_batch=micro_batch, clip=clip, steps=STEPS, device=device, io=io,
        device_memory="2GiB" if device != "cpu" else None, saved_activations=kept,
    )  # fmt: skip


@pytest.mark.parametrize(("counts", "clip"), [
    ({}, None), (SCARCE, 0.5), ({**SCARCE, "device_blocks": 1, "device_block_gradients": 1, "host_blocks": 1}, None),
], ids=["planned", "ssd, clipped", "one of each"])  # fmt: skip
@pytest.mark.slow
def test_everything_that_is_queued_ends_late(
    counts: dict[str, int],
    clip: float | None,
    checkpoints: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    QueuedDevice().install(monkeypatch)
    check(checkpoints / "llama-tied", tmp_path, monkeypatch, clip=clip, counts=counts)


def test_kept_outputs_that_arrive_late(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    QueuedDevice().install(monkeypatch)
    check(checkpoints / "llama-tied", tmp_path, monkeypatch, counts={**SCARCE, **SCARCE_SAVED}, kept=1 << 20)


@pytest.mark.parametrize("room", [pytest.param(0, marks=pytest.mark.slow), 1 << 17])
def test_host_memory_that_cannot_be_page_locked_is_slower_and_right(
    room: int, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = QueuedDevice().install(monkeypatch)
    device.cudart.room, device.pageable = room, True
    with pytest.warns(UserWarning, match="copies of the rest are slower"):
        check(checkpoints / "llama-tied", tmp_path, monkeypatch, counts=SCARCE)
    assert not device.cudart.registered and not device.cudart.pending


def test_copies_that_cuda_would_not_make_at_once_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = QueuedDevice(protects=False).install(monkeypatch)
    host, memory = HostBuffer(8192), device.allocate(8192)
    bytes_ = host.tensor(torch.uint8, 0, 8192)
    with pytest.raises(AssertionError, match="not page-locked"):
        device.check_copy(memory, bytes_)
    host.page_lock()
    memory.copy_(bytes_)
    for target, source, what in (
        (memory[::2], bytes_[::2], "not contiguous"),
        (memory.view(32, 256)[:, :8], bytes_.view(32, 256)[:, :8], "not contiguous"),
        (memory.view(torch.float32), bytes_.view(torch.int32), "one dtype to another"),
    ):
        with pytest.raises(AssertionError, match=what):
            target.copy_(source)
    host.close()
    device.release()


@pytest.mark.parametrize(
    "deaf",
    [
        Op.COMPUTE,
        *(pytest.param(op, marks=pytest.mark.slow) for op in (Op.PARAMETER_UPLOAD, Op.GRADIENT_DOWNLOAD)),
    ],
)
def test_a_stream_that_does_not_wait_is_noticed(
    deaf: Op, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    QueuedDevice(deaf=deaf).install(monkeypatch)
    with pytest.raises((AssertionError, FinetuneError)):  # other numbers, or none that are finite
        check(checkpoints / "llama-tied", tmp_path, monkeypatch, counts={**SCARCE, "device_blocks": 1})


@pytest.mark.parametrize(("blocks", "clip"), [(1, None), (2, 0.5)])
@pytest.mark.slow
def test_parameters_that_pass_host_memory(
    blocks: int, clip: float | None, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = QueuedDevice().install(monkeypatch)
    device.install_kvikio(monkeypatch)
    counts = {**SCARCE, "device_blocks": blocks, "host_blocks": 1}
    check(checkpoints / "llama-tied", tmp_path, monkeypatch, clip=clip, counts=counts, io="kvikio")
    # What is clipped is updated in the forward pass, on the host.
    assert len(device.past_host) >= (STEPS if clip is None else 1)


@pytest.mark.slow
def test_a_drive_that_does_not_wait_for_the_device_is_noticed(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = QueuedDevice(deaf=Op.PARAMETER_READ_DEVICE).install(monkeypatch)
    device.install_kvikio(monkeypatch)
    counts = {**SCARCE, "device_blocks": 1, "host_blocks": 1}
    with pytest.raises((AssertionError, FinetuneError)):
        check(checkpoints / "llama-tied", tmp_path, monkeypatch, counts=counts, io="kvikio")


@pytest.mark.parametrize(
    "share", [0.0, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.5, 0.99))]
)
def test_a_read_of_kvikio_that_fails_costs_no_committed_step(
    share: float, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first call, in the middle, and at the last: the run ends with the reason, and resumes from its commit."""
    QueuedDevice().install(monkeypatch).install_kvikio(monkeypatch)
    give_buffers(monkeypatch, {**SCARCE, "device_blocks": 2, "host_blocks": 1})
    model, feed = checkpoints / "llama", batches(STEPS, packed=True)
    calls, fails_at, get = [0], math.inf, kvikio.LazyFuture.get

    def failing(future: kvikio.LazyFuture) -> int:
        calls[0] += 1
        if calls[0] > fails_at:
            raise RuntimeError("cuFile error 5011")
        return get(future)

    monkeypatch.setattr(kvikio.LazyFuture, "get", failing)
    (tmp_path / "undisturbed").mkdir()
    with engine(model, [tmp_path / "undisturbed"], io="kvikio") as trained:
        expected = train(trained, feed)
        trained.flush()
    fails_at, calls[0] = int(calls[0] * share), 0
    trained = engine(model, [tmp_path], io="kvikio")
    with pytest.raises(FinetuneError, match=r"with kvikio failed: cuFile error 5011\. Use io posix"):
        train(trained, feed)
    trained.close()
    with engine(model, [tmp_path], resume=True) as trained:
        done = trained.step_count
        assert train(trained, feed[done:]) == expected[done:]


@pytest.mark.parametrize("opened", [0, 1])
def test_a_file_that_kvikio_does_not_open_leaves_nothing_behind(
    opened: int, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = QueuedDevice().install(monkeypatch)
    device.install_kvikio(monkeypatch)
    files, make = [0], kvikio.StandInCuFile.__init__

    def failing(file: kvikio.StandInCuFile, path: Path, flags: str) -> None:
        files[0] += 1
        if files[0] > opened:
            raise RuntimeError("cuFile driver is not there")
        make(file, path, flags)

    monkeypatch.setattr(kvikio.StandInCuFile, "__init__", failing)
    with pytest.raises(FinetuneError, match=r"kvikio cannot open .*cuFile driver is not there"):
        engine(checkpoints / "llama", [tmp_path], io="kvikio")
    assert not device.cudart.registered
    engine(checkpoints / "llama", [tmp_path]).close()


def test_nothing_on_the_host_reads_device_memory() -> None:
    device = QueuedDevice()
    memory, (end, pipe) = device.allocate(4096).numpy(), os.pipe()
    try:
        with pytest.raises(OSError, match="Bad address"):
            os.write(pipe, memory)
        with device.opened():
            assert os.write(pipe, memory) == 4096
    finally:
        os.close(end)
        os.close(pipe)
        device.release()


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Deterministic algorithms; cuBLAS wants its setting before it starts, so only the first test sets it in time."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("family", "micro_batch", "clip", "counts"), [
    ("llama", 1, None, {}),
    ("gpt2", 3, 0.5, {}),
    ("llama-tied", 1, None, {"device_activations": 4, "host_activations": 30}),
    ("llama-tied", 1, 0.5, SCARCE),
    ("llama", 1, None, {**SCARCE, **SCARCE_SAVED}),
])  # fmt: skip
def test_equals_the_plain_loop_on_a_gpu(
    family: str, micro_batch: int, clip: float | None, counts: dict[str, int], dtype: str, checkpoints: Path,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strict: None,
) -> None:  # fmt: skip
    check(
        checkpoints / family, tmp_path, monkeypatch, device="cuda:0", dtype=dtype, micro_batch=micro_batch, clip=clip,
        counts=counts, kept=1 << 20 if "device_saved" in counts else 0,
    )  # fmt: skip


@pytest.mark.cuda
def test_lanes_wait_for_each_other_on_the_device() -> None:
    device = open_device("cuda:0")
    host = HostBuffer(1 << 20).touch()
    try:
        host.page_lock()
        memory = device.allocate(host.nbytes)
        compute = Task(Op.COMPUTE, [])
        device.begin_compute(compute)
        torch.cuda._sleep(100_000_000)  # clock cycles: a twentieth of a second
        memory.fill_(7)
        device.end_compute(compute)
        download, write = Task(Op.GRADIENT_DOWNLOAD, [compute]), Task(Op.GRADIENT_WRITE, [])
        seen = []

        def lane() -> None:
            device.wait_event(download, compute.event)
            device.copy(download, host.tensor(torch.uint8, 0, host.nbytes), memory)
            device.wait_event(write, download.event)  # here the host waits
            seen.append(int(host.array.min()))

        thread = threading.Thread(target=lane)
        thread.start()
        thread.join()
        assert seen == [7]
        computed, copied = device.interval(compute), device.interval(download)
        assert computed[1] - computed[0] > 0.01
        assert copied[0] > computed[1] - 0.001
        assert abs(time.monotonic() - copied[1]) < 5
    finally:
        device.synchronize()
        host.close()


@pytest.mark.cuda
def test_page_locked_copies_are_asynchronous() -> None:
    buffer = HostBuffer(64 << 20, shared=True).touch()
    try:
        buffer.page_lock()
        host = buffer.tensor(torch.uint8, 0, buffer.nbytes)
        assert host.is_pinned()
        assert host[4096:8192].is_pinned()  # anywhere inside
        host.random_(0, 256)
        expected = host.clone()
        there = torch.empty(buffer.nbytes, dtype=torch.uint8, device="cuda")
        stream, event = torch.cuda.Stream(), torch.cuda.Event()
        with torch.cuda.stream(stream):
            there.copy_(host, non_blocking=True)
            torch.cuda._sleep(200_000_000)  # clock cycles: a tenth of a second
            host.copy_(there.flip(0), non_blocking=True)
            event.record()
        assert not event.query()  # the host did not wait
        event.synchronize()
        assert torch.equal(host, expected.flip(0))
        del host
    finally:
        buffer.close()


@pytest.mark.cuda
def test_the_norm_of_a_gradient_takes_little_memory() -> None:
    flat = torch.randn(40_000_000, device="cuda", dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = sum_of_squares(flat)
    assert torch.cuda.max_memory_allocated() - before < 160 << 20
    assert math.isclose(float(found), float(sum_of_squares(flat.cpu())), rel_tol=1e-12)
