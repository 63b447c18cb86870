"""Print rows as the model sees them, with trained tokens in color (``--show-data``)."""

import contextlib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from tempfile import gettempdir

import torch
from transformers import PreTrainedTokenizerBase

from cli.job.outputs import Outputs
from cli.job.resolve import resolve
from cli.options.settings import Settings
from cli.report.progress import BOLD, FAINT, GREEN, has_colors, painted
from common.activity import activity
from common.data import Batches
from common.errors import printable
from common.scratch import scratch_folder

MARKS = "«»"  # Around trained text where there are no colors


def show_data(settings: Settings) -> None:
    """Print the first rows in training order."""
    assert settings.show_data is not None
    output = settings.output_directory
    absent = [path for path in (output, *output.parents) if not path.exists()]
    try:
        with activity("reading the data", announced=True), scratch_folder(Path(gettempdir())) as folder:
            job = resolve(settings, lambda: Outputs.read(folder))
    finally:
        with contextlib.suppress(OSError):  # resolving makes the output directory of a run
            for path in absent:
                path.rmdir()
    tokenizer = job.tokenizer
    assert tokenizer is not None
    print(f"data     {printable(job.batches.description)}".replace("\n", "\n         "))
    print(f"         {'green' if has_colors() else 'between ' + ' and '.join(MARKS)}: trained on\n")
    for number, row in enumerate(_rows(job.batches, settings.show_data), 1):
        print(painted(f"row {number}", BOLD))
        for document in row:
            print(_text(document, tokenizer))
        print(flush=True)
    job.close()


def _rows(batches: Batches, count: int) -> Iterator[list[list[tuple[int, bool]]]]:
    step = 0
    while count > 0:
        batch = batches.batch(step)
        read = batch.get("attention_mask")
        if read is not None:  # rows with padding, of a classifier (which reads all of a text) or with images
            if batch.get("labels", read[:, 0]).shape != read.shape:
                batch["labels"] = batch["input_ids"].masked_fill(read == 0, -100)
            batch["position_ids"] = read * (read.cumsum(1) - 1)
        labels = batch["labels"]
        if batches.labels_ahead and read is None:  # labels stand one place before their token
            labels = torch.cat([torch.full_like(labels[:, :1], -100), labels[:, :-1]], dim=1)
        for ids, trained, positions in zip(
            batch["input_ids"].tolist(),
            (labels != -100).tolist(),
            batch["position_ids"].tolist(),
            strict=True,
        ):
            if count == 0:
                return
            count -= 1
            documents: list[list[tuple[int, bool]]] = []
            for token, is_trained, position in zip(ids, trained, positions, strict=True):
                if position == 0:
                    documents.append([])
                documents[-1].append((token, is_trained))
            # The padding is a separate document, in which nothing is trained on.
            yield [document for document in documents if any(is_trained for _, is_trained in document)]
        step += 1


def _text(document: list[tuple[int, bool]], tokenizer: PreTrainedTokenizerBase) -> str:
    parts = []
    for is_trained, tokens in groupby(document, lambda pair: pair[1]):
        text = printable(str(tokenizer.decode([token for token, _ in tokens])))
        if is_trained and not has_colors():
            text = text.join(MARKS)
        parts.append(painted(text, GREEN if is_trained else FAINT))
    return "".join(parts)
