"""The model of a run: its checkpoint, with a new head where the objective needs one, its tokenizer, and its size."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from cli.job.machine import planned_config, sequence_length
from cli.job.outputs import BASE, Outputs, content_digest
from cli.options.objectives import OBJECTIVES
from cli.options.option import naming
from common.data.template import dated
from common.errors import UserError, did_you_mean
from common.files import preset_files, read_text_file
from common.models.adapters.adapted_model import AdaptedModel
from common.models.checkpoint.companions import Companions
from common.models.checkpoint.random_source import classifier_config, write_with_new_head
from common.models.checkpoint.writer import write_template
from common.models.presets import load_config
from common.models.task_type import TaskType, task_type_of
from common.units import counted

_TEMPLATE_BYTES = 4 << 20  # Largest file of a chat template


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
        """Put it into a directory in place of the model's."""
        if self.text is not None:
            write_template(directory, self.text)


def chat_template_named(name: str) -> str:
    """Return a chat template: one of ours by its name, or the content of a file."""
    presets = preset_files("chat_templates", ".jinja")
    if name in presets:
        return presets[name].read_text()
    file = Path(name).expanduser()
    try:
        return read_text_file(file, _TEMPLATE_BYTES).removeprefix("\ufeff")  # a byte order mark
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
    seed: int
    adapter: Path | None = None  # Directory of the adapter to begin with
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

    def check_head(self) -> None:
        """See whether the objective can train its head, or a new one can be had in its place."""
        task = self.task_type
        objective = self.objective
        if task is TaskType.SEQUENCE_CLASSIFICATION and OBJECTIVES[objective].classifies:
            problem = getattr(self.config, "problem_type", None)
            if problem not in (None, "single_label_classification"):
                raise UserError(
                    f"{self.name} has problem_type {problem!r} in its config.json, and --objective {objective} trains "
                    "classes that exclude each other: train it with fuyou.Engine and a loss of your own."
                )
            is_reward = self.config.num_labels == 1
            if is_reward is not (objective == "reward"):
                kind = "a reward model" if is_reward else f"a classifier of {self.config.num_labels} classes"
                other = "reward" if is_reward else "classify"
                raise UserError(f"{self.name} is {kind}: give --objective {other}, or the language model.")
        elif not task.generates:
            trained = "sequence classifiers" if OBJECTIVES[objective].classifies else "models that write text"
            instead = "use fuyou.Engine, whose batches take its labels."
            if task is TaskType.SEQUENCE_CLASSIFICATION:
                instead = f"give --objective {'reward' if self.config.num_labels == 1 else 'classify'}."
            raise UserError(
                f"{self.name} is {task.value}, and --objective {objective} trains {trained}: {instead}"
            )
        planned_config(self.name, objective, self.config)  # refuses what can have no new head

    @cached_property
    def companions(self) -> Companions:
        """The tokenizer and the like that the run reads."""
        assert self.checkpoint is not None
        return Companions(self.checkpoint, self.adapter)

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer, with the chat template of the run."""
        if self.checkpoint is None:
            raise UserError(
                f"{self.name} is a preset, and a preset has no tokenizer: give a checkpoint directory, or --data "
                "random without --eval-data, to measure throughput."
            )
        directory = self.companions.tokenizer
        try:
            patterns = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken")
            if not any(any(directory.glob(pattern)) for pattern in patterns):
                raise OSError("no tokenizer.json, vocabulary or *.model file")
            tokenizer = self.companions.load_tokenizer(self.config)
            tokenizer("a")  # which reads settings whose types nobody has checked
        except Exception as error:  # each tokenizer class fails in its own way
            raise UserError(
                f"{directory} has no tokenizer that transformers can load, and --data needs one ({error}): copy "
                "there the tokenizer files that come with the model."
            ) from error
        tokenizer.chat_template = self.template.of(tokenizer)
        return tokenizer

    def with_head(
        self, classes: Sequence[str], tokenizer: PreTrainedTokenizerBase, outputs: Outputs
    ) -> "ModelChoice":
        """Return the model with a new head, which the run writes before it trains."""
        assert self.checkpoint is not None
        known = self.config.get_text_config().pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id
        pad = next((int(token) for token in known if token is not None), 0)
        self._check_base(self.checkpoint, outputs)
        new = classifier_config(self.config, classes, pad)
        base = outputs.directory / BASE
        is_there = outputs.is_whole(BASE)
        if is_there:
            before, _ = load_config(str(base))
            _check_classes(before.id2label, new.id2label)
            is_there = (base / "config.json").read_text() == new.to_json_string(use_diff=True)
        if not is_there:  # of several ranks, the first one has written it before the others come here
            folder = outputs.prepare(BASE)
            write_with_new_head(self.checkpoint, new, folder, self.seed)
            self.template.write(folder)
            outputs.put(BASE)
        return replace(self, base=base)

    def _check_base(self, checkpoint: Path, outputs: Outputs) -> None:
        """Refuse to continue with other weights than those that the run's own model is made of."""
        links = outputs.links(BASE)
        files = (
            [file for pattern in ("*.safetensors", "*.gguf") for file in checkpoint.glob(pattern)]
            if links
            else []
        )
        contents = {content_digest(file) for file in files}
        for target, content in links.items():
            if content and content not in contents:
                raise UserError(
                    f"--resume: this run began with the model in {target.parent}, and {checkpoint} has other weights: "
                    "give the model that it began with, where it is now, or begin a new run in another --output."
                )


def unplaced_weights(model: AdaptedModel) -> str:
    """See whether the checkpoint has the weights of the model; return what else it has, in words."""
    if model.source is None:
        return ""
    model.source.check()
    unplaced = model.source.unplaced
    if not unplaced:
        return ""
    count = counted(len(unplaced), "tensor")
    return f"{count} of the checkpoint, for which the model has no place; the first is {unplaced[0]}"


def _check_classes(before: Any, now: Any) -> None:
    """Refuse to give a run's own model, which its adapters are for, other classes than it began with."""
    if before != now:
        began, has = (", ".join(names.values()) for names in (before, now))
        raise UserError(
            f"--resume: --data has the classes {has}, and this run began with {began}. Give the data that it began "
            "with, or begin a new run in another --output."
        )


def trained_share(model: AdaptedModel) -> float:
    """Return the number of parameters that a run trains, over that of the model before: at most 1."""
    return min(1.0, model.trained_parameters / model.parameters)
