"""What training packed sequences must come to: a small decoder in one process, by an explicit mask. No package code.

A pack is a dict of `input_ids`, `labels`, `position_ids`, each `[1, T]`, and sometimes `attention_mask`: documents one
after the other, positions from 0 in each, padding at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY = 48
IGNORED = -100
Pack = dict[str, Tensor]


class Layer(nn.Module):
    """Attention with rotary positions and grouped KV heads, then an MLP. Hidden states are `[1, T, width]`."""

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.inward = nn.Linear(width, (heads + 2 * kv_heads) * head_dim)
        self.outward = nn.Linear(heads * head_dim, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, position_ids: Tensor, attend: Any) -> Tensor:
        projected = self.inward(F.layer_norm(x, x.shape[-1:])).unflatten(-1, (-1, self.head_dim))
        q, k, v = projected.split([self.heads, self.kv_heads, self.kv_heads], -2)
        q, k = rotated(q, position_ids), rotated(k, position_ids)
        x = x + self.outward(attend(q, k, v, position_ids).flatten(-2))
        return x + self.down(F.gelu(self.up(F.layer_norm(x, x.shape[-1:]))))  # type: ignore[no-any-return]


def rotated(x: Tensor, position_ids: Tensor) -> Tensor:
    """Rotary embedding of `[1, T, heads, head_dim]`."""
    half = x.shape[-1] // 2
    frequency = 100.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    angle = position_ids[..., None, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Decoder(L.LightningModule):
    """A decoder whose attention a subclass gives; it knows nothing of parallelism.

    Attributes:
        losses: the module's own mean loss of each training batch.
        labels: how many labels that is a mean over.
        token_losses: loss of each label that counts, in order, of each training batch.
        gradients: of each update, before clipping, by parameter.
        packs: each batch of an epoch of training, before any strategy cuts it; a list for each epoch.
    """

    def __init__(
        self,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 4,
        width: int = 8,
        optimizer: str = "sgd",
        lr: float = 0.3,
        checkpointing: str | None = None,
        seed: int = 0,
        dtype: str = "float64",
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(VOCABULARY, width)
            self.layers = nn.ModuleList(Layer(width, heads, kv_heads, head_dim) for _ in range(2))
            self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.to(getattr(torch, dtype))
        self.optimizer, self.lr, self.checkpointing = optimizer, lr, checkpointing
        self.losses: list[float] = []
        self.labels: list[int] = []
        self.token_losses: list[list[float]] = []
        self.gradients: list[dict[str, list[float]]] = []
        self.packs: list[list[dict[str, list[int]]]] = []
        self.keep_gradients = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            if self.checkpointing is None:
                x = layer(x, position_ids, self.attend)
            else:
                reentrant = self.checkpointing == "reentrant"
                x = checkpoint(layer, x, position_ids, self.attend, use_reentrant=reentrant)
        return self.head(x)  # type: ignore[no-any-return]

    def token_loss(self, pack: Pack) -> Tensor:
        """Loss of each label that counts, `[labels]`: each row predicts the label of the next one."""
        logits, labels = self(pack["input_ids"], pack["position_ids"])[:, :-1], pack["labels"][:, 1:]
        counts = labels != IGNORED
        return F.cross_entropy(logits[counts], labels[counts], reduction="none")

    def on_train_epoch_start(self) -> None:
        self.packs.append([])

    def on_before_batch_transfer(self, batch: Pack, dataloader_idx: int) -> Pack:
        if self.trainer.training:
            self.packs[-1].append({name: values[0].tolist() for name, values in unpadded(batch).items()})
        return batch

    def training_step(self, batch: Pack, batch_idx: int) -> Tensor:
        each = self.token_loss(batch)
        loss = each.mean()  # of no label: 0/0
        self.losses.append(float(loss.detach()))
        self.labels.append(len(each))
        self.token_losses.append(each.detach().tolist())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            # A large epsilon: else the sign of a gradient that is all rounding decides an update.
            return torch.optim.AdamW(self.parameters(), self.lr, eps=1e-3, weight_decay=0.1)
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.5)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.keep_gradients:
            self.gradients.append({name: flat(p.grad) for name, p in self.named_parameters() if p.grad is not None})

    def weights(self) -> dict[str, list[float]]:
        return {name: flat(p) for name, p in self.named_parameters()}


def flat(values: Tensor | Any) -> list[float]:
    """All elements of a tensor, sharded or not."""
    whole = values.detach()
    if hasattr(whole, "full_tensor"):
        whole = whole.full_tensor()
    return whole.flatten().tolist()  # type: ignore[no-any-return]


class DenseDecoder(Decoder):
    """Attention over a whole pack at once, by the mask of its documents."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor) -> Tensor:
        document = (position_ids[0] == 0).cumsum(0)
        row = torch.arange(len(document))
        seen = (document[:, None] == document[None, :]) & (row[None, :] <= row[:, None])
        group = self.layers[0].heads // self.layers[0].kv_heads  # type: ignore[operator]
        keys, values = k[0].repeat_interleave(group, 1), v[0].repeat_interleave(group, 1)
        scores = torch.einsum("ihd,jhd->hij", q[0], keys) / q.shape[-1] ** 0.5
        return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)[None]


