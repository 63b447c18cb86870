"""What every contender's process shares: the task it is given, its tokens, and the lines it speaks with the benchmark.

A contender is a script that takes one argument, a JSON file with a :class:`Task`, builds its trainer and calls
:func:`serve`. From then on the benchmark sends ``step`` on its standard input and gets one line back for each. Lines
are JSON objects behind a marker, so that what libraries print does no harm. This file needs PyTorch and transformers
only: DeepSpeed's environment has nothing else.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, logging

MARK = "@contender "


@dataclass(frozen=True)
class Task:
    """What a contender is to train, and with what."""

    model: dict[str, Any]  # The model's configuration, ``model_type`` included
    rows: int  # Sequences in a batch
    seq_len: int  # Tokens in a sequence
    threads: int  # Compute threads
    directory: str  # Where to put files; it is removed afterwards
    settings: dict[str, Any] = field(default_factory=dict)  # The contender's own settings
    lr: float = 1e-5
    dtype: str = "bf16"  # Of computation: with bf16, masters are in fp32

    @classmethod
    def from_argument(cls) -> "Task":
        """The task in the file that the command line names."""
        content = json.loads(Path(sys.argv[1]).read_text())
        return cls(**{name.name: content[name.name] for name in fields(cls) if name.name in content})

    @property
    def compute_dtype(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[self.dtype]

    def config(self) -> PreTrainedConfig:
        return AutoConfig.for_model(**self.model)

    def tokens(self, step: int) -> torch.Tensor:
        """The batch of step ``step``, the same for every contender: int64 ``[rows, seq_len]``."""
        generator = torch.Generator().manual_seed(1000 + step)
        return torch.randint(0, self.model["vocab_size"], (self.rows, self.seq_len), generator=generator)


def prepare() -> Task:
    """Read the task and set what all contenders set: threads, seed, quiet libraries."""
    task = Task.from_argument()
    torch.set_num_threads(task.threads)
    torch.manual_seed(0)
    logging.set_verbosity_error()
    return task


def build_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model with random weights and every block's activations recomputed in the backward pass."""
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.config.use_cache = False
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def serve(task: Task, train_step: Callable[[torch.Tensor], float], facts: dict[str, Any]) -> None:
    """Run one step for every ``step`` line, until anything else or the end of input.

    Args:
        train_step: tokens ``[rows, seq_len]`` to the loss, parameters updated.
        facts: what the benchmark shall know besides: the number of parameters, for one.
    """
    gc.collect()
    gc.freeze()
    say("ready", pid=os.getpid(), torch=torch.__version__, threads=torch.get_num_threads(), **facts)
    number = 0
    while sys.stdin.readline().strip() == "step":
        number += 1
        tokens = task.tokens(number)
        began = time.perf_counter()
        loss = train_step(tokens)
        say("step", seconds=time.perf_counter() - began, loss=loss)
    say("end")


def say(event: str, **content: Any) -> None:
    """One line to the benchmark."""
    print(MARK + json.dumps({"event": event, **content}), flush=True)
