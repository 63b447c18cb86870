"""Every option of ``finetune``, once: a class for each heading of the help, a field for each option.

The docstring of a field is its help. The command line, ``--config`` files, what each mode takes and docs/options.md
are made from these classes, and :class:`cli.options.settings.Settings` inherits them all. What a field can say is in
:class:`cli.options.option.Declaration`.
"""

from dataclasses import dataclass
from pathlib import Path

from cli.options.data_words import Share, check_column
from cli.options.objectives import OBJECTIVES
from cli.options.option import (
    ABOVE_ZERO,
    BELOW_ONE,
    BUDGET,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    SIZE,
    FiniteFloat,
    Mode,
    Only,
    ParsedValue,
    WholeNumber,
    option,
)
from cli.options.output_options import OutputSettings
from cli.options.schedule import SCHEDULES, Warmup


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """What is trained."""

    model: str = option(metavar="DIR|PRESET", presets="models", modes=Mode.MODEL | Mode.BATCH)
    """Checkpoint directory; a hub's name (owner/name), found in the local cache; or a preset (random weights)."""
    download: bool = option(False, modes=Mode.MODEL | Mode.BATCH)
    """Fetch what is a hub's name, --model or --data, and not in the local cache yet."""
    demo: bool = option(False, modes=Mode.DEMO)
    """Make a small checkpoint and fine-tune it: no network, no GPU, two minutes."""


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What it is trained and evaluated with, and how much of it in a step."""

    data: tuple[str, ...] = option((), "FILE...", patterns=True, modes=Mode.RUN)
    """Files (.jsonl .json .csv .tsv .parquet .txt .arrow, also .gz), directories (their train split, or
    directory:split), quoted patterns, or data sets of a hub in the local cache (owner/name, owner/name:split).
    FILE=0.7 gives each data set a weight: its part of all rows. Default: random tokens."""
    columns: tuple[str, ...] = option((), "NAME=COLUMN...", ParsedValue("column", check_column), modes=Mode.RUN)
    """Names for columns that are called otherwise: prompt=question completion=answer."""
    max_records: int | None = option(None, "N", POSITIVE, modes=Mode.RUN)
    """Take the first N records of each data set only."""
    chat_template: str | None = option(None, "NAME|FILE", modes=Mode.RUN)
    """Chat template instead of the tokenizer's: alpaca, chatml, gemma, llama-3, mistral, zephyr, or a Jinja file. It is
    saved with the result."""
    show_data: int | None = option(None, "N", POSITIVE, of_call=True)
    """Train nothing: print N rows as the model sees them, with what carries loss in colour."""
    seq_len: int | None = option(None, "N", WholeNumber(min=2), modes=Mode.BATCH)
    """Tokens per sequence. Default: 1024, or the model's context if that is shorter."""
    batch_size: int = option(8, "N", POSITIVE, modes=Mode.BATCH)
    """Sequences per step."""
    truncate: bool = option(True, flags="--truncate/--drop-long", modes=Mode.RUN)
    """Leave out conversations, and prompts with completions, that are longer than --seq-len. By default (--truncate)
    they are cut behind the last answer that fits, so that what is trained on keeps all that comes before it. Either way
    they are counted; plain texts go on in the next row."""
    drop_unseen: bool = option(False, modes=Mode.RUN)
    """Count and leave out conversations with text that the chat template leaves out. By default they are an error."""
    eval_data: tuple[str, ...] = option((), "FILE...", patterns=True, modes=Mode.RUN)
    """Held-out data: loss and perplexity on all of them before the first and after the last step."""
    eval_split: Share | None = option(
        None, "FRACTION", ParsedValue("fraction", Share.parse), excludes="eval_data", modes=Mode.RUN
    )
    """Hold this part of the records of each data set out for evaluation, instead of --eval-data: 2% or 0.02."""
    eval_every: int | None = option(None, "N", POSITIVE, modes=Mode.RUN)
    """Steps between further evaluations."""


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """Where parameters and states are stored, and what computes."""

    ssd: tuple[str, ...] = option((), "DIR...", patterns=True, modes=Mode.PLACE)
    """Directories for parameters and optimizer states, one per drive. Default: inside --output."""
    leave_ssd: tuple[str, ...] = option((), "DIR...", patterns=True, of_call=True, may_differ=True)
    """With --resume: drives that the run is on and that --ssd no longer names. Its records move to those of --ssd, as
    they do to drives that are new there."""
    gpu: str = option("auto", "auto|cpu|NAME|INDEX", presets="gpus", modes=Mode.STEP | Mode.PROFILE_NODES)
    """Device to train on."""
    device_memory: int | None = option(None, "SIZE", BUDGET, modes=Mode.STEP, only=Only.OUT_OF_CORE)
    """Device memory to use: 24GiB. Default: what is free."""
    host_memory: int | None = option(None, "SIZE", BUDGET, modes=Mode.STEP, only=Only.OUT_OF_CORE)
    """Host memory to use: 64GiB. Default: what is free."""
    host_cache: int | None = option(None, "SIZE", SIZE, modes=Mode.STEP)
    """Host memory (of each node) to keep parameters and states in between steps; 0: none. Default: the rest."""
    piece_size: int | None = option(None, "SIZE", SIZE, modes=Mode.STEP, only=Only.OUT_OF_CORE)
    """Largest piece of a block that is on the device at once: 256MiB. Default: whole blocks where they fit."""
    micro_batch: int | None = option(None, "N", POSITIVE, modes=Mode.BATCH)
    """Sequences computed at once. Default: as many as fit."""
    dtype: str = option("auto", type=("auto", "bf16", "fp32"), modes=Mode.MODEL | Mode.PROFILE_NODES)
    """What blocks compute in; auto: what the device multiplies faster. Master weights are fp32 either way."""
    # Names of fuyou.layout.optimizer_state.OPTIMIZERS, which takes long to import.
    optimizer: str = option("adamw", type=("adamw", "adamw8bit", "lion"), modes=Mode.MODEL, only=Only.OUT_OF_CORE)
    """adamw8bit keeps both moments in 8 bits by blocks, and so moves and writes half as many bytes in a step; lion has
    one moment (a third fewer), and wants a third to a tenth of AdamW's learning rate."""
    optimizer_dtype: str = option("fp32", type=("fp32", "bf16"), modes=Mode.MODEL, only=Only.OUT_OF_CORE)
    """Dtype of moments, where they are not in 8 bits; bf16 is rounded stochastically."""
    train_vision: str | None = option(None, type=("projector", "all"), modes=Mode.MODEL)
    """What to train of a vision-language model beside its language model: the projector, or all that turns images into
    tokens. Default: neither."""
    io: str = option("posix", type=("posix", "kvikio"), only=Only.OUT_OF_CORE, modes=Mode.RUN)
    """How parameters get from the SSDs to a GPU: posix, through host memory; kvikio, past it."""
    single_slot: bool = option(False, modes=Mode.MODEL, only=Only.OUT_OF_CORE)
    """Take half the space on SSD; a crash loses the run."""


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """Several machines, or several GPUs of one."""

    nodes: int | None = option(None, "N", POSITIVE, modes=Mode.NODES | Mode.PLAN_RANKS | Mode.PLAN_CLUSTER)
    """Train on N machines together: sharded over all GPUs in memory, or out of core with --ssd. Start the same line on
    each."""
    gpus_per_node: int | None = option(
        None, "M", POSITIVE, modes=Mode.NODES | Mode.PLAN_RANKS | Mode.PLAN_CLUSTER, only=Only.NODES, may_differ=True
    )
    """Ranks per machine. Default: its GPUs; 1 with --gpu cpu."""
    rdzv_endpoint: str | None = option(None, "HOST:PORT", modes=Mode.NODES, only=Only.NODES, may_differ=True)
    """Where nodes meet: one of them, and a free port there. Default: as srun or MASTER_ADDR say."""
    leaf_switch: str | None = option(None, "NAME", modes=Mode.NODES, only=Only.NODES | Only.IN_MEMORY, may_differ=True)
    """This node's leaf switch: nodes under the same one get numbers in a row. Default: as Slurm's tree topology or
    --cluster FILE say."""
    node_timeout: int = option(1800, "SECONDS", POSITIVE, modes=Mode.NODES, only=Only.NODES, may_differ=True)
    """How long to wait for a node that does not come, and in a collective for a rank that does not answer."""
    max_restarts: int = option(3, "N", COUNT, modes=Mode.NODES, only=Only.NODES)
    """How often to start again from the last commit after a rank is lost."""
    # Which strategies there are is checked where they are known: that takes long to import.
    strategy: str | None = option(
        None, "NAME|P/G/OS", modes=Mode.TRAIN | Mode.PLAN_CLUSTER, only=Only.NODES | Only.IN_MEMORY
    )
    """In memory, how parameters, gradients and optimizer states are sharded: fcdp (parameters cached in host memory),
    zero3, hybrid, zero2, paro-iig, ..., or their scopes, IGG or 4x1/4x1/8x1 (docs/strategies.md). Default: auto, what
    the planner finds fastest on --cluster."""
    device_cache_threshold: float | None = option(
        None, "X", FiniteFloat(min=0, max=1), only=Only.NODES | Only.IN_MEMORY
    )
    """Part of device memory up to which cached parameters stay there. Default: 0.9."""


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The steps and the optimizer."""

    steps: int | None = option(None, "N", POSITIVE, excludes="epochs", modes=Mode.RUN)
    """Steps to train. Default: one epoch with --data, 10 steps without."""
    epochs: float | None = option(None, "N", ABOVE_ZERO, excludes="steps", modes=Mode.RUN)
    """Passes over the data."""
    lr: float = option(1e-5, "X", NOT_NEGATIVE, modes=Mode.RUN)
    """Highest learning rate."""
    warmup: Warmup = option(Warmup(0), "N|FRACTION", ParsedValue("warmup", Warmup.parse), modes=Mode.RUN)
    """Steps, or part of all steps (0.03 or 3%), in which the learning rate rises."""
    schedule: str = option("cosine", type=SCHEDULES, modes=Mode.RUN)
    """How the learning rate falls afterwards."""
    min_lr: float = option(0.0, "X", NOT_NEGATIVE, modes=Mode.RUN)
    """Learning rate below which it does not fall."""
    patience: int | None = option(None, "N", POSITIVE, modes=Mode.RUN)
    """End the run when N evaluations in a row have found no lower loss."""
    max_hours: float | None = option(None, "X", ABOVE_ZERO, modes=Mode.RUN, of_call=True)
    """End this call in order after so many hours, with status 0; --resume goes on. For schedulers' time limits."""
    weight_decay: float = option(0.01, "X", NOT_NEGATIVE, modes=Mode.RUN)
    """Decoupled weight decay; biases and norms do not decay."""
    beta1: float = option(0.9, "X", BELOW_ONE, modes=Mode.RUN)
    """Decay of the mean of gradients."""
    beta2: float | None = option(None, "X", BELOW_ONE, modes=Mode.RUN)
    """Decay of the mean of their squares. Default: 0.999; of lion, whose mean it is, 0.99."""
    eps: float = option(1e-8, "X", ABOVE_ZERO, modes=Mode.RUN)
    """Added to Adam's divisor."""
    max_grad_norm: float = option(0.0, "X", NOT_NEGATIVE, modes=Mode.STEP)
    """Scale gradients down to this global norm. 0: never."""
    on_nonfinite: str = option("stop", type=("stop", "skip"), modes=Mode.STEP)
    """When loss or gradient of a step is NaN or infinite: stop, or skip the step (10 in a row at most). Where states
    are on SSD, skip costs as much as --max-grad-norm."""
    router_loss: str = option("auto", type=("auto", "on", "off"), modes=Mode.STEP)
    """Add a mixture of experts' load-balancing loss, times the model's own coefficient. auto: if its configuration has
    output_router_logits on."""
    # Names of fuyou.optimizer.clipping.ClipBy, which takes long to import.
    clip_by: str = option("auto", type=("auto", "deferral", "speculation"), modes=Mode.STEP, only=Only.OUT_OF_CORE)
    """With --max-grad-norm: update in the next step, when the norm is known (deferral), or at once, and again in steps
    that are clipped (speculation). The numbers are the same."""
    seed: int = option(0, "N", COUNT, modes=Mode.MODEL)
    """Seed of the data's order, and of random weights and tokens."""
    deterministic: bool = option(False, only=Only.OUT_OF_CORE, modes=Mode.RUN)
    """Compute only with kernels that give a GPU the same numbers each time: slower attention. A CPU does so anyway."""
    compile: bool = option(False, only=Only.OUT_OF_CORE, modes=Mode.STEP)
    """Have PyTorch compile one block, and run all blocks so: meant for GPUs, and not run on one yet; on a CPU 1
    to 7% was gained. Takes a minute or two at the start. Other numbers by rounding. Needs a compiler (Triton; on a CPU,
    g++)."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """What is learned from the data."""

    objective: str = option("sft", type=tuple(OBJECTIVES), modes=Mode.STEP)
    """sft: the next token, of answers where there are prompts; pretrain: of prompts as well. dpo: to prefer one
    answer to another (columns prompt, chosen, rejected); kto: the same from single answers (prompt, completion, label
    true or false); reward: a model that scores answers, from pairs; classify: classes of texts (text, label).
    --batch-size counts pairs, answers or texts. dpo and kto compare with the model as the run found it, with --adapter
    if there is one."""
    beta: float = option(0.1, "X", ABOVE_ZERO)
    """Strength of the preference (dpo, kto)."""


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """Frozen weights, and adapters that are trained in their place."""

    lora_rank: int | None = option(None, "R", POSITIVE, modes=Mode.MODEL | Mode.PLAN_CLUSTER)
    """Train LoRA adapters of this rank, and freeze the weights."""
    lora_alpha: float | None = option(None, "X", ABOVE_ZERO, modes=Mode.MODEL, only=Only.LORA)
    """An adapter's output is multiplied by this over the rank. Default: twice the rank."""
    lora_dropout: float = option(0.0, "X", BELOW_ONE, modes=Mode.MODEL, only=Only.LORA)
    """Part of the adapters' inputs to drop in training."""
    lora_targets: tuple[str, ...] = option((), "NAME...", modes=Mode.MODEL | Mode.PLAN_CLUSTER, only=Only.LORA)
    """Modules to adapt: q_proj v_proj; of fused experts gate_up_proj down_proj. Default: every linear layer but the
    head, and experts and routers in families where peft knows them."""
    peft_config: Path | None = option(None, "FILE", modes=Mode.MODEL | Mode.PLAN_CLUSTER)
    """An adapter_config.json of the peft library instead (or its directory): rsLoRA, DoRA, LoHa, LoKr, IA3."""
    adapter: Path | None = option(None, "DIR", modes=Mode.MODEL | Mode.PLAN_CLUSTER)
    """Adapters that were trained before (a directory of peft's): train them further. Their method, rank, alpha, dropout
    and targets stay as they are."""
    frozen_dtype: str | None = option(
        None, type=("checkpoint", "int8", "nf4", "plain"), modes=Mode.MODEL, only=Only.OUT_OF_CORE
    )
    """Keep the frozen weights on SSD in fewer bits: rounded once (int8, nf4), or in the bytes of a compressed
    checkpoint. They compute in --dtype. Default: checkpoint, if it is compressed; else plain, as --dtype."""
    merge: bool = option(False, modes=Mode.RUN)
    """Write the model with the adapters merged into it, beside the adapters."""


