"""Plans of a small model on machines whose figures can be worked out by hand."""

import gc
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaConfig

from common.models.flops import active_parameters, model_flops_per_token
from common.models.structure import find_blocks
from fuyou import Engine
from fuyou.layout.model_layout import BufferCounts
from fuyou.model.recompute.policy import ActivationPolicy, savable_outputs
from fuyou.optimizer.clipping import ClipBy
from fuyou.planner import Machine, TrainingJob, describe_training, search
from fuyou.planner.evaluate import Evaluator, merge_micro_batches
from fuyou.planner.plan import Candidate
from fuyou.planner.search import choose
from fuyou.planner.simulator import TaskRates, simulate
from fuyou.schedule.batch import BatchShape
from fuyou.schedule.scheduler import Scheduler
from fuyou.schedule.tasks import Resource, StepList
from tests.helpers.twin import tiny_configs

SEQ_LEN, LAYERS = 64, 6
FAST = TaskRates(1e15, 1e12, 1e12, 1e12, 1e12, 1e12, commit_seconds=0.0)
KEYS = {
    "fits", "step_seconds", "tokens_per_second", "flops_per_second", "hardware_flops_per_second", "bound",
    "bound_seconds", "device_peak_bytes", "host_peak_bytes", "ssd_bytes", "ssd_read_bytes_per_step",
    "start_bytes", "start_seconds",
    "ssd_written_bytes_per_step", "micro_batch", "micro_batches", "deferred_fraction", "saved_activation_bytes",
}  # fmt: skip


@pytest.fixture(scope="module")
def job() -> TrainingJob:
    config = LlamaConfig(
        hidden_size=256, intermediate_size=704, num_hidden_layers=LAYERS, num_attention_heads=4, vocab_size=512,
        max_position_embeddings=SEQ_LEN,
    )  # fmt: skip
    return describe_training(config, 8, SEQ_LEN)


def machine(rates: TaskRates = FAST, host: int = 256 << 20, device: int = 64 << 20, **fields: int) -> Machine:
    return Machine("a device", "a drive", rates, device, host, **fields)


def seconds(job: TrainingJob, on: Machine) -> float:
    result = search(job, on)
    assert result.fits, result.missing
    return result.step_seconds


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_mixture_takes_as_long_as_the_experts_that_tokens_visit(family: str) -> None:
    """The FLOPs of all tasks are those of the model with recomputation, but for attention scores."""
    config = AutoConfig.for_model(
        family, vocab_size=512, hidden_size=128, intermediate_size=128, moe_intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, num_experts=16, n_routed_experts=16, num_local_experts=16,
        num_experts_per_tok=2, head_dim=32, max_position_embeddings=SEQ_LEN, n_group=2, topk_group=1, q_lora_rank=64,
        kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32, first_k_dense_replace=1,
    )  # fmt: skip
    job = describe_training(config, 8, SEQ_LEN)
    model, blocks = job.stack.model, find_blocks(job.stack.model)[1]
    assert (
        job.block_parameters
        == active_parameters(model, blocks)
        < 0.5 * sum(p.numel() for p in blocks.parameters())
    )
    steps = Scheduler(job.layout, BufferCounts(device_activations=8, host_activations=8)).training_step(
        1, BatchShape(1, 1024, job.tokens)
    )
    head = model.get_output_embeddings().weight.numel() + config.hidden_size
    assert sum(task.flops for task in steps.tasks) == (8 * job.block_parameters + 6 * head) * job.tokens
    result = search(job, machine(replace(FAST, flops_per_second=1e9)))
    assert result.step_seconds < 8.1e-9 * (job.block_parameters + head) * job.tokens
    rate = model_flops_per_token(model, SEQ_LEN) * job.tokens / result.step_seconds
    assert result.flops_per_second == pytest.approx(rate)


