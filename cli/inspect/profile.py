"""Measure what this machine does with a model, and print a table (``finetune --profile``)."""

from collections.abc import Iterable

from cli.job.machine import device_at_hand, directories_at_hand, training_of
from cli.job.prepare import quiet_transformers
from cli.options.computing_dtype import with_dtype
from cli.options.settings import Settings
from cli.report.results import RESOURCES
from common.hardware.machine import describe_machine
from common.units import format_bytes, format_count
from fuyou.planner import PlannerContext
from fuyou.planner.profiling import Profile, measure, save
from fuyou.planner.profiling.measure import describe, profile_path
from fuyou.runtime.devices.device import memory_limits
from fuyou.schedule.tasks import Resource

_OPERATORS = 8

Row = tuple[str, str, str]  # Row of the table: what was measured, how much it was, and a remark


def run_profile(settings: Settings) -> None:
    """Measure with the micro-batch of a run with these options, save the profile, and print it.

    Raises:
        UserError: if a path does not exist, or not even one block fits the budgets.
    """
    if not settings.debug:
        quiet_transformers()
    device = device_at_hand(settings.gpu)
    settings = with_dtype(settings)
    directories = directories_at_hand(settings)
    limits = memory_limits(device, settings.host_memory, settings.device_memory)
    context = PlannerContext(training_of(settings), device, limits, directories)
    workload = context.workload
    print(f"machine  {describe_machine()}")
    print(
        f"model    {settings.model}, micro-batches of {workload.rows} x {workload.seq_len} tokens in {settings.dtype} "
        f"on {device.name}",
        flush=True,
    )
    profile = save(measure(workload, device, past_cache=True), workload, device)
    print("\n".join(table(profile, len(directories))))
    print(f"Measured in {profile.measured_in_seconds:.1f} s; kept in {profile_path(describe(workload, device))}")


def table(profile: Profile, drives: int) -> list[str]:
    """Return the lines of the table, in sections."""
    per_token = 2.0 * profile.block_parameters * profile.tokens
    reached = [
        f"{factor * per_token / seconds / 1e12:.3g} TFLOP/s"
        for factor, seconds in ((1, profile.block_forward_seconds), (4, profile.block_backward_seconds))
    ]
    shortened = f"; measured on {profile.measured_tokens:,} tokens" if profile.measured_tokens < profile.tokens else ""
    threads = f"{profile.adam_threads} thread{'s' if profile.adam_threads > 1 else ''}"
    sections: dict[str, list[Row]] = {
        f"computing, per micro-batch of {profile.tokens:,} tokens{shortened}": [
            ("matrix products", f"{profile.matmul_flops_per_second / 1e12:.3g} TFLOP/s", "shapes of the block"),
            ("embedding forward", _time(profile.embed_forward_seconds), ""),
            ("block forward", _time(profile.block_forward_seconds), reached[0]),
            ("block backward", _time(profile.block_backward_seconds), f"{reached[1]}, recomputation counted"),
            ("head forward, backward", _time(profile.head_seconds), ""),
            ("embedding backward", _time(profile.embed_backward_seconds), ""),
        ],
        "copies between host and device": [
            (
                "to the device",
                _rate(profile.upload_bytes_per_second),
                f"{_rate(profile.upload_beside_bytes_per_second)} with both directions busy",
            ),
            (
                "from the device",
                _rate(profile.download_bytes_per_second),
                f"{_rate(profile.download_beside_bytes_per_second)} with both directions busy",
            ),
        ],
        f"SSDs, {drives} director{'y' if drives == 1 else 'ies'}": [
            ("read", _rate(profile.read_bytes_per_second), ""),
            (
                "write",
                _rate(profile.write_bytes_per_second),
                f"past the fast cache; {_rate(profile.burst_write_bytes_per_second)} at first",
            ),
            ("both alternating", _rate(profile.mixed_bytes_per_second), ""),
            ("commit", _time(profile.commit_seconds), ""),
        ],
        f"optimizer, {threads}": [("Adam", f"{format_count(profile.adam_parameters_per_second)}/s", "parameters")],
        "on the same cores at the same time": [
            (f"{RESOURCES[item.value]} next to {_others(item, speeds)}", f"{speed:.2f} x", "its speed alone")
            for speeds in profile.contention.speeds.values()
            for item, speed in speeds.items()
        ],
        "longest operators of the block's forward pass": [
            (f"{item.name.removeprefix('aten.')} #{item.ordinal}", _time(item.seconds), format_bytes(item.output_bytes))
            for item in sorted(profile.operators, key=lambda item: -item.seconds)[:_OPERATORS]
        ],
    }
    rows = [row for section in sections.values() for row in section]
    wide, wider = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    lines = []
    for heading, section in sections.items():
        if section:
            lines += ["", heading]
            lines += [f"  {what:{wide}}  {amount:>{wider}}  {remark}".rstrip() for what, amount, remark in section]
    return [*lines, ""]


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"


def _others(resource: Resource, busy: Iterable[Resource]) -> str:
    return " and ".join(RESOURCES[other.value] for other in busy if other is not resource)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
