"""Traces a block's forward pass: its operators, which results each reads, and what is saved for the backward pass.

From that follows what a recomputation has to compute: everything that autograd has saved, and all that it is made
from. The rest (a block's last matrix product, for one: its result is the next block's input and nothing else) need not
be computed again, and outputs that the forward pass has saved make more of it unnecessary.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from common.models.attention import chunked
from common.models.attention.kernels import KERNELS, AttentionKernels
from fuyou.model import chunks
from fuyou.model.blocks.probe import is_grouped_product
from fuyou.model.operators import makes_views

# Every saved output starts on a multiple of this many bytes, as memory from an allocator does
ALIGN_BYTES = 256

_aten = torch.ops.aten
_ON_CPU = str(_aten._scaled_dot_product_flash_attention_for_cpu.default)
_KERNELS = (_ON_CPU, *KERNELS, str(chunked.OPERATOR))
"""Operators that do a whole call of attention. Plans are made for rows of one document; where documents share a row,
with a mask, or on another GPU, it is another one."""
_HANDED_OVER = frozenset(
    {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.data_ptr}
)
"""Methods that read a tensor's memory without an operator. (``item`` and ``bool`` have one.)"""
# Operators that read the shape of their argument and nothing of its values
_SHAPE_ONLY = frozenset(
    {
        _aten.empty_like,
        _aten.zeros_like,
        _aten.ones_like,
        _aten.full_like,
        _aten.new_empty,
        _aten.new_empty_strided,
        _aten.new_zeros,
        _aten.new_ones,
        _aten.new_full,
    }
)


