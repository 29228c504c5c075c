"""A log of what each optimizer step trained on, and the proof from two of them that it was the same."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from odb_libra_lightning.data.packed_windows import PlacedWindow, WindowBounds
from odb_libra_lightning.libra.packing import PackedSequences


@dataclass(frozen=True)
class _Placed:
    last_step: int
    begins_run: bool
    line: str


class WindowLog:
    """Writes a JSON line for each optimizer step, once its micro-steps are trained on.

    A line has the `epoch`; the `step` within it; `sequences`, the numbers of the packed sequences, sorted; `hash`, of
    the documents and rows that these hold; the `placement`; and the `imbalance` between pools. A run that begins
    training begins the file anew, one that goes on appends to it.

    Args:
        path: the file.
        placement: name of the placement.
    """

    def __init__(self, path: str | Path, *, placement: str) -> None:
        self._path = Path(path)
        self._placement = placement
        self._placed: deque[_Placed] = deque()

    def begin_pass(self) -> None:
        """What was placed and is not trained on is forgotten."""
        self._placed.clear()

    def placed(
        self, packed: PackedSequences, bounds: WindowBounds, window: PlacedWindow, *, epoch: int, accumulation: int
    ) -> None:
        """A window is placed, and will be trained on after those before it."""
        last_step = bounds.first_step + bounds.micro_steps - 1
        line = {
            "epoch": epoch,
            "step": last_step // accumulation,
            "sequences": list(range(bounds.first, bounds.stop)),
            "hash": _hash(packed, bounds),
            "placement": self._placement,
            "imbalance": round(window.imbalance, 6),
        }
        self._placed.append(_Placed(last_step, epoch == 0 and bounds.first == 0, json.dumps(line)))

    def trained(self, batch_idx: int) -> None:
        """Micro-steps up to this number are trained on."""
        while self._placed and self._placed[0].last_step <= batch_idx:
            placed = self._placed.popleft()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("w" if placed.begins_run else "a", encoding="utf-8") as file:
                file.write(placed.line + "\n")


def check_step_equivalence(first: str | Path, second: str | Path) -> int:
    """Check that two runs trained on the same packed sequences in each optimizer step.

    Steps that one of them has not come to are left out. Where a run wrote a step twice, since it went on from an
    earlier checkpoint, its last line counts.

    Args:
        first: log of a run.
        second: log of another, on other ranks, with another placement or pool size, or broken off and resumed.

    Returns:
        Number of steps that both have.

    Raises:
        ValueError: a step that differs, no step in common, or a file that is no such log.
    """
    one, other = _read(Path(first)), _read(Path(second))
    shared = sorted(one.keys() & other.keys())
    if not shared:
        raise ValueError(f"{first} and {second} have no optimizer step in common")
    for epoch, step in shared:
        mine, theirs = one[epoch, step], other[epoch, step]
        if (mine["sequences"], mine["hash"]) != (theirs["sequences"], theirs["hash"]):
            raise ValueError(
                f"epoch {epoch}, optimizer step {step}: {first} has packed sequences {_short(mine)}, and {second} "
                f"{_short(theirs)}"
            )
    return len(shared)


def _hash(packed: PackedSequences, bounds: WindowBounds) -> str:
    """Of what the sequences of a window hold, whatever the order in which they are trained on."""
    run = slice(int(packed.cu_pieces[bounds.first]), int(packed.cu_pieces[bounds.stop]))
    cuts = packed.cu_pieces[bounds.first : bounds.stop + 1] - packed.cu_pieces[bounds.first]
    content = hashlib.sha256()
    for array in (cuts, packed.document[run], packed.offset[run], packed.length[run]):
        content.update(np.ascontiguousarray(array, "<i8").tobytes())
    return content.hexdigest()[:16]


def _read(path: Path) -> dict[tuple[int, int], dict[str, Any]]:
    steps, number = {}, 0
    try:
        with path.open(encoding="utf-8") as file:
            for text in file:
                number += 1
                line = json.loads(text)
                steps[int(line["epoch"]), int(line["step"])] = {key: line[key] for key in ("sequences", "hash")}
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}, line {number}: no line of a window log ({error})") from error
    return steps


def _short(line: dict[str, Any]) -> str:
    numbers = line["sequences"]
    shown = ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")
    return f"[{shown}] (hash {line['hash']})"
