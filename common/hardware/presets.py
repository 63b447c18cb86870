"""Presets of GPUs and drives: what data sheets and published measurements say of them.

The files are in ``configs/gpus`` and ``configs/drives``; every number in them has its source above it. A number without
a source is left out there and None here. A file of the user's in the same form replaces a name.
"""

import math
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from common.errors import UserError, did_you_mean
from common.files import preset_files, read_text_file
from common.hardware.compute_rates import MEMORY_PART, ComputeRates
from common.units import parse_bytes

# Bytes per second that a consumer drive writes when its fast cache is full, without a measurement: the Samsung 980
# PRO's rate (TechPowerUp's review, page 6). All presets without a measured rate have the same kind of flash (TLC).
TLC_BYTES_PER_SECOND = 1.5e9

# Part of a link's rate that copies reach, where there is no measurement: it is 24.5 of 31.5 GB/s on an A100, 25.6 of
# 31.5 on an RTX 4090, and 56.3 of 63 on an RTX 5090.
COPY_FRACTION = 0.8

# Preset whose parts of the peak a file's GPU is assumed to reach, if the file neither gives rates nor names another.
LIKE = "a100-80g"


@dataclass(frozen=True)
class GpuPreset:
    """The facts about a kind of GPU."""

    name: str  # Name of the preset: `rtx-4090`
    title: str  # The driver's name for it: `NVIDIA GeForce RTX 4090`
    memory_bytes: int  # Bytes of all its memory
    link_bytes_per_second: float  # Rate of its PCI Express lanes, in each direction
    # Rate of copies from page-locked host memory, while nothing goes the other way
    upload_bytes_per_second: float
    # Rate of copies to page-locked host memory, while nothing goes the other way
    download_bytes_per_second: float
    bf16_flops_per_second: float  # Peak of dense bf16 matrix products with fp32 accumulation
    compute: ComputeRates  # Rates of products, attention, and memory
    like: str | None  # Name of the preset of whose peak these are the same parts; None if they are this GPU's
    is_integrated: bool = False  # Whether its memory is the host's, too (`unified = true` in the file)

    @classmethod
    def of(cls, name: str, fields: dict[str, Any]) -> "GpuPreset":
        """Return the preset with these fields of a file; a rate in it is in 10^9 bytes or 10^12 operations a second."""
        link = fields["link_gb_per_s"] * 1e9
        up, down = (
            fields[key] * 1e9 if key in fields else link * COPY_FRACTION
            for key in ("upload_gb_per_s", "download_gb_per_s")
        )
        flops = fields["bf16_tflops"] * 1e12
        like = None
        if "dense_tflops" in fields:
            compute = ComputeRates.of(fields)
        else:
            like = fields.get("like", LIKE)
            model = _read(like, _file_of(like), cls)
            bandwidth = _times(1e9 * MEMORY_PART, fields.get("memory_gb_per_s"))
            factor = flops / model.bf16_flops_per_second
            compute = model.compute.scaled(factor, bandwidth or factor * model.compute.memory)
        memory = parse_bytes(fields["memory"])
        unified = fields.get("unified", False) is True
        return cls(name, fields["name"], memory, link, up, down, flops, compute, like, unified)


