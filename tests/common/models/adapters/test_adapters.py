"""Adapters put into a model without weights are those that peft puts into the real one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, PhiConfig

from common.errors import UserError
from common.models.adapters.adapters import Adapters
from common.models.adapters.options import CONFIG, WEIGHTS, AdapterOptions, SavedAdapter, load_peft_config
from common.models.checkpoint.sources import CheckpointSource
from common.models.meta_model import build_meta_model
from common.models.presets import load_config
from tests.helpers.twin import save_checkpoints

EVERY = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoints(
        tmp_path_factory.mktemp("checkpoints"), ("llama", "llama-tied", "gpt2", "gemma3", "qwen3-moe")
    )


def adapted(
    directory: Path, config: PeftConfig, dtype: torch.dtype, seed: int = 5
) -> tuple[Adapters, CheckpointSource]:
    meta = build_meta_model(load_config(directory)[0], dtype=dtype)
    source = CheckpointSource(directory, meta)
    return Adapters(meta, config, seed), source


@pytest.mark.parametrize(("family", "dtype", "make"), [
    ("llama", BF16, AdapterOptions(4, targets=("all-linear",)).peft_config),
    ("gpt2", FP32, AdapterOptions(4, targets=("all-linear",), dora=True).peft_config),  # transposed layers
    ("gpt2", BF16, lambda: LoraConfig(r=4, bias="all", **EVERY)),
    ("gemma3", BF16, AdapterOptions(4, targets=("all-linear",), dora=True, rslora=True).peft_config),
    ("llama-tied", FP32, lambda: LoraConfig(r=4, init_lora_weights="gaussian", **EVERY)),
    ("llama", BF16, lambda: LoraConfig(r=4, init_lora_weights="orthogonal", **EVERY)),
    ("gpt2", BF16, lambda: LoraConfig(r=4, init_lora_weights=False, lora_bias=True, **EVERY)),
    ("llama", FP32, lambda: LoraConfig(r=4, target_modules=["q_proj", "lm_head", "embed_tokens"])),
    ("llama", BF16, lambda: LoraConfig(r=4, use_dora=True, target_modules=["q_proj", "embed_tokens"])),
    # Scaled and tied
    ("gemma3", FP32, lambda: LoraConfig(r=4, use_dora=True, target_modules=["embed_tokens"])),
    # Experts are parameters, not layers
    ("qwen3-moe", BF16, AdapterOptions(4, targets=("all-linear",)).peft_config),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_same_as_peft(
    family: str, dtype: torch.dtype, make: Callable[[], PeftConfig], checkpoints: Path, tmp_path: Path
) -> None:
    """Names, first values, what is trained; a directory that peft loads; and what peft merges."""
    directory = checkpoints / family

    def model() -> AutoModelForCausalLM:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)

    torch.manual_seed(5)
    real = dict(get_peft_model(model(), make()).get_base_model().named_parameters())
    adapters, source = adapted(directory, make(), dtype)
    meta = dict(adapters.model.named_parameters())
    given = dict(adapters.source(source).read(list(meta)))
    assert list(meta) == list(real) and meta.keys() == given.keys()
    for name, parameter in real.items():
        ours = meta[name]
        assert ours.is_meta
        assert (ours.shape, ours.dtype, ours.requires_grad) == (
            parameter.shape,
            parameter.dtype,
            parameter.requires_grad,
        )
        assert torch.equal(given[name].to(dtype if name in adapters.base_names else FP32), parameter), name

    generator = torch.Generator().manual_seed(2)
    trained = {name: torch.randn(real[name].shape, generator=generator) for name in adapters.trainable_names}
    adapters.save(tmp_path, trained)
    assert {path.name for path in tmp_path.iterdir()} - {"adapter.gguf"} == {CONFIG, WEIGHTS}
    back, saved = PeftModel.from_pretrained(model(), tmp_path), SavedAdapter(tmp_path)
    values = {name: value.detach().clone() for name, value in back.get_base_model().named_parameters()}
    for name, value in trained.items():
        assert torch.equal(values[name].float(), value.to(values[name].dtype).float()), name
    again = Adapters(build_meta_model(load_config(directory)[0], dtype=dtype), saved.config(), 0, saved=saved)
    for name, value in again.source(source).read(list(meta)):
        assert torch.equal(value.to(values[name].dtype), values[name]), name
    merged = adapters.merge(values)
    if adapters.unties:
        # Peft adds the embedding's adapters to the head, too; see tests/cli/train/test_exports.py
        return
    expected = dict(back.merge_and_unload().named_parameters())
    assert merged.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(merged[name], parameter), name
    assert all(parameter.is_meta for parameter in adapters.model.parameters())


def test_biases_of_adapters_need_layers_with_biases_to_merge_into(checkpoints: Path) -> None:
    adapters, source = adapted(checkpoints / "llama", LoraConfig(r=4, lora_bias=True, **EVERY), FP32)
    values = dict(adapters.source(source).read([name for name, _ in adapters.model.named_parameters()]))
    with pytest.raises(UserError, match=r"have biases \(lora_bias\), and the model's layers have none"):
        adapters.merge(values)


def test_configuration_files(tmp_path: Path) -> None:
    """A file, its directory, or the few settings that somebody typed."""
    LoraConfig(
        r=3, lora_alpha=5, use_rslora=True, rank_pattern={"q_proj": 7}, task_type="CAUSAL_LM"
    ).save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / CONFIG):
        config = load_peft_config(path)
        assert (config.r, config.lora_alpha, config.use_rslora, config.rank_pattern) == (
            3,
            5,
            True,
            {"q_proj": 7},
        )
        assert not config.inference_mode
    # As old versions write
    (tmp_path / CONFIG).write_text('{"r": 6, "merge_weights": false, "enable_lora": null}')
    assert load_peft_config(tmp_path).r == 6


@pytest.mark.parametrize(("content", "said"), [
    ("{", "not a configuration that peft can read"),
    ("[]", "not a table"),
    ('{"peft_type": "LOHA"}', "peft_type LOHA cannot be trained here: there is LORA"),
    ('{"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3}', "PREFIX_TUNING"),
    ('{"r": 4, "alora_invocation_tokens": [5]}', "alora_invocation_tokens"),
    ('{"r": 4, "kasa_config": {}}', "kasa_config"),
    ('{"r": 4, "monteclora_config": {}}', "monteclora_config"),
    ('{"r": 4, "use_rslor": true}', "peft does not know the field 'use_rslor'.*Did you mean 'use_rslora'"),
    ('{"r": 4, "lora_alpha": 0}', "lora_alpha is 0, and has to be a number other than 0"),
    ('{"r": 4, "ensure_weight_tying": true}', "ensure_weight_tying"),
    ('{"r": 4, "init_lora_weights": "pissa"}', "'pissa' changes or looks at the base weights"),
])  # fmt: skip
def test_what_cannot_be_done_is_rejected(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(content)
    with pytest.raises(UserError, match=said):
        load_peft_config(tmp_path)


def test_rejections_name_what_is_there(checkpoints: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"modules_to_save: no module is called 'lm_haed'.*lm_head"):
        adapted(checkpoints / "llama", LoraConfig(modules_to_save=["lm_haed"]), BF16)
    with pytest.raises(UserError, match="trainable_token_indices: the model has no token 999"):
        adapted(checkpoints / "llama", LoraConfig(trainable_token_indices=[999]), BF16)
    with pytest.raises(UserError, match=r"'q_proj'.*down_proj, gate_proj, .*k_proj"):
        adapted(checkpoints / "llama", AdapterOptions(2, targets=("q_porj",)).peft_config(), BF16)
    with pytest.raises(UserError, match="cannot be read"):
        load_peft_config(tmp_path / "nothing.json")
    with pytest.raises(UserError, match="rank must be at least 1"):
        AdapterOptions(0)


@pytest.mark.parametrize(("fields", "said"), [
    ({"rank_pattern": {"^q_proj": 8}}, r"rank_pattern: '\^q_proj' matches no module with an adapter. .*'q_proj'"),
    ({"alpha_pattern": {"q_proj": 2, "k_proj": 8}}, "alpha_pattern: 'k_proj' matches no module with an adapter"),
    ({"alpha_pattern": {"q_proj": 2, "self_attn.q_proj": 8}}, "'self_attn.q_proj' matches no .* no earlier entry"),
    # peft saves the two in the other order, and the first that matches counts: nothing else tells alphas apart.
    ({"alpha_pattern": {"q_proj": 2, "layers.0.self_attn.q_proj": 8}}, "both match model.layers.0.self_attn.q_proj"),
    ({"layers_to_transform": [1, 7]}, "layers_to_transform: the model has no layer 7"),
    ({"layers_to_transform": [1, 7], "layers_pattern": "layers"}, "layers_to_transform: the model has no layer 7"),
    ({"exclude_modules": ["k_proj", "v_porj"]}, "exclude_modules: 'v_porj' matches no module. .*'v_proj'"),
    ({"target_parameters": ["mlp.up_proj.weight", "mlp.x"]}, "target_parameters: 'mlp.x' matches no parameter that"),
    # A pattern for whole names
    ({"exclude_modules": "v_proj"}, "exclude_modules: 'v_proj' matches no module"),
])  # fmt: skip
def test_entries_that_match_nothing_are_rejected(
    fields: dict[str, Any], said: str, checkpoints: Path
) -> None:
    with pytest.raises(UserError, match=said):
        adapted(checkpoints / "llama", LoraConfig(target_modules=["q_proj"], **fields), BF16)


@pytest.mark.parametrize("fields", [
    {"rank_pattern": {r"layers\.0\.self_attn\.q_proj": 8}, "alpha_pattern": {"q_proj": 2}},
    {"alpha_pattern": {"layers.0.self_attn.q_proj": 8, "q_proj": 2}},
    {"layers_to_transform": 1, "layers_pattern": ["layers"]},
    {"layers_to_transform": [0, 1], "exclude_modules": ["layers.0.self_attn.q_proj", "k_proj"]},
    {"exclude_modules": r".*\.0\..*"},
    {"target_parameters": ["mlp.up_proj.weight"]},
])  # fmt: skip
def test_entries_that_match_by_the_rules_of_peft(fields: dict[str, Any], checkpoints: Path) -> None:
    adapters, _ = adapted(checkpoints / "llama", LoraConfig(target_modules=["q_proj"], **fields), BF16)
    assert adapters.layers


OVERLOOKED = [
    ("llama", {"target_modules": ["q_proj", "embed_tokens"], "layers_to_transform": [0]}, "'embed_tokens' is in these"),
    ("llama", {"target_modules": ["up_proj"], "exclude_modules": ["mlp"]}, r"layers\.0\.mlp is excluded"),
    ("llama", {"target_modules": "all-linear", "exclude_modules": r".*\.1\.mlp"}, r"layers\.1\.mlp is excluded"),
    ("llama", {"modules_to_save": ["norm"]}, r"peft would train model\.layers\.0\.input_layernorm for 'norm', too"),
    ("llama", {"modules_to_save": ["lm_head", "layernorm"]}, "layers.0.input_layernorm for 'layernorm'"),
    # Experts are parameters
    ("qwen3-moe", {"target_modules": ["gate_up_proj"], "layers_to_transform": 0}, r"adapt model\.layers\.1\.mlp\.exp"),
    ("qwen3-moe", {"target_parameters": ["experts.down_proj"], "layers_to_transform": [1]}, r"adapt model.layers.0"),
    ("qwen3-moe", {"target_modules": "all-linear", "exclude_modules": ["experts"]}, r"layers\.0\.mlp\.experts is excl"),
    ("qwen3-moe", {"target_modules": "all-linear", "exclude_modules": ["gate"]}, r"layers\.0\.mlp\.gate is excluded"),
    ("qwen3-moe", {"target_modules": "all-linear", "exclude_modules": r".*layers\.1\..*"}, r"layers\.1\.mlp is excl"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "fields", "said"), OVERLOOKED)
def test_what_peft_would_adapt_or_leave_out_against_the_configuration_is_rejected(
    family: str, fields: dict[str, Any], said: str, checkpoints: Path
) -> None:
    with pytest.raises(UserError, match=said):
        adapted(checkpoints / family, LoraConfig(r=2, **fields), BF16)


@pytest.mark.parametrize(("family", "fields", "where"), [
    ("llama", {"target_modules": ["q_proj", "model.embed_tokens"], "layers_to_transform": [0]},
     {"model.layers.0.self_attn.q_proj", "model.embed_tokens"}),
    ("llama", {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*\.mlp\..*", "layers_to_transform": None},
     {f"model.layers.{layer}.self_attn.q_proj" for layer in range(3)}),
    ("llama", {"target_modules": ["model.layers.1.mlp.up_proj"], "modules_to_save": ["model.norm"]},
     {"model.layers.1.mlp.up_proj", "model.norm.modules_to_save.default.weight"}),
    ("qwen3-moe", {"target_modules": ["q_proj"], "target_parameters": ["layers.0.mlp.experts.down_proj"],
                   "layers_to_transform": [0], "exclude_modules": ["layers.1.mlp.experts"]},
     {"model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts"}),
    ("qwen3-moe", {"target_modules": ["q_proj"], "target_parameters": ["model.layers.2.mlp.experts.down_proj"],
                   "layers_to_transform": [0]}, {"model.layers.0.self_attn.q_proj", "model.layers.2.mlp.experts"}),
])  # fmt: skip
def test_layers_and_exclusions_decide_what_is_adapted(
    family: str, fields: dict[str, Any], where: set[str], checkpoints: Path
) -> None:
    adapters, _ = adapted(checkpoints / family, LoraConfig(r=2, **fields), BF16)
    assert {name.partition(".lora_")[0] for name in adapters.trainable_names} == where


@pytest.mark.parametrize(
    "task", ["SEQ_CLS", "TOKEN_CLS", "FEATURE_EXTRACTION", "QUESTION_ANS", "SEQ_2_SEQ_LM"]
)
def test_a_configuration_for_another_head_is_rejected(task: str, checkpoints: Path) -> None:
    """What it trained would be the next token, and the saved adapter would say otherwise."""
    with pytest.raises(UserError, match=rf"task_type {task}, and LlamaForCausalLM writes text"):
        adapted(checkpoints / "llama", LoraConfig(target_modules=["q_proj"], task_type=task), BF16)


def test_rows_of_what_is_trained_as_a_whole_are_rejected(checkpoints: Path) -> None:
    config = LoraConfig(
        target_modules=["q_proj"], modules_to_save=["embed_tokens"], trainable_token_indices=[3]
    )
    with pytest.raises(
        UserError, match=r"modules_to_save trains all of model\.embed_tokens: leave one of both out"
    ):
        adapted(checkpoints / "llama", config, BF16)


def test_a_module_that_cannot_be_adapted_is_named_on_one_line(checkpoints: Path) -> None:
    config = LoraConfig(target_modules=["self_attn"])
    with pytest.raises(
        UserError,
        match=r"^peft cannot adapt .*: Target module LlamaAttention is not supported\. Its linear layers .*q_proj",
    ):
        adapted(checkpoints / "llama", config, BF16)


@pytest.mark.parametrize(("tied", "rows"), [(True, [5, 6]), (False, {"lm_head": [5, 6]})])
def test_rows_of_a_head_with_a_bias_are_rejected(tied: bool, rows: Any) -> None:
    """Peft computes such a head without its bias; one without a bias, and embeddings alone, are trained."""
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = PhiConfig(vocab_size=64, tie_word_embeddings=tied, pad_token_id=0, **small)
    with pytest.raises(UserError, match="trainable_token_indices: lm_head has a bias, which peft leaves out"):
        Adapters(build_meta_model(config, dtype=BF16), LoraConfig(trainable_token_indices=rows), 0)
    if not tied:
        Adapters(build_meta_model(config, dtype=BF16), LoraConfig(trainable_token_indices=[5, 6]), 0)


def test_a_configuration_of_another_adapter(checkpoints: Path, tmp_path: Path) -> None:
    """Of the same shapes: they do not tell."""
    for alpha in (4, 64):
        adapters, source = adapted(checkpoints / "llama", AdapterOptions(2, alpha).peft_config(), FP32)
        values = dict(adapters.source(source).read(adapters.names))
        adapters.save(tmp_path / str(alpha), values)
        SavedAdapter(tmp_path / str(alpha))
    file = tmp_path / "4" / CONFIG
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "base_model_name_or_path": "elsewhere", "peft_version": "9"}))
    SavedAdapter(tmp_path / "4")
    file.write_bytes((tmp_path / "64" / CONFIG).read_bytes())
    with pytest.raises(UserError, match="that of another adapter, since"):
        SavedAdapter(tmp_path / "4")
    again = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(checkpoints / "llama"), tmp_path / "4"
    )
    again.save_pretrained(tmp_path / "again")  # the change is meant
    assert SavedAdapter(tmp_path / "again").config().lora_alpha == 64


@pytest.mark.filterwarnings("ignore")
def test_saved_by_peft_with_embeddings(checkpoints: Path, tmp_path: Path) -> None:
    """Peft saves the weights of adapted embeddings, too: they must be the model's. Of another model, it is refused."""
    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head", "embed_tokens"])
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "llama", dtype=FP32)
    adapted_model = get_peft_model(model, config)
    adapted_model.save_pretrained(tmp_path)
    saved = SavedAdapter(tmp_path)
    assert any("base_layer" in name for name in saved.files)

    def begun(family: str) -> tuple[Adapters, CheckpointSource]:
        meta = build_meta_model(load_config(checkpoints / family)[0], dtype=FP32)
        source = CheckpointSource(checkpoints / family, meta)
        return Adapters(meta, saved.config(), 0, saved=saved), source

    adapters, source = begun("llama")
    adapters.check_saved(source)
    expected = dict(adapted_model.get_base_model().named_parameters())
    for name, value in adapters.source(source).read(adapters.names):
        assert torch.equal(value, expected[name]), name
    with torch.no_grad():
        model.get_input_embeddings().base_layer.weight += 1
    adapted_model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"embed_tokens.*with other values"):
        adapters.check_saved(source)
    with pytest.raises(UserError, match=r"lora_B.weight of 48 x 4, and of this model it is 64 x 4"):
        begun("gemma3")
    text = (tmp_path / CONFIG).read_text()
    (tmp_path / CONFIG).write_text(text.replace('"q_proj"', '"lm_head"'))
    with pytest.raises(UserError, match=r"q_proj.lora_A.weight, which no adapter of this model has"):
        begun("llama")
    (tmp_path / CONFIG).write_text(text.replace('"q_proj"', '"v_proj"'))
    with pytest.raises(
        UserError, match=r"lacks base_model.*v_proj.lora_A.weight, which adapters of this model have"
    ):
        begun("llama")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("written", "other"), [
    (".layers.", ".old.layers."),
    (".lora_A.weight", ".lora_A.default.weight"),
])  # fmt: skip
def test_a_saved_adapter_of_other_names(written: str, other: str, checkpoints: Path, tmp_path: Path) -> None:
    """As of vision-language models before transformers 4.52, of their language models alone, and of a state dict."""
    config = AdapterOptions(4, targets=("q_proj",)).peft_config()
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "llama")
    get_peft_model(model, config).save_pretrained(tmp_path)
    values = {name.replace(written, other): value for name, value in load_file(tmp_path / WEIGHTS).items()}
    save_file(values, tmp_path / WEIGHTS, {"format": "pt"})
    saved = SavedAdapter(tmp_path)
    meta = build_meta_model(load_config(checkpoints / "llama")[0])
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    expected = rf"holds {name.replace(written, other)}, which is {name} here: .* Rename its tensors like this"
    with pytest.raises(UserError, match=expected):
        Adapters(meta, saved.config(), 0, saved=saved)


