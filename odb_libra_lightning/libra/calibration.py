"""What the latency model knows of a cluster: kernel speed and links, as a JSON file that a benchmark can write.

The default is an assumption, put together from data sheets. It has not been measured, and says so in its `source`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import reprlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from odb_libra_lightning.libra.whole_numbers import checked_count


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Figures of one kind of cluster.

    Attributes:
        source: where the figures come from, in words.
        peak_flops: FLOP/s of a worker's attention kernel at efficiency 1.
        efficiency_rows: query rows of a segment, one for each row of `efficiency`, ascending.
        efficiency_heads: query heads of a kernel call, one for each column of `efficiency`, ascending.
        efficiency: share of `peak_flops` that a varlen call reaches on segments of so many rows with so many heads.
        backward_ratio: seconds of backward to seconds of forward. FlashAttention's backward does 5 matrix products
            against 2.
        launch_seconds: what a kernel call costs however little it computes.
        workers_per_node: consecutive workers that share a node.
        intra_node_alpha: seconds that an exchange within a node costs however little it carries.
        intra_node_beta: bytes/s of a worker to the others of its node, in each direction.
        inter_node_alpha: seconds that an exchange across nodes costs however little it carries.
        inter_node_beta: bytes/s of a worker to other nodes, in each direction.

    Raises:
        ValueError: no source; a figure that is not a number above 0 (0 is allowed for `launch_seconds` and the two
            alphas), or beyond what can be computed with; an efficiency above 1; a table that does not fit its axes.
    """

    source: str
    peak_flops: float
    efficiency_rows: tuple[int, ...]
    efficiency_heads: tuple[int, ...]
    efficiency: tuple[tuple[float, ...], ...]
    backward_ratio: float
    launch_seconds: float
    workers_per_node: int
    intra_node_alpha: float
    intra_node_beta: float
    inter_node_alpha: float
    inter_node_beta: float

    def __post_init__(self) -> None:
        if not isinstance(self.source, str) or not self.source.strip() or not self.source.isprintable():
            raise ValueError(f"source: expected a line of text that says where figures come from, got {self.source!r}")
        for name in _FIGURES:
            object.__setattr__(self, name, _figure(name, getattr(self, name), or_zero=name in _MAY_BE_ZERO))
        object.__setattr__(self, "workers_per_node", checked_count("workers_per_node", self.workers_per_node))
        for name in ("efficiency_rows", "efficiency_heads"):
            axis = tuple(checked_count(name, value) for value in _sequence(name, getattr(self, name)))
            if list(axis) != sorted(set(axis)):
                raise ValueError(f"{name}: expected ascending numbers, each once, got {list(axis)}")
            object.__setattr__(self, name, axis)
        table = tuple(_sequence("efficiency", row) for row in _sequence("efficiency", self.efficiency))
        rows, heads = len(self.efficiency_rows), len(self.efficiency_heads)
        if len(table) != rows or any(len(row) != heads for row in table):
            raise ValueError(
                f"efficiency: expected {rows} rows of {heads} numbers, one for each of efficiency_rows and "
                f"efficiency_heads, got rows of {[len(row) for row in table]}"
            )
        shares = tuple(tuple(_figure("efficiency", value, most=1.0) for value in row) for row in table)
        object.__setattr__(self, "efficiency", shares)

    def efficiency_at(self, rows: ArrayLike, heads: float) -> NDArray[np.float64]:
        """Share of `peak_flops` on segments of so many rows: bilinear in log2, constant beyond the table's edges.

        Args:
            rows: query rows of each segment, above 0; they need not be whole.
            heads: query heads of the call.
        """
        at_heads = np.log2(self.efficiency_heads)
        column = [float(np.interp(math.log2(heads), at_heads, row)) for row in self.efficiency]
        shares: NDArray[np.float64] = np.interp(np.log2(rows), np.log2(self.efficiency_rows), column)
        return shares

    @classmethod
    def from_json(cls, path: str | Path) -> Calibration:
        """Read a calibration file.

        Raises:
            ValueError: a file that cannot be read, or a key that is unknown, missing, there twice or no such figure;
                one sentence with the file and the key.
        """
        try:
            figures = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_distinct)
        except (OSError, ValueError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            raise ValueError(f"calibration {path} cannot be read as JSON: {reason}") from error
        if not isinstance(figures, Mapping):
            raise ValueError(f"calibration {path}: expected an object of figures, got {type(figures).__name__}")
        known = {field.name for field in dataclasses.fields(cls)}
        for fault, names in (("unknown", figures.keys() - known), ("missing", known - figures.keys())):
            if names:
                raise ValueError(
                    f"calibration {path}: {fault} key {', '.join(sorted(names))}; the keys are "
                    f"{', '.join(sorted(known))}"
                )
        try:
            return cls(**figures)
        except ValueError as error:
            raise ValueError(f"calibration {path}: {error}") from error

    def to_json(self, path: str | Path) -> None:
        """Write the file that `from_json` reads."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")


_LARGEST = 1e50  # and its inverse the smallest: products of figures stay far from what a float cannot hold
_MAY_BE_ZERO = ("launch_seconds", "intra_node_alpha", "inter_node_alpha")
_FIGURES = ("peak_flops", "backward_ratio", "intra_node_beta", "inter_node_beta", *_MAY_BE_ZERO)


def _figure(name: str, value: Any, *, most: float = _LARGEST, or_zero: bool = False) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (1 / _LARGEST <= value <= most or (or_zero and value == 0)):
        least = "0, or from 1e-50" if or_zero else "from 1e-50"
        raise ValueError(f"{name}: expected a number {least} to {most:g}, got {reprlib.repr(value)}")
    return float(value)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON file. A key that stands there twice would count once, and nobody would know which."""
    twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"key {twice[0]} stands there twice")
    return dict(pairs)


def _sequence(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{name}: expected a list with at least one entry, got {reprlib.repr(value)}")
    return tuple(value)


_ROWS = tuple(2**k for k in range(6, 16))
_HEADS = (1, 2, 4, 8, 16, 32)

# 400 TFLOP/s is 40 % of the 989 in dense bf16 of the H100 SXM's data sheet, 350 GB/s 78 % of NVLink's 450 in one
# direction, 45 GB/s 90 % of a network card of 400 Gb/s for each GPU. The efficiency rows / (rows + 256) * heads /
# (heads + 1/8) and the fixed costs are guesses: kernels work in squares of 128 rows, half wasted on the diagonal, and
# the Libra paper finds that short blocks cost more than few heads (its figure 5).
DEFAULT_CALIBRATION = Calibration(
    source="assumed, not measured: like H100 SXM, 400 TFLOP/s, NVLink 350 GB/s, network 45 GB/s a GPU",
    peak_flops=400e12,
    efficiency_rows=_ROWS,
    efficiency_heads=_HEADS,
    efficiency=tuple(
        tuple(round(rows / (rows + 256) * heads / (heads + 0.125), 4) for heads in _HEADS) for rows in _ROWS
    ),
    backward_ratio=2.5,
    launch_seconds=20e-6,
    workers_per_node=8,
    intra_node_alpha=15e-6,
    intra_node_beta=350e9,
    inter_node_alpha=30e-6,
    inter_node_beta=45e9,
)
"""What `simulate` takes without a calibration file."""
