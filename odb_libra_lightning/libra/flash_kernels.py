"""Varlen attention on CUDA: FlashAttention's own kernels, from flash-attn or as built into PyTorch.

Both align causal attention to the bottom right (flash-attn since 2.1) and take float16 and bfloat16, with heads of at
most 256.

No GPU stood by when this was written. Tests run `FlashAttnKernel` against stand-ins with the signatures of flash-attn
2.6 to 2.8, and `TorchFlashKernel` on meta tensors, which know shapes but no numbers. Compare either with the CPU kernel
before you trust it on a new machine.
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from odb_libra_lightning.libra.kernel_interface import check_inputs
from odb_libra_lightning.libra.segments import Segments

_DTYPES = (torch.float16, torch.bfloat16)
_MAX_HEAD_DIM = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class _Launch:
    """What both libraries are told beside the tensors. Windows count keys beside a query's own; -1: all."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    scale: float
    causal: bool
    window_left: int
    window_right: int


class _FlashKernel(ABC):
    """What both kernels have in common: checks, and heads padded to a multiple of 8."""

    @abstractmethod
    def _run_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, launch: _Launch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute output and log-sum-exp."""

    @abstractmethod
    def _run_backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        launch: _Launch,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the three gradients."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        segments: Segments,
        *,
        causal: bool,
        scale: float,
        window: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionKernel.forward`."""
        _check(q, k, v, segments, causal=causal, window=window)
        shape = (q.shape[1], q.shape[0])
        if not len(segments):
            return torch.empty_like(q), q.new_empty(shape, dtype=torch.float32)
        launch = _launch(q, segments, causal, scale, window)
        out, lse = self._run_forward(_padded(q), _padded(k), _padded(v), launch)
        if lse.shape != shape:
            raise RuntimeError(
                f"the log-sum-exp has shape {tuple(lse.shape)}, not [query heads, queries] {shape} as newer versions "
                f"give it; update PyTorch, which is {torch.__version__}"
            )
        return _unpadded(out, q), lse

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        segments: Segments,
        *,
        causal: bool,
        scale: float,
        window: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `AttentionKernel.backward`."""
        _check(q, k, v, segments, causal=causal, window=window)
        if not len(segments):
            return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        grads = self._run_backward(
            _padded(grad_out.to(q.dtype)),
            _padded(q),
            _padded(k),
            _padded(v),
            _padded(out.to(q.dtype)),
            lse.contiguous(),
            _launch(q, segments, causal, scale, window),
        )
        dq, dk, dv = (_unpadded(grad, like) for grad, like in zip(grads, (q, k, v), strict=True))
        return dq, dk, dv


class FlashAttnKernel(_FlashKernel):
    """`AttentionKernel` on the package flash-attn, versions 2.6 to 2.8.

    It calls what `flash_attn_varlen_func` calls. Their signatures differ between versions, so arguments go by the names
    that the installed version has.

    Args:
        deterministic: whether gradients come out the same to the last bit in every run, which is slower and takes more
            memory. None: as `torch.use_deterministic_algorithms` says at the time.

    Raises:
        ValueError: flash-attn cannot be imported, or its functions take other arguments than those of 2.6 to 2.8.
    """

    def __init__(self, *, deterministic: bool | None = None) -> None:
        try:
            interface = importlib.import_module("flash_attn.flash_attn_interface")
        except ImportError as error:
            raise ValueError(
                "the kernel 'flash_attn' needs the package flash-attn, 2.6 to 2.8 (pip install flash-attn "
                f"--no-build-isolation), which cannot be imported: {error}"
            ) from error
        package = importlib.import_module("flash_attn")
        self._version = str(getattr(package, "__version__", "of unknown version"))
        self._forward = self._bind(interface, "_flash_attn_varlen_forward", extra=_FORWARD_ONLY)
        self._backward = self._bind(interface, "_flash_attn_varlen_backward", extra=_BACKWARD_ONLY)
        self._deterministic = deterministic

    def _bind(self, interface: object, name: str, *, extra: frozenset[str]) -> Callable[..., Any]:
        """Give a function that takes the window as two numbers and is called by names alone."""
        function = getattr(interface, name, None)
        if function is None:
            raise self._unsupported(f"has no {name}")
        takes, requires = _parameters(function)
        pair = "window_size" in takes
        window = {"window_size"} if pair else {"window_size_left", "window_size_right"}
        given = _ALWAYS | extra | window
        if given - takes or requires - given:
            wrong = sorted((given - takes) | (requires - given))
            raise self._unsupported(f"differs in the arguments {', '.join(wrong)} of {name}")

        def call(*, window_left: int, window_right: int, **arguments: Any) -> Any:
            if pair:
                return function(**arguments, window_size=(window_left, window_right))
            return function(**arguments, window_size_left=window_left, window_size_right=window_right)

        return call

    def _unsupported(self, what: str) -> ValueError:
        return ValueError(
            f"flash-attn {self._version} {what}; versions 2.6 to 2.8 are supported (or choose the kernel 'torch_flash')"
        )

    def _run_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, launch: _Launch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        results = self._forward(q=q, k=k, v=v, **_flash_attn_arguments(launch), return_softmax=False, block_table=None)
        if len(results) == 8:  # 2.6: out, q, k, v, padded out, lse, dropout mask, rng state
            return results[0], results[5]
        if len(results) == 4:  # 2.7: out, lse, dropout mask, rng state
            return results[0], results[1]
        raise self._unsupported(f"gives {len(results)} results from _flash_attn_varlen_forward")

    def _run_backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        launch: _Launch,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        deterministic = self._deterministic
        self._backward(  # writes into dq, dk and dv
            dout=grad_out,
            q=q,
            k=k,
            v=v,
            out=out,
            softmax_lse=lse,
            dq=dq,
            dk=dk,
            dv=dv,
            **_flash_attn_arguments(launch),
            deterministic=torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        )
        return dq, dk, dv


_LAUNCH = frozenset({"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"})
_ALWAYS = _LAUNCH | {"q", "k", "v", "dropout_p", "softmax_scale", "causal", "softcap", "alibi_slopes"}
_FORWARD_ONLY = frozenset({"return_softmax", "block_table"})
_BACKWARD_ONLY = frozenset({"dout", "out", "softmax_lse", "dq", "dk", "dv", "deterministic"})


def _flash_attn_arguments(launch: _Launch) -> dict[str, Any]:
    return {
        "cu_seqlens_q": launch.cu_seqlens_q,
        "cu_seqlens_k": launch.cu_seqlens_k,
        "max_seqlen_q": launch.max_seqlen_q,
        "max_seqlen_k": launch.max_seqlen_k,
        "dropout_p": 0.0,
        "softmax_scale": launch.scale,
        "causal": launch.causal,
        "window_left": launch.window_left,
        "window_right": launch.window_right,
        "softcap": 0.0,
        "alibi_slopes": None,
    }


def _parameters(function: Callable[..., Any]) -> tuple[set[str], set[str]]:
    """Names that a function takes, and those of them without a default."""
    # What torch.library.custom_op makes (flash-attn since 2.7) shows its names in its schema alone.
    overload = getattr(function, "_opoverload", None)
    if overload is not None:
        arguments = overload._schema.arguments
        return {each.name for each in arguments}, {each.name for each in arguments if not each.has_default_value()}
    parameters = inspect.signature(function).parameters.values()
    return {each.name for each in parameters}, {each.name for each in parameters if each.default is each.empty}


class TorchFlashKernel(_FlashKernel):
    """`AttentionKernel` on the FlashAttention 2 that PyTorch is built with.

    Its gradients come out the same to the last bit in every run where `torch.use_deterministic_algorithms` is on.
    """

    def _run_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, launch: _Launch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            launch.cu_seqlens_q,
            launch.cu_seqlens_k,
            launch.max_seqlen_q,
            launch.max_seqlen_k,
            0.0,
            launch.causal,
            False,
            scale=launch.scale,
            window_size_left=launch.window_left,
            window_size_right=launch.window_right,
        )
        return out, lse

    def _run_backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        launch: _Launch,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # The state of dropout, of which there is none.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad_out,
            q,
            k,
            v,
            out,
            lse,
            launch.cu_seqlens_q,
            launch.cu_seqlens_k,
            launch.max_seqlen_q,
            launch.max_seqlen_k,
            0.0,
            launch.causal,
            state,
            torch.empty(0, device=q.device),
            scale=launch.scale,
            window_size_left=launch.window_left,
            window_size_right=launch.window_right,
        )
        return dq, dk, dv


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, *, causal: bool, window: int | None
) -> None:
    check_inputs(q, k, v, segments, causal=causal, window=window)
    if q.dtype not in _DTYPES:
        raise ValueError(f"FlashAttention takes float16 or bfloat16, not {q.dtype}; train in half precision")
    if q.shape[2] > _MAX_HEAD_DIM:
        raise ValueError(f"FlashAttention takes a head_dim of at most {_MAX_HEAD_DIM}, not {q.shape[2]}")


def _launch(q: torch.Tensor, segments: Segments, causal: bool, scale: float, window: int | None) -> _Launch:
    cu_seqlens_q, cu_seqlens_k = segments.cu_seqlens(q.device)
    return _Launch(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=segments.max_query_length,
        max_seqlen_k=segments.max_key_length,
        scale=scale,
        causal=causal,
        window_left=-1 if window is None else window - 1,
        window_right=0 if causal else -1,
    )


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros up to a multiple of 8 in every head, which change no score; a head's numbers side by side."""
    short = -tensor.shape[-1] % 8
    if short:
        return pad(tensor, (0, short))
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _unpadded(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.shape[-1] == like.shape[-1] else tensor[..., : like.shape[-1]].contiguous()
