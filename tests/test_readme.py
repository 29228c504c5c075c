"""The README's snippet runs as it stands, given what it says is the reader's own."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_ranks
from tests.modules import BigramModel
from tests.samples import Documents, pad

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_plug_in_snippet_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    snippet, _ = SNIPPETS
    monkeypatch.chdir(tmp_path)
    module = BigramModel()
    names: dict[str, Any] = {"train_dataset": Documents(50), "collate": pad, "module": module}
    exec(snippet, names)
    assert sorted(i for batch in module.seen for i in batch) == list(range(50))
    assert names["data"].loader.config.l_max == 16_384
    assert "Training summary" in capsys.readouterr().out


def train_long_context() -> int:
    """The second snippet on one process; updates made."""
    from odb_libra_lightning.data.token_files import TokenWriter
    from tests.strategies.libra_runs import CoreDecoder

    for given, small in (
        ("context_parallel=4, pool_size=8", "context_parallel=1"),
        ("devices=8, num_nodes=4", "devices=1"),
    ):
        assert given in SNIPPETS[1]
        SNIPPETS[1] = SNIPPETS[1].replace(given, small)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        with TokenWriter("corpus-tokens", vocab_size=8) as writer:
            for length in (7, 3, 30):
                writer.add([at % 8 for at in range(length)])
        names: dict[str, Any] = {"module": CoreDecoder()}
        exec(SNIPPETS[1], names)
        os.chdir(ROOT)
    return int(names["trainer"].global_step)


def test_the_long_context_snippet_trains(tmp_path: Path) -> None:
    assert run_ranks(train_long_context, 1, tmp_path) == [1]


def test_the_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert len(links) > 8
    for link in links:
        assert (ROOT / link).exists(), link
