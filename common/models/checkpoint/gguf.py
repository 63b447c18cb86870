"""Read GGUF files (llama.cpp's): dequantized once, into a checkpoint directory in the user's cache.

transformers knows the families: configuration, tokenizer, and how llama.cpp permutes and names their tensors. It loads
all of a file at once; here, one tensor is in memory at a time.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from common.activity import activity
from common.errors import UserError, on_one_line
from common.files import CACHE_VARIABLE, cache_directory, replace_file, sampled_digest
from common.models.checkpoint.export import CheckpointWriter
from common.models.checkpoint.gguf_header import check_header
from common.models.checkpoint.gguf_metadata import ROPE_FACTORS, apply_metadata, apply_rope_factors
from common.models.checkpoint.gguf_tokenizer import read_tokenizer
from common.models.meta_model import build_meta_model
from common.units import format_bytes

_SHARD_BYTES = 1 << 30


SOURCE = "source.json"  # Written last: the file that a conversion was made of, and what it consists of
NAMED_BY = "adapters.txt"  # Directories of adapters that were trained on the conversion, one per line
_FORMAT = 2  # To be raised when files are converted in another way
_CHECKED_BYTES = 64 << 20  # Of larger files, a sample is compared
_held: dict[Path, TextIO] = {}  # Locks of the conversions that this process uses, until it ends


def conversions_directory() -> Path:
    """Return the directory in the cache that holds the conversions of GGUF files, one folder each."""
    return cache_directory() / "gguf"


def dequantized(file: Path) -> Path:
    """Return a checkpoint directory of a GGUF file's content in fp32, the same while the file is unchanged.

    It is kept as long as this process lives. Conversions of earlier contents of the file are removed unless a process
    uses them or an adapter names them as its base.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"{file} is read with the package gguf, which is not installed: pip install gguf")
    key = _key(file)
    directory = conversions_directory() / f"{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = _held.get(directory) or (directory / "lock").open("a")
        fcntl.flock(lock, fcntl.LOCK_SH)
        if not _is_whole(file, directory):
            fcntl.flock(lock, fcntl.LOCK_EX)  # ranks of one node may come at once
            if not _is_whole(file, directory):
                _remove_content(directory)
                with activity(f"dequantizing {file.name}, once", announced=True):
                    _write(file, directory)
                if _key(file) != key:
                    _remove_content(directory)
                    raise UserError(
                        f"{file} was changed or replaced while it was read, and old and new content would be mixed: "
                        "start again once nothing writes there."
                    )
                _seal(file, directory)
            fcntl.flock(lock, fcntl.LOCK_SH)
        _held[directory] = lock
        _remove_older(file, directory)
    except OSError as error:
        raise UserError(
            f"{file} cannot be dequantized into {directory}: {error.strerror or error}. ${CACHE_VARIABLE} names "
            "another directory for the cache."
        ) from error
    return directory


def _key(file: Path) -> str:
    """Return what tells a file, and what it held, from others."""
    status = file.stat()
    # Tools that copy may keep the time of a change, but not that of the copy.
    return f"{file.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def source_of(checkpoint: Path) -> Path | None:
    """Return the GGUF file that a checkpoint directory in the cache was made of; None: it was not."""
    if checkpoint.parent != conversions_directory() or not (checkpoint / SOURCE).is_file():
        return None
    return Path(json.loads((checkpoint / SOURCE).read_text())["source"])


def keep_for_adapter(checkpoint: Path, adapter: Path) -> None:
    """Note that an adapter was trained on ``checkpoint``, if that is a conversion."""
    if source_of(checkpoint) is not None and str(adapter.absolute()) not in adapters_of(checkpoint):
        with (checkpoint / NAMED_BY).open("a") as names:
            names.write(f"{adapter.absolute()}\n")


def _is_whole(file: Path, directory: Path) -> bool:
    """Return whether the files are those that were made of ``file``: by size and SHA-256, of large ones of 4 MiB."""
    try:
        content = json.loads((directory / SOURCE).read_text())
        is_whole = all(_state(directory / name) == state for name, state in content["files"].items())
        return is_whole and content["format"] == _FORMAT and content["source"] == str(file.resolve())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _state(file: Path) -> list[Any]:
    nbytes = file.stat().st_size
    is_large = nbytes > _CHECKED_BYTES
    return [nbytes, sampled_digest(file, nbytes) if is_large else hashlib.sha256(file.read_bytes()).hexdigest()]


def _remove_content(directory: Path) -> None:
    """Remove what a killed or damaged conversion has left."""
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in ("lock", NAMED_BY):
            path.unlink()


