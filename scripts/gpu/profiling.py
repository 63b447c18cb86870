"""One step under PyTorch's profiler, and the places where the host waits for the GPU."""

import gzip
import json
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import fuyou
from gpu.journal import Settings, Skip
from gpu.trace import analyse, slim


def profile_step(
    engine: fuyou.Engine, batch: dict[str, torch.Tensor], settings: Settings, name: str
) -> dict[str, Any]:
    """Profile one step (the engine must be warm); writes ``<name>.trace.json.gz`` for chrome://tracing or Perfetto."""
    if not settings.device.startswith("cuda"):
        raise Skip("no CUDA")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        engine(**batch).loss.backward()
        report = engine.step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(dir=settings.ssd) as directory:
        whole = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(whole))
        content = json.loads(whole.read_text())
    content["traceEvents"] = slim(content["traceEvents"])
    path = Path(settings.output) / f"{name}.trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump(content, file)
    result = analyse(content["traceEvents"])
    rows, seq_len = batch["input_ids"].shape
    return {
        **result, "trace": path.name, "batch": rows, "seq_len": seq_len, "step_seconds": report.seconds,
        "bounds": report.bound_seconds, "host_waits": _host_waits(engine, batch),
    }  # fmt: skip


def _host_waits(engine: fuyou.Engine, batch: dict[str, torch.Tensor]) -> dict[str, int]:
    """Operations of one step that make the host wait for the GPU, by source line. (Waits for events do not count.)"""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine(**batch).loss.backward()
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places = Counter(
        f"{'/'.join(Path(warning.filename).parts[-3:])}:{warning.lineno}"
        for warning in caught
        if "synchroniz" in str(warning.message)
    )
    return dict(places.most_common(20))
