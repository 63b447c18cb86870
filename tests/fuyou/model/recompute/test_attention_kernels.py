"""Forward pass and recomputation take one kernel of attention, and plans know which."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from common.models.meta_model import build_meta_model
from fuyou.model.recompute.block_trace import BlockTrace, Operator
from fuyou.model.recompute.policy import trace_block
from fuyou.model.streamed_model import StreamedModel
from tests.helpers.small_engine import BATCH, small_engine
from tests.helpers.twin import tiny_configs

FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"


class Kernels(TorchDispatchMode):
    """Writes down the operators of each call of attention, in whichever thread."""

    def __init__(self, found: list[set[str]]):
        super().__init__()
        self._names: set[str] = set()
        found.append(self._names)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._names.add(str(func))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[set[str]]]:
    """Yield the operators that calls of attention have run."""
    found: list[set[str]] = []
    call, threads = torch.nn.functional.scaled_dot_product_attention, set()

    def attend(*args: Any, **kwargs: Any) -> Any:
        threads.add(threading.get_ident())
        with Kernels(found):
            return call(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
        yield found


@pytest.mark.parametrize("options", [{}, {"piece_size": 20_000}], ids=["whole blocks", "pieces"])
@pytest.mark.parametrize("at_first", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_both_passes_take_the_kernel_that_was_chosen_at_first(
    at_first: SDPBackend, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = next(one for one in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH) if one is not at_first)
    with sdpa_kernel([at_first]):
        engine = small_engine(tmp_path, **options)
    with engine, recorded(monkeypatch) as found:
        # What a family is checked for once, on a small model, is not of interest here
        engine.eval_loss(**BATCH)
        found.clear()
        for around in (other, at_first):
            with sdpa_kernel([around]):
                out = engine(**BATCH)
            forward = list(found)
            found.clear()
            out.loss.backward()  # with what is switched on everywhere
            backward = list(found)
            found.clear()
            engine.step()
            assert forward and len(backward) >= len(forward)
            takes_flash = at_first is SDPBackend.FLASH_ATTENTION
            assert all((FLASH in names) is takes_flash for names in forward + backward)


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_a_plan_has_the_kernel_that_the_device_takes(backend: SDPBackend) -> None:
    with sdpa_kernel([backend]):
        stack = StreamedModel(
            build_meta_model(tiny_configs()["llama"], dtype=torch.bfloat16), torch.device("cpu")
        )
    names = {one.name for one in trace_block(stack, 16, "cpu", torch.bfloat16).operators}
    assert "aten.empty.memory_format" not in names  # nothing of the question
    assert (FLASH in names) is (backend is SDPBackend.FLASH_ATTENTION)


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_a_plan_with_the_kernel_that_a_gpu_was_seen_to_take(kernel: str) -> None:
    stack = StreamedModel(
        build_meta_model(tiny_configs()["llama"], dtype=torch.bfloat16), torch.device("cpu")
    )
    name = f"aten._scaled_dot_product_{kernel}_attention.default"
    trace = trace_block(stack, 16, name, torch.bfloat16)
    index = trace.find(name, 0)
    assert index is not None and trace.operators[index].savable and trace.operators[index].flops > 0
    assert trace.find("aten._scaled_dot_product_flash_attention.default", 0) == index


def test_attention_is_found_in_every_kernel() -> None:
    def operator(packet: Any, ordinal: int) -> Operator:
        return Operator(packet.default, ordinal, None, frozenset(), 1.0, 0, False, False)

    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    trace = BlockTrace([operator(torch.ops.aten.mm, 0), operator(efficient, 0)], frozenset(), True)
    assert trace.find("aten._scaled_dot_product_flash_attention.default", 0) == 1
    assert trace.find("aten._scaled_dot_product_flash_attention.default", 1) is None
    assert trace.find("aten.mm.default", 0) == 0 and trace.find("aten.addmm.default", 0) is None
