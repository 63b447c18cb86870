"""The out-of-core engine over a process group equals one rank that computes the same micro-batches."""

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from common.errors import FinetuneError
from common.files import CACHE_VARIABLE
from common.models.adapters.options import ALL_LINEAR, AdapterOptions
from common.models.miniature import miniature
from common.store import load_manifest
from fuyou.checkpoint.commits import Commits
from fuyou.layout.record import PAGE_ELEMENTS
from fuyou.layout.record_parts import ALIGN_ELEMENTS
from fuyou.layout.share import Share
from fuyou.schedule.tasks import Op, Task
from tests.helpers.fcdp import engine_cases as cases
from tests.helpers.fcdp.engine_cases import Run
from tests.helpers.fcdp.pool import Pool
from tests.helpers.fcdp.recorder import check_same_order
from tests.helpers.models.families import saved
from tests.helpers.models.gguf_files import FAMILIES, FIELDS, write_gguf
from tests.helpers.models.routed import RoutedConfig
from tests.helpers.models.routers import config_of
from tests.helpers.twin import Twin


@pytest.mark.parametrize(
    ("layout", "adapters"), [((1, 2), None), ((2, 1), AdapterOptions(4, 8.0, 0.0, (ALL_LINEAR,)))]
)
def test_nonfinite_values_are_exported_by_no_rank(
    layout: tuple[int, int], adapters: AdapterOptions | None, model: str, pool: Pool, tmp_path: Path
) -> None:
    """With adapters, merged ones: these files go first, so that all of an earlier run's stay together."""
    poisoned = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        poisoned.model.layers[1].mlp.up_proj.weight[3, 5] = torch.nan
    poisoned.save_pretrained(tmp_path / "model")
    options = {"dtype": "fp32"} | ({} if adapters is None else {"adapters": adapters})
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / ("config.json" if adapters is None else "adapter_config.json")).write_text("older")
    older = [file.name for file in saved.iterdir()]
    run = Run(str(tmp_path / "model"), tmp_path / "ranks", save=saved, options=options)
    for said in pool.run(layout, cases.export, run):
        assert "layers.1.mlp.up_proj.weight holds a NaN" in said and said.endswith(str(older)), said
    exported = saved if adapters is None else saved / "merged"
    weights = dict(AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).named_parameters())
    for name, value in poisoned.named_parameters():
        assert torch.equal(weights[name].nan_to_num(7), value.nan_to_num(7)), name


ADAPTERS = AdapterOptions(4, 8.0, 0.0, (ALL_LINEAR,))
SAVED = "adapters that peft has saved"


@pytest.mark.parametrize(
    ("layout", "dtype", "ssds", "options"),
    [
        ((2, 1), "bf16", 3, {"host_cache": 0}),
        ((1, 2), "fp32", 1, {"commit_every": 2, "deferred_fraction": 0.5}),
        ((2, 1), "bf16", 1, {"host_cache": 0, "adapters": ADAPTERS}),
        pytest.param((1, 2), "bf16", 2, {"frozen_dtype": "nf4", "adapters": SAVED}, marks=pytest.mark.slow),
        ((1, 2), "bf16", 1, {"optimizer": "adamw8bit", "deferred_fraction": 0.5}),
    ],
)
def test_two_ranks_equal_one(
    layout: tuple[int, int],
    dtype: str,
    ssds: int,
    options: dict[str, Any],
    model: str,
    pool: Pool,
    tmp_path: Path,
) -> None:
    options = {"dtype": dtype, "micro_batch": 2, **options}
    if options.get("adapters") == SAVED:
        options["adapters"] = str(tmp_path / "saved")
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(
            options["adapters"]
        )
    alone = cases.train(None, Run(model, tmp_path / "alone", options=options))
    ranks = pool.run(layout, cases.train, Run(model, tmp_path / "ranks", ssds=ssds, options=options))
    # Three threads of a rank exchange, each on its own communicators; cells of a rank may hold less than others.
    check_same_order([rank.launches for rank in ranks], sizes=False, one_thread=False)
    check_equal(ranks, alone)
    if "adapters" in options and layout == (2, 1):
        trained = sum(master.numel() for name, master in alone.masters.items() if "lora_" in name)
        # Half of every gradient and of every new value is sent by either, in fp32, and no pages of padding.
        matrices = sum("lora_" in name for name in alone.masters)
        assert (
            8 * trained <= sum(rank.planned[2] for rank in ranks) <= 8 * (trained + ALIGN_ELEMENTS * matrices)
        )
    elif layout == (2, 1):
        check_bytes(ranks, alone)


