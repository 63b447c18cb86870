"""Options of earlier versions and other tools: what to do instead, and which values in a file mean nothing now."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Removed:
    """An option that no longer exists."""

    instead: str
    """A sentence that says what to do."""
    unset: tuple[Any, ...] = ()
    """Values that did nothing, which a run's own configuration file may contain."""


_TRL = "Use TRL's trainers on the engine (docs/objectives.md)."
_LOSS = "Write the loss with engine.tokens (docs/objectives.md)."

REMOVED = {
    "generate": Removed("The engine only trains; --sample generates with the saved result."),
    "completion": Removed('Put eval "$(_FINETUNE_COMPLETE=bash_source finetune)" in ~/.bashrc.'),
    "write-config": Removed("Each run writes its options to <output>/run/config.toml; docs/options.md lists them all."),
    "unproven": Removed("The proof takes seconds and always runs.", (False,)),
    "single-slot": Removed("A run keeps two copies, so that it can be killed at any moment.", (False,)),
    "leaf-switch": Removed("Slurm's topology or leaf_of_node in --cluster FILE names the leaf switches."),
    "compile": Removed("It gained 1 to 7% on a CPU and never ran on a GPU.", (False,)),
    "quiet": Removed("--log-every N prints fewer lines.", (False,)),
    "allow-nonfinite": Removed(
        "Continue with a lower --lr, or export in Python: save_pretrained(allow_nonfinite=True).", (False,)
    ),
    "trainable": Removed("Give the adapters that will train, for example --lora-rank 16."),
    "quantise": Removed("Name a strategy that sends fewer bits with --strategy (docs/strategies.md).", (False,)),
    "sample-chat": Removed("--sample uses the chat template where the tokenizer has one.", (False, True)),
    "temperature": Removed("--sample prints the likeliest tokens.", (0.0,)),
    "desirable-weight": Removed(_TRL, (1.0,)),
    "undesirable-weight": Removed(_TRL, (1.0,)),
    "center-rewards": Removed(_TRL, (0.0,)),
    "prices": Removed("Divide the plan's tokens/s by your own prices."),
    "scheme": Removed("scripts/reproduce_fuyou.py plans the paper's scheme.", ("ours",)),
    "gguf": Removed("Run llama.cpp's convert_hf_to_gguf.py on the result instead (docs/command.md)."),
    "lora-plus-ratio": Removed("All of an adapter's matrices learn at the rate of --lr: leave it out.", (1.0,)),
    "neftune-alpha": Removed(
        "Give neftune_noise_alpha to a trainer of transformers or TRL on the engine (docs/objectives.md).", (0.0,)
    ),
    "label-smoothing": Removed(_LOSS, (0.0,)),
    "z-loss": Removed(_LOSS, (0.0,)),
    "simpo-gamma": Removed(_TRL, (0.5,)),
    "teacher": Removed(_TRL),
    "teacher-tokens": Removed(_TRL, (64,)),
    "teacher-temperature": Removed(_TRL, (1.0,)),
    "distil-alpha": Removed(_TRL, (1.0,)),
    "train-experts": Removed("Train adapters of the experts instead: --lora-rank."),
    "reference": Removed("dpo and kto compare with the model as the run found it, with its --adapter."),
}
"""By name, without dashes in front."""


OTHER_TOOLS = {
    "model-name-or-path": "--model", "base-model": "--model", "dataset": "--data", "dataset-name": "--data",
    "datasets": "--data", "train-file": "--data", "output-dir": "--output", "learning-rate": "--lr",
    "num-train-epochs": "--epochs", "num-epochs": "--epochs", "max-steps": "--steps", "max-length": "--seq-len",
    "max-seq-length": "--seq-len", "sequence-len": "--seq-len", "cutoff-len": "--seq-len",
    "per-device-train-batch-size": "--batch-size, the sequences of a whole step",
    "gradient-accumulation-steps": "--batch-size, the sequences of a whole step (--micro-batch: computed at once)",
    "micro-batch-size": "--micro-batch", "warmup-steps": "--warmup", "warmup-ratio": "--warmup",
    "lr-scheduler-type": "--schedule", "lr-scheduler": "--schedule", "optim": "--optimizer", "bf16": "--dtype bf16",
    "lora": "--lora-rank 16", "lora-r": "--lora-rank", "use-peft": "--lora-rank 16", "qlora": "--lora-rank 16 "
    "--frozen-dtype nf4", "load-in-4bit": "--frozen-dtype nf4", "load-in-8bit": "--frozen-dtype int8",
    "lora-target": "--lora-targets", "lora-target-modules": "--lora-targets", "save-steps": "--save-every",
    "eval-steps": "--eval-every", "logging-steps": "--log-every", "report-to": "--log-to", "chat": "--sample PROMPT",
    "resume-from-checkpoint": "--resume", "save-total-limit": "--keep", "template": "--chat-template",
}  # fmt: skip
"""Options here by their names in transformers' Trainer, TRL, LLaMA-Factory, unsloth, and axolotl."""


def instead_of(name: str) -> str | None:
    """Return what to do instead of using an option; None: nothing is known about it.

    Args:
        name: as typed or as a key in a file, with or without dashes in front.
    """
    known = name.lstrip("-").replace("_", "-")
    if known in OTHER_TOOLS:
        return f"No such option: {name}. Here it is {OTHER_TOOLS[known]}."
    removed = REMOVED.get(known)
    return None if removed is None else f"This version no longer has --{name.lstrip('-')}. {removed.instead}"


def did_nothing(name: str, value: Any) -> bool:
    """Return whether an option, in a configuration file or noted by a run, is removed, and its value did nothing."""
    removed = REMOVED.get(name.lstrip("-").replace("_", "-"))
    return removed is not None and value in removed.unset
