"""`odb-libra tokenize`: every source gives its documents, and bad input one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from odb_libra_lightning import TokenFiles
from odb_libra_lightning.cli.main import app
from odb_libra_lightning.data.tokenizers import TokenizerFile

TEXTS = ["The first document, with a line\nand another.\n", "Ein zweites: äöü <|endoftext|>", "third"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(*arguments: Any, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["tokenize", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def source(kind: str, folder: Path) -> list[Any]:
    """A source with `TEXTS` and an empty one, and the options to read it."""
    texts = [*TEXTS, ""]
    if kind == "folder":
        (folder / "in").mkdir()
        for number, text in enumerate(TEXTS):
            (folder / "in" / f"{number}.md").write_text(text)
        return [folder / "in", "--pattern", "*.md"]
    path = folder / f"in.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts))
    elif kind == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        pyarrow = pytest.importorskip("pyarrow")
        parquet.write_table(pyarrow.table({"body": texts}), path)
        return [path, "--column", "body"]
    else:
        path.write_text("\n====\n".join(texts) + "\n")
        return [path, "--separator", "===="]
    return [path]


@pytest.mark.parametrize("kind", ["folder", "jsonl", "parquet", "txt"])
def test_every_source_gives_its_documents_each_with_an_end(kind: str, tmp_path: Path) -> None:
    results = json.loads(run(*source(kind, tmp_path), tmp_path / "out", "--json", "--vocab-size", 300).stdout)
    files, tokenizer = TokenFiles(tmp_path / "out"), TokenizerFile(results["tokenizer"])
    ends = [tokenizer.decode(files[i].tolist()) for i in range(len(files))]
    assert [text.removesuffix("<|endoftext|>").rstrip("\n") for text in ends] == [text.rstrip("\n") for text in TEXTS]
    assert all(text.endswith("<|endoftext|>") for text in ends)
    assert results["tokens"] == files.lengths.sum()
    assert results["skipped"] == (0 if kind == "folder" else 1)
    assert files[1].tolist().count(0) == 1, "what looks like the end in a text stays text"


def test_a_tokenizer_is_taken_as_given_and_the_end_may_be_left_out(tmp_path: Path) -> None:
    given = source("jsonl", tmp_path)
    first = json.loads(run(*given, tmp_path / "one", "--json").stdout)
    run(*given, tmp_path / "two", "--tokenizer", first["tokenizer"], "--no-eos")
    one, two = TokenFiles(tmp_path / "one"), TokenFiles(tmp_path / "two")
    assert [two[i].tolist() for i in range(3)] == [one[i].tolist()[:-1] for i in range(3)]
    assert one.meta["tokenizer_sha256"] == two.meta["tokenizer_sha256"]


def test_a_folder_that_is_there_is_replaced_only_if_asked_for(tmp_path: Path) -> None:
    given = [*source("jsonl", tmp_path), tmp_path / "out"]
    run(*given)
    assert "--overwrite" in run(*given, code=2).stderr
    run(*given, "--overwrite")
    assert len(TokenFiles(tmp_path / "out")) == 3


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"text": "good"}\nnot json\n', "line 2: not JSON"),
        ('{"body": "x"}\n', "an object with a text 'text', got only body"),
        ('{"text": 3}\n', "'text' is of type int"),
        ("[1]\n", "got list"),
        ("\n", "holds no text"),
    ],
)
def test_bad_lines_give_one_sentence_and_no_folder(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(content)
    error = run(path, tmp_path / "out", code=2).stderr
    assert says in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "nowhere: no such file or folder" in run(tmp_path / "nowhere", tmp_path / "out", code=2).stderr


def test_bytes_that_are_no_parquet_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "in.parquet").write_bytes(b"nothing of the kind")
    assert "not a readable Parquet file" in run(tmp_path / "in.parquet", tmp_path / "out", code=2).stderr