@dataclass(frozen=True)
class DrivePreset:
    """The facts about a kind of SSD."""

    name: str  # Name of the preset: `samsung-990-pro-2tb`
    title: str  # Its maker's name for it
    capacity_bytes: int  # Capacity, as sold
    read_bytes_per_second: float  # Rate of sequential reads
    write_bytes_per_second: float  # Rate of sequential writes, into the fast cache if it has one
    sustained_write_bytes_per_second: float | None  # Rate of sequential writes when the fast cache is full
    cache_bytes: int | None  # Bytes that an empty drive takes at the fast rate; None if unknown
    endurance_bytes: int | None  # Bytes that its maker warrants may be written

    @classmethod
    def of(cls, name: str, fields: dict[str, Any]) -> "DrivePreset":
        """Return the preset with these fields of a file; a rate in it is in 10^9 bytes a second."""
        endurance = _times(1e12, fields.get("endurance_tb"))
        return cls(
            name=name,
            title=fields["name"],
            capacity_bytes=parse_bytes(fields["capacity"]),
            read_bytes_per_second=fields["read_gb_per_s"] * 1e9,
            write_bytes_per_second=fields["write_gb_per_s"] * 1e9,
            sustained_write_bytes_per_second=_times(1e9, fields.get("sustained_write_gb_per_s")),
            cache_bytes=parse_bytes(fields["cache"]) if "cache" in fields else None,
            endurance_bytes=None if endurance is None else round(endurance),
        )


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else value * factor


Preset = TypeVar("Preset", GpuPreset, DrivePreset)


def gpu_preset(name: str) -> GpuPreset:
    """Return the GPU called ``name`` (``rtx-4090``, ``4090``, ``A100``, the driver's name), or of a ``.toml`` file."""
    return (
        _read_file(name, GpuPreset)
        if name.endswith(".toml")
        else _find("GPU", name, _presets("gpus", GpuPreset))
    )


def drive_preset(name: str) -> DrivePreset:
    """Return the drive called ``name`` (``intel-p5510-3.84tb``, ``p5510``, ``990 Pro 4TB``), or of a ``.toml`` file."""
    presets = _presets("drives", DrivePreset)
    return _read_file(name, DrivePreset) if name.endswith(".toml") else _find("drive", name, presets)


def gpu_names() -> list[str]:
    return sorted(preset_files("gpus"))


def drive_names() -> list[str]:
    return sorted(preset_files("drives"))


def _presets(folder: str, kind: type[Preset]) -> dict[str, Preset]:
    return {name: _read(name, file, kind) for name, file in preset_files(folder).items()}


def _read(name: str, file: Path, kind: type[Preset]) -> Preset:
    return kind.of(name, tomllib.loads(read_text_file(file)))


def _file_of(gpu: str) -> Path:
    files = preset_files("gpus")
    if gpu not in files:
        raise ValueError(f"there is no preset {gpu!r} that it could be like")
    return files[gpu]


def _read_file(name: str, kind: type[Preset]) -> Preset:
    path = Path(name).expanduser()
    try:
        preset = _read(path.stem, path, kind)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except KeyError as error:
        raise UserError(f"{path} does not give {error}. The files in configs have the form.") from error
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise UserError(f"{path} is not in the form of the files in configs: {error}") from error
    for field, value in vars(preset).items():
        if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < math.inf:
            raise UserError(f"{path} gives {field} = {value:g}, and it must be above 0.")
    return preset


def _find(kind: str, name: str, presets: dict[str, Preset]) -> Preset:
    exact = {_key(known): preset for known, preset in presets.items()}
    if _key(name) in exact:
        return exact[_key(name)]
    parts = re.findall(r"[a-z0-9.]+", name.lower())
    matches = [
        known
        for known, preset in presets.items()
        if parts and all(_key(part) in _key(known) + " " + _key(preset.title) for part in parts)
    ]
    if len(matches) == 1:
        return presets[matches[0]]
    if matches:
        raise UserError(
            f"{name!r} matches several {kind} presets: {', '.join(sorted(matches))}. Name one of them."
        )
    hint = did_you_mean(name.lower(), presets) or f" There are {', '.join(sorted(presets))}."
    raise UserError(f"{name!r} is not a {kind} preset.{hint}")


def drive_preset_of(model: str) -> DrivePreset | None:
    """Return the preset of a drive that calls itself ``model``; None if there is none, or several."""
    words = _words(model)
    matches = [preset for preset in _presets("drives", DrivePreset).values() if _words(preset.title) <= words]
    return matches[0] if len(matches) == 1 else None


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9.+]+", name.lower()))


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
