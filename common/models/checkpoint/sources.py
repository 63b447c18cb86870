"""Sources of weights: a checkpoint or random numbers, in the memory of about one parameter."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from transformers import PreTrainedModel

from common.errors import FinetuneError, UserError
from common.models.checkpoint.compressed.formats import CompressedShards
from common.models.checkpoint.compressed.parameters import Components, CompressedParameter, Placements
from common.models.checkpoint.shards import Conversion, StoredTensor, plan_conversions
from common.models.meta_model import unset_buffers
from common.models.structure import parameter_names


@dataclass(frozen=True)
class RowParts:
    """Tensors on disk that are put side by side into a parameter, none of them into two of its rows."""

    names: tuple[str, ...]  # Names on disk
    part_shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]  # Strides of each tensor's numbers in the flat parameter
    offsets: tuple[int, ...]  # Place of each tensor's first number in the flat parameter
    shape: tuple[int, ...]  # Shape of the parameter

    @classmethod
    def of(
        cls,
        conversion: Conversion,
        tensors: Sequence[StoredTensor],
        placements: Placements,
        shape: tuple[int, ...],
    ) -> "RowParts | None":
        """Return the parts of a parameter; None if they are not alike, not side by side, or one is in several rows."""
        kinds = {(stored.shape, stored.dtype) for stored in tensors}
        part_shape, dtype = kinds.pop()
        places = None if kinds else placements.place(conversion, part_shape, shape)
        if places is None:
            return None
        width, each, (strides, offsets) = math.prod(shape[1:]), math.prod(part_shape), places
        begun = Counter(offset // width for offset in offsets)
        if any(begun[row] * each != width for row in range(shape[0])):
            return None
        return cls(tuple(name for _, name in conversion.parts), part_shape, dtype, strides, offsets, shape)

    def read(self, first: int, stop: int, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return rows ``[first, stop)``. Memory: that of the result, and of one part."""
        width = math.prod(self.shape[1:])
        flat = torch.empty((stop - first) * width, dtype=self.dtype)
        for name, offset in zip(self.names, self.offsets, strict=True):
            if first * width <= offset < stop * width:
                flat.as_strided(self.part_shape, self.strides, offset - first * width).copy_(read(name))
        return flat.view(stop - first, *self.shape[1:])


class WeightSource:
    """A source that gives a model's parameters one at a time."""

    def check(self) -> None:
        """Check that all parameters are there in the right shape, before anything is written; name a wrong one."""
        raise NotImplementedError

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Read parameters in the order of ``names``, each when it is needed.

        Yields:
            Name and CPU tensor, in the source's own dtype or fp32. The tensor is the caller's.
        """
        raise NotImplementedError

    def reads_rows(self, name: str) -> bool:
        """Return whether :meth:`read_rows` can read a parameter."""
        return False

    def read_rows(self, name: str, first: int, stop: int) -> torch.Tensor:
        """Read rows ``[first, stop)`` of a parameter along its first dimension (experts, words), in the memory of about
        twice these rows. They are those of :meth:`read`, bit for bit.
        """
        raise NotImplementedError

    def read_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Read the persistent buffers that the source has values for."""
        return iter(())

    def read_compressed(self, name: str, parts: Sequence[int] | None = None) -> Iterator[Components]:
        """Read the components of the tensors, or those numbered ``parts``, of a compressed parameter as stored."""
        raise NotImplementedError


