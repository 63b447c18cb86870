"""Two ranks that train together in host memory and commit to one folder, cut short at one call and continued.

What lies below ``root/commits`` is all that they have on drives. The second rank is forked from the first one, so that
both are in one process group and a run takes about a second.
"""

import hashlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from common.data import RandomBatches
from common.errors import FinetuneError
from fcdp.checkpoint import ShardedCheckpoints
from fcdp.model import TrainerConfig
from fcdp.strategy.topology import Topology
from fcdp.trainer import Trainer
from tests.helpers.crash.points import Reference, carry_on, check, clean, files_in, interrupt
from tests.helpers.crash.runs import SEQ_LEN, STEPS, VOCABULARY, Run, tiny_config

ROWS = 3
"""One more than ranks."""


@dataclass(frozen=True)
class ClusterRun(Run):
    """Options: ``model``, ``strategy``, ``resume``, ``overwrite`` (which it does, unless it resumes)."""

    def train(self, say: Callable[..., None]) -> None:
        """As the first rank; the second one is its child, and tells errors only."""
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        child = os.fork()
        if not child:
            try:
                _train(self, 1, lambda **entry: None)
            except BaseException as error:
                # Expected are messages for users, which both ranks have alike, and a lost first rank.
                say(error=str(error), expected=isinstance(error, FinetuneError)) if _is_odd(error) else None
                os._exit(1)
            os._exit(0)
        _train(self, 0, say)
        assert os.waitpid(child, 0)[1] == 0


def _is_odd(error: BaseException) -> bool:
    """Whether a rank has failed alone, not because the other one has."""
    return not isinstance(error, FinetuneError | dist.DistError | ConnectionError) and "onnection" not in str(
        error
    )


def _train(run: ClusterRun, rank: int, say: Callable[..., None]) -> None:
    options = run.options
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", f"file://{run.notes}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )  # fmt: skip
    topology = Topology(2, 1, device="cpu")
    config = TrainerConfig(options.get("strategy", "fcdp"), "fp32", max_grad_norm=0.5)
    trainer = Trainer(options["model"], topology, config, run.root / "commits")
    if options.get("resume"):
        trainer.resume()
        assert trainer.user_state == {"step": trainer.step_count}
    else:
        trainer.begin()
    batches = RandomBatches(VOCABULARY, SEQ_LEN, ROWS, seed=5)
    while trainer.step_count < run.steps:
        batch = batches.batch(trainer.step_count)
        done = trainer.train_step(batch, 1e-2)
        trainer.user_state = {"step": done.step}
        trainer.commit()
        digest = hashlib.sha256(batch["input_ids"].numpy().tobytes()).hexdigest()[:12]
        say(step=done.step, took=f"{done.loss.hex()} {done.grad_norm.hex()} {digest}", committed=done.step)
    say(final={name: _digest(value) for name, value in trainer.state().items()})
    trainer.close()
    topology.close()
    dist.destroy_process_group()


def _digest(value: torch.Tensor) -> str:
    return hashlib.sha256(cast(DTensor, value).full_tensor().numpy().tobytes()).hexdigest()


def make_model(directory: Path) -> str:
    """A checkpoint to begin with."""
    torch.manual_seed(3)
    transformers_logging.disable_progress_bar()
    config = tiny_config()
    # Every tensor is two calls more, and three commits
    config.num_hidden_layers, config.tie_word_embeddings = 1, True
    LlamaForCausalLM(config).save_pretrained(directory)
    return str(directory)


def crash(run: ClusterRun, expected: Reference, power: int | None = None) -> bool:
    """As :func:`tests.helpers.crash.points.crash`, of two ranks; one may say in any words that the other is gone."""
    first = interrupt(run, expected, power)
    if first is None:
        return False
    check(first, carry_on(run, first), expected, {})
    assert files_in(run.root) == expected.files
    found = ShardedCheckpoints(run.root / "commits").verify()
    assert found.step == STEPS and not found.damage
    clean(run.root)
    return True
