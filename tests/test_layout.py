"""`callbacks/` and `strategies/` stand at the top, and are part of the package in every way to use it.

Two committed symlinks do that. Here the package is used from a checkout, a wheel, a source tree and in place,
always without the installation that the tests themselves run on.
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import odb_libra_lightning
from odb_libra_lightning.callbacks import PaddingMonitor

ROOT = Path(__file__).resolve().parents[1]
LINKED = ["callbacks", "strategies"]
MODES = ["checkout", "wheel", "source_tree", "editable", "editable_strict"]
LIBRARIES = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
PIP_OFFLINE = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--no-build-isolation"]

pytestmark = pytest.mark.timeout(120)

# Runs under `python -S`, which reads no .pth file, so that an editable installation beside the libraries stays
# out. Lightning takes seconds to import: it is imported once, and every way of use is a fork of that.
PROBE = """
import importlib.util, json, os, pickle, site, sys, traceback
from pathlib import Path

job = json.loads(sys.stdin.read())
sys.path += job["libraries"]
import lightning, torch


def use(folder, site_packages):
    os.chdir(folder)
    if site_packages is not None:
        sys.path.insert(1, site_packages)
        site.addsitedir(site_packages)
    plain = [name for name in job["linked"] if importlib.util.find_spec(name) is not None]

    import odb_libra_lightning.callbacks, odb_libra_lightning.odb, odb_libra_lightning.strategies
    from odb_libra_lightning.cli.main import app

    package = Path(odb_libra_lightning.__file__).parent.absolute()
    monitor = pickle.loads(bytes.fromhex(job["monitor"]))
    return {
        "package": str(package),
        "plain_names": plain,
        "typed": (package / "py.typed").is_file(),
        "folders": {name: str(Path(sys.modules["odb_libra_lightning." + name].__file__).parent.absolute())
                    for name in job["linked"]},
        "same_class": type(monitor) is odb_libra_lightning.callbacks.PaddingMonitor,
    }


for mode, (folder, site_packages) in job["modes"].items():
    child = os.fork()
    if child == 0:
        try:
            result = use(folder, site_packages)
        except BaseException:
            result = {"error": traceback.format_exc()}
        Path(job["results"], mode + ".json").write_text(json.dumps(result))
        os._exit(0)
    os.waitpid(child, 0)
"""


def run(*command: str | Path, cwd: Path, stdin: str = "", may_fail: bool = False) -> str:
    """What a command prints; `PYTHONPATH` would put a second copy of the package in its way."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, input=stdin, capture_output=True, text=True, timeout=90
    )
    assert may_fail or done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the package is built from: builds leave files beside it."""
    copy = tmp_path_factory.mktemp("source")
    for name in ["odb_libra_lightning", *LINKED]:
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ["pyproject.toml", "README.md", "LICENSE"]:
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def distributions(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from the unpacked sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source, cwd=folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def site_packages(
    source: Path, distributions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """One folder for each way to install."""
    folder = tmp_path_factory.mktemp("installed")
    what: dict[str, list[str | Path]] = {
        "wheel": [distributions[1]],
        "source_tree": [source],
        "editable": ["--editable", source],
        "editable_strict": ["--config-settings", "editable_mode=strict", "--editable", source],
    }
    for mode, arguments in what.items():
        target = folder / mode
        run(sys.executable, "-m", "pip", "install", *PIP_OFFLINE, "--target", target, *arguments, cwd=folder)
    return {mode: folder / mode for mode in what}


@pytest.fixture(scope="module")
def uses(site_packages: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What a fresh interpreter sees in each mode."""
    results, elsewhere = tmp_path_factory.mktemp("results"), tmp_path_factory.mktemp("elsewhere")
    modes: dict[str, tuple[str, str | None]] = {"checkout": (str(ROOT), None)}
    modes |= {mode: (str(elsewhere), str(target)) for mode, target in site_packages.items()}
    job = {
        "libraries": LIBRARIES,
        "linked": LINKED,
        "monitor": pickle.dumps(PaddingMonitor()).hex(),
        "modes": modes,
        "results": str(results),
    }
    run(sys.executable, "-S", "-c", PROBE, cwd=elsewhere, stdin=json.dumps(job))
    return {mode: json.loads((results / f"{mode}.json").read_text()) for mode in modes}


