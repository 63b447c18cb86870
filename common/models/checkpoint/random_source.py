"""Random weights, as the family initialises them: of a whole model, one parameter at a time, and of a new head."""

import copy
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PreTrainedConfig, PreTrainedModel

from common.errors import FinetuneError, UserError
from common.files import copy_into, replace_file
from common.models.checkpoint.gguf_table import TABLE
from common.models.checkpoint.shards import INDEX
from common.models.checkpoint.sources import CheckpointSource, WeightSource
from common.models.checkpoint.writer import copy_tokenizer_files, save_tensors
from common.models.meta_model import build_meta_model, unset_buffers
from common.models.structure import stored_names
from common.models.task_type import is_encoder_decoder
from common.models.vision import tower_parameters
from common.randomness import own_random_numbers

GROUP_ELEMENTS = 1 << 20  # Elements that are drawn together (or a row), so that any rows can be drawn alone


class RandomSource(WeightSource):
    """Weights distributed as a family's own initialization has them, all fp32.

    Values depend on ``seed`` and the parameter's name, not on the order of reading. The model, on the meta device,
    holds a parameter's values while they are drawn. Memory: one parameter, or the rows that are read.
    """

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        self.model = model
        self.seed = seed
        self._stored_name = stored_names(model)
        self._towers = frozenset(tower_parameters(model))

    def check(self) -> None:
        """Raise a FinetuneError for a persistent buffer that only a checkpoint has values for."""
        if unset := unset_buffers(self.model):
            raise self._not_initialized(unset[0])

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            shape = self.model.get_parameter(name).shape
            if self.reads_rows(name):
                yield name, self.read_rows(name, 0, shape[0])
            else:
                yield name, self._draw(self._stored_name[name], 0, shape)

    def reads_rows(self, name: str) -> bool:
        """Return whether :meth:`read_rows` can read a parameter: a matrix, or experts, of the part that reads text.

        Families draw all elements of these alike, but a padding token's, and but for matrices of towers, which some
        draw by the shape of the whole (SigLIP: Xavier).
        """
        module = self.model.get_submodule(self._stored_name[name].rpartition(".")[0])
        if name in self._towers or getattr(module, "padding_idx", None) is not None:
            return False
        return self.model.get_parameter(name).dim() > 1 and not isinstance(module, nn.Conv1d)

    def read_rows(self, name: str, first: int, stop: int) -> torch.Tensor:
        rows, *others = self.model.get_parameter(name).shape
        group = max(1, GROUP_ELEMENTS // max(1, math.prod(others)))
        values = torch.empty(stop - first, *others)
        for start in range(first // group * group, stop, group):
            drawn = self._draw(self._stored_name[name], start // group, (min(group, rows - start), *others))
            begin = max(first, start)
            end = min(stop, start + len(drawn))
            values[begin - first : end - first] = drawn[begin - start : end - start]
        return values

    def _draw(self, stored: str, group: int, shape: Sequence[int]) -> torch.Tensor:
        """Draw a parameter, or a group of its rows. All others are on the meta device, where this costs little."""
        path, _, attribute = stored.rpartition(".")
        module = self.model.get_submodule(path)
        on_meta = getattr(module, attribute)
        # NaN, so that a parameter that is not initialized is found.
        drawn = nn.Parameter(torch.full(tuple(shape), torch.nan, dtype=torch.float32), requires_grad=False)
        try:
            setattr(module, attribute, drawn)
            with own_random_numbers(self._seed_of(f"{stored}/{group}")), torch.no_grad():
                for owner, ancestor in self._initializers(path):
                    # From the leaf upwards, as transformers does: a block may scale its projections once more (GPT-2).
                    owner._init_weights(ancestor)
        finally:
            setattr(module, attribute, on_meta)
        if drawn.flatten()[:: max(1, drawn.numel() // 4096)].isnan().any():
            raise self._not_initialized(stored)
        return drawn.detach()

    def _not_initialized(self, name: str) -> FinetuneError:
        return FinetuneError(
            f"transformers does not initialize {name} of {type(self.model).__name__}: start from a checkpoint."
        )

    def _seed_of(self, name: str) -> int:
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def _initializers(self, path: str) -> list[tuple[PreTrainedModel, nn.Module]]:
        """Return a module and all around it, innermost first, each with the (sub-)model that initializes it."""
        chain: list[tuple[PreTrainedModel, nn.Module]] = [(self.model, self.model)]
        module: nn.Module = self.model
        for part in path.split(".") if path else ():
            module = module.get_submodule(part)
            chain.append((module if isinstance(module, PreTrainedModel) else chain[-1][0], module))
        return chain[::-1]


HEAD = "head.safetensors"


def classifier_config(
    config: PreTrainedConfig, classes: Sequence[str], pad_token_id: int | None
) -> PreTrainedConfig:
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
    if is_encoder_decoder(type(config)()):
        raise UserError(
            f"The sequence classifiers of the family {config.model_type!r} have an encoder and a decoder, and models "
            "of one of them are trained: take a model of another, or an objective that needs no other head."
        )
    kinds: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    changed = copy.deepcopy(config)
    changed.architectures = [(kinds[0] if isinstance(kinds, list | tuple) else kinds).__name__]
    changed.id2label = dict(enumerate(classes))
    changed.label2id = {name: number for number, name in enumerate(classes)}
    changed.problem_type = None  # of a head that is left out
    if pad_token_id is not None:
        changed.pad_token_id = pad_token_id
    return changed


def write_with_new_head(checkpoint: Path, config: PreTrainedConfig, folder: Path, seed: int) -> None:
    """Write the files of a classifier's checkpoint: links to the weights of ``checkpoint``, and a random head.

    Args:
        config: from :func:`classifier_config`.
        folder: an empty folder, whose files are moved into place later.
        seed: of the head's values, which are those of the family's own initialisation.

    Raises:
        UserError, FinetuneError: if the checkpoint lacks more than the head.
    """
    model = build_meta_model(config, checkpoint=checkpoint)
    source = CheckpointSource(checkpoint, model)
    missing = source.missing()
    if any(name.startswith(f"{model.base_model_prefix}.") for name in missing):
        raise UserError(
            f"{checkpoint} cannot get the head of a {type(model).__name__}, which has more than that and the rest of "
            f"this model: {', '.join(missing[:3])}. Take a model of another family, or an objective that needs no "
            "other head."
        )
    weights: dict[str, str] = {}
    names: dict[Path, str] = {}
    if (checkpoint / TABLE).is_file():
        copy_into(folder, checkpoint / TABLE)
        names = {stored.file: stored.file.name for stored in source.shards.files.values()}
    else:
        for stored in (stored for name, stored in source.shards.files.items() if name not in source.unused):
            weights[stored.name] = names.setdefault(stored.file, f"weights-{len(names) + 1}.safetensors")
    for file, linked in names.items():
        (folder / linked).symlink_to(file.resolve())
    save_tensors(folder / HEAD, dict(RandomSource(model, seed).read(missing)))
    weights |= dict.fromkeys(missing, HEAD)
    replace_file(folder / INDEX, json.dumps({"metadata": {}, "weight_map": weights}))
    copy_tokenizer_files(checkpoint, folder)
    replace_file(folder / "config.json", config.to_json_string(use_diff=True))
    source.shards.watched.check()
