"""Other people's loops, with FSDP2 and with one line more: accelerate's, and TRL's ``SFTTrainer`` on transformers'."""

import contextlib
import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import fcdp
from tests.helpers.fcdp.cases import VOCABULARY, Case, make_model
from tests.helpers.fcdp.module_cases import ids


@contextlib.contextmanager
def launched(topology: fcdp.Topology) -> Any:
    """Set what ``accelerate launch`` sets for FSDP2 on two machines' CPUs."""
    variables = {
        "ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
        "LOCAL_RANK": str(topology.rank % 2), "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    }  # fmt: skip
    before = dict(os.environ)
    os.environ.update(variables)
    # accelerate knows FSDP on accelerators alone: with this it takes several processes on CPUs for such.
    several = "gloo", DistributedType.MULTI_GPU
    many = mock.patch.object(PartialState, "_prepare_backend", return_value=several)
    try:
        with many:
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        AcceleratorState._reset_state()
        PartialState._reset_state()
        dist.barrier()


def accelerate_loop(
    topology: fcdp.Topology, ours: bool, passes: int, save: str = "", load: str = ""
) -> tuple[list[float], tuple[float, float]]:
    """Losses of accelerate's own loop, and bytes between nodes: sent, and by the formula.

    Args:
        passes: forward and backward passes, two of which make a step.
        save, load: directory of a checkpoint of PyTorch's, written at the end, or read before the first step.
    """
    with launched(topology), fcdp.replace_fsdp2() if ours else contextlib.nullcontext():
        accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(), gradient_accumulation_steps=2)
        model: Any = make_model(Case())
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = accelerator.prepare(model, optimizer)
        if load:
            weights = get_model_state_dict(model)
            dcp.load(weights, checkpoint_id=load)
            set_model_state_dict(model, weights)
        losses = []
        for step in range(passes):
            with accelerator.accumulate(model):
                data = ids(step, topology.rank)
                loss = model(input_ids=data, labels=data).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss))
        if save:
            dcp.save(get_model_state_dict(model), checkpoint_id=save)
        return losses, _bytes(model, passes // 2) if ours else (0.0, 0.0)


def sft_trainer(
    topology: fcdp.Topology, ours: bool, steps: int, folder: str, load: str = ""
) -> tuple[list[float], tuple[float, float]]:
    """The same of TRL's ``SFTTrainer``, which writes its own checkpoint into ``folder`` after 20 steps.

    Args:
        load: such a checkpoint, with optimizer states, from which it continues until ``steps`` are done.
    """
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    with launched(topology), fcdp.replace_fsdp2() if ours else contextlib.nullcontext():
        rows = torch.randint(
            3, VOCABULARY, (4 * steps, 9), generator=torch.Generator().manual_seed(0)
        ).tolist()
        config = SFTConfig(
            output_dir=str(Path(folder)), max_steps=steps, per_device_train_batch_size=1, learning_rate=1e-3,
            lr_scheduler_type="constant", logging_steps=1, save_strategy="steps", save_steps=20, report_to=[],
            use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True, log_level="error",
            max_length=None, dataset_kwargs={"skip_prepare_dataset": True},
        )  # fmt: skip
        model: Any = make_model(Case())
        trainer = SFTTrainer(
            model=model,
            args=config,
            train_dataset=Dataset.from_dict({"input_ids": rows}),
            processing_class=_tokenizer(),
        )
        trainer.train(resume_from_checkpoint=load or None)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, _bytes(trainer.model_wrapped, steps) if ours else (0.0, 0.0)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2", unk_token="w0")


def _bytes(model: Any, steps: int) -> tuple[float, float]:
    """Bytes that a node sent, and what the formula says of steps that reduce once."""
    sharding = fcdp.sharding(model)
    formula = sum(sharding.inter_node_bytes(1, first_step=not step) for step in range(steps))
    sent = torch.tensor(float(sharding.traffic.inter_node))
    dist.all_reduce(sent)
    return float(sent) / 2, formula
