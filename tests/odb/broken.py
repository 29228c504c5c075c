"""A dataset of which one sample is bad, in each way that a test asks for."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

from odb_libra_lightning import ODBLoader
from tests.samples import Documents, pad


class Broken(Documents):
    """Sample 57 is bad in a way of choice."""

    def __init__(self, size: int, how: str) -> None:
        super().__init__(size)
        self.how = how

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        if index == 57:
            if self.how == "raises":
                raise OSError("disk on fire")
            if self.how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "empty":
                return {"input_ids": torch.empty(0), "labels": torch.empty(0)}
            if self.how == "no length":
                return {"text": "seven"}
            if self.how == "long":
                return {"input_ids": torch.zeros(5000), "labels": torch.zeros(5000)}
        return sample


def bad_pad(samples: list[Any]) -> Any:
    if any(int(sample["input_ids"][0]) == 57 for sample in samples):
        raise RuntimeError("cannot pad")
    return pad(samples)


FAULTS = [
    ("raises", {}, "sample 57: OSError: disk on fire"),
    ("empty", {}, "sample 57 is empty .*empty='drop'"),
    ("no length", {}, "sample 57: TypeError: the length of a dict with keys \\['text'\\].*pass length_fn"),
    ("long", {"oversize": "error"}, "sample 57 has 5000 tokens, over l_max=1000"),
    ("bad collate", {}, "collating samples \\[.*57.*\\]: RuntimeError: cannot pad"),
]


def broken_loader(how: str, **settings: Any) -> ODBLoader:
    return ODBLoader(Broken(100, how), bad_pad if how == "bad collate" else pad, l_max=1000, **settings)
