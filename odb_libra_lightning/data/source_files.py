"""Real text that every machine has: the source files of Python's standard library."""

from __future__ import annotations

import fnmatch
import os
import random
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from odb_libra_lightning.data.tokenizers import TokenizerFile, train_tokenizer

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})


class SourceFiles(Dataset[dict[str, Tensor]]):
    """Source files as token ids, one file a sample, for causal language modelling.

    A file is read and turned into tokens in `__getitem__`, so in the DataLoader's worker: no length is known
    before. Order and choice depend on the folder and the arguments alone, so ranks on machines with the same
    files hold the same dataset.

        data = SourceFiles(max_length=2048)
        data[0]["input_ids"]  # LongTensor [tokens]

    Args:
        root: folder searched with everything below it, without `site-packages`, `dist-packages` and
            `__pycache__`. By default the standard library of the running Python.
        pattern: file names to take, as in `fnmatch`.
        limit: take a random subset of so many files, the same for the same `seed`; all if there are fewer.
        seed: chooses the subset.
        max_length: most tokens a sample; of longer files the end is cut off.
        tokenizer: path of a `tokenizer.json` or of a Hugging Face tokenizer's folder. By default a
            byte-level BPE trained on a sample of all the files found, whatever `limit` and `seed`: two
            subsets of one folder speak the same tokens.
        vocab_size: size of that BPE, at least 257; ignored where `tokenizer` is given.
        cache_dir: where that BPE is kept, see `train_tokenizer`.

    Attributes:
        files: the paths, sorted; sample `i` is file `i`.
        tokenizer: the `TokenizerFile`; give its `path` to another dataset that must share it.

    Raises:
        ValueError: no such folder, no readable file in it, or an argument out of range.
        ModuleNotFoundError: the `hf` extra is missing.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        pattern: str = "*.py",
        limit: int | None = None,
        seed: int = 0,
        max_length: int | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        vocab_size: int = 4096,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit={limit} leaves no file: take at least 1, or None for all")
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length={max_length} leaves no token: take at least 1, or None for all")
        files = find_files(root, pattern)
        if tokenizer is None:
            tokenizer = train_tokenizer(files, vocab_size=vocab_size, cache_dir=cache_dir)
        if limit is not None and limit < len(files):
            files = sorted(random.Random(seed).sample(files, limit))
        self.files = files
        self.max_length = max_length
        self.tokenizer = TokenizerFile(tokenizer)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One file.

        Returns:
            `input_ids` and `labels`, both int64 `[tokens]` and equal: the model shifts, as Hugging Face's do.
        """
        text = self.files[index].read_text(encoding="utf-8", errors="replace")
        input_ids = torch.tensor(self.tokenizer.encode(text, max_length=self.max_length), dtype=torch.long)
        return {"input_ids": input_ids, "labels": input_ids.clone()}


def find_files(root: str | os.PathLike[str] | None = None, pattern: str = "*.py") -> list[Path]:
    """Sorted paths of the readable files with something in them, below `root`.

    Args:
        root: folder; by default the standard library of the running Python.
        pattern: file names to take, as in `fnmatch`.

    Raises:
        ValueError: no such folder, or no such file in it.
    """
    folder = Path(sysconfig.get_paths()["stdlib"] if root is None else root).expanduser().resolve()
    if not folder.is_dir():
        raise ValueError(f"root {str(root)!r} is not a folder")
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        found += [path for name in fnmatch.filter(names, pattern) if _has_text(path := Path(parent, name))]
    if not found:
        raise ValueError(f"{folder} holds no readable, non-empty file that matches {pattern!r}")
    return sorted(found)


def _has_text(path: Path) -> bool:
    if not path.is_file():  # a pipe would be waited for
        return False
    try:
        with path.open("rb") as file:
            return bool(file.read(1))
    except OSError:
        return False
