"""Find the model that the user names: a checkpoint directory, a preset, or a transformers configuration."""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from common.errors import UserError, on_one_line
from common.files import FILE_BYTES, check_regular, preset_files, read_text_file
from common.hub import may_download
from common.models.bounds import check_counts
from common.models.checkpoint.compressed.formats import accept_config
from common.models.checkpoint.gguf import described
from common.models.names import check_model, find_gguf, not_in_cache
from common.models.task_type import model_class, refusal

# Files of a hub's model that are fetched: weights in other formats are not read.
_WANTED_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
# Those that transformers reads as a whole.
_SMALL_FILES = (
    "*config*.json", "*.index.json", "tokenizer*", "vocab*", "merges*", "*_tokens*.json", "special_tokens_map.json",
    "chat_template*", "*.jinja", "*.model", "*.tiktoken", "additional_chat_templates/*",
)  # fmt: skip
_CONFIG_BYTES = 16 << 20  # Largest config.json


def preset_names() -> list[str]:
    """Return the names of all model presets, sorted."""
    return sorted(preset_files("models"))


def load_config(model: str | os.PathLike[str] | PreTrainedConfig) -> tuple[PreTrainedConfig, Path | None]:
    """Return the configuration of a model, and its checkpoint directory if it has one.

    Args:
        model: a directory with config.json, a GGUF file or a directory with one, a preset's name, a hub's name
            (``owner/name``) whose snapshot is in the local cache, or a configuration (returned as it is).
    """
    if isinstance(model, PreTrainedConfig):
        _refuse_unsupported(model, model.model_type)
        accept_config(model, model.model_type, has_weights=False)
        return model, None

    name = os.fspath(model)
    check_model(name)
    directory = Path(name).expanduser()
    if (gguf := find_gguf(directory)) is not None:
        return load_config(described(gguf))
    if (directory / "config.json").is_file():
        config = _read_directory(directory)
        try:
            _refuse_unsupported(config, name)
            accept_config(config, name, has_weights=True)
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            # Of fields that transformers lets pass
            raise UserError(
                f"{directory / 'config.json'} cannot be understood: {on_one_line(error)}"
            ) from error
        return config, directory
    presets = preset_files("models")
    if name in presets:
        fields = tomllib.loads(presets[name].read_text(encoding="utf-8"))
        return AutoConfig.for_model(**fields), None
    return load_config(hub_snapshot(name))


def hub_snapshot(name: str) -> Path:
    """Return the snapshot of a hub's model in the local cache, downloaded if ``may_download`` allows it."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):  # not in the cache, or only a part of it
        pass
    if not may_download():
        raise not_in_cache(name)
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_WANTED_FILES))
    except Exception as error:  # the network's, the hub's and the disk's errors
        raise UserError(f"{name!r} cannot be downloaded: {type(error).__name__}: {error}") from error


def _check_files(directory: Path) -> None:
    """Reject files of a checkpoint that would be read without end, or into more memory than any of them needs."""
    for path in sorted(
        {path for pattern in (*_WANTED_FILES, *_SMALL_FILES) for path in directory.glob(pattern)}
    ):
        try:
            if not path.is_dir():
                check_regular(path)
            if path.stat().st_size > FILE_BYTES and any(path.match(pattern) for pattern in _SMALL_FILES):
                raise UserError(
                    f"{path} has {path.stat().st_size:,} bytes; such files have at most {FILE_BYTES:,}."
                )
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}.") from error


# Keys of a config.json that are no fields of a configuration: its class is known, and its directory is this one.
_NOT_FIELDS = ("model_type", "auto_map", "_name_or_path")


def _read_directory(directory: Path) -> PreTrainedConfig:
    _check_files(directory)
    try:
        fields = json.loads(read_text_file(directory / "config.json", _CONFIG_BYTES))
        check_counts(fields, str(directory / "config.json"))
        kind = _known_kind(fields)
        if kind is not None:
            known = {name: value for name, value in fields.items() if name not in _NOT_FIELDS}
            return AutoConfig.for_model(kind, **known, _name_or_path=os.fspath(directory))
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        _check_rope(fields, config, directory / "config.json")
        return config
    except UserError:
        raise
    # transformers raises OSError for bad JSON, KeyError and ValueError for an unknown model type, and its validators'
    # own classes for a bad field. In each case, the file is what the user has to look at.
    except Exception as error:
        raise UserError(
            f"{directory / 'config.json'} is not a configuration transformers can read: {on_one_line(error)}"
        ) from error


def _check_rope(fields: dict[str, Any], config: PreTrainedConfig, file: Path) -> None:
    """Refuse rotary embeddings that are written in the forms of transformers 4 and 5 at once, of which one is read."""
    for part, read in ((fields, config), (fields.get("text_config"), getattr(config, "text_config", None))):
        rope = getattr(read, "rope_parameters", None)
        if not isinstance(part, dict) or not isinstance(rope, dict):
            continue
        written = [
            part,
            *(part[name] for name in ("rope_scaling", "rope_parameters") if isinstance(part.get(name), dict)),
        ]
        for name in ("rope_theta", "partial_rotary_factor", *(["factor"] if len(written) > 2 else [])):
            for number in [
                source[name] for source in written if source.get(name) is not None and name in rope
            ]:
                if number != rope[name]:
                    raise UserError(
                        f"{file} says {name} = {number}, and transformers reads {rope[name]}: rope_parameters is "
                        "there, and what it replaces (rope_theta, rope_scaling). Write all of it in rope_parameters."
                    )


def _known_kind(fields: dict[str, Any]) -> str | None:
    """Return the model type whose class a configuration of an unknown type names (Kimi K2: DeepSeek-V3's)."""
    if fields.get("model_type") in CONFIG_MAPPING:
        return None
    named = set(fields.get("architectures") or ())
    return next((kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name in named), None)


def _refuse_unsupported(config: PreTrainedConfig, name: str) -> None:
    if model_class(config) is None:
        raise UserError(f"{name} {refusal(config)}.")
