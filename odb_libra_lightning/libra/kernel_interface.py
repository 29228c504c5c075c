"""What an attention kernel promises, and the rules that all of them share."""

from __future__ import annotations

import math
from typing import Protocol

import torch

from odb_libra_lightning.libra.segments import Segments


class AttentionKernel(Protocol):
    """Exact attention over segments, forward and backward, without autograd."""

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
        """Compute attention of every segment's queries over its keys.

        Args:
            q: queries of all segments, [Tq, query heads, D].
            k: keys of all segments, [Tk, KV heads, D]. KV heads divide query heads: query heads `g*i` to `g*(i+1) - 1`
                use KV head `i`.
            v: values, like `k`.
            segments: runs of `q` and `k`. None at all: nothing is computed.
            causal: causal attention, aligned to the bottom right of each segment.
            scale: what scores are multiplied by.
            window: under causal attention, how many keys a query sees at most, its own included; None: all.

        Returns:
            The output, [Tq, query heads, D] in the dtype of `q`, and the natural logarithm of the sum of the
            exponentials of each query's scaled scores, [query heads, Tq], float32 (float64 where `q` is).

        Raises:
            ValueError: dtypes, devices or shapes do not fit each other, the segments or the kernel.
        """

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
        """Compute gradients with respect to queries, keys and values.

        `out` and `lse` may be those of a larger softmax of which these keys are a part: the gradients are then this
        part's contributions, and those of all parts add up.

        Args:
            grad_out: gradient of `out`, like `out`.
            q: as in `forward`.
            k: as in `forward`.
            v: as in `forward`.
            out: what `forward` returned, or the output of the larger softmax.
            lse: its log-sum-exp.
            segments: as in `forward`.
            causal: as in `forward`.
            scale: as in `forward`.
            window: as in `forward`.

        Returns:
            The gradients of `q`, `k` and `v`, each in its input's shape and dtype.

        Raises:
            ValueError: as in `forward`.
        """


def score_scale(scale: float | None, head_dim: int) -> float:
    """What scores are multiplied by: `scale`, or `head_dim ** -0.5` where it is None.

    Raises:
        ValueError: it is no finite number above 0. Kernels mask scores with minus infinity before they scale them,
            which a number below 0 would make plus infinity.
    """
    if scale is None:
        return float(head_dim**-0.5)
    if not (isinstance(scale, int | float) and 0 < scale < math.inf):
        raise ValueError(f"scale={scale!r}: expected a finite number above 0, or None for head_dim ** -0.5")
    return float(scale)


def merge_parts(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Take attention over further keys into attention over some keys, in place.

    Parts weigh as the sums of their exponentials. Their weights are not `exp(lse - total)` each: where scores are
    large, so is what `lse` is rounded by, and these would not add up to one.

    Args:
        out: output over the keys so far, [n, heads, D]; 0 where there were none.
        lse: its log-sum-exp, [heads, n]; minus infinity where there were none.
        part: output of the same queries over further keys, at least one for each, like `out`, in any dtype.
        part_lse: its log-sum-exp, like `lse`.
    """
    part_lse = part_lse.to(lse.dtype)
    weight = (part_lse - lse).sigmoid_().t().unsqueeze(-1)
    out.lerp_(part.to(out.dtype), weight.to(out.dtype))
    torch.logaddexp(lse, part_lse, out=lse)


def check_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: Segments,
    *,
    causal: bool = False,
    window: int | None = None,
) -> None:
    """Refuse tensors that do not fit each other or the segments.

    Args:
        q: queries, [Tq, query heads, D].
        k: keys, [Tk, KV heads, D].
        v: values, [Tk, KV heads, D].
        segments: runs of `q` and `k`.
        causal: whether attention is causal.
        window: keys that a query sees at most.

    Raises:
        ValueError: says in one sentence what does not fit.
    """
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, not {q.dtype}, {k.dtype} and {v.dtype}")
    if not q.is_floating_point():
        raise ValueError(f"q, k and v must be of a floating-point dtype, not {q.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device, not {q.device}, {k.device} and {v.device}")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 3:
        raise ValueError(f"q, k and v must be [tokens, heads, head_dim], not {shapes}")
    if k.shape != v.shape or q.shape[2] != k.shape[2]:
        raise ValueError(f"k and v must have one shape, and the head_dim of q, not {shapes}")
    if k.shape[1] < 1 or q.shape[1] % k.shape[1] or q.shape[1] < 1 or q.shape[2] < 1:
        raise ValueError(f"the number of query heads must be a multiple of that of KV heads, not {shapes}")
    rows = segments.query_starts[-1], segments.key_starts[-1]
    if rows != (q.shape[0], k.shape[0]):
        raise ValueError(f"the segments have {rows[0]} queries and {rows[1]} keys, but the tensors are {shapes}")
    if window is not None and (not causal or window < 1):
        needs = "at least 1 key" if causal else "causal attention"
        raise ValueError(f"a sliding window needs {needs}; it is {window}")
