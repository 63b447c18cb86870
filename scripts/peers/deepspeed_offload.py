"""Contender: DeepSpeed ZeRO-3, parameters and optimizer offloaded to SSD (ZeRO-Infinity) or to host memory.

Runs in a separate environment, on DeepSpeed's CPU accelerator, as a world of one process. Settings:

* ``device``: "nvme" or "cpu".
* ``aio``, ``offload_optimizer``, ``offload_param``, ``zero``: merged into the sections of DeepSpeed's configuration.
* ``initialise_on``: where ``zero.Init`` puts the parameters as the model is built ("cpu", "nvme" or "none").
"""

import os
from typing import Any

from peers import contender


def configuration(task: contender.Task) -> dict[str, Any]:
    """DeepSpeed's configuration for this task."""
    settings, device = task.settings, task.settings["device"]
    where: dict[str, Any] = {"device": device}
    if device == "nvme":
        where["nvme_path"] = task.directory
    zero = {
        "stage": 3, "offload_optimizer": {**where, **settings.get("offload_optimizer", {})},
        "offload_param": {**where, **settings.get("offload_param", {})}, **settings.get("zero", {}),
    }  # fmt: skip
    return {
        "train_micro_batch_size_per_gpu": task.rows,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 1 << 30,
        "bf16": {"enabled": task.dtype == "bf16"},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": task.lr, "betas": [0.9, 0.999], "eps": 1e-8,
                                                  "weight_decay": 0.01}},
        "aio": settings.get("aio", {}),
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
    }  # fmt: skip


def _initialise(model: Any) -> None:
    """Give the parameters transformers' random values: under ``zero.Init`` its own attempt met empty tensors."""
    import deepspeed  # type: ignore[import-not-found]

    for module in model.modules():
        mine = list(module.parameters(recurse=False))
        for parameter in mine:
            parameter.__dict__.pop("_is_hf_initialized", None)
        if mine:
            with deepspeed.zero.GatheredParameters(mine, modifier_rank=0):
                model._init_weights(module)


def main() -> None:
    task = contender.prepare()
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    os.environ.setdefault("MASTER_PORT", "29511")
    import deepspeed  # type: ignore[import-not-found]
    import torch
    from transformers import AutoModelForCausalLM

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    config, settings = task.config(), configuration(task)
    with deepspeed.zero.Init(
        config_dict_or_path=settings,
        dtype=task.compute_dtype,
        remote_device=task.settings.get("initialise_on", "cpu"),
    ):
        model = AutoModelForCausalLM.from_config(config, dtype=task.compute_dtype)
    _initialise(model)
    model.config.use_cache = False
    model.gradient_checkpointing_enable({"use_reentrant": task.settings.get("reentrant", False)})
    model.train()
    parameters = sum(parameter.ds_numel for parameter in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    torch.set_num_threads(task.threads)

    def train_step(tokens: torch.Tensor) -> float:
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return loss.item()

    contender.serve(task, train_step, {"parameters": parameters, "deepspeed": deepspeed.__version__,
                                       "optimizer": type(engine.optimizer.optimizer).__name__})  # fmt: skip


if __name__ == "__main__":
    main()
