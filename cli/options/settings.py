"""What the command line said, checked for what can be checked without looking at the machine."""

import contextlib
import hashlib
import json
import shlex
from dataclasses import dataclass, fields
from pathlib import Path

from cli.options.schedule import Warmup
from common.errors import UserError

NO_WARMUP = Warmup(0)

COMMITS = "commits"
"""Folder inside the output directory where a run of several ranks has its commits."""

RUN, DESCRIPTION = "run", "run.json"
"""Folder inside the output directory that says what the run is, and the file in it that says where."""

STORE_PREFIX = "fuyou-"
"""Of the names of runs' folders on the SSDs."""

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow", "jsonl")
"""What ``--log-to`` takes; ``jsonl`` is the run directory's metrics.jsonl, which is always written."""

CLIP_BY = ("auto", "deferral", "speculation")
ROUTER_LOSS = ("auto", "on", "off")
"""What ``--clip-by`` takes: names of :class:`fuyou.optimizer.clipping.ClipBy`, which takes long to import."""

TRAIN_VISION = ("projector", "all")
"""What ``--train-vision`` takes."""

_ONLY_NODES = (
    "gpus_per_node", "rdzv_endpoint", "node_timeout", "max_restarts", "strategy", "levels", "cluster", "quantise",
    "device_cache_threshold",
)  # fmt: skip
_ONLY_MEMORY = ("strategy", "device_cache_threshold")
_ONLY_SAMPLE = ("sample_tokens", "temperature")
_ONLY_LORA = ("lora_alpha", "lora_dropout", "lora_targets")
_ONLY_ALONE = ("sample",)
_ONLY_ENGINE = (
    "host_memory", "device_memory", "optimizer_dtype", "io", "single_slot", "trace", "clip_by", "frozen_dtype",
    "unproven",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """One run of ``finetune``. Defaults are those of the command line."""

    model: str
    """Checkpoint directory or preset name."""
    data: tuple[str, ...] = ()
    """Files and directories; none: random tokens."""
    eval_data: tuple[str, ...] = ()
    """Held-out files and directories, to evaluate with; none: no evaluation."""
    truncate: bool = True
    """Whether records with a prompt that are longer than a row are cut; else they are left out."""
    eval_every: int | None = None
    """Steps between evaluations; None: before the first and after the last step only."""
    ssd: tuple[str, ...] = ()
    """Directories for the store, one per drive; none: inside the output directory."""
    leave_ssd: tuple[str, ...] = ()
    """Those of drives that a continued run is on and is to leave."""
    gpu: str = "auto"
    """``auto``, ``cpu``, part of a name, or an index."""
    device_memory: int | None = None
    """Bytes of device memory to use at most; None: what the machine has."""
    host_memory: int | None = None
    """Bytes of host memory to use at most; None: what the machine has."""
    batch_size: int = 8
    """Sequences per step."""
    micro_batch: int | None = None
    """Sequences that are computed at once; None: the most that fit."""
    seq_len: int | None = None
    """Tokens per sequence; None: 1024, or the model's context where that is shorter."""
    steps: int | None = None
    epochs: float | None = None
    """Passes over the data. At most one of ``steps`` and ``epochs`` is given."""
    lr: float = 1e-5
    """The highest learning rate, at the end of the warm-up."""
    warmup: Warmup = NO_WARMUP
    schedule: str = "cosine"
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = 0.0
    """Gradients are scaled down to this global norm; 0: never."""
    on_nonfinite: str = "stop"
    """When loss or gradient of a step is NaN or infinite; see :mod:`fuyou.optimizer.nonfinite`."""
    router_loss: str = "auto"
    """Whether a mixture of experts' router loss is a part of the loss; see :mod:`fuyou.model.router_loss`."""
    clip_by: str = "auto"
    """How: one of :data:`CLIP_BY`."""
    dtype: str = "auto"
    """What blocks compute in; ``auto`` is decided before anything is planned (:mod:`cli.options.computing_dtype`)."""
    optimizer_dtype: str = "fp32"
    output: Path | None = None
    """Where checkpoint, packed data and (without ``ssd``) the store go; None: finetune-output/<model>."""
    resume: bool = False
    overwrite: bool = False
    seed: int = 0
    report: Path | None = None
    """Where the JSON report goes."""
    trace: Path | None = None
    """Where the trace of the last step goes."""
    commit_every: int | None = None
    """As it was typed; see :attr:`commit_interval`."""
    host_cache: int | None = None
    """Most host memory (of each node) for what is kept from step to step, bytes; None: what is left, or is needed."""
    log_to: tuple[str, ...] = ()
    """Trackers that get every step's figures."""
    single_slot: bool = False
    """Half the space on SSD, and no way to continue after a crash."""
    train_vision: str | None = None
    """What of a vision-language model's towers is trained beside its language model: projector, all; None: nothing."""
    unproven: bool = False
    """Whether to leave out the proof that streaming this family is exact."""
    io: str = "auto"
    save: bool = True
    """Whether to export a checkpoint at the end."""
    allow_nonfinite: bool = False
    """Even if it holds a NaN or an infinity."""
    nodes: int | None = None
    """Machines that train together; None: the engine for one machine, out of core."""
    gpus_per_node: int | None = None
    """Ranks on each machine; None: one for each of its GPUs, or one on the CPU."""
    rdzv_endpoint: str | None = None
    """``HOST:PORT`` where the nodes' launchers meet; None: as the environment says."""
    node_timeout: int = 300
    """Seconds to wait for a node that does not come or does not answer."""
    max_restarts: int = 3
    """After lost ranks."""
    strategy: str | None = None
    """A name, P/G/OS, or ``auto``; None: fcdp. Checked where it is known what strategies there are: that takes long to
    import."""
    levels: str | None = None
    """Ranks by level, fastest first, where nodes have levels inside; None: what is found."""
    cluster: str | None = None
    """For ``auto``: a preset of the hardware, or a profile's file."""
    quantise: bool = False
    """Whether ``auto`` may choose a strategy that quantises what it sends."""
    device_cache_threshold: float | None = None
    """Part of device memory up to which cached parameters stay there; None: 0.9."""
    lora_rank: int | None = None
    """Of LoRA adapters, which are trained while the weights are frozen; None: none, or as ``peft_config`` says."""
    lora_alpha: float | None = None
    lora_dropout: float = 0.0
    lora_targets: tuple[str, ...] = ()
    """Names of modules to adapt; none: every linear layer but the head."""
    peft_config: Path | None = None
    """An ``adapter_config.json``, or its directory."""
    frozen_dtype: str | None = None
    """What frozen weights are kept in; None: ``dtype``, or a compressed checkpoint's own bytes."""
    merge: bool = False
    """Whether to write the merged model beside the adapters."""
    sample: str | None = None
    """A prompt to go on from when training has ended."""
    sample_tokens: int = 32
    temperature: float = 0.0
    """Of the sample; 0 takes the likeliest token each time."""
    debug: bool = False
    arguments: tuple[str, ...] = ()
    """The command line itself, to say how to continue."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise UserError(f"--steps {self.steps} and --epochs {self.epochs:g} exclude each other: give one of them.")
        if self.epochs is not None and not self.data:
            raise UserError(
                f"--epochs {self.epochs:g} counts passes over data, and there is none: give --data, or --steps instead."
            )
        if self.eval_every is not None and not self.eval_data:
            raise UserError(
                f"--eval-every {self.eval_every} counts steps between evaluations, and there is no data for them: add "
                "--eval-data."
            )
        if not self.truncate and not (self.data or self.eval_data):
            raise UserError("--drop-long is about records that are longer than --seq-len: add --data.")
        if self.resume and self.overwrite:
            raise UserError("--resume continues the run that is there and --overwrite replaces it: give one of them.")
        if self.leave_ssd and not (self.resume and self.ssd):
            raise UserError("--leave-ssd takes drives from a run that goes on: add --resume, and --ssd for the others.")
        if self.lora_rank is not None and self.peft_config is not None:
            raise UserError("--lora-rank and --peft-config both say what the adapters are: give one of them.")
        if self.lora_rank is None:
            self._refuse(_ONLY_LORA, "is about LoRA adapters: add --lora-rank, or put it into --peft-config's file")
        if self.sample is None:
            self._refuse(_ONLY_SAMPLE, "is about a sample: add --sample PROMPT")
        if self.frozen_dtype is not None and not self.trains_adapters:
            raise UserError(
                f"--frozen-dtype {self.frozen_dtype} is about weights that are frozen: add --lora-rank or "
                "--peft-config."
            )
        if self.merge and not self.trains_adapters:
            raise UserError("--merge merges adapters into the weights: add --lora-rank or --peft-config.")
        if self.nodes is None:
            self._refuse(_ONLY_NODES, "is for several nodes or ranks: add --nodes N (1 for this machine alone)")
        else:
            if self.strategy != "auto":
                self._refuse(("cluster", "quantise"), "is for choosing a strategy: add --strategy auto, or --plan")
            self._refuse(_ONLY_ALONE, "does not go with --nodes yet: leave it out")
            if self.ssd:
                self._refuse(_ONLY_MEMORY, "is for training in memory, without --ssd: leave one of them out")
            else:
                self._refuse(_ONLY_ENGINE, "does not go with --nodes, which trains in memory unless --ssd is given")

    def _refuse(self, options: tuple[str, ...], why: str) -> None:
        """Refuse options that differ from their defaults."""
        for field in fields(self):
            if field.name in options and getattr(self, field.name) != field.default:
                raise UserError(f"--{field.name.replace('_', '-')} {why}.")

    @property
    def trains_adapters(self) -> bool:
        """Whether the weights are frozen and adapters are trained."""
        return self.lora_rank is not None or self.peft_config is not None

    @property
    def commit_interval(self) -> int:
        """Steps between two commits. In memory each writes 12 bytes per parameter beside the training."""
        return self.commit_every or (1 if self.nodes is None or self.ssd else 100)

    @property
    def output_directory(self) -> Path:
        """Absolute."""
        if self.output is not None:
            return self.output.expanduser().absolute()
        return (Path("finetune-output") / Path(self.model).expanduser().absolute().name).absolute()

    @property
    def store_name(self) -> str:
        """Name of the store's directory on each drive."""
        if self.nodes is not None and not self.ssd:
            return COMMITS
        if not self.ssd:
            return "store"
        # The same drives serve many runs: a run is named after its output directory, as that was called when it began.
        output = self.output_directory
        if self.resume:
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
                name = json.loads((output / RUN / DESCRIPTION).read_text())["store"]
                if isinstance(name, str) and name.startswith(STORE_PREFIX) and Path(name).name == name:
                    return name
        return f"{STORE_PREFIX}{output.name}-{hashlib.sha256(str(output).encode()).hexdigest()[:6]}"

    @property
    def how_to_continue(self) -> str:
        """The command that continues this run, as a sentence."""
        if self.single_slot:
            return "With --single-slot, a run that ends in the middle of a step cannot be continued."
        words = [word for word in self.arguments if word not in ("--resume", "--overwrite")]
        return f"To continue: {shlex.join(['finetune', *words, '--resume'])}"
