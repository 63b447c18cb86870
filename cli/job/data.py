"""Opening the data of a run: the tokenizer, the batches to train on and those to evaluate with."""

import contextlib
import hashlib
import os
import shutil
import time
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from cli.job.job import Setup
from cli.options.objectives import Items
from cli.options.option import naming
from cli.options.settings import Settings
from common.data import Batches, DataConfig, PackedBatches, RandomBatches, open_data
from common.data.batches import MixedBatches
from common.data.files import find_files
from common.data.images import ImageBatches, any_images, load_processor, open_image_data
from common.data.selection import RecordSelection
from common.data.shapes import ItemKind, class_kind, labels_of_records, pair_kind
from common.data.template import dated
from common.errors import UserError, did_you_mean
from common.files import cache_directory, preset_files
from common.models.checkpoint.export import CHAT_TEMPLATE
from common.models.task_type import TaskType
from fuyou.model.family import Family

RANDOM_TOKENS = "random tokens"  # Digest of data that are made up
_KEPT_S = 30 * 86400  # Seconds after its last use that a data set's tokens stay in the cache


def tokenizer_of(settings: Settings, checkpoint: Path | None, day: date | None) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    if checkpoint is None:
        raise UserError(
            f"{settings.model} is a preset, and a preset has no tokenizer: give a checkpoint directory, or --data "
            "random without --eval-data, to measure throughput."
        )
    try:
        if not any(any(checkpoint.glob(name)) for name in ("tokenizer*", "vocab.*", "*.model", "*.tiktoken")):
            raise OSError("no tokenizer.json, vocabulary or *.model file")
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each tokenizer class fails in its own way
        raise UserError(
            f"{checkpoint} has no tokenizer that transformers can load, and --data needs one: {error}"
        ) from error
    tokenizer.chat_template = _template_of(tokenizer, settings, day)
    return tokenizer


def _template_of(holder: Any, settings: Settings, day: date | None) -> Any:
    """Return the chat template of a tokenizer or processor, or of ``--chat-template``, which writes this day."""
    template = holder.chat_template if settings.chat_template is None else chat_template_named(settings.chat_template)
    return dated(template, day or date.today())


def write_chat_template(settings: Settings, directory: Path) -> None:
    """Put the chat template of ``--chat-template``, if there is one, into a directory with a tokenizer."""
    if settings.chat_template is not None:
        (directory / CHAT_TEMPLATE).write_text(chat_template_named(settings.chat_template))


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


def token_cache(words: tuple[str, ...], output: Path, shared: bool) -> Path:
    """Return the directory for tokens made of data files: the same for all runs of this user, or in ``output`` where
    there can be none, or where nodes share it (``shared``). What no run has used for a month is removed."""
    root = cache_directory() / "tokens"
    paths = "\n".join(str(Path(word).expanduser().absolute()) for word in words)
    name = hashlib.sha256(paths.encode()).hexdigest()[:16]
    try:
        if shared:
            raise OSError("of all nodes")
        (root / name).mkdir(parents=True, exist_ok=True)
        os.utime(root / name)
    except OSError:
        return output / "data"
    for other in root.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - other.stat().st_mtime > _KEPT_S:
                shutil.rmtree(other)
    return root / name


def class_names(settings: Settings) -> list[str]:
    with naming("--data"):
        files = find_files(tuple(file for files, _ in settings.data_sets for file in files))
        return labels_of_records(RecordSelection(settings.column_of).read(files))


@dataclass(frozen=True)
class DataSource:
    """A data source opens the data files that the settings name, packed for one model."""

    setup: Setup
    tokenizer: PreTrainedTokenizerBase | None
    task_type: TaskType
    family: Family

    def batches(self, vocab_size: int) -> tuple[Batches, str]:
        """Return the batches of ``--data`` with their digest; random tokens where there are none."""
        settings = self.setup.settings
        if self.tokenizer is None or not settings.data:
            shape, ahead = (self.setup.seq_len, settings.batch_size), not self.family.shifts_labels
            return RandomBatches(vocab_size, *shape, settings.seed, ahead), RANDOM_TOKENS
        with naming("--data"):
            sets = settings.data_sets
            parts = [self._open(files) for files, _ in sets]
            if len(parts) == 1:
                return parts[0], parts[0].digest
            packed = [part for part in parts if isinstance(part, PackedBatches)]
            if len(packed) < len(parts) or self._item_kind() is not None:
                raise UserError(
                    "Data sets with weights hold text to learn the next token from: leave the weights out, or the "
                    "images, or --objective."
                )
            weights = [weight for _, weight in sets if weight is not None]
            mixed = MixedBatches(packed, weights, settings.batch_size, settings.seed)
        return mixed, mixed.digest

    def held_out(self) -> Batches | None:
        """Return the batches to evaluate with, in the order of their files; None where there are none."""
        settings = self.setup.settings
        if self.tokenizer is None:
            return None
        if settings.eval_data:
            with naming("--eval-data"):
                return self._open(settings.eval_data, held_out=True)
        if settings.eval_split is None:
            return None
        with naming("--eval-split"):
            sets = [files for files, _ in settings.data_sets]
            sizes = tuple(len(find_files(files)) for files in sets) if len(sets) > 1 else ()
            return self._open(tuple(file for files in sets for file in files), True, sizes)

    def _open(
        self, files: tuple[str, ...], held_out: bool = False, files_of_sets: tuple[int, ...] = ()
    ) -> PackedBatches | ImageBatches:
        settings = self.setup.settings
        assert self.tokenizer is not None
        config = DataConfig(
            files,
            self.setup.seq_len,
            settings.batch_size,
            settings.seed,
            shuffle=not held_out,
            truncate=settings.truncate,
            packed=self.family.isolation is not None,
            kind=self._item_kind(),
            labels_ahead=not self.family.shifts_labels,
            selection=replace(self._selection(held_out), files_of_sets=files_of_sets),
            every_token=settings.objective == "pretrain",
            vocab_size=self.setup.config.get_text_config().vocab_size,
            drop_unseen=settings.drop_unseen,
        )
        if config.kind is None and self.task_type is TaskType.IMAGE_TEXT_TO_TEXT and any_images(config.files):
            assert self.setup.checkpoint is not None
            if config.every_token:
                raise UserError("--objective pretrain reads text, and the data hold images: leave it out.")
            processor = load_processor(self.setup.checkpoint)
            processor.chat_template = _template_of(processor, settings, self.setup.template_date)
            return open_image_data(config, processor, self.setup.output / "data")
        return open_data(config, self.tokenizer, token_cache(files, self.setup.output, settings.nodes is not None))

    def _item_kind(self) -> ItemKind | None:
        traits = self.setup.settings.traits
        match traits.items:
            case Items.PAIRS if traits.classifies:
                return pair_kind(classifies=True, pad=self.setup.config.pad_token_id)
            case Items.PAIRS:
                return pair_kind()
            case Items.TEXTS:
                classes: dict[str, int] = {
                    str(name): int(number) for name, number in (self.setup.config.label2id or {}).items()
                }
                return class_kind(classes, self.setup.config.pad_token_id)
        return None

    def _selection(self, held_out: bool) -> RecordSelection:
        settings = self.setup.settings
        if held_out and settings.eval_split is None:
            return RecordSelection(settings.column_of)
        return RecordSelection(settings.column_of, settings.max_records, settings.eval_split or 0.0, held_out)
