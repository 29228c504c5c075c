"""Document lengths from what a person names on the command line: a file, a named mix, or a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from odb_libra_lightning.data.length_files import read_lengths
from odb_libra_lightning.data.length_mixes import LENGTH_MIXES, length_mix
from odb_libra_lightning.libra.whole_numbers import checked_count

Progress = Callable[[int, int], None]

_WITH_COLUMNS = (".jsonl", ".parquet")
_MOST_DRAWN = 10**8  # documents of a mix: what memory of a workstation holds
_DRAWN_AT_ONCE = 1.1  # times the documents that the mean length says are needed


def document_lengths(
    source: str,
    *,
    tokens: int,
    documents: int | None = None,
    column: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> NDArray[np.int64]:
    """Lengths from a source, in tokens.

    Args:
        source: a file that `read_lengths` reads, the name of a mix in `LENGTH_MIXES`, or a recipe (`.yaml`), of which
            the training dataset is built and every sample's length read.
        tokens: how many tokens to draw from a mix at least, unless `documents` is given.
        documents: draw so many documents from a mix; of a file or dataset, take at most so many, at random.
        column: the field of a `.jsonl` or `.parquet` file.
        seed: of what is random.
        progress: called with the samples of a dataset that have been read and are to be read.

    Raises:
        ValueError: nothing of that name, one that has no lengths, a column of what has none, or more documents of a
            mix than memory holds; one sentence.
    """
    if documents is not None:
        checked_count("documents", documents)
    path = Path(source)
    if column is not None and (path.suffix in (".yaml", ".yml") or (source in LENGTH_MIXES and not path.exists())):
        raise ValueError(f"--column {column} names a field of a .jsonl or .parquet file; {source} has none")
    if path.suffix in (".yaml", ".yml"):
        return _recipe_lengths(path, documents, seed, progress)
    if source in LENGTH_MIXES and not path.exists():
        return _mix_lengths(source, tokens, documents, seed)
    if not path.exists() and not path.suffix:
        raise ValueError(
            f"{source}: no such file, and no mix of lengths has this name; the mixes are {', '.join(LENGTH_MIXES)}"
        )
    try:
        lengths = read_lengths(path, column=column)
    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from error
    except ValueError as error:
        if path.suffix in _WITH_COLUMNS and "column" in str(
            error
        ):  # the reader does not know what the option is called
            raise ValueError(f"{error}; the option is --column") from error
        raise
    return lengths[_some(len(lengths), documents, seed)]


def _mix_lengths(name: str, tokens: int, documents: int | None, seed: int) -> NDArray[np.int64]:
    size = documents or int(_DRAWN_AT_ONCE * tokens / LENGTH_MIXES[name].mean) + 1
    if size > _MOST_DRAWN:
        raise ValueError(
            f"{size} documents of {name} would be drawn, and at most {_MOST_DRAWN} are: take fewer documents, steps or "
            "packed sequences, or give a file of lengths"
        )
    if documents is not None:
        return length_mix(name, documents, seed=seed)
    # Of long tails a draw can fall short of its mean by far.
    while (lengths := length_mix(name, size, seed=seed)).sum() < tokens:
        size *= 2
    return lengths


def _some(count: int, documents: int | None, seed: int) -> NDArray[np.int64]:
    if documents is None or documents >= count:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).choice(count, size=documents, replace=False))


def _recipe_lengths(path: Path, documents: int | None, seed: int, progress: Progress | None) -> NDArray[np.int64]:
    # Lightning and torch take seconds to import, which lengths from a file do not need.
    from odb_libra_lightning.cli.recipe import RecipeError, compose_recipe, one_line, resolve_recipe
    from odb_libra_lightning.odb.lengths import realized_length

    config = resolve_recipe(compose_recipe(path))
    if config.get("data") is None or config.data.get("train_dataset") is None:
        raise RecipeError(f"recipe {path} has no data.train_dataset to read lengths from; save them to a file instead")
    dataset = _build(config.data.train_dataset, "data.train_dataset")
    length_fn = realized_length
    if config.data.get("length_fn") is not None:
        length_fn = _build(config.data.length_fn, "data.length_fn")
    lengths = []
    try:
        for sample, total in _samples(dataset, documents, seed):
            lengths.append(length_fn(sample))
            if progress is not None:
                progress(len(lengths), total)
    except Exception as error:
        raise RecipeError(f"data.train_dataset, sample {len(lengths)}: {one_line(error)}") from error
    if not lengths or min(lengths) < 1:
        raise RecipeError(f"data.train_dataset of {path} has no samples, or one of no tokens")
    return np.array(lengths, dtype=np.int64)


def _build(node: Any, key: str) -> Any:
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    from odb_libra_lightning.cli.recipe import RecipeError, one_line

    try:
        return instantiate(node, _convert_="all")
    except Exception as error:
        cause = error.__cause__ if isinstance(error, InstantiationException) and error.__cause__ else error
        raise RecipeError(f"{key}: {one_line(cause)}") from error


def _samples(dataset: Any, documents: int | None, seed: int) -> Iterator[tuple[Any, int]]:
    """Samples with their number, 0 where it is not known."""
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        positions = _some(len(dataset), documents, seed)
        for position in positions.tolist():
            yield dataset[position], len(positions)
        return
    for number, sample in enumerate(dataset):
        if number == documents:
            return
        yield sample, documents or 0
