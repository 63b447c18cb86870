"""results.json as Markdown, ready for docs/benchmarks.md. Only what was measured; the rest says why not."""

from collections.abc import Iterable
from typing import Any

from common.units import format_bytes, format_count

Data = dict[str, Any]


def render(results: Data) -> str:
    """The whole report."""
    lines = ["# GPU check", ""]
    if results.get("command"):
        lines += [f"`{results['command']}`, {results.get('date', '')}.", ""]
    drawn = {"machine": _machine, "limits": _limits, "exactness": _exactness, "ranks": _ranks, "engine": _engine,
             "in-memory": _in_memory, "timeline": _timeline}  # fmt: skip
    for name, section in results["sections"].items():
        kind, _, preset = name.partition(":")
        lines += [f"## {kind}{': ' + preset if preset else ''}", ""]
        status = section.get("status", "running")
        if status != "done":
            lines += [f"{status}{': ' + section['why'] if section.get('why') else ''}", ""]
        data = section.get("data") or {}
        if data:
            try:
                lines += [*drawn[kind](data), ""]
            except Exception as error:  # half-filled data of a section that failed
                lines += [f"(figures in results.json; not drawn: {type(error).__name__}: {error})", ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(header: list[str], rows: Iterable[list[Any]]) -> list[str]:
    return [_row(header), _row(["---"] * len(header)), *(_row(row) for row in rows)]


def _row(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"


def _rate(value: Any) -> str:
    return f"{value / 1e9:.2f} GB/s" if isinstance(value, (int, float)) else str(value)


def _tflops(value: Any) -> str:
    return f"{value / 1e12:.3g}" if isinstance(value, (int, float)) else "-"


def _machine(data: Data) -> list[str]:
    lines = []
    gpu, link, memory = data.get("gpu"), data.get("link"), data.get("memory")
    if isinstance(gpu, dict):
        lines.append(
            f"* GPU: {gpu['name']}, {format_bytes(gpu['memory_bytes'])}, compute capability {gpu['capability']}, "
            f"driver {gpu['driver']}, CUDA {gpu['cuda']}"
        )
    elif gpu:
        lines.append(f"* GPU: {gpu}")
    if isinstance(link, dict):
        lines.append(
            f"* PCIe under load: generation {link['generation']} of {link['generation_max']}, width {link['width']} of "
            f"{link['width_max']}"
        )
    processors, drive = data.get("processors"), data.get("drive")
    if isinstance(processors, dict):
        lines.append(f"* Processors: {processors['usable']} of {processors['model']}")
    if isinstance(memory, dict):
        lines.append(
            f"* Memory: {format_bytes(memory['limit_bytes'])}, {format_bytes(memory['available_bytes'])} available; "
            f"huge pages {'on' if memory['huge_pages'] else 'off'}, for shared memory {memory['huge_pages_shared']}"
        )
    if isinstance(drive, dict):
        lines.append(
            f"* Drive: {drive['source']} ({drive['file_system']}), {format_bytes(drive['free_bytes'])} free of "
            f"{format_bytes(drive['total_bytes'])}"
        )
    kvikio = data.get("kvikio")
    if isinstance(kvikio, dict):
        if kvikio["available"]:
            lines.append(f"* kvikio {kvikio['version']}: compat mode {kvikio['compat_mode']}, nvidia-fs "
                         f"{kvikio['nvidia_fs']}")  # fmt: skip
        else:
            lines.append(f"* kvikio: {kvikio['why']}")
    packages = ", ".join(f"{name} {version}" for name, version in data["packages"].items())
    return [*lines, f"* Python {data['python']}, {packages}, kernel {data['kernel']}"]


def _limits(data: Data) -> list[str]:
    lines = []
    matmul = data.get("matmul")
    if isinstance(matmul, dict):
        rows = [[f"{row['m']} x {row['k']} x {row['n']}", _tflops(row["flops_per_second"])] for row in matmul["sizes"]]
        lines += _table(["bf16 matrix product", "TFLOP/s"], rows)
        lines += ["", f"Sustained over a longer run at the best size: {_tflops(matmul['sustained'])} TFLOP/s.", ""]
    rows = []
    copies, store, adam = data.get("copies"), data.get("store"), data.get("adam")
    if isinstance(copies, dict):
        rows += [
            ["host to device, alone", _rate(copies["to_device"])],
            ["device to host, alone", _rate(copies["to_host"])],
            ["both at once: to device", _rate(copies["to_device_beside"])],
            ["both at once: to host", _rate(copies["to_host_beside"])],
            ["first touch of shared memory", _rate(copies["touch_bytes_per_second"])],
            ["page-locking it", _rate(copies["lock_bytes_per_second"])],
        ]
    if isinstance(store, dict):
        kind = "direct" if store["direct"] else "through the page cache"
        rows += [
            [f"store: first write ({kind})", _rate(store["write_first"])], ["store: write", _rate(store["write"])],
            ["store: read", _rate(store["read"])], ["store: read and write in turn", _rate(store["mixed"])],
        ]  # fmt: skip
    if isinstance(adam, dict):
        rows += [
            [f"Adam, bf16 with fp32 masters, {adam['threads']} threads", f"{adam['bf16'] / 1e6:,.0f} M parameters/s"],
            [f"Adam, fp32, {adam['threads']} threads", f"{adam['fp32'] / 1e6:,.0f} M parameters/s"],
        ]
    lines += _table(["limit", "measured"], rows) if rows else []
    for name in ("matmul", "copies", "store", "adam"):
        if isinstance(data.get(name), str):
            lines += ["", f"{name}: {data[name]}"]
    if isinstance(copies, dict):
        lines += [
            "",
            f"Copies: memory seen as page-locked: {copies['is_pinned']}; bytes survive there and back: "
            f"{copies['bytes_survive']}; launching them kept the host for {copies['launch_seconds'] * 1e3:.1f} ms.",
        ]
    return lines


def _exactness(data: Data) -> list[str]:
    rows = []
    for case in data.get("cases", []):
        if "loss" in case:
            cells = [f"{case['losses_equal']} of {case['steps']}", f"{case['loss']:.1e}", f"{case['norm']:.1e}",
                     f"{case['master']:.1e}"]  # fmt: skip
        else:
            cells = ["-"] * 4
        notes = [case.get("why", ""), "" if case.get("strict", True) else "not strictly deterministic"]
        if "plain_against_itself" in case:
            notes.append(f"plain loop against itself: {case['plain_against_itself']}")
        rows.append([case["name"], case["dtype"], case.get("micro_batch", "-"),
                     case["verdict"], *cells, "; ".join(filter(None, notes))])  # fmt: skip
    verdicts = [case["verdict"] for case in data.get("cases", [])]
    counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in dict.fromkeys(verdicts))
    header = ["case", "dtype", "micro-batch", "verdict", "losses equal", "loss", "norm", "masters", "notes"]
    return [
        f"Engine against a plain loop on the same device, {data.get('options', '')}. Largest differences (loss and "
        f"norm relative, masters absolute). {counts or 'No case finished'} of {data.get('planned', '?')}.",
        "", *_table(header, rows),
    ]  # fmt: skip


def _ranks(data: Data) -> list[str]:
    rows = [[case["name"], case["dtype"], f"{case['verdict']}{': ' + case['why'] if 'why' in case else ''}",
             *(case.get(name, "-") for name in ("losses_differing", "tensors_differing", "hits"))]
            for case in data.get("cases", [])]  # fmt: skip
    lines = _table(["two ranks", "dtype", "verdict", "losses differing", "tensors differing", "hits"], rows)
    if load := data.get("load"):
        lines += ["", f"A load of {format_bytes(int(load['bytes']))} from the host cache, both ranks at once: "
                      f"{_rate(load['load'])}; a plain pinned copy: {_rate(load['pinned_copy'])}."]  # fmt: skip
    return lines


def _engine(data: Data) -> list[str]:
    if "parameters" not in data:
        return []
    lines = [
        f"{data['preset']}, {format_count(data['parameters'])} parameters, "
        f"{'one slot' if data['single_slot'] else 'two slots'}, sequences of {data['seq_len']} tokens, device memory "
        f"{data['device_memory']}, host memory {data['host_memory']}.",
    ]
    if "fill" in data:
        lines.append(f"Filling the store: {format_bytes(data['fill']['bytes'])}, {data['fill']['seconds']:.0f} s.")
    if "largest_parameters" in data:
        lines.append(f"The drive has room for {format_count(int(data['largest_parameters']))} parameters, in one slot.")
    if "uncapped" in data:
        lines.append(f"{data['uncapped']}.")
    header = ["batch", "micro-batch", "s/step", "tokens/s", "model TFLOP/s", "hardware TFLOP/s", "of matmul",
              "predicted", "gpu", "to device", "to host", "ssd", "adam", "largest", "overlap", "device peak",
              "host peak", "read", "written"]  # fmt: skip
    rows = []
    for row in data.get("rows", []):
        if "seconds" not in row:
            rows.append([row["batch"], row["why"], *["-"] * (len(header) - 2)])
            continue
        bounds = row["bounds"]
        fraction = row["matmul_fraction"]
        names = ("gpu", "host_to_device", "device_to_host", "ssd", "adam")
        rows.append([
            row["batch"], row["micro_batch"], f"{row['seconds']:.2f}", f"{row['tokens_per_second']:,.0f}",
            _tflops(row["model_flops_per_second"]), _tflops(row["hardware_flops_per_second"]),
            f"{fraction:.1%}" if fraction else "-",
            f"{row['predicted_seconds']:.2f}" if row.get("predicted_seconds") else "-",
            *(f"{bounds.get(name, 0):.2f}" for name in names),
            row["largest_bound"], f"{row['overlap_efficiency']:.2f}", format_bytes(row["device_peak_bytes"]),
            format_bytes(row["host_peak_bytes"]), format_bytes(row["read_bytes"]), format_bytes(row["written_bytes"]),
        ])  # fmt: skip
    lines += ["", *_table(header, rows), "",
              "Bounds are seconds per step; overlap is the largest of them over s/step. Predicted is s/step as the "
              "planner simulates it with the limits measured above."]  # fmt: skip
    for row in data.get("rows", []):
        waits = sorted((row.get("idle") or {}).items(), key=lambda item: -item[1])
        if waits:
            listed = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in waits)
            lines.append(f"Batch {row['batch']}: the device waited for {listed} per step.")
    timeline = data.get("timeline")
    if isinstance(timeline, dict):
        lines += ["", *_timeline(timeline)]
    elif timeline:
        lines += ["", f"Timeline: {timeline}"]
    return lines


