"""Source files as samples, and the tokenizer that is trained on them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader

from odb_libra_lightning.data.source_files import SourceFiles, find_files
from odb_libra_lightning.data.tokenizers import END_OF_TEXT, TokenizerFile, train_tokenizer

WORDS = ["def", "return", "import", "self", "value", "for", "in", "range", "print", "class", "None", "while"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Twelve small modules of different length, and files that must not be taken."""
    root = tmp_path / "src"
    for i in range(12):
        path = root / f"pkg{i % 3}" / f"m{i:02}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(" ".join(WORDS[(i + j) % len(WORDS)] for j in range(5 + 20 * i)) + "\n")
    for skipped in ("site-packages", "dist-packages", "__pycache__"):
        (root / skipped).mkdir()
        (root / skipped / "no.py").write_text("x = 1\n")
    (root / "empty.py").write_text("")
    (root / "notes.txt").write_text("not python\n")
    (root / "folder.py").mkdir()
    (root / "gone.py").symlink_to(root / "nowhere.py")
    os.mkfifo(root / "pipe.py")
    return root


def dataset(tree: Path, **options: object) -> SourceFiles:
    return SourceFiles(tree, cache_dir=tree.parent / "cache", vocab_size=300, **options)  # type: ignore[arg-type]


def test_takes_the_readable_files_in_sorted_order(tree: Path) -> None:
    expected = sorted(f"pkg{i % 3}/m{i:02}.py" for i in range(12))
    assert [path.relative_to(tree).as_posix() for path in dataset(tree).files] == expected
    assert [path.name for path in find_files(tree, "*.txt")] == ["notes.txt"]


