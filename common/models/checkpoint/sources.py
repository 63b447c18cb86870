"""Sources of weights: a checkpoint or random numbers, in the memory of about one parameter."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from common.errors import FinetuneError, UserError
from common.models.checkpoint.compressed import CompressedParameter, CompressedShards, Placements
from common.models.checkpoint.conversion import Conversion, plan_conversions
from common.models.checkpoint.missing_weights import explain_missing, refuse_compressed
from common.models.meta_model import unset_buffers
from common.models.structure import parameter_names, stored_names


class WeightSource(Protocol):
    """A source that gives a model's parameters one at a time."""

    def check(self) -> None:
        """Check that all parameters are there and have the right shape, before anything is written.

        Raises:
            FinetuneError, UserError: a parameter is missing or wrong; the message names it, and its file.
        """
        ...

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Read parameters in the order of ``names``, each when it is needed.

        Args:
            names: names from ``model.named_parameters()``, or other names of tied parameters.

        Yields:
            Name and CPU tensor, in the source's own dtype or fp32. The tensor is the caller's.
        """
        ...

    def read_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Read the persistent buffers that the source has values for."""
        ...

    def read_compressed(self, name: str, parts: Sequence[int] | None = None) -> Iterator[Mapping[str, torch.Tensor]]:
        """Read the components of the tensors that a compressed parameter is made of, as in the source, one by one.

        Args:
            name: of the parameter.
            parts: numbers of these tensors; None: all.
        """
        ...


