"""Whole epochs of many ranks on named mixes of lengths, played in one process: rounds, bytes, balance and padding.

Ranks run the package's own generators (`RankEpoch`) and their real messages are counted; there are no workers, no
model and no network, so nothing here is a time, and the figures are the same on every machine.

    python benchmarks/simulation.py                         # 64 ranks, some minutes
    python benchmarks/simulation.py --world 256 1024 --json   # the large ones
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from odb_libra_lightning.data.length_mixes import LENGTH_MIXES
from odb_libra_lightning.odb.batch_info import BatchInfo
from odb_libra_lightning.odb.config import LoaderConfig
from odb_libra_lightning.odb.epoch import EpochStart, RankEpoch
from odb_libra_lightning.odb.exchange import Gather
from odb_libra_lightning.odb.ledger import EpochLedger
from odb_libra_lightning.odb.protocol import GroupingRound
from odb_libra_lightning.odb.reader import Sample
from odb_libra_lightning.odb.sharding import epoch_order
from odb_libra_lightning.odb.steps import STEPS_PER_EXCHANGE, Step
from odb_libra_lightning.odb.transport import play, tapped
from odb_libra_lightning.odb.wire import to_bytes

SAMPLE = to_bytes(None)
# In `non_join` every rank must know what the others emit, which costs time in the square of the ranks.
LARGEST_NON_JOIN = 64


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One epoch.

    Attributes:
        mix: name of the mix of lengths.
        world: ranks.
        mode: `"join"` or `"non_join"`.
        pacing: whether all ranks draw the same number of samples in a round.
        buffer: samples that a rank draws for a round at the most.
        rounds: rounds of the epoch, over all deals.
        steps: training steps of every rank.
        deals: how often samples were dealt out.
        remainder: largest share of the epoch that a deal left to the next.
        bytes_per_round: bytes that a rank sends in a round, mean.
        most_bytes: bytes that it sends in a round, most.
        view_bytes: those of them that say which views are in which step, in the round with most.
        count_bytes: those of them that are token counts, in the round with most.
        most_buffered: most samples in a rank's buffer when a round is grouped.
        zero_weight: share of zero-weight steps among the steps of all ranks.
        imbalance: tokens of the rank with most over the mean of the ranks, mean over the steps.
        padding: share of padding among all tokens.
        samples_per_step: samples of all ranks in a step, mean.
        seconds: time of the simulation.
    """

    mix: str
    world: int
    mode: str
    pacing: bool
    buffer: int
    rounds: int
    steps: int
    deals: int
    remainder: float
    bytes_per_round: float
    most_bytes: int
    view_bytes: int
    count_bytes: int
    most_buffered: int
    zero_weight: float
    imbalance: float
    padding: float
    samples_per_step: float
    seconds: float


class SharedLedger(EpochLedger):
    """One ledger for all ranks of an epoch in `join` mode, where none of them changes it."""

    def __init__(self, num_samples: int, world_size: int) -> None:
        super().__init__(num_samples, world_size, equal=True)
        self._sizes, self._checksum, self._total = super().share_sizes(), super().checksum(), super().total

    def share_sizes(self) -> Any:
        """As computed once."""
        return self._sizes

    def checksum(self) -> int:
        """As computed once."""
        return self._checksum

    @property
    def total(self) -> int:
        """As computed once."""
        return self._total


class Lengths:
    """A rank's samples, of which only the lengths matter."""

    in_workers = 0

    def __init__(self, lengths: list[int], rank: int, order: Any) -> None:
        self._lengths, self._rank, self._order = lengths, rank, order
        self._draws: Iterator[tuple[int, int]] = iter(())
        self.in_sampler = 0

    def start(self, ledger: EpochLedger) -> None:
        """Begin to draw what a ledger leaves to this rank."""
        views = ledger.share(self._rank)
        self.in_sampler = len(views)
        identities = self._order[ledger.positions(views)].tolist()
        self._draws = zip(views.tolist(), identities, strict=True)

    def take(self, count: int) -> list[Sample]:
        """Next samples."""
        count = min(count, self.in_sampler)
        self.in_sampler -= count
        drawn = (next(self._draws) for _ in range(count))
        return [Sample(view, identity, self._lengths[identity], SAMPLE) for view, identity in drawn]