@dataclass(frozen=True)
class TensorSpec:
    """Shape, strides, type and device of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of_all(result: Any) -> Any:
        """Return ``result`` with a specification instead of each tensor."""
        return tree_map_only(
            torch.Tensor,
            lambda leaf: TensorSpec(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device),
            result,
        )

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def dense(self) -> bool:
        """Whether its elements fill a range of memory, each once, in any order."""
        expected = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return True


@dataclass(frozen=True)
class Operator:
    """One call of an operator in a block's forward pass; calls that only make views do not count."""

    function: torch._ops.OpOverload
    ordinal: int  # Number of the call among this operator's calls, from 0
    result: Any  # Its result, with a :class:`TensorSpec` for each tensor
    reads: frozenset[int]  # Indices of the calls that have made (or changed) what it reads
    flops: float
    moved_bytes: int  # Bytes of its arguments and results
    always: bool
    """Whether it must run even if nothing needs its result: it draws random numbers, changes an argument, or hands a
    value to Python."""
    aliases: bool  # Whether it returns memory that was there before

    @property
    def name(self) -> str:
        """Full name, such as ``aten.addmm.default``."""
        return str(self.function)

    @property
    def outputs(self) -> list[TensorSpec]:
        return [leaf for leaf in tree_leaves(self.result) if isinstance(leaf, TensorSpec)]

    @property
    def nbytes(self) -> int:
        """Bytes that all of its outputs take in a buffer of saved outputs."""
        return sum(-(-output.nbytes // ALIGN_BYTES) * ALIGN_BYTES for output in self.outputs)

    @property
    def savable(self) -> bool:
        """Whether its outputs can be saved and given back as if it had run.

        Copies cannot: autograd makes some itself, which a pass without gradients lacks.
        """
        copies = self.function is _aten.clone.default
        return not (self.always or self.aliases or copies) and all(output.dense for output in self.outputs)


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module in a block's forward pass, and the operators that ran in it: ``[start, stop)``."""

    module: nn.Module
    ordinal: int  # Number of the call among this module's calls, from 0
    start: int
    stop: int

    @staticmethod
    def around(operators: Iterable[int], calls: Sequence["ModuleCall"]) -> "list[ModuleCall] | None":
        """Return calls that do not overlap in which these operators ran, the innermost ones; None if one ran in no
        call."""
        chosen: dict[tuple[nn.Module, int], ModuleCall] = {}
        for index in operators:
            call = min(
                (call for call in calls if call.start <= index < call.stop),
                key=lambda call: call.stop - call.start,
                default=None,
            )
            if call is None:
                return None
            chosen[call.module, call.ordinal] = call
        return [
            call
            for call in chosen.values()
            if not any(
                other is not call and other.start <= call.start and call.stop <= other.stop
                for other in chosen.values()
            )
        ]


@dataclass(frozen=True)
class BlockTrace:
    """The operators of one block's forward pass, in order, and which results its backward pass needs."""

    operators: list[Operator]
    saved: frozenset[int]  # Indices of the calls whose results autograd has saved
    prunes: bool
    """Whether the backward pass needs nothing but what autograd has saved: a custom autograd function may hold more,
    and then nothing can be left out."""

    @cached_property
    def _index(self) -> dict[tuple[str, int], int]:
        return {(operator.name, operator.ordinal): index for index, operator in enumerate(self.operators)}

    def find(self, name: str, ordinal: int) -> int | None:
        """Return the index of the ``ordinal``-th call of an operator, or of the kernel that attention took instead."""
        others = _KERNELS if name in _KERNELS else ()
        indices = (self._index.get((operator, ordinal)) for operator in (name, *others))
        return next((index for index in indices if index is not None), None)

    def required(self, given: frozenset[int] = frozenset()) -> frozenset[int]:
        """Return the calls that a recomputation has to make if it is given the outputs of ``given``."""
        if not self.prunes:
            return frozenset(range(len(self.operators))) - given
        return self.made_from(
            [index for index, call in enumerate(self.operators) if call.always] + [*self.saved], given
        )

    def made_from(self, calls: Iterable[int], given: frozenset[int] = frozenset()) -> frozenset[int]:
        """Return ``calls`` and all calls whose results they are made from, but for those of ``given``."""
        todo = list(calls)
        needed = set[int]()
        while todo:
            index = todo.pop()
            if index not in needed and index not in given:
                needed.add(index)
                todo.extend(self.operators[index].reads)
        return frozenset(needed)

    def left_out(self, given: frozenset[int] = frozenset()) -> float:
        """Return the fraction of the FLOPs that a recomputation leaves out if it is given the outputs of ``given``."""
        whole = self.flops()
        return (whole - self.flops(self.required(given))) / whole if whole else 0.0

    def flops(self, calls: frozenset[int] | None = None) -> float:
        """Return the FLOPs of ``calls``, or of the whole forward pass."""
        chosen = range(len(self.operators)) if calls is None else calls
        return sum(self.operators[index].flops for index in chosen)


class Tracer(TorchDispatchMode):
    """Traces what runs inside it, on any device: ``with Tracer() as tracer: result = block(...)``.

    Gradients must be enabled, for what the backward pass saves is a part of the trace. It keeps no tensor alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Operator] = []  # Those that have run so far
        self._calls: Counter[torch._ops.OpOverload] = Counter()
        self._writers: dict[int, set[int]] = {}  # storage -> calls that have written to it since it was made
        self._saved: set[int] = set()
        self.module_calls: list[ModuleCall] = []  # Those that have ended
        self.is_static = True  # Whether no value has been handed to Python, which could depend on it
        self._open: list[tuple[int, int]] = []  # Of each module's call: its ordinal, and its first operator
        self._ordinals: Counter[nn.Module] = Counter()
        self._module_hooks: list[RemovableHandle] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._save, lambda value: value)
        self._reads = _PythonReads(self._note_read)

    def __enter__(self) -> "Tracer":
        self._hooks.__enter__()
        self._reads.__enter__()
        self._module_hooks = [
            register_module_forward_pre_hook(self._begin_call),
            register_module_forward_hook(self._end_call, always_call=True),
        ]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._module_hooks:
            handle.remove()
        self._reads.__exit__(*error)
        self._hooks.__exit__(*error)

    def finish(self, *results: torch.Tensor) -> BlockTrace:
        """Return the trace; ``results`` are the tensors at which the backward pass begins."""
        return BlockTrace(self.operators, frozenset(self._saved), not _has_custom_function(results))

    def _begin_call(self, module: nn.Module, _arguments: Any) -> None:
        self._open.append((self._ordinals[module], len(self.operators)))
        self._ordinals[module] += 1

    def _end_call(self, module: nn.Module, _arguments: Any, _result: Any) -> None:
        self.module_calls.append(ModuleCall(module, *self._open.pop(), len(self.operators)))

    def _note_read(self, value: torch.Tensor) -> None:
        self.is_static = False
        self._save(value)

    def _save(self, value: torch.Tensor) -> torch.Tensor:
        self._saved |= self._writers.get(_storage(value), set())
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_grouped_product(func, args) and args[0].is_meta:
            result = args[0].new_empty(args[0].shape[0], args[1].shape[2])  # the meta kernel insists on bf16
        else:
            result = func(*args, **kwargs)
        if makes_views(func):
            return result
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.is_static = self.is_static and not _hands_over(func, args, outputs)
        memory = {_storage(value) for value in inputs if func.overloadpacket not in _SHAPE_ONLY}
        index = len(self.operators)
        self.operators.append(
            Operator(
                func,
                self._calls[func],
                TensorSpec.of_all(result),
                frozenset(call for storage in memory for call in self._writers.get(storage, ())),
                _flops(func, args, kwargs, result),
                sum(value.numel() * value.itemsize for value in (*inputs, *outputs)),
                _always_runs(func, args, kwargs, outputs),
                any(_storage(value) in memory for value in outputs),
            )
        )
        self._calls[func] += 1
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if (
                argument.alias_info is not None
                and argument.alias_info.is_write
                and isinstance(value, torch.Tensor)
            ):
                self._writers.setdefault(_storage(value), set()).add(index)
        for value in outputs:
            if _storage(value) not in memory:
                self._writers[_storage(value)] = {index}  # new memory, even where an earlier tensor's was
        return result


class _PythonReads(TorchFunctionMode):
    """Calls ``note`` with tensors whose values Python reads without an operator: a recomputation needs them, too."""

    def __init__(self, note: Callable[[torch.Tensor], object]):
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HANDED_OVER:
            self._note(args[0])
        return func(*args, **(kwargs or {}))


@cache
def argument_index(function: torch._ops.OpOverload, name: str) -> int | None:
    """Return the position of the argument ``name``, or None if the operator has none of that name."""
    names = [argument.name for argument in function._schema.arguments]
    return names.index(name) if name in names else None


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata


def _always_runs(function: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> bool:
    tags = function.tags
    if torch.Tag.nondeterministic_seeded in tags:
        position = argument_index(function, "dropout_p")
        if position is None:
            return True
        default = function._schema.arguments[position].default_value
        dropout = args[position] if position < len(args) else kwargs.get("dropout_p", default)
        return bool(dropout != 0.0)  # attention without dropout draws nothing
    return _hands_over(function, args, outputs) or any(
        argument.alias_info is not None and argument.alias_info.is_write
        for argument in function._schema.arguments
    )


def _hands_over(function: Any, args: Any, outputs: list[torch.Tensor]) -> bool:
    """Return whether Python sees values of an operator's arguments, or a shape that depends on them."""
    if function is _aten.index.Tensor:  # only masks select a number of elements that depends on values
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    dependent = (
        torch.Tag.dynamic_output_shape in function.tags or torch.Tag.data_dependent_output in function.tags
    )
    return not outputs or dependent


def _flops(function: Any, args: Any, kwargs: Any, result: Any) -> float:
    packet = function.overloadpacket
    if "scaled_dot_product" in packet.__name__ and "attention" in packet.__name__:
        # PyTorch 2.11's own formula refuses shared heads
        query, key, value = (each.shape for each in args[:3])
        return 2.0 * query[:3].numel() * key[2] * (query[3] + value[3])
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=result))
    if packet.__name__ in ("_grouped_mm", "grouped_mm"):  # every row goes through one expert
        return 2.0 * result.numel() * args[0].shape[-1]
    return 0.0


