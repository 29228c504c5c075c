"""Files that a command writes: what is refused before the work, and what is left where writing fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from odb_libra_lightning.cli.output_files import check_outputs, write_whole


@pytest.mark.parametrize(
    ("csv", "picture", "sentence"),
    [
        ("/dev/null", None, "--csv /dev/null: this is a device or a pipe"),
        ("/proc/x.csv", None, "--csv /proc/x.csv: cannot be written"),
        ("n" * 300, None, r"--csv n*: cannot be written \(File name too long\)"),
        (".", None, "--csv .: this is a folder"),
        ("nowhere/f.csv", None, "--csv nowhere/f.csv: there is no folder"),
        ("p.svg", "folder/../p.svg", "--picture folder/../p.svg: this is the file of --csv"),
        (None, "read.npy", "--picture read.npy: this is the file of LENGTHS"),
        ("soft.npy", None, "--csv soft.npy: this is the file of LENGTHS"),
        ("hard.npy", None, "--csv hard.npy: this is the file of LENGTHS"),
        ("read.json", None, "--csv read.json: this is the file of --calibration"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_and_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, csv: str | None, picture: str | None, sentence: str
):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    for name in ("read.npy", "read.json"):
        Path(name).write_text(name)
    Path("soft.npy").symlink_to("read.npy")
    Path("hard.npy").hardlink_to("read.npy")
    before = {path: path.is_file() and path.read_text() for path in tmp_path.iterdir()}
    outputs = {"--csv": csv and Path(csv), "--picture": picture and Path(picture)}
    with pytest.raises(ValueError, match=sentence):
        check_outputs(outputs, inputs={"LENGTHS": Path("read.npy"), "--calibration": Path("read.json")})
    assert {path: path.is_file() and path.read_text() for path in tmp_path.iterdir()} == before


def test_a_file_that_can_be_written_is_written_whole_also_behind_a_link(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link.csv").symlink_to(tmp_path / "real" / "f.csv")
    for text in ("first", "second"):
        check_outputs({"--csv": tmp_path / "link.csv", "--picture": None}, inputs={"LENGTHS": Path("a-mix")})
        write_whole(tmp_path / "link.csv", lambda path, text=text: path.write_text(text), option="--csv")
        assert (tmp_path / "real" / "f.csv").read_text() == text
    assert (tmp_path / "link.csv").is_symlink()
    assert [path.name for path in (tmp_path / "real").iterdir()] == ["f.csv"]


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), RuntimeError("a bug")])
def test_where_writing_fails_the_old_file_stays(tmp_path: Path, fault: Exception):
    def half(path: Path) -> None:
        path.write_text("half")
        raise fault

    (tmp_path / "f.csv").write_text("whole")
    with pytest.raises((ValueError, RuntimeError), match=r"No space left on device|a bug"):
        write_whole(tmp_path / "f.csv", half, option="--csv")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["whole"]
