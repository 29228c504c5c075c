"""What a module logs of rows without a label: a mean over nothing, which has no part in an epoch's mean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L
from torch import Tensor


@contextmanager
def kept_out_of_epochs(trainer: L.Trainer) -> Iterator[None]:
    """Leave what is logged within the block out of the trainer's epoch values, as if nothing had been logged.

    Under context parallelism a process may hold rows of a pack of which none bears a label. The loss of these rows is
    0/0, and would make NaN of a mean that is well defined. Values of single steps are not touched, nor are metrics that
    the module keeps itself.
    """
    before = {name: _accumulated(metric) for name, metric in (trainer._results or {}).items()}
    yield
    for name, metric in (trainer._results or {}).items():
        if not (metric.is_tensor and metric.meta.on_epoch):
            continue
        for state, now in _accumulated(metric).items():
            # Of the same dtype as on processes that keep theirs, with whom it is summed.
            setattr(metric, state, before.get(name, metric._defaults)[state].to(now))


def _accumulated(metric: object) -> dict[str, Tensor]:
    """The sums of a logged value; updates replace these tensors and do not write into them."""
    states = ("value", "cumulated_batch_size")
    return {state: getattr(metric, state) for state in states if isinstance(getattr(metric, state, None), Tensor)}
