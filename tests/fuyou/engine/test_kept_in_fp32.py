"""Parameters that a family keeps in fp32 are fp32 in a model of bf16, to the bit, wherever they lie."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from common.models.miniature import miniature
from common.models.structure import fp32_parameters
from fuyou.layout.frozen_weights import FrozenDtype
from fuyou.layout.model_layout import interleaved
from fuyou.layout.record import Kind, Precision, Record
from fuyou.planner import describe_training
from tests.helpers.adapters import InMemory, compare, train
from tests.helpers.engines import OPTIONS, batches, directories
from tests.helpers.engines import compare as compare_masters
from tests.helpers.engines import engine as plain_engine
from tests.helpers.models.families import saved
from tests.helpers.twin import Twin

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


def small(folder: Path, family: str, **changes: Any) -> Path:
    """A checkpoint of a small model of the family."""
    config = miniature(CONFIG_MAPPING[family]())
    for name, value in {"vocab_size": 256, **changes}.items():
        setattr(config, name, value)
    return saved(folder / family, config)


def twin_of(checkpoint: Path, clip: float | None = None, optimizer: str = "adamw") -> Twin:
    return Twin(str(checkpoint), bf16=True, max_grad_norm=clip, optimizer=optimizer, **OPTIONS)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("ernie4_5_moe", {"max_grad_norm": 0.05}),
        ("hy_v4", {"micro_batch": 2}),
        ("ernie4_5_moe", {"piece_size": "16KiB", "micro_batch": 2}),
        pytest.param("deepseek_v4", {}, marks=pytest.mark.slow),
        pytest.param(
            "deepseek_v4",
            {"host_cache": None, "host_memory": "2GiB", "micro_batch": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param("hy_v4", {"piece_size": "16KiB", "deferred_fraction": 0.5}, marks=pytest.mark.slow),
        pytest.param("hy_v4", {"optimizer": "adamw8bit"}, marks=pytest.mark.slow),
        *(
            pytest.param(family, {"micro_batch": 2}, marks=pytest.mark.slow)
            for family in ("bailing_hybrid", "beam", "flint", "inkling_text", "olmo_hybrid")
        ),
    ],
)
def test_all_weights_train_as_in_memory(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Two steps, a resume, two more; what is exported is loaded with the same numbers in the same dtypes."""
    checkpoint, feed, ssd = small(tmp_path, family), batches(4, packed=False), directories(tmp_path, 2)
    twin = twin_of(checkpoint, options.get("max_grad_norm"), options.get("optimizer", "adamw"))
    options = {"micro_batch": 4, **options}
    with plain_engine(checkpoint, ssd, "bf16", **options) as trained:
        train(trained, twin, feed[:2], options["micro_batch"])
    with plain_engine(checkpoint, ssd, "bf16", resume=True, **options) as trained:
        train(trained, twin, feed[2:], options["micro_batch"])
        compare_masters(trained, twin)
        assert trained.io_bytes() == trained.planned_io_bytes()
        trained.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert fp32_parameters(again)
    for name, value in twin.model.named_parameters():
        assert again.get_parameter(name).dtype == value.dtype and torch.equal(
            again.get_parameter(name), value
        ), name


@pytest.mark.parametrize("family", ["ernie4_5_moe", "deepseek_v4"])
def test_tied_embeddings_come_with_what_is_kept(family: str, tmp_path: Path) -> None:
    """What embedding and head share is one record; DeepSeek-V4's has a second one in fp32 next to it."""
    checkpoint, ssd = small(tmp_path, family, tie_word_embeddings=True), directories(tmp_path, 1)
    twin = twin_of(checkpoint)
    with plain_engine(checkpoint, ssd, "bf16", micro_batch=2) as trained:
        train(trained, twin, batches(3, packed=False), 2)
        compare_masters(trained, twin)


@pytest.mark.parametrize("pieces", [{}, {"piece_size": "16KiB"}])
def test_what_is_kept_and_frozen_stays_next_to_what_is_trained(
    pieces: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint, ssd = small(tmp_path, "ernie4_5_moe"), directories(tmp_path, 1)
    twin = twin_of(checkpoint)
    frozen = set(fp32_parameters(twin.model))
    before = {name: twin.model.get_parameter(name).clone() for name in frozen}
    names = [name for name in twin.masters if name not in frozen]
    for name in frozen:
        del twin.masters[name], twin._parameters[name]
        twin.model.get_parameter(name).requires_grad_(False)
    with plain_engine(checkpoint, ssd, "bf16", micro_batch=2, trainable=names, **pieces) as trained:
        train(trained, twin, batches(3, packed=False), 2)
        for name, value in trained.named_parameters():
            assert torch.equal(value, before.get(name, twin.masters.get(name))), name


def test_records_hold_one_dtype_each(tmp_path: Path) -> None:
    """Outside the blocks, the larger part is the main record: HY-V4's head is in fp32, its norm in bf16."""
    layout = describe_training(small(tmp_path, "hy_v4"), 1, 32, precision=Precision(torch.bfloat16)).layout
    head, norm = layout.records[layout.head], layout.records[layout.head_adapter]
    assert (head.kind, head.precision.split, norm.kind, norm.precision.split) == (
        Kind.NON_BLOCK, False, Kind.ADAPTER, True
    )  # fmt: skip
    assert "lm_head.weight" in head.trained_names and "model.norm.weight" in norm.trained_names
    for (block,), adapter in zip(layout.blocks, layout.block_adapters, strict=True):
        records = layout.records[block], layout.records[adapter]
        assert [record.precision.split for record in records] == [True, False]
        assert all(record.trainable for record in records)
    assert not any(slot.wide for record in layout.records for slot in record.parameters)
    chosen = interleaved(layout, 0.5)
    assert sorted(len(chosen & {*pair}) for pair in layout.trainable_blocks) == [0, 0, 0, 2, 2]


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
