"""The trainer of several ranks against an ordinary loop in one process; commits by other numbers of ranks."""

import dataclasses
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from common.errors import UserError
from common.models.adapters.options import ALL_LINEAR, AdapterOptions
from common.models.checkpoint.random_source import RandomSource
from common.models.meta_model import build_meta_model
from common.models.presets import load_config
from fcdp.checkpoint import Commit
from fcdp.model import TrainerConfig
from fcdp.strategy.topology import Topology
from tests.helpers.fcdp.pool import Pool, RankError
from tests.helpers.fcdp.trainer_cases import (
    VOCABULARY,
    Run,
    batch,
    diverge,
    export,
    open_what_one_rank_sees_change,
    pinned,
    rate,
    train,
)
from tests.helpers.models.small_models import small_config

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 36, "intermediate_size": 52, "num_hidden_layers": 2,
    "num_attention_heads": 3, "num_key_value_heads": 1,
}  # fmt: skip


@pytest.fixture(scope="module", params=["untied", "tied", "experts"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes are multiples of nothing. The tied one comes in several shards, next to a file that is none of them;
    experts are stored one by one and fused in the model."""
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("model")
    if request.param == "experts":
        MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=5)).save_pretrained(directory)
        return directory
    tied = request.param == "tied"
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))
    model.save_pretrained(directory, max_shard_size="20KB" if tied else "1GB")
    if tied:
        first = next(iter(directory.glob("model-*.safetensors")))
        save_file(
            {name: value * 9 for name, value in load_file(first).items()}, directory / "old.safetensors"
        )
    return directory


def ordinary(
    model: Any, steps: int, rows: int = 5
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """An ordinary loop over the same batches."""
    wide = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    flat = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": wide, "weight_decay": 0.01}, {"params": flat, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    losses, norms = [], []
    for step in range(1, steps + 1):
        loss = model.train()(**batch(step, rows), use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.slow
def test_any_number_of_ranks_trains_as_one_and_continues_as_another(
    pool: Pool, checkpoint: Path, tmp_path: Path
) -> None:
    losses, norms, weights = ordinary(AutoModelForCausalLM.from_pretrained(checkpoint), 5)
    first = pool.run((2, 2), train, Run(str(checkpoint), tmp_path / "commits", options={"micro_batch": 1}))
    assert sorted(path.name for path in (tmp_path / "commits").iterdir()) == ["commits.json", "step-3"]
    run = Run(str(checkpoint), tmp_path / "commits", "hybrid", 2, resume=True, save=tmp_path / "tuned")
    second = pool.run((3, 1), train, run)
    for outcomes, part in ((first, slice(0, 3)), (second, slice(3, 5))):
        assert all(outcome.losses == outcomes[0].losses for outcome in outcomes)
        assert outcomes[0].losses == pytest.approx(losses[part], rel=1e-5)
        assert outcomes[0].norms == pytest.approx(norms[part], rel=1e-4)
    # No rank holds more than a fourth of the rows of each parameter, rounded up.
    assert sum(outcome.held for outcome in first) == sum(value.numel() for value in weights.values())
    most = sum(-(-value.shape[0] // 4) * value[0].numel() for value in weights.values())
    assert max(outcome.held for outcome in first) == most
    assert first[0].sent == pytest.approx(first[0].planned, rel=0.01)
    tuned = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").named_parameters())
    assert tuned.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(tuned[name], value, rtol=1e-3, atol=2e-5)


@pytest.mark.slow
def test_a_preset_begins_with_the_weights_of_the_engine_on_one_machine(pool: Pool, tmp_path: Path) -> None:
    config, _ = load_config("llama-10m")
    meta = build_meta_model(config)
    source = RandomSource(meta, 3)
    run = Run("llama-10m", tmp_path / "commits", "zero3", 0, save=tmp_path / "out", options={"seed": 3})
    pool.run((2, 2), train, run)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, value in source.read([name for name, _ in meta.named_parameters()]):
        assert torch.equal(saved.get_parameter(name), value), name


@pytest.mark.parametrize(("checkpoint", "is_saved", "more"), [
    ("untied", False, {}),
    ("tied", True, {}),
    ("untied", True, {"modules_to_save": ["lm_head", "embed_tokens"]}),
], indirect=["checkpoint"])  # fmt: skip
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_adapters_train_as_with_peft_in_one_process(
    pool: Pool, checkpoint: Path, is_saved: bool, more: dict, tmp_path: Path
) -> None:
    """New ones, and such as peft has saved."""
    targets = ("q_proj", "down_proj", *(() if more else ("embed_tokens",)))
    adapters: AdapterOptions | Path = AdapterOptions(3, targets=targets)
    torch.manual_seed(7)
    config = adapters.peft_config()
    vars(config).update(more)
    plain = get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), config)
    if is_saved:
        for parameter in filter(lambda one: one.requires_grad, plain.parameters()):
            parameter.data.normal_(std=0.1)
        adapters = tmp_path / "saved"
        plain.save_pretrained(adapters)
    losses, norms, _ = ordinary(plain, 5)
    options = {"micro_batch": 1, "seed": 7}
    run = Run(str(checkpoint), tmp_path / "commits", options=options, adapters=adapters)
    first = pool.run((2, 2), train, run)
    committed = Commit.read(tmp_path / "commits" / "step-3")["tensors"]
    trained = {
        name.removeprefix("base_model.model.") for name, p in plain.named_parameters() if p.requires_grad
    }
    assert committed.keys() == {
        f"{kind}.{name}" for kind in ("master", "mean", "variance") for name in trained
    }
    run = Run(
        str(checkpoint), tmp_path / "commits", "hybrid", 2, resume=True, save=tmp_path / "tuned", options={"seed": 1},
        adapters=adapters,
    )  # fmt: skip
    second = pool.run((3, 1), train, run)
    for outcomes, part in ((first, slice(0, 3)), (second, slice(3, 5))):
        assert all(outcome.losses == outcomes[0].losses for outcome in outcomes)
        assert outcomes[0].losses == pytest.approx(losses[part], rel=1e-5)
        assert outcomes[0].norms == pytest.approx(norms[part], rel=1e-4)
    assert first[0].sent == pytest.approx(first[0].planned, rel=0.01)
    tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint), tmp_path / "tuned")
    loaded = dict(tuned.named_parameters())
    for name, value in plain.named_parameters():
        torch.testing.assert_close(loaded[name], value, rtol=1e-3, atol=2e-5, check_device=False, msg=name)
    merged = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "tuned" / "merged").named_parameters())
    for name, value in tuned.merge_and_unload().named_parameters():
        torch.testing.assert_close(merged[name], value, msg=name)


@pytest.mark.parametrize("checkpoint", ["untied"], indirect=True)
def test_what_adapters_leave_alone_is_kept_in_the_compute_dtype_once(
    pool: Pool, checkpoint: Path, tmp_path: Path
) -> None:
    adapters = AdapterOptions(2)
    run = Run(str(checkpoint), tmp_path, options={"dtype": "bf16"}, adapters=adapters, steps=1)
    for outcome in pool.run((2, 2), train, run):
        assert outcome.kinds == {(False, torch.bfloat16), (True, torch.float32)}
    other = dataclasses.replace(run, resume=True, adapters=AdapterOptions(3))
    with pytest.raises(RankError, match=r"has adapters .*'r': 2.*and this one .*'r': 3"):
        pool.run((2, 2), train, other)


@pytest.mark.parametrize("checkpoint", ["untied"], indirect=True)
def test_a_loss_that_is_not_finite_ends_every_rank(pool: Pool, checkpoint: Path, tmp_path: Path) -> None:
    for said in pool.run((2, 2), diverge, Run(str(checkpoint), tmp_path)):
        assert "of step 2 is nan" in said and "step 0 is committed" in said


@pytest.mark.parametrize("adapters", [None, AdapterOptions(3, targets=("q_proj", "down_proj"))])
@pytest.mark.parametrize("checkpoint", ["untied"], indirect=True)
@pytest.mark.filterwarnings("ignore")
def test_nonfinite_values_are_exported_by_no_rank(
    pool: Pool, checkpoint: Path, adapters: AdapterOptions | None, tmp_path: Path
) -> None:
    poisoned = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        poisoned.model.layers[0].mlp.up_proj.weight[1, 2] = torch.inf
    poisoned.save_pretrained(tmp_path / "model")
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "model.safetensors").write_text("older")
    run = Run(str(tmp_path / "model"), tmp_path / "commits", save=saved, adapters=adapters)
    for said in pool.run((2, 1), export, run):
        assert "layers.0.mlp.up_proj.weight holds a NaN" in said and said.endswith("['model.safetensors']"), (
            said
        )
    exported = saved if adapters is None else saved / "merged"
    weights = dict(AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).named_parameters())
    for name, value in poisoned.named_parameters():
        assert torch.equal(weights[name], value), name


@pytest.mark.parametrize(
    "wrong", [{"eps": math.nan}, {"betas": (0.9, 1.0)}, {"weight_decay": -1}, {"max_grad_norm": math.inf}]
)
def test_numbers_that_are_none_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        TrainerConfig(**wrong)


def train_with_an_earlier_pytorch(topology: Topology, run: Run) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", "2.12.1")
        try:
            train(topology, run)
        except UserError as error:
            return str(error)
    return "trained"


def test_adapters_of_experts_need_a_pytorch_that_runs_parts_of_groups(pool: Pool, tmp_path: Path) -> None:
    MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=5)).save_pretrained(tmp_path)
    run = Run(str(tmp_path), tmp_path / "commits", adapters=AdapterOptions(2, targets=(ALL_LINEAR,)))
    for answer in pool.run((2, 1), train_with_an_earlier_pytorch, run):
        assert answer == "Adapters of experts over several ranks need PyTorch 2.13; this is 2.12.1."


@pytest.mark.parametrize(("strategy", "micro_batch"), [("fcdp", None), ("zero3", 1), ("zero2", 2)])
def test_the_router_loss_is_that_of_the_whole_batch(
    strategy: str, micro_batch: int | None, pool: Pool, tmp_path: Path
) -> None:
    """With several micro-batches it takes a forward pass more, whose bytes are in the formula."""
    torch.manual_seed(0)
    config = MixtralConfig(**SIZES, num_local_experts=5, output_router_logits=True, router_aux_loss_coef=0.5)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").train()
    inputs = batch(1, 5)
    output = model(**inputs, use_cache=False)
    loss, plain = output.loss, output.loss - 0.5 * output.aux_loss
    loss.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    options = {"micro_batch": micro_batch, "max_grad_norm": None}
    run = Run(str(tmp_path / "model"), tmp_path / "commits", strategy, steps=1, options=options)
    for rank in pool.run((2, 1), train, run):
        assert rank.sent == rank.planned
        assert rank.losses[0] == pytest.approx(loss.item(), rel=1e-6)
        assert rank.norms[0] == pytest.approx(norm.item(), rel=1e-5)
    assert not torch.isclose(plain, loss)


def alone(checkpoint: Path, steps: int, rows: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """An ordinary loop over the same documents, one at a time."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).train()
    decays = [value.dim() > 1 for value in model.parameters()]
    groups = [
        {"params": [one for one, wide in zip(model.parameters(), decays, strict=True) if wide is which],
         "weight_decay": 0.01 * which}
        for which in (True, False)
    ]  # fmt: skip
    optimizer, losses = torch.optim.AdamW(groups, eps=1e-3), []
    for step in range(1, steps + 1):
        inputs, total = batch(step, rows), 0.0
        items = int((inputs["labels"][:, 1:] != -100).sum())
        for row in range(rows):
            for part in (slice(0, 4), slice(4, 10)):
                ids, labels = (inputs[name][row : row + 1, part] for name in ("input_ids", "labels"))
                count = int((labels[:, 1:] != -100).sum())
                if count:
                    loss = model(input_ids=ids, labels=labels, use_cache=False).loss * (count / items)
                    loss.backward()
                    total += loss.item()
        losses.append(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("family", ["jamba", "gpt_oss"])
@pytest.mark.slow
def test_packed_rows_train_as_their_documents_alone(family: str, pool: Pool, tmp_path: Path) -> None:
    config = small_config(family)
    config.vocab_size = VOCABULARY
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    losses, weights = alone(tmp_path / "model", 2, 4)
    options = {"micro_batch": 1, "eps": 1e-3}
    run = Run(
        str(tmp_path / "model"),
        tmp_path / "commits",
        steps=2,
        rows=4,
        options=options,
        save=tmp_path / "tuned",
    )
    assert pool.run((2, 1), train, run)[0].losses == pytest.approx(losses, rel=1e-5)
    tuned = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").named_parameters())
    for name, value in weights.items():
        torch.testing.assert_close(tuned[name], value, rtol=1e-3, atol=3e-5)


def test_rows_whose_documents_cannot_be_kept_apart_are_rejected(pool: Pool, tmp_path: Path) -> None:
    config = small_config("bart")
    config.vocab_size = VOCABULARY
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(RankError, match="BartForCausalLM: they would see each other"):
        pool.run((2, 1), train, Run(str(tmp_path / "model"), tmp_path / "commits", steps=1, rows=4))


def test_ranks_run_next_to_their_gpus(pool: Pool, tmp_path: Path) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]  # one in each NUMA node of this machine
    for node, cores in enumerate((first, second)):
        (tmp_path / f"node/node{node}").mkdir(parents=True)
        (tmp_path / f"node/node{node}/cpulist").write_text(f"{cores}\n")
    assert pool.run((1, 2), pinned, tmp_path) == [((first,), {first}), ((second,), {second})]


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["untied"], indirect=True)
@pytest.mark.parametrize(
    "options", [{}, {"device": "cpu", "host_memory": "1GiB", "prove": False}], ids=["fcdp", "ssd"]
)
def test_all_ranks_read_the_same_model(
    options: dict[str, Any], pool: Pool, checkpoint: Path, tmp_path: Path
) -> None:
    """All of them refuse one that changes under a single rank."""
    other = shutil.copytree(checkpoint, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    save_file(
        {name: value + 1 for name, value in weights.items()}, other / "model.safetensors", {"format": "pt"}
    )
    for place, says in (
        (None, "The model was replaced."),
        (other, "does not hold the same model for all ranks"),
    ):
        run = Run(str(checkpoint), tmp_path / says, options=options)
        for said in pool.run((2, 1), open_what_one_rank_sees_change, run, place):
            assert says in said
