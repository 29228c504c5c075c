"""Kernels against dense attention with an explicit mask in float64."""

import importlib.machinery
import math
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_libra_lightning.libra import kernels
from odb_libra_lightning.libra.cpu_kernel import CpuKernel
from odb_libra_lightning.libra.flash_kernels import FlashAttnKernel, TorchFlashKernel
from odb_libra_lightning.libra.kernels import KERNELS, AttentionKernel, check_inputs, kernel_for
from odb_libra_lightning.libra.segments import Segments

HEADS = [(8, 1), (8, 2), (8, 8), (28, 7)]
HEAD_DIM = 16
RESULTS = ("out", "lse", "dq", "dk", "dv")


def _segments(*lengths: tuple[int, int]) -> Segments:
    return Segments(query_lengths=tuple(q for q, _ in lengths), key_lengths=tuple(k for _, k in lengths))


def _documents(*lengths: int) -> Segments:
    return Segments(query_lengths=lengths, key_lengths=lengths)


def _inputs(
    segments: Segments,
    heads: tuple[int, int],
    dtype: torch.dtype = torch.float64,
    *,
    head_dim: int = HEAD_DIM,
    seed: int = 0,
) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    queries, keys = sum(segments.query_lengths), sum(segments.key_lengths)
    shapes = [(queries, heads[0]), (keys, heads[1]), (keys, heads[1]), (queries, heads[0])]
    return [torch.randn(*shape, head_dim, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def _visible(segments: Segments, causal: bool, window: int | None) -> torch.Tensor:
    """The mask, [queries, keys], pair by pair."""
    blocks = []
    for queries, keys in zip(segments.query_lengths, segments.key_lengths, strict=True):
        block = torch.ones(queries, keys, dtype=torch.bool)
        for row in range(queries):
            own = keys - queries + row
            if causal:
                block[row, own + 1 :] = False
                if window is not None:
                    block[row, : max(0, own + 1 - window)] = False
        blocks.append(block)
    return torch.block_diag(*blocks).bool() if blocks else torch.ones(0, 0, dtype=torch.bool)


def _dense(
    inputs: list[torch.Tensor], segments: Segments, causal: bool, scale: float, window: int | None
) -> tuple[torch.Tensor, ...]:
    q, k, v, grad_out = (each.double() for each in inputs)
    q, k, v = (each.requires_grad_() for each in (q.clone(), k.clone(), v.clone()))
    group = q.shape[1] // k.shape[1]
    scores = scale * torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1))
    scores = scores.masked_fill(~_visible(segments, causal, window), -math.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(group, 1))
    grads = torch.autograd.grad(out, (q, k, v), grad_out)
    return (out.detach(), scores.logsumexp(-1).detach(), *grads)


def _run(
    kernel: AttentionKernel,
    inputs: list[torch.Tensor],
    segments: Segments,
    causal: bool = True,
    scale: float = 0.25,
    window: int | None = None,
) -> tuple[torch.Tensor, ...]:
    q, k, v, grad_out = inputs
    options: Any = {"causal": causal, "scale": scale, "window": window}
    out, lse = kernel.forward(q, k, v, segments, **options)
    return (out, lse, *kernel.backward(grad_out, q, k, v, out, lse, segments, **options))


def _assert_close(results: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], tolerance: float) -> None:
    for name, result, right in zip(RESULTS, results, expected, strict=True):
        assert result.shape == right.shape, name
        if right.numel():
            error = (result.double() - right).abs().max() / right.abs().max().clamp(min=1)
            assert error < tolerance, f"{name}: {error}"


