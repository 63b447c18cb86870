"""torchtitan's own trainer with one line more, beside itself without it: losses, bytes between nodes, checkpoints.

    pip install torchtitan triton
    python scripts/torchtitan_loop.py --work DIR --steps 20

The trainer is that of the released package, its model the package's debug model (Llama 3), in fp32 on gloo. Four
processes stand for 2 nodes x 2 ranks. Text and tokenizer are made here. torchtitan knows no CPU: what it asks of an
accelerator is answered by :class:`_ProcessorAsAccelerator`, with our line and without it.
"""

import json
import os
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

NODES, RANKS = 2, 2
SEQ_LEN, ROWS = 64, 2
CLOSE = 2e-6
"""Part of a loss that the order of additions may change."""


class _ProcessorAsAccelerator:
    """``torch.cpu`` with what torchtitan asks of ``torch.cuda`` beside it."""

    def __init__(self) -> None:
        import torch

        self._known = torch.cpu

    def __getattr__(self, name: str) -> Any:
        return getattr(self._known, name)

    def device_count(self) -> int:
        return NODES * RANKS

    def get_device_name(self, *_: Any) -> str:
        return "cpu"

    def current_device(self) -> int:
        return 0

    def get_device_properties(self, *_: Any) -> Any:
        return type("Properties", (), {"total_memory": 1 << 34})()

    def memory_stats(self, *_: Any) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self, *_: Any) -> None:
        """Nothing is counted."""

    def empty_cache(self) -> None:
        """There is none."""


