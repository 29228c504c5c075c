"""Whether Libra changes what a training learns: loss curves with and without it, laid over one another.

Four processes train a small Llama of transformers from the same random weights on the same packs of Python's standard
library in bf16-mixed: under `LibraStrategy` as two replicas of two processes in one pool, and under plain DDP, where
each process has whole packs of its own and transformers' own attention. Each seed is another start and another order of
documents. Then both train a decoder of ours in float64, where the two differ by rounding alone.

    python benchmarks/libra_loss_overlay.py --assets docs/assets     # some five minutes on 2 cores
    python benchmarks/libra_loss_overlay.py --dry-run                # small and fast, draws nothing

Writes `libra_loss.svg` and `libra_loss.json`. The loss is the mean over all label tokens of an update
(`train/token_loss` of `TokenLossMonitor`).
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from attention_measures import machine
from libra_attention import run
from libra_training import WORKERS, Decoder, as_launched
from numpy.typing import NDArray
from typing_extensions import override

from odb_libra_lightning import PackedDataModule
from odb_libra_lightning.callbacks import TokenLossMonitor
from odb_libra_lightning.data.source_files import SourceFiles
from odb_libra_lightning.models import CausalLM
from odb_libra_lightning.strategies import LibraStrategy

Documents = list[NDArray[np.int64]]
VOCABULARY = 512
STRATEGIES = ("libra", "ddp")


class Curve(TokenLossMonitor):
    """Keeps what it logs, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    @override
    def summarize(self, *arguments: Any) -> dict[str, float]:
        values = super().summarize(*arguments)
        self.losses.append(values["train/token_loss"])
        return values


class Adam(Decoder):
    """The decoder, with an optimizer in which the smallest differences of gradients show."""

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def read_documents(files: int) -> Documents:
    """Source files as token ids."""
    source = SourceFiles(limit=files, vocab_size=VOCABULARY, max_length=20_000)
    return [source[at]["input_ids"].numpy() for at in range(len(source))]


def curve(module: L.LightningModule, strategy: str, precision: Any, seed: int, settings: dict[str, Any]) -> list[float]:
    """Losses of all updates of one training."""
    losses = Curve()
    libra = strategy == "libra"
    trainer = L.Trainer(
        accelerator="cpu",
        devices=WORKERS,
        strategy=LibraStrategy(context_parallel=2, pool_size=2, block_size=64) if libra else "ddp",
        precision=precision,
        max_steps=settings["steps"],
        accumulate_grad_batches=2 if libra else 1,  # four packs an update either way
        callbacks=[losses],
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = PackedDataModule(settings["documents"], settings["length"], seed=seed, num_workers=0)
    trainer.fit(module, datamodule=data)
    return losses.losses


def measure_rank(settings: dict[str, Any]) -> dict[str, Any]:
    """All curves, of one process: they are the same on every process."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    as_launched()
    curves: dict[str, dict[str, list[float]]] = {strategy: {} for strategy in STRATEGIES}
    for seed in range(settings["seeds"]):
        for strategy in STRATEGIES:
            torch.manual_seed(seed)
            module = CausalLM(
                vocab_size=VOCABULARY,
                hidden_size=64,
                intermediate_size=192,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                tie_word_embeddings=True,
                lr=5e-3,
                warmup_steps=5,
            )
            curves[strategy][str(seed)] = curve(module, strategy, "bf16-mixed", seed, settings)
    exact = {}
    for strategy in STRATEGIES:
        torch.manual_seed(0)
        exact[strategy] = curve(Adam(VOCABULARY).double(), strategy, "64-true", 0, settings)
    return {"bf16": curves, "float64": exact}


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """How far the curves lie apart, beside how far seeds do."""
    libra, ddp = (np.array(list(found["bf16"][strategy].values())) for strategy in STRATEGIES)  # [seed, step]
    gap = np.abs(libra - ddp)
    spread = ddp.std(axis=0, ddof=1) if len(ddp) > 1 else np.zeros(ddp.shape[1])
    late = slice(ddp.shape[1] // 2, None)
    exact = np.abs(np.subtract(*(found["float64"][strategy] for strategy in STRATEGIES)))
    return {
        "bf16_gap_mean": float(gap.mean()),
        "bf16_gap_largest": float(gap.max()),
        "bf16_gap_mean_second_half": float(gap[:, late].mean()),
        "seed_spread_mean": float(spread.mean()),
        "seed_spread_mean_second_half": float(spread[late].mean()),
        "loss_first": float(ddp[:, 0].mean()),
        "loss_last": {
            strategy: float(each[:, -1].mean()) for strategy, each in zip(STRATEGIES, (libra, ddp), strict=True)
        },
        "float64_largest_difference": float(exact.max()),
    }


def draw(report: dict[str, Any], path: Path) -> None:
    """The curves of all seeds, and the difference of each pair."""
    from libra_pictures import BLACK, BLUE, GREY, ORANGE
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    loss, gap = figure.subplots(1, 2)
    libra, ddp = (np.array(list(report["curves"]["bf16"][strategy].values())) for strategy in STRATEGIES)
    steps = np.arange(1, ddp.shape[1] + 1)
    loss.fill_between(steps, ddp.min(axis=0), ddp.max(axis=0), color=GREY, alpha=0.3, label="range of seeds, DDP")
    for number, (one, other) in enumerate(zip(libra, ddp, strict=True)):
        loss.plot(steps, other, color=ORANGE, linewidth=2.5, label=None if number else "DDP")
        loss.plot(steps, one, color=BLUE, linewidth=1, linestyle="--", label=None if number else "Libra")
        gap.semilogy(
            steps, np.abs(one - other), color=BLUE, linewidth=0.8, label=None if number else "Libra - DDP, bf16"
        )
    exact = np.abs(np.subtract(*(report["curves"]["float64"][strategy] for strategy in STRATEGIES)))
    if len(ddp) > 1:
        gap.semilogy(steps, ddp.std(axis=0, ddof=1), color=GREY, label="standard deviation of seeds")
    gap.semilogy(steps, np.maximum(exact, 1e-17), color=BLACK, linewidth=0.8, label="Libra - DDP, float64")
    loss.set(xlabel="update", ylabel="loss of all tokens", title="bf16-mixed")
    gap.set(xlabel="update", ylabel="difference of the loss", title="Difference")
    for axes in (loss, gap):
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Train, print the figures, and write them down where a folder is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a pack")
    parser.add_argument("--steps", type=int, default=50, help="updates, of four packs each")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--files", type=int, default=60, help="source files to train on")
    parser.add_argument("--assets", type=Path, help="folder for libra_loss.svg and libra_loss.json")
    parser.add_argument("--limit", type=float, default=1500, help="seconds after which all processes are ended")
    parser.add_argument("--dry-run", action="store_true", help="small and fast")
    options = parser.parse_args()
    if options.dry_run:
        options.length, options.steps, options.seeds, options.files = 128, 4, 2, 8
    settings = {
        **{name: getattr(options, name) for name in ("length", "steps", "seeds", "limit")},
        "documents": read_documents(options.files),
        "timeout": min(options.limit, 300.0),
    }
    found = run(settings, measure_rank)[0]
    report = {
        "machine": machine(),
        "about": f"{options.seeds} seeds, {options.steps} updates of 4 packs of {options.length:,} tokens",
        **figures(found),
        "curves": found,
    }
    if options.assets is not None:
        draw(report, options.assets / "libra_loss.svg")
        (options.assets / "libra_loss.json").write_text(json.dumps(report) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in report.items() if name != "curves"}, indent=2))


if __name__ == "__main__":
    main()
