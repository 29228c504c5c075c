"""CUDA kernels without a GPU: against stand-ins of flash-attn, on meta tensors, and which of them is taken."""

import importlib
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from odb_libra_lightning.libra import kernels
from odb_libra_lightning.libra.cpu_kernel import CpuKernel
from odb_libra_lightning.libra.flash_kernels import FlashAttnKernel, TorchFlashKernel
from odb_libra_lightning.libra.kernels import kernel_for
from odb_libra_lightning.libra.segments import Segments
from tests.libra.kernel_cases import RESULTS, documents_of, inputs_of, results_of, segments_of


@pytest.fixture(autouse=True)
def _no_kernel_of_another_test() -> Iterator[None]:
    yield
    _forget()


def _forget() -> None:
    kernels._made.cache_clear()
    kernels._default_name.cache_clear()


calls: list[dict[str, Any]] = []
"""Arguments of the calls of stand-ins that are no tensors."""


def _stand_in_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    calls.append(arguments)
    return CpuKernel().forward(q, k, v, _read(q, cu_q, cu_k, arguments), **_options(arguments))


def _stand_in_backward(
    tensors: tuple[torch.Tensor, ...],
    grads: tuple[torch.Tensor, ...],
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    **arguments: Any,
) -> None:
    calls.append(arguments)
    segments = _read(tensors[1], cu_q, cu_k, arguments)
    results = CpuKernel().backward(*tensors, segments, **_options(arguments))  # type: ignore[call-arg, arg-type]
    for grad, result in zip(grads, results, strict=True):
        assert grad.is_contiguous()
        grad.copy_(result)


def _read(q: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, arguments: dict[str, Any]) -> Segments:
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert q.shape[2] % 8 == 0
    segments = Segments(query_lengths=tuple(cu_q.diff().tolist()), key_lengths=tuple(cu_k.diff().tolist()))
    assert arguments["max_seqlen"] == (max(segments.query_lengths), max(segments.key_lengths))
    return segments


def _options(arguments: dict[str, Any]) -> Any:
    left, right = arguments["window_size"]
    assert right == (0 if arguments["causal"] else -1)
    return {"causal": arguments["causal"], "scale": arguments["scale"], "window": left + 1 if left >= 0 else None}


def forward_2_6(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
    softcap, alibi_slopes, return_softmax, block_table,
):  # fmt: skip
    out, lse = _stand_in_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen=(max_seqlen_q, max_seqlen_k), scale=softmax_scale,
        causal=causal, window_size=window_size, off=(dropout_p, softcap, alibi_slopes, return_softmax, block_table),
    )  # fmt: skip
    return out, q, k, v, out, lse, None, None


def backward_2_6(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    _stand_in_backward(
        (dout, q, k, v, out, softmax_lse), (dq, dk, dv), cu_seqlens_q, cu_seqlens_k,
        max_seqlen=(max_seqlen_q, max_seqlen_k), scale=softmax_scale, causal=causal, window_size=window_size,
        deterministic=deterministic, off=(dropout_p, softcap, alibi_slopes, rng_state),
    )  # fmt: skip
    return dq, dk, dv, softmax_lse


def forward_2_7(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, return_softmax: bool = False,
    block_table: torch.Tensor | None = None, leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None, zero_tensors: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    out, lse = _stand_in_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen=(max_seqlen_q, max_seqlen_k), scale=softmax_scale,
        causal=causal, window_size=(window_size_left, window_size_right),
        off=(dropout_p, softcap, alibi_slopes, return_softmax, block_table),
    )  # fmt: skip
    return out, lse, torch.empty(0), torch.empty(2)


def backward_2_7(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    softmax_lse: torch.Tensor, dq: torch.Tensor | None, dk: torch.Tensor | None, dv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
    softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, softcap: float,
    alibi_slopes: torch.Tensor | None, deterministic: bool, rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> torch.Tensor:  # fmt: skip
    assert dq is not None
    assert dk is not None
    assert dv is not None
    _stand_in_backward(
        (dout, q, k, v, out, softmax_lse), (dq, dk, dv), cu_seqlens_q, cu_seqlens_k,
        max_seqlen=(max_seqlen_q, max_seqlen_k), scale=softmax_scale, causal=causal,
        window_size=(window_size_left, window_size_right), deterministic=deterministic,
        off=(dropout_p, softcap, alibi_slopes, rng_state),
    )  # fmt: skip
    return torch.empty(1)


# As flash-attn does since 2.7, which hides the names of the arguments from inspect.signature.
_op = torch.library.custom_op
forward_2_7_op = _op("stand_in_flash_attn::forward", forward_2_7, mutates_args=(), device_types="cpu")
backward_2_7_op = _op(
    "stand_in_flash_attn::backward", backward_2_7, mutates_args=("dq", "dk", "dv"), device_types="cpu"
)


def _install(monkeypatch: pytest.MonkeyPatch, version: str, forward: Any, backward: Any) -> None:
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    package.__version__ = version  # type: ignore[attr-defined]
    interface._flash_attn_varlen_forward = forward  # type: ignore[attr-defined]
    interface._flash_attn_varlen_backward = backward  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)


@pytest.mark.parametrize(
    ("version", "forward", "backward"),
    [
        ("2.6.3", forward_2_6, backward_2_6),
        ("2.7.4", forward_2_7, backward_2_7),
        ("2.8.3", forward_2_7_op, backward_2_7_op),
    ],
)
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 20), (True, 1), (False, None)])
@pytest.mark.parametrize("head_dim", [16, 20])
def test_flash_attn_is_given_everything(
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    forward: Any,
    backward: Any,
    causal: bool,
    window: int | None,
    head_dim: int,
) -> None:
    _install(monkeypatch, version, forward, backward)
    calls.clear()
    segments = segments_of((9, 9), (30, 77), (1, 4))
    inputs = inputs_of(segments, (8, 2), torch.bfloat16, head_dim=head_dim)
    results = results_of(FlashAttnKernel(deterministic=True), inputs, segments, causal, 0.3, window)
    for name, result, expected in zip(
        RESULTS, results, results_of(CpuKernel(), inputs, segments, causal, 0.3, window), strict=True
    ):
        assert result.dtype == expected.dtype
        torch.testing.assert_close(result, expected, msg=lambda text, name=name: f"{name}: {text}")
    assert [call["scale"] for call in calls] == [0.3, 0.3]
    assert [call["off"] for call in calls] == [(0.0, 0.0, None, False, None), (0.0, 0.0, None, None)]
    assert calls[1]["deterministic"] is True


