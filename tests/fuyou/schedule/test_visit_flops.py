"""FLOPs of what is trained, as the plan counts them and as torch does."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fuyou.layout.model_layout import Phase, Recomputation
from fuyou.planner.training_job import describe_training
from fuyou.schedule.tasks import visit_flops

SEQ_LEN = 32
CONFIG = AutoConfig.for_model(
    "qwen3_moe", vocab_size=199, num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=2,
    num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48,
    pad_token_id=0,
)  # fmt: skip


def counted(model: PreTrainedModel) -> int:
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(SEQ_LEN)[None]).logits.sum().backward()
    return int(counter.get_total_flops())


def test_gradients_of_visited_experts_count() -> None:
    """Backward visits compute the block again, and take gradients of its input and of what is trained."""
    model = AutoModelForCausalLM.from_config(
        CONFIG, attn_implementation="eager", experts_implementation="eager"
    )
    model.requires_grad_(False)
    model.get_input_embeddings().register_forward_hook(lambda _, __, hidden: hidden.detach().requires_grad_())
    without = counted(model)
    model.model.layers.requires_grad_(True)
    layout, gradients = describe_training(CONFIG, 1, SEQ_LEN).layout, 0.0
    for visit in layout.visits(True):
        if visit.phase is Phase.BLOCK_BACKWARD and visit.layer is not None:
            block = layout.records[layout.blocks[visit.layer][0]]
            gradients += (
                visit_flops(layout, visit, SEQ_LEN, Recomputation()) - 2 * 2 * SEQ_LEN * block.active_count
            )
    assert gradients == pytest.approx(counted(model) - without, rel=0.01) and gradients > 0
