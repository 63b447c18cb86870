"""The way to keep documents apart is found by trying, and what does not hold is not taken."""

import pytest
import torch

from common.data.documents import Documents
from common.models.attention.isolation import DocumentSeparator, Isolation, _Experiment, find_isolation
from tests.helpers.models.small_models import model_of

WHOLE = {"llama", "gpt2", "gemma3_text", "opt"}
"""Families whose attention goes through transformers' interface, and that have nothing else that mixes tokens."""
CUT = {
    "gpt_oss": "GptOssAttention", "qwen3_next": "Qwen3NextGatedDeltaNet", "mamba": "MambaMixer",
    "mamba2": "Mamba2Mixer", "jamba": "JambaMambaMixer", "lfm2_moe": "Lfm2MoeShortConv", "openai-gpt": "Attention",
}  # fmt: skip


@pytest.mark.parametrize("family", sorted(WHOLE))
def test_attention_is_cut_at_documents(family: str) -> None:
    assert find_isolation(model_of(family)) == Isolation(True)


@pytest.mark.parametrize("family", sorted(CUT))
def test_other_modules_are_called_once_for_each_document(family: str) -> None:
    model = model_of(family)
    how = find_isolation(model)
    assert how is not None and [name.rpartition(".")[2] for name in how.modules] == [CUT[family]]
    with torch.no_grad():
        experiment = _Experiment(model.eval())
        assert experiment.holds(how) and not experiment.holds(Isolation(how.attention_by_document))
    assert not any("forward" in vars(module) for module in model.modules()), "the model is as it was"


@pytest.mark.parametrize(
    "family",
    ["bloom", "mpt",  # biases that go by the place in the row
     "bart",  # positions that nobody can say
     "llama4_text"],  # attention that is scaled by the place in the row
)  # fmt: skip
def test_families_that_cannot_be_packed(family: str) -> None:
    assert find_isolation(model_of(family)) is None


@pytest.mark.parametrize("family", ["jamba", "gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("size", ["hidden_size", "head_dim", "num_attention_heads"])
def test_rows_and_documents_of_sizes_that_others_have(family: str, size: str) -> None:
    """What goes by rows, tokens or heads is not concluded from sizes that happen to be equal."""
    torch.manual_seed(0)
    model = model_of(family).eval()
    how = find_isolation(model)
    assert how is not None
    length = max(8, getattr(model.config, size, 16))
    rows = model.config.num_attention_heads
    positions = torch.arange(length).remainder(torch.arange(4, 4 + rows)[:, None])
    ids = torch.randint(5, 90, (rows, length))
    documents = Documents.of(positions)
    assert documents is not None
    with torch.no_grad():
        with DocumentSeparator(model, how).apart(documents):
            packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        for row, start, end in list(documents.spans())[::3]:
            alone = model(input_ids=ids[row : row + 1, start:end], use_cache=False).logits
            torch.testing.assert_close(packed[row : row + 1, start:end], alone, rtol=1e-4, atol=1e-4)
