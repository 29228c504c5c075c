"""Lengths read back from every format, and each kind of wrong file refused by name."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import numpy as np
import pytest

from odb_libra_lightning.data.length_files import FIELDS, read_lengths

LENGTHS = [3, 70_000, 1, 2**40]


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def parquet(folder: Path, **columns: list[object]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = folder / "data.parquet"
    parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return path


def test_npy_json_and_text(tmp_path: Path) -> None:
    for dtype in (np.int64, np.uint64):
        np.save(tmp_path / "lengths.npy", np.array(LENGTHS, dtype=dtype))
        assert read_lengths(tmp_path / "lengths.npy").tolist() == LENGTHS
    for path in (
        written(tmp_path, "lengths.json", json.dumps(LENGTHS)),
        written(tmp_path, "LENGTHS.JSON", json.dumps(LENGTHS, indent=1)),
        written(tmp_path, "lengths.txt", "3\n70000\n\n 1 \n1099511627776"),
        written(tmp_path, "lengths", "3\n70000\n1\n1099511627776\n"),
    ):
        lengths = read_lengths(str(path))
        assert (lengths.dtype, lengths.tolist()) == (np.int64, LENGTHS)


def test_json_lines_take_numbers_and_the_first_known_field(tmp_path: Path) -> None:
    lines = [
        "3",
        '{"length": 4, "num_tokens": 9}',
        '{"text": "a", "num_tokens": 5}',
        "",
        '{"tokens": [7, 7, 7]}',
        '{"tokens": 8}',
        '{"input_ids": [1, 2]}',
    ]
    path = written(tmp_path, "docs.jsonl", "\n".join(lines))
    assert read_lengths(path).tolist() == [3, 4, 5, 3, 8, 2]
    path = written(tmp_path, "docs.jsonl", '{"length": 4, "n": 6}\n{"n": [1, 2]}\n')
    assert read_lengths(path, column="n").tolist() == [6, 2]
    assert FIELDS == ("length", "num_tokens", "tokens", "input_ids")


def test_parquet_takes_the_column_of_whole_numbers_or_counts_lists(tmp_path: Path) -> None:
    path = parquet(tmp_path, text=["a", "b", "c"], n=[5, 6, 7], ids=[[1], [1, 2], [1, 2, 3]])
    assert read_lengths(path).tolist() == [5, 6, 7]
    assert read_lengths(path, column="n").dtype == np.int64
    assert read_lengths(path, column="ids").tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("columns", "column", "says"),
    [
        ({"a": [1], "b": [2]}, None, r"2 columns of whole numbers among \['a', 'b'\]; name one with column"),
        ({"a": ["x"]}, None, "0 columns of whole numbers"),
        ({"a": [1]}, "b", r"no column 'b', only \['a'\]"),
        ({"a": [1.5]}, "a", "column 'a' holds double; expected whole numbers or lists"),
        ({"a": [1, None]}, None, "column 'a' has 1 rows without a value"),
        ({"a": [[1], None]}, "a", "column 'a' has 1 rows without a value"),
        ({"a": [1, 0]}, None, "document length 0 at position 1: expected 1 token"),
        ({"a": [[1], []]}, "a", "document length 0 at position 1: expected 1 token"),
    ],
)
def test_wrong_parquet_files_are_refused(
    tmp_path: Path, columns: dict[str, list[object]], column: str | None, says: str
) -> None:
    path = parquet(tmp_path, **columns)
    with pytest.raises(ValueError, match=rf"data\.parquet: {says}"):
        read_lengths(path, column=column)


def test_a_parquet_file_that_is_none_or_empty(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    with pytest.raises(ValueError, match=r"x\.parquet: not a readable Parquet file"):
        read_lengths(written(tmp_path, "x.parquet", "3\n4\n"))
    parquet.write_table(pyarrow.table({"n": pyarrow.array([], pyarrow.int64())}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"x\.parquet: no document lengths: expected at least one"):
        read_lengths(tmp_path / "x.parquet")


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *args: object, **kwargs: object) -> object:
        if name.split(".")[0] == "pyarrow":
            raise ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow")
        return real(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'odb-libra-lightning\[simulate\]'"):
        read_lengths(written(tmp_path, "x.parquet", ""))
    assert read_lengths(written(tmp_path, "x.txt", "3")).tolist() == [3]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.txt", "12\n7.5\n", r"a\.txt, line 2: expected a whole number, got '7\.5'; other formats .*\.jsonl"),
        ("a.csv", "length\n12\n", r"a\.csv, line 1: expected a whole number, got 'length'"),
        ("a.txt", "\n \n", r"a\.txt: no document lengths: expected at least one"),
        ("a.txt", "4\n-1\n", r"a\.txt: document length -1 at position 1: expected 1 token"),
        ("a.txt", "9223372036854775808", r"a\.txt: document length 9223372036854775808 at position 0: .* to 2\*\*62"),
        ("a.txt", "99999999999999999999", r"a\.txt: document lengths of type object .* a flat list of whole numbers"),
        ("a.npy", "3\n4\n", r"a\.npy: not a \.npy file of whole numbers"),
        ("a.npy", "", r"a\.npy: not a \.npy file of whole numbers"),
        ("a.json", "", r"a\.json: not JSON"),
        ("a.json", "[]", r"a\.json: no document lengths: expected at least one"),
        ("a.json", '{"length": [1]}', r"a\.json: expected a flat list of whole numbers, got dict"),
        ("a.json", "[1, 2.5]", r"a\.json: expected a whole number at position 1, got 2\.5"),
        ("a.json", "[true]", r"a\.json: expected a whole number at position 0, got True"),
        ("a.json", "[1, [2]]", r"a\.json: expected a whole number at position 1, got \[2\]"),
        ("a.json", "[" * 100_000, r"a\.json: not JSON"),
        ("a.jsonl", "1\n{", r"a\.jsonl, line 2: not JSON"),
        ("a.jsonl", '1\n"2"', r"a\.jsonl, line 2: expected a whole number, or an object with one, got '2'"),
        ("a.jsonl", '{"length": "2"}', r"a\.jsonl, line 1, field length: expected a whole number"),
        (
            "a.jsonl",
            '{"size": 2}',
            r"line 1: no field length, num_tokens, tokens, input_ids, only \['size'\]; name one",
        ),
        ("a.jsonl", "", r"a\.jsonl: no document lengths: expected at least one"),
    ],
)
def test_wrong_files_are_refused_by_name(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_lengths(written(tmp_path, name, text))


def test_files_that_are_not_there_not_text_or_hold_objects(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.npy: no such file; expected \.npy"):
        read_lengths(tmp_path / "none.npy")
    with pytest.raises(ValueError, match="a folder; expected"):
        read_lengths(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe3")
    with pytest.raises(ValueError, match=r"a\.txt: cannot be read \('utf-8' codec"):
        read_lengths(tmp_path / "a.txt")
    np.save(tmp_path / "objects.npy", np.array([3, 4], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"objects\.npy: not a \.npy file .*allow_pickle=False"):
        read_lengths(tmp_path / "objects.npy")
    for bad in (np.array([1.5]), np.array([[1]]), np.array([True])):
        np.save(tmp_path / "bad.npy", bad)
        with pytest.raises(ValueError, match=r"bad\.npy: document lengths of type .* a flat list of whole numbers"):
            read_lengths(tmp_path / "bad.npy")
    np.savez(tmp_path / "two.npz", a=[1])
    (tmp_path / "two.npz").rename(tmp_path / "two.npy")
    with pytest.raises(ValueError, match=r"two\.npy: an archive of arrays"):
        read_lengths(tmp_path / "two.npy")
    with pytest.raises(ValueError, match=r"a\.json: column='n' is for \.jsonl and \.parquet"):
        read_lengths(written(tmp_path, "a.json", "[1]"), column="n")