class Tally:
    """What rank 0 sends, and what the steps of all ranks hold."""

    def __init__(self, samples: int) -> None:
        self.seen = np.zeros(samples, np.int64)
        self.steps: list[BatchInfo] = []  # of rank 0
        self.most_tokens: list[int] = []  # of a rank, by step
        self.rounds: list[dict[str, int]] = []  # bytes, by what they are
        self.deals = self.remainder = self.most_buffered = 0
        self._next, self._counts_due = "settings", 0

    def message(self, size: int) -> None:
        """Rank 0 sends its settings; then in each round a report, perhaps views, and the token counts of some steps."""
        if self._next == "report":
            self.rounds.append({"report": 0, "views": 0, "counts": 0})
        if self._next != "settings":
            self.rounds[-1][self._next] += size
        if self._next == "counts":
            self._counts_due -= 1
            self._next = "counts" if self._counts_due else "report"
        else:
            self._next = "report" if self._next == "settings" else "views"

    def round(self, result: GroupingRound) -> None:
        """Rank 0 has agreed on a round."""
        self.deals += result.number == 0
        self.most_buffered = max(self.most_buffered, int(result.column("buffered").max()))
        if result.ended:
            self.remainder = max(self.remainder, result.potential)
        self._counts_due = -(-result.steps // STEPS_PER_EXCHANGE)
        self._next = "counts" if self._counts_due else "report"

    def step(self, rank: int, info: BatchInfo) -> None:
        """A rank has finished a step."""
        self.seen[list(info.indices)] += 1
        if rank == 0:
            self.steps.append(info)
            self.most_tokens.append(info.tokens)
        else:
            self.most_tokens[info.batch_idx] = max(self.most_tokens[info.batch_idx], info.tokens)

    def listen(self, rank: int, event: Any) -> bool:
        """Count what a rank sends, and its steps; those go no further."""
        if isinstance(event, Step):
            self.step(rank, event.info)
            return True
        if rank == 0 and isinstance(event, Gather):
            self.message(event.message.nbytes)
        return False


def epoch(mix: str, *, world: int, mode: str, pacing: bool, buffer: int, samples_per_rank: int) -> Figures:
    """Play one epoch."""
    begin = time.perf_counter()
    size = world * samples_per_rank
    lengths = LENGTH_MIXES[mix].sample(size).tolist()
    order = epoch_order(size, epoch=0, seed=0)
    config = LoaderConfig(
        l_max=LENGTH_MIXES[mix].l_max, buffer_size=buffer, mode=mode, pacing=pacing, loss_tokens=lambda count: count
    )
    join = mode == "join"
    shared = SharedLedger(size, world) if join else None
    tally = Tally(size)
    ranks = [
        RankEpoch(
            rank=rank,
            start=EpochStart(),
            ledger=shared or EpochLedger(size, world, equal=False),
            config=config,
            source=Lengths(lengths, rank, order),
            collate_fn=len,
            observed=not join,
            watch=tally.round if rank == 0 else lambda _: None,
        )
        for rank in range(world)
    ]
    play(tapped(epoch.run(), partial(tally.listen, rank)) for rank, epoch in enumerate(ranks))
    steps = tally.steps
    emitted = sum(info.global_samples for info in steps)
    assert tally.seen.min() == 1, "a sample was missed"
    assert tally.seen.sum() == emitted < size + world, "too many samples were repeated"
    largest = max(tally.rounds, key=lambda round_: sum(round_.values()))
    tokens = [info.global_tokens for info in steps]
    return Figures(
        mix=mix,
        world=world,
        mode=mode,
        pacing=pacing,
        buffer=buffer,
        rounds=len(tally.rounds),
        steps=len(steps),
        deals=tally.deals,
        remainder=tally.remainder / size,
        bytes_per_round=sum(sum(round_.values()) for round_ in tally.rounds) / len(tally.rounds),
        most_bytes=sum(largest.values()),
        view_bytes=largest["views"],
        count_bytes=largest["counts"],
        most_buffered=tally.most_buffered,
        zero_weight=sum(info.idle_ranks for info in steps) / (world * len(steps)),
        imbalance=float(np.mean([most * world / sum_ for most, sum_ in zip(tally.most_tokens, tokens, strict=True)])),
        padding=1 - sum(tokens) / sum(info.global_padded_tokens for info in steps),
        samples_per_step=emitted / len(steps),
        seconds=time.perf_counter() - begin,
    )


def table(rows: list[Figures], title: str) -> Table:
    """What a person wants to see."""
    shown = Table(
        *("mix", "ranks", "mode", "pacing", "buffer", "rounds", "steps", "deals", "left by a deal"),
        *("KB a round: mean", "most", "views", "counts", "buffered", "zero-weight", "imbalance", "padding"),
        title=title,
    )
    for row in rows:
        shown.add_row(
            *(row.mix, f"{row.world:,}", row.mode, "yes" if row.pacing else "no", f"{row.buffer:,}"),
            *(f"{row.rounds:,}", f"{row.steps:,}", str(row.deals), f"{row.remainder:.2%}"),
            *(f"{size / 1000:.1f}" for size in (row.bytes_per_round, row.most_bytes, row.view_bytes, row.count_bytes)),
            *(f"{row.most_buffered:,}", f"{row.zero_weight:.2%}", f"{row.imbalance:.2f}", f"{row.padding:.1%}"),
        )
    return shown


def main() -> None:
    """Simulate, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, nargs="+", default=[64], help="ranks (default: 64)")
    parser.add_argument("--mix", nargs="+", default=sorted(LENGTH_MIXES), choices=sorted(LENGTH_MIXES))
    parser.add_argument("--buffer", type=int, nargs="+", default=[1024, 256], help="buffer sizes (default: 1024 256)")
    parser.add_argument("--mode", nargs="+", default=["join", "non_join"], choices=["join", "non_join"])
    parser.add_argument("--samples", type=int, default=2048, help="samples of a rank (default: 2048)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    runs = [
        {"mix": mix, "world": world, "mode": mode, "pacing": pacing, "buffer": buffer}
        for world, mix, buffer, mode, pacing in itertools.product(
            options.world, options.mix, options.buffer, options.mode, (True, False)
        )
        if mode == "join" or world <= LARGEST_NON_JOIN
    ]
    gc.disable()  # nothing here is cyclic, and millions of samples make every collection long
    rows = []
    for number, run in enumerate(runs, 1):
        rows.append(epoch(**run, samples_per_rank=options.samples))
        print(f"{number}/{len(runs)}: {run}, {rows[-1].seconds:.0f} s", file=sys.stderr)
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}"
    )
    if options.json:
        print(json.dumps({"machine": machine, "settings": vars(options), "epochs": [asdict(row) for row in rows]}))
        return
    Console(width=190).print(table(rows, f"{options.samples:,} samples a rank; {machine}"))


if __name__ == "__main__":
    main()
