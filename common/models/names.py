"""Find out at once whether the model that the user names exists: nothing slow is imported."""

import os
import re
from pathlib import Path

from common.errors import UserError, did_you_mean
from common.files import preset_files
from common.hub import is_hub_name, is_in_cache, may_download

# In a directory that describes a GGUF file (:mod:`common.models.checkpoint.gguf_table`)
GGUF_TABLE = "gguf.json"


def check_model(name: str) -> None:
    """Reject a name that is no checkpoint directory, GGUF file, preset, or hub's model that can be had."""
    directory = Path(name).expanduser()
    _refuse_two_models(directory)
    if find_gguf(directory) or (directory / "config.json").is_file():
        return
    presets = preset_files("models")
    if name in presets:
        return
    if directory.is_dir():
        raise UserError(_not_a_checkpoint(directory))
    if not is_hub_name(name):
        raise UserError(_not_found(name, directory, list(presets)))
    if not (may_download() or is_in_cache(name)):
        raise not_in_cache(name)


def not_in_cache(name: str) -> UserError:
    """Return the error for a hub's model that is not in the local cache, or not all of it."""
    from huggingface_hub import constants

    return UserError(
        f"{name!r} is neither a directory nor in the local cache of huggingface_hub ({constants.HF_HUB_CACHE})."
        f"{_nearest_directory(Path(name))} Fetch it with `hf download {name}`, or add --download.{_preset_of(name)}"
    )


def _preset_of(name: str) -> str:
    """Return what plans a hub's model without its weights, if there is a preset with its name."""
    preset = Path(name).name.lower()
    return f" A plan needs no weights: --model {preset}." if preset in preset_files("models") else ""


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that a user names: the path itself, or the only one in a directory without a checkpoint.

    Of a file that is split, it is the first part.
    """
    if path.suffix == ".gguf" and path.is_file():
        return path
    if not path.is_dir() or any(path.glob("*.safetensors")) or (path / GGUF_TABLE).is_file():
        # It describes a file
        return None
    files = sorted(path.glob("*.gguf"))
    if files and files == gguf_parts(files[0]):
        return files[0]
    if len(files) > 1:
        raise UserError(f"{path} has {len(files)} GGUF files: give one of them, {files[0]} for instance.")
    return files[0] if files else None


def gguf_parts(file: Path) -> list[Path]:
    """Return all files of a GGUF file that is split (``x-00001-of-00003.gguf``), else the file itself.

    Raises:
        UserError: some are missing.
    """
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", file.name)
    if match is None:
        return [file]
    parts = [
        file.with_name(f"{match[1]}-{number:05}-of-{match[2]}.gguf") for number in range(1, int(match[2]) + 1)
    ]
    missing = next((part for part in parts if not part.is_file()), None)
    if missing is not None:
        raise UserError(f"{missing} is missing, which {file.name} is a part of the same model with.")
    return parts


def _refuse_two_models(directory: Path) -> None:
    """Refuse adapters next to the weights of a whole model: transformers loads the adapters, and what they name."""
    adapters = ("adapter_config.json", "adapter_model.safetensors")
    others = [file for file in directory.glob("*.safetensors") if file.name not in adapters]
    if others and (directory / adapters[0]).exists() and (directory / "config.json").is_file():
        raise UserError(
            f"{directory} holds {adapters[0]} next to the weights of a whole model, and transformers would load these "
            "with the adapters, or others that they name: move the files adapter_* to another directory."
        )


def _not_a_checkpoint(directory: Path) -> str:
    if (directory / "adapter_config.json").is_file():
        return (
            f"{directory} holds a PEFT adapter, not a model: give the model that it was made for, and --adapter "
            f"{directory}."
        )
    inside = sorted(entry.parent for entry in directory.glob("*/config.json"))
    hint = f" There is one in {inside[0]}." if inside else ""
    return f"{directory} has no config.json, so it is not a Hugging Face checkpoint.{hint}"


def _not_found(name: str, directory: Path, presets: list[str]) -> str:
    if directory.is_file():
        return f"{directory} is a file. Give the checkpoint's directory: {directory.parent}"
    hints = did_you_mean(name, presets)
    if os.sep in name or name.startswith((".", "~")):
        lost = f" There is no directory {directory.parent} either; nothing is downloaded."
        hints += _nearest_directory(directory) if directory.parent.is_dir() else lost
    if not hints:
        hints = f" Presets: {', '.join(sorted(presets))}."
    return f"{name!r} is neither a checkpoint directory nor a preset.{hints}"


def _nearest_directory(path: Path) -> str:
    siblings = (
        [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
    )
    near = did_you_mean(path.name, siblings)
    return f"{near[:-1]} in {path.parent}?" if near else ""