@pytest.mark.parametrize("mode", MODES)
def test_the_package_imports_whole(mode: str, uses: dict[str, dict[str, Any]]) -> None:
    use = uses[mode]
    assert "error" not in use, use["error"]
    assert use["typed"]
    for name, folder in use["folders"].items():
        assert {path.name for path in Path(folder).glob("*.py")} == {path.name for path in (ROOT / name).glob("*.py")}


@pytest.mark.parametrize("mode", MODES)
def test_the_package_comes_from_where_the_mode_says(
    mode: str, uses: dict[str, dict[str, Any]], site_packages: dict[str, Path], source: Path
) -> None:
    homes = {"checkout": ROOT, "editable": source, "editable_strict": source} | {
        mode: site_packages[mode] for mode in ["wheel", "source_tree"]
    }
    assert Path(uses[mode]["package"]).is_relative_to(homes[mode])


@pytest.mark.parametrize("mode", MODES)
def test_a_pickled_callback_is_of_the_same_class_everywhere(mode: str, uses: dict[str, dict[str, Any]]) -> None:
    assert uses[mode]["same_class"]


def test_a_callback_class_pickles_to_itself() -> None:
    assert pickle.loads(pickle.dumps(PaddingMonitor)) is PaddingMonitor
    assert type(pickle.loads(pickle.dumps(PaddingMonitor()))) is PaddingMonitor
    assert PaddingMonitor.__module__.startswith("odb_libra_lightning.callbacks")


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "checkout"])
def test_no_plain_callbacks_or_strategies_is_installed(
    mode: str, uses: dict[str, dict[str, Any]], site_packages: dict[str, Path]
) -> None:
    installed = {path.stem for path in site_packages[mode].iterdir()}
    assert not installed & set(LINKED)
    assert uses[mode]["plain_names"] == []


def test_the_wheel_holds_files_and_no_links(distributions: tuple[Path, Path]) -> None:
    wheel = distributions[1]
    assert wheel.name == f"odb_libra_lightning-{odb_libra_lightning.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert not [entry.filename for entry in archive.infolist() if stat.S_ISLNK(entry.external_attr >> 16)]
        held = {name: archive.read(name) for name in archive.namelist()}
    for name in LINKED:
        for path in (ROOT / name).glob("*.py"):
            assert held[f"odb_libra_lightning/{name}/{path.name}"] == path.read_bytes()
    assert "odb_libra_lightning/py.typed" in held
    assert {name.split("/")[0] for name in held} == {
        "odb_libra_lightning",
        f"odb_libra_lightning-{odb_libra_lightning.__version__}.dist-info",
    }


def test_the_sdist_holds_files_and_no_links(distributions: tuple[Path, Path]) -> None:
    with tarfile.open(distributions[0]) as archive:
        held = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    assert not [name for name, member in held.items() if member.issym() or member.islnk()]
    for name in LINKED:
        for path in (ROOT / name).glob("*.py"):
            assert held[f"odb_libra_lightning/{name}/{path.name}"].isreg()


