"""Metrics of a step under the names that torchtitan gives them.

Names that torchtitan has (``torchtitan/components/metrics.py``, v0.2.2) mean what they mean there: rates are per
device, and memory is in GiB. What it has no name for follows its pattern: ``ssd/read(GiB)``, ``memory/host(GiB)``,
``validation_metrics/perplexity``.
"""

from cli.report.results import StepMetrics

_GIB = 1 << 30


def named_metrics(metrics: StepMetrics) -> dict[str, float]:
    """Return a step's figures by their names in torchtitan."""
    result, memory, io = metrics.result, metrics.memory, metrics.io
    named = {
        "loss_metrics/global_avg_loss": result.loss,
        **({} if result.aux_loss is None else {"loss_metrics/aux_loss": result.aux_loss}),
        **result.watched,
        "grad_norm": result.grad_norm,
        "lr": metrics.lr,
        "skipped": float(result.skipped),
        "n_tokens_seen": metrics.step * metrics.tokens,
        "throughput(tps)": metrics.tokens_per_second / metrics.ranks,
        "tflops": metrics.flops_per_second / metrics.ranks / 1e12,
        "time_metrics/end_to_end(s)": metrics.seconds,
        "memory/max_active(GiB)": memory.device_bytes / _GIB,
        "memory/host(GiB)": memory.host_bytes / _GIB,
    }
    if io is None:
        return named | {"network/sent(GiB)": (result.sent_bytes or 0) / _GIB}
    return {
        **named,
        **{f"time_metrics/busy_{name}(s)": value for name, value in result.busy_seconds.items()},
        "memory/ssd(GiB)": memory.ssd_bytes / _GIB,
        "ssd/read(GiB)": io.read / _GIB,
        "ssd/written(GiB)": io.written / _GIB,
    }
