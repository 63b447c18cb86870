"""What the command line said, checked for what can be checked without looking at the machine."""

from dataclasses import dataclass
from pathlib import Path

from cli.schedule import Warmup
from common.errors import UserError

NO_WARMUP = Warmup(0)


@dataclass(frozen=True)
class Settings:
    """One run of ``finetune``. Defaults are those of the command line."""

    model: str
    """Checkpoint directory or preset name."""
    data: tuple[str, ...] = ()
    """Files and directories; none: random tokens."""
    ssd: tuple[str, ...] = ()
    """Directories for the store, one per drive; none: inside the output directory."""
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
    dtype: str = "bf16"
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
    commit_every: int = 1
    """Steps between two commits."""
    host_cache: int | None = None
    """Most host memory for keeping parameters and states from step to step, bytes; None: what is left."""
    single_slot: bool = False
    """Half the space on SSD, and no way to continue after a crash."""
    io: str = "auto"
    save: bool = True
    """Whether to export a checkpoint at the end."""
    debug: bool = False
    arguments: tuple[str, ...] = ()
    """The command line itself, to say how to continue."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise UserError("--steps and --epochs exclude each other: give one of them.")
        if self.epochs is not None and not self.data:
            raise UserError("--epochs counts passes over data, and there is none: give --data, or --steps instead.")
        if self.resume and self.overwrite:
            raise UserError("--resume continues the run that is there and --overwrite replaces it: give one of them.")

    @property
    def output_directory(self) -> Path:
        """Absolute."""
        if self.output is not None:
            return self.output.expanduser().absolute()
        return (Path("finetune-output") / Path(self.model).expanduser().absolute().name).absolute()
