"""Online batches under DDP, FSDP2 and DeepSpeed ZeRO-1, 2, 3 on the GPUs of this machine, one rank each.

Each strategy trains one epoch in processes of its own, with pinned memory, data workers, accumulated windows, masked
prompts, and (on GPUs) NCCL for the trainer beside the Gloo group of the collate processes. Then one process makes the
same updates on the token mean, and the weights must agree to float32's rounding. The exit code says whether they do.

    python benchmarks/gpu_strategies.py                          # all GPUs, some three minutes
    python benchmarks/gpu_strategies.py --device cpu --ranks 2   # the same code, small, over Gloo
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from rich.console import Console
from rich.table import Table
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.functional import cross_entropy

from odb_libra_lightning import ODBDataModule
from odb_libra_lightning.callbacks.loader_access import batch_info, training_loader
from odb_libra_lightning.data.collators import CausalLMCollator
from odb_libra_lightning.strategies.deepspeed import ODBDeepSpeedStrategy

STRATEGIES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
SIZES = {  # width, layers, vocabulary, samples, mean tokens, l_max
    "cuda": (1024, 12, 32_000, 1_500, 500, 16_384),
    "cpu": (16, 2, 500, 120, 40, 400),
}
ACCUMULATION, LR = 2, 0.1
TOLERANCE = 2e-5  # weights are of order 0.1 to 1, float32 has 6e-8 of that, and sums differ in their order
REPOSITORY = Path(__file__).resolve().parents[1]


class Texts:
    """Token sequences of log-normal length, the first third of each a prompt without loss."""

    def __init__(self, size: int, mean: int, vocabulary: int) -> None:
        generator = np.random.default_rng(0)
        self.lengths = np.clip(generator.lognormal(np.log(mean) - 0.32, 0.8, size), 4, 8 * mean).astype(int).tolist()
        self.pool = torch.from_numpy(generator.zipf(1.3, 2 * max(self.lengths)) % vocabulary)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = self.lengths[index]
        tokens = self.pool[index : index + length].clone()
        labels = tokens.clone()
        labels[: length // 3] = -100
        return {"input_ids": tokens, "labels": labels}


class Block(torch.nn.Module):
    """Two layers around a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[n, tokens, width]`, the same shape out."""
        out: torch.Tensor = hidden + self.down(torch.nn.functional.gelu(self.up(self.norm(hidden))))
        return out


class Model(L.LightningModule):
    """Each token is predicted from the one before: no attention, so that the memory is that of weights and logits."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [Block(width) for _ in range(layers)]
        head = torch.nn.Linear(width, vocabulary)
        self.network = torch.nn.Sequential(torch.nn.Embedding(vocabulary, width), *blocks, head)
        self.has_control_group = False
        self.record: dict[str, list[Any]] = {"indices": [], "wait_s": [], "elapsed_s": [], "tokens": [], "pinned": []}

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Note whether the batch comes in page-locked memory."""
        self.record["pinned"].append(batch["input_ids"].is_pinned())
        return batch

    def summed_loss(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum over label tokens, and how many."""
        logits = self.network(batch["input_ids"])[:, :-1].flatten(0, 1)
        targets = batch["labels"][:, 1:].flatten()
        return cross_entropy(logits, targets, ignore_index=-100, reduction="sum"), (targets != -100).sum()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Mean loss over label tokens."""
        self.has_control_group = training_loader(self.trainer)._control is not None
        info = batch_info(self.trainer, batch_idx)
        for name in ("wait_s", "elapsed_s", "tokens"):
            self.record[name].append(getattr(info, name))
        self.record["indices"].append(list(info.indices))
        loss, count = self.summed_loss(batch)
        return loss / count

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD, so that gradients show in the weights."""
        return torch.optim.SGD(self.parameters(), LR)


class ShardedModel(Model):
    """The same under FSDP2."""

    def configure_model(self) -> None:
        """Each block, and what is left."""
        if not isinstance(self.network, FSDPModule):
            for part in (*self.network, self.network):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])


def strategy_of(name: str, device: str, ranks: int) -> Strategy:
    """The strategy by its name here."""
    if name == "ddp":
        return DDPStrategy()
    if name == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    if device == "cpu":
        from tests.strategies.deepspeed_cpu import CPUDeepSpeedStrategy

        return CPUDeepSpeedStrategy(stage=int(name[-1]))
    return ODBDeepSpeedStrategy(stage=int(name[-1]))


def whole_weights(model: Model) -> list[torch.Tensor]:
    """All parameters, whole, on the CPU; every rank must call it."""
    parameters = list(model.parameters())
    if hasattr(parameters[0], "full_tensor"):
        return [parameter.detach().full_tensor().cpu() for parameter in parameters]
    if hasattr(parameters[0], "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameters):
            return [parameter.detach().cpu().clone() for parameter in parameters]
    return [parameter.detach().cpu().clone() for parameter in parameters]


def train(name: str, device: str, folder: Path) -> None:
    """One rank of one strategy, started by torchrun; writes down what it saw."""
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    width, layers, vocabulary, samples, mean, l_max = SIZES[device]
    model = (ShardedModel if name == "fsdp2" else Model)(width, layers, vocabulary)
    data = ODBDataModule(
        Texts(samples, mean, vocabulary), CausalLMCollator(), l_max=l_max, num_workers=2, pin_memory=device == "cuda"
    )
    trainer = L.Trainer(
        accelerator=device,
        devices=ranks,
        strategy=strategy_of(name, device, ranks),
        max_epochs=1,
        accumulate_grad_batches=ACCUMULATION,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=data)
    weights = whole_weights(model)
    if rank == 0:
        torch.save(weights, folder / "weights.pt")
    facts = {
        **model.record,
        "backend": torch.distributed.get_backend(),
        "control_group": model.has_control_group,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(facts))


def replay(ranks: list[Any], device: str) -> list[torch.Tensor]:
    """Weights after the same updates in one process."""
    width, layers, vocabulary, samples, mean, _ = SIZES[device]
    model, dataset, collate = Model(width, layers, vocabulary), Texts(samples, mean, vocabulary), CausalLMCollator()
    model.to(device)
    optimizer = model.configure_optimizers()
    steps = list(zip(*(rank["indices"] for rank in ranks), strict=True))
    for first in range(0, len(steps), ACCUMULATION):
        batches = [collate([dataset[i] for i in b]) for step in steps[first : first + ACCUMULATION] for b in step if b]
        total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        optimizer.zero_grad()
        for batch in batches:
            loss, _ = model.summed_loss({key: value.to(device) for key, value in batch.items()})
            (loss / total).backward()
        optimizer.step()
    weights = [parameter.detach().cpu() for parameter in model.parameters()]
    torch.cuda.empty_cache()  # this process stays while the next strategy trains
    return weights


def measure(name: str, device: str, ranks: int, seconds: float) -> dict[str, Any]:
    """Train under one strategy, and compare."""
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__]
        options = ["--device", device, "--train", name, "--folder", where]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                [sys.executable, *command, *options], env=environment, capture_output=True, text=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return {"strategy": name, "error": f"not done within {seconds:.0f} s"}
        files = [folder / f"rank{rank}.json" for rank in range(ranks)]
        if done.returncode or not all(file.exists() for file in files):
            return {"strategy": name, "error": (done.stderr or done.stdout)[-3000:]}
        records = [json.loads(file.read_text()) for file in files]
        weights = torch.load(folder / "weights.pt")
    expected = replay(records, device)
    begun = [parameter.detach() for parameter in Model(*SIZES[device][:3]).parameters()]
    difference = max(float((a - b).abs().max()) for a, b in zip(weights, expected, strict=True))
    moved = max(float((a - b).abs().max()) for a, b in zip(weights, begun, strict=True))
    steady = slice(len(records[0]["elapsed_s"]) // 4, None)  # without the first steps, which warm up
    elapsed = sum(records[0]["elapsed_s"][steady])
    return {
        "strategy": name,
        "ranks": ranks,
        "backend": records[0]["backend"],
        "control_group": records[0]["control_group"],
        "pinned": all(all(record["pinned"]) for record in records),
        "steps": len(records[0]["indices"]),
        "zero_weight_steps": sum(not indices for record in records for indices in record["indices"]),
        "step_ms": 1000 * statistics.median(records[0]["elapsed_s"][steady]),
        "tokens_per_s": sum(sum(record["tokens"][steady]) for record in records) / elapsed,
        "wait": sum(records[0]["wait_s"][steady]) / elapsed,
        "peak_gib": max((record["peak_gib"] for record in records if record["peak_gib"]), default=None),
        "moved": moved,
        "difference": difference,
        "agrees": difference < TOLERANCE < moved / 100,
    }


def main() -> None:
    """Measure every strategy, print a table and one JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(SIZES), default="cuda")
    parser.add_argument("--ranks", type=int, default=None, help="default: as many as there are GPUs")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--seconds", type=float, default=230, help="for all together")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.device, options.folder)
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here: --device cpu --ranks 2 runs the same code, small")
    ranks = options.ranks or (torch.cuda.device_count() if options.device == "cuda" else 2)
    end = time.monotonic() + options.seconds
    results = []
    for name in options.strategies:
        if name.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
            results.append({"strategy": name, "error": "deepspeed is not installed"})
        else:
            results.append(measure(name, options.device, ranks, max(end - time.monotonic(), 1)))
        print(json.dumps(results[-1]), flush=True)
    columns = ("strategy", "backend", "steps", "step_ms", "tokens_per_s", "wait", "peak_gib", "moved", "difference")
    table = Table(*columns, title=f"{ranks} ranks on {options.device}, torch {torch.__version__}")
    for result in results:
        values = [result.get(column) for column in columns]
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value or "") for value in values))
    Console(width=120).print(table)
    sys.exit(not all(result.get("agrees") for result in results))


if __name__ == "__main__":
    main()
