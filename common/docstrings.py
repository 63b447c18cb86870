"""Docstrings below the attributes of a class, which Python itself does not keep."""

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise


@cache
def _class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


def attribute_docstrings(cls: type) -> dict[str, str]:
    """Return the string below each annotated attribute of a class, each of its paragraphs on one line.

    Args:
        cls: at the top level of a module whose source is there; what it inherits is not looked at.
    """
    body = _class_bodies(cls.__module__)[cls.__name__]
    return {
        field.target.id: "\n\n".join(" ".join(part.split()) for part in text.value.value.split("\n\n"))
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
