"""Objects as bytes between processes: pickle, with each tensor as one flat buffer.

Stock tensor pickling between processes passes one file descriptor a tensor, and a buffer of a thousand samples
would exhaust them; as bytes a sample costs none, and nothing is left in shared memory when a process dies.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


def to_bytes(value: Any) -> bytes:
    """Serialize any picklable object that may hold CPU tensors."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(value)
    return stream.getvalue()


def from_bytes(data: bytes | bytearray | memoryview) -> Any:
    """Restore what `to_bytes` wrote; each tensor owns its memory.

    Only for bytes from a process of this run: it is pickle.
    """
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        # Exact tensors only: subclasses, sparse and quantized layouts and autograd history go torch's way.
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.requires_grad:
            return NotImplemented
        if value.device.type != "cpu" or value.is_quantized or value.is_conj() or value.is_neg():
            return NotImplemented
        raw = value.contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(raw.data), value.dtype, tuple(value.shape))


def _tensor(raw: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).reshape(shape)
