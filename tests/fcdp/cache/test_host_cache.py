"""What copies outward still read goes back to the stream that it came from, and not before they have ended."""

import weakref
from typing import Any
from unittest.mock import Mock

import torch

from fcdp.cache.cached_shards import CopyStreams, PendingRead


def test_memory_goes_back_to_its_own_stream_after_the_copy() -> None:
    streams: Any = [Mock(name="the gathers' stream"), Mock(name="the default stream")]
    ends: Any = [Mock(name="first"), Mock(name="second")]
    outputs = [torch.zeros(3), torch.zeros(5)]
    copies = CopyStreams(
        Mock(), Mock(), Mock(), [PendingRead(*one) for one in zip(outputs, streams, ends, strict=True)]
    )
    alive = [weakref.ref(output) for output in outputs]
    outputs.clear()
    assert all(output() is not None for output in alive)
    copies.release()
    assert all(output() is None for output in alive)
    for stream, end in zip(streams, ends, strict=True):
        stream.wait_event.assert_called_once_with(end)