class CheckpointSource:
    """Weights from a checkpoint directory of safetensors files.

    Args:
        directory: holds ``model.safetensors``, or shards and ``model.safetensors.index.json``.
        model: from :func:`common.models.meta_model.build_meta_model`.

    Compressed tensors (:mod:`common.models.checkpoint.compressed`) are dequantised.

    Memory: one tensor; for a parameter that is put together from several (fused experts), up to twice that parameter.

    Raises:
        UserError, FinetuneError: as :class:`common.models.checkpoint.shards.Shards`.
    """

    def __init__(self, directory: Path, model: PreTrainedModel) -> None:
        self.model = model
        self.shards = CompressedShards(directory)
        self._placements = Placements(model)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self.aliases = {alias: names for names in parameter_names(model) for alias in names}
        conversions, unused = plan_conversions(model, self.shards.tensors)
        self.unused: list[str] = unused
        """Names on disk that the model does not use."""
        self._made_by: dict[str, Conversion] = {}
        self._stored_shape: dict[str, tuple[int, ...]] = {}
        for conversion in conversions:
            for name, shape in self._convert_shapes(conversion).items():
                self._made_by[name] = conversion
                self._stored_shape[name] = shape

    def check(self) -> None:
        """Check that every parameter is there, floating-point and in the model's shape, and that tied ones agree."""
        missing = [name for name in self.shapes if not self._sources(name)]
        missing += [name for name in unset_buffers(self.model) if name not in self._made_by]
        refuse_compressed(self.shards, self.unused)
        if missing:
            raise FinetuneError(explain_missing(self.model, self.shards.directory, missing, self.unused))
        for name, shape in self.shapes.items():
            for source in self._sources(name):
                self._check_one(source, shape)
            self._check_tied(self._sources(name))

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Read parameters; see :meth:`WeightSource.read`."""
        made: dict[str, torch.Tensor] = {}
        for position, name in enumerate(names):
            if not self._sources(name):
                raise FinetuneError(f"{self.shards.directory} lacks the parameter {name}.")
            source = self._sources(name)[0]
            if source not in made:
                # One tensor on disk may make several parameters: keep those that are still wanted.
                later = {alias for other in names[position:] for alias in self._sources(other)[:1]}
                converted = self._convert(source)
                made = {key: value for key, value in converted.items() if key in later}
                del converted
            yield name, made.pop(source)

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
        sources = self._sources(name)
        return self._compressed(sources[0]) if sources else None

    def read_compressed(self, name: str, parts: Sequence[int] | None = None) -> Iterator[Mapping[str, torch.Tensor]]:
        """Read components; see :meth:`WeightSource.read_compressed`."""
        made_from = self._made_by[self._sources(name)[0]].parts
        for index in range(len(made_from)) if parts is None else parts:
            yield self.shards.components(made_from[index][1])

    def _compressed(self, source: str) -> CompressedParameter | None:
        if not self.shards.compressed:
            return None
        shape = self._stored_shape[source]
        return CompressedParameter.of(self._made_by[source], self.shards, self._placements, shape)

    def _convert(self, source: str) -> dict[str, torch.Tensor]:
        """Return the result of the conversion that makes ``source``, made piece by piece where that is possible."""
        compressed = self._compressed(source)
        if compressed is None:
            return self._made_by[source].convert(self.model, self.shards.read)
        return {source: compressed.assemble(self.read_compressed(source)).view(self._stored_shape[source])}

    def made_from(self, name: str) -> list[str]:
        """Return the names on disk of all tensors that the parameter or buffer ``name`` is made from; for a tied
        parameter that is stored under several names, those for all of them."""
        aliases = self.aliases.get(name, (name,))
        return [part for alias in aliases if alias in self._made_by for _, part in self._made_by[alias].parts]

    def stored_names(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the checkpoint's names of tensors by those that ``save_pretrained`` gives: several where it holds a
        tied parameter more than once, none where it has another layout."""
        found: dict[str, list[str]] = {}
        for conversion in plan_conversions(self.model, names)[0]:
            written = [name for _, name in conversion.parts]
            for alias in self.aliases.get(conversion.target, (conversion.target,)):
                parts = [name for _, name in self._made_by[alias].parts] if alias in self._made_by else []
                if len(parts) == len(written):
                    for name, part in zip(written, parts, strict=True):
                        found.setdefault(name, []).append(part)
        return found

    def _sources(self, name: str) -> list[str]:
        """Return those of a parameter's names that the checkpoint has: a tied one may be stored under any of them."""
        return [alias for alias in self.aliases[name] if alias in self._made_by]

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
                    "are known here are beside it. Give the checkpoint it was made from, in fp32, bf16 or fp16."
                )

    def _check_tied(self, sources: list[str]) -> None:
        """Refuse copies of a tied parameter that differ. (transformers unties the model then.)"""
        for other in sources[1:]:
            first, second = (self._made_by[name].parts[0][1] for name in (sources[0], other))
            rows = self.shards.tensors[first].shape[0]
            step = max(1, (16 << 20) * rows // max(1, self.model.get_parameter(other).numel()))  # 16 M elements
            for start in range(0, rows, step):
                pair = [self.shards.read_rows(name, start, min(rows, start + step)) for name in (first, second)]
                if not torch.equal(*pair):
                    raise UserError(
                        f"{self.shards.directory}: config.json says that {sources[0]} and {other} are one parameter, "
                        'but the checkpoint has two that differ. Set "tie_word_embeddings": false in config.json.'
                    )

    def _convert_shapes(self, conversion: Conversion) -> dict[str, tuple[int, ...]]:
        """Return the shapes that a conversion makes, by running it on the meta device."""

        def read(name: str) -> torch.Tensor:
            stored = self.shards.tensors[name]
            return torch.empty(stored.shape, dtype=stored.dtype, device="meta")

        try:
            made = conversion.convert(self.model, read)
        except Exception as error:  # whatever an operation says about tensors that do not fit together
            names = [name for _, name in conversion.parts]
            files = sorted({self.shards.tensors[name].file.name for name in names})
            raise FinetuneError(
                f"{', '.join(files)} in {self.shards.directory}: {names[0]} and {len(names) - 1} more cannot be made "
                f"into {conversion.target}: {error}"
            ) from error
        return {name: tuple(value.shape) for name, value in made.items()}


class RandomSource:
    """Weights from a family's own initialisation, as ``from_config`` applies it, one module at a time.

    Values depend on ``seed`` and the module's name, not on the order of reading. All are fp32.

    Args:
        model: from :func:`common.models.meta_model.build_meta_model`. It holds a module's values while they are made.

    Memory: the parameters of one module that holds parameters itself (a linear layer, a layer's fused experts).
    """

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        self.model = model
        self.seed = seed
        self._stored_name = stored_names(model)

    def check(self) -> None:
        """Raise a FinetuneError for a persistent buffer that only a checkpoint has values for."""
        for name in unset_buffers(self.model):
            raise FinetuneError(
                f"transformers does not initialise {name} of {type(self.model).__name__}: start from a checkpoint."
            )

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Read parameters; see :meth:`WeightSource.read`."""
        for path, group in groupby(names, key=lambda name: self._stored_name[name].rpartition(".")[0]):
            values = self._initialise(path)
            for name in group:
                yield name, values.pop(self._stored_name[name])

    def read_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Read nothing: the model has all its buffers."""
        return iter(())

    def read_compressed(self, name: str, parts: Sequence[int] | None = None) -> Iterator[Mapping[str, torch.Tensor]]:
        """Read nothing: random numbers are not compressed."""
        return iter(())

    def _initialise(self, path: str) -> dict[str, torch.Tensor]:
        module = self.model.get_submodule(path)
        on_meta = dict(module.named_parameters(recurse=False))
        # NaN, so that a parameter that is not initialised is found.
        real = {
            name: nn.Parameter(torch.full(parameter.shape, torch.nan, dtype=torch.float32), requires_grad=False)
            for name, parameter in on_meta.items()
        }
        try:
            for name, parameter in real.items():
                setattr(module, name, parameter)
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.default_generator.manual_seed(self._seed_of(path))
                for owner, ancestor in self._initialisers(path):
                    # From the leaf upwards, as transformers does: a block may scale its projections once more (GPT-2).
                    # All other parameters are on the meta device, where this costs nothing.
                    owner._init_weights(ancestor)
        finally:
            for name, parameter in on_meta.items():
                setattr(module, name, parameter)
        prefix = f"{path}." if path else ""
        for name, parameter in real.items():
            if parameter.flatten()[:: max(1, parameter.numel() // 4096)].isnan().any():
                raise FinetuneError(
                    f"transformers does not initialise {prefix}{name} of {type(self.model).__name__}: "
                    "start from a checkpoint."
                )
        return {prefix + name: parameter.detach() for name, parameter in real.items()}

    def _seed_of(self, path: str) -> int:
        digest = hashlib.blake2b(f"{self.seed}/{path}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def _initialisers(self, path: str) -> list[tuple[PreTrainedModel, nn.Module]]:
        """Return a module and all around it, innermost first, each with the (sub-)model that initialises it."""
        chain: list[tuple[PreTrainedModel, nn.Module]] = [(self.model, self.model)]
        module: nn.Module = self.model
        for part in path.split(".") if path else ():
            module = module.get_submodule(part)
            chain.append((module if isinstance(module, PreTrainedModel) else chain[-1][0], module))
        return chain[::-1]