def test_flash_attn_is_deterministic_where_pytorch_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, "2.8.3", forward_2_7_op, backward_2_7_op)
    segments = documents_of(9)
    inputs = inputs_of(segments, (8, 2), torch.bfloat16)
    kernel = FlashAttnKernel()
    calls.clear()
    results_of(kernel, inputs, segments)
    torch.use_deterministic_algorithms(True)
    try:
        results_of(kernel, inputs, segments)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [call["deterministic"] for call in calls[1::2]] == [False, True]


def test_other_versions_of_flash_attn_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward_without_softcap(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                                softmax_scale, causal, window_size, alibi_slopes, return_softmax, block_table,
                                ):  # fmt: skip
        raise AssertionError("not to be called")

    def backward_with_more(sink, **arguments):
        raise AssertionError("not to be called")

    _install(monkeypatch, "2.5.9", forward_without_softcap, backward_2_6)
    with pytest.raises(ValueError, match=r"flash-attn 2.5.9 differs in the arguments softcap of _flash_attn_varlen_fo"):
        FlashAttnKernel()
    _install(monkeypatch, "4.0", forward_2_6, backward_with_more)
    with pytest.raises(ValueError, match=r"flash-attn 4.0 differs in the arguments .*sink.* versions 2.6 to 2.8 are"):
        FlashAttnKernel()
    _install(monkeypatch, "2.9", lambda **arguments: None, backward_2_6)
    with pytest.raises(ValueError, match="differs in the arguments"):
        FlashAttnKernel()
    del sys.modules["flash_attn.flash_attn_interface"]._flash_attn_varlen_forward
    with pytest.raises(ValueError, match="has no _flash_attn_varlen_forward"):
        FlashAttnKernel()


def test_torch_flash_takes_the_operators_as_they_are() -> None:
    """On meta tensors: that the call is well formed, and which shapes come back."""
    segments = segments_of((9, 9), (30, 77))
    for causal, window in ((True, None), (True, 5), (False, None)):
        inputs = [each.to("meta") for each in inputs_of(segments, (8, 2), torch.bfloat16, head_dim=20)]
        out, lse, dq, dk, dv = results_of(TorchFlashKernel(), inputs, segments, causal, 0.3, window)
        assert out.shape == dq.shape == (39, 8, 20)
        assert dk.shape == dv.shape == (86, 2, 20)
        assert (tuple(lse.shape), lse.dtype) == ((8, 39), torch.float32)


def test_what_flash_attention_cannot_do_is_refused() -> None:
    segments = documents_of(4)
    for dtype, head_dim, message in (
        (torch.float32, 16, "float16 or bfloat16, not torch.float32"),
        (torch.bfloat16, 264, "head_dim of at most 256, not 264"),
    ):
        with pytest.raises(ValueError, match=message):
            results_of(TorchFlashKernel(), inputs_of(segments, (2, 2), dtype, head_dim=head_dim), segments)


CUDA = torch.device("cuda")


@pytest.fixture
def torch_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    _forget()


@pytest.mark.usefixtures("torch_flash")
def test_cuda_takes_flash_attn_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(kernel_for(CUDA), TorchFlashKernel)
        _install(monkeypatch, "2.7.4", forward_2_7, backward_2_7)
        assert isinstance(kernel_for(CUDA), TorchFlashKernel)  # chosen once
        _forget()
        assert isinstance(kernel_for(CUDA), FlashAttnKernel)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: pytest.fail("looked for again"))
        assert kernel_for(CUDA) is kernel_for(torch.device("cuda", 1))


def test_cuda_needs_one_of_the_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    with pytest.raises(ValueError, match="needs a PyTorch built for CUDA"):
        kernel_for(CUDA)


@pytest.mark.usefixtures("torch_flash")
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ImportError("undefined symbol: _ZN3c10"), "undefined symbol: _ZN3c10"),
        (OSError("libcudart.so.11.0: cannot open"), "libcudart.so.11.0"),
        (None, "flash-attn 2.5.9 has no _flash_attn_varlen_forward"),
    ],
    ids=["another PyTorch", "another CUDA", "too old"],
)
def test_flash_attn_that_cannot_be_used_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, message: str
) -> None:
    _install(monkeypatch, "2.5.9", None, backward_2_6)
    if error is None:
        del sys.modules["flash_attn.flash_attn_interface"]._flash_attn_varlen_forward
    else:
        imported = importlib.import_module

        def broken(name: str) -> ModuleType:
            if name.startswith("flash_attn"):
                raise error
            return imported(name)

        monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.warns(RuntimeWarning, match=f"cannot be used, so attention takes 'torch_flash'.*{message}") as told:
        found = [kernel_for(CUDA) for _ in range(3)]
    assert len(told) == 1
    assert all(isinstance(each, TorchFlashKernel) for each in found)
    with pytest.raises((ValueError, OSError), match=message):
        kernel_for(CUDA, "flash_attn")  # who asks for it by name is refused
