"""The data of a run: the batches to train on, and those to evaluate with."""

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from cli.job.machine import REWARD
from cli.job.model import ChatTemplate, ModelChoice
from cli.options.objectives import OBJECTIVES, Items, ObjectiveTraits
from cli.options.option import naming
from cli.options.run_record import RUN
from common.data import Batches, DataConfig, PackedBatches, RandomBatches, open_data
from common.data.batches import MixedBatches
from common.data.examples import ItemKind, class_kind, labels_of_records, pair_kind
from common.data.files import find_files
from common.data.images import ImageBatches, any_images, open_image_data
from common.data.processor import load_processor
from common.data.selection import RecordSelection
from common.errors import UserError
from common.files import cache_directory
from common.models.checkpoint.companions import follow_file
from common.models.task_type import TaskType
from fuyou.model.family import Family

DataSet = tuple[tuple[str, ...], float | None]  # Files of a data set, and its weight
RANDOM_TOKENS = "random tokens"  # Digest of data that are made up
TOKENS = "tokens"  # Folder in the run's directory for tokens that are kept there
_KEPT_S = 30 * 86400  # Seconds after its last use that a data set's tokens stay in the cache


def token_cache(words: tuple[str, ...], output: Path, shared: bool) -> Path:
    """Return the directory for tokens made of data files: the same for all runs of this user, or the run's where there
    can be none, or where nodes share it (``shared``). What no run has used for a month is removed."""
    root = cache_directory() / "tokens"
    paths = "\n".join(str(Path(word).expanduser().absolute()) for word in words)
    name = hashlib.sha256(paths.encode()).hexdigest()[:16]
    try:
        if shared:
            raise OSError("of all nodes")
        (root / name).mkdir(parents=True, exist_ok=True)
        os.utime(root / name)
    except OSError:
        return output / RUN / TOKENS
    for other in root.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - other.stat().st_mtime > _KEPT_S:
                shutil.rmtree(other)
    return root / name


def _item_kind(traits: ObjectiveTraits, config: PreTrainedConfig) -> ItemKind | None:
    """Return what an objective learns from instead of rows of tokens."""
    match traits.items:
        case Items.PAIRS if traits.classifies:
            return pair_kind(classifies=True, pad=config.get_text_config().pad_token_id)
        case Items.PAIRS:
            return pair_kind()
        case Items.TEXTS:
            return class_kind(_classes(config), config.get_text_config().pad_token_id)
    return None


