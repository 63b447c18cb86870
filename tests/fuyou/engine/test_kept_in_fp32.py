"""Parameters that a family keeps in fp32 are fp32 in a model of bf16, to the bit, wherever they lie."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from common.errors import UserError
from common.models.miniature import miniature
from common.models.structure import fp32_parameters
from fuyou.layout.frozen_weights import FrozenDtype
from fuyou.layout.record import Kind, Precision, Record
from fuyou.planner import describe_training
from tests.helpers.adapters import InMemory, compare, train
from tests.helpers.engines import batches, directories
from tests.helpers.engines import engine as plain_engine
from tests.helpers.models.families import saved

# Norms, sinks, and hyper-connections; the head as well; decays that are built in fp32 and named nowhere.
FAMILIES = ("deepseek_v4", "hy_v4", "olmo_hybrid")
TARGETS = {
    "deepseek_v4": ["self_attn.q_b_proj", "self_attn.kv_proj"],
    "hy_v4": ["q_b_proj", "o_proj"],
    "olmo_hybrid": ["q_proj", "o_proj"],
}

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=FAMILIES, scope="module")
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = miniature(CONFIG_MAPPING[family]())
    config.vocab_size = 256
    return saved(tmp_path_factory.mktemp("checkpoints") / family, config)


def test_blocks_that_share_a_dictionary_run_without_values(
    checkpoint: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek-V4 passes a dictionary of rotary embeddings; on a device, its blocks would take minutes."""
    on_device = list[object]()
    monkeypatch.setattr("fuyou.model.blocks.probe._on_device", lambda block, *_: on_device.append(block))
    describe_training(checkpoint, 1, 32, precision=Precision(torch.bfloat16), adapters=lora(family))
    assert not on_device


def lora(family: str) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS[family], task_type="CAUSAL_LM")


def in_memory(family: str, checkpoint: Path) -> InMemory:
    real = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    kept = fp32_parameters(real)
    assert kept and all(real.get_parameter(name).dtype == torch.float32 for name in kept)
    torch.manual_seed(0)
    return InMemory(get_peft_model(real, lora(family)))


@pytest.mark.parametrize("options", [
    {},
    pytest.param({"host_cache": 0, "micro_batch": 4}, marks=pytest.mark.slow),
    pytest.param({"piece_size": "16KiB", "host_cache": 0}, marks=pytest.mark.slow),
])  # fmt: skip
def test_adapters_train_as_in_memory(
    family: str, checkpoint: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Two steps, a resume, two more."""
    twin, feed, ssd = in_memory(family, checkpoint), batches(4, packed=False), directories(tmp_path, 2)
    options = {"micro_batch": 2, "adapters": lora(family), **options}
    with plain_engine(checkpoint, ssd, "bf16", **options) as trained:
        train(trained, twin, feed[:2], options["micro_batch"])
    with plain_engine(checkpoint, ssd, "bf16", resume=True, **options) as trained:
        train(trained, twin, feed[2:], options["micro_batch"])
        compare(trained, twin.model.get_base_model())
        assert trained.io_bytes() == trained.planned_io_bytes()


def test_frozen_matrices_in_fewer_bits_leave_them_as_they_are(
    family: str, checkpoint: Path, tmp_path: Path
) -> None:
    options = {"adapters": lora(family), "frozen_dtype": "nf4"}
    with plain_engine(checkpoint, directories(tmp_path, 1), "bf16", **options) as trained:
        slots = [slot for record in trained._run.layout.records for slot in record.parameters if slot.wide]
        real = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        assert {name for slot in slots for name in slot.names} >= set(fp32_parameters(real))
        stored = dict(trained._run.reader().masters())
        for name in fp32_parameters(real):
            assert torch.equal(stored[name], real.get_parameter(name)), name


def test_all_weights_are_refused_in_bf16(family: str, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"keeps .* in fp32, .* train adapters .*, or all weights with .*fp32"
    ):
        plain_engine(checkpoint, directories(tmp_path, 1), "bf16")


@pytest.mark.parametrize("frozen", [FrozenDtype.PLAIN, FrozenDtype.INT8, FrozenDtype.NF4])
def test_a_record_keeps_their_bits(frozen: FrozenDtype) -> None:
    parameters = [(("matrix",), (64, 70), True), (("wide",), (3, 129), False), (("bias",), (7,), False)]
    record = Record.build(
        0,
        "block 0",
        Kind.BLOCK,
        Precision(torch.bfloat16),
        parameters,
        trainable=False,
        frozen=frozen,
        wide=["wide"],
    )
    assert record.parameter_count == 64 * 70 + 3 * 129 + 7
    flat = torch.zeros(record.numel, dtype=torch.bfloat16)
    values = torch.randn(3, 129)
    views = record.views(flat)
    views["wide"].copy_(values)
    views["bias"].fill_(1.5)
    assert torch.equal(record.views(flat)["wide"], values)
    if frozen is not FrozenDtype.PLAIN:
        payload = torch.zeros(record.device_nbytes, dtype=torch.uint8)
        record.frozen.encode(flat, record.decayed, payload)
        flat = torch.empty_like(flat)
        record.decode(payload, flat)
    assert torch.equal(record.views(flat)["wide"], values)
    assert torch.equal(record.views(flat)["bias"], torch.full((7,), 1.5, dtype=torch.bfloat16))