def test_json_has_what_programs_ask_for(job: TrainingJob) -> None:
    content = search(job, machine()).to_json()
    assert content.keys() >= KEYS
    assert content["fits"] is True and content["missing"] == []
    assert content["tokens_per_second"] == pytest.approx(8 * SEQ_LEN / content["step_seconds"])
    assert content["bound"] == max(content["bound_seconds"], key=content["bound_seconds"].get)
    assert content["micro_batch"] * content["micro_batches"] >= 8
    assert isinstance(content["ssd_bytes"], int) and isinstance(content["saved_activation_bytes"], int)


@pytest.mark.parametrize(("slow", "bound"), [
    ({"flops_per_second": 1e9}, Resource.GPU),
    ({"read_bytes_per_second": 1e7, "write_bytes_per_second": 1e7}, Resource.SSD),
    ({"adam_parameters_per_second": 1e6}, Resource.ADAM),
    ({"upload_bytes_per_second": 1e6}, Resource.HOST_TO_DEVICE),
])  # fmt: skip
def test_one_slow_resource_bounds_the_step_and_more_of_it_helps(
    job: TrainingJob, slow: dict[str, float], bound: Resource
) -> None:
    on = machine(replace(FAST, **slow))
    result = search(job, on)
    assert result.bound is bound
    assert result.busy[bound] * 0.999 <= result.step_seconds < 1.1 * result.busy[bound]
    faster = machine(replace(FAST, **{name: 2 * rate for name, rate in slow.items()}))
    assert seconds(job, faster) == pytest.approx(result.step_seconds / 2, rel=0.05)


def test_what_does_not_fit_says_what_is_missing(job: TrainingJob) -> None:
    result = search(job, machine(device=1 << 20))
    content = result.to_json()
    assert not result.fits and content["step_seconds"] is None and content["fits"] is False
    assert "device_memory" in result.missing[0]


def test_space_on_ssd_is_exact(job: TrainingJob) -> None:
    needed = search(job, machine()).ssd_bytes
    elements = sum(record.numel for record in job.layout.records)
    assert needed == 24 * elements
    assert search(job, machine(store_bytes=needed)).fits
    lacking = search(job, machine(store_bytes=needed - 1))
    assert not lacking.fits and "on SSD" in lacking.missing[0]


BALANCED = machine(TaskRates(1e11, 1e10, 1e10, 3e8, 3e8, 1e9), host=140 << 20)


def test_clipping_by_deferral_defers_everything_and_takes_longer(job: TrainingJob) -> None:
    free = search(job, BALANCED)
    for more in ({"clip_by": ClipBy.DEFERRAL}, {"commit_every": 2}, {"clipped_share": 1.0}):
        result = search(replace(job, clips=True, **more), BALANCED)
        assert (result.clip_by, result.deferred_fraction) == (ClipBy.DEFERRAL, 1.0)
        assert result.step_seconds > 1.05 * free.step_seconds
    assert free.clip_by is None


def test_clipping_by_speculation_costs_by_how_often_it_strikes(job: TrainingJob) -> None:
    """The planner's own choice where that is seldom."""
    seldom = replace(job, clips=True, clipped_share=0.01)
    chosen = search(seldom, BALANCED)
    assert chosen.clip_by is ClipBy.SPECULATION and chosen.deferred_fraction < 1
    deferral = search(replace(seldom, clip_by=ClipBy.DEFERRAL), BALANCED)
    assert chosen.step_seconds < 0.95 * deferral.step_seconds
    content = chosen.to_json()
    assert (content["clip_by"], content["clipped_share"]) == ("speculation", 0.01)
    assert content["clipped_step_seconds"] > content["step_seconds"]


def test_gradients_that_are_kept_are_written_where_they_find_no_room(job: TrainingJob) -> None:
    speculation = replace(job, clips=True, clip_by=ClipBy.SPECULATION, clipped_share=0.0, host_cache=0)
    written = {host: search(speculation, machine(host=host << 20)).written_bytes for host in (140, 256)}
    elements = sum(record.numel for record in job.layout.records)
    assert written[256] == 12 * elements
    assert 12 * elements < written[140] <= 14 * elements


