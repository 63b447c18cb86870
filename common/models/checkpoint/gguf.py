"""Read GGUF files (llama.cpp's): described once, in the user's cache, as a checkpoint whose tensors stay in the file.

The description is a directory with what transformers makes of the file's metadata, configuration and tokenizer, and a
table of its tensors (:mod:`common.models.checkpoint.gguf_table`). It holds no weights.
"""

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from common.activity import activity
from common.errors import UserError, on_one_line
from common.files import CACHE_VARIABLE, cache_directory, replace_file, sync_tree
from common.models.checkpoint.gguf_header import check_header
from common.models.checkpoint.gguf_metadata import ROPE_FACTORS, apply_metadata, apply_rope_factors
from common.models.checkpoint.gguf_table import TABLE, GgufEntry, gguf_names, order_of, processor_of
from common.models.checkpoint.gguf_tokenizer import read_tokenizer
from common.models.checkpoint.shards import plan_conversions, to_disk
from common.models.generation import FILE as GENERATION
from common.models.meta_model import build_meta_model
from common.models.names import gguf_parts
from common.models.structure import parameter_names, stored_names

SOURCE = "source.json"  # Written last: the file that is described, and what the description consists of
_FORMAT = 3  # To be raised when files are described in another way


def described(file: Path) -> Path:
    """Return a checkpoint directory that describes a GGUF file, the same while the file is unchanged.

    Args:
        file: of a file that is split, the first part.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"{file} is read with the package gguf, which is not installed: pip install gguf")
    parts = gguf_parts(file)
    key = _key(parts)
    directory = cache_directory() / "gguf" / f"{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ranks of one node may come at once
            if not _is_whole(key, directory):
                _remove_content(directory)
                with activity(f"reading what {file.name} says of the model, once"):
                    _write(parts, directory)
                if _key(parts) != key:
                    _remove_content(directory)
                    raise UserError(
                        f"{file} was changed or replaced while it was read, and old and new content would be mixed: "
                        "start again once nothing writes there."
                    )
                sync_tree(directory)
                content = {
                    "format": _FORMAT,
                    "source": str(file.resolve()),
                    "key": key,
                    "files": _states(directory),
                }
                replace_file(directory / SOURCE, json.dumps(content, indent=1))
    except OSError as error:
        raise UserError(
            f"{file} cannot be described in {directory}: {error.strerror or error}. ${CACHE_VARIABLE} names another "
            "directory for the cache."
        ) from error
    return directory


def _key(parts: Sequence[Path]) -> str:
    """Return what tells a file, and what it held, from others."""
    states = [(part.resolve(), part.stat()) for part in parts]
    # Tools that copy may keep the time of a change, but not that of the copy.
    return " ".join(
        f"{path} {state.st_size} {state.st_mtime_ns} {state.st_ctime_ns}" for path, state in states
    )


def source_of(checkpoint: Path) -> Path | None:
    """Return the GGUF file that a checkpoint directory describes; None: it has weights."""
    if not (checkpoint / TABLE).is_file() or not (checkpoint / SOURCE).is_file():
        return None
    return Path(json.loads((checkpoint / SOURCE).read_text())["source"])


def _is_whole(key: str, directory: Path) -> bool:
    """Return whether the files are those that were made of the file with this key."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads((directory / SOURCE).read_text())
        return bool(
            content["format"] == _FORMAT and content["key"] == key and content["files"] == _states(directory)
        )
    return False


def _states(directory: Path) -> dict[str, str]:
    files = [path for path in directory.iterdir() if path.name not in ("lock", SOURCE)]
    return {
        path.name: str(path.readlink())
        if path.is_symlink()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.is_symlink() or path.is_file()
    }


def _remove_content(directory: Path) -> None:
    """Remove what a killed or damaged description has left."""
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()


def _write(parts: Sequence[Path], directory: Path) -> None:
    file = parts[0]
    try:
        for part in parts:
            check_header(part)
        with _headers_read_once():
            config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
            keys, tensors = _read(config, parts)
            model = build_meta_model(config)
            tokenizer = read_tokenizer(file, keys)
        table = _table(keys["general.architecture"], tensors, model, config.to_dict())
    except Exception as error:  # anything: transformers and gguf check files in many ways
        raise UserError(f"transformers cannot read {file}: {on_one_line(error)}") from error
    tokenizer.save_pretrained(directory)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.to_json_file(directory / GENERATION)
    for part in parts:
        (directory / part.name).symlink_to(part.resolve())
    entries = {name: asdict(entry) for name, entry in table.items()}
    content = {"architecture": keys["general.architecture"], "tensors": entries}
    replace_file(directory / TABLE, json.dumps(content))


