"""The recipes of long contexts: those for CPUs train, and those for GPUs fit what they name."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from odb_libra_lightning.cli.recipe import compose_recipe, resolve_recipe
from odb_libra_lightning.data.token_files import TokenWriter
from odb_libra_lightning.models import CausalLM
from odb_libra_lightning.strategies import LibraDeepSpeedStrategy, LibraFSDPStrategy
from tests.cli.conftest import Training, train_recipe

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "trainer.strategy.block_size=64",
    "module.hidden_size=32",
    "module.intermediate_size=64",
    "module.num_hidden_layers=1",
    "trainer.devices=4",
)
HERE = ("data.num_workers=0", "data.pin_memory=false")
WIDTHS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}

pytestmark = pytest.mark.timeout(270)


def scalars(training: Training, key: str) -> list[float]:
    events = EventAccumulator(str(training.folder / "tensorboard"))
    events.Reload()
    return [event.value for event in events.Scalars(key)]


def check(training: Training, packs: int | None) -> None:
    """Two replicas of two processes, in one pool, trained and were watched."""
    assert training.code == 0, training.output
    assert "Starting with 4 processes" in training.output
    assert training.left_nothing, "a process of the run is still there"
    summary = dict(re.findall(r"│ ([^│]+?) +│ ([^│]+?) +│", training.output))
    assert packs is None or summary["samples"] == str(packs)
    assert "moved for attention, per update" in summary
    losses = scalars(training, "train/token_loss")
    assert losses[-1] < losses[0]
    assert scalars(training, "libra/pool_imbalance") == [0.0] * len(losses)
    for key in ("libra/tile_imbalance", "libra/bytes_moved", "libra/plan_ms", "straggler/ratio"):
        values = scalars(training, key)
        assert len(values) == len(losses)
        assert all(math.isfinite(value) and value >= 0 for value in values), key
    assert max(scalars(training, "libra/bytes_moved")) > 0


@pytest.mark.full
def test_longcontext_trains_on_two_replicas_of_two_processes(tmp_path: Path) -> None:
    small = ("data.sequence_length=512", "data.documents.limit=8", "+data.documents.max_length=1000")
    training = train_recipe("longcontext_cpu", tmp_path, *SMALL, *small, "+trainer.limit_train_batches=6")
    check(training, None)


@pytest.mark.full
def test_longcontext_with_online_batches(tmp_path: Path) -> None:
    training = train_recipe("longcontext_odb_cpu", tmp_path, *SMALL, "data.l_max=512", "data.train_dataset.limit=24")
    check(training, 24)


def composed(name: str, *overrides: str) -> Any:
    return resolve_recipe(compose_recipe(ROOT / "recipes" / f"{name}.yaml", overrides))


def tokens(folder: Path, vocab_size: int) -> Path:
    with TokenWriter(folder, vocab_size=vocab_size) as writer:
        for length in (40, 9, 300):
            writer.add(range(1, length + 1))
    return folder


def test_every_part_of_the_fsdp2_recipe_can_be_built(tmp_path: Path) -> None:
    stored = CausalLM("Qwen3ForCausalLM", vocab_size=512, num_hidden_layers=1, **WIDTHS)
    stored.model.save_pretrained(tmp_path / "model")
    files = tokens(tmp_path / "tokens", 512)
    overrides = (f"module.pretrained={tmp_path / 'model'}", f"data.documents={files}", *HERE)
    config = composed("longcontext_qwen3_fsdp2", *overrides)
    assert (config.trainer.accelerator, config.trainer.precision) == ("gpu", "bf16-mixed")
    strategy = instantiate(config.trainer.strategy)
    assert isinstance(strategy, LibraFSDPStrategy)
    layout = strategy.options.rank_layout(64)
    assert (layout.num_replicas, layout.context_parallel, layout.pool_size) == (8, 8, 8)
    module = instantiate(config.module, _convert_="all")
    assert all(layer.gradient_checkpointing for layer in module.model.model.layers)
    batch = next(iter(instantiate(config.data, _convert_="all").train_dataloader()))
    assert batch["input_ids"].shape == (1, 349)
    # The heads of Qwen3-8B.
    strategy.options.pool_layout(num_heads=32, num_kv_heads=8, head_dim=128, bytes_per_element=2, window=None)


def test_every_part_of_the_deepspeed_recipe_can_be_built(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    files = tokens(tmp_path / "tokens", 512)
    small = [f"module.{name}={value}" for name, value in {**WIDTHS, "num_hidden_layers": 1, "vocab_size": 512}.items()]
    config = composed("longcontext_deepspeed_zero3", f"data.documents={files}", *small, *HERE)
    strategy = instantiate(config.trainer.strategy, _convert_="all")
    assert isinstance(strategy, LibraDeepSpeedStrategy)
    assert strategy.config["zero_optimization"]["stage"] == 3
    layout = strategy.options.rank_layout(8)
    assert (layout.num_replicas, layout.context_parallel, layout.pool_size) == (2, 4, 2)
    module = instantiate(config.module, _convert_="all")
    assert module.model.config.rope_parameters["rope_theta"] == 1e6
    assert all(layer.gradient_checkpointing for layer in module.model.model.layers)
    for batch in instantiate(config.data, _convert_="all").train_dataloader():
        assert batch["input_ids"].shape == (1, 349)


def test_a_recipe_may_name_a_strategy_as_it_is_registered() -> None:
    code = (
        "import odb_libra_lightning.cli.train\n"
        "from lightning.pytorch.strategies import StrategyRegistry as names\n"
        "assert {'libra_ddp', 'libra_fsdp2', 'libra_deepspeed'} <= set(names.available_strategies())"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
