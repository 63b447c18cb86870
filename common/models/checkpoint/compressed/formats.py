"""Find and read the compressed tensors in a checkpoint: FP8, MXFP4, the formats of the libraries compressed-tensors and
bitsandbytes, and GGUF types.

The ``quantization_config`` in config.json says which tensors to look for. Which weights are compressed, the files say:
one without scales next to it (``modules_to_not_convert``, ``ignore``) is a plain one. Of GGUF files, their table says
it (:mod:`common.models.checkpoint.gguf_table`).
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from common.errors import FinetuneError, UserError
from common.files import read_text_file
from common.models.checkpoint.compressed.gguf_blocks import BLOCKS
from common.models.checkpoint.compressed.tensors import ROLES, TABLES, Component, CompressedTensor
from common.models.checkpoint.gguf_table import TABLE, GgufEntry, GgufTable, model_order
from common.models.checkpoint.shards import Shards, StoredTensor

# Kind of codes of tensors that hold one number in a byte, by their dtype.
FLOAT_CODES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


@dataclass(frozen=True)
class FoundTensor:
    """A compressed tensor that was found in the files."""

    tensor: CompressedTensor
    names: dict[str, str]  # Names of its components in the files, by their roles
    # Names of tensors that are useless without it: shapes, scales of activations
    attached: tuple[str, ...] = ()
    # Components that are no tensors in the files
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)


def even_blocks(name: str, rows: int, columns: int, grid: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of a block from the grid of scales; refuse a grid that makes blocks of several sizes."""
    if not (grid[0] and grid[1]) or rows % grid[0] or columns % grid[1]:
        raise FinetuneError(
            f"{name} of shape {[rows, columns]} has scales of shape {list(grid)}, and the quantization_config in "
            "config.json does not say which blocks they are for."
        )
    return rows // grid[0], columns // grid[1]


def found(
    name: str,
    names: dict[str, str],
    shards: Shards,
    tensor: CompressedTensor,
    attached: Iterable[str] = (),
    values: Mapping[str, torch.Tensor] | None = None,
) -> tuple[str, FoundTensor]:
    """Return a tensor with the name that it would have if it were a plain one.

    Args:
        names: names of its components in the files, by their roles.

    Raises:
        FinetuneError: if the components do not fit together.
    """
    problem = tensor.problem()
    if problem is not None:
        raise FinetuneError(
            f"{shards.tensors[names['codes']].file}: {name} cannot be read: {problem}. config.json and weights do not "
            "belong together."
        )
    return name, FoundTensor(tensor, names, tuple(attached), values or {})


def components_of(names: Mapping[str, str], shards: Shards) -> tuple[Component, ...]:
    """Describe tensors of the files, named by their roles, as components in the order of roles."""
    stored = {role: shards.tensors[names[role]] for role in ROLES if role in names}
    return tuple(Component(role, tensor.dtype, tensor.shape) for role, tensor in stored.items())


