"""Write what was trained for others to load."""

from pathlib import Path

from cli.job.data import write_chat_template
from cli.job.job import Job, TrainedModel
from common.models.adapters.adapters import MERGED


def export(job: Job, model: TrainedModel, directory: Path, is_rank0: bool, merge: bool = False) -> None:
    """Write what was trained to ``directory``, and with ``merge`` the whole model to ``MERGED`` inside. Collective."""
    model.save_pretrained(directory, merge=merge)
    if is_rank0:
        for folder in [directory, *([directory / MERGED] if merge else [])]:
            write_chat_template(job.settings, folder)
