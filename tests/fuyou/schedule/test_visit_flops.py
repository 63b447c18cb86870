"""FLOPs of what is trained beside frozen blocks, as the plan counts them and as torch does."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from common.models.chosen_experts import ChosenExperts
from fuyou.layout.model_layout import Recomputation
from fuyou.layout.visits import Phase
from fuyou.pieces.cut import in_pieces
from fuyou.planner.training_job import TrainingJob, describe_training
from fuyou.schedule.visit_flops import visit_flops

EXPERTS, SEQ_LEN = 8, 32
CONFIG = AutoConfig.for_model(
    "qwen3_moe", vocab_size=199, num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=2,
    num_key_value_heads=2, head_dim=32, num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=48,
    pad_token_id=0,
)  # fmt: skip


def job() -> TrainingJob:
    return describe_training(CONFIG, 1, SEQ_LEN, train_experts=2 / EXPERTS)


def counted(model: PreTrainedModel) -> int:
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(SEQ_LEN)[None]).logits.sum().backward()
    return int(counter.get_total_flops())


def test_gradients_of_all_experts_count_where_some_are_trained() -> None:
    """Of a fused parameter, autograd makes them all; rows of chosen experts take others' places in all else."""
    model = AutoModelForCausalLM.from_config(CONFIG, attn_implementation="eager", experts_implementation="eager")
    model.requires_grad_(False)
    model.get_input_embeddings().register_forward_hook(lambda _, __, hidden: hidden.detach().requires_grad_())
    without = counted(model)
    chosen = ChosenExperts(model, 2 / EXPERTS)
    chosen.choose(dict.fromkeys(chosen.counts, (1, 6)))
    shape, gradients = job().shape, 0.0
    for visit in shape.visits(True):
        if visit.phase is Phase.BLOCK_BACKWARD and visit.layer is not None:
            block = shape.records[shape.blocks[visit.layer][0]]
            gradients += visit_flops(shape, visit, SEQ_LEN, Recomputation()) - 2 * 2 * SEQ_LEN * block.active_count
    assert gradients == counted(model) - without > 0


@pytest.mark.parametrize(("kib", "ranges", "touched"), [(20, 8, 1 / 4), (40, 4, 1 / 2), (80, 2, 1.0)])
def test_of_ranges_of_experts_only_those_with_chosen_ones_count(kib: int, ranges: int, touched: float) -> None:
    whole = job()
    cut = in_pieces(whole.stack, whole.shape, kib << 10)
    for layer in range(2):
        slots = [slot for index in cut.blocks[layer] for slot in cut.records[index].parameters if slot.experts]
        assert len({slot.experts for slot in slots}) == ranges
        before, after = (shape.records[shape.block_adapters[layer]].gradient_count for shape in (whole.shape, cut))
        assert after == touched * before
