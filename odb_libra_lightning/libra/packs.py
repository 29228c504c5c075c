"""A pack, one packed sequence as a batch, and each process's shard of it.

Labels are shifted before the pack is cut, so that the label behind a shard's last row is not lost. In the shard they
stand one row further to the right again, behind every row the next token, as in any batch: a module that shifts them
itself trains on a shard unedited. That takes one row more than the process has of the pack, the *blank row*: it belongs
to no document, bears no label, and what is computed on it reaches no other row and no loss that labels decide. Source:
Libra (arXiv:2607.23250), section 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

# Which tensor says how many rows a pack has: the first of these that is there.
_ROWS_OF = ("input_ids", "inputs_embeds", "position_ids", "labels")
# Facts about the whole pack that no shard may show to a model; the document lengths are read off them.
_OF_THE_WHOLE = (
    *("attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "max_length_q", "max_length_k", "max_seqlen"),
)
_LABELS = ("labels", "shift_labels")


@dataclass(frozen=True, kw_only=True)
class Pack:
    """The documents of a pack.

    Attributes:
        documents: their lengths in order, tokens.
        rows: rows of the batch, padding behind the documents included.
    """

    documents: tuple[int, ...]
    rows: int

    @property
    def tokens(self) -> int:
        """Rows of documents."""
        return sum(self.documents)


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What one process of a replica trains on.

    Attributes:
        batch: its rows of every tensor of the pack, and behind them the blank row if there is one: `[1, rows, ...]`.
        tokens: its rows of documents.
        blank_rows: 1, or 0 where the replica is one process.
        loss_share: factor for the mean over its labels, after which the average over the replica's processes is the
            mean over the pack's. None where the pack has no labels, and is cut.
    """

    batch: dict[str, Any]
    tokens: int
    blank_rows: int
    loss_share: float | None


