"""What is counted for masks and scores, and what a block really takes."""

import ctypes
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from common.models.attention import chunked
from common.models.attention.chunked import ChunkMask
from common.models.attention.memory import AttentionMemory
from common.models.structure import find_blocks
from tests.helpers.models.families import peak_bytes, reset_peak_bytes
from tests.helpers.processes import forked


def test_a_block_takes_no_more() -> None:
    taken, counted = _measured("measure_block()")
    assert 0.3 * counted < taken < counted + (16 << 20)


@pytest.mark.parametrize("case", ["{'window': 1024}", "{'cap': 9.0}", "{'key_width': 96}"])
def test_a_chunk_takes_no_more(case: str) -> None:
    """Masks of all pairs of tokens would be 32 MiB, scores 128 MiB."""
    taken, counted = _measured(f"measure_chunk(**{case})")
    assert 0.4 * counted < taken < counted + (4 << 20) < 90 << 20


def _measured(call: str) -> tuple[int, int]:
    """Measure in an own process: pages that other tests have left in the heap would be counted when they are used."""
    done = forked.run([sys.executable, "-c", f"from {__name__} import *; {call}"], timeout=120)
    assert done.returncode == 0, done.stderr
    taken, counted = map(int, done.stdout.split())
    return taken, counted


def measure_chunk(window: int = 0, cap: float = 0.0, key_width: int = 64) -> None:
    """Print how many bytes a forward and a backward pass take at their peak, and what is counted."""
    queries, keys = 1024, 8192
    counted = AttentionMemory(0, window, 4, 0, key_width, 64, 4, 2, bool(cap)).chunk_bytes(queries, keys)
    counted += keys * 2 * (key_width + 64) * 4  # gradients of keys and values
    ctypes.CDLL(None).mallopt(-3, 65536)  # the least size of memory that leaves the process when it is freed
    for past in (16, keys - queries):  # the first loads code
        shapes = (4, queries, key_width), (2, past + queries, key_width), (2, past + queries, 64)
        inputs = [torch.randn(1, *shape, requires_grad=True) for shape in shapes]
        before = reset_peak_bytes()
        chunked._by_chunk(torch.nn.Module(), *inputs, ChunkMask(past, window), softcap=cap)[
            0
        ].sum().backward()
    print(peak_bytes() - before, counted)


def measure_block() -> None:
    """Print how many bytes a forward and a backward pass take at their peak, and what is counted for scores."""
    config = AutoConfig.for_model(
        "gptj", vocab_size=64, n_embd=32, n_layer=1, n_head=4, rotary_dim=8, n_positions=1024, attn_pdrop=0.0
    )
    model, hidden = (
        AutoModelForCausalLM.from_config(config).train(),
        torch.randn(1, 1024, 32, requires_grad=True),
    )
    _, (block,) = find_blocks(model)
    mask = torch.zeros(1, 1, 1024, 1024)
    before = reset_peak_bytes()
    result = block(hidden, position_ids=torch.arange(1024)[None], attention_mask=mask)
    (result if isinstance(result, torch.Tensor) else result[0]).sum().backward()
    print(peak_bytes() - before, AttentionMemory.of(model.config, 4).workspace_bytes(1024))
