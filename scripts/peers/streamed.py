"""Contender: this engine.

Settings: ``host_memory`` in bytes, of which what is left serves as cache, or "streamed" for the least with which
transfers and computation overlap fully, without any cache.
"""

import bisect

import torch
from transformers import PreTrainedConfig

from common.errors import UserError
from common.models.meta_model import build_meta_model
from fuyou import Engine
from fuyou.layout.record import Precision
from fuyou.model.model_records import model_records
from fuyou.model.streamed_model import StreamedModel
from fuyou.schedule.memory_plan import MemoryPlan
from fuyou.schedule.memory_planner import MemoryPlanner
from peers import contender

GRAIN = 16 << 20  # Budgets are looked for in steps of this many bytes


def streaming_budget(config: PreTrainedConfig, rows: int, seq_len: int, dtype: str = "bf16") -> int:
    """The least host memory in bytes with which the engine overlaps as much as with any amount."""
    precision = Precision.named(dtype)
    stack = StreamedModel(build_meta_model(config, dtype=precision.dtype), torch.device("cpu"))
    shape = model_records(stack, precision)

    def plan(limit: int) -> MemoryPlan | None:
        try:
            return MemoryPlanner(shape, config, limit, limit, cpu=True, host_cache=0).plan(
                rows, seq_len, None
            )
        except UserError:
            return None

    def buffers(plan: MemoryPlan | None) -> tuple[int, ...]:
        if plan is None:
            return ()
        counts = plan.counts
        return (
            plan.batch.micro_rows, plan.ring_chunks, counts.device_blocks, counts.device_block_gradients,
            counts.host_block_gradients, plan.head_columns,
        )  # fmt: skip

    most = buffers(plan(1 << 42))
    return GRAIN * bisect.bisect_left(
        range(1 << 16), True, key=lambda grains: buffers(plan(GRAIN * grains)) == most
    )


def main() -> None:
    task = contender.prepare()
    budget = task.settings.get("host_memory")
    streamed = budget == "streamed"
    if streamed:
        budget = streaming_budget(task.config(), task.rows, task.seq_len, task.dtype)
    with Engine(
        task.config(), ssd=[task.directory], dtype=task.dtype, lr=task.lr, host_memory=budget,
        batch_shape=(task.rows, task.seq_len), host_cache=0 if streamed else None,
    ) as engine:  # fmt: skip

        def train_step(tokens: torch.Tensor) -> float:
            loss = engine(input_ids=tokens, labels=tokens).loss
            loss.backward()
            engine.step()
            return loss.item()

        plan = engine.memory_plan
        facts = {
            "parameters": engine.parameters, "host_memory": budget, "micro_rows": plan.batch.micro_rows,
            "baseline_bytes": engine.host_baseline_bytes, "host_blocks": plan.counts.host_blocks,
            "resident_records": len(plan.resident),
        }  # fmt: skip
        contender.serve(task, train_step, facts)


if __name__ == "__main__":
    main()