def _has_custom_function(results: Sequence[torch.Tensor]) -> bool:
    todo: list[Any] = [result.grad_fn for result in results]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            # Attention within documents saves what it needs in the sight of autograd; earlier keys are saved anyway.
            is_ours = node.name().startswith(
                ("GeneratedBackwardFor_fuyou_attention_by", chunks.AUTOGRAD_NODE)
            )
            if isinstance(node, torch.autograd.function.BackwardCFunction) and not is_ours:
                return True
            todo.extend(earlier for earlier, _ in node.next_functions)
    return False


class AttentionOf(TorchFunctionMode):
    """Makes attention on the meta device call the kernel that a real ``"cpu"`` or ``"cuda"`` would, of those that the
    run may take, instead of one product at a time."""

    def __init__(self, device: str, kernels: AttentionKernels):
        super().__init__()
        self._device = device
        self._kernels = kernels

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            kernel = self._kernel(*args, **kwargs)
            if kernel is not None:
                return kernel()
        return func(*args, **kwargs)

    def _kernel(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Callable[[], torch.Tensor] | None:
        if dropout_p or query.shape[-1] != value.shape[-1]:
            return None
        if enable_gqa and self._device != "cpu":
            times = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        taken = self._kernels.taken(self._device, (query, key, value), attn_mask, is_causal)
        if taken is SDPBackend.MATH:
            return None
        if taken is SDPBackend.FLASH_ATTENTION and self._device != "cpu":
            return lambda: _aten._scaled_dot_product_flash_attention(
                query, key, value, 0.0, is_causal, scale=scale
            )[0]
        bias = attn_mask
        if bias is not None and bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(bias.logical_not(), float("-inf"))
        if self._device == "cpu":
            kernel = _aten._scaled_dot_product_flash_attention_for_cpu
            return lambda: kernel(query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale)[0]
        cudnn = taken is SDPBackend.CUDNN_ATTENTION
        kernel = (
            _aten._scaled_dot_product_cudnn_attention
            if cudnn
            else _aten._scaled_dot_product_efficient_attention
        )
        return lambda: kernel(query, key, value, bias, True, 0.0, is_causal, scale=scale)[0]
