"""Adapters on the experts of mixtures, out of core and in memory: equal to the bit."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from common.models.adapters.options import AdapterOptions
from tests.helpers.adapters import DTYPES, InMemory, compare, train
from tests.helpers.engines import STEPS, batches, directories
from tests.helpers.engines import engine as plain_engine
from tests.helpers.models.mixtures import MIXTURES, save_mixtures

pytestmark = pytest.mark.filterwarnings("ignore")
FUSED = ["gate_up_proj", "down_proj"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mixtures(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize(
    ("family", "dtype", "micro", "clip"),
    [(family, *(("fp32", 3, 0.1), ("bf16", 2, None))[number % 2]) for number, family in enumerate(MIXTURES)],
)
@pytest.mark.slow
def test_equals_peft_in_memory(
    family: str, dtype: str, micro: int, clip: float | None, checkpoints: Path, tmp_path: Path
) -> None:
    """By the names of fused experts; the adapter, loaded by peft, gives the twin's numbers, and so does what is merged.

    (One document a row: the twin's attention by documents knows neither attention sinks nor values narrower than keys.)
    """
    model = checkpoints / family
    real = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype])
    torch.manual_seed(0)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["o_proj"], target_parameters=FUSED, task_type="CAUSAL_LM"
    )
    twin = InMemory(get_peft_model(real, config), clip)
    options = {
        "adapters": AdapterOptions(4, targets=("o_proj", *FUSED)),
        "micro_batch": micro,
        "max_grad_norm": clip,
    }
    feed = batches(STEPS, packed=False)
    with plain_engine(model, directories(tmp_path, 1), dtype, **options) as trained:
        train(trained, twin, feed, micro)
        compare(trained, twin.model.get_base_model())
        assert trained.io_bytes() == trained.planned_io_bytes()
        trained.save_pretrained(tmp_path / "adapter", merge=True)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype])
    tuned = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    tokens = feed[0]["input_ids"]
    with torch.no_grad():
        assert torch.equal(tuned(tokens).logits, twin.model.eval()(tokens).logits)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter" / "merged", dtype=DTYPES[dtype])
    for name, value in tuned.merge_and_unload().named_parameters():
        assert torch.equal(merged.get_parameter(name), value), name