@contextlib.contextmanager
def _headers_read_once() -> Iterator[None]:
    """Let transformers and this module share one reader of each file, which makes no memory map of each number.

    gguf's own takes 4 s for a header with 49,000 tokens, and transformers reads each header twice.
    """
    import gguf

    class Reader(gguf.GGUFReader):
        def _get(
            self, offset: int, dtype: Any, count: int = 1, override_order: Any = None
        ) -> npt.NDArray[Any]:
            return np.frombuffer(self.data, dtype, int(count), int(offset))

    original = gguf.GGUFReader
    vars(gguf)["GGUFReader"] = functools.cache(Reader)
    try:
        yield
    finally:
        vars(gguf)["GGUFReader"] = original


def _read(config: PreTrainedConfig, parts: Sequence[Path]) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """Apply what the file says of its model and transformers does not read; return all metadata by name, and the
    tensors with the names of their files."""
    from gguf import GGUFReader, dequantize

    readers = {part.name: GGUFReader(str(part)) for part in parts}
    keys = {name: field.contents() for name, field in readers[parts[0].name].fields.items()}
    tensors = [(name, tensor) for name, reader in readers.items() for tensor in reader.tensors]
    if len(parts) > 1 and any(tensor.name == "output.weight" for _, tensor in tensors):
        config.tie_word_embeddings = False  # transformers has read the first part alone
    apply_metadata(config, keys["general.architecture"], keys)
    for _, tensor in tensors:
        if tensor.name == ROPE_FACTORS:
            apply_rope_factors(config, dequantize(tensor.data, tensor.tensor_type))
    return keys, tensors


def _table(
    architecture: str, tensors: Sequence[tuple[str, Any]], model: PreTrainedModel, config: dict[str, Any]
) -> dict[str, GgufEntry]:
    """Return the tensors by the names that a checkpoint of the model has for them."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    processor = processor_of(architecture, config)
    prefix = model.base_model_prefix
    targets = gguf_names(architecture, model.config, model.state_dict(), prefix, processor)
    first = {alias: names[0] for names in parameter_names(model) for alias in names}
    groups: dict[str, list[tuple[str, Any]]] = defaultdict(list)
    for file, tensor in tensors:
        if tensor.name == ROPE_FACTORS:  # it is in the configuration
            continue
        # That of experts
        target = targets.get(tensor.name) or targets.get(tensor.name.removesuffix(".weight"))
        if target not in first:
            raise ValueError(f"it holds {tensor.name}, which {type(model).__name__} has no parameter for")
        groups[first[target]].append((file, tensor))
    missing = [name for name, _ in model.named_parameters() if name not in groups]
    if missing:
        raise ValueError(f"it lacks {missing[0]}")

    stored = stored_names(model)
    meta = to_disk(model, {stored[name]: parameter.data for name, parameter in model.named_parameters()})
    kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
    expert_names = get_tensor_name_map(kinds[architecture], model.config.num_hidden_layers)
    table = {}
    for conversion in plan_conversions(model, meta)[0]:
        group = groups[first[conversion.target]]
        if conversion.rule is None:
            (_, name), (file, tensor) = conversion.parts[0], group[0]
            table[name] = _entry(file, tensor, tuple(meta[name].shape), processor, config)
            continue
        by_name = {tensor.name.removesuffix(".weight"): (file, tensor) for file, tensor in group}
        for _, name in conversion.parts:
            expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*?)(?:\.weight)?", name)
            if expert is None:
                raise ValueError(f"it has {group[0][1].name} where the model has {name}")
            file, tensor = by_name[expert_names.get_name(f"{expert[1]}.{expert[3]}")]
            table[name] = _expert(file, tensor, int(expert[2]), tuple(meta[name].shape))
    return table


def _whole(file: str, tensor: Any) -> GgufEntry:
    shape = tuple(int(size) for size in reversed(tensor.shape))
    row_nbytes = int(tensor.n_bytes) * shape[-1] // int(tensor.n_elements)
    return GgufEntry(file, tensor.name, tensor.tensor_type.name, int(tensor.data_offset), shape, row_nbytes)


def _expert(file: str, tensor: Any, number: int, shape: tuple[int, ...]) -> GgufEntry:
    whole = _whole(file, tensor)
    if whole.shape[1:] != shape:
        raise ValueError(
            f"it has {tensor.name} of shape {list(whole.shape)}, and each expert's is {list(shape)}"
        )
    return replace(whole, start=whole.start + number * shape[0] * whole.row_nbytes, shape=shape)


def _entry(
    file: str, tensor: Any, shape: tuple[int, ...], processor: Any, config: dict[str, Any]
) -> GgufEntry:
    """Describe a tensor that becomes a parameter of this shape."""
    entry = _whole(file, tensor)
    order = order_of(processor, tensor.name, shape, config) if len(entry.shape) == len(shape) == 2 else None
    if order is None or entry.shape != (shape[::-1] if order.transposed else shape):
        return replace(entry, becomes=shape)
    return replace(entry, heads=order.heads, transposed=order.transposed)