@pytest.mark.parametrize(("name", "message"), [
    (None, "holds no adapter_config.json"),
    (CONFIG, "a configuration alone, for peft_config"),
    ("adapter_model.bin", "a pickle can run any code"),
])  # fmt: skip
def test_no_saved_adapter(name: str | None, message: str, tmp_path: Path) -> None:
    if name is not None:
        AdapterOptions(4, targets=("all-linear",)).peft_config().save_pretrained(str(tmp_path))
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=message):
        SavedAdapter(tmp_path)


class LargestOnCpu(TorchDispatchMode):
    """Bytes of the largest tensor on the CPU that is made."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device.type == "cpu":
            self.most = max(self.most, result.untyped_storage().nbytes())
        return result


def test_copies_of_embeddings_are_not_made() -> None:
    """Of ``modules_to_save``, only names and shapes are made while the model has no weights."""
    sizes = {"hidden_size": 256, "intermediate_size": 32, "num_hidden_layers": 1}
    model = build_meta_model(LlamaConfig(vocab_size=50_000, **sizes), dtype=BF16)
    with LargestOnCpu() as largest:
        adapters = Adapters(model, LoraConfig(r=1, target_modules=["q_proj"], modules_to_save=["lm_head"]), 0)
    assert "lm_head.modules_to_save.default.weight" in adapters.names
    assert largest.most < 1 << 20
