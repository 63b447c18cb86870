"""Reads a profiler's trace: when the compute stream stood still, and what else ran meanwhile."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from common.units import merge

Event = dict[str, Any]
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
# Gaps shorter than this (microseconds) are what any launch costs, and are counted but not looked at
LAUNCH_US = 10.0


def slim(events: Iterable[Event]) -> list[Event]:
    """What is needed to look at the timeline: everything on the GPU, CUDA calls, names; no operators of the host."""
    categories = (*_ON_GPU, "cuda_runtime", "cuda_driver", "user_annotation", "overhead")
    return [event for event in events if event.get("ph") == "M" or event.get("cat") in categories]


def analyse(events: Iterable[Event], largest: int = 10) -> dict[str, Any]:
    """Gaps on the compute stream, in microseconds: their sum, and the largest with what is around them.

    The compute stream is the one whose kernels take longest together. ``copying`` is the part of a gap during which
    copies ran on other streams, and ``host`` the CUDA call that the host spent most of it in.
    """
    done = [event for event in events if event.get("ph") == "X"]
    gpu = [event for event in done if event.get("cat") in _ON_GPU]
    streams: dict[Any, float] = defaultdict(float)
    for event in gpu:
        if event["cat"] == "kernel":
            streams[event["args"].get("stream")] += event["dur"]
    if not streams:
        raise ValueError("the trace has no kernels")
    compute = max(streams, key=lambda stream: streams[stream])
    ours = sorted((e for e in gpu if e["args"].get("stream") == compute), key=lambda e: e["ts"])
    others = [e for e in gpu if e["args"].get("stream") != compute]
    copies = merge([_span(e) for e in others if e["cat"] == "gpu_memcpy"])
    calls = [e for e in done if e.get("cat") in ("cuda_runtime", "cuda_driver")]

    gaps, last = [], ours[0]
    for event in ours[1:]:
        end = last["ts"] + last["dur"]
        if event["ts"] > end:
            gaps.append({"at": end, "length": event["ts"] - end, "after": last, "before": event})
        if event["ts"] + event["dur"] > end:
            last = event
    begin, end = ours[0]["ts"], max(e["ts"] + e["dur"] for e in ours)
    worst = sorted(gaps, key=lambda gap: -gap["length"])[:largest]
    return {
        "stream": compute,
        "kernels": sum(e["cat"] == "kernel" for e in ours),
        "span_us": end - begin,
        "busy_us": sum(stop - start for start, stop in merge([_span(e) for e in ours])),
        "idle_us": sum(gap["length"] for gap in gaps),
        "gaps": len(gaps),
        "idle_in_launches_us": sum(gap["length"] for gap in gaps if gap["length"] <= LAUNCH_US),
        "copying_us": sum(stop - start for start, stop in copies),
        "largest": [
            {
                "at_us": gap["at"] - begin, "length_us": gap["length"], "after": _name(gap["after"]),
                "before": _name(gap["before"]),
                "copying": _overlap((gap["at"], gap["at"] + gap["length"]), copies) / gap["length"],
                "host": _longest_call((gap["at"], gap["at"] + gap["length"]), calls),
            }
            for gap in worst
        ],
        "longest_kernels": _longest_kernels(ours),
    }  # fmt: skip


def _span(event: Event) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def _name(event: Event) -> str:
    return str(event["name"])[:90]


def _overlap(gap: tuple[float, float], spans: list[tuple[float, float]]) -> float:
    return sum(max(0.0, min(gap[1], stop) - max(gap[0], start)) for start, stop in spans)


def _longest_call(gap: tuple[float, float], calls: list[Event]) -> str:
    best = max(calls, key=lambda call: _overlap(gap, [_span(call)]), default=None)
    share = _overlap(gap, [_span(best)]) / (gap[1] - gap[0]) if best is not None else 0.0
    return f"{best['name']} ({share:.0%})" if best is not None and share > 0 else "no CUDA call"


def _longest_kernels(events: list[Event], count: int = 8) -> list[dict[str, Any]]:
    total: dict[str, list[float]] = defaultdict(list)
    for event in events:
        total[_name(event)].append(event["dur"])
    order = sorted(total, key=lambda name: -sum(total[name]))[:count]
    return [{"name": name, "calls": len(total[name]), "us": sum(total[name])} for name in order]
