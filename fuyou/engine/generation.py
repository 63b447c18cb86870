"""Generation out of core: all sequences share one pass over the weights for each token."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from common.errors import UserError
from fuyou.engine.opening import OpenRun
from fuyou.engine.sampling import Sampler
from fuyou.engine.steps import Steps
from fuyou.layout.key_values import KeyValueCache
from fuyou.model.caching import generation_inputs
from fuyou.runtime.compute.generation_pass import GenerationPass
from fuyou.runtime.compute.key_values import KeyValueMemory, open_caches
from fuyou.runtime.compute.step_computation import StepInputs

Prompts = Sequence[Sequence[int] | torch.Tensor] | torch.Tensor
"""Tokens of each prompt; or int64 ``[B, S]``, with a mask where they are padded."""


@dataclass(frozen=True)
class Generated:
    """What a model has made of each prompt, in their order."""

    tokens: list[torch.Tensor]
    """New tokens of each, int64 ``[N]``, the end token included."""
    log_probs: list[torch.Tensor]
    """The log-probability that the model gives each of them, fp32 ``[N]``; temperature and top-p are not in it."""
    passes: int
    """Passes over the weights: one for the prompts and their first tokens, one for each further token."""
    seconds: float
    """Seconds of these passes, the time to make buffers not included."""

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all sequences in a second."""
        return sum(map(len, self.tokens)) / self.seconds


@dataclass(frozen=True)
class GenerationOptions:
    """How sequences go on, and when they end."""

    max_new_tokens: int
    """Most new tokens of a sequence."""
    sampler: Sampler
    """Chooses them."""
    eos_token_id: int | Sequence[int] | None = None
    """Tokens after which a sequence has ended; None: those of the model's configuration."""
    use_cache: bool = True
    """Whether keys and values are kept from token to token."""
    on_tokens: Callable[[list[int | None]], None] | None = None
    """Called with the newest token of each sequence; None for those that have ended before."""

    def ends(self, config: PreTrainedConfig) -> frozenset[int]:
        """Return the tokens that end a sequence of a model with this configuration."""
        chosen = self.eos_token_id
        if chosen is None:
            chosen = getattr(config.get_text_config(), "eos_token_id", None)
        return frozenset() if chosen is None else frozenset((chosen,) if isinstance(chosen, int) else chosen)


