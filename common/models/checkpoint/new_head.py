"""A language model's checkpoint as a sequence classifier's: the same weights, linked, and a new head.

It is what ``AutoModelForSequenceClassification.from_pretrained`` makes of a language model, as a directory, so that
any reader of checkpoints reads it too, and adapters can name the model that they belong to.
"""

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PreTrainedConfig

from common.errors import UserError
from common.models.checkpoint.export import copy_tokenizer_files, save_tensors
from common.models.checkpoint.random_source import RandomSource
from common.models.checkpoint.shards import INDEX
from common.models.checkpoint.sources import CheckpointSource, explain_missing
from common.models.meta_model import build_meta_model

HEAD = "head.safetensors"


def classifier_config(config: PreTrainedConfig, classes: Sequence[str], pad_token_id: int | None) -> PreTrainedConfig:
    """Return the configuration of the sequence classifier of a language model's family.

    Args:
        classes: names of the classes; a single one stands for a reward.
        pad_token_id: token behind the end of texts, whose last token is what the head looks at; None: the one that
            ``config`` names.

    Raises:
        UserError: if transformers has no such class in this family.
    """
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise UserError(
            f"transformers has no sequence classifier of the family {config.model_type!r}: take a model of another, or "
            "an objective that needs no other head."
        )
    classes_of_config = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    kind: Any = classes_of_config[0] if isinstance(classes_of_config, list | tuple) else classes_of_config
    changed = copy.deepcopy(config)
    changed.architectures = [kind.__name__]
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

    Returns:
        ``directory``.

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
    for name, stored in source.shards.files.items():
        if name not in source.unused:
            linked = names.setdefault(stored.file, f"weights-{len(names) + 1}.safetensors")
            weights[stored.name] = linked
    for file, linked in names.items():
        (directory / linked).symlink_to(file.resolve())
    save_tensors(directory / HEAD, dict(RandomSource(model, seed).read(missing)))
    weights |= dict.fromkeys(missing, HEAD)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    copy_tokenizer_files(checkpoint, directory)
    (directory / "config.json").write_text(text)  # last: without it, nothing takes this for a checkpoint
    return directory
