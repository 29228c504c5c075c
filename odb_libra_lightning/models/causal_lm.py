"""A Hugging Face causal language model as a LightningModule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from odb_libra_lightning.strategies.libra import ContextParallelStrategy


class CausalLM(LightningModule):
    """A causal language model with random weights, or one from a local folder.

    The loss is the mean over the batch's labels other than -100 after the shift, and 0 where there are none.

    Nothing here knows about dynamic batches. To train a module of your own, let its `training_step` return
    the mean loss over the batch's label tokens, and give it to the Trainer in place of this one.

    Args:
        architecture: a causal language model of transformers by its class name.
        pretrained: folder of `save_pretrained`, loaded in float32, in place of `architecture` and `config`.
        lr: AdamW's learning rate.
        weight_decay: AdamW's decoupled weight decay, on all weights.
        betas: AdamW's betas.
        warmup_steps: optimizer steps over which the rate rises linearly to `lr`. Nothing falls after it: how
            many steps an epoch has is not known before it ends.
        gradient_checkpointing: keep of each layer its input alone, and compute the rest again in backward.
        **config: values of the architecture's configuration, such as `vocab_size`, `hidden_size`,
            `num_hidden_layers`, `num_attention_heads`, `num_key_value_heads`, `tie_word_embeddings`.

    Raises:
        ValueError: an architecture or a configuration value that does not exist, or a bad combination.
        ModuleNotFoundError: the `hf` extra is missing.
    """

    def __init__(
        self,
        architecture: str = "LlamaForCausalLM",
        *,
        pretrained: str | None = None,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: int = 0,
        gradient_checkpointing: bool = False,
        **config: Any,
    ) -> None:
        super().__init__()
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps}: take 0 or more")
        if pretrained is not None and config:
            raise ValueError(f"pretrained={pretrained!r} brings its own configuration: drop {sorted(config)}")
        betas = (betas[0], betas[1])  # a recipe gives a list of its own kind, which no checkpoint should hold
        self.save_hyperparameters()
        self.lr, self.weight_decay, self.betas, self.warmup_steps = lr, weight_decay, betas, warmup_steps
        self.model = _random_model(architecture, config) if pretrained is None else _stored_model(pretrained)
        self.model.config.use_cache = False
        if gradient_checkpointing:
            # Its name in transformers 5; the older one warns there.
            enable = getattr(self.model, "activation_checkpointing_enable", None)
            (enable or self.model.gradient_checkpointing_enable)({"use_reentrant": False})
        self.model.train()  # the Trainer keeps the mode, and from_pretrained leaves that of evaluation

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Mean loss over the label tokens of `input_ids`, `attention_mask`, `labels`, all `[n, L]`."""
        loss, _ = self._loss(batch)
        # Under context parallelism it is that of one process's rows, and `train/token_loss` stands on the bar.
        on_bar = self._trainer is None or not isinstance(self._trainer.strategy, ContextParallelStrategy)
        self.log("train/loss", loss.detach(), on_step=True, prog_bar=on_bar, batch_size=len(batch["input_ids"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the same loss; batches count by their label tokens, so the epoch's mean is over tokens."""
        loss, label_tokens = self._loss(batch)
        self.log("val/loss", loss, prog_bar=True, batch_size=int(label_tokens), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """AdamW, with a warm-up by steps where one is asked for."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=self.betas, weight_decay=self.weight_decay)
        if not self.warmup_steps:
            return optimizer
        warmup = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / self.warmup_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}

    def _loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        label_tokens = (batch["labels"][:, 1:] != -100).sum()
        # The mean over no labels is 0 / 0, without a gradient.
        return torch.where(label_tokens > 0, self.model(**batch).loss, 0.0), label_tokens


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        hint = "install the extra hf, in a clone by: pip install '.[hf]'"
        raise ModuleNotFoundError(f"transformers is missing ({error}); {hint}") from error
    return transformers


def _random_model(architecture: str, config: dict[str, Any]) -> Any:
    transformers = _transformers()
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if architecture not in known:
        raise ValueError(
            f"architecture={architecture!r} is no causal language model of "
            f"transformers {transformers.__version__}; expected e.g. 'LlamaForCausalLM'"
        )
    model_class = getattr(transformers, architecture)
    defaults = model_class.config_class()
    # A configuration takes any name: a misspelt one would leave a default of billions of weights in place.
    unknown = sorted(name for name in config if not hasattr(defaults, name))
    if unknown:
        raise ValueError(f"{type(defaults).__name__} has no {', '.join(unknown)}: check the spelling")
    return model_class(model_class.config_class(**config))


def _stored_model(pretrained: str) -> Any:
    folder = Path(pretrained).expanduser()
    if not (folder / "config.json").is_file():
        raise ValueError(f"pretrained={pretrained!r} holds no config.json: give a folder of save_pretrained")
    return _transformers().AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True, dtype=torch.float32)