def _classes(config: PreTrainedConfig) -> dict[str, int]:
    """Return the numbers of the classes by name, from ``id2label``, by which the trained model answers."""
    names = {int(number): str(name) for number, name in (config.id2label or {}).items()}
    for name, number in (config.label2id or {}).items():
        if names.get(int(number)) != name:
            raise UserError(
                f"config.json has two names for class {int(number)}: {names.get(int(number))!r} in id2label, and "
                f"{name!r} in label2id. Make them agree."
            )
    classes = {name: number for number, name in names.items()}
    if len(classes) < len(names):
        raise UserError(
            f"config.json gives several classes one name in id2label: {', '.join(names.values())}."
        )
    return classes


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """The data of a run as the options name them, and how they are prepared for a model."""

    sets: Sequence[DataSet]  # To train on; none: random tokens
    held_out: tuple[str, ...]  # Files to evaluate with
    selection: RecordSelection  # Of the data to train on, and of what is held out from them
    objective: str
    batch_size: int
    seed: int
    truncate: bool
    drop_unseen: bool
    template: ChatTemplate
    output: Path
    shared: bool  # Whether nodes share the output directory, where tokens are kept then
    held_out_option: str = "--eval-data"  # What names the files to evaluate with, for messages

    def __post_init__(self) -> None:
        for option, sets in (("--data", self.sets), (self.held_out_option, [(self.held_out, None)])):
            for files, _ in sets:
                with naming(option):
                    find_files(files)

    @property
    def is_random(self) -> bool:
        return not (self.sets or self.held_out)

    @property
    def files(self) -> tuple[str, ...]:
        """All files to train on."""
        return tuple(file for files, _ in self.sets for file in files)

    def class_names(self) -> Sequence[str]:
        """Return the names of the classes that the data have; a reward model has a single one, which is a number."""
        if self.objective == "reward":
            return REWARD
        with naming("--data"):
            return labels_of_records(RecordSelection(self.selection.columns).read(find_files(self.files)))

    def random(self, model: ModelChoice, family: Family) -> Batches:
        """Return batches of random tokens."""
        shape = model.seq_len, self.batch_size
        return RandomBatches(model.vocab_size, *shape, self.seed, labels_ahead=not family.shifts_labels)

    def open(
        self, model: ModelChoice, family: Family, tokenizer: PreTrainedTokenizerBase
    ) -> tuple[Batches, str, Batches | None]:
        """Return the batches to train on, their digest, and those to evaluate with, if any."""
        config = DataConfig(
            (*self.files, *self.held_out),
            model.seq_len,
            self.batch_size,
            self.seed,
            packed=family.isolation is not None,
            kind=_item_kind(OBJECTIVES[self.objective], model.config),
            labels_ahead=not family.shifts_labels,
            truncate=self.truncate,
            selection=self.selection,
            every_token=self.objective == "pretrain",
            vocab_size=model.vocab_size,
            drop_unseen=self.drop_unseen,
        )
        opener = _Opener(self, config, model, tokenizer)
        batches, key = opener.batches() if self.sets else (self.random(model, family), RANDOM_TOKENS)
        return batches, key, opener.held_out()


@dataclass(frozen=True)
class _Opener:
    """Opens the files of a data source for a model."""

    source: DataSource
    config: DataConfig  # But for the files
    model: ModelChoice
    tokenizer: PreTrainedTokenizerBase

    def batches(self) -> tuple[Batches, str]:
        sets = self.source.sets
        with naming("--data"):
            parts = [self._open(replace(self.config, files=files)) for files, _ in sets]
            if len(parts) == 1:
                return parts[0], parts[0].digest
            packed = [part for part in parts if isinstance(part, PackedBatches)]
            if len(packed) < len(parts) or self.config.kind is not None:
                raise UserError(
                    "Data sets with weights hold text to learn the next token from: leave the weights out, or the "
                    "images, or --objective."
                )
            weights = [weight for _, weight in sets if weight is not None]
            mixed = MixedBatches(packed, weights, self.config.batch_size, self.config.seed)
        return mixed, mixed.digest

    def held_out(self) -> Batches | None:
        source = self.source
        config = replace(self.config, shuffle=False)
        if source.held_out:
            with naming(source.held_out_option):
                selection = RecordSelection(source.selection.columns)
                return self._open(replace(config, files=source.held_out, selection=selection))
        if not source.selection.held_out:
            return None
        with naming("--eval-split"):
            sizes = tuple(len(find_files(files)) for files, _ in source.sets) if len(source.sets) > 1 else ()
            selection = replace(source.selection, takes_held_out=True, files_of_sets=sizes)
            return self._open(replace(config, files=source.files, selection=selection))

    def _open(self, config: DataConfig) -> PackedBatches | ImageBatches:
        source = self.source
        model = self.model
        if not (model.task_type is TaskType.IMAGE_TEXT_TO_TEXT and any_images(config.files)):
            return open_data(config, self.tokenizer, token_cache(config.files, source.output, source.shared))
        if source.objective != "sft":
            raise UserError(
                f"--objective {source.objective} reads text, and the data hold images: leave it out, or the images."
            )
        processor = load_processor(model.companions.processor)
        follow_file(processor.tokenizer, model.companions.processor)
        model.companions.set_template(processor)
        processor.chat_template = source.template.of(processor)
        return open_image_data(config, processor, source.output / RUN / TOKENS)