lengths = st.sampled_from([1, 2, 3, 5, 17, 31, 64, 65, 100])
pairs = st.tuples(lengths, st.sampled_from([0, 0, 1, 3, 70]))


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(pairs, min_size=1, max_size=4),
    heads=st.sampled_from(HEADS),
    window=st.sampled_from([None, None, 1, 2, 7, 63, 64, 65, 100, 1000]),
    scale=st.sampled_from([0.25, 1.0, 0.03]),
    grouped_heads=st.sampled_from([None, False]),
)
def test_causal_segments_equal_dense_attention(
    sizes: list[tuple[int, int]],
    heads: tuple[int, int],
    window: int | None,
    scale: float,
    grouped_heads: bool | None,
) -> None:
    segments = _segments(*((queries, queries + earlier) for queries, earlier in sizes))
    inputs = _inputs(segments, heads)
    results = _run(CpuKernel(grouped_heads=grouped_heads), inputs, segments, True, scale, window)
    assert all(result.dtype == torch.float64 for result in results)
    _assert_close(results, _dense(inputs, segments, True, scale, window), 1e-10)


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.tuples(lengths, lengths), min_size=1, max_size=4), heads=st.sampled_from(HEADS))
def test_segments_without_causality_equal_dense_attention(sizes: list[tuple[int, int]], heads: tuple[int, int]) -> None:
    segments = _segments(*sizes)
    inputs = _inputs(segments, heads)
    _assert_close(_run(CpuKernel(), inputs, segments, False), _dense(inputs, segments, False, 0.25, None), 1e-10)


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 100), (False, None)])
def test_many_short_segments_share_calls_and_a_long_one_does_not(causal: bool, window: int | None) -> None:
    segments = _segments((700, 900), *((n, n) for n in [1, 2, 3, 4, 9, 8, 8, 8, 15, 16, 1, 1, 33, 34, 33] * 2))
    inputs = _inputs(segments, (2, 1))
    expected = _dense(inputs, segments, causal, 0.25, window)
    _assert_close(_run(CpuKernel(), inputs, segments, causal, 0.25, window), expected, 1e-10)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 50), (False, None)])
def test_float32(heads: tuple[int, int], causal: bool, window: int | None) -> None:
    segments = _segments((1, 1), (2, 5), (3, 3), (130, 333), (65, 65), (64, 64), (1, 70))
    inputs = _inputs(segments, heads, torch.float32)
    results = _run(CpuKernel(), inputs, segments, causal, 0.25, window)
    assert all(result.dtype == torch.float32 for result in results)
    _assert_close(results, _dense(inputs, segments, causal, 0.25, window), 1e-5)


def _sdpa(inputs: list[torch.Tensor], segments: Segments) -> tuple[torch.Tensor, ...]:
    """Dense attention as PyTorch computes it in the dtype of the inputs."""
    q, k, v = (each.clone().requires_grad_() for each in inputs[:3])
    q_1hsd, k_1hsd, v_1hsd = (each.transpose(0, 1)[None] for each in (q, k, v))
    mask = _visible(segments, True, None)
    out = F.scaled_dot_product_attention(q_1hsd, k_1hsd, v_1hsd, mask, scale=0.25, enable_gqa=True)[0].transpose(0, 1)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("logits", [1, 100])
@pytest.mark.parametrize("heads", [(8, 1), (8, 8)])
def test_no_less_exact_than_pytorch(dtype: torch.dtype, logits: int, heads: tuple[int, int]) -> None:
    """Short documents in full, and a tile that is put together from two parts; logits times 100 too."""
    segments = _segments((33, 33), (7, 7), (150, 400), (5, 5), (120, 120))
    inputs = _inputs(segments, heads, dtype)
    inputs[0] *= logits
    exact = _dense(inputs, segments, True, 0.25, None)
    ours = _run(CpuKernel(), inputs, segments)
    assert ours[1].dtype == torch.float32
    assert all(result.dtype == dtype for result in (ours[0], *ours[2:]))
    assert all(bool(result.isfinite().all()) for result in ours)
    for name, result, peer, right in zip(
        ("out", "dq", "dk", "dv"), (ours[0], *ours[2:]), _sdpa(inputs, segments), (exact[0], *exact[2:]), strict=True
    ):
        error, theirs = ((each.double() - right).norm() / right.norm() for each in (result, peer))
        assert error <= 1.5 * theirs + 1e-7, f"{name}: {error} against {theirs}"


def test_no_segments() -> None:
    nothing = Segments(query_lengths=(), key_lengths=())
    for kernel, dtype in ((CpuKernel(), torch.float32), (TorchFlashKernel(), torch.bfloat16)):
        results = _run(kernel, _inputs(nothing, (8, 2), dtype), nothing)
        shapes = [(0, 8, HEAD_DIM), (8, 0), (0, 8, HEAD_DIM), (0, 2, HEAD_DIM), (0, 2, HEAD_DIM)]
        assert [tuple(result.shape) for result in results] == shapes