def test_an_unreadable_file_is_left_out(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked, really_open = tree / "pkg0" / "m00.py", Path.open

    def guarded(self: Path, *args: object, **kwargs: object) -> object:
        if self == locked:
            raise PermissionError(13, "Permission denied", str(self))
        return really_open(self, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", guarded)  # a test may run as root, who may read everything
    assert locked not in find_files(tree)
    assert len(find_files(tree)) == 11


def test_the_subset_depends_on_the_seed_alone(tree: Path) -> None:
    first, again, other = (dataset(tree, limit=5, seed=seed).files for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len(set(first)) == 5
    assert first == sorted(first)
    assert set(first) < set(dataset(tree).files)
    assert dataset(tree, limit=99).files == dataset(tree).files
    drawn = {path for seed in range(40) for path in dataset(tree, limit=2, seed=seed).files}
    assert drawn == set(dataset(tree).files)  # every file has a chance, not the first ones only


def test_subsets_share_one_tokenizer(tree: Path) -> None:
    assert dataset(tree, limit=3, seed=5).tokenizer.path == dataset(tree).tokenizer.path


def test_a_sample_is_the_text_and_its_end(tree: Path) -> None:
    data = dataset(tree)
    for i, path in enumerate(data.files):
        sample = data[i]
        assert set(sample) == {"input_ids", "labels"}
        assert sample["input_ids"].dtype == sample["labels"].dtype == torch.int64
        assert torch.equal(sample["input_ids"], sample["labels"])
        assert sample["input_ids"].data_ptr() != sample["labels"].data_ptr()
        assert data.tokenizer.decode(sample["input_ids"].tolist()) == path.read_text() + END_OF_TEXT


def test_bytes_that_are_no_text_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_bytes(b"name = 'caf\xe9'\n")
    data = SourceFiles(tmp_path, vocab_size=300, cache_dir=tmp_path / "cache")
    assert data.tokenizer.decode(data[0]["input_ids"].tolist()) == "name = 'caf\ufffd'\n" + END_OF_TEXT


@pytest.mark.parametrize("max_length", [1, 7, 64, 10_000])
def test_a_cut_file_is_the_beginning_of_the_whole(tree: Path, max_length: int) -> None:
    whole, cut = dataset(tree), dataset(tree, max_length=max_length)
    for i in range(len(whole)):
        assert torch.equal(cut[i]["input_ids"], whole[i]["input_ids"][:max_length])


def test_a_long_run_of_one_token_is_not_cut_short(tmp_path: Path) -> None:
    """Its tokens are so long that the beginning that is tried first does not fill the length."""
    (tmp_path / "rule.py").write_text("#" * 3000 + " x" * 3000)
    data = SourceFiles(tmp_path, vocab_size=400, cache_dir=tmp_path / "cache", max_length=200)
    whole = SourceFiles(tmp_path, vocab_size=400, cache_dir=tmp_path / "cache")[0]["input_ids"]
    assert len(data[0]["input_ids"]) == 200
    assert torch.equal(data[0]["input_ids"], whole[:200])


def test_the_standard_library_is_the_default(tmp_path: Path) -> None:
    data = SourceFiles(limit=20, max_length=128, cache_dir=tmp_path)
    assert len(find_files()) > 300
    assert Path(os.__file__).resolve() in find_files()
    assert data.tokenizer.vocab_size == 4096
    assert all(1 <= len(data[i]["input_ids"]) <= 128 for i in range(20))


def test_spawned_workers_read_the_same_samples(tree: Path) -> None:
    data = dataset(tree)
    loader = DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    for here, there in zip((data[i] for i in range(12)), loader, strict=True):
        assert torch.equal(here["input_ids"], there["input_ids"])


def test_forked_workers_neither_warn_nor_hang(tree: Path) -> None:
    """The parent has trained and used the tokenizer before it forks, the worst case for its thread pool."""
    script = f"""
from torch.utils.data import DataLoader
from odb_libra_lightning.data.source_files import SourceFiles
data = SourceFiles({str(tree)!r}, vocab_size=300, cache_dir={str(tree.parent / "fresh")!r})
expected = sum(len(data[i]["input_ids"]) for i in range(12))
for _ in range(2):
    loader = DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="fork")
    assert sum(len(sample["input_ids"]) for sample in loader) == expected
"""
    environment = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_training_leaves_the_environment_alone(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    train_tokenizer(find_files(tree), vocab_size=300, cache_dir=tree.parent / "a")
    assert "TOKENIZERS_PARALLELISM" not in os.environ
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    train_tokenizer(find_files(tree), vocab_size=300, cache_dir=tree.parent / "b")
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"


def test_two_processes_may_train_into_one_folder_at_once(tree: Path) -> None:
    """Both end with the same complete file, which equals one trained alone elsewhere."""
    script = """
import sys
from odb_libra_lightning.data.source_files import find_files
from odb_libra_lightning.data.tokenizers import TokenizerFile, train_tokenizer
files = find_files(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
path = train_tokenizer(files, vocab_size=400, cache_dir=sys.argv[2])
print(path, TokenizerFile(path).encode("def value"))
"""
    shared = tree.parent / "shared"
    command = [sys.executable, "-c", script, str(tree), str(shared)]
    racers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        outputs = [racer.communicate(timeout=60)[0] for racer in racers]
    finally:
        for racer in racers:
            racer.kill()
    assert [racer.returncode for racer in racers] == [0, 0]
    assert outputs[0] == outputs[1]
    (kept,) = shared.iterdir()  # and nothing half-written is left beside it
    alone = train_tokenizer(find_files(tree), vocab_size=400, cache_dir=tree.parent / "alone")
    assert kept.name == alone.name
    assert kept.read_bytes() == alone.read_bytes()


def test_a_kept_tokenizer_is_not_trained_again(tree: Path) -> None:
    first = dataset(tree).tokenizer.path
    stamp = first.stat().st_mtime_ns
    assert dataset(tree).tokenizer.path == first
    assert first.stat().st_mtime_ns == stamp


def test_other_text_or_size_is_another_tokenizer(tree: Path) -> None:
    cache = tree.parent / "cache"
    names = [train_tokenizer(find_files(tree), vocab_size=size, cache_dir=cache) for size in (300, 301)]
    (tree / "pkg0" / "m00.py").write_text("something else\n")
    names.append(train_tokenizer(find_files(tree), vocab_size=300, cache_dir=cache))
    assert len(set(names)) == 3


def test_the_cache_folder_follows_xdg(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = find_files(tree)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tree.parent / "xdg"))
    assert train_tokenizer(files, vocab_size=300).parent == tree.parent / "xdg" / "odb-libra-lightning"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # counts as unset
    monkeypatch.setenv("HOME", str(tree.parent / "home"))
    expected = tree.parent / "home" / ".cache" / "odb-libra-lightning"
    assert train_tokenizer(files, vocab_size=300).parent == expected


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFile:
    folder = tmp_path_factory.mktemp("small")
    (folder / "a.py").write_text("def f(x):\n    return x + 1\n" * 20)
    return TokenizerFile(train_tokenizer([folder / "a.py"], vocab_size=280, cache_dir=folder))


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=80))
def test_any_text_comes_back_from_its_tokens(small: TokenizerFile, text: str) -> None:
    ids = small.encode(text)
    assert ids[-1] == 0
    assert 0 not in ids[:-1]
    assert small.decode(ids[:-1]) == text


def test_the_end_token_written_in_a_text_is_text(small: TokenizerFile) -> None:
    ids = small.encode(f"a{END_OF_TEXT}b")
    assert ids.count(0) == 1
    assert small.decode(ids) == f"a{END_OF_TEXT}b{END_OF_TEXT}"


def test_an_opened_tokenizer_still_pickles(small: TokenizerFile) -> None:
    before = small.encode("return x")
    assert len(pickle.dumps(small)) < 1000
    assert pickle.loads(pickle.dumps(small)).encode("return x") == before


def word_tokenizer(path: Path, words: list[str]) -> Path:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([word for word in words if word.startswith("<")])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_from_a_file_is_used_without_its_truncation_and_padding(tree: Path, tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path / "tokenizer.json", ["<unk>", "</s>", *WORDS])
    data = SourceFiles(tree, tokenizer=path)
    position = next(i for i, file in enumerate(data.files) if file.name == "m00.py")
    assert data[position]["input_ids"].tolist() == [2, 3, 4, 5, 6, 1]


def test_bad_arguments_are_named(tree: Path, tmp_path: Path) -> None:
    cases = [
        ({"limit": 0}, "limit=0 leaves no file"),
        ({"max_length": 0}, "max_length=0 leaves no token"),
        ({"vocab_size": 256}, "vocab_size=256 leaves no room.*at least 257"),
        ({"root": tree / "nowhere"}, "nowhere' is not a folder"),
        ({"pattern": "*.rs"}, "no readable, non-empty file that matches '\\*.rs'"),
        ({"tokenizer": tree / "nothing"}, "nothing' is neither a tokenizer.json nor a folder that holds one"),
        ({"cache_dir": tree / "notes.txt" / "x"}, "cannot keep the trained tokenizer in .*pass cache_dir="),
    ]
    for options, message in cases:
        arguments = {"root": tree, "cache_dir": tmp_path / "cache", **options}
        with pytest.raises(ValueError, match=message):
            SourceFiles(**arguments)  # type: ignore[arg-type]


def test_bad_tokenizer_files_are_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ValueError, match=r"broken\.json cannot be read as a tokenizer"):
        TokenizerFile(broken).encode("x")
    endless = word_tokenizer(tmp_path / "endless.json", ["<unk>", "x"])
    with pytest.raises(ValueError, match=r"endless\.json names no token that ends a text"):
        TokenizerFile(endless).encode("x")


def test_a_missing_extra_says_what_to_install(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[hf\]'"):
        dataset(tree)