def test_another_project_gets_the_types(site_packages: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "snippet.py").write_text(
        "from odb_libra_lightning.callbacks import monitoring\n"
        "callbacks = monitoring(progress_bar=True)\n"
        "monitoring(progress_bar='yes')\n"
    )
    # The libraries' own types play no part here, and would take most of a minute.
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nstrict = true\nfollow_imports = skip\n[mypy-odb_libra_lightning.*]\nfollow_imports = silent\n"
    )
    start = (
        f"import sys; sys.path[1:] = [{str(site_packages['wheel'])!r}, *sys.path[1:], *{LIBRARIES!r}]; "
        "from mypy.__main__ import console_entry; console_entry()"
    )
    options = ["--config-file", "mypy.ini", "--cache-dir", "cache", "--no-error-summary", "snippet.py"]
    found = run(sys.executable, "-S", "-c", start, *options, cwd=tmp_path, may_fail=True)
    assert re.fullmatch(r'snippet\.py:3: error: .*incompatible type "str"; expected "bool" +\[arg-type\]\n', found)


@pytest.mark.parametrize(
    "line", ["import callbacks", "from callbacks.batching import PaddingMonitor", "import strategies.gloo_exit"]
)
def test_ruff_refuses_the_plain_names(line: str) -> None:
    options = ["--no-cache", "--output-format", "json", "--stdin-filename", ROOT / "examples" / "snippet.py", "-"]
    found = run(sys.executable, "-m", "ruff", "check", *options, cwd=ROOT, stdin=line + "\n", may_fail=True)
    assert "TID251" in {violation["code"] for violation in json.loads(found)}


def test_the_links_are_committed_as_links() -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout, or no git")
    links = [f"odb_libra_lightning/{name}" for name in LINKED]
    # Without safe.directory git refuses a checkout that belongs to another user.
    listed = run("git", "-c", f"safe.directory={ROOT}", "ls-files", "--stage", "--", *links, cwd=ROOT).splitlines()
    assert [(entry.split()[0], entry.split()[-1]) for entry in listed] == [("120000", link) for link in links]
    assert [str((ROOT / link).readlink()) for link in links] == [f"../{name}" for name in LINKED]


def test_nothing_needs_the_loader_that_the_benchmark_compares_with() -> None:
    for path in sources(ROOT / "odb_libra_lightning", ROOT / "callbacks", ROOT / "strategies"):
        for node in ast.walk(ast.parse(path.read_bytes())) if path.suffix == ".py" else []:
            named = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            named += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            named += [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
            assert not any(name == "odb" or name.startswith(("odb.", "online_dynamic_batching")) for name in named), (
                f"{path}:{node.lineno}"
            )
    assert "online-dynamic-batching" not in (ROOT / "pyproject.toml").read_text()
    assert "online-dynamic-batching" not in (ROOT / "constraints.txt").read_text()


def test_no_file_names_a_path_outside_the_repository() -> None:
    outside = []
    for path in sources(ROOT):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            found = [match[0] for match in re.finditer(r"(?<![\w.])/(?:work|root|opt|mnt)/", line)]
            for match in re.finditer(r"(?<![\w.])((?:\.\./)+)([\w.-]+)", line):
                # A link in a page starts at the page, a path in a recipe or a command where the command runs.
                named = [path.parent / match[0], ROOT / match[2]]
                # Tests make up paths that must be refused.
                made_up = path.is_relative_to(ROOT / "tests") and match[2] != "shared"
                if not made_up and not any(place.exists() and place.resolve().is_relative_to(ROOT) for place in named):
                    found.append(match[0])
            outside += [f"{path.relative_to(ROOT)}:{number}: {text}" for text in found]
    assert not outside, "\n".join(outside)


def sources(*folders: Path) -> Iterator[Path]:
    """Files that people write, each under its real path alone."""
    made = {"runs", "wandb", "lightning_logs", "build", "dist", "__pycache__"}
    for folder in folders:
        for parent, subfolders, names in os.walk(folder):
            subfolders[:] = [
                name
                for name in subfolders
                if name not in made and not name.endswith(".egg-info") and (name[0] != "." or name == ".ci")
            ]
            for path in (Path(parent, name) for name in names):
                written = path.suffix in {".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".sh"}
                if written or path.name == "Makefile" or path.parent.name == ".ci":
                    yield path