def test_gradients_of_the_parts_of_a_softmax_add_up() -> None:
    """Ring attention: keys in two parts, each part's backward with the merged output and log-sum-exp."""
    whole = _segments((40, 90), (3, 65))
    inputs = _inputs(whole, (8, 2))
    q, k, v, grad_out = inputs
    exact = _dense(inputs, whole, False, 0.25, None)
    rows = [
        torch.cat([torch.arange(0, 60), torch.arange(90, 91)]),
        torch.cat([torch.arange(60, 90), torch.arange(91, 155)]),
    ]
    parts = [_segments((40, 60), (3, 1)), _segments((40, 30), (3, 64))]
    options: Any = {"causal": False, "scale": 0.25, "window": None}
    kernel = CpuKernel()
    outs, lses = zip(
        *(kernel.forward(q, k[row], v[row], part, **options) for row, part in zip(rows, parts, strict=True)),
        strict=True,
    )
    lse = torch.logaddexp(*lses)
    out = sum(each * (part - lse).exp().t()[..., None] for each, part in zip(outs, lses, strict=True))
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for row, part in zip(rows, parts, strict=True):
        part_q, dk[row], dv[row] = kernel.backward(grad_out, q, k[row], v[row], out, lse, part, **options)
        dq += part_q
    _assert_close((out, lse, dq, dk, dv), exact, 1e-10)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("poison", [1.0, math.nan, math.inf])
@pytest.mark.parametrize("changed", [0, 3, 6])
def test_documents_are_isolated_to_the_last_bit(window: int | None, poison: float, changed: int) -> None:
    segments = _segments((9, 9), (8, 8), (7, 7), (130, 200), (9, 9), (1, 1), (70, 70))
    inputs = _inputs(segments, (8, 2), torch.float32)
    before = _run(CpuKernel(), inputs, segments, window=window)
    query, key = segments.query_starts[changed], segments.key_starts[changed]
    for tensor, row in zip(inputs, (query, key, key, query), strict=True):
        tensor[row] += poison
    after = _run(CpuKernel(), inputs, segments, window=window)
    for name, old, new in zip(RESULTS, before, after, strict=True):
        starts = segments.key_starts if name in ("dk", "dv") else segments.query_starts
        mine = torch.zeros(starts[-1], dtype=torch.bool)
        mine[starts[changed] : starts[changed + 1]] = True
        old, new = (each.t() if name == "lse" else each for each in (old, new))
        assert torch.equal(old[~mine], new[~mine]), name
        assert not torch.equal(old[mine], new[mine]), name


def test_any_layout_in_memory() -> None:
    """Slices of heads, transposed heads, and the gradient of a sum, which is one number repeated."""
    segments = _documents(40, 3, 2)
    q, k, v, _ = _inputs(segments, (16, 2))
    inputs = [
        q[:, 4:12],
        k.transpose(1, 2).contiguous().transpose(1, 2),
        v,
        torch.ones(1, 1, 1).double().expand(45, 8, 16),
    ]
    _assert_close(_run(CpuKernel(), inputs, segments), _dense(inputs, segments, True, 0.25, None), 1e-10)


def test_segments_without_keys_or_queries_are_refused() -> None:
    """Kernels end the process where there are no keys."""
    with pytest.raises(ValueError, match="segment 0 has 3 queries and 0 keys"):
        _segments((3, 0))
    with pytest.raises(ValueError, match="segment 1 has 0 queries and 3 keys"):
        _segments((1, 1), (0, 3))
    segments = _segments((4, 3))
    with pytest.raises(ValueError, match="no more queries than keys"):
        _run(CpuKernel(), _inputs(segments, (8, 2)), segments, True)


def _empty(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        (_empty(5, 8, 4), _empty(5, 2, 4), _empty(5, 2, 4, dtype=torch.bfloat16), "one dtype.*bfloat16"),
        (*[_empty(5, 8, 4, dtype=torch.int32)] * 3, "floating-point dtype, not torch.int32"),
        (_empty(5, 8, 4), _empty(5, 2, 4, device="meta"), _empty(5, 2, 4), "one device, not cpu, meta"),
        (_empty(1, 5, 8, 4), _empty(5, 2, 4), _empty(5, 2, 4), r"\[tokens, heads, head_dim\], not q \(1, 5, 8, 4\)"),
        (_empty(5, 8, 4), _empty(5, 2, 4), _empty(5, 2, 8), "one shape"),
        (_empty(5, 8, 8), _empty(5, 2, 4), _empty(5, 2, 4), "the head_dim of q"),
        (
            _empty(5, 8, 4),
            _empty(5, 3, 4),
            _empty(5, 3, 4),
            r"multiple of that of KV heads, not q \(5, 8, 4\), k \(5, 3",
        ),
        (_empty(5, 8, 4), _empty(5, 0, 4), _empty(5, 0, 4), "multiple of that of KV heads"),
        (_empty(6, 8, 4), _empty(5, 2, 4), _empty(5, 2, 4), "5 queries and 5 keys, but the tensors are q"),
    ],
)
def test_inputs_that_do_not_fit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, message: str) -> None:
    for check in (check_inputs, lambda *args: CpuKernel().forward(*args, causal=True, scale=1.0, window=None)):
        with pytest.raises(ValueError, match=message):
            check(q, k, v, _documents(2, 3))