@dataclass(frozen=True, kw_only=True)
class PlanningSettings:
    """What is done instead of training, or looked at beside it."""

    plan: bool = option(False, modes=Mode.PLAN)
    """Train nothing: say whether it fits, how fast it will be, and what bounds it."""
    drive: str | None = option(None, "NAME", presets="drives", modes=Mode.PLAN_BY_NAME | Mode.PLAN_RANKS)
    """Plan for drives of this kind, and for the kind of GPU that --gpu names."""
    ssds: int | None = option(None, "N", POSITIVE, modes=Mode.PLAN_HERE | Mode.PLAN_BY_NAME | Mode.PLAN_RANKS)
    """Number of drives to plan for.  [default: 1]"""
    network: str | None = option(None, "RATE", modes=Mode.PLAN_RANKS)
    """Plan for several nodes with SSDs: what each sends, 25Gbit/s."""
    max_model: bool = option(False, modes=Mode.PLAN_HERE | Mode.PLAN_BY_NAME)
    """Plan the largest preset that fits."""
    cluster: str | None = option(
        None,
        "PRESET|FILE|auto",
        presets="clusters",
        modes=Mode.TRAIN | Mode.PLAN_CLUSTER,
        only=Only.NODES | Only.CHOSEN_STRATEGY | Only.IN_MEMORY,
    )
    """The hardware to plan for, or to choose a strategy for: a preset, or a profile's file. Default in a run: auto,
    measure it at the start, once for all runs of this --output."""
    levels: str | None = option(None, "N,N,...", modes=Mode.NODES | Mode.PLAN_CLUSTER, only=Only.NODES)
    """A cluster's ranks by level, fastest first: 2,4,16 is 16 nodes of 4 pairs."""
    json: bool = option(False, modes=Mode.PLAN)
    """Print the plan as JSON."""
    html: Path | None = option(None, "FILE", modes=Mode.PLAN_HERE | Mode.PLAN_BY_NAME | Mode.PLAN_RANKS)
    """Draw the plan on a page: the step and the memory."""
    verify: tuple[str, ...] = option((), "DIR...", patterns=True, modes=Mode.VERIFY)
    """Train nothing: check that what runs have in DIR (as --ssd, or --output) is what was written."""
    profile: bool = option(False, modes=Mode.PROFILE | Mode.PROFILE_NODES)
    """Measure this machine with the model (default: gpt3-1.3b) instead of training: a dozen seconds, a table. With
    --nodes, measure the cluster, and write a file for --cluster."""
    check: bool = option(False, modes=Mode.CHECK)
    """Look at this machine and measure its drives (--ssd) instead of training: what a bug report needs, and
    potential problems."""
    trace: Path | None = option(
        None,
        "FILE",
        modes=Mode.TRAIN | Mode.PLAN_HERE | Mode.PLAN_BY_NAME | Mode.PLAN_RANKS,
        only=Only.OUT_OF_CORE,
        of_call=True,
        may_differ=True,
    )
    """Write the last (or the planned) step's tasks there, for ui.perfetto.dev."""


@dataclass(frozen=True, kw_only=True)
class OtherSettings:
    """What is done with options, and with errors."""

    config: Path | None = option(None, "FILE", modes=Mode.ALL, may_differ=True)
    """Take options from this TOML file, too; the command line wins."""
    debug: bool = option(False, modes=Mode.ALL, of_call=True, may_differ=True)
    """Show where an error came from."""
    version: bool = option(False, modes=Mode(0))
    """Show the version."""


GROUPS: dict[str, type] = {
    "Model": ModelSettings,
    "Data": DataSettings,
    "Memory": MemorySettings,
    "Cluster": ClusterSettings,
    "Training": TrainingSettings,
    "Objective": ObjectiveSettings,
    "Adapters": AdapterSettings,
    "Output": OutputSettings,
    "Planning": PlanningSettings,
    "Other": OtherSettings,
}
"""The classes by their headings, in the order of the help."""
