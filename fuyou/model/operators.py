"""What an operator does with the memory of its arguments, from its schema."""

from functools import cache

import torch


@cache
def makes_views(function: torch._ops.OpOverload) -> bool:
    """Return whether the operator only looks at its argument's memory in another way."""
    returns = function._schema.returns
    if function is torch.ops.aten._unsafe_view.default:
        return True
    return bool(returns) and all(
        result.alias_info is not None and not result.alias_info.is_write for result in returns
    )


@cache
def written_arguments(function: torch._ops.OpOverload) -> frozenset[str]:
    """Return the names of the arguments that the operator writes to."""
    arguments = function._schema.arguments
    return frozenset(
        argument.name
        for argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )
