"""Kernels against dense attention with an explicit mask in float64."""

import math
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_libra_lightning.libra.cpu_kernel import CpuKernel
from odb_libra_lightning.libra.flash_kernels import TorchFlashKernel
from odb_libra_lightning.libra.kernel_interface import check_inputs, merge_parts, score_scale
from odb_libra_lightning.libra.kernels import KERNELS, kernel_for
from odb_libra_lightning.libra.segments import Segments
from tests.libra.kernel_cases import (
    HEAD_DIM,
    RESULTS,
    assert_close,
    dense_results,
    documents_of,
    inputs_of,
    results_of,
    segments_of,
    visible_pairs,
)

HEADS = [(8, 1), (8, 2), (8, 8), (28, 7)]
SOME_HEADS = [(8, 1), (8, 2), *(pytest.param(heads, marks=pytest.mark.full) for heads in ((8, 8), (28, 7)))]
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
    segments = segments_of(*((queries, queries + earlier) for queries, earlier in sizes))
    inputs = inputs_of(segments, heads)
    results = results_of(CpuKernel(grouped_heads=grouped_heads), inputs, segments, True, scale, window)
    assert all(result.dtype == torch.float64 for result in results)
    assert_close(results, dense_results(inputs, segments, True, scale, window), 1e-10)


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.tuples(lengths, lengths), min_size=1, max_size=4), heads=st.sampled_from(HEADS))
def test_segments_without_causality_equal_dense_attention(sizes: list[tuple[int, int]], heads: tuple[int, int]) -> None:
    segments = segments_of(*sizes)
    inputs = inputs_of(segments, heads)
    assert_close(
        results_of(CpuKernel(), inputs, segments, False), dense_results(inputs, segments, False, 0.25, None), 1e-10
    )


@pytest.mark.parametrize(
    ("causal", "window"),
    [(True, None), *(pytest.param(*case, marks=pytest.mark.full) for case in ((True, 100), (False, None)))],
)
def test_many_short_segments_share_calls_and_a_long_one_does_not(causal: bool, window: int | None) -> None:
    segments = segments_of((700, 900), *((n, n) for n in [1, 2, 3, 4, 9, 8, 8, 8, 15, 16, 1, 1, 33, 34, 33] * 2))
    inputs = inputs_of(segments, (2, 1))
    expected = dense_results(inputs, segments, causal, 0.25, window)
    assert_close(results_of(CpuKernel(), inputs, segments, causal, 0.25, window), expected, 1e-10)


@pytest.mark.parametrize("heads", SOME_HEADS)
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 50), (False, None)])
def test_float32(heads: tuple[int, int], causal: bool, window: int | None) -> None:
    segments = segments_of((1, 1), (2, 5), (3, 3), (130, 333), (65, 65), (64, 64), (1, 70))
    inputs = inputs_of(segments, heads, torch.float32)
    results = results_of(CpuKernel(), inputs, segments, causal, 0.25, window)
    assert all(result.dtype == torch.float32 for result in results)
    assert_close(results, dense_results(inputs, segments, causal, 0.25, window), 1e-5)


def _sdpa(inputs: list[torch.Tensor], segments: Segments) -> tuple[torch.Tensor, ...]:
    """Dense attention as PyTorch computes it in the dtype of the inputs."""
    q, k, v = (each.clone().requires_grad_() for each in inputs[:3])
    q_1hsd, k_1hsd, v_1hsd = (each.transpose(0, 1)[None] for each in (q, k, v))
    mask = visible_pairs(segments, True, None)
    out = F.scaled_dot_product_attention(q_1hsd, k_1hsd, v_1hsd, mask, scale=0.25, enable_gqa=True)[0].transpose(0, 1)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("logits", [1, 100])
@pytest.mark.parametrize("heads", [(8, 1), pytest.param((8, 8), marks=pytest.mark.full)])
def test_no_less_exact_than_pytorch(dtype: torch.dtype, logits: int, heads: tuple[int, int]) -> None:
    """Short documents in full, and a tile that is put together from two parts; logits times 100 too."""
    segments = segments_of((33, 33), (7, 7), (150, 400), (5, 5), (120, 120))
    inputs = inputs_of(segments, heads, dtype)
    inputs[0] *= logits
    exact = dense_results(inputs, segments, True, 0.25, None)
    ours = results_of(CpuKernel(), inputs, segments)
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
        results = results_of(kernel, inputs_of(nothing, (8, 2), dtype), nothing)
        shapes = [(0, 8, HEAD_DIM), (8, 0), (0, 8, HEAD_DIM), (0, 2, HEAD_DIM), (0, 2, HEAD_DIM)]
        assert [tuple(result.shape) for result in results] == shapes


def test_gradients_of_the_parts_of_a_softmax_add_up() -> None:
    """Ring attention: keys in two parts, each part's backward with the merged output and log-sum-exp."""
    whole = segments_of((40, 90), (3, 65))
    inputs = inputs_of(whole, (8, 2))
    q, k, v, grad_out = inputs
    exact = dense_results(inputs, whole, False, 0.25, None)
    rows = [
        torch.cat([torch.arange(0, 60), torch.arange(90, 91)]),
        torch.cat([torch.arange(60, 90), torch.arange(91, 155)]),
    ]
    parts = [segments_of((40, 60), (3, 1)), segments_of((40, 30), (3, 64))]
    options: Any = {"causal": False, "scale": 0.25, "window": None}
    kernel = CpuKernel()
    outs, lses = zip(
        *(kernel.forward(q, k[row], v[row], part, **options) for row, part in zip(rows, parts, strict=True)),
        strict=True,
    )
    (out, more), (lse, more_lse) = outs, lses
    merge_parts(out, lse, more, more_lse)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for row, part in zip(rows, parts, strict=True):
        part_q, dk[row], dv[row] = kernel.backward(grad_out, q, k[row], v[row], out, lse, part, **options)
        dq += part_q
    assert_close((out, lse, dq, dk, dv), exact, 1e-10)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("poison", [1.0, math.nan, math.inf])
@pytest.mark.parametrize("changed", [0, 3, 6])
def test_documents_are_isolated_to_the_last_bit(window: int | None, poison: float, changed: int) -> None:
    segments = segments_of((9, 9), (8, 8), (7, 7), (130, 200), (9, 9), (1, 1), (70, 70))
    inputs = inputs_of(segments, (8, 2), torch.float32)
    before = results_of(CpuKernel(), inputs, segments, window=window)
    query, key = segments.query_starts[changed], segments.key_starts[changed]
    for tensor, row in zip(inputs, (query, key, key, query), strict=True):
        tensor[row] += poison
    after = results_of(CpuKernel(), inputs, segments, window=window)
    for name, old, new in zip(RESULTS, before, after, strict=True):
        starts = segments.key_starts if name in ("dk", "dv") else segments.query_starts
        mine = torch.zeros(starts[-1], dtype=torch.bool)
        mine[starts[changed] : starts[changed + 1]] = True
        old, new = (each.t() if name == "lse" else each for each in (old, new))
        assert torch.equal(old[~mine], new[~mine]), name
        assert not torch.equal(old[mine], new[mine]), name


def test_any_layout_in_memory() -> None:
    """Slices of heads, transposed heads, and the gradient of a sum, which is one number repeated."""
    segments = documents_of(40, 3, 2)
    q, k, v, _ = inputs_of(segments, (16, 2))
    inputs = [
        q[:, 4:12],
        k.transpose(1, 2).contiguous().transpose(1, 2),
        v,
        torch.ones(1, 1, 1).double().expand(45, 8, 16),
    ]
    assert_close(results_of(CpuKernel(), inputs, segments), dense_results(inputs, segments, True, 0.25, None), 1e-10)


def test_segments_without_keys_or_queries_are_refused() -> None:
    """Kernels end the process where there are no keys."""
    with pytest.raises(ValueError, match="segment 0 has 3 queries and 0 keys"):
        segments_of((3, 0))
    with pytest.raises(ValueError, match="segment 1 has 0 queries and 3 keys"):
        segments_of((1, 1), (0, 3))
    segments = segments_of((4, 3))
    with pytest.raises(ValueError, match="no more queries than keys"):
        results_of(CpuKernel(), inputs_of(segments, (8, 2)), segments, True)


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
            check(q, k, v, documents_of(2, 3))


def test_windows_that_do_not_fit() -> None:
    segments = documents_of(5)
    for causal, window, message in ((False, 3, "needs causal attention; it is 3"), (True, 0, "1 key; it is 0")):
        with pytest.raises(ValueError, match=message):
            results_of(CpuKernel(), inputs_of(segments, (8, 2)), segments, causal, window=window)


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
    assert kernel_for(torch.device("cuda"), own) is own


@pytest.mark.parametrize(
    ("kernel", "what"),
    [(3, "a int"), (CpuKernel, "the class CpuKernel"), (lambda: None, "a function"), (["cpu"], "a list")],
)
def test_what_is_neither_a_name_nor_a_kernel_is_refused(kernel: Any, what: str) -> None:
    with pytest.raises(TypeError, match=f"kernel is {what}: expected a name or an AttentionKernel"):
        kernel_for(torch.device("cpu"), kernel)


def test_scales() -> None:
    assert [score_scale(scale, 64) for scale in (None, 0.3, 2)] == [0.125, 0.3, 2.0]
    for scale in (0, -0.5, math.inf, math.nan, "1"):
        with pytest.raises(ValueError, match=f"scale={scale!r}: expected a finite number above 0"):
            score_scale(scale, 64)  # type: ignore[arg-type]


@pytest.mark.parametrize("logits", [1, 100])
@pytest.mark.parametrize("parts", [2, 16])
def test_merged_parts_are_as_exact_as_one_softmax(logits: int, parts: int) -> None:
    """The weights add up to one, however large scores are: a mean of equal values is that value."""
    generator = torch.Generator().manual_seed(0)
    scores = 10.0 * logits + torch.randn(4, 50, 64, generator=generator)
    v = torch.randn(64, 4, 8, generator=generator)
    v[..., 0] = 1

    def attention(scores: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)

    out, lse = torch.zeros(50, 4, 8), torch.full((4, 50), -math.inf)
    for part_scores, part_v in zip(scores.chunk(parts, -1), v.chunk(parts), strict=True):
        merge_parts(out, lse, *attention(part_scores, part_v))
    exact, exact_lse = attention(scores.double(), v.double())
    whole, _ = attention(scores, v)
    # A log-sum-exp of 1,000 is rounded by 3e-5 in every part, and parts weigh by it.
    assert (out[..., 0] - 1).abs().max() < 1e-6
    assert (out.double() - exact).abs().max() < (1e-6 if logits == 1 else 1e-4)
    assert (whole.double() - exact).abs().max() < 1e-6
    assert (lse.double() - exact_lse).abs().max() < 1e-6 * exact_lse.abs().max()