def test_saved_outputs_that_cannot_leave_memory_in_time_are_not_simulated(
    job: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = TaskRates(1e11, 1e10, 1e10, 4e8, 1e8, 1e10)
    skipping = Evaluator(replace(job, rows=64, micro_batch=4), machine(rates, host=146 << 20))
    assert skipping.trace is not None
    operators = tuple((output.operator, output.ordinal) for output in savable_outputs(skipping.trace))
    candidate = Candidate(4, activation_policy=ActivationPolicy(operators, LAYERS))
    plan = skipping.evaluate(candidate)
    assert 0 < skipping.spilling_seconds(candidate) <= plan.step_seconds - plan.busy[Resource.GPU]
    best, tried = choose(skipping), len(skipping.tried()) - 1
    monkeypatch.setattr(Evaluator, "spilling_seconds", lambda self, candidate: 0.0)
    trying = Evaluator(skipping.job, skipping.machine)
    assert choose(trying).candidate == best.candidate
    assert len(trying.tried()) > tried


def test_simulations_run_without_garbage_collection(
    job: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    enabled, evaluate = [], Evaluator.evaluate
    monkeypatch.setattr(
        Evaluator,
        "evaluate",
        lambda *args, **kwargs: enabled.append(gc.isenabled()) or evaluate(*args, **kwargs),
    )
    gc.enable()
    search(job, machine())
    assert gc.isenabled() and not any(enabled[:-1])


def test_merged_micro_batches_predict_what_all_of_them_do(job: TrainingJob) -> None:
    rates = TaskRates(1e12, 1e10, 1e10, 4e8, 3e8, 1e8)
    many = replace(job, rows=256, micro_batch=1)
    evaluator = Evaluator(many, machine(rates, host=1 << 30))
    candidate = Candidate(1, 0.0)
    merged, exact = (evaluator.evaluate(candidate, merged=how) for how in (True, False))
    memory = evaluator.memory(candidate)
    assert (
        merge_micro_batches(memory, len(job.layout.blocks)).batch.micro_batches
        < memory.batch.micro_batches / 2
    )
    assert merged.step_seconds == pytest.approx(exact.step_seconds, rel=0.02)
    assert merged.busy[Resource.GPU] == pytest.approx(exact.busy[Resource.GPU])


@pytest.mark.parametrize("host_cache", [0, None])
@pytest.mark.parametrize("commit_every", [1, 3, 10])
def test_a_plan_counts_the_bytes_of_runs_that_commit_every_few_steps(
    commit_every: int, host_cache: int | None, tmp_path: Path
) -> None:
    """Records that stay in host memory are written for a commit only; others in every step."""
    ids = torch.zeros(2, 16, dtype=torch.long)
    with Engine(
        tiny_configs()["llama"], ssd=tmp_path, device="cpu", dtype="bf16", batch_shape=(2, 16), host_memory="300MiB",
        commit_every=commit_every, host_cache=host_cache,
    ) as engine:  # fmt: skip
        written = []
        for _ in range(2 * commit_every + 1):
            engine(input_ids=ids, labels=ids).loss.backward()
            written.append(engine.step().planned_written_bytes)
        run = engine._run
        planned = simulate(run.layout, engine.memory_plan, FAST, commit_every=commit_every)
    cycle = written[commit_every : 2 * commit_every]
    assert round(planned.mean(StepList.ssd_written_bytes) * commit_every) == sum(cycle) > 0
    assert (len(set(cycle)) > 1) == (commit_every > 1 and host_cache is None)


def test_a_plan_obeys_commit_every(job: TrainingJob) -> None:
    """Where the drives are the bound and states fit into host memory, fewer commits are faster and write less."""
    on = machine(replace(FAST, write_bytes_per_second=1e8, read_bytes_per_second=1e8))
    plans = [search(replace(job, commit_every=every), on) for every in (1, 2, 10, 1000)]
    for more, fewer in itertools.pairwise(plans):
        assert fewer.step_seconds < more.step_seconds
        assert fewer.written_bytes < more.written_bytes
        assert fewer.busy[Resource.SSD] < more.busy[Resource.SSD]
    assert plans[1].written_bytes == pytest.approx(plans[0].written_bytes / 2, rel=0.01)