def left_padded(prompts: Prompts, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts of any padding as int64 ``[B, S]`` whose padding is on the left, and a mask, 0 there.

    Raises:
        UserError: there is no prompt, or an empty one.
    """
    if mask is not None and not (isinstance(prompts, torch.Tensor) and prompts.shape == mask.shape):
        raise UserError("attention_mask must have the shape of prompts, [sequences, tokens].")
    rows = [torch.as_tensor(row, dtype=torch.int64).flatten() for row in prompts]
    if mask is not None:
        rows = [row[one.bool()] for row, one in zip(rows, mask, strict=True)]
    if not rows or not all(map(len, rows)):
        raise UserError("Every prompt needs at least one token: begin empty ones with the tokenizer's first token.")
    longest = max(map(len, rows))
    ids, attended = (torch.zeros(len(rows), longest, dtype=torch.int64) for _ in range(2))
    for index, row in enumerate(rows):
        ids[index, longest - len(row) :] = row
        attended[index, longest - len(row) :] = 1
    return ids, attended


class Generation:
    """Generates with the weights of a run, between its steps.

    Args:
        run: open.
        steps: its steps, none of which may be under way.
    """

    def __init__(self, run: OpenRun, steps: Steps):
        self._run, self._steps = run, steps
        self.config = run.model.config
        """Configuration of the model."""

    @torch.no_grad()
    def generate(self, ids: torch.Tensor, mask: torch.Tensor, options: GenerationOptions) -> Generated:
        """Generate; with several ranks each has prompts of its own, and all make as many passes.

        Args:
            ids: prompts, int64 ``[B, S]``, padded on the left.
            mask: likewise, 0 where there is padding.
            options: how.

        Raises:
            UserError: the model cannot, or memory does not hold it.
        """
        run = self._run
        self._check_model()
        self._check_tokens(ids)
        if options.max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1, not {options.max_new_tokens}.")
        self._steps.flush()
        hides = not bool(mask.all())
        sizes = run.agreement.all_gather_object((*ids.shape, options.max_new_tokens, options.use_cache, hides))
        if len({one[3] for one in sizes}) > 1:
            raise UserError("use_cache must be the same on all ranks.")
        rows, longest, new, _, padded = (max(one) for one in zip(*sizes, strict=True))
        context = getattr(run.model.config.get_text_config(), "max_position_embeddings", None)
        if context and longest + new > context:
            raise UserError(
                f"The longest prompt and max_new_tokens are {longest + new} tokens, more than the model's {context}."
            )
        wanted = None
        if options.use_cache:
            dtype = run.shape.precision.dtype
            wanted = KeyValueCache(run.model.key_values, dtype.itemsize, rows, longest + new, 0)
        most = longest if options.use_cache else longest + new - 1
        with run.runtime.room_to_generate(rows, most, padded, wanted) as cache:
            caches = [] if cache is None else self._caches(cache, ids)
            return _Sequences(self, caches, ids, mask, options).generate(max(one[2] for one in sizes))

    def _check_model(self) -> None:
        task_type = self._run.model.task_type
        if not self._run.device.computes:
            raise UserError("A run on an emulated device computes nothing, so there is nothing that it could say.")
        if not task_type.generates:
            raise UserError(f"This model is {task_type.value}: it does not say how a sequence goes on.")

    def _check_tokens(self, ids: torch.Tensor) -> None:
        vocabulary = self._run.model.stack.model.get_input_embeddings()
        if isinstance(vocabulary, torch.nn.Embedding) and not (
            int(ids.min()) >= 0 and int(ids.max()) < vocabulary.num_embeddings
        ):
            raise UserError(
                f"A prompt holds a token that the model does not have: 0 to {vocabulary.num_embeddings - 1}."
            )

    def _caches(self, cache: KeyValueCache, ids: torch.Tensor) -> list[KeyValueMemory]:
        run = self._run
        most = run.runtime.memory_plan.batch.micro_rows
        micro_batches = [min(most, len(ids) - start) for start in range(0, len(ids), most)]
        return open_caches(run.runtime.plane.buffers, run.model.config, cache, micro_batches)

    def run_pass(self, caches: list[KeyValueMemory], inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the logits after each row, fp32 ``[B, V]``, by one pass over the weights."""
        run, runtime = self._run, self._run.runtime
        batch: dict[str, Any] = {**inputs, "labels": inputs["input_ids"]}
        rows, tokens = inputs["input_ids"].shape
        tasks = runtime.scheduler.evaluation(run.step_count, runtime.batch_shape(rows, tokens))
        given = StepInputs(run.model, runtime.plane, tasks, batch, runtime.recomputations, time.monotonic())
        computation = GenerationPass(caches, given)
        self._steps.run_forward(computation, tasks)
        return computation.logits

    def all_done(self, done: bool) -> bool:
        """Return whether every rank is done."""
        return all(self._run.agreement.all_gather_object(done))


class _Sequences:
    """The sequences of one call, which grow by a token each in every pass."""

    def __init__(
        self,
        generation: Generation,
        caches: list[KeyValueMemory],
        ids: torch.Tensor,
        mask: torch.Tensor,
        options: GenerationOptions,
    ):
        self._generation, self._caches, self._options = generation, caches, options
        self._ids, self._mask = ids, mask
        self._tokens: list[list[int]] = [[] for _ in ids]
        self._log_probs: list[list[float]] = [[] for _ in ids]
        self._ended = [False] * len(ids)
        self._ends = options.ends(generation.config)

    def generate(self, most: int) -> Generated:
        """Make tokens until all sequences of all ranks have ended, at most so many passes."""
        start, passes = time.monotonic(), 0
        begin = 0
        while passes < most:
            stop = self._ids.shape[1]
            inputs = generation_inputs(self._ids, self._mask, slice(begin, stop))
            self._append(self._generation.run_pass(self._caches, inputs))
            passes += 1
            if self._caches:
                begin = stop
            if self._generation.all_done(all(self._ended)):
                break
        seconds = time.monotonic() - start
        tokens = [torch.tensor(row, dtype=torch.int64) for row in self._tokens]
        return Generated(tokens, [torch.tensor(row) for row in self._log_probs], passes, seconds)

    def _append(self, logits: torch.Tensor) -> None:
        """Choose the next token of each sequence that has not ended; the others go on with padding."""
        options = self._options
        chosen = options.sampler.choose(logits)
        log_probs = logits.gather(1, chosen.unsqueeze(1)).squeeze(1) - logits.logsumexp(1)
        newest: list[int | None] = []
        for row, (token, log_prob) in enumerate(zip(chosen.tolist(), log_probs.tolist(), strict=True)):
            newest.append(None if self._ended[row] else token)
            if not self._ended[row]:
                self._tokens[row].append(token)
                self._log_probs[row].append(log_prob)
                self._ended[row] = token in self._ends or len(self._tokens[row]) == options.max_new_tokens
        self._ids = torch.cat([self._ids, chosen.unsqueeze(1)], 1)
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], 1)
        if options.on_tokens is not None:
            options.on_tokens(newest)
