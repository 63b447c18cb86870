"""Read safetensors files and tensors of GGUF files, and convert between a model's parameters and the tensors on disk.

Layout of a file (https://huggingface.co/docs/safetensors): 8 bytes with the header's length, little-endian; the header,
JSON with dtype, shape and byte range of every tensor; the tensors.
"""

import copy
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from common.errors import FinetuneError, UserError
from common.files import FILE_BYTES, read_text_file
from common.models.checkpoint.gguf_table import TABLE, GgufTable
from common.models.checkpoint.watched import WatchedFiles


@dataclass
class Conversion:
    """Tensors on disk that together make one parameter, or (one fused on disk, several in the model) several."""

    target: str  # Name of the parameter in the model; of several, the first
    # Rule of transformers that makes the parameter; None if it is stored as it is
    rule: WeightConverter | None
    # Pairs (pattern of the rule, name on disk), in order
    parts: list[tuple[str, str]] = field(default_factory=list)

    def convert(self, model: PreTrainedModel, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parameters, by name in the model. Peak memory: the tensors read and about as much again."""
        if self.rule is None:
            return {self.target: read(self.parts[0][1])}
        rule = copy.deepcopy(self.rule)  # a rule collects the tensors that it is given
        for pattern, name in self.parts:
            rule.add_tensor(self.target, name, pattern, read(name))  # type: ignore[arg-type]  # or a Future
        converted = rule.convert(self.target, model=model, config=model.config)
        if isinstance(converted, tuple):  # transformers 5.0 returns its record of errors, too
            converted = converted[0]
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def plan_conversions(model: PreTrainedModel, stored: Iterable[str]) -> tuple[list[Conversion], list[str]]:
    """Plan how the tensors on disk become a model's parameters and persistent buffers; also return the unused names.

    Names are matched as in ``transformers.core_model_loading.convert_and_load_state_dict_in_model``.
    """
    parameters = model.state_dict()
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}

    conversions: dict[str, Conversion] = {}
    unused = []
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, parameters)
        if target not in parameters and name in parameters:
            target, pattern = rename_source_key(name, [], [], model.base_model_prefix, parameters)
        if target not in parameters:
            unused.append(name)
            continue
        rule = None if pattern is None else by_pattern[pattern]
        conversion = conversions.setdefault(target, Conversion(target, rule))
        conversion.parts.append((pattern or name, name))
    return list(conversions.values()), unused


def to_disk(model: PreTrainedModel, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return some of a model's parameters (for instance a block's) by the names and in the layouts of a checkpoint.

    Names and layouts are those that ``save_pretrained`` writes. Parameters that are fused on disk but not in the model
    have to come in one call. The results may be views of the arguments.
    """
    return revert_weight_conversion(model, dict(named))


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip

# Parts of names that stand for wrappers of training libraries.
_WRAPPERS = re.compile(r"(?:(?<=^)|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")

_HEADER_BYTES = 100_000_000  # Largest header that the format allows


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    # Name in the file, which differs from the model's where a training library has put its wrappers into it
    name: str
    start: int = 0  # Its first byte in the file


def rounding(checkpoint: Path | None, computes_in: str) -> str:
    """Return a sentence for a plain fp16 or fp32 checkpoint whose weights become bf16; empty for any other.

    Args:
        checkpoint: its directory, if there is one.
        computes_in: the dtype in which its weights are kept, ``bf16`` or ``fp32``.
    """
    if checkpoint is None or computes_in != "bf16":
        return ""
    elements = Counter[torch.dtype]()
    for stored in Shards(checkpoint).tensors.values():
        elements[stored.dtype] += math.prod(stored.shape)
    # Families keep routers and norms in fp32 next to weights in bf16.
    wide = (
        torch.float16 if torch.float16 in elements else max(elements, key=elements.__getitem__, default=None)
    )
    if wide not in (torch.float16, torch.float32):
        return ""
    name = "fp16" if wide == torch.float16 else "fp32"
    return f"the checkpoint is in {name}; its weights are rounded to bf16 (--dtype fp32 keeps them)"


class Shards:
    """The safetensors files of a checkpoint directory, or the tensors of a GGUF file that it describes, as their bytes.

    Their headers are read, and checked against the files' sizes, when it is made.

    Raises:
        UserError: the directory has no safetensors.
        FinetuneError: a shard is missing or damaged; the message names it, and the first tensor that is affected.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.watched = WatchedFiles(directory)
        tensors: dict[str, StoredTensor] = _gguf_tensors(directory)
        for file, expected in _shard_files(directory).items():
            header = read_header(file)
            for name in expected:
                if name not in header:
                    raise FinetuneError(
                        f"{file} lacks the tensor {name}, which {directory / INDEX} says is in it."
                    )
            tensors.update({name: header[name] for name in expected} if expected else header)
        names = without_wrappers(tensors)
        self.files = {names[name]: stored for name, stored in tensors.items()}
        """Tensors in the files, by the names without wrappers."""
        self.tensors = self.files  # Tensors that can be read, by name

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor in its own dtype, into its own memory.

        The file is read, not mapped: mapped pages would count as this process's memory until the file is closed.
        """
        stored = self.files[name]
        return _read_elements(stored, 0, math.prod(stored.shape)).view(stored.shape)

    def reads_rows(self, name: str) -> bool:
        """Return whether :meth:`read_rows` reads no more of a tensor than these rows."""
        return len(self.files[name].shape) > 0

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read rows ``start`` to ``stop`` of a tensor."""
        stored = self.files[name]
        rows, *row = stored.shape
        stop = min(stop, rows)
        width = math.prod(row)
        return _read_elements(stored, start * width, stop * width).view(stop - start, *row)


def _gguf_tensors(directory: Path) -> dict[str, StoredTensor]:
    if not (directory / TABLE).is_file():
        return {}
    return {
        name: StoredTensor(directory / entry.file, torch.uint8, entry.stored_shape, entry.name, entry.start)
        for name, entry in GgufTable(directory).entries.items()
    }


def _read_elements(stored: StoredTensor, first: int, stop: int) -> torch.Tensor:
    """Read elements ``first`` to ``stop`` of a tensor, flat. ``safetensors`` takes nine times as long for rows."""
    values = torch.empty(stop - first, dtype=stored.dtype)
    try:
        with stored.file.open("rb", buffering=0) as file:
            file.seek(stored.start + first * stored.dtype.itemsize)
            missing = values.view(torch.uint8).numpy().data
            while missing and (count := file.readinto(missing)):
                missing = missing[count:]
    except OSError as error:
        raise FinetuneError(f"Cannot read {stored.name} from {stored.file}: {error}") from error
    if missing:
        raise FinetuneError(
            f"{stored.file.resolve()} is truncated: it ends within {stored.name}. Download it again."
        )
    return values


def without_wrappers(names: Iterable[str]) -> dict[str, str]:
    """Return every name without the wrappers of DDP, FSDP and ``torch.compile``: ``module.`` before all of them,
    ``_orig_mod.`` and the like anywhere. If names would become equal, all stay as they are."""
    names = list(names)
    plain = {name: _WRAPPERS.sub("", name) for name in names}
    while plain and all(name.startswith("module.") for name in plain.values()):
        plain = {name: _WRAPPERS.sub("", short.removeprefix("module.")) for name, short in plain.items()}
    return plain if len(set(plain.values())) == len(names) else {name: name for name in names}


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors that a safetensors file says it holds, and does hold, in dtypes that are read here."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            # Before reading: a damaged length must not become an allocation of that many bytes.
            if size < 8 or length > min(size - 8, _HEADER_BYTES):
                raise FinetuneError(
                    f"{file} is damaged: {size:,} bytes end inside its header. Download it again."
                )
            header = json.loads(stream.read(length))
            entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
            ranges = {
                name: (start, stop)
                for name, entry in entries
                for start, stop in [_sizes(entry["data_offsets"])]
            }
            odd = sorted({entry["dtype"] for _, entry in entries} - DTYPES.keys())
            if odd:
                raise UserError(
                    f"{file} is quantized ({', '.join(odd)}). Give the checkpoint that it was made from."
                )
            tensors = {
                name: StoredTensor(
                    file, DTYPES[entry["dtype"]], _sizes(entry["shape"]), name, 8 + length + ranges[name][0]
                )
                for name, entry in entries
            }
    except OSError as error:
        raise FinetuneError(f"Cannot read {file}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise FinetuneError(
            f"{file} is damaged: its header is not that of a safetensors file ({error!r:.200}). Download it again."
        ) from error

    data = size - 8 - length
    end = 0
    for name, (start, stop) in sorted(ranges.items(), key=lambda item: item[1]):
        if stop > data:
            raise FinetuneError(
                f"{file} is truncated: it has {data:,} bytes of data, and its tensor {name} is at bytes {start:,} to "
                f"{stop:,}. Download it again."
            )
        if stop - start != math.prod(tensors[name].shape) * tensors[name].dtype.itemsize:
            raise FinetuneError(
                f"{file} is damaged: its tensor {name}, {tensors[name].dtype} {list(tensors[name].shape)}, has "
                f"{stop - start:,} bytes. Download it again."
            )
        if start != end:
            raise FinetuneError(
                f"{file} is damaged: its tensor {name} begins at byte {start:,}, and the one before it ends at "
                f"{end:,}. Download it again."
            )
        end = stop
    if data != end:
        raise FinetuneError(
            f"{file} is damaged: its header is not for {data:,} bytes of data. Download it again."
        )
    return tensors


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(
        type(value) is int and 0 <= value < 1 << 63 for value in values
    ):
        raise ValueError(f"{values!r:.80} is no list of sizes")
    return tuple(values)


def has_weights(directory: Path) -> bool:
    """Return whether ``directory`` has a checkpoint's weights, or names them; a configuration alone can be planned."""
    return any((directory / name).is_file() for name in (SINGLE, INDEX, TABLE))


def _shard_files(directory: Path) -> dict[Path, list[str]]:
    if (directory / SINGLE).is_file():
        return {directory / SINGLE: []}
    index = directory / INDEX
    if not index.is_file():
        if (directory / TABLE).is_file():
            return {}
        raise UserError(_no_safetensors(directory))
    files: dict[Path, list[str]] = {}
    try:
        for name, file in json.loads(read_text_file(index, FILE_BYTES))["weight_map"].items():
            if Path(file).name != file:
                raise ValueError(f"{file} is not the name of a file in this directory")
            files.setdefault(directory / file, []).append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FinetuneError(f"{index} is damaged ({error!r:.200}). Download it again.") from error
    for file, names in files.items():
        if not file.is_file():
            raise FinetuneError(
                f"{file} is missing; it should hold {names[0]} and {len(names) - 1} more tensors."
            )
    return files


def _no_safetensors(directory: Path) -> str:
    if any(directory.glob("pytorch_model*.bin*")):
        convert = f"M.from_pretrained('{directory}', dtype='auto').save_pretrained('{directory}-safetensors')"
        return (
            f"{directory} has its weights only pickled (pytorch_model.bin), which cannot be read piece by piece. "
            'Convert it once, on a machine that can hold it: python -c "from transformers import AutoModelForCausalLM '
            f"as M; {convert}\", and copy the tokenizer's files over."
        )
    pickled = next(
        (file for ending in ("pth", "pt", "bin", "ckpt") for file in directory.glob(f"*.{ending}")), None
    )
    if pickled is not None:
        return f"{directory} has its weights only pickled ({pickled.name}): take the checkpoint for transformers."
    return f"{directory} has no weights: neither {SINGLE} nor {INDEX} is in it."
