"""Token files: what was written is read, and nothing else is taken for it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odb_libra_lightning import TokenFiles
from odb_libra_lightning.data.token_files import TokenWriter

DOCUMENTS = [[5, 6, 7], [0], [299, 1, 2, 3]]


def write(folder: Path, documents: Any = DOCUMENTS, masks: Any = None, **settings: Any) -> TokenFiles:
    with TokenWriter(folder, **{"vocab_size": 300, "loss_mask": masks is not None, **settings}) as writer:
        for number, ids in enumerate(documents):
            writer.add(ids, loss_mask=None if masks is None else masks[number])
    return TokenFiles(folder)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(300, np.uint16), (65_536, np.uint16), (65_537, np.uint32)])
def test_documents_come_back_in_the_smallest_type_that_holds_them(vocab_size: int, dtype: Any, tmp_path: Path) -> None:
    files = write(tmp_path / "t", [*DOCUMENTS, [vocab_size - 1]], vocab_size=vocab_size)
    assert [files[i].tolist() for i in range(len(files))] == [*DOCUMENTS, [vocab_size - 1]]
    assert files.lengths.tolist() == [3, 1, 4, 1]
    assert files[0].dtype == dtype
    assert isinstance(files[0], np.memmap), "a view of the file, not a copy"
    assert files.loss_mask(0) is None


def test_masks_make_labels_and_are_counted(tmp_path: Path) -> None:
    files = write(tmp_path / "t", masks=[[1, 0, 1], [1], [0, 1, 1, 0]])
    ids, labels = files.read(2, 1, 4)
    assert (ids.tolist(), labels.tolist()) == ([1, 2, 3], [1, 2, -100])
    document, start, length = np.array([0, 1, 2, 2]), np.array([0, 0, 0, 1]), np.array([3, 1, 4, 2])
    # By hand: the first token of a piece bears none.
    assert files.loss_tokens(document, start, length).tolist() == [1, 0, 2, 1]


def test_a_pickle_holds_the_folder_and_not_the_tokens(tmp_path: Path) -> None:
    files = write(tmp_path / "t", [np.zeros(100_000, np.int64)])
    data = pickle.dumps(files)
    assert len(data) < 10_000
    assert pickle.loads(data)[0].tolist() == [0] * 100_000


def test_a_writing_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="token id 9"), TokenWriter(tmp_path / "t", vocab_size=9) as writer:
        writer.add([1, 9])
    assert not list(tmp_path.iterdir())


def test_a_folder_is_replaced_only_if_that_is_asked_for_and_it_holds_token_files(tmp_path: Path) -> None:
    write(tmp_path / "t")
    with pytest.raises(ValueError, match="is there already"):
        write(tmp_path / "t")
    assert len(write(tmp_path / "t", [[1]], overwrite=True)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["t"]
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="no folder of token files"):
        write(tmp_path / "other", overwrite=True)


@pytest.mark.parametrize(
    ("ids", "says"), [([], "expected token ids"), ([300], "token id 300"), ([-1], "token id -1"), ([1.5], "float64")]
)
def test_what_is_no_document_is_refused_by_its_number(ids: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"document 1: .*{says}"):
        write(tmp_path / "t", [[1], ids])


def test_no_document_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no document"):
        write(tmp_path / "t", [])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.npy", "loss_mask.bin", "meta.json"])
@pytest.mark.parametrize("harm", ["cut", "missing"])
def test_a_folder_that_is_not_whole_is_refused(name: str, harm: str, tmp_path: Path) -> None:
    write(tmp_path / "t", masks=[[1, 0, 1], [1], [0, 1, 1, 0]])
    path = tmp_path / "t" / name
    if harm == "cut":
        path.write_bytes(path.read_bytes()[:-3])
    else:
        path.unlink()
    with pytest.raises(ValueError, match=r"t: .*again|no folder of token files"):
        TokenFiles(tmp_path / "t")


def test_offsets_of_another_writing_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "one")
    write(tmp_path / "two", [[1], [2]])
    (tmp_path / "two" / "offsets.npy").rename(tmp_path / "one" / "offsets.npy")
    with pytest.raises(ValueError, match="not of one writing"):
        TokenFiles(tmp_path / "one")


@pytest.mark.parametrize(("changed", "says"), [({"format": "x"}, "something else"), ({"version": 9}, "version 9")])
def test_another_format_or_version_is_refused(changed: dict[str, Any], says: str, tmp_path: Path) -> None:
    write(tmp_path / "t")
    path = tmp_path / "t" / "meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    with pytest.raises(ValueError, match=says):
        TokenFiles(tmp_path / "t")


def test_a_folder_that_is_not_there_says_what_makes_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="odb-libra tokenize"):
        TokenFiles(tmp_path / "nowhere")
