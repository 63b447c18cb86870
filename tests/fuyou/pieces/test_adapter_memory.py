"""What adapters of experts in ranges are planned to take is enough for what they allocate, and not much more."""

import pytest
import torch
from peft import LoraConfig

from common.models.adapters.memory import adapter_memory
from fuyou.pieces.division import largest_share
from fuyou.pieces.recording import LiveBytes
from fuyou.pieces.run import PieceRun
from tests.helpers.models.piece_models import PieceModel
from tests.helpers.models.small_models import small_config
from tests.helpers.piece_driver import PieceDriver

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
TOKENS = 13


def passed(model: PieceModel, backward: bool) -> tuple[int, PieceDriver]:
    """Most bytes at once of a pass through a block in pieces."""
    base = model.base_of_block(0)
    driver = PieceDriver(model.stack, 0, base)
    given = model.inputs([1], tokens=TOKENS)
    hidden = given.hidden[0].detach().requires_grad_(backward)
    adapters = {
        name: value.clone().requires_grad_(backward)
        for name, value in model.of_block(0).items()
        if name not in base
    }

    def work() -> int:
        with LiveBytes() as seen:
            output = model.stack.block(0, hidden, given.calls[0])
            if backward:
                given.calls[0].backward(output, given.gradients[0])
        return seen.most

    with model.stack.bound(adapters), driver.handles.bound(), torch.set_grad_enabled(backward):
        run = PieceRun(work)
        driver.go(
            [stage.piece for stage in driver.order.backward] if backward else driver.order.forward, [run]
        )
    return run.result(), driver


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_enough(dtype: str, backward: bool) -> None:
    config = small_config("qwen3_moe")
    config.hidden_size = config.moe_intermediate_size = 256
    config.num_experts, config.num_hidden_layers = 16, 1
    plain, _ = passed(PieceModel(config, dtype, LoraConfig(r=2, target_modules=ATTENTION)), backward)
    model = PieceModel(config, dtype, LoraConfig(r=2, target_modules="all-linear"))
    adapted, driver = passed(model, backward)
    taken = adapted - plain
    planned = adapter_memory(model.stack.blocks[0], largest_share(driver.pieces))
    weights = sum(value.nbytes for name, value in driver.weights.items() if ".experts." in name)
    assert taken <= planned.fixed + TOKENS * planned.per_token
    assert not backward or planned.fixed <= 3 * taken
    assert planned.fixed < weights < adapter_memory(model.stack.blocks[0]).fixed