class Fp8:
    """FP8 in blocks, as in DeepSeek-V3 (``weight_scale_inv``); one scale for all where there are no blocks."""

    name = "fp8"
    _attached = ("activation_scale", "input_scale", "qscale_act")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._block = settings.get("weight_block_size")

    def find(self, shards: Shards) -> Iterator[tuple[str, FoundTensor]]:
        """Find every compressed tensor, by the name that it would have if it were a plain one."""
        for name, stored in shards.tensors.items():
            if (stored.dtype not in FLOAT_CODES and stored.dtype != torch.int8) or len(stored.shape) < 2:
                continue
            module, _, last = name.rpartition(".")
            prefix = f"{module}." if module else ""
            candidates = [
                f"{name}_scale_inv",
                *(f"{prefix}{scale_name}" for scale_name in ("scale", "qscale_weight")),
            ]
            scale = next((scale_name for scale_name in candidates if scale_name in shards.tensors), None)
            if scale is None or (last != "weight" and scale != candidates[0]):
                continue
            attached = [
                f"{prefix}{suffix}" for suffix in self._attached if f"{prefix}{suffix}" in shards.tensors
            ]
            names = {"codes": name, "scale": scale}
            yield found(name, names, shards, self._tensor(name, components_of(names, shards)), attached)

    def _tensor(self, name: str, components: tuple[Component, ...]) -> CompressedTensor:
        stored, scale = components
        codes = FLOAT_CODES.get(stored.dtype, "e2m1")  # two to a byte, which is what int8 means here
        shape = (*stored.shape[:-1], stored.shape[-1] * (2 if codes == "e2m1" else 1))
        rows, columns = shape[-2:]
        grid = scale.shape[-2:] if len(scale.shape) >= 2 else (1, 1)
        block = self._block
        if not block or grid != (-(-rows // block[0]), -(-columns // block[1])):
            # Experts of some checkpoints have their own blocks: the grid of scales tells, as in transformers.
            block = even_blocks(name, rows, columns, grid)
        return CompressedTensor(codes, shape, (int(block[0]), int(block[1])), torch.float32, components)


class Mxfp4:
    """MXFP4 as in gpt-oss: ``*_blocks`` of 32 numbers in 16 bytes, ``*_scales`` with their exponents."""

    name = "mxfp4"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Take the settings, which say nothing more."""

    def find(self, shards: Shards) -> Iterator[tuple[str, FoundTensor]]:
        """Find every compressed tensor, by the name that it would have if it were a plain one."""
        for name, blocks in shards.tensors.items():
            base = name.removesuffix("_blocks")
            if base == name or f"{base}_scales" not in shards.tensors:
                continue
            if len(blocks.shape) < 3:
                raise FinetuneError(
                    f"{blocks.file}: {name} of shape {list(blocks.shape)} are not MXFP4 blocks."
                )
            *leading, count, width = blocks.shape
            names = {"codes": name, "scale": f"{base}_scales"}
            shape = (*leading, count * width * 2)
            block = (1, width * 2)
            tensor = CompressedTensor(
                "e2m1", shape, block, torch.bfloat16, components_of(names, shards), True
            )
            yield found(base, names, shards, tensor)


class CompressedTensors:
    """The formats of the library compressed-tensors (llm-compressor) that write each weight as a whole."""

    name = "compressed-tensors"
    _attached = (
        "weight_shape", "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point",
    )  # fmt: skip
    _read = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_global_scale")
    _unknown = ("weight_g_idx", "compressed", "bitmask", "row_offsets")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        groups = [group for group in (settings.get("config_groups") or {}).values() if group.get("weights")]
        self._groups: list[tuple[list[str], dict[str, Any]]] = [
            (g.get("targets") or [], g["weights"]) for g in groups
        ]
        sparse = (settings.get("sparsity_config") or {}).get("format") or "dense"
        transforms = (settings.get("transform_config") or {}).get("config_groups")
        if sparse != "dense" or transforms:
            what = "transforms of activations" if transforms else f"sparse weights ({sparse})"
            raise UserError(
                f"compressed-tensors with {what} cannot be read here. Give the checkpoint it was made from."
            )

    def find(self, shards: Shards) -> Iterator[tuple[str, FoundTensor]]:
        for name, scale in shards.tensors.items():
            module = name.removesuffix(".weight_scale")
            if module == name:
                continue
            keys = (*self._read, *self._attached, *self._unknown)
            there = {key: f"{module}.{key}" for key in keys if f"{module}.{key}" in shards.tensors}
            unknown = next((there[key] for key in self._unknown if key in there), None)
            if unknown is not None:
                raise UserError(
                    f"{scale.file} holds {unknown}: weights in another order, or sparse ones, cannot be read here. "
                    "Give the checkpoint it was made from."
                )
            codes = there.get("weight_packed") or there.get("weight")
            if codes is None:
                raise FinetuneError(
                    f"{scale.file} holds {name}, and no file of the checkpoint {module}.weight_packed."
                )
            more = {
                role: there[f"weight_{role}"]
                for role in ("zero_point", "global_scale")
                if f"weight_{role}" in there
            }
            names = {"codes": codes, "scale": name, **more}
            tensor = self._tensor(module, components_of(names, shards), there.get("weight_shape"), shards)
            attached = [there[key] for key in self._attached if key in there]
            yield found(f"{module}.weight", names, shards, tensor, attached)

    def _tensor(
        self, module: str, components: tuple[Component, ...], shape_name: str | None, shards: Shards
    ) -> CompressedTensor:
        codes, scale = components[:2]
        settings = self._settings(module)
        *leading, rows, width = codes.shape if len(codes.shape) > 1 else (1, *codes.shape)
        dtype = scale.dtype
        if codes.dtype in FLOAT_CODES:
            kind = FLOAT_CODES[codes.dtype]
            columns = width
        elif codes.dtype == torch.int8:
            kind = "int8"
            columns = width
        elif codes.dtype == torch.uint8:  # NVFP4 and MXFP4: their library makes bf16 of them
            kind = "e2m1"
            columns = 2 * width
            dtype = torch.bfloat16
        else:
            bits = settings.get("num_bits")
            if codes.dtype != torch.int32 or bits not in (4, 8):
                raise UserError(
                    f"{module} is packed with {bits} bits into {str(codes.dtype).removeprefix('torch.')}: there are 4 "
                    "and 8 bits in int32. Give the checkpoint it was made from."
                )
            kind = f"offset int{bits}"
            columns = width * 32 // bits
            if shape_name is not None and columns != (settings.get("group_size") or 0) * scale.shape[-1]:
                columns = int(shards.read(shape_name)[-1])  # the last word may hold fewer
        block = self._block_of(module, settings, rows, columns, scale)
        if dtype.itemsize == 1:
            dtype = torch.bfloat16
        return CompressedTensor(kind, (*leading, rows, columns), block, dtype, components)

    @staticmethod
    def _block_of(
        module: str, settings: Mapping[str, Any], rows: int, columns: int, scale: Component
    ) -> tuple[int, int]:
        strategy = settings.get("strategy")
        if strategy == "block" and settings.get("block_structure"):
            height, width = settings["block_structure"]
            return (int(height), int(width))
        if strategy in ("group", "tensor_group") and settings.get("group_size"):
            return (1, int(settings["group_size"]))
        if strategy == "tensor":
            return (rows, columns)
        if strategy == "channel":
            return (1, columns)
        grid = scale.shape[-2:] if len(scale.shape) > 1 else (scale.shape[0] if scale.shape else 1, 1)
        return even_blocks(module, rows, columns, grid)

    def _settings(self, module: str) -> dict[str, Any]:
        """Return the settings of a module's weights in config.json: by name, by pattern, else by the kind of layer."""
        if len(self._groups) == 1:
            return self._groups[0][1]
        for named in (True, False):
            for targets, weights in self._groups:
                for target in targets:
                    pattern = target.startswith("re:") and re.match(target[3:], module) is not None
                    if (pattern or target == module) if named else not target.startswith("re:"):
                        return weights
        return {}


class Bitsandbytes:
    """nf4 and fp4 with plain or nested scales, and int8 with a scale for each row, of the library bitsandbytes."""

    name = "bitsandbytes"
    _state = ".quant_state.bitsandbytes__"
    _nested = (("nested_scale", "nested_absmax"), ("nested_map", "nested_quant_map"))

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Take the settings, of which the files say more."""

    def find(self, shards: Shards) -> Iterator[tuple[str, FoundTensor]]:
        """Find every compressed tensor, by the name that it would have if it were a plain one."""
        for name, stored in shards.files.items():
            weight, is_state, kind = name.partition(self._state)
            try:
                if is_state:
                    yield self._four_bits(weight, kind, name, shards)
                elif name.endswith(".SCB"):
                    yield self._eight_bits(name.removesuffix("SCB"), shards)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise FinetuneError(
                    f"{stored.file}: {name} and what belongs to it cannot be read ({error!r:.200}). Download it again."
                ) from error

    def _four_bits(self, weight: str, kind: str, state_name: str, shards: Shards) -> tuple[str, FoundTensor]:
        state = json.loads(shards.read(state_name).numpy().tobytes())
        shape = tuple(state["shape"])
        block = int(state["blocksize"])
        if (
            kind not in TABLES
            or len(shape) != 2
            or shape[1] % block
            or state.get("nested_blocksize", 256) != 256
        ):
            raise UserError(
                f"{shards.files[weight].file}: {weight} of shape {list(shape)} is {kind} in blocks of {block}, which "
                "are no whole parts of its rows or cannot be read. Give the checkpoint it was quantized from."
            )
        names = {"codes": weight, "scale": f"{weight}.absmax"}
        values = {}
        if "nested_blocksize" in state:
            names |= {role: f"{weight}.{suffix}" for role, suffix in self._nested}
            values["nested_offset"] = torch.tensor([float(state["nested_offset"])])
        offsets = tuple(Component(role, value.dtype, tuple(value.shape)) for role, value in values.items())
        components = (*components_of(names, shards), *offsets)
        tensor = CompressedTensor(kind, shape, (1, block), getattr(torch, state["dtype"]), components)
        return found(weight, names, shards, tensor, (state_name, f"{weight}.quant_map"), values)

    def _eight_bits(self, prefix: str, shards: Shards) -> tuple[str, FoundTensor]:
        names = {"codes": f"{prefix}weight", "scale": f"{prefix}SCB"}
        order = f"{prefix}weight_format"
        attached = [order] if order in shards.files else []
        if attached and int(shards.read(order)) != 0:
            raise UserError(
                f"{shards.files[order].file}: {prefix}weight has its columns in another order, which cannot be read. "
                "Give the checkpoint it was quantized from."
            )
        components = components_of(names, shards)
        shape = components[0].shape
        tensor = CompressedTensor("int8 of 127", shape, (1, shape[-1]), torch.float32, components)
        return found(names["codes"], names, shards, tensor, attached)


class Gguf:
    """Types of GGUF: blocks of numbers that lie side by side in a row, with their scales between the codes."""

    def __init__(self, directory: Path) -> None:
        self.table = GgufTable(directory)
        kinds = {entry.kind for entry in self.table.entries.values() if len(entry.shape) > 1}
        self.name = f"GGUF ({', '.join(sorted(kinds))})"
        self.others = ", ".join(sorted(kinds - BLOCKS.keys()))  # Types that are not kept in their bytes

    def find(self, shards: Shards) -> Iterator[tuple[str, FoundTensor]]:
        """Find every tensor that is kept in its bytes, by the name that it would have if it were a plain one."""
        for name, entry in self.table.entries.items():
            if not entry.becomes and entry.kind in BLOCKS:
                block = (1, BLOCKS[entry.kind].numbers)
                names = {"codes": name}
                components = components_of(names, shards)
                tensor = CompressedTensor(
                    entry.kind, entry.shape, block, torch.float32, components, entry.transposed
                )
                yield found(name, names, shards, tensor)


METHODS = {method.name: method for method in (Fp8, Mxfp4, CompressedTensors, Bitsandbytes)}
"""Methods of compression, by their names in config.json."""

Method = Fp8 | Mxfp4 | CompressedTensors | Bitsandbytes | Gguf
KNOWN = "FP8 (fp8), MXFP4 (mxfp4), compressed-tensors and bitsandbytes"


def method_of(directory: Path) -> Method | None:
    """Return how the checkpoint in a directory is compressed, by its config.json; None if it is not."""
    if (directory / TABLE).is_file():
        return Gguf(directory)
    try:
        content = json.loads(read_text_file(directory / "config.json"))
    except (OSError, ValueError, RecursionError):
        return None  # transformers says what is wrong with it
    settings = _settings_in(content) if isinstance(content, dict) else None
    return None if settings is None else _method(settings, str(directory))


def accept_config(config: PreTrainedConfig, name: str, has_weights: bool) -> None:
    """Remove ``quantization_config`` of a known method from a configuration with weights: a plain model is trained."""
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        settings = getattr(part, "quantization_config", None)
        if not settings:
            continue
        settings = settings if isinstance(settings, dict) else settings.to_dict()
        if not has_weights:
            raise UserError(
                f"{name} is quantized ({settings.get('quant_method')}), and there are no weights to read: give its "
                "checkpoint's directory, or a configuration without quantization_config."
            )
        _method(settings, name)
        del part.quantization_config


def _settings_in(content: dict[str, Any]) -> dict[str, Any] | None:
    inner = [value for value in content.values() if isinstance(value, dict)]
    for part in (content, *inner):
        settings = part.get("quantization_config") or part.get("compression_config")
        if isinstance(settings, dict):
            return settings
    return None


def _method(settings: Mapping[str, Any], name: str) -> Method:
    method = settings.get("quant_method")
    if method in METHODS:
        return METHODS[method](settings)
    raise UserError(
        f"{name} is quantized ({method}), and of quantized checkpoints only {KNOWN} can be read. "
        "Give the checkpoint it was quantized from, in fp32, bf16 or fp16."
    )


SPAN_BYTES = 16 << 20  # Bytes of a compressed tensor that are read at once


class CompressedShards(Shards):
    """A checkpoint's safetensors files, some of whose tensors are compressed.

    Args:
        directory: holds ``config.json`` and safetensors files; see :class:`Shards`.

    Attributes:
        method: how it is compressed; None if it is not: then all tensors are as they are in the files.
        compressed: the compressed ones among ``tensors``, which has the shape and dtype of their numbers.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.method: Method | None = method_of(directory)
        self.compressed: dict[str, FoundTensor] = {}
        if self.method is None:
            return
        self.compressed = dict(self.method.find(self))
        hidden = {
            name for entry in self.compressed.values() for name in (*entry.names.values(), *entry.attached)
        }
        self.tensors = {name: stored for name, stored in self.files.items() if name not in hidden}
        for name, entry in self.compressed.items():
            codes = self.files[entry.names["codes"]]
            self.tensors[name] = StoredTensor(
                codes.file, entry.tensor.dtype, entry.tensor.model_shape, codes.name
            )
        for name, converted in self._gguf.items():
            if name not in self.compressed:
                self.tensors[name] = StoredTensor(
                    self.files[name].file, torch.float32, converted.model_shape, name
                )

    @property
    def _gguf(self) -> Mapping[str, GgufEntry]:
        return self.method.table.entries if isinstance(self.method, Gguf) else {}

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor, as :meth:`Shards.read`; a compressed one is dequantized."""
        stored = self.compressed.get(name)
        if stored is not None:
            parts = {role: self._read_stored(part) for role, part in stored.names.items()}
            return _decoded(stored.tensor, {**parts, **stored.values})
        return self._converted(name, self._read_stored(name))

    def reads_rows(self, name: str) -> bool:
        """Return whether :meth:`read_rows` reads no more than these rows: of most compressed matrices it does."""
        stored = self.compressed.get(name)
        if stored is not None:
            return stored.tensor.part(0, 1) is not None
        return super().reads_rows(name) and (name not in self._gguf or self._gguf[name].is_by_rows)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read rows of a tensor, as :meth:`Shards.read_rows`; all of some compressed matrices is read."""
        if not self.reads_rows(name):
            return self.read(name)[start:stop]
        stored = self.compressed.get(name)
        if stored is None:
            return self._converted(name, self._read_stored(name, start, stop))
        parts = {
            role: self._read_stored(part) if role == "global_scale" else self._read_stored(part, start, stop)
            for role, part in stored.names.items()
        }
        some = stored.tensor.part(start, stop)
        assert some is not None, name
        return _decoded(some, parts)

    def components(self, name: str) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Read the components of a compressed tensor as they are in the files, in the model's order of rows.

        Yields:
            Role, first byte in the component, and values: some rows, of about :data:`SPAN_BYTES`.
        """
        stored = self.compressed[name]
        for role, value in stored.values.items():
            yield role, 0, value
        for component in (each for each in stored.tensor.components if each.role in stored.names):
            part = stored.names[component.role]
            rows = math.prod(component.shape[:1])
            position = 0
            step = max(1, SPAN_BYTES * rows // max(1, component.nbytes))
            for start in range(0, rows, step):
                stop = min(start + step, rows) if component.shape else None
                values = self._read_stored(part, start, stop)
                yield component.role, position, values
                position += values.nbytes

    def _converted(self, name: str, stored: torch.Tensor) -> torch.Tensor:
        if isinstance(self.method, Gguf) and name in self._gguf:
            return self.method.table.numbers(name, stored)
        return stored

    def _read_stored(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Read rows of a tensor as they are in the files, in the model's order; ``stop`` None: all of it."""
        heads = self._gguf[name].heads if name in self._gguf else 0
        if not heads:
            return super().read(name) if stop is None else super().read_rows(name, start, stop)
        height = self.files[name].shape[0] // heads
        stop = heads * height if stop is None else stop
        # heads: the order differs inside each
        first = start // height
        last = -(-stop // height)
        rows = super().read_rows(name, first * height, last * height)
        return model_order(rows, last - first)[start - first * height : stop - first * height]


def _decoded(tensor: CompressedTensor, components: Mapping[str, torch.Tensor]) -> torch.Tensor:
    whole = torch.empty(tensor.model_shape, dtype=tensor.dtype)
    tensor.decode(components, whole.transpose(-1, -2) if tensor.transposed else whole)
    return whole
