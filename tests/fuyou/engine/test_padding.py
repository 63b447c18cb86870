"""Masks of padded rows: what they take is measured, and counted before the batch that has them is computed."""

import copy
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig

from common.models.attention.memory import AttentionMemory
from common.models.meta_model import build_meta_model
from fuyou.model.streamed_model import StreamedModel
from fuyou.pieces.recording import LiveBytes
from tests.helpers.engines import ROWS, TOKENS, batches, directories, engine
from tests.helpers.models.small_models import small_config

LENGTH = 160
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    ),
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH),
    "gemma3_text": small_config("gemma3_text"),  # with a window
    "gpt_oss": small_config("gpt_oss"),  # eager, with a window
}


def masks(config: PreTrainedConfig, padded: bool) -> tuple[int, int]:
    """Return the bytes that blocks' arguments of a row and a padded one hold as masks, and those that are counted."""
    for part in (config, config.get_text_config()):
        part.max_position_embeddings = LENGTH
    stack = StreamedModel(build_meta_model(config, dtype=torch.float32), torch.device("cpu"))
    ids, mask = torch.zeros(2, LENGTH, dtype=torch.long), torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, LENGTH // 2 :] = 0 if padded else 1
    with stack._skipped(stack.before), stack._without_outer_weights():
        _, calls = stack.embed({"input_ids": ids, "attention_mask": mask})
    found = {
        leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes()
        for leaf in tree_leaves(calls.arguments)
        if isinstance(leaf, torch.Tensor) and leaf.shape[-2:] == (LENGTH, LENGTH)
    }
    return sum(found.values()), 2 * AttentionMemory.of(stack.model.config, 4).mask_bytes(LENGTH, padded)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_masks_take_what_is_counted(family: str, padded: bool) -> None:
    taken, counted = masks(copy.deepcopy(CONFIGS[family]), padded)
    assert taken == counted or (not padded and taken <= counted)  # rows without padding may share one mask
    assert counted or not padded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_takes_no_more_than_is_counted(dtype: torch.dtype) -> None:
    length, heads = 512, 2
    query = torch.randn(1, heads, length, 8, dtype=dtype, requires_grad=True)
    mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    with LiveBytes() as live:
        torch.nn.functional.scaled_dot_product_attention(query, query, query, mask).sum().backward()
    counted = AttentionMemory(width=dtype.itemsize)
    assert length**2 < live.most < counted.workspace_bytes(length, padded=True)
    assert counted.workspace_bytes(length) == 0


def test_the_plan_grows_with_the_first_padded_batch(tmp_path: Path) -> None:
    (batch,) = batches(1, packed=False)
    full, padded = (torch.ones(ROWS, TOKENS, dtype=torch.long) for _ in range(2))
    padded[1:, -5:] = 0
    taken = []
    with engine(CONFIGS["llama"], directories(tmp_path, 1), micro_batch=2) as trained:  # type: ignore[arg-type]
        for mask in (full, padded, full, padded):
            trained.eval_loss(**batch, attention_mask=mask)
            taken.append(trained._run.runtime.memory_plan)
    assert taken[1] is taken[2] is taken[3] is not taken[0]
    room = AttentionMemory(width=2)
    more = ROWS * room.mask_bytes(TOKENS, padded=True) + 2 * room.workspace_bytes(TOKENS, padded=True)
    assert taken[1].workspace_bytes - taken[0].workspace_bytes == 2 * room.workspace_bytes(
        TOKENS, padded=True
    )
    assert taken[0].counts == taken[1].counts and taken[1].device_bytes - taken[0].device_bytes == more


def test_memory_that_is_planned_for_padding_from_the_start(tmp_path: Path) -> None:
    (batch,) = batches(1, packed=False)
    mask = torch.ones(ROWS, TOKENS, dtype=torch.long)
    mask[0, :3] = 0
    with engine(CONFIGS["llama"], directories(tmp_path, 1), padded=True) as trained:  # type: ignore[arg-type]
        planned = trained._run.runtime.memory_plan
        trained.eval_loss(**batch, attention_mask=mask)
        assert trained._run.runtime.memory_plan is planned