@pytest.mark.parametrize(
    ("layout", "family"), [((2, 1), "ernie4_5_moe"), pytest.param((1, 2), "hy_v4", marks=pytest.mark.slow)]
)
def test_ranks_train_what_a_family_keeps_in_fp32(
    layout: tuple[int, int], family: str, pool: Pool, tmp_path: Path
) -> None:
    config = miniature(CONFIG_MAPPING[family]())
    config.vocab_size = 256
    config.tie_word_embeddings = False  # whose sums over ranks have another order
    checkpoint = str(saved(tmp_path / "model", config))
    options = {"dtype": "bf16", "micro_batch": 2, "host_cache": 0}
    run = Run(checkpoint, tmp_path / "alone", 3, packed=False, save=tmp_path / "saved", options=options)
    alone = cases.train(None, run)
    ranks = pool.run(layout, cases.train, replace(run, folder=tmp_path / "ranks", save=tmp_path / "together"))
    check_equal(ranks, alone)
    first, second = (
        AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.bfloat16)
        for folder in ("saved", "together")
    )
    for name, value in first.named_parameters():
        other = second.get_parameter(name)
        assert other.dtype == value.dtype and torch.equal(other, value), name


@pytest.mark.slow
def test_ranks_of_a_node_share_the_bytes_of_a_gguf_file(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embeddings and head among them."""
    pytest.importorskip("gguf")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    file = str(write_gguf(tmp_path / "model.gguf", FAMILIES["llama"][0], FIELDS, kinds=("Q8_0", "Q4_1")))
    options = {"dtype": "bf16", "micro_batch": 2, "host_cache": 0, "adapters": ADAPTERS}
    alone = cases.train(None, Run(file, tmp_path / "alone", options=options))
    ranks = pool.run((1, 2), cases.train, Run(file, tmp_path / "ranks", options=options))
    assert all(rank.losses == alone.losses and rank.counted == rank.scheduled for rank in ranks)
    for name, master in alone.masters.items():
        assert torch.equal(ranks[0].masters[name], master), name


@pytest.mark.parametrize("layout", [(2, 1), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_ranks_pass_rows_in_chunks(layout: tuple[int, int], model: str, pool: Pool, tmp_path: Path) -> None:
    """Each its own rows, as one rank passes them whole."""
    options = {"dtype": "fp32", "host_cache": 0, "eps": 1e-2}
    run = Run(model, tmp_path / "alone", packed=False, options=options)
    alone = cases.train(None, run)
    ranks = pool.run(
        layout, cases.train, replace(run, folder=tmp_path / "ranks", options={**options, "chunk": 5})
    )
    for rank in ranks:
        assert rank.losses == pytest.approx(alone.losses, rel=1e-6)
        assert rank.norms == pytest.approx(alone.norms, rel=1e-5)
        assert rank.counted == rank.scheduled
    for name, master in alone.masters.items():
        torch.testing.assert_close(ranks[0].masters[name], master, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("layout", [(2, 1), (1, 2)])
@pytest.mark.slow
def test_parameters_of_ranks_that_pass_host_memory(
    layout: tuple[int, int], model: str, pool: Pool, tmp_path: Path
) -> None:
    """Each rank reads its own part of them, before ranks gather them."""
    options = {"dtype": "bf16", "micro_batch": 1, "host_cache": 0}
    by_the_host = pool.run(layout, cases.train, Run(model, tmp_path / "host", options=options))
    counts = {"device_blocks": 1, "host_blocks": 1}
    run = Run(model, tmp_path / "past", options={**options, "io": "kvikio"})
    for other, (rank, reads) in zip(
        by_the_host, pool.run(layout, cases.train_past_host, run, counts), strict=True
    ):
        assert rank.losses == other.losses and rank.norms == other.norms
        assert all(
            master is None or torch.equal(master, other.masters[name])
            for name, master in rank.masters.items()
        )
        assert reads >= run.steps


def test_exchanges_are_launched_in_one_order_where_nccl_needs_it(
    model: str, pool: Pool, tmp_path: Path
) -> None:
    """On 2 nodes of 2 ranks, whose three kinds of exchange of device memory are ready in any order."""
    options = {"dtype": "fp32", "micro_batch": 1}
    alone = cases.train(None, Run(model, tmp_path / "alone", options=options))
    run = Run(model, tmp_path / "ranks", options=options, in_one_order=True)
    ranks = pool.run((2, 2), cases.train, run)
    spread = "fcdp_gather_2_ranks_2_apart"  # of host memory, by gloo
    device = [
        [one[:3] for one in rank.launches if one[0].startswith("fcdp") and one[0] != spread] for rank in ranks
    ]
    assert all(len({description for description, *_ in launches}) == 3 for launches in device)
    for one, other in itertools.combinations(device, 2):  # each in the order of what they launch together
        assert [launch for launch in one if launch in other] == [launch for launch in other if launch in one]
    assert all(rank.losses == pytest.approx(alone.losses, rel=1e-6) for rank in ranks)


@pytest.mark.parametrize(
    ("layout", "dtype"), [((2, 1), "fp32"), pytest.param((1, 2), "bf16", marks=pytest.mark.slow)]
)
def test_ranks_share_a_loss_over_log_probabilities(
    layout: tuple[int, int], dtype: str, model: str, pool: Pool, tmp_path: Path
) -> None:
    """DPO, half of the pairs on each rank; the ranks' micro-batches are one pair each."""
    options = {"dtype": dtype, "micro_batch": 2, "adapters": AdapterOptions(4, 8.0, 0.0, (ALL_LINEAR,))}
    alone = cases.train_preferences(None, Run(model, tmp_path / "alone", options=options))
    ranks = pool.run(layout, cases.train_preferences, Run(model, tmp_path / "ranks", options=options))
    close = 1e-5 if dtype == "fp32" else 2e-2
    for rank in ranks:
        assert rank.losses == pytest.approx(alone.losses, rel=close)
        assert rank.norms == pytest.approx(alone.norms, rel=close)
        assert rank.counted == rank.scheduled
    for name, master in alone.masters.items():
        torch.testing.assert_close(ranks[0].masters[name], master, rtol=close, atol=close / 10)
        assert torch.equal(ranks[0].masters[name], ranks[1].masters[name])


def test_ranks_compute_in_what_the_first_is_fast_in_and_continue_in_that(
    model: str, pool: Pool, tmp_path: Path
) -> None:
    options = {"dtype": "auto", "micro_batch": 2}
    alone = cases.train(None, Run(model, tmp_path / "alone", options={**options, "dtype": "bf16"}))
    run = Run(model, tmp_path / "ranks", 3, options=options)
    began = pool.run((2, 1), cases.train_unlike, run)
    went_on = pool.run((2, 1), cases.train_unlike, replace(run, steps=5, options={**options, "resume": True}))
    for before, after in zip(began, went_on, strict=True):
        assert before.losses + after.losses == alone.losses
    for name, master in alone.masters.items():
        assert torch.equal(went_on[0].masters[name], master), name


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.slow
def test_only_what_no_rank_has_a_gradient_for_is_skipped(dtype: str, pool: Pool, tmp_path: Path) -> None:
    """Experts get few tokens, on some rank or on none; slices cut them; then two ranks become one, and that one two."""
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(RoutedConfig(vocab_size=cases.VOCABULARY)).save_pretrained(
        tmp_path / "model"
    )
    options = {"dtype": dtype, "micro_batch": 1, "host_cache": 0}
    run = Run(str(tmp_path / "model"), tmp_path / "ranks", 3, rows=2, options=options)
    alone = cases.train_routed(None, replace(run, folder=tmp_path / "alone", steps=6))
    again = {**options, "resume": True}
    first = pool.run((2, 1), cases.train_routed, run)[0]
    cases.set_back(run.folder, 1)  # to step 2: what was counted goes with it
    outcomes = [
        cases.train_routed(None, replace(run, steps=4, options=again, leave=((0, 1),))),
        pool.run((1, 2), cases.train_routed, replace(run, steps=6, options=again))[0],
    ]
    assert first.losses == alone.losses[:3] and outcomes[0].first == 2
    assert [loss for outcome in outcomes for loss in outcome.losses] == alone.losses[2:]
    for name, master in alone.masters.items():
        assert torch.equal(outcomes[-1].masters[name], master), name
    missed = load_manifest(tmp_path / "alone" / "rank0" / "ssd0" / "fuyou-run")["missed"]
    assert {0, 6} < set(missed.values()) | {0}, "some were left alone in some steps, and some in all of them"


@pytest.mark.parametrize("layout", [(2, 1), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_the_router_loss_is_that_of_one_batch_over_all_ranks(
    layout: tuple[int, int], pool: Pool, tmp_path: Path
) -> None:
    """As a model in memory has it that is given all rows at once, though each rank splits its own, too."""
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config_of("mixtral")).save_pretrained(tmp_path / "model")
    twin = Twin(str(tmp_path / "model"), bf16=False, max_grad_norm=None, lr=1e-3, weight_decay=0.1, eps=1e-3)
    run = Run(str(tmp_path / "model"), tmp_path, 3, options={"dtype": "fp32", "micro_batch": 1, "eps": 1e-3})
    ranks = pool.run(layout, cases.train, run)
    for step in range(1, 4):
        expected = twin.step(cases.batch(step, run.rows), run.rows)
        for rank in ranks:
            assert rank.losses[step - 1] == pytest.approx(expected, rel=1e-6)
            assert rank.norms[step - 1] == pytest.approx(twin.grad_norm, rel=1e-6)
    for name, master in twin.masters.items():
        assert (ranks[0].masters[name] - master).abs().max() <= 1e-6, name


def check_equal(ranks: list[cases.Outcome], alone: cases.Outcome) -> None:
    """Ranks train as a single one does, and count what they send as it was scheduled."""
    for rank in ranks:
        assert rank.losses == alone.losses
        assert rank.norms == pytest.approx(alone.norms, rel=1e-12)
        assert rank.counted == rank.scheduled
    for name, master in alone.masters.items():
        assert torch.equal(ranks[0].masters[name], master), name


def check_bytes(ranks: list[cases.Outcome], alone: cases.Outcome) -> None:
    """2 + 2 + 10 / N read and 2 + 10 / N written per parameter, node and step; each gradient and new high part sent
    once: with two nodes, half of each by either."""
    parameters = alone.planned[1] / 12
    for read, written, _ in (rank.planned for rank in ranks):
        blocks = read / parameters - 7  # at the turns of a step, what is there already is not read again
        assert -2.5 < blocks <= 0.2
        assert written / parameters == pytest.approx(7, rel=0.05)  # padding of tiny records
    trained = sum(master.numel() for master in alone.masters.values())
    # Between a record's two parts, not behind them
    padding = ALIGN_ELEMENTS * len(alone.masters) + 5 * PAGE_ELEMENTS
    assert 4 * trained <= sum(rank.planned[2] for rank in ranks) <= 4 * (trained + padding)


@pytest.mark.slow
def test_four_ranks_come_back_to_the_step_that_all_have(model: str, pool: Pool, tmp_path: Path) -> None:
    options = {"dtype": "fp32", "max_grad_norm": 0.5, "micro_batch": 1, "host_cache": "1MiB"}
    alone = cases.train(None, Run(model, tmp_path / "alone", 10, options=options))
    run = Run(model, tmp_path / "ranks", 6, options=options)
    begun = pool.run((2, 2), cases.train, run)
    cases.set_back(run.folder, 2)  # rank 0 of node 1 was killed in the middle of the commit
    ended = pool.run(
        (2, 2),
        cases.train,
        replace(run, steps=10, save=tmp_path / "saved", options={**options, "resume": True}),
    )
    assert {rank.first for rank in begun} == {0} and {rank.first for rank in ended} == {5}
    assert begun[0].losses[5] == ended[0].losses[0]
    losses = begun[0].losses[:5] + ended[0].losses
    assert losses == pytest.approx(alone.losses, rel=1e-6)
    assert len({tuple(rank.losses) for rank in ended}) == 1
    saved = dict(
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).named_parameters()
    )
    for name, master in alone.masters.items():
        torch.testing.assert_close(ended[0].masters[name], master, rtol=1e-4, atol=1e-6, msg=name)
        assert torch.equal(ended[0].masters[name], saved[name]), name


def test_a_bit_that_flips_on_its_way_to_a_node(model: str, pool: Pool, tmp_path: Path) -> None:
    """Noticed before the step counts; the run continues from the step before."""
    # It is the last step: a rank that learns of it later would wait in the next one for a rank that has left.
    run = Run(model, tmp_path / "ranks", 3, options={"host_cache": 0})
    call = 2 * 5 + 3  # five records are spread in each step
    for said in pool.run((2, 1), cases.train_until_a_bit_flips, run, call):
        assert "After step 3, node 1 (" in said and "hold different parameters" in said, said
    ended = pool.run((2, 1), cases.train, replace(run, options={**run.options, "resume": True}))
    assert {rank.first for rank in ended} == {2}


def test_nodes_that_hold_different_parameters() -> None:
    """The second node's checksum differs: all ranks stop before anything is committed."""
    told = [("a", 5), ("a", 7), ("b", 5), ("b", 8)]
    agreement: Any = SimpleNamespace(
        share=Share(2, 2), is_alone=False, all_gather_at_commit=lambda value: told
    )
    state: Any = SimpleNamespace(step=3, clipped=0)
    commits = Commits(None, state, None, None, agreement, "abc", lambda step: 5)
    with pytest.raises(
        FinetuneError, match=r"step 4, node 1 \(b, rank 1 of it\) and node 0 \(a, rank 1 of it\) hold"
    ):
        commits.commit(Task(Op.COMMIT, [], step=4, target=0))
    assert commits.committed_step == 3