class CheckpointSource(WeightSource):
    """Weights from a checkpoint directory of safetensors files.

    Args:
        directory: holds ``model.safetensors``, or shards and ``model.safetensors.index.json``.
        model: from :func:`common.models.meta_model.build_meta_model`.

    Compressed tensors (:mod:`common.models.checkpoint.compressed`) are dequantized.

    Memory: one tensor; for a parameter that is put together from several (fused experts), up to twice that parameter,
    or twice the rows that are read.
    """

    def __init__(self, directory: Path, model: PreTrainedModel) -> None:
        self.model = model
        self.shards = CompressedShards(directory)
        self._placements = Placements(model)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self.aliases = {alias: names for names in parameter_names(model) for alias in names}
        conversions, unused = plan_conversions(model, self.shards.tensors)
        self.unused: list[str] = unused  # Names on disk that the model does not use
        self._made_by: dict[str, Conversion] = {}
        self._stored_shape: dict[str, tuple[int, ...]] = {}
        self._row_parts: dict[str, RowParts | None] = {}
        for conversion in conversions:
            for name, shape in self._convert_shapes(conversion).items():
                self._made_by[name] = conversion
                self._stored_shape[name] = shape

    def check(self) -> None:
        """Check that every parameter is there, floating-point and in the model's shape, and that tied ones agree."""
        missing = self.missing() + [name for name in unset_buffers(self.model) if name not in self._made_by]
        if missing:
            raise FinetuneError(explain_missing(self.model, self.shards.directory, missing, self.unused))
        self._check_unused()
        for name, shape in self.shapes.items():
            for source in self._sources(name):
                self._check_one(source, shape)
            self._check_tied(self._sources(name))

    @property
    def unplaced(self) -> list[str]:
        """Names of tensors that the model has no place for, but for those that transformers expects and leaves out."""
        expected = [*(getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or ()), r"\.inv_freq$"]
        return [name for name in self.unused if not any(re.search(pattern, name) for pattern in expected)]

    def missing(self) -> list[str]:
        """Return the names of the model's parameters that the checkpoint lacks."""
        return [name for name in self.shapes if not self._sources(name)]

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        converted_values: dict[str, torch.Tensor] = {}
        for position, name in enumerate(names):
            if not self._sources(name):
                raise FinetuneError(f"{self.shards.directory} lacks the parameter {name}.")
            source = self._sources(name)[0]
            if source not in converted_values:
                # One tensor on disk may make several parameters: keep those that are still wanted.
                later = {alias for other in names[position:] for alias in self._sources(other)[:1]}
                converted = self._convert(source)
                converted_values = {key: value for key, value in converted.items() if key in later}
                del converted
            yield name, converted_values.pop(source)

    def reads_rows(self, name: str) -> bool:
        for source in self._sources(name)[:1]:
            conversion = self._made_by[source]
            if conversion.rule is None:
                return self.shards.reads_rows(conversion.parts[0][1])
            return self._rows_of(source) is not None
        return False

    def read_rows(self, name: str, first: int, stop: int) -> torch.Tensor:
        source = self._sources(name)[0]
        conversion = self._made_by[source]
        if conversion.rule is None:
            return self.shards.read_rows(conversion.parts[0][1], first, stop)
        parts = self._rows_of(source)
        assert parts is not None, name
        return parts.read(first, stop, self.shards.read)

    def read_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Read the persistent buffers in the checkpoint, by name in the model."""
        persistent = self.model.state_dict().keys() - self.aliases.keys()
        for name in sorted(persistent & self._made_by.keys()):
            yield name, self._made_by[name].convert(self.model, self.shards.read)[name]

    def stored_as(self, name: str) -> str | None:
        """Return the name on disk of the tensor that is the parameter ``name``; None if it has to be converted."""
        conversion = self._made_by[self._sources(name)[0]]
        stored = conversion.parts[0][1]
        return stored if conversion.rule is None and stored not in self.shards.compressed else None

    def compressed(self, name: str) -> CompressedParameter | None:
        """Return how the checkpoint has the parameter ``name``, if that is compressed and can be kept as it is."""
        for source in self._sources(name)[:1] if self.shards.compressed else ():
            shape = self._stored_shape[source]
            return CompressedParameter.of(self._made_by[source], self.shards, self._placements, shape)
        return None

    def read_compressed(self, name: str, parts: Sequence[int] | None = None) -> Iterator[Components]:
        made_from = self._made_by[self._sources(name)[0]].parts
        for index in range(len(made_from)) if parts is None else parts:
            yield self.shards.components(made_from[index][1])

    def _rows_of(self, source: str) -> RowParts | None:
        """Return which tensors on disk each row of a parameter is made of; None: some are in several rows."""
        if source not in self._row_parts:
            conversion = self._made_by[source]
            tensors = [self.shards.tensors[name] for _, name in conversion.parts]
            self._row_parts[source] = RowParts.of(
                conversion, tensors, self._placements, self._stored_shape[source]
            )
        return self._row_parts[source]

    def _convert(self, source: str) -> dict[str, torch.Tensor]:
        """Return the result of the conversion that makes ``source``, made piece by piece where that is possible."""
        parts = (
            self._rows_of(source)
            if self.shards.compressed and self._made_by[source].rule is not None
            else None
        )
        if parts is None:
            return self._made_by[source].convert(self.model, self.shards.read)
        return {source: parts.read(0, parts.shape[0], self.shards.read)}

    def made_from(self, name: str) -> list[str]:
        """Return the names on disk of all tensors that a parameter or buffer is made from, under any of its names."""
        aliases = self.aliases.get(name, (name,))
        return [part for alias in aliases if alias in self._made_by for _, part in self._made_by[alias].parts]

    def stored_names(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the checkpoint's names of tensors by those that ``save_pretrained`` gives: several where it holds a
        tied parameter more than once, none where it has another layout."""
        names_by_parameter: dict[str, list[str]] = defaultdict(list)
        for conversion in plan_conversions(self.model, names)[0]:
            for alias in self.aliases.get(conversion.target, (conversion.target,)):
                parts = self._made_by[alias].parts if alias in self._made_by else []
                if len(parts) == len(conversion.parts):
                    for (_, name), (_, part) in zip(conversion.parts, parts, strict=True):
                        names_by_parameter[name].append(part)
        return dict(names_by_parameter)

    def _sources(self, name: str) -> list[str]:
        """Return those of a parameter's names that the checkpoint has: a tied one may be stored under any of them."""
        return [alias for alias in self.aliases[name] if alias in self._made_by]

    def _check_unused(self) -> None:
        """Refuse weights and biases of layers that the model has without them: it would compute something else."""
        layers = {
            name
            for name, module in self.model.named_modules()
            if module._parameters.get("weight") is not None
        }
        for name in (name for name in self.unplaced if name.endswith((".weight", ".bias"))):
            for prefix in accumulate(name.split(".")[:-1], "{}.{}".format):
                if prefix in layers or f"{self.model.base_model_prefix}.{prefix}" in layers:
                    raise UserError(
                        f"{self.shards.directory} has {name}, and config.json makes {prefix} without it: the model "
                        "would not be the one that was trained. Set what gives it biases (attention_bias, mlp_bias), "
                        "or merge what another tool has added."
                    )

    def _check_one(self, name: str, shape: tuple[int, ...]) -> None:
        parts = [(part, self.shards.tensors[part]) for _, part in self._made_by[name].parts]
        stored_as = parts[0][0] + (f" and {len(parts) - 1} more" if len(parts) > 1 else "")
        where = ", ".join(sorted({stored.file.name for _, stored in parts}))
        if self._stored_shape[name] != shape:
            raise FinetuneError(
                f"{where} in {self.shards.directory}: {stored_as} makes {name} of shape "
                f"{list(self._stored_shape[name])}, and the model's is {list(shape)}. "
                "config.json and weights do not belong together, or one is damaged."
            )
        for part, stored in parts:
            if not stored.dtype.is_floating_point or stored.dtype.itemsize == 1:
                raise UserError(
                    f"{stored.file} holds {part} as {stored.dtype}: the checkpoint is quantized, and no scales that "
                    "are known here are next to it. Give the checkpoint it was made from, in fp32, bf16 or fp16."
                )

    def _check_tied(self, sources: list[str]) -> None:
        """Refuse copies of a tied parameter that differ. (transformers unties the model then.)"""
        for other in sources[1:]:
            first, second = (self._made_by[name].parts[0][1] for name in (sources[0], other))
            rows = self.shards.tensors[first].shape[0]
            # 16 M elements
            step = max(1, (16 << 20) * rows // max(1, self.model.get_parameter(other).numel()))
            for start in range(0, rows, step):
                pair = [
                    self.shards.read_rows(name, start, min(rows, start + step)) for name in (first, second)
                ]
                if not torch.equal(*pair):
                    raise UserError(
                        f"{self.shards.directory}: config.json says that {sources[0]} and {other} are one parameter, "
                        'but the checkpoint has two that differ. Set "tie_word_embeddings": false in config.json.'
                    )

    def _convert_shapes(self, conversion: Conversion) -> dict[str, tuple[int, ...]]:
        def read(name: str) -> torch.Tensor:
            stored = self.shards.tensors[name]
            return torch.empty(stored.shape, dtype=stored.dtype, device="meta")

        try:
            values = conversion.convert(self.model, read)
        except Exception as error:  # any error of an operation about tensors that do not fit together
            names = [name for _, name in conversion.parts]
            files = sorted({self.shards.tensors[name].file.name for name in names})
            raise FinetuneError(
                f"{', '.join(files)} in {self.shards.directory}: {names[0]} and {len(names) - 1} more cannot be made "
                f"into {conversion.target}: {error}"
            ) from error
        return {name: tuple(value.shape) for name, value in values.items()}


def explain_missing(model: PreTrainedModel, directory: Path, missing: list[str], unused: list[str]) -> str:
    """Return which parameters the checkpoint in ``directory`` lacks, and why that may be."""
    total = sum(1 for _ in model.named_parameters())
    kind = type(model).__name__
    inside = [name for name, _ in model.named_parameters() if name.startswith(f"{model.base_model_prefix}.")]
    some = _some(missing)
    if inside and not any(name.startswith(f"{model.base_model_prefix}.") for name in missing):
        hint = (
            f" It has {_some(unused)}, for which a {kind} has no use: it was saved as another kind. Save it with its "
            f"head ({kind})."
            if unused
            else f' Save it with its head ({kind}); if the embeddings are its head, set "tie_word_embeddings": true in '
            "config.json."
        )
        return f"{directory} is a model without its head: of what a {kind} has, it lacks {some} and nothing else.{hint}"
    theirs = f" It has {_some(unused)} instead." if unused else ""
    return (
        f"{directory} lacks {len(missing)} of the model's {total} parameters: {some}.{theirs} "
        f"Is config.json, which makes it a {kind}, the one that belongs to these weights?"
    )


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
