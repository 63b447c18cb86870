"""Contender: PyTorch's FSDP2 with ``CPUOffloadPolicy``: one process, fp32 shards on the CPU.

FSDP2 takes the offload as "shards live on the CPU, computation is elsewhere". On a machine without an accelerator both
are the CPU; what it says about that is in the benchmark's output.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from peers import contender


def main() -> None:
    task = contender.prepare()
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1")
    os.environ.setdefault("MASTER_PORT", "29512")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1,))
    model = contender.build_model(task.config(), torch.float32)
    options: dict[str, Any] = {
        "mesh": mesh, "mp_policy": MixedPrecisionPolicy(task.compute_dtype, torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=task.settings.get("pin_memory", False)),
    }  # fmt: skip
    for block in model.get_submodule("transformer.h").children():
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, weight_decay=0.01, fused=True)

    def train_step(tokens: torch.Tensor) -> float:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    contender.serve(task, train_step, {"parameters": sum(weight.numel() for weight in model.parameters())})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
