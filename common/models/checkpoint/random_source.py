"""Random weights, as the family initialises them: of a whole model, one parameter at a time, and of a new head."""

import copy
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PreTrainedConfig, PreTrainedModel

from common.errors import FinetuneError, UserError
from common.models.checkpoint.export import copy_tokenizer_files, save_tensors
from common.models.checkpoint.shards import INDEX
from common.models.checkpoint.sources import CheckpointSource, explain_missing
from common.models.meta_model import build_meta_model, unset_buffers
from common.models.structure import stored_names
from common.randomness import own_random_numbers

GROUP_ELEMENTS = 1 << 20  # Elements that are drawn together (or a row), so that any rows can be drawn alone

_ATEN = torch.ops.aten
_OVERWRITES = {_ATEN.normal_.default, _ATEN.uniform_.default, _ATEN.zero_.default, _ATEN.fill_.Scalar}
# Operators that do the same to each element, for any values of the others.
_CHANGES = {
    _ATEN.mul_.Tensor, _ATEN.mul_.Scalar, _ATEN.div_.Tensor, _ATEN.add_.Tensor, _ATEN.add_.Scalar,
    _ATEN.erfinv_.default, _ATEN.clamp_.default,
}  # fmt: skip


class RandomSource:
    """Weights distributed as a family's own initialization has them, all fp32.

    Values depend on ``seed`` and the parameter's name, not on the order of reading. The model, on the meta device,
    holds a module's values while they are drawn. Memory: the rows that are read; where rows are not alike, the
    parameters of one module that holds parameters itself.
    """

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        self.model = model
        self.seed = seed
        self._stored_name = stored_names(model)
        self._recorded: dict[str, dict[str, _Initialisation]] = {}

    def check(self) -> None:
        """Raise a FinetuneError for a persistent buffer that only a checkpoint has values for."""
        if unset := unset_buffers(self.model):
            raise self._not_initialised(unset[0])

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            stored = self._stored_name[name]
            initialisation = self._initialisation(stored)
            if initialisation.alike and initialisation.shape:
                yield name, self.read_rows(name, 0, initialisation.shape[0])
            else:
                yield name, self._read_whole(stored)

    def reads_rows(self, name: str) -> bool:
        initialisation = self._initialisation(self._stored_name[name])
        return initialisation.alike and len(initialisation.shape) > 0

    def read_rows(self, name: str, first: int, stop: int) -> torch.Tensor:
        stored = self._stored_name[name]
        initialisation = self._initialisation(stored)
        if not initialisation.steps:
            raise self._not_initialised(stored)
        rows, width = initialisation.shape[0], initialisation.shape[1:].numel()
        group = max(1, GROUP_ELEMENTS // max(1, width))
        values = torch.empty(stop - first, *initialisation.shape[1:])
        with own_random_numbers(), torch.no_grad():
            for start in range(first // group * group, stop, group):
                end = min(start + group, rows)
                torch.default_generator.manual_seed(self._seed_of(f"{stored}/{start // group}"))
                if first <= start and end <= stop:
                    initialisation.apply(values[start - first : end - first])
                else:
                    drawn = initialisation.apply(torch.empty(end - start, *initialisation.shape[1:]))
                    begin, end = max(first, start), min(stop, end)
                    values[begin - first : end - first] = drawn[begin - start : end - start]
        return values

    def read_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Read nothing: the model has all its buffers."""
        return iter(())

    def read_compressed(self, name: str, parts: Sequence[int] | None = None) -> Iterator[Mapping[str, torch.Tensor]]:
        """Read nothing: random numbers are not compressed."""
        return iter(())

    def _read_whole(self, stored: str) -> torch.Tensor:
        path, _, attribute = stored.rpartition(".")
        # NaN, so that a parameter that is not initialised is found.
        values = {
            name: nn.Parameter(torch.full(parameter.shape, torch.nan, dtype=torch.float32), requires_grad=False)
            for name, parameter in self._parameters(path).items()
        }
        with own_random_numbers(self._seed_of(path)):
            self._initialise(path, values)
        value = values[attribute].detach()
        if value.flatten()[:: max(1, value.numel() // 4096)].isnan().any():
            raise self._not_initialised(stored)
        return value

    def _initialisation(self, stored: str) -> "_Initialisation":
        path, _, attribute = stored.rpartition(".")
        if path not in self._recorded:
            fake = {
                name: nn.Parameter(torch.empty(parameter.shape, device="meta"), requires_grad=False)
                for name, parameter in self._parameters(path).items()
            }
            recorder = _Recorder(fake)
            self._initialise(path, fake, recorder)
            self._recorded[path] = recorder.recorded
        return self._recorded[path][attribute]

    def _parameters(self, path: str) -> dict[str, nn.Parameter]:
        return dict(self.model.get_submodule(path).named_parameters(recurse=False))

    def _initialise(self, path: str, values: Mapping[str, nn.Parameter], recorder: "_Recorder | None" = None) -> None:
        module, on_meta = self.model.get_submodule(path), self._parameters(path)
        try:
            for name, parameter in values.items():
                setattr(module, name, parameter)
            with torch.no_grad(), recorder or nullcontext():
                for owner, ancestor in self._initialisers(path):
                    # From the leaf upwards, as transformers does: a block may scale its projections once more (GPT-2).
                    # All other parameters are on the meta device, where this costs nothing.
                    owner._init_weights(ancestor)
        finally:
            for name, parameter in on_meta.items():
                setattr(module, name, parameter)

    def _not_initialised(self, name: str) -> FinetuneError:
        return FinetuneError(
            f"transformers does not initialize {name} of {type(self.model).__name__}: start from a checkpoint."
        )

    def _seed_of(self, name: str) -> int:
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def _initialisers(self, path: str) -> list[tuple[PreTrainedModel, nn.Module]]:
        """Return a module and all around it, innermost first, each with the (sub-)model that initialises it."""
        chain: list[tuple[PreTrainedModel, nn.Module]] = [(self.model, self.model)]
        module: nn.Module = self.model
        for part in path.split(".") if path else ():
            module = module.get_submodule(part)
            chain.append((module if isinstance(module, PreTrainedModel) else chain[-1][0], module))
        return chain[::-1]


@dataclass
class _Initialisation:
    """What a family does to a parameter."""

    shape: torch.Size
    alike: bool = True  # Whether all elements get the same, so that any rows can be drawn alone
    # In-place operators on all elements, with their other arguments; none if nothing sets the parameter.
    steps: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def apply(self, values: torch.Tensor) -> torch.Tensor:
        for function, arguments, keywords in self.steps:
            function(values, *arguments, **keywords)
        return values


class _Recorder(TorchDispatchMode):
    """Records, while active, what is done to parameters on the meta device."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.recorded = {name: _Initialisation(value.shape) for name, value in parameters.items()}
        self._by_memory = {_memory(value): self.recorded[name] for name, value in parameters.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, keywords)) if isinstance(leaf, torch.Tensor)]
        memories = [_memory(tensor) for tensor in tensors if tensor.is_meta]
        touched = [self._by_memory[memory] for memory in memories if memory in self._by_memory]
        aliases = [result.alias_info for result in func._schema.returns]
        is_view = all(alias is not None and not alias.is_write for alias in aliases)
        if not touched or is_view:
            return func(*args, **keywords)
        target, rest = touched[0], tree_leaves((args[1:], keywords))
        whole = tensors[0] is args[0] and args[0].shape == target.shape and args[0].is_contiguous()
        others = any(isinstance(argument, torch.Tensor | torch.Generator) for argument in rest)
        if not whole or others or func not in _OVERWRITES | _CHANGES:
            for initialisation in touched:
                initialisation.alike = False
            return func(*args, **keywords)
        if func in _OVERWRITES:
            target.steps.clear()
        if func in _OVERWRITES or target.steps:
            target.steps.append((func, tuple(args[1:]), keywords))
        return args[0]


