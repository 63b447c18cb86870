"""One family: three steps in memory, the same three steps through the engine, and what came of it."""

import contextlib
import io
import os
import shutil
import tempfile
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

import fuyou
from common.errors import UserError
from common.files import CACHE_VARIABLE
from common.models.adapters.default_targets import settle_targets
from common.models.adapters.options import ALL_LINEAR, AdapterOptions
from common.models.miniature import TOKENS, VOCABULARY
from families.configurations import small_config
from families.twin import Twin

STEPS = 3
_ADAPTERS = AdapterOptions(rank=4, targets=(ALL_LINEAR,))  # experts and routers among them
EXACT_LOSS, EXACT_WEIGHT = 1e-6, 1e-5
"""Largest difference of a loss and of a weight that counts as rounding, where the same operators run; in chunks, of a
loss relative to it, and of a gradient relative to the model's largest."""
APART_LOSS = 3e-5
"""The same for a packed row and its documents computed one by one: other shapes, other orders of summation."""


@dataclass(frozen=True)
class Mode:
    """What is tried."""

    packed: bool = False
    bf16: bool = False
    lora: bool = False
    micro_batches: int = 1
    chunk: int | None = None  # Tokens of a row that are computed at once
    # Whether the engine leaves out its own proof, so that what that would refuse is seen
    unproven: bool = False

    @property
    def name(self) -> str:
        words = [
            word for word, on in (("packed", self.packed), ("bf16", self.bf16), ("lora", self.lora)) if on
        ]
        words += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        return " ".join(words + ([f"chunks of {self.chunk}"] if self.chunk else [])) or "plain"

    @property
    def compares_gradients(self) -> bool:
        return self.chunk is not None and not self.lora

    @property
    def rows(self) -> int:
        return max(2, self.micro_batches)

    @property
    def micro(self) -> int:
        return self.rows // self.micro_batches

    @property
    def documents(self) -> list[slice] | None:
        return [slice(0, TOKENS // 2 + 1), slice(TOKENS // 2 + 1, TOKENS)] if self.packed else None


@dataclass
class Finding:
    """What came of one family."""

    name: str
    # ``exact``, ``wrong``, ``refused``, ``crash``, ``hang``, or ``untrainable``: not even in memory
    verdict: str
    reason: str = ""
    losses: list[list[float]] = field(default_factory=list)  # Of each step, in memory and out of core
    loss_difference: float = 0.0
    weight_difference: float = 0.0  # In chunks, of gradients, relative to the model's largest
    tensor: str = ""  # Which weight differs most
    seconds: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON can carry it."""
        return asdict(self)


class _Untrainable(Exception):
    """The family does not train in memory."""


def try_family(name: str, mode: Mode) -> Finding:
    """Train a family both ways and compare."""
    work = Path(tempfile.mkdtemp(prefix="family-"))
    finding = Finding(name, "crash")
    os.environ[CACHE_VARIABLE] = str(work / "cache")  # no proof of an earlier sweep
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            transformers.logging.set_verbosity_error()
            _Trial(name, mode, work, finding).run()
    except _Untrainable as error:
        finding.verdict, finding.reason = "untrainable", str(error)
    except UserError as error:
        written = [path for path in (work / "ssd").rglob("*") if path.is_file()]
        finding.verdict, finding.reason = "refused", str(error)
        if written:
            finding.verdict, finding.reason = (
                "crash",
                f"refused when {len(written)} files were written: {error}",
            )
    except Exception as error:
        finding.verdict, finding.reason = "crash", _located(error)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return finding


def _located(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = "; ".join(f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in frames[-3:])
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({where})"


class _Trial:
    def __init__(self, name: str, mode: Mode, work: Path, finding: Finding):
        self._name, self._mode, self._work, self._finding = name, mode, work, finding
        # Where the same operators run, the same bits come out, and Adam's ordinary epsilon is the sharpest test. Where
        # they do not, it would make updates of the learning rate's size out of gradients that are rounding alone.
        blunt = mode.packed or mode.micro_batches > 1 or mode.chunk is not None
        self._rate = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-2 if blunt else 1e-6}
        if mode.compares_gradients:  # With this, a first step subtracts gradients from weights
            self._rate = {"lr": 1e3, "weight_decay": 0.0, "eps": 1e3}
        self._dtype = torch.bfloat16 if mode.bf16 else torch.float32

    def run(self) -> None:
        """Train both ways; fills the finding."""
        began = time.monotonic()
        try:
            checkpoint = self._checkpoint()
            batches = [self._batch(step) for step in range(1 if self._mode.compares_gradients else STEPS)]
            expected = None if self._mode.lora else self._in_memory(checkpoint, batches)
        except Exception as error:
            raise _Untrainable(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
        self._finding.seconds["memory"] = time.monotonic() - began
        began = time.monotonic()
        (self._work / "ssd").mkdir()
        with self._engine(checkpoint) as engine:
            self._finding.seconds["open"] = time.monotonic() - began
            if self._mode.lora:
                first = {name: value.clone() for name, value in engine.named_parameters()}
            losses = []
            for step, batch in enumerate(batches):
                torch.manual_seed(100 + step)
                loss = engine(**batch).loss
                loss.backward()
                engine.step()
                losses.append(float(loss))
            trained = {name: value.clone() for name, value in engine.named_parameters()}
            evaluated = self._evaluated(engine, batches[0]) if self._mode.name == "plain" else []
        self._finding.seconds["engine"] = time.monotonic() - began
        if expected is None:
            expected = self._adapters_in_memory(checkpoint, batches, first)
        self._judge(expected, losses, trained)
        if self._finding.verdict == "exact":
            self._judge_evaluations(evaluated)

    # -- both ways --------------------------------------------------------------------------------------------------

    def _checkpoint(self) -> Path:
        mode = self._mode
        config = small_config(self._name, dropout=mode.micro_batches == 1 and not (mode.packed or mode.chunk))
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        generator = torch.Generator().manual_seed(8)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise, alpha=0.1 if parameter.dim() > 1 else 0.02)
        path = self._work / "checkpoint"
        model.save_pretrained(path)
        # A model of one part has saved that part's alone, which nothing can be built from
        config.save_pretrained(path)
        return path

    def _batch(self, step: int) -> dict[str, torch.Tensor]:
        mode, generator = self._mode, torch.Generator().manual_seed(20 + step)
        tokens = torch.randint(4, VOCABULARY // 2, (mode.rows, TOKENS), generator=generator)
        labels = tokens.clone()
        batch = {"input_ids": tokens, "labels": labels}
        if mode.documents is None:
            return batch
        positions = torch.cat([torch.arange(piece.stop - piece.start) for piece in mode.documents])
        for piece in mode.documents:
            labels[:, piece.start] = -100
        return batch | {"position_ids": positions.expand(mode.rows, -1).contiguous()}

    def _engine(self, checkpoint: Path) -> fuyou.Engine:
        mode = self._mode
        return fuyou.Engine(
            checkpoint, ssd=[self._work / "ssd"], dtype="bf16" if mode.bf16 else "fp32", host_memory="1GiB",
            host_cache=0, batch_shape=(mode.rows, TOKENS), micro_batch=mode.micro, chunk=mode.chunk,
            adapters=_ADAPTERS if mode.lora else None, lr=self._rate["lr"], eps=self._rate["eps"],
            weight_decay=self._rate["weight_decay"], prove=not mode.unproven,
            packed=mode.packed,
        )  # fmt: skip

    def _evaluated(
        self, engine: fuyou.Engine, batch: dict[str, torch.Tensor]
    ) -> list[tuple[str, float, float]]:
        """Export the model; return pairs of losses that must be equal, and what they say."""
        given: dict[str, Any] = dict(batch)
        rows: list[dict[str, Any]] = [
            {name: value[row : row + 1] for name, value in batch.items()} for row in range(self._mode.rows)
        ]
        alone = sum(engine.eval_loss(**row, router_loss=False) for row in rows) / len(rows)
        engine.save_pretrained(self._work / "exported")
        exported = self._load(self._work / "exported", self._dtype).eval()
        with torch.no_grad():
            loaded = float(exported(**batch, use_cache=False).loss)
        return [
            ("each row is evaluated alone", engine.eval_loss(**given, router_loss=False), alone),
            ("transformers evaluates the export", engine.eval_loss(**given), loaded),
        ]

    def _load(self, checkpoint: Path, dtype: torch.dtype) -> PreTrainedModel:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
        assert isinstance(model, PreTrainedModel)
        if dtype != torch.float32:  # some families compute the loss of logits in bf16, the engine never
            model.get_output_embeddings().register_forward_hook(
                lambda _module, _inputs, logits: logits.float()
            )
        return model

    def _in_memory(self, checkpoint: Path, batches: list[dict[str, torch.Tensor]]) -> "_Expected":
        model = self._load(checkpoint, self._dtype)
        exact = self._load(checkpoint, torch.float32) if self._mode.bf16 else model
        masters = {name: value.detach().clone() for name, value in exact.named_parameters()}
        return self._trained(Twin(model, masters, self._rate), batches)

    def _adapters_in_memory(
        self, checkpoint: Path, batches: list[dict[str, torch.Tensor]], first: dict[str, torch.Tensor]
    ) -> "_Expected":
        from peft import get_peft_model

        base, config = self._load(checkpoint, self._dtype), _ADAPTERS.peft_config()
        settle_targets(base, config)
        adapted = get_peft_model(base, config)
        model = adapted.get_submodule("base_model.model")
        masters = {name: first[name] for name, value in model.named_parameters() if value.requires_grad}
        return self._trained(Twin(model, masters, self._rate), batches)

    def _trained(self, twin: Twin, batches: list[dict[str, torch.Tensor]]) -> "_Expected":
        before = {name: value.clone() for name, value in twin.masters.items()}
        losses = []
        for step, batch in enumerate(batches):
            torch.manual_seed(100 + step)
            losses.append(twin.step(batch, self._mode.micro, self._mode.documents))
        if not all(torch.tensor(losses).isfinite()):
            raise ArithmeticError(f"losses are {losses}")
        return _Expected(losses, before, twin.masters)

    # -- judging ----------------------------------------------------------------------------------------------------

    def _judge(self, expected: "_Expected", losses: list[float], trained: dict[str, torch.Tensor]) -> None:
        finding = self._finding
        finding.losses = [expected.losses, losses]
        finding.loss_difference = max(
            abs(first - two) for first, two in zip(expected.losses, losses, strict=True)
        )
        if self._mode.compares_gradients:
            self._judge_gradients(expected, trained)
            return
        worst = 0.0
        for name, master in expected.masters.items():
            weights = trained[name]  # what is frozen is kept as it computes
            difference = float((weights.float() - master.to(weights.dtype).float()).abs().max())
            changed = float((master - expected.before[name]).abs().max())
            finding.weight_difference = max(finding.weight_difference, difference)
            # In addition to what is allowed in all: a small gradient that is lost altogether must not pass as rounding.
            excess = max(difference / EXACT_WEIGHT, difference / (5e-7 + 0.05 * changed))
            if excess > worst:
                worst, finding.tensor = excess, name
        finding.verdict = "exact"
        if finding.loss_difference > (APART_LOSS if self._mode.packed else EXACT_LOSS):
            step = next(
                at
                for at, (first, two) in enumerate(zip(expected.losses, losses, strict=True))
                if first != two
            )
            finding.verdict = "wrong"
            finding.reason = (
                f"loss of step {step + 1}: {losses[step]:.6f}, in memory {expected.losses[step]:.6f}"
            )
        elif worst > 1:
            finding.verdict, finding.reason = "wrong", f"weights differ by {finding.weight_difference:.1e}"

    def _judge_gradients(self, expected: "_Expected", trained: dict[str, torch.Tensor]) -> None:
        finding, weights = self._finding, expected.masters
        largest = max(float((weights[name] - before).abs().max()) for name, before in expected.before.items())
        apart = {name: float((trained[name] - weights[name]).abs().max()) / largest for name in weights}
        finding.tensor = max(apart, key=lambda name: apart[name])
        finding.weight_difference, finding.verdict = apart[finding.tensor], "exact"
        finding.loss_difference /= abs(expected.losses[0])
        if finding.loss_difference > EXACT_LOSS:
            finding.verdict, finding.reason = (
                "wrong",
                f"the loss differs by {finding.loss_difference:.1e} of it",
            )
        elif finding.weight_difference > EXACT_WEIGHT:
            finding.verdict = "wrong"
            finding.reason = f"a gradient differs by {finding.weight_difference:.1e} of the model's largest"

    def _judge_evaluations(self, evaluated: list[tuple[str, float, float]]) -> None:
        for what, loss, other in evaluated:
            if not abs(loss - other) <= APART_LOSS:
                self._finding.verdict = "wrong"
                self._finding.reason = f"evaluates to {loss:.6f}, and to {other:.6f} where {what}"


@dataclass
class _Expected:
    losses: list[float]
    before: dict[str, torch.Tensor]
    masters: dict[str, torch.Tensor]
