"""Write the model card, ``README.md`` of an exported model."""

from pathlib import Path

from huggingface_hub import ModelCardData

from cli.job.job import Job
from cli.options.option import data_sets
from cli.options.settings import RUN
from cli.report.log import METRICS, version_of
from cli.report.page import read_metrics
from common.data.files import is_data_set_name
from common.files import replace_file
from common.hub import is_hub_name, snapshot_name
from common.models.adapters.options import CONFIG
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
        replace_file(file, model_card(job, (directory / CONFIG).exists(), step))
    return True


def model_card(job: Job, adapters: bool, step: int) -> str:
    """Return the card; ``adapters`` is whether it describes adapters rather than a whole model."""
    settings, load = job.settings, job.task_type.auto_class
    hub_name = None if job.checkpoint is None else snapshot_name(job.checkpoint)
    if job.checkpoint is not None and is_hub_name(settings.model) and not Path(settings.model).exists():
        hub_name = hub_name or settings.model
    base = f"`{Path(settings.model).name}`" + ("" if job.checkpoint is not None else " (random weights)")
    base = base if hub_name is None else f"[{hub_name}](https://huggingface.co/{hub_name})"
    data = [(name, weight) for words, weight in data_sets(settings.data) for name in words]
    on_a_hub = {name for name, _ in data if is_data_set_name(name) and not Path(name).expanduser().exists()}
    adapter_tag = ["lora" if settings.lora_rank is not None else "adapter"] if adapters else []
    metadata = ModelCardData(
        base_model=hub_name,
        base_model_relation=None if hub_name is None else "adapter" if adapters else "finetune",
        library_name="peft" if adapters else "transformers",
        pipeline_tag=_PIPELINES[job.task_type],
        tags=["fuyou", settings.objective, *adapter_tag],
        datasets=[name.split(":")[0] for name, _ in data if name in on_a_hub] or None,
    )
    sources = [
        f"`{name if name in on_a_hub else Path(name).name}`" + ("" if weight is None else f" (weight {weight:g})")
        for name, weight in data
    ]
    about = [", ".join(sources) or "Random tokens.", *job.batches.description.splitlines(), f"Digest: `{job.data_key}`"]
    described_data = "\n".join(f"* {line.strip()}" for line in about)
    use = f'from transformers import {load}\n\nmodel = {load}.from_pretrained("PATH OF THIS DIRECTORY")'
    if adapters:
        use = (
            f"from peft import PeftModel\nfrom transformers import {load}\n\nmodel = PeftModel.from_pretrained("
            f'{load}.from_pretrained("{hub_name or "PATH OF THE MODEL"}"), "PATH OF THIS DIRECTORY")'
        )
    parts = [
        f"---\n{metadata.to_yaml()}\n---\n{_MARK}",
        f"# {job.output.name}",
        f"{f'Adapters for {base}' if adapters else f'{base}, fine-tuned'}: {job.architecture}, "
        + f"{format_count(job.parameters)} parameters"
        + (f", of which {format_count(job.adapter_parameters)} in adapters" if adapters else "")
        + f". Made with fuyou's `finetune` ({version_of('fuyou')}).",
        f"## Data\n\n{described_data}",
    ]
    for heading, rows in {"Training": _training(job, step), "Losses": _losses(job, step)}.items():
        if rows:
            table = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
            parts.append("\n".join([f"## {heading}\n", *table]))
    return "\n\n".join([*parts, f"## Use\n\n```python\n{use}\n```"]) + "\n"


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
    if settings.lora_rank is not None:
        alpha = 2.0 * settings.lora_rank if settings.lora_alpha is None else settings.lora_alpha
        lora = f"LoRA of rank {settings.lora_rank}, alpha {alpha:g}, dropout {settings.lora_dropout:g}"
        rows["adapters"] = lora
    elif settings.trains_adapters:
        rows["adapters"] = "trained further" if settings.adapter is not None else "as adapter_config.json says"
    if settings.objective != "sft":
        rows["objective"] = settings.objective
    return rows


def _losses(job: Job, step: int) -> dict[str, str]:
    entries = [entry for entry in read_metrics(job.output / RUN / METRICS) if int(entry.get("step", step + 1)) <= step]
    trained, held_out = (
        [float(entry[metric]) for entry in entries if entry.get(metric) is not None]
        for metric in ("loss_metrics/global_avg_loss", "validation_metrics/loss")
    )
    rows = {}
    if trained:
        rows["last steps"] = f"{sum(trained[-10:]) / len(trained[-10:]):.4f} (mean of {len(trained[-10:])})"
    if held_out:
        rows["held out, before and after"] = f"{held_out[0]:.4f}, {held_out[-1]:.4f}"
        rows["held out, best"] = f"{min(held_out):.4f}"
    return rows
