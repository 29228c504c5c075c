"""Loaders alone, without a model: samples/s against a plain DataLoader and the method's own package, in one run.

Each loader draws the same samples with the same data workers and the same `collate_fn`, one epoch from the first
process started to the last batch. Loaders take turns, so that a noisy machine is noisy for all; the figures are
medians over the turns, the ratios medians of the ratios within a turn. `make bench` installs the peer and runs this.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

from odb_libra_lightning import ODBLoader
from odb_libra_lightning.data.collators import CausalLMCollator
from odb_libra_lightning.odb import align_groups, group_by_budget

MEAN_TOKENS = 500
L_MAX = 16_384
WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not")


class TokenTensors(Dataset[dict[str, torch.Tensor]]):
    """Ready-made token tensors of log-normal lengths: the worst case for a loader, since the workers do nothing."""

    def __init__(self, size: int) -> None:
        rng = np.random.default_rng(0)
        self.lengths = np.clip(rng.lognormal(np.log(MEAN_TOKENS) - 0.18, 0.6, size), 8, 8 * MEAN_TOKENS).astype(int)
        self.pool = torch.from_numpy(rng.integers(0, 32_000, 16 * MEAN_TOKENS))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.pool[: self.lengths[index]]
        return {"input_ids": tokens, "labels": tokens}


class TokenizedText(TokenTensors):
    """The same lengths, as text that the worker turns into tokens, which is what fine-tuning does."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        self.tokenizer = Tokenizer(models.BPE())
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
        self.tokenizer.train_from_iterator([" ".join(WORDS)] * 10, trainer)
        rng = np.random.default_rng(1)
        self.text = " ".join(rng.choice(WORDS, 16 * MEAN_TOKENS))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = index % 1000
        text = self.text[start : start + 4 * int(self.lengths[index])]  # about four characters a token
        tokens = torch.tensor(self.tokenizer.encode(text).ids[: self.lengths[index]])
        return {"input_ids": tokens, "labels": tokens}


def plain(dataset: Any, workers: int) -> Iterable[Any]:
    """A stock DataLoader at a batch size with the same mean number of tokens."""
    return DataLoader(
        dataset, batch_size=L_MAX // MEAN_TOKENS, shuffle=True, num_workers=workers, collate_fn=CausalLMCollator()
    )


def ours(dataset: Any, workers: int) -> Iterable[Any]:
    """`ODBLoader` as it comes."""
    return ODBLoader(dataset, CausalLMCollator(), l_max=L_MAX, num_workers=workers)


def peer(dataset: Any, workers: int) -> Iterable[Any]:
    """`online-dynamic-batching`, set up as its documentation shows."""
    import odb

    loader: Iterable[Any] = odb.ODBDataLoader(
        dataset,
        token_budget=L_MAX,
        batch_size=1,
        shuffle=True,
        num_workers=workers,
        prefetch_factor=64,
        collate_fn=CausalLMCollator(),
        loss_scaling="exact",
        join=True,
    )
    return loader


def measure(loader: Iterable[Any]) -> tuple[float, float]:
    """Samples/s of one epoch, and the padding ratio of its batches."""
    begin, samples, tokens, padded = time.perf_counter(), 0, 0, 0
    for batch in loader:
        samples += batch["input_ids"].shape[0]
        padded += batch["input_ids"].numel()
        tokens += int(batch["attention_mask"].sum())
    return samples / (time.perf_counter() - begin), 1 - tokens / padded


def grouping_ms(buffer_size: int, repeats: int = 200) -> float:
    """Median milliseconds to group and align a buffer of a thousand samples."""
    lengths = TokenTensors(buffer_size).lengths.tolist()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        groups, _ = group_by_budget(lengths, L_MAX)
        align_groups(groups, len(groups) + 3)
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times)


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=16_384)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args()
    torch.set_num_threads(1)

    loaders: dict[str, Callable[[Any, int], Iterable[Any]]] = {"DataLoader": plain, "ODBLoader": ours}
    try:
        import odb  # noqa: F401

        loaders["online-dynamic-batching"] = peer
    except ImportError:
        pass
    report: dict[str, Any] = {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} thread, Python {platform.python_version()}, "
        f"torch {torch.__version__}",
        "settings": vars(options),
        "grouping_and_alignment_of_1024_ms": grouping_ms(1024),
    }
    for name, dataset in (
        ("tokenized text", TokenizedText(options.samples)),
        ("ready tensors", TokenTensors(options.samples)),
    ):
        turns: list[dict[str, tuple[float, float]]] = []
        for _ in range(options.turns):
            turns.append({key: measure(make(dataset, options.workers)) for key, make in loaders.items()})
        report[name] = {
            key: {
                "samples_per_s": statistics.median(turn[key][0] for turn in turns),
                "of_plain": statistics.median(turn[key][0] / turn["DataLoader"][0] for turn in turns),
                "padding_ratio": statistics.median(turn[key][1] for turn in turns),
            }
            for key in loaders
        }
    if options.json:
        print(json.dumps(report, indent=2))
        return
    console = Console()
    console.print(f"{report['machine']}; {options.workers} workers, {options.samples} samples")
    for name in ("tokenized text", "ready tensors"):
        table = Table("loader", "samples/s", "of plain", "padding", title=f"{name}, about {MEAN_TOKENS} tokens")
        for key, row in report[name].items():
            table.add_row(key, f"{row['samples_per_s']:,.0f}", f"{row['of_plain']:.2f}x", f"{row['padding_ratio']:.1%}")
        console.print(table)
    console.print(f"grouping and alignment of 1,024 samples: {report['grouping_and_alignment_of_1024_ms']:.2f} ms")


if __name__ == "__main__":
    main()
