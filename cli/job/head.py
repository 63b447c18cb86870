"""The model of an objective that needs a separate head: a sequence classifier made of a language model."""

import math
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from cli.job.data import write_chat_template
from cli.options.settings import Settings
from common.errors import UserError
from common.models.checkpoint.new_head import classifier_config, write_with_new_head
from common.models.task_type import TaskType, task_type_of
from common.store.directories import DirectoryLock

REWARD = ("reward",)  # Names of a reward model's classes: a single one, which is a number
FOLDER = "base"  # Folder inside the output directory with the language model as a classifier, before training
_CLASSES = 2  # Classes that are assumed where no data say it, for a plan: their number changes next to nothing


def check_head(settings: Settings, config: PreTrainedConfig) -> None:
    """See whether the model's head is one that the objective can train, or a new one can be had in its place.

    Raises:
        UserError: if not.
    """
    task, objective = task_type_of(config), settings.objective
    if task is TaskType.SEQUENCE_CLASSIFICATION and settings.traits.classifies:
        is_reward = config.num_labels == 1
        if is_reward is not (objective == "reward"):
            kind = "a reward model" if is_reward else f"a classifier of {config.num_labels} classes"
            other = "reward" if is_reward else "classify"
            raise UserError(f"{settings.model} is {kind}: give --objective {other}, or the language model.")
        return
    if not task.generates:
        raise UserError(
            f"{settings.model} is {task.value}, and --objective {objective} trains models that write text: "
            + (
                "add --objective classify or reward."
                if task is TaskType.SEQUENCE_CLASSIFICATION
                else "use fuyou.Engine, whose batches take its labels."
            )
        )
    if settings.traits.classifies:
        _ = planned_config(settings, config)


def planned_config(settings: Settings, config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of what is trained, as far as it is known without data.

    Raises:
        UserError: if this family has no classifier.
    """
    if not settings.traits.classifies or not task_type_of(config).generates:
        return config
    classes = REWARD if settings.objective == "reward" else [str(number) for number in range(_CLASSES)]
    return classifier_config(config, classes, None)


def with_head(
    settings: Settings,
    config: PreTrainedConfig,
    checkpoint: Path,
    tokenizer: PreTrainedTokenizerBase,
    classes: Callable[[], list[str]],
    output: Path,
) -> Path:
    """Return the checkpoint to train: ``checkpoint`` itself, or one with a new head in the output directory.

    Args:
        tokenizer: names the token that pads.
        classes: returns the names of the classes that the data have.

    Raises:
        UserError: see :func:`write_with_new_head`.
    """
    if not settings.traits.classifies or not task_type_of(config).generates:
        return checkpoint
    known = config.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id
    pad = next((int(token) for token in known if token is not None), 0)
    names = REWARD if settings.objective == "reward" else classes()
    new_config = classifier_config(config, names, pad)
    with DirectoryLock([output], patience=math.inf):  # of several ranks on a machine, the first one makes it for all
        base = write_with_new_head(checkpoint, new_config, output / FOLDER, settings.seed)
        write_chat_template(settings, base)
        return base
