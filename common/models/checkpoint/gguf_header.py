"""Bounds on the header of a GGUF file, which is read here before gguf and transformers make objects of all of it.

gguf makes several arrays of every element, so that a file of 1 GB could take 100 GB of memory.
"""

import struct
from pathlib import Path
from typing import Any, BinaryIO

from common.files import FILE_BYTES, check_regular
from common.models.bounds import check_counts

# The largest tokenizers have 262,144 tokens with a score and a type each, and 514,906 merges.
_MOST_ELEMENTS = 4_000_000  # Elements of all arrays
_MOST_KEYS = 10_000
_MOST_TENSORS = 200_000
# Bytes of a name, and of a value: a chat template, say
_MOST_NAME_BYTES = 1 << 16
_MOST_TEXT_BYTES = 16 << 20
_MOST_DIMENSIONS = 8
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT = 8
_ARRAY = 9


def check_header(file: Path) -> None:
    """Reject a GGUF file whose header would take much memory or time, or that describes a model of absurd counts.

    What else is wrong with it is left to those who read it.

    Raises:
        ValueError: says what is too large, with its limit, or that the file ends within its header.
        UserError: a count of layers or experts is absurd.
    """
    check_regular(file)
    with file.open("rb") as content:
        _Header(content, file.name).check()


class _Header:
    def __init__(self, content: BinaryIO, name: str):
        self._content = content
        self._name = name
        self._elements = 0

    def check(self) -> None:
        magic = self._take(4)
        version = self._number("I")
        if magic != b"GGUF":
            raise ValueError("it does not begin as a GGUF file")
        if version & 0xFFFF == 0:
            raise ValueError("its numbers are big-endian, which is not read")
        if version not in (2, 3):
            raise ValueError(f"it has version {version} of the format, and 2 and 3 are read")
        tensors = self._count("Q", _MOST_TENSORS, "tensors")
        for _ in range(self._count("Q", _MOST_KEYS, "keys")):
            key = self._text(_MOST_NAME_BYTES, "a key").decode(errors="replace")
            value = self._value(self._number("I"), key)
            check_counts({key: value}, self._name)
        last = -1
        for _ in range(tensors):
            name = self._text(_MOST_NAME_BYTES, "the name of a tensor").decode(errors="replace")
            dimensions = self._count("I", _MOST_DIMENSIONS, f"dimensions of {name}")
            self._take(8 * dimensions + 4)  # with the type of its elements
            start = self._number("Q")
            if start <= last:  # llama.cpp takes them in this order only
                raise ValueError(
                    f"its tensor {name} does not begin after the tensor before it: it is damaged"
                )
            last = start

    def _value(self, kind: int, key: str) -> Any:
        """Return the value of a key if it is a number."""
        if kind == _TEXT:
            self._text(_MOST_TEXT_BYTES, key)
            return None
        if kind == _ARRAY:
            kind = self._number("I")
            if kind == _ARRAY:
                raise ValueError(f"{key} has arrays of arrays, which are not read")
            count = self._count("Q", _MOST_ELEMENTS - self._elements, f"elements of {key}")
            self._elements += count
            if kind != _TEXT:
                self._take(count * struct.calcsize(self._scalar(kind, key)))
                return None
            for _ in range(count):
                self._text(_MOST_TEXT_BYTES, key)
            return None
        return self._number(self._scalar(kind, key))

    def _scalar(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"{key} has values of the unknown type {kind}")
        return _SCALARS[kind]

    def _text(self, most: int, what: str) -> bytes:
        return self._take(self._count("Q", most, f"bytes of {what}"))

    def _count(self, scalar: str, most: int, what: str) -> int:
        count = int(self._number(scalar))
        if count > most:
            raise ValueError(f"it says that it has {count:,} {what}, and at most {most:,} are read")
        return count

    def _number(self, scalar: str) -> Any:
        return struct.unpack(f"<{scalar}", self._take(struct.calcsize(scalar)))[0]

    def _take(self, nbytes: int) -> bytes:
        data = self._content.read(nbytes)
        if len(data) < nbytes:
            raise ValueError("it ends within its header: it was not copied whole, or is damaged")
        if self._content.tell() > FILE_BYTES:
            raise ValueError(f"its header has more than {FILE_BYTES:,} bytes, the most that is read")
        return data