def _seal(file: Path, directory: Path) -> None:
    files = [path for path in directory.iterdir() if path.is_file() and path.name not in ("lock", NAMED_BY)]
    for path in files:
        with path.open("rb") as written:
            os.fsync(written.fileno())
    states = {path.name: _state(path) for path in files}
    content = {"format": _FORMAT, "source": str(file.resolve()), "files": states}
    replace_file(directory / SOURCE, json.dumps(content, indent=1), durable=True)


def _remove_older(file: Path, directory: Path) -> None:
    for other in directory.parent.iterdir():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # another process uses or removes it
            if other == directory or json.loads((other / SOURCE).read_text())["source"] != str(file.resolve()):
                continue
            if any(Path(name, "adapter_config.json").exists() for name in adapters_of(other)):
                continue
            with (other / "lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (other / SOURCE).unlink()  # first: what is left after a crash counts as damaged
                shutil.rmtree(other)


def adapters_of(conversion: Path) -> list[str]:
    """Return the directories of the adapters that were saved with this conversion as their base."""
    try:
        return list(dict.fromkeys((conversion / NAMED_BY).read_text().splitlines()))
    except OSError:
        return []


def _write(file: Path, directory: Path) -> None:
    try:
        check_header(file)
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
        keys = _apply_metadata(config, file)
        model = build_meta_model(config)
        tokenizer = read_tokenizer(file, keys)
        parts = _parts(file, model, config.to_dict())
    except Exception as error:  # anything: transformers and gguf check files in many ways
        raise UserError(f"transformers cannot read {file}: {on_one_line(error)}") from error
    needed, free = 4 * sum(value.numel() for value in model.parameters()), shutil.disk_usage(directory).free
    if needed > free:
        raise UserError(
            f"{file} takes {format_bytes(needed)} dequantized, and {directory} has {format_bytes(free)} free: "
            f"${CACHE_VARIABLE} names another directory for the cache."
        )
    writer = CheckpointWriter(directory, model, config, torch.float32, _SHARD_BYTES, allow_nonfinite=True)
    tokenizer.save_pretrained(writer.folder)
    for named in parts:
        writer.add(named)
    writer.finish()


def _apply_metadata(config: PreTrainedConfig, file: Path) -> dict[str, Any]:
    """Apply what the file says of its model and transformers does not read, and return all metadata by name."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(file)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    apply_metadata(config, keys["general.architecture"], keys)
    for tensor in reader.tensors:
        if tensor.name == ROPE_FACTORS:
            apply_rope_factors(config, dequantize(tensor.data, tensor.tensor_type))
    return keys


def _parts(file: Path, model: PreTrainedModel, config: dict[str, Any]) -> Iterator[dict[str, torch.Tensor]]:
    """Return the parameters that the tensors of ``file`` make, each time as few as belong together."""
    from gguf import GGUFReader, dequantize
    from transformers import modeling_gguf_pytorch_utils as gguf_utils

    reader = GGUFReader(file)
    architecture = gguf_utils.read_field(reader, "general.architecture")[0]
    processor = gguf_utils.TENSOR_PROCESSORS.get(architecture, gguf_utils.TensorProcessor)(config=config)
    targets: dict[str, str] = {}
    for part, prefix in ((model.base_model, f"{model.base_model_prefix}."), (model, "")):
        # Without submodules, for each of which transformers would make gguf's table of names again.
        flat = SimpleNamespace(config=model.config, state_dict=part.state_dict, named_children=list)
        targets |= gguf_utils.get_gguf_hf_weights_map(flat, processor, qual_name=prefix)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    groups = defaultdict(list)  # two tensors may make one parameter: the gate and up projections of experts
    for tensor in reader.tensors:
        if tensor.name == ROPE_FACTORS:  # it is in the configuration
            continue
        target = targets.get(tensor.name) or targets.get(tensor.name.removesuffix(".weight"))  # that of experts
        if target not in parameters:
            raise ValueError(f"it holds {tensor.name}, which {type(model).__name__} has no parameter for")
        groups[target].append(tensor)

    missing = [name for name, _ in model.named_parameters() if name not in groups]
    if missing:
        raise ValueError(f"it lacks {missing[0]}")

    def converted() -> Iterator[dict[str, torch.Tensor]]:
        for target, tensors in groups.items():
            values: dict[str, torch.Tensor] = {}
            for tensor in tensors:
                numbers, parsed = dequantize(tensor.data, tensor.tensor_type), {"tensors": values}
                result = processor.process(
                    weights=numbers, name=tensor.name, tensor_key_mapping=targets, parsed_parameters=parsed
                )
                if result.name is not None:  # else it is in `values` already
                    values[target] = torch.from_numpy(np.array(result.weights, dtype=np.float32))
            yield values

    return converted()
