"""From what was typed to what will be done: everything that can be wrong is found before anything slow is begun."""

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from cli.options.adapters import ADAPTER_CONFIG, peft_config_of, towers_of, trainable_parameters
from cli.options.computing_dtype import with_dtype
from cli.options.naming import naming
from cli.options.schedule import LearningRate
from cli.options.settings import Settings
from cli.plan.machine import sequence_length, training_of
from cli.report.trackers import check_trackers
from common.data import Batches, DataConfig, PackedBatches, RandomBatches, open_data
from common.data.files import find_files
from common.data.images.batches import ImageBatches, any_images, open_image_data
from common.data.images.encoding import load_processor
from common.errors import UserError
from common.hardware.machine import Gpu, describe_machine, pick_gpu, torch_name
from common.models.checkpoint.compressed import method_of
from common.models.meta_model import build_meta_model
from common.models.presets import load_config
from common.models.task_type import TaskType, task_type_of
from common.store.directories import usable_directories
from common.units import format_bytes, format_count
from fuyou.layout.share import Share
from fuyou.model.family import Family, family_of
from fuyou.runtime.emulated import is_emulated

DEFAULT_STEPS = 10
"""Without data: enough to see a steady rate."""

RANDOM_TOKENS = "random tokens"

LONG_RECORDS = "long records"
"""Key in :attr:`Job.fixed_settings` of what becomes of those."""