def load_weights(module: Decoder, weights: dict[str, list[float]]) -> None:
    """Put what `Decoder.weights` gave into a module."""
    for name, parameter in module.named_parameters():
        parameter.data = torch.tensor(weights[name], dtype=parameter.dtype).view_as(parameter)


def unpadded(pack: Pack) -> Pack:
    """A pack without the rows behind its last document."""
    if "attention_mask" not in pack:
        return pack
    rows = int(pack["attention_mask"].sum())
    return {name: values[:, :rows] for name, values in pack.items() if name != "attention_mask"}


@dataclass
class Trained:
    """What one process came to: per update the gradients and their norm, per pack its mean loss and labels."""

    gradients: list[dict[str, list[float]]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    weights: dict[str, list[float]] = field(default_factory=dict)


def train_alone(
    windows: Iterable[Sequence[Pack]],
    *,
    packs_a_window: int | None = None,
    clip: float | None = None,
    module: Decoder | None = None,
    **decoder: Any,
) -> Trained:
    """Updates in one process, each on all packs of an accumulation window over all replicas.

    Args:
        windows: the packs of each update.
        packs_a_window: weigh every pack by its own mean loss, over so many of them. None: the mean over all labels.
        clip: largest norm of the gradient.
        module: goes on from its weights; a new one otherwise.
        **decoder: settings of the decoder.
    """
    module = DenseDecoder(**decoder) if module is None else module
    optimizer, trained = module.configure_optimizers(), Trained()
    parameters = dict(module.named_parameters())
    for packs in windows:
        losses = [module.token_loss(unpadded(pack)) for pack in packs]
        trained.losses += [float(each.detach().mean()) for each in losses]
        trained.labels += [len(each) for each in losses]
        if packs_a_window is None:
            everything = torch.cat(losses)
            total = everything.sum() / max(len(everything), 1)
        else:
            total = torch.stack([each.sum() / max(len(each), 1) for each in losses]).sum() / packs_a_window
        gradients = torch.autograd.grad(total, list(parameters.values()))
        trained.gradients.append({name: flat(g) for name, g in zip(parameters, gradients, strict=True)})
        norm = float(torch.cat([g.flatten() for g in gradients]).norm())
        trained.norms.append(norm)
        # As torch clips, which keeps the norm a millionth below the limit.
        factor = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
        for parameter, gradient in zip(parameters.values(), gradients, strict=True):
            parameter.grad = gradient * factor
        optimizer.step()
    trained.weights = module.weights()
    return trained


def largest_gap(ours: dict[str, list[float]], right: dict[str, list[float]]) -> float:
    """Largest difference of any element of any parameter; each has the same parameters."""
    assert ours.keys() == right.keys()
    gaps = []
    for name, values in right.items():
        assert len(ours[name]) == len(values), name
        gaps.append((torch.tensor(ours[name], dtype=torch.float64) - torch.tensor(values, dtype=torch.float64)).abs())
    return float(torch.cat(gaps).max())
