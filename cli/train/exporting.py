"""Write a directory that others load: the model or its adapters, the tokenizer as the run used it, and a card."""

from pathlib import Path

from cli.job.data import write_chat_template
from cli.job.job import Job
from cli.report.model_card import write_card
from cli.train.trainer import TrainedModel
from common.models.adapters.adapters import MERGED


def export(job: Job, model: TrainedModel, directory: Path, is_rank0: bool, merge: bool = False) -> None:
    """Write what was trained to ``directory``, and merged into the model in the folder ``MERGED`` inside. Collective.

    Raises:
        NonFiniteWeights: a tensor holds a NaN or an infinity, and may not.
    """
    model.save_pretrained(directory, merge=merge)
    if is_rank0:
        for folder in [directory, *([directory / MERGED] if merge else [])]:
            write_chat_template(job.settings, folder)
            write_card(job, folder, model.step_count)


def merged_into(job: Job) -> str:
    """Return which base weights adapters are merged into, and the dtype of the result."""
    rounded = job.settings.frozen_dtype
    base = f"the weights that the run rounded to {rounded}" if rounded in ("int8", "nf4") else "the weights"
    return f"adapters merged into {base}, all in {job.settings.dtype}"
