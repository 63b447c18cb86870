"""Initial values of parameters that are made many at a time and needed one at a time.

A parameter is filled with a constant or a draw from the random generator, as a rule, and that can be repeated: a draw
needs the generator's state, which is 5 kB. So while ``peft`` injects adapters, only one module's are in memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from common.randomness import own_random_numbers

_FILLED = object()  # The tensor that a call fills, which need not stay in memory
Fill = Callable[[torch.Tensor], None]


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
        # By the address of what was filled: the generator's state before, how to do it again, and the dtype.
        self._drawn: dict[int, tuple[torch.Tensor, Fill, torch.dtype]] = {}
        # How to make the values of emptied parameters again, by the module that they are in and their name there.
        self._made: dict[tuple[nn.Module, str], Callable[[], torch.Tensor]] = {}
        self._unknown: set[tuple[nn.Module, str]] = set()  # Emptied parameters in which there was a NaN
        self.kept_nbytes = 0  # Bytes of values that cannot be drawn again one by one, and stay in memory
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

            def fill(target: torch.Tensor) -> None:
                given = [target if value is _FILLED else value for value in arguments]
                func(*given, **{key: target if value is _FILLED else value for key, value in keywords.items()})

            self._drawn[tensor.data_ptr()] = before, fill, tensor.dtype
        return result

    def empty(self, module: nn.Module) -> None:
        """Replace all parameters of a module that still have values."""
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and not parameter.is_meta and id(parameter) not in self._not_these:
                    self._made[part, name] = self._again((part, name), parameter.detach())
                    part._parameters[name] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        self._drawn.clear()

    def value(self, model: nn.Module, name: str) -> torch.Tensor:
        """Return the initial value of a parameter that has been emptied; it must not be changed in place."""
        path, _, attribute = name.rpartition(".")
        return self._made[model.get_submodule(path), attribute]().to(model.get_parameter(name).dtype)

    def is_unknown(self, model: nn.Module, name: str) -> bool:
        """Return whether there was a NaN in an emptied parameter."""
        path, _, attribute = name.rpartition(".")
        return (model.get_submodule(path), attribute) in self._unknown

    def forget(self) -> None:
        self._made.clear()

    def _put_in(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        if module is not None and self._is_complete(module):
            self.empty(module)

    def _again(self, place: tuple[nn.Module, str], value: torch.Tensor) -> Callable[[], torch.Tensor]:
        first, shape, dtype = value.flatten()[0].clone(), value.shape, value.dtype
        if _is_placeholder(value) or value.isnan().any():
            self._unknown.add(place)
            first.fill_(torch.nan)
        elif not (value == first).all():
            state, fill, drawn_in = self._drawn.get(value.data_ptr(), (None, None, None))

            def draw() -> torch.Tensor:
                assert state is not None and fill is not None
                drawn = torch.empty(shape, dtype=drawn_in)
                with own_random_numbers():
                    torch.set_rng_state(state)
                    fill(drawn)
                return drawn.to(dtype)

            if state is not None and torch.equal(draw(), value):  # nothing else has changed it since
                return draw
            self.kept_nbytes += value.nbytes
            return lambda: value
        return lambda: first.expand(shape)


@contextmanager
def nan_placeholders(model: nn.Module) -> Iterator[dict[int, nn.Parameter]]:
    """Replace meta parameters by expanded NaNs; yield the originals by their replacements' identities."""
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