def _memory(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata


HEAD = "head.safetensors"


def classifier_config(config: PreTrainedConfig, classes: Sequence[str], pad_token_id: int | None) -> PreTrainedConfig:
    """Return the configuration of the sequence classifier of a language model's family.

    Args:
        classes: names of the classes; a single one stands for a reward.
        pad_token_id: token behind the end of texts, whose last token is what the head looks at; None: the one that
            ``config`` names.
    """
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise UserError(
            f"transformers has no sequence classifier of the family {config.model_type!r}: take a model of another, or "
            "an objective that needs no other head."
        )
    kinds: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    changed = copy.deepcopy(config)
    changed.architectures = [(kinds[0] if isinstance(kinds, list | tuple) else kinds).__name__]
    changed.id2label = dict(enumerate(classes))
    changed.label2id = {name: number for number, name in enumerate(classes)}
    if pad_token_id is not None:
        changed.pad_token_id = pad_token_id
    return changed


def write_with_new_head(checkpoint: Path, config: PreTrainedConfig, directory: Path, seed: int) -> Path:
    """Write a checkpoint directory of a classifier: links to the weights of ``checkpoint``, and a random head.

    What is there of the same configuration is left as it is.

    Args:
        config: from :func:`classifier_config`.
        seed: of the head's values, which are those of the family's own initialisation.

    Raises:
        UserError, FinetuneError: if the checkpoint lacks more than the head.
    """
    text = config.to_json_string(use_diff=True)
    if (directory / "config.json").is_file() and (directory / "config.json").read_text() == text:
        return directory
    model = build_meta_model(config)
    source = CheckpointSource(checkpoint, model)
    missing = source.missing()
    if any(name.startswith(f"{model.base_model_prefix}.") for name in missing):
        raise UserError(explain_missing(model, checkpoint, missing, source.unused))
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    weights: dict[str, str] = {}
    names: dict[Path, str] = {}
    for stored in (stored for name, stored in source.shards.files.items() if name not in source.unused):
        weights[stored.name] = names.setdefault(stored.file, f"weights-{len(names) + 1}.safetensors")
    for file, linked in names.items():
        (directory / linked).symlink_to(file.resolve())
    save_tensors(directory / HEAD, dict(RandomSource(model, seed).read(missing)))
    weights |= dict.fromkeys(missing, HEAD)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    copy_tokenizer_files(checkpoint, directory)
    (directory / "config.json").write_text(text)  # last: without it, nothing takes this for a checkpoint
    return directory
