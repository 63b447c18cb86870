"""Options of other tools, and commands that were options: what to type here."""

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
_COMMANDS = ("plan", "check", "profile", "verify", "demo")


def instead_of(name: str) -> str | None:
    """Return what to do instead of using an option; None: nothing is known about it.

    Args:
        name: as typed or as a key in a file, with or without dashes in front.
    """
    known = name.lstrip("-").replace("_", "-")
    if known in OTHER_TOOLS:
        return f"No such option: {name}. Here it is {OTHER_TOOLS[known]}."
    return f"{name} is a command: finetune {known}." if known in _COMMANDS else None
