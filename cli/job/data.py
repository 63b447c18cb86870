"""Opening the data of a run: the tokenizer, the batches to train on and those to evaluate with."""

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from cli.options.naming import naming
from cli.options.settings import Settings
from common.data import Batches, DataConfig, PackedBatches, RandomBatches, open_data
from common.data.images.batches import ImageBatches, any_images, open_image_data
from common.data.images.encoding import load_processor
from common.data.pairs import PairBatches, open_pairs
from common.errors import UserError
from common.models.task_type import TaskType
from fuyou.model.family import Family

RANDOM_TOKENS = "random tokens"
"""Digest of data that are made up."""


def tokenizer_of(settings: Settings, checkpoint: Path | None, option: str = "--data") -> PreTrainedTokenizerBase:
    """Load the checkpoint's tokenizer.

    Args:
        settings: of the run.
        checkpoint: its directory; None: the model is a preset.
        option: the option that needs a tokenizer, for messages.

    Raises:
        UserError: there is none that transformers can load.
    """
    from transformers import AutoTokenizer

    if checkpoint is None:
        raise UserError(
            f"{settings.model} is a preset, and a preset has no tokenizer: give a checkpoint directory, or leave out "
            "--data, --eval-data and --sample to measure throughput on random tokens."
        )
    try:
        if not any(any(checkpoint.glob(name)) for name in ("tokenizer*", "vocab.*", "*.model", "*.tiktoken")):
            raise OSError("no tokenizer.json, vocabulary or *.model file")
        return AutoTokenizer.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each tokenizer class fails in its own way
        raise UserError(
            f"{checkpoint} has no tokenizer that transformers can load, and {option} needs one: {error}"
        ) from error


@dataclass(frozen=True)
class DataSource:
    """A data source opens the data files that the settings name, packed for one model."""

    settings: Settings
    checkpoint: Path | None
    tokenizer: PreTrainedTokenizerBase | None
    seq_len: int
    output: Path
    task_type: TaskType
    family: Family

    def batches(self, vocab_size: int) -> tuple[Batches, str]:
        """Return the batches of ``--data`` with their digest; random tokens where no data are given."""
        settings = self.settings
        if self.tokenizer is None or not settings.data:
            ahead = not self.family.shifts_labels
            return RandomBatches(vocab_size, self.seq_len, settings.batch_size, settings.seed, ahead), RANDOM_TOKENS
        with naming("--data"):
            batches = self._open(settings.data)
        return batches, batches.digest

    def held_out(self) -> Batches | None:
        """Return the batches of ``--eval-data``, in the order of their files; None where there are none."""
        if self.tokenizer is None or not self.settings.eval_data:
            return None
        with naming("--eval-data"):
            return self._open(self.settings.eval_data, shuffle=False)

    def _open(self, files: tuple[str, ...], shuffle: bool = True) -> PackedBatches | ImageBatches | PairBatches:
        settings, folder = self.settings, self.output / "data"
        config = DataConfig(
            files,
            self.seq_len,
            settings.batch_size,
            settings.seed,
            shuffle=shuffle,
            truncate=settings.truncate,
            packed=self.family.isolation is not None,
            labels_ahead=not self.family.shifts_labels,
        )
        if settings.prefers:
            assert self.tokenizer is not None
            return open_pairs(config, self.tokenizer, folder)
        if any_images(config.files, folder):
            assert self.checkpoint is not None and self.tokenizer is not None
            if self.task_type is not TaskType.IMAGE_TEXT_TO_TEXT:
                raise UserError(
                    f"The data hold images, and {self.checkpoint} is {self.task_type.value}: it reads text only."
                )
            return open_image_data(config, load_processor(self.checkpoint), folder)
        assert self.tokenizer is not None
        return open_data(config, self.tokenizer, folder)
