"""Write the model card, ``README.md`` of an exported model."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from cli.job.job import Job
from cli.job.machine import ADAPTER_CONFIG
from cli.options.option import data_sets
from cli.options.settings import RUN
from cli.report.log import METRICS, version_of
from cli.report.page import read_metrics
from common.data.files import is_data_set_name
from common.files import replace_file
from common.hub import is_hub_name, snapshot_name
from common.models.task_type import TaskType
from common.store.errors import described
from common.units import format_count

CARD = "README.md"
_MARK = "<!-- Written by finetune, and again by every export, until this line is removed. -->"
# What a hub calls the tasks.
_PIPELINES = {
    TaskType.CAUSAL_LM: "text-generation",
    TaskType.IMAGE_TEXT_TO_TEXT: "image-text-to-text",
    TaskType.SEQUENCE_CLASSIFICATION: "text-classification",
    TaskType.TOKEN_CLASSIFICATION: "token-classification",
}


def write_card(job: Job, directory: Path, step: int) -> bool:
    """Write the card of a model exported after ``step``, unless somebody changed it; return whether it was written."""
    file = directory / CARD
    with described("writing", file):
        if file.exists() and _MARK not in file.read_text(errors="replace"):
            return False
        replace_file(file, model_card(job, (directory / ADAPTER_CONFIG).exists(), step))
    return True


def model_card(job: Job, adapters: bool, step: int) -> str:
    """Return the card; ``adapters`` is whether it describes adapters rather than a whole model."""
    base = _base_on_a_hub(job)
    adapter_tag = ["lora" if job.settings.lora_rank is not None else "adapter"] if adapters else []
    names = [name for words, _ in data_sets(job.settings.data) for name in words]
    metadata = ModelCardData(
        base_model=base,
        base_model_relation=None if base is None else "adapter" if adapters else "finetune",
        library_name="peft" if adapters else "transformers",
        pipeline_tag=_PIPELINES[job.task_type],
        tags=["fuyou", job.settings.objective, *adapter_tag],
        datasets=[name.split(":")[0] for name in names if _is_on_a_hub(name)] or None,
    )
    what = f"Adapters for {_base(job)}" if adapters else f"{_base(job)}, fine-tuned"
    rows = {"Training": _training(job, step), "Losses": _losses(job, step)}
    parts = [
        f"---\n{metadata.to_yaml()}\n---\n{_MARK}",
        f"# {job.output.name}",
        f"{what}: {job.architecture}, {format_count(job.parameters)} parameters"
        + (f", of which {format_count(job.adapter_parameters)} in adapters" if adapters else "")
        + f". Made with fuyou's `finetune` ({version_of('fuyou')}).",
        f"## Data\n\n{_data(job)}",
        *(f"## {name}\n\n{_table(values)}" for name, values in rows.items() if values),
        f"## Use\n\n```python\n{_use(job, adapters)}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _base_on_a_hub(job: Job) -> str | None:
    if job.checkpoint is None:
        return None
    model = job.settings.model
    is_name = is_hub_name(model) and not Path(model).exists()
    return snapshot_name(job.checkpoint) or (model if is_name else None)


def _base(job: Job) -> str:
    name = _base_on_a_hub(job)
    if name is not None:
        return f"[{name}](https://huggingface.co/{name})"
    return f"`{Path(job.settings.model).name}`" + ("" if job.checkpoint is not None else " (random weights)")


def _data(job: Job) -> str:
    named = [
        f"`{name if _is_on_a_hub(name) else Path(name).name}`" + ("" if weight is None else f" (weight {weight:g})")
        for words, weight in data_sets(job.settings.data)
        for name in words
    ]
    lines = [", ".join(named) or "Random tokens.", *job.batches.description.splitlines(), f"Digest: `{job.data_key}`"]
    return "\n".join(f"* {line.strip()}" for line in lines)


def _is_on_a_hub(name: str) -> bool:
    return is_data_set_name(name) and not Path(name).expanduser().exists()


def _training(job: Job, step: int) -> dict[str, str]:
    settings, rate = job.settings, job.learning_rate
    warmup = f" after {rate.warmup:,} steps of warm-up" if rate.warmup else ""
    rows = {
        "steps": f"{step:,}" + (f" of {job.steps:,}" if step < job.steps else ""),
        "batch": f"{settings.batch_size:,} x {job.seq_len:,} tokens",
        "learning rate": f"{rate.peak:g}, {rate.schedule}{warmup}",
        "optimizer": f"{settings.optimizer}, betas {settings.beta1:g} and {settings.decay_of_squares:g}, "
        f"eps {settings.eps:g}, weight decay {settings.weight_decay:g}",
        "precision": f"{settings.dtype}, master weights in fp32",
        "seed": f"{settings.seed}",
    }
    if settings.max_grad_norm:
        rows["gradient norm"] = f"clipped to {settings.max_grad_norm:g}"
    if settings.trains_adapters:
        rows["adapters"] = _adapters(job)
    if settings.objective != "sft":
        rows["objective"] = settings.objective
    return rows


def _adapters(job: Job) -> str:
    settings = job.settings
    if settings.lora_rank is None:
        return "trained further" if settings.adapter is not None else "as adapter_config.json says"
    alpha = 2.0 * settings.lora_rank if settings.lora_alpha is None else settings.lora_alpha
    return f"LoRA of rank {settings.lora_rank}, alpha {alpha:g}, dropout {settings.lora_dropout:g}"


def _losses(job: Job, step: int) -> dict[str, str]:
    entries = [entry for entry in read_metrics(job.output / RUN / METRICS) if int(entry.get("step", step + 1)) <= step]
    trained = _values(entries, "loss_metrics/global_avg_loss")
    held_out = _values(entries, "validation_metrics/loss")
    rows = {}
    if trained:
        rows["last steps"] = f"{sum(trained[-10:]) / len(trained[-10:]):.4f} (mean of {len(trained[-10:])})"
    if held_out:
        rows["held out, before and after"] = f"{held_out[0]:.4f}, {held_out[-1]:.4f}"
        rows["held out, best"] = f"{min(held_out):.4f}"
    return rows


def _values(entries: list[dict[str, Any]], metric: str) -> list[float]:
    return [float(entry[metric]) for entry in entries if entry.get(metric) is not None]


def _table(rows: dict[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _use(job: Job, adapters: bool) -> str:
    load = job.task_type.auto_class
    if not adapters:
        return f'from transformers import {load}\n\nmodel = {load}.from_pretrained("PATH OF THIS DIRECTORY")'
    base = _base_on_a_hub(job) or "PATH OF THE MODEL"
    return (
        f"from peft import PeftModel\nfrom transformers import {load}\n\n"
        f'model = PeftModel.from_pretrained({load}.from_pretrained("{base}"), "PATH OF THIS DIRECTORY")'
    )
