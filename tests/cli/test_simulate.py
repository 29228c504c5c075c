"""`odb-libra simulate` as a person calls it: what it prints and writes, and one sentence for every mistake."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from odb_libra_lightning.cli import main
from odb_libra_lightning.cli.length_sources import document_lengths
from odb_libra_lightning.cli.simulate import SimulateOptions, parse_count
from odb_libra_lightning.libra.calibration import DEFAULT_CALIBRATION, Calibration
from odb_libra_lightning.libra.simulation_results import METHODS

Run = Callable[..., tuple[int, str, str]]

SMALL = (
    *("--sequence-length", "256", "--global-batch", "8", "--data-parallel", "4", "--context-parallel", "2"),
    *("--pool-size", "2,4", "--block-size", "16,32", "--head-shards", "2", "--chunks", "1,2"),
    *("--num-heads", "8", "--num-kv-heads", "2", "--steps", "2"),
)

BARE_RECIPE = b"""
run: {name: bare, dir: nowhere}
module: {_target_: builtins.dict}
trainer: {_target_: builtins.dict}
"""


@pytest.fixture
def odb_libra(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process; return its exit code and what it wrote to stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_:
            main.app(["simulate", *arguments], prog_name="odb-libra")
        assert isinstance(exit_.value.code, int)
        written = capsys.readouterr()
        return exit_.value.code, written.out, written.err

    return run


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.npy"
    np.save(path, np.random.default_rng(0).lognormal(3, 1.2, 400).astype(int).clip(1, 256))
    return path


def test_prints_tables_and_the_choice_and_writes_what_was_asked_for(odb_libra: Run, lengths: Path, tmp_path: Path):
    files = tmp_path / "figures.csv", tmp_path / "picture.svg"
    code, out, err = odb_libra(str(lengths), *SMALL, "--csv", str(files[0]), "--picture", str(files[1]))
    assert (code, err) == (0, "")
    for method in METHODS:
        assert method in out
    assert "has the least predicted straggler latency" in " ".join(out.split())
    assert "assumed, not measured" in " ".join(out.split())
    assert "…" not in out
    tables = [line for line in out.splitlines() if line.startswith((*METHODS, "method"))]
    assert len(tables) > len(METHODS) + 8
    assert max(map(len, tables)) <= 80
    with files[0].open(newline="") as file:
        rows = list(csv.DictReader(file))
    # Libra and distca at 2 blocks x 2 chunks, tap and tap_vrsp at 2 blocks; all but distca at 2 pool sizes.
    assert {method: sum(row["method"] == method for row in rows) for method in METHODS} == {
        "ulysses": 1,
        "ulysses_sorted": 1,
        "ring": 1,
        "wlb": 1,
        "distca": 4,
        "tap": 4,
        "tap_vrsp": 4,
        "libra": 8,
    }
    picture = files[1].read_text()
    assert picture.lstrip().startswith("<?xml")
    assert "</svg>" in picture


def test_a_png_is_one(odb_libra: Run, lengths: Path, tmp_path: Path):
    assert odb_libra(str(lengths), *SMALL, "--picture", str(tmp_path / "p.png"))[0] == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_json_is_one_object_with_the_figures_of_the_csv(odb_libra: Run, lengths: Path, tmp_path: Path):
    figures = tmp_path / "figures.csv"
    code, out, err = odb_libra(str(lengths), *SMALL, "--json", "--csv", str(figures), "--scaling", "1,2,4")
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert out.count("\n") == 1
    assert said["steps"] == 2
    assert set(said["choice"]["point"]) == {"pool_size", "head_shards", "block_size", "chunks"}
    assert said["calibration"]["peak_flops"] == DEFAULT_CALIBRATION.peak_flops
    assert {(one["method"], one["data_parallel"]) for one in said["scaling"]} == {
        (method, degree) for method in ("ulysses", "ulysses_sorted", "libra") for degree in (1, 2, 4)
    }
    with figures.open(newline="") as file:
        for row, one in zip(csv.DictReader(file), said["figures"], strict=True):
            assert row["method"] == one["method"]
            assert float(row["mean_latency"]) == one["mean_latency"]
            assert float(row["bytes_moved"]) == one["bytes_moved"]


def test_a_calibration_file_changes_the_latencies(odb_libra: Run, lengths: Path, tmp_path: Path):
    fast = dataclasses.replace(DEFAULT_CALIBRATION, source="measured yesterday", launch_seconds=1e-9)
    fast.to_json(tmp_path / "fast.json")
    arguments = (str(lengths), *SMALL, "--methods", "ulysses", "--json")
    slow = json.loads(odb_libra(*arguments)[1])
    code, out, _ = odb_libra(*arguments, "--calibration", str(tmp_path / "fast.json"))
    assert code == 0
    found = json.loads(out)
    assert found["figures"][0]["mean_latency"] < slow["figures"][0]["mean_latency"]
    assert found["calibration"]["source"] == "measured yesterday"
    assert found["choice"] is None


@pytest.mark.parametrize("figure", [1e-50, 1e50])
def test_figures_at_the_edge_give_numbers_that_json_has(odb_libra: Run, lengths: Path, tmp_path: Path, figure: float):
    names = ("peak_flops", "backward_ratio", "launch_seconds", "intra_node_alpha", "intra_node_beta")
    extreme = dataclasses.replace(
        DEFAULT_CALIBRATION,
        **dict.fromkeys(names, figure),
        efficiency_rows=(1,),
        efficiency_heads=(1,),
        efficiency=((1e-50,),),
    )
    extreme.to_json(tmp_path / "c.json")
    code, out, err = odb_libra(
        str(lengths),
        *SMALL,
        "--json",
        "--calibration",
        str(tmp_path / "c.json"),
        "--scaling",
        "1,4",
        "--linear-seconds",
        "1e50",
    )
    assert (code, err) == (0, "")
    json.loads(out, parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("lengths.txt", "\n".join(["100"] * 60)),
        ("lengths.json", json.dumps([100] * 60)),
        ("lengths.jsonl", "\n".join(['{"length": 100}'] * 60)),
    ],
)
def test_reads_the_formats_of_length_files(odb_libra: Run, tmp_path: Path, name: str, content: str):
    (tmp_path / name).write_text(content)
    code, out, _ = odb_libra(str(tmp_path / name), *SMALL, "--json", "--steps", "1")
    assert code == 0
    assert json.loads(out)["steps"] == 1


def test_a_named_mix_gives_enough_for_the_steps(odb_libra: Run):
    code, out, err = odb_libra("magiattention", *SMALL, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["steps"] == 2


def test_reads_the_lengths_of_a_recipes_training_dataset(odb_libra: Run):
    arguments = ("recipes/chat.yaml", *SMALL, "--json", "--steps", "1", "--documents", "30", "--methods", "libra")
    code, out, err = odb_libra(*arguments)
    assert (code, err) == (0, "")
    assert json.loads(out)["documents"] > 0
    assert len(document_lengths("recipes/chat.yaml", tokens=0, documents=30)) == 30


@pytest.mark.parametrize("source", ["ultrachat", "recipes/chat.yaml"])
def test_a_column_of_what_has_none_is_refused(odb_libra: Run, source: str):
    code, out, err = odb_libra(source, *SMALL, "--column", "n")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"--column n names a field of a .jsonl or .parquet file; {source} has none" in err


def test_a_parquet_file_of_two_columns_asks_for_the_option(odb_libra: Run, tmp_path: Path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"a": [1, 2], "b": [3, 4]})
    parquet.write_table(table, tmp_path / "two.parquet")
    code, _, err = odb_libra(str(tmp_path / "two.parquet"), *SMALL)
    assert code == 2
    assert "--column" in err


@pytest.mark.parametrize("asked", [("--documents", f"{10**9}"), ("--steps", f"{10**9}")])
def test_more_documents_of_a_mix_than_memory_holds_are_refused(odb_libra: Run, asked):
    code, out, err = odb_libra("ultrachat", *SMALL, *asked)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "would be drawn" in err


@pytest.mark.parametrize(
    ("data_parallel", "sizes"), [(1, {1}), (2, {2}), (4, {4}), (6, {6}), (7, {7}), (11, {1}), (12, {4}), (16, {4, 8})]
)
def test_pools_have_4_and_8_replicas_where_these_divide_the_run(odb_libra: Run, data_parallel: int, sizes: set[int]):
    degrees = ("--data-parallel", str(data_parallel), "--global-batch", str(data_parallel), "--context-parallel", "2")
    layer = ("--sequence-length", "64", "--num-heads", "4", "--num-kv-heads", "2", "--block-size", "32")
    some = ("--head-shards", "2", "--chunks", "2", "--steps", "1", "--methods", "libra", "--json")
    code, out, _ = odb_libra("ultrachat", *degrees, *layer, *some)
    assert code == 0
    assert {one["point"]["pool_size"] for one in json.loads(out)["figures"]} == sizes


def test_pool_sizes_do_not_matter_without_pools(odb_libra: Run, lengths: Path):
    assert odb_libra(str(lengths), *SMALL, "--pool-size", "3", "--methods", "ulysses,ring")[0] == 0


def test_documents_caps_what_is_taken(tmp_path: Path):
    (tmp_path / "l.txt").write_text("\n".join(map(str, range(1, 101))))
    taken = document_lengths(str(tmp_path / "l.txt"), tokens=0, documents=7)
    assert len(set(taken.tolist())) == 7
    assert len(document_lengths("ultrachat", tokens=0, documents=7)) == 7
    assert document_lengths("ultrachat", tokens=10**6).sum() >= 10**6


def test_fewer_steps_than_asked_for_are_said(odb_libra: Run, lengths: Path):
    code, _, err = odb_libra(str(lengths), *SMALL, "--steps", "99", "--methods", "ulysses")
    assert code == 0
    assert "of 99 optimizer steps" in err


@pytest.mark.parametrize(("text", "number"), [("4096", 4096), ("4K", 4096), ("256k", 262_144), ("1M", 1_048_576)])
def test_counts_may_be_written_in_k_and_m(text: str, number: int):
    assert parse_count(text, "--x") == number


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--global-batch", "6"), "global_batch=6"),
        (("--data-parallel", "6", "--global-batch", "12"), "pool_size=4 does not divide data_parallel=6"),
        (("--pool-size", "3"), "pool_size=3 does not divide data_parallel=4; 1, 2 or 4 would fit"),
        (("--head-shards", "3"), "head_shards=3 does not divide num_heads=8"),
        (("--chunks", "8"), "chunks=8 does not divide the 4 query heads"),
        (("--block-size", "48"), "block_size=48 does not divide the 128 rows"),
        (("--context-parallel", "3"), "context_parallel=3 does not divide sequence_length=256"),
        (("--num-kv-heads", "3"), "num_heads=8 is no multiple of num_kv_heads=3"),
        (("--sequence-length", "lots"), "--sequence-length 'lots'"),
        (("--sequence-length", "0"), "--sequence-length '0'"),
        (("--pool-size", "2,,4"), "--pool-size ''"),
        (("--window", "-3"), "--window '-3'"),
        (("--methods", "libra,magic"), "no method is called 'magic'"),
        (("--packing", "loose"), "--packing loose"),
        (("--steps", "0"), "--steps=0"),
        (("--documents", "0"), "documents=0"),
        (("--picture", "p.pdf"), "--picture p.pdf: expected a name that ends in .svg or .png"),
        (("--csv", "nowhere/f.csv"), "--csv nowhere/f.csv: there is no folder"),
        (("--csv", "."), "--csv .: this is a folder"),
        (("--calibration", "nothing.json"), "calibration nothing.json cannot be read"),
        (("--scaling", "1,3"), "data_parallel=3"),
        (("--scaling", "1,2", "--methods", "ulysses"), "--scaling shows"),
        (("--linear-seconds", "-1"), "linear_seconds=-1.0"),
        (("--linear-seconds", "nan"), "linear_seconds=nan"),
        (("--linear-seconds", "inf"), "linear_seconds=inf"),
        (("--seed", "-1"), "--seed -1: expected a whole number of at least 0"),
        (("--head-dim", f"{10**20}"), f"head_dim={10**20}"),
        (("--head-dim", "2147483647", "--bytes-per-element", "2147483647"), "above 2**62"),
        (("--num-heads", f"{10**21}"), f"num_heads={10**21}"),
        (("--bytes-per-element", f"{10**20}"), f"bytes_per_element={10**20}"),
        (("--window", f"{10**20}"), f"window={10**20}"),
        (("--sequence-length", "2305843009213693951"), "sequence_length=2305843009213693951"),
        (("--pool-size", f"{10**20}"), f"pool_size={10**20}"),
        (("--steps", f"{10**20}"), f"--steps={10**20}"),
        (("--sequence-length", "1M", "--block-size", "4K"), "fewer than the global_batch=8"),
        (("--column", "n"), "column='n'"),
    ],
)
def test_an_option_that_cannot_be_used_is_one_sentence(odb_libra: Run, lengths: Path, arguments, sentence):
    code, out, err = odb_libra(str(lengths), *SMALL, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("odb-libra: ")
    assert err.count("\n") == 1
    assert sentence in err


def test_a_file_that_is_read_is_not_written(odb_libra: Run, lengths: Path):
    before = lengths.read_bytes()
    code, out, err = odb_libra(str(lengths), *SMALL, "--csv", str(lengths))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "this is the file of LENGTHS" in err
    assert lengths.read_bytes() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_a_full_stdout_is_one_sentence(lengths: Path, arguments):
    called = ("simulate", str(lengths), *SMALL, *arguments)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", "from odb_libra_lightning.cli.main import app; app(prog_name='odb-libra')", *called],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert done.returncode == 2
    assert done.stderr == "odb-libra: the results cannot be written to stdout: No space left on device\n"


def test_text_of_a_calibration_is_printed_as_it_stands(odb_libra: Run, lengths: Path, tmp_path: Path):
    dataclasses.replace(DEFAULT_CALIBRATION, source="H100 [/x] of [node3] :smile:").to_json(tmp_path / "c.json")
    arguments = ("--calibration", str(tmp_path / "c.json"), "--methods", "ulysses")
    code, out, _ = odb_libra(str(lengths), *SMALL, *arguments)
    assert code == 0
    assert "figures that are H100 [/x] of [node3] :smile:." in " ".join(out.split())


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("empty.txt", b"", "empty.txt"),
        ("negative.txt", b"5\n-3\n", "-3"),
        ("words.txt", b"five\n", "expected a whole number, got 'five'"),
        ("broken.npy", b"not numpy", "broken.npy"),
        ("binary.txt", b"\xff\xfe\x00", "binary.txt"),
        ("nested.json", b"[[1]]", "nested.json"),
        ("object.jsonl", b'{"text": "hi"}\n', "object.jsonl"),
        ("broken.parquet", b"PAR1", "broken.parquet"),
        ("broken.yaml", b"a: [", "broken.yaml"),
        ("other.yaml", b"a: 1", "a is not a section of a recipe"),
        ("bare.yaml", BARE_RECIPE, "has no data.train_dataset"),
    ],
)
def test_lengths_that_cannot_be_read_are_one_sentence(odb_libra: Run, tmp_path: Path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    code, out, err = odb_libra(str(tmp_path / name), *SMALL)
    assert (code, out) == (2, "")
    assert err.startswith("odb-libra: ")
    assert err.count("\n") == 1
    assert sentence in err


@pytest.mark.parametrize("source", ["libra-2m", "nowhere/lengths.npy", "nowhere.yaml", "."])
def test_what_is_not_there_is_one_sentence(odb_libra: Run, source: str):
    code, out, err = odb_libra(source, *SMALL)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert source in err


def test_documents_too_long_to_stay_whole_are_one_sentence(odb_libra: Run, tmp_path: Path):
    (tmp_path / "long.txt").write_text("300\n" * 40)
    code, _, err = odb_libra(str(tmp_path / "long.txt"), *SMALL, "--packing", "best_fit")
    assert (code, err.count("\n")) == (2, 1)
    assert "a document of 300 tokens" in err
    assert odb_libra(str(tmp_path / "long.txt"), *SMALL, "--packing", "sequential")[0] == 0


def test_without_matplotlib_the_picture_says_what_to_install(odb_libra: Run, lengths: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = odb_libra(str(lengths), *SMALL, "--picture", "p.svg")
    assert code == 2
    assert "pip install 'odb-libra-lightning[simulate]'" in err


def test_the_command_has_every_option_of_the_simulation(odb_libra: Run):
    code, out, _ = odb_libra("--help")
    assert code == 0
    for field in dataclasses.fields(SimulateOptions):
        if field.name != "lengths":
            assert f"--{field.name.replace('_', '-')}" in out


def test_the_page_shows_a_calibration_file_that_can_be_read(tmp_path: Path):
    page = Path("docs/simulate.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```json\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "c.json").write_text(example)
    assert Calibration.from_json(tmp_path / "c.json").peak_flops == DEFAULT_CALIBRATION.peak_flops


def test_the_page_names_every_option_and_method():
    page = Path("docs/simulate.md").read_text(encoding="utf-8")
    for field in dataclasses.fields(SimulateOptions):
        assert field.name == "lengths" or f"--{field.name.replace('_', '-')}" in page
    assert all(f"`{method}`" in page for method in METHODS)
