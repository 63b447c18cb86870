"""The model of a run: its checkpoint, with a new head where the objective needs one, its tokenizer, and its size."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from cli.job.machine import planned_model, sequence_length
from cli.options.objectives import OBJECTIVES
from cli.options.option import naming
from common.data.template import dated
from common.errors import UserError, did_you_mean
from common.files import preset_files
from common.models.adapters.adapters import Adapters
from common.models.checkpoint.export import CHAT_TEMPLATE
from common.models.checkpoint.random_source import classifier_config, write_with_new_head
from common.models.checkpoint.sources import CheckpointSource
from common.models.presets import load_config
from common.models.task_type import TaskType, task_type_of
from common.store.directories import DirectoryLock
from fuyou.config import EngineConfig

FOLDER = "base"  # Folder inside the output directory with the language model as a classifier, before training


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a run: ``--chat-template``, or the one that comes with the model."""

    text: str | None  # None: the model's
    day: date  # Day that it writes

    @classmethod
    def named(cls, name: str | None, day: date) -> "ChatTemplate":
        return cls(None if name is None else chat_template_named(name), day)

    def of(self, holder: Any) -> Any:
        """Return the template for a tokenizer or processor."""
        return dated(holder.chat_template if self.text is None else self.text, self.day)

    def write(self, directory: Path) -> None:
        """Put it into a directory that has the model's."""
        if self.text is not None:
            (directory / CHAT_TEMPLATE).write_text(self.text)


def chat_template_named(name: str) -> str:
    """Return a chat template: one of ours by its name, or the content of a file."""
    presets = preset_files("chat_templates", ".jinja")
    if name in presets:
        return presets[name].read_text()
    file = Path(name).expanduser()
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--chat-template {name} is none of {', '.join(sorted(presets))}, nor a file that can be read "
            f"({getattr(error, 'strerror', None) or error}).{did_you_mean(name, presets)}"
        ) from error


@dataclass(frozen=True)
class ModelChoice:
    """The model that the options name, with a new head where the objective needs one."""

    name: str
    objective: str
    requested_seq_len: int | None
    template: ChatTemplate
    output: Path
    seed: int
    base: Path | None = None  # Directory with the model that has a new head

    @cached_property
    def _loaded(self) -> tuple[PreTrainedConfig, Path | None]:
        with naming("--model"):
            return load_config(self.base or self.name)

    @property
    def config(self) -> PreTrainedConfig:
        return self._loaded[0]

    @property
    def checkpoint(self) -> Path | None:
        """Directory of the checkpoint; None for a preset, whose weights are random."""
        return self._loaded[1]

    @cached_property
    def task_type(self) -> TaskType:
        """Task that its head is for."""
        return task_type_of(self.config)

    @cached_property
    def seq_len(self) -> int:
        """Tokens per sequence."""
        return sequence_length(self.requested_seq_len, self.config)

    @property
    def vocab_size(self) -> int:
        return int(self.config.get_text_config().vocab_size)

    @property
    def lacks_head(self) -> bool:
        """Whether it writes text, and the objective trains a classifier."""
        return OBJECTIVES[self.objective].classifies and self.task_type.generates

    @property
    def to_plan(self) -> str | PreTrainedConfig:
        """What the planner is given, without data: the model, or a classifier in its place."""
        return planned_model(self.name, self.objective, self.config)

    def check_head(self) -> None:
        """See whether the objective can train its head, or a new one can be had in its place."""
        task, objective = self.task_type, self.objective
        if task is TaskType.SEQUENCE_CLASSIFICATION and OBJECTIVES[objective].classifies:
            is_reward = self.config.num_labels == 1
            if is_reward is not (objective == "reward"):
                kind = "a reward model" if is_reward else f"a classifier of {self.config.num_labels} classes"
                other = "reward" if is_reward else "classify"
                raise UserError(f"{self.name} is {kind}: give --objective {other}, or the language model.")
        elif not task.generates:
            instead = "use fuyou.Engine, whose batches take its labels."
            if task is TaskType.SEQUENCE_CLASSIFICATION:
                instead = "add --objective classify or reward."
            raise UserError(
                f"{self.name} is {task.value}, and --objective {objective} trains models that write text: {instead}"
            )

    def check_weights(self, model: PreTrainedModel) -> None:
        """See whether the checkpoint has the weights of the model."""
        if self.checkpoint is not None:
            CheckpointSource(self.checkpoint, model).check()

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer, with the chat template of the run."""
        if self.checkpoint is None:
            raise UserError(
                f"{self.name} is a preset, and a preset has no tokenizer: give a checkpoint directory, or --data "
                "random without --eval-data, to measure throughput."
            )
        try:
            patterns = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken")
            if not any(any(self.checkpoint.glob(pattern)) for pattern in patterns):
                raise OSError("no tokenizer.json, vocabulary or *.model file")
            tokenizer = AutoTokenizer.from_pretrained(self.checkpoint, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # each tokenizer class fails in its own way
            raise UserError(
                f"{self.checkpoint} has no tokenizer that transformers can load, and --data needs one: {error}"
            ) from error
        tokenizer.chat_template = self.template.of(tokenizer)
        return tokenizer

    def with_head(self, classes: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> "ModelChoice":
        """Return the model with a new head, written to the output directory."""
        assert self.checkpoint is not None
        known = self.config.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id
        pad = next((int(token) for token in known if token is not None), 0)
        new = classifier_config(self.config, classes, pad)
        with DirectoryLock([self.output], patience=math.inf):  # of several ranks on a machine, the first one makes it
            base = write_with_new_head(self.checkpoint, new, self.output / FOLDER, self.seed)
            self.template.write(base)
        return replace(self, base=base)


def trainable_parameters(engine: EngineConfig, model: PreTrainedModel) -> int:
    """Count the numbers that are trained once ``model`` has its adapters. It is on the meta device, and is changed."""
    config = copy.deepcopy(engine.adapters)
    assert config is not None
    engine.towers.without_adapters(config, model)
    names = Adapters(model, config, engine.seed, draw=False, saved=engine.saved_adapter).trainable_names
    return sum(model.get_parameter(name).numel() for name in names)