@dataclass(frozen=True)
class Job:
    """A run that can begin."""

    settings: Settings
    architecture: str
    """Name of the model's class."""
    vocab_size: int
    parameters: int
    checkpoint: Path | None
    """Directory of the checkpoint; None for a preset."""
    gpu: Gpu | None
    """None: the CPU computes."""
    output: Path
    ssd: tuple[Path, ...]
    """Directories that the store's own directories are made in."""
    run_name: str
    """Name of the store's directory in each of ``ssd``."""
    seq_len: int
    batches: Batches
    data_key: str
    """Changes with the tokens that are trained on."""
    learning_rate: LearningRate
    adapter_parameters: int = 0
    """What is trained, if not the weights."""
    held_out: Batches | None = None
    """To evaluate with, in a fixed order."""
    frozen_parameters: int = 0
    """Of the model's, those in towers that are not trained, where the weights are."""
    task_type: TaskType = TaskType.CAUSAL_LM
    """What the model's head is for."""
    quantised_bytes: int | None = None
    """What the store takes if frozen weights are in fewer bits; None: they are not."""

    @property
    def device(self) -> str:
        """For torch, or for the engine alone if it is emulated."""
        return self.settings.gpu if self.emulated else torch_name(self.gpu)

    @property
    def emulated(self) -> bool:
        """Whether what computes is only timed."""
        return is_emulated(self.settings.gpu)

    @property
    def computing_on(self) -> str:
        """For people."""
        if self.settings.nodes is not None:
            ranks, what = self.settings.gpus_per_node or 1, self.gpu.name if self.gpu else "the CPU"
            ranks_of = f"{ranks} {'ranks' if ranks > 1 else 'rank'} on {what}"
            return ranks_of if self.settings.nodes == 1 else f"{self.settings.nodes} nodes, {ranks_of} in each,"
        if self.emulated:
            return f"an {self.settings.gpu} accelerator (times only: nothing is learned)"
        return self.gpu.name if self.gpu else "the CPU"

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return self.learning_rate.total

    @property
    def store_bytes(self) -> int:
        """What the store takes on all SSDs (of one node) together, without activations; or two commits, one beside the
        other."""
        settings = self.settings
        if self.quantised_bytes is not None:
            return self.quantised_bytes
        moments = 4 if settings.optimizer_dtype == "bf16" else 8
        if settings.nodes is not None and not settings.ssd:
            return 2 * (self.adapter_parameters or self.parameters) * 12
        slots = 1 if settings.single_slot else 2
        width, nodes = 2 if settings.dtype == "bf16" else 4, settings.nodes or 1
        if settings.trains_adapters:  # every node has the parameters, all together the states
            return self.parameters * width + self.adapter_parameters * (4 + moments // nodes) * slots
        trained = self.parameters - self.frozen_parameters
        return self.frozen_parameters * width + trained * slots * (width * nodes + 4 - width + moments) // nodes

    @property
    def fixed_settings(self) -> dict[str, Any]:
        """What must not change when a run is continued, by option. The values are JSON."""
        settings, rate = self.settings, self.learning_rate
        return {
            **({LONG_RECORDS: "--truncate" if settings.truncate else "--drop-long"} if settings.data else {}),
            "--data": self.data_key,
            "--seq-len": self.seq_len,
            "--batch-size": settings.batch_size,
            "--seed": settings.seed,
            "--schedule": settings.schedule,
            "--warmup": rate.warmup,
            # A constant rate does not depend on the end, so such a run can be made longer.
            **({} if settings.schedule == "constant" else {"--steps": rate.total}),
        }

    def close(self) -> None:
        """Close the files of data."""
        self.batches.close()
        if self.held_out is not None:
            self.held_out.close()

    def header(self) -> str:
        """A few lines that say what is about to happen."""
        settings, rate = self.settings, self.learning_rate
        source = "random weights" if self.checkpoint is None else str(self.checkpoint)
        store = ", ".join(str(path / self.run_name) for path in self.ssd)
        if settings.nodes is not None and not settings.ssd:
            store = f"a commit every {settings.commit_interval:,} steps in {store}"
        warmup = f" after {rate.warmup:,} of warm-up" if rate.warmup else ""
        lines = {
            "model": f"{settings.model}: {self.architecture}, {format_count(self.parameters)} parameters, {source}",
            **self._adapters(),
            **self._compressed(),
            "machine": f"{describe_machine()}; computing on {self.computing_on} in {settings.dtype}",
            "store": f"{store}: {format_bytes(self.store_bytes)}"
            + (" in a single slot: a crash loses the run" if settings.single_slot else ""),
            "data": self.batches.description,
            **({} if self.held_out is None else {"held out": self.held_out.description}),
            "steps": f"{self.steps:,} of {settings.batch_size:,} x {self.seq_len:,} tokens; "
            f"learning rate {rate.peak:g}, {rate.schedule}{warmup}",
            "output": f"{self.output}{'' if settings.save else ': no checkpoint (--no-save)'}",
        }
        return "\n".join(f"{name:8} {text}".replace("\n", f"\n{'':8} ") for name, text in lines.items())

    def _compressed(self) -> dict[str, str]:
        method = None if self.checkpoint is None else method_of(self.checkpoint)
        if method is None:
            return {}
        kept = f"{method.name} in the checkpoint"
        if self.quantised_bytes is not None and self.settings.frozen_dtype in (None, "checkpoint"):
            return {"weights": f"{kept}, frozen in its own bytes; they compute in {self.settings.dtype}"}
        writes = self.settings.save and (self.settings.merge or not self.settings.trains_adapters)
        return {"weights": f"{kept}, dequantised{f'; written as {self.settings.dtype}' if writes else ''}"}

    def _adapters(self) -> dict[str, str]:
        settings = self.settings
        if not settings.trains_adapters:
            return {}
        what = f"LoRA of rank {settings.lora_rank}" if settings.peft_config is None else str(settings.peft_config)
        part = self.adapter_parameters / self.parameters
        return {"adapters": f"{what}: {format_count(self.adapter_parameters)} parameters, {part:.2%} of the model's"}


@dataclass(frozen=True)
class CheckedSettings:
    """What can be said about a run without opening anything large."""

    config: PreTrainedConfig
    checkpoint: Path | None
    gpu: Gpu | None
    seq_len: int
    ssd: tuple[Path, ...]
    output: Path
    run_name: str


def check(settings: Settings) -> CheckedSettings:
    """Find what is wrong with the settings, in a few seconds; makes the output directory.

    Raises:
        UserError: something typed does not exist or does not go together.
    """
    with naming("--model"):
        config, checkpoint = load_config(settings.model)
    if not task_type_of(config).generates:
        raise UserError(
            f"{settings.model} is {task_type_of(config).value}, and this command trains models that write text: use "
            "fuyou.Engine, whose batches take its labels."
        )
    peft_config_of(settings)
    emulated = is_emulated(settings.gpu)
    if emulated and settings.save:
        raise UserError(f"--gpu {settings.gpu} computes nothing, so there is no checkpoint to write: add --no-save.")
    if settings.sample is not None:
        if emulated:
            raise UserError(f"--gpu {settings.gpu} computes nothing, and so no --sample: leave that out.")
        tokenizer_of(settings, checkpoint, "--sample")  # rather than when training has ended
    if emulated and settings.eval_data:
        raise UserError(f"--gpu {settings.gpu} computes nothing, and so no loss on --eval-data: leave that out.")
    check_trackers(settings.log_to)
    gpu = None if emulated else pick_gpu(settings.gpu)
    seq_len = sequence_length(settings.seq_len, config)
    for option, files in (("--data", settings.data), ("--eval-data", settings.eval_data)):
        if files:
            with naming(option):
                find_files(files)
    ssd, output, run_name = _directories(settings, checkpoint)
    return CheckedSettings(config, checkpoint, gpu, seq_len, ssd, output, run_name)


def prepare(settings: Settings) -> Job:
    """Check, choose and open what the run needs; the data are tokenized here, if they were not before.

    Raises:
        UserError: something typed does not exist or does not go together.
    """
    found = check(settings)
    settings = with_dtype(settings, None if found.gpu is None else "cuda")
    config, checkpoint, seq_len, output = found.config, found.checkpoint, found.seq_len, found.output
    text = config.get_text_config()
    tokenizer = tokenizer_of(settings, checkpoint) if settings.data or settings.eval_data else None
    model = build_meta_model(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    frozen = 0 if settings.trains_adapters else sum(
        model.get_parameter(name).numel() for name in towers_of(settings).frozen(model)
    )  # fmt: skip
    adapter_parameters = trainable_parameters(settings, model) if settings.trains_adapters else 0
    task_type = task_type_of(model.config)
    data = _Data(settings, checkpoint, tokenizer, seq_len, output, task_type, family_of(model))
    batches, data_key = data.batches(text.vocab_size)
    seq_len = getattr(batches, "seq_len", seq_len)
    total = _total_steps(settings, batches)
    rate = LearningRate(settings.schedule, settings.lr, settings.warmup.steps(total), total)
    job = Job(
        settings, type(model).__name__, text.vocab_size, parameters, checkpoint, found.gpu, output, found.ssd,
        found.run_name, seq_len, batches, data_key, rate, adapter_parameters, data.held_out(), frozen,
        task_type, _quantised_bytes(settings) if _keeps_fewer_bits(settings, checkpoint) else None,
    )  # fmt: skip
    if settings.save:
        _check_space(job)
    return job


def _keeps_fewer_bits(settings: Settings, checkpoint: Path | None) -> bool:
    """Whether frozen weights are in fewer bits on SSD than they compute in."""
    out_of_core = settings.nodes is None or bool(settings.ssd)
    if not (settings.trains_adapters and out_of_core):
        return False
    if settings.frozen_dtype is None:
        return checkpoint is not None and method_of(checkpoint) is not None
    return settings.frozen_dtype != "plain"


def _quantised_bytes(settings: Settings) -> int:
    """Of the store on one node."""
    share = Share(settings.nodes or 1, settings.gpus_per_node or 1)
    return training_of(settings).among(share).record_bytes * share.ranks_per_node


def _directories(settings: Settings, checkpoint: Path | None) -> tuple[tuple[Path, ...], Path, str]:
    """Directories for the store, the output directory (made here), and the name of the store's directory."""
    ssd = tuple(usable_directories([Path(word).expanduser() for word in settings.ssd])) if settings.ssd else ()
    output = settings.output_directory
    if checkpoint is not None and checkpoint.resolve() == output.resolve():
        raise UserError(f"--output {output} is the checkpoint that is to be read: give another directory.")
    _make_directory("--output", output)
    for option, file in (("--report", settings.report), ("--trace", settings.trace)):
        if file is not None:
            if file.expanduser().is_dir():
                raise UserError(f"{option} {file} is a directory: give the file to write.")
            _make_directory(option, file.expanduser().absolute().parent)
    result, what = (ADAPTER_CONFIG, "adapters") if settings.trains_adapters else ("config.json", "a checkpoint")
    if settings.save and (output / result).exists() and not (settings.resume or settings.overwrite):
        raise UserError(
            f"{output} holds {what} already: give another --output, or add --overwrite to replace it "
            "(or --resume to continue the run that made it)."
        )
    return ssd or (output,), output, settings.store_name


def _make_directory(option: str, path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option}: the directory {path} cannot be made: {error.strerror}.") from error
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise UserError(f"{option}: {path} is not writable for you. Change its owner or mode, or give another place.")


def tokenizer_of(settings: Settings, checkpoint: Path | None, option: str = "--data") -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, for ``option``.

    Raises:
        UserError: it has none.
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
class _Data:
    """What is needed to open data files."""

    settings: Settings
    checkpoint: Path | None
    tokenizer: PreTrainedTokenizerBase | None
    seq_len: int
    output: Path
    task_type: TaskType
    family: Family

    def batches(self, vocab_size: int) -> tuple[Batches, str]:
        """Return the data of ``--data``, and what changes with them; random tokens where there are none."""
        settings = self.settings
        if self.tokenizer is None or not settings.data:
            ahead = not self.family.shifts_labels
            return RandomBatches(vocab_size, self.seq_len, settings.batch_size, settings.seed, ahead), RANDOM_TOKENS
        with naming("--data"):
            batches = self._open(settings.data)
        return batches, batches.digest

    def held_out(self) -> Batches | None:
        """Return the data of ``--eval-data``, in the order of their files."""
        if self.tokenizer is None or not self.settings.eval_data:
            return None
        with naming("--eval-data"):
            return self._open(self.settings.eval_data, shuffle=False)

    def _open(self, files: tuple[str, ...], shuffle: bool = True) -> PackedBatches | ImageBatches:
        settings, folder = self.settings, self.output / "data"
        config = DataConfig(
            files, self.seq_len, settings.batch_size, settings.seed, shuffle=shuffle, truncate=settings.truncate,
            packed=self.family.isolation is not None, labels_ahead=not self.family.shifts_labels,
        )  # fmt: skip
        if any_images(config.files, folder):
            assert self.checkpoint is not None and self.tokenizer is not None
            if self.task_type is not TaskType.IMAGE_TEXT_TO_TEXT:
                raise UserError(
                    f"The data hold images, and {self.checkpoint} is {self.task_type.value}: it reads text only."
                )
            return open_image_data(config, load_processor(self.checkpoint), folder)
        assert self.tokenizer is not None
        return open_data(config, self.tokenizer, folder)


def _total_steps(settings: Settings, batches: Batches) -> int:
    if settings.steps is not None:
        return settings.steps
    if not settings.data:
        return DEFAULT_STEPS
    return max(1, math.ceil((settings.epochs or 1) * batches.rows / settings.batch_size - 1e-9))


def _check_space(job: Job) -> None:
    """Refuse a run whose checkpoint will not fit beside its store. (The store checks for itself.)"""
    settings = job.settings
    if settings.resume or settings.overwrite:
        return  # what is there will be replaced: its space counts, and only the store knows how much that is
    checkpoint = job.parameters * (2 if settings.dtype == "bf16" else 4)
    if settings.trains_adapters:
        checkpoint = 4 * job.adapter_parameters + (checkpoint if settings.merge else 0)
    drive = job.output.stat().st_dev
    sharing = sum(path.stat().st_dev == drive for path in job.ssd)
    store = job.store_bytes * sharing // len(job.ssd)
    free = shutil.disk_usage(job.output).free
    if checkpoint + store > free:
        parts = f"{format_bytes(checkpoint)} for the checkpoint" + (
            f", {format_bytes(store)} for the store" if store else ""
        )
        raise UserError(
            f"Too little space in {job.output}: {checkpoint + store:,} bytes needed ({parts}), {free:,} bytes free "
            f"({format_bytes(free)}). Nothing was written. Give --output (or --ssd) on a larger drive, "
            "or --no-save if no checkpoint is wanted."
        )
