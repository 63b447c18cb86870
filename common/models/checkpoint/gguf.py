"""Read GGUF files (llama.cpp's): dequantized once, into a checkpoint directory in the user's cache.

transformers knows the families: configuration, tokenizer, and how llama.cpp permutes and names their tensors. It loads
all of a file at once; here, one tensor is in memory at a time.
"""

import fcntl
import hashlib
import importlib.util
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from common.activity import activity
from common.errors import UserError, on_one_line
from common.files import CACHE_VARIABLE, cache_directory
from common.models.checkpoint.export import CheckpointWriter
from common.models.checkpoint.shards import INDEX, SINGLE
from common.models.meta_model import build_meta_model
from common.units import format_bytes

_SHARD_BYTES = 1 << 30


def dequantized(file: Path) -> Path:
    """Return a checkpoint directory of a GGUF file's content in fp32, the same while the file is unchanged."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"{file} is read with the package gguf, which is not installed: pip install gguf")
    stat = file.stat()
    key = f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    directory = cache_directory() / "gguf" / f"{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ranks of one node may come at once
            if not any((directory / name).is_file() for name in (SINGLE, INDEX)):
                with activity(f"dequantizing {file.name}, once", announced=True):
                    _write(file, directory)
    except OSError as error:
        raise UserError(
            f"{file} cannot be dequantized into {directory}: {error.strerror or error}. ${CACHE_VARIABLE} names "
            "another directory for the cache."
        ) from error
    return directory


def _write(file: Path, directory: Path) -> None:
    try:
        names = {"gguf_file": file.name, "local_files_only": True}
        config = AutoConfig.from_pretrained(file.parent, **names)
        model = build_meta_model(config)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **names)
        parts = _parts(file, model, config.to_dict())
    except Exception as error:  # anything: transformers and gguf check files in many ways
        raise UserError(f"transformers cannot read {file}: {on_one_line(error)}") from error
    needed, free = 4 * sum(value.numel() for value in model.parameters()), shutil.disk_usage(directory).free
    if needed > free:
        raise UserError(
            f"{file} takes {format_bytes(needed)} dequantized, and {directory} has {format_bytes(free)} free: "
            f"${CACHE_VARIABLE} names another directory for the cache."
        )
    tokenizer.save_pretrained(directory)
    writer = CheckpointWriter(directory, model, config, torch.float32, _SHARD_BYTES, allow_nonfinite=True)
    for named in parts:
        writer.add(named)
    writer.finish()


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