def prepare_torchtitan(losses: list[float]) -> None:
    """Have torchtitan train on processors, with gloo, and note the loss of each step in ``losses``."""
    import torch
    import torchtitan.tools.utils as titan

    titan.device_type, titan.device_module = "cpu", _ProcessorAsAccelerator()
    import torchtitan.distributed.fsdp as sharding  # looks at the device when it is imported
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.components.metrics import MetricsProcessor

    divides, log = sharding.disable_fsdp_gradient_division, MetricsProcessor.log

    def sums(model: Any) -> None:
        divides(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other kind

    def keep(self: Any, step: int, global_avg_loss: float, *more: Any, **named: Any) -> None:
        losses.append(global_avg_loss)
        log(self, step, global_avg_loss, *more, **named)

    sharding.disable_fsdp_gradient_division, MetricsProcessor.log = sums, keep
    if not hasattr(torch.distributed, "set_timeout"):  # torchtitan 0.3 is ahead of PyTorch 2.13
        torch.distributed.set_timeout = lambda *_: None  # type: ignore[attr-defined]


def configuration(work: Path, folder: str, steps: int, load: str | None) -> Any:
    """Return torchtitan's own configuration of its debug model, smaller, on the processor and with our text."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    for layer in config.model_spec.model.layers:  # its default, FlexAttention, has no backward pass on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.dump_folder, config.hf_assets_path = str(work / folder), str(work / "tokenizer")
    config.dataloader.dataset_path = str(work / "text")
    training = config.training
    training.local_batch_size, training.seq_len, training.steps = ROWS, SEQ_LEN, steps
    training.disable_cuda_graphs, training.mixed_precision_param = True, "float32"
    config.parallelism.spmd_backend = "partial_dtensor"
    config.activation_checkpoint = None
    config.debug.seed = 1
    known = {} if load is None else {"initial_load_path": load, "initial_load_model_only": True}
    config.checkpoint = CheckpointManager.Config(enable=True, interval=steps, **known)
    return config


def worker(ours: bool, work: Path, steps: int, folder: str, load: str | None) -> None:
    """Train on one rank; rank 0 writes losses, and bytes between nodes: sent, and by the formula."""
    import torch
    import torch.distributed as dist

    import fcdp

    torch.set_num_threads(1)
    losses: list[float] = []
    prepare_torchtitan(losses)
    if ours:
        fcdp.replace_fsdp2()  # the one line
    trainer = configuration(work, folder, steps, load).build()
    trainer.train()
    sent, formula = torch.zeros(()), 0.0
    if ours:
        sharding = fcdp.sharding(trainer.model_parts[0])
        formula = sum(sharding.inter_node_bytes(1, first_step=not step) for step in range(steps))
        sent += sharding.traffic.inter_node
        dist.all_reduce(sent)
    if dist.get_rank() == 0:
        found = {"losses": losses, "sent": float(sent) / NODES, "formula": formula}
        (work / f"{folder}.json").write_text(json.dumps(found))
    trainer.close()
    dist.destroy_process_group()


def train(ours: bool, work: Path, steps: int, folder: str, load: str | None = None) -> dict[str, Any]:
    """Run the ranks and return what rank 0 has found."""
    shutil.rmtree(work / folder, ignore_errors=True)  # torchtitan would go on with it
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(NODES * RANKS):
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(NODES * RANKS), "LOCAL_RANK": str(rank % RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS), "GROUP_RANK": str(rank // RANKS), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        words = [sys.executable, __file__, "--work", str(work), "--steps", str(steps), "--rank-of", folder]
        words += (["--ours"] if ours else []) + (["--load", load] if load else [])
        with (work / f"{folder}-{rank}.log").open("w") as log:
            ranks.append(subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=work))
    if any(rank.wait() for rank in ranks):
        raise SystemExit((work / f"{folder}-0.log").read_text()[-4000:])
    found: dict[str, Any] = json.loads((work / f"{folder}.json").read_text())
    return found


def make_materials(work: Path) -> None:
    """Write text and a tokenizer of its words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    drawn = random.Random(0)
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2} | {f"w{index}": index + 3 for index in range(200)}
    (work / "text").mkdir(parents=True, exist_ok=True)
    (work / "tokenizer").mkdir(exist_ok=True)
    rows = [" ".join(f"w{int(200 * drawn.random() ** 2)}" for _ in range(100)) for _ in range(800)]
    (work / "text/data.json").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    tokenizer.save(str(work / "tokenizer/tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    (work / "tokenizer/tokenizer_config.json").write_text(json.dumps(settings))


@click.command()
@click.option("--work", required=True, type=click.Path(path_type=Path))
@click.option("--steps", default=20)
@click.option("--rank-of", hidden=True)
@click.option("--ours", is_flag=True, hidden=True)
@click.option("--load", hidden=True)
def main(work: Path, steps: int, rank_of: str | None, ours: bool, load: str | None) -> None:
    """Compare torchtitan's trainer with itself on FCDP."""
    if rank_of:
        worker(ours, work, steps, rank_of, load)
        return
    make_materials(work)
    far = compare(train(False, work, steps, "plain"), train(True, work, steps, "ours"))
    print("and from each other's checkpoints:")
    saved = [str(work / name / "checkpoint" / f"step-{steps}") for name in ("plain", "ours")]
    far += compare(train(False, work, 4, "plain-on", saved[1]), train(True, work, 4, "ours-on", saved[0]))
    if far:
        raise click.ClickException(f"{far} losses are further apart than {CLOSE}.")


def compare(plain: dict[str, Any], ours: dict[str, Any]) -> int:
    """Print the losses of both, and return how many are further apart than the order of additions makes them."""
    far = 0
    for step, (one, other) in enumerate(zip(plain["losses"], ours["losses"], strict=True), 1):
        apart = abs(one - other) / one
        far += apart > CLOSE
        print(f"step {step:2}  FSDP2 {one:.7f}  FCDP {other:.7f}  apart {apart:.0e}")
    sent, formula = ours["sent"], ours["formula"]
    print(f"a node sent {sent / 1e6:.3f} MB, {formula / 1e6:.3f} by the formula ({sent / formula - 1:+.2%})")
    return far


if __name__ == "__main__":
    main()
