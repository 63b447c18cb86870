"""Initial values of parameters that are made many at a time and needed one at a time.

A parameter is filled with a constant or a draw from the random generator, as a rule, and that can be repeated: a draw
needs the generator's state, which is 5 kB. So while ``peft`` injects adapters, only one module's are in memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from common.randomness import own_random_numbers


@dataclass(frozen=True)
class _Constant:
    """One number everywhere."""

    number: torch.Tensor  # The number, as a scalar
    shape: torch.Size

    def value(self) -> torch.Tensor:
        return self.number.expand(self.shape)


_FILLED = object()  # Stands for the tensor that is filled, which need not stay in memory


@dataclass(frozen=True)
class _Fill:
    """A call that fills a tensor at random."""

    function: Callable[..., Any]
    arguments: Sequence[Any]
    keywords: Mapping[str, Any]

    def __call__(self, tensor: torch.Tensor) -> None:
        self.function(
            *(tensor if value is _FILLED else value for value in self.arguments),
            **{key: tensor if value is _FILLED else value for key, value in self.keywords.items()},
        )


@dataclass(frozen=True)
class _Draw:
    """The result of a function that fills its tensor at random, from a given state of the generator."""

    state: torch.Tensor  # State of PyTorch's CPU generator before the draw
    fill: _Fill
    shape: torch.Size
    drawn_in: torch.dtype
    kept_in: torch.dtype  # Dtype to which the drawn numbers have been rounded since

    def value(self) -> torch.Tensor:
        tensor = torch.empty(self.shape, dtype=self.drawn_in)
        with own_random_numbers():
            torch.set_rng_state(self.state)
            self.fill(tensor)
        return tensor.to(self.kept_in)


@dataclass(frozen=True)
class _Kept:
    """Any other value, which stays in memory."""

    tensor: torch.Tensor

    def value(self) -> torch.Tensor:
        return self.tensor


class InitialValues(TorchFunctionMode):
    """Watches, while active, how tensors are filled, and empties parameters of modules that are complete.

    Args:
        is_complete: whether a module that is registered in another one has all its initial values.
        not_these: identities of parameters that are left alone.

    A parameter that has been emptied is another object, on the meta device. Its value comes from :meth:`value`; one
    with a NaN in it, which can only come from what it was made from, is NaN throughout.
    """

    def __init__(self, is_complete: Callable[[nn.Module], bool], not_these: set[int]) -> None:
        super().__init__()
        self._is_complete, self._not_these = is_complete, not_these
        self._drawn: dict[int, tuple[torch.Tensor, _Fill, torch.dtype]] = {}
        """Draws by the address of what they filled."""
        self._made: dict[tuple[nn.Module, str], _Constant | _Draw | _Kept] = {}
        """How to make the values of emptied parameters again, by the module that they are in and their name there."""
        self._handle: RemovableHandle | None = None

    def __enter__(self) -> "InitialValues":
        self._handle = nn.modules.module.register_module_module_registration_hook(self._put_in)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        assert self._handle is not None
        self._handle.remove()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "clone" and _is_placeholder(args[0]):  # of a module that is copied; as large as embeddings
            return args[0].detach()
        fills, moves = name.endswith("_") and not name.endswith("__"), name == "to"
        if not fills and not moves:
            return func(*args, **kwargs)
        before = torch.get_rng_state()
        result = func(*args, **kwargs)
        tensor = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
        if tensor is None:
            return result
        if moves and tensor.data_ptr() in self._drawn:
            self._drawn[result.data_ptr()] = self._drawn[tensor.data_ptr()]
        elif fills and not torch.equal(before, torch.get_rng_state()):
            arguments = [_FILLED if value is tensor else value for value in args]
            keywords = {key: _FILLED if value is tensor else value for key, value in kwargs.items()}
            self._drawn[tensor.data_ptr()] = before, _Fill(func, arguments, keywords), tensor.dtype
        return result

    def empty(self, module: nn.Module) -> None:
        """Replace all parameters of a module that still have values."""
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and not parameter.is_meta and id(parameter) not in self._not_these:
                    self._made[part, name] = self._origin(parameter.detach())
                    part._parameters[name] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        self._drawn.clear()

    def value(self, model: nn.Module, name: str) -> torch.Tensor:
        """Return the initial value of a parameter that has been emptied; it must not be changed in place.

        Raises:
            KeyError: if the parameter has not been emptied.
        """
        path, _, attribute = name.rpartition(".")
        return self._made[model.get_submodule(path), attribute].value().to(model.get_parameter(name).dtype)

    def is_unknown(self, model: nn.Module, name: str) -> bool:
        """Return whether there was a NaN in an emptied parameter."""
        path, _, attribute = name.rpartition(".")
        origin = self._made[model.get_submodule(path), attribute]
        return isinstance(origin, _Constant) and bool(origin.number.isnan())

    def kept_nbytes(self) -> int:
        """Return the bytes of values that cannot be drawn again one by one, and stay in memory."""
        return sum(origin.tensor.nbytes for origin in self._made.values() if isinstance(origin, _Kept))

    def forget(self) -> None:
        self._made.clear()

    def _put_in(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        if module is not None and self._is_complete(module):
            self.empty(module)

    def _origin(self, value: torch.Tensor) -> _Constant | _Draw | _Kept:
        first = value.flatten()[0].clone()
        if _is_placeholder(value) or value.isnan().any():
            return _Constant(torch.full_like(first, torch.nan), value.shape)
        if (value == first).all():
            return _Constant(first, value.shape)
        drawn = self._drawn.get(value.data_ptr())
        if drawn is not None:
            draw = _Draw(drawn[0], drawn[1], value.shape, drawn[2], value.dtype)
            if torch.equal(draw.value(), value):  # nothing else has changed it since
                return draw
        return _Kept(value)


@contextmanager
def nan_placeholders(model: nn.Module) -> Iterator[dict[int, nn.Parameter]]:
    """Replace meta parameters by expanded NaNs on the CPU while the context lasts.

    Yields:
        The meta parameter of each replacement, by the replacement's identity. Meta parameters get ``requires_grad`` of
        their replacements.
    """
    replaced: dict[int, nn.Parameter] = {}
    originals: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in replaced:
                value = torch.full((), torch.nan, dtype=parameter.dtype).expand(parameter.shape)
                replaced[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                originals[id(replaced[id(parameter)])] = parameter
            module._parameters[name] = replaced[id(parameter)]
    try:
        yield originals
    finally:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                original = None if parameter is None else originals.get(id(parameter))
                if original is not None and parameter is not None:
                    original.requires_grad_(parameter.requires_grad)
                    module._parameters[name] = original


def _is_placeholder(value: torch.Tensor) -> bool:
    return value.dim() > 0 and not any(value.stride()) and bool(value.flatten()[0].isnan())
