"""Memory of training steps on one device: measured, modelled, and within a budget that the model gave.

For attention that keeps its scores (`eager`) and attention that does not (`sdpa`): peaks of steps at a few sizes, a fit
of `base + n * (a*l + b*l*l)`, its error on sizes that it has not seen, the budget that follows for `--gigabytes`, and
the peaks of batches that fill this budget.

    python benchmarks/gpu_memory.py                    # one GPU, about a minute
    python benchmarks/gpu_memory.py --device cpu       # a small model, to see that all of it works
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import warnings
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from odb_libra_lightning.data.memory_model import MemoryModel, MemoryPoint, fit_memory
from odb_libra_lightning.data.memory_probe import measure_memory, probe_points
from odb_libra_lightning.models.causal_lm import CausalLM
from odb_libra_lightning.odb.cost import TokenCost

GPU = {"hidden": 1024, "layers": 8, "longest": 4096, "gigabytes": 40.0, "precision": "bf16-mixed"}
CPU = {"hidden": 64, "layers": 2, "longest": 512, "gigabytes": 1.0, "precision": "32-true"}


def build(attention: str, options: argparse.Namespace) -> CausalLM:
    """A Llama with heads of 64 dimensions, and a small vocabulary, so that attention and not the logits leads."""
    heads = max(options.hidden // 64, 1)
    module = CausalLM(
        vocab_size=1024,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=options.longest,
    )
    module.model.set_attn_implementation(attention)
    return module


def examine(attention: str, options: argparse.Namespace) -> dict[str, Any]:
    """Fit at half of the sizes, predict the others, then fill the budget at three lengths."""
    longest, available = options.longest, options.gigabytes * 1e9
    trainer = {"accelerator": options.device, "precision": options.precision}
    module = build(attention, options)
    seen = probe_points(longest)
    unseen = [(4, longest // 4), (3, longest * 3 // 8), (1, longest * 3 // 4), (3, longest)]
    measured = measure_memory(module, [*seen, *unseen], **trainer)
    model = fit_memory(measured[: len(seen)])
    l_max, quadratic_length = model.budget(available)
    cost = TokenCost(quadratic_length)
    lengths = [length for length in (longest // 8, longest // 2, longest) if not cost.exceeds(length, l_max)]
    full = measure_memory(module, [(cost.fits(length, l_max), length) for length in lengths], **trainer)
    return {
        "model": {
            "base": model.base,
            "per_token": model.per_token,
            "per_token_squared": model.per_token_squared,
            "residual": model.residual,
        },
        "budget": {"gigabytes": options.gigabytes, "l_max": l_max, "quadratic_length": quadratic_length},
        "unseen": [row(point, model) for point in measured[len(seen) :]],
        "full": [row(point, model) | {"of_available": point.peak_bytes / available} for point in full],
    }


def row(point: MemoryPoint, model: MemoryModel) -> dict[str, float]:
    """A measurement beside what the model says; the error is of the part that the batch adds to the base."""
    predicted = model.predict(point.samples, point.length)
    return {
        "samples": point.samples,
        "length": point.length,
        "peak": point.peak_bytes,
        "predicted": predicted,
        "error": (predicted - point.peak_bytes) / max(point.peak_bytes - model.base, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--hidden", type=int, help="width of the model")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--longest", type=int, help="longest sample, tokens")
    parser.add_argument("--gigabytes", type=float, help="memory that the budget is for")
    parser.add_argument("--precision", help="of the Trainer")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args()
    for name, value in (GPU if options.device == "cuda" else CPU).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    device = torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()} CPU"
    report = {
        "device": device,
        "torch": torch.__version__,
        "attention": {name: examine(name, options) for name in ("eager", "sdpa")},
    }
    if options.json:
        print(json.dumps(report, indent=2))
        return
    show(report, Console())


def show(report: dict[str, Any], console: Console) -> None:
    """The report as tables for people."""
    console.print(f"{report['device']}, torch {report['torch']}")
    for name, found in report["attention"].items():
        model, budget = found["model"], found["budget"]
        console.print(
            f"{name}: {model['base'] / 1e9:.2f} GB + n * ({model['per_token']:,.0f} * l + "
            f"{model['per_token_squared']:,.1f} * l*l) bytes, residual {model['residual']:.1%}; for "
            f"{budget['gigabytes']} GB l_max={budget['l_max']}, quadratic_length={budget['quadratic_length']}"
        )
        table = Table("batch", "samples", "length", "peak, GB", "predicted, GB", "error", "of available")
        for kind in ("unseen", "full"):
            for point in found[kind]:
                used = f"{point['of_available']:.1%}" if kind == "full" else ""
                gigabytes = [f"{point[key] / 1e9:.3f}" for key in ("peak", "predicted")]
                sizes = [str(point["samples"]), str(point["length"])]
                table.add_row(kind, *sizes, *gigabytes, f"{point['error']:+.1%}", used)
        console.print(table)


if __name__ == "__main__":
    main()