def _in_memory(data: Data) -> list[str]:
    if "parameters" not in data:
        return []
    card = f" of {format_bytes(data['device_memory_bytes'])}" if "device_memory_bytes" in data else ""
    header = ["batch", "micro-batch", "s/step", "tokens/s", "model TFLOP/s", "hardware TFLOP/s", "device peak",
              "engine / in memory"]  # fmt: skip
    rows = []
    for row in data.get("rows", []):
        if "seconds" not in row:
            rows.append([row["batch"], row["why"], *["-"] * 6])
            continue
        ratio, peak = row.get("engine_over_in_memory"), row["device_peak_bytes"]
        rows.append([
            row["batch"], row["micro_batch"], f"{row['seconds']:.3f}", f"{row['tokens_per_second']:,.0f}",
            _tflops(row["model_flops_per_second"]), _tflops(row["hardware_flops_per_second"]),
            format_bytes(peak) if peak else "-", f"{ratio:.2f}" if ratio else "-",
        ])  # fmt: skip
    return [
        f"{data['preset']}, plain PyTorch with everything in device memory (the whole card{card}): bf16, fp32 masters, "
        "fused AdamW, checkpointing per block.", "", *_table(header, rows),
    ]  # fmt: skip


def _timeline(data: Data) -> list[str]:
    if "span_us" not in data:
        return [str(data.get("timeline", ""))]
    span = data["span_us"]
    lines = [
        f"Timeline of one step ({data['batch']} x {data['seq_len']} tokens, {data['trace']}): {span / 1e6:.3f} s from "
        f"first kernel to last, {data['kernels']} kernels; idle {data['idle_us'] / 1e6:.3f} s "
        f"({data['idle_us'] / span:.1%}) in {data['gaps']} gaps, of which {data['idle_in_launches_us'] / 1e6:.3f} s in "
        "gaps of at most 10 us.",
        "",
        *_table(
            ["gap at, s", "ms", "after", "before", "copies meanwhile", "host meanwhile"],
            [
                [f"{gap['at_us'] / 1e6:.3f}", f"{gap['length_us'] / 1e3:.2f}", f"`{gap['after']}`",
                 f"`{gap['before']}`", f"{gap['copying']:.0%}", gap["host"]]
                for gap in data["largest"]
            ],
        ),
        "",
        *_table(
            ["kernel", "calls", "ms"],
            [[f"`{row['name']}`", row["calls"], f"{row['us'] / 1e3:.1f}"] for row in data["longest_kernels"]],
        ),
    ]  # fmt: skip
    waits = data.get("host_waits") or {}
    if waits:
        listed = ", ".join(f"{resource} ({count})" for resource, count in waits.items())
        lines += ["", f"Lines at which the host waits for the GPU, and how often in one step: {listed}."]
    return lines