def test_windows_that_do_not_fit() -> None:
    segments = _documents(5)
    for causal, window, message in ((False, 3, "needs causal attention; it is 3"), (True, 0, "1 key; it is 0")):
        with pytest.raises(ValueError, match=message):
            _run(CpuKernel(), _inputs(segments, (8, 2)), segments, causal, window=window)


def test_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(kernel_for(torch.device("cpu")), CpuKernel)
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # as if it were not installed
    with pytest.raises(
        ValueError, match="no attention kernel is called 'flesh'; there are cpu, flash_attn, torch_flash"
    ):
        kernel_for(torch.device("cpu"), "flesh")
    with pytest.raises(ValueError, match="needs the package flash-attn"):
        kernel_for(torch.device("cuda"), "flash_attn")
    with pytest.raises(ValueError, match="no attention kernel is known for mps"):
        kernel_for(torch.device("mps"))
    own = CpuKernel()
    monkeypatch.setitem(KERNELS, "own", lambda: own)
    assert kernel_for(torch.device("cuda"), "own") is own


@pytest.fixture(autouse=True)
def _no_kernel_of_another_test() -> Iterator[None]:
    yield
    kernels._made.cache_clear()


def test_cuda_takes_flash_attn_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    assert isinstance(kernel_for(torch.device("cuda")), TorchFlashKernel)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    kernels._made.cache_clear()
    with pytest.raises(ValueError, match="needs a PyTorch built for CUDA"):
        kernel_for(torch.device("cuda"))
    monkeypatch.undo()
    _install(monkeypatch, "2.7.4", forward_2_7, backward_2_7)
    assert isinstance(kernel_for(torch.device("cuda")), FlashAttnKernel)


# --- flash-attn: stand-ins with the signatures of its versions, which compute on the CPU kernel -----------------------

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
    segments = _segments((9, 9), (30, 77), (1, 4))
    inputs = _inputs(segments, (8, 2), torch.bfloat16, head_dim=head_dim)
    results = _run(FlashAttnKernel(deterministic=True), inputs, segments, causal, 0.3, window)
    for name, result, expected in zip(
        RESULTS, results, _run(CpuKernel(), inputs, segments, causal, 0.3, window), strict=True
    ):
        assert result.dtype == expected.dtype
        torch.testing.assert_close(result, expected, msg=lambda text, name=name: f"{name}: {text}")
    assert [call["scale"] for call in calls] == [0.3, 0.3]
    assert [call["off"] for call in calls] == [(0.0, 0.0, None, False, None), (0.0, 0.0, None, None)]
    assert calls[1]["deterministic"] is True


def test_flash_attn_is_deterministic_where_pytorch_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, "2.8.3", forward_2_7_op, backward_2_7_op)
    segments = _documents(9)
    inputs = _inputs(segments, (8, 2), torch.bfloat16)
    kernel = FlashAttnKernel()
    calls.clear()
    _run(kernel, inputs, segments)
    torch.use_deterministic_algorithms(True)
    try:
        _run(kernel, inputs, segments)
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
    segments = _segments((9, 9), (30, 77))
    for causal, window in ((True, None), (True, 5), (False, None)):
        inputs = [each.to("meta") for each in _inputs(segments, (8, 2), torch.bfloat16, head_dim=20)]
        out, lse, dq, dk, dv = _run(TorchFlashKernel(), inputs, segments, causal, 0.3, window)
        assert out.shape == dq.shape == (39, 8, 20)
        assert dk.shape == dv.shape == (86, 2, 20)
        assert (tuple(lse.shape), lse.dtype) == ((8, 39), torch.float32)


def test_what_flash_attention_cannot_do_is_refused() -> None:
    segments = _documents(4)
    for dtype, head_dim, message in (
        (torch.float32, 16, "float16 or bfloat16, not torch.float32"),
        (torch.bfloat16, 264, "head_dim of at most 256, not 264"),
    ):
        with pytest.raises(ValueError, match=message):
            _run(TorchFlashKernel(), _inputs(segments, (2, 2), dtype, head_dim=head_dim), segments)
