"""A step on a fake GPU: nothing mixes devices, and nothing makes the host wait for the device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.data.documents import Documents
from common.models.meta_model import build_meta_model
from fuyou.model.loss.cross_entropy import cross_entropy
from fuyou.model.streamed_model import HOST_POSITIONS, StreamedModel
from fuyou.runtime.compute.token_computation import TokenPass
from tests.helpers.attention_calls import AttentionCalls, takes_math
from tests.helpers.cuda_branch import cuda_branch
from tests.helpers.fake_cuda import CUDA, fake_cuda
from tests.helpers.models.families import FAMILIES, MIXED, family_config

ROWS, TOKENS = 2, 24
BF16 = torch.bfloat16


def on_cuda(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.device == CUDA:
        return value
    return torch.empty(value.shape, dtype=value.dtype, device=CUDA)


def stack_of(family: str) -> StreamedModel:
    """Return the model, its buffers on the fake GPU."""
    stack = StreamedModel(build_meta_model(family_config(family), dtype=BF16), torch.device("cpu"))
    stack.device = CUDA
    assert stack._separator  # which is found out on a real model
    return stack


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in MIXED])
def test_a_step_of_a_dense_model_waits_for_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = stack_of(family)
    positions = torch.arange(TOKENS).remainder(9).expand(ROWS, -1).contiguous()
    documents = Documents.of(positions)

    def of(positions: torch.Tensor | None) -> Documents | None:  # which reads values
        assert positions is None or positions.device.type == "cpu"
        return None if positions is None else documents

    monkeypatch.setattr(Documents, "of", of)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.get_rng_state())  # on the CPU, too
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: None)
    with fake_cuda():
        for module in stack.model.modules():
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = on_cuda(buffer)
        parameters = {
            name: on_cuda(value) for name, value in stack.model.named_parameters(remove_duplicate=False)
        }
        ids = torch.empty(ROWS, TOKENS, dtype=torch.long, device=CUDA)
        batch = {"input_ids": ids, "position_ids": on_cuda(positions), HOST_POSITIONS: positions}
        outer = {name: value for name, value in parameters.items() if not name.startswith(stack.block_prefix)}
        with stack.bound(outer, before=True):
            hidden, calls = stack.embed(batch)
        with stack.bound({name: value for name, value in parameters.items() if name not in outer}):
            for index in range(len(stack.blocks)):
                hidden = stack.block(index, hidden, calls)
        with stack.bound(outer, before=False):
            logits = stack.head({"input_ids": ids}, hidden)
        loss, _ = cross_entropy(logits, ids, on_cuda(torch.ones(())), False)
    assert calls.documents is documents is not None
    assert {hidden.device, logits.device, loss.device} == {CUDA}


def test_what_a_callers_loss_is_made_of_is_uploaded_without_a_wait() -> None:
    head = SimpleNamespace()
    given = {"weights": torch.zeros(ROWS, TOKENS)}
    passing = TokenPass(head, {}, ROWS, TOKENS, given, reference=False)  # type: ignore[arg-type]
    passing.gradients = {"log_probs": torch.zeros(ROWS, TOKENS)}
    with fake_cuda():
        moved = [take(slice(0, 1), slice(0, 5), CUDA) for take in (passing.tokens, passing.gradients_of)]
    assert [value.device for values in moved for value in values.values()] == [CUDA, CUDA]


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_attention_ends_in_the_math_kernel(family: str, packed: bool, dtype: torch.dtype) -> None:
    """In rows of several documents PyTorch does not choose: one operator does all of them."""
    stack = StreamedModel(build_meta_model(family_config(family), dtype=dtype), torch.device("cpu"))
    batch = {"input_ids": torch.zeros(ROWS, TOKENS, dtype=torch.long)}
    if packed:
        batch["position_ids"] = torch.arange(TOKENS).remainder(20).expand(ROWS, -1).contiguous()
    weights = {
        name: torch.zeros(value.shape, dtype=dtype)
        for name, value in stack.model.named_parameters(remove_duplicate=False)
    }
    assert stack._separator
    with cuda_branch(), AttentionCalls() as attention, torch.no_grad():
        outer = {name: value for name, value in weights.items() if not name.startswith(stack.block_prefix)}
        with stack.bound(outer, before=True):
            hidden, calls = stack.embed(batch)
        with stack.bound({name: value for name, value in weights.items() if name not in outer}):
            for index in range(len(stack.blocks)):
                hidden = stack.block(index, hidden, calls)
    assert packed or attention.calls
    # With dropout, one call per document
    assert not packed or all(args[4] > 0 for args, _ in attention.calls)
    assert not any(takes_math(*args, **kwargs) for args, kwargs in attention.calls)