def read_pack(batch: Any) -> Pack:
    """The documents of a batch of one packed sequence.

    Document lengths are read off `cu_seqlens` or `cu_seq_lens_q` if the batch has one, else off `position_ids`, which
    restart at 0 with each document; a batch without either is one document. Rows at the end that an `attention_mask`
    hides are padding.

    Args:
        batch: a mapping with `input_ids` (or `inputs_embeds`), `[1, T, ...]`.

    Raises:
        TypeError: no mapping.
        ValueError: it is no pack; the sentence says what is amiss.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"the batch is a {type(batch).__name__}: context parallelism needs a mapping such as input_ids, labels and "
            "position_ids, each [1, tokens]"
        )
    name = next((name for name in _ROWS_OF if isinstance(batch.get(name), Tensor)), None)
    if name is None:
        raise ValueError(f"the batch has none of {', '.join(_ROWS_OF)}: its keys are {sorted(map(str, batch))}")
    if batch[name].ndim < 2 or len(batch[name]) != 1:
        raise ValueError(
            f"{name} is {list(batch[name].shape)}: context parallelism takes one packed sequence a batch, "
            "[1, tokens]; collate samples into one with PackingCollator, or use batch_size=1"
        )
    rows = batch[name].shape[1]
    if not rows:
        raise ValueError(f"{name} is {list(batch[name].shape)}: a pack has at least one token")
    for labels in _LABELS:
        if isinstance(batch.get(labels), Tensor) and batch[labels].shape[:2] != (1, rows):
            raise ValueError(
                f"{labels} are {list(batch[labels].shape)}, and {name} has {rows} rows: context parallelism needs a "
                f"label for each row, [1, {rows}], with -100 where there is none"
            )
    tokens = _unpadded(batch.get("attention_mask"), rows)
    return Pack(documents=_documents(batch, tokens, rows), rows=rows)


def _unpadded(mask: Tensor | None, rows: int) -> int:
    if mask is None:
        return rows
    if mask.shape != (1, rows) or (mask.long() > 1).any() or (mask.long().diff() > 0).any() or not mask[0, 0]:
        raise ValueError(
            f"attention_mask, {list(mask.shape)}, is no row of {rows} ones with zeros behind them: pad on the right, "
            "and tell documents of a pack apart by position_ids that restart at 0"
        )
    return int(mask.sum())


def _documents(batch: Mapping[str, Any], tokens: int, rows: int) -> tuple[int, ...]:
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        if batch.get(name) is not None:
            bounds = torch.as_tensor(batch[name]).flatten()
            lengths = bounds.diff()
            if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] > rows or (lengths < 0).any():
                raise ValueError(
                    f"{name} {_shown(bounds)} does not rise from 0 to at most the {rows} rows of the batch"
                )
            return tuple(int(length) for length in lengths if length)
    positions = batch.get("position_ids")
    if positions is None:
        return (tokens,)
    if positions.shape != (1, rows):
        raise ValueError(f"position_ids are {list(positions.shape)}, expected [1, {rows}], as many as there are rows")
    row = positions[0, :tokens]
    starts = row == 0
    broken = (row.diff() != 1) & ~starts[1:]
    if not starts[0] or broken.any():
        at = 0 if not starts[0] else int(broken.nonzero()[0]) + 1
        raise ValueError(
            f"position_ids have {int(row[at])} at row {at}: they begin at 0 and count on by 1 within a document. For "
            "other positions say where documents lie by cu_seqlens"
        )
    begins = starts.nonzero().flatten()
    return tuple(begins.diff(append=begins.new_tensor([tokens])).tolist())


def home_rows(tokens: int, context_parallel: int, cp_rank: int) -> range:
    """Rows of a pack that a process of its replica is home to."""
    return range(cp_rank * tokens // context_parallel, (cp_rank + 1) * tokens // context_parallel)


def shard_pack(
    batch: Mapping[str, Any],
    pack: Pack,
    *,
    context_parallel: int,
    cp_rank: int,
    causal_shift: bool = True,
    ignore_index: int = -100,
) -> Shard:
    """One process's rows of a pack.

    Args:
        batch: the pack. Tensors `[1, rows, ...]` are cut, others kept; `attention_mask` and what else describes the
            whole pack is left out; `position_ids` are added where they are missing.
        pack: what `read_pack` says of it.
        context_parallel: processes of a replica.
        cp_rank: number of the process.
        causal_shift: whether the loss shifts `labels` by one. Otherwise, and for `shift_labels`, the label of a row
            stands at the row.
        ignore_index: label that bears no loss.
    """
    alone, home = context_parallel == 1, home_rows(pack.tokens, context_parallel, cp_rank)
    whole = {str(name): value for name, value in batch.items() if name not in _OF_THE_WHOLE}
    if "position_ids" not in whole:
        reference = next(value for name, value in whole.items() if name in _ROWS_OF)
        positions = [torch.arange(length, device=reference.device) for length in pack.documents]
        whole["position_ids"] = pad(torch.cat(positions), (0, pack.rows - pack.tokens))[None]
    counted = next((name for name in reversed(_LABELS) if isinstance(whole.get(name), Tensor)), None)
    in_pack = in_shard = 0
    cut: dict[str, Any] = {}
    for name, value in whole.items():
        if not (isinstance(value, Tensor) and value.ndim >= 2 and value.shape[:2] == (1, pack.rows)):
            cut[name] = value
        elif name in _LABELS:
            shifts = causal_shift and name == "labels"
            labels = value[:, : pack.tokens]
            of_rows = pad(labels[:, 1:], (0, 1), value=ignore_index) if shifts else labels
            mine = of_rows[:, home.start : home.stop]
            if name == counted:
                in_pack, in_shard = (int((each != ignore_index).sum()) for each in (of_rows, mine))
            if alone:
                cut[name] = labels
            else:
                cut[name] = pad(mine, (1, 0) if shifts else (0, 1), value=ignore_index)
        else:
            rows = value[:, home.start : home.stop]
            last = max(home.stop - 1, 0)
            cut[name] = rows if alone else torch.cat([rows, value[:, last : last + 1]], dim=1)
        if isinstance(value, Tensor) and value.is_pinned():
            cut[name] = cut[name].pin_memory()
    share: float | None = 1.0
    if not alone:
        share = None if counted is None else context_parallel * in_shard / max(in_pack, 1)
    elif counted is not None and not in_pack:
        share = 0.0  # the loss is 0/0
    return Shard(
        batch=cut,
        tokens=len(home),
        blank_rows=0 if alone else 1,
        loss_share=share,
    )


def _shown(values: Tensor) -> str:
    shown = values.tolist()
    return str(shown) if len(shown) <= 8 else f"{str(shown[:8])[:-1]}, ...]"
