"""Figures of a cluster: between the entries of its table, and as a file that somebody wrote."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from odb_libra_lightning.libra.calibration import DEFAULT_CALIBRATION, Calibration
from tests.libra.slow_clusters import SLOW_KERNEL


class TestEfficiency:
    TABLE = dataclasses.replace(
        SLOW_KERNEL,
        efficiency_rows=(64, 1024),
        efficiency_heads=(2, 8),
        efficiency=((0.2, 0.4), (0.6, 1.0)),
    )

    @pytest.mark.parametrize(
        ("rows", "heads", "share"),
        [
            (64, 2, 0.2),
            (64, 8, 0.4),
            (1024, 2, 0.6),
            (1024, 8, 1.0),
            (256, 2, 0.4),  # half way in log2
            (64, 4, 0.3),
            (256, 4, 0.55),
            (1, 1, 0.2),  # beyond the edges
            (10**6, 64, 1.0),
        ],
    )
    def test_is_the_table_bilinear_in_log2_and_constant_outside(self, rows, heads, share):
        assert self.TABLE.efficiency_at([rows], heads)[0] == pytest.approx(share)


class TestCalibrationFile:
    def test_comes_back_as_it_was_written(self, tmp_path: Path):
        DEFAULT_CALIBRATION.to_json(tmp_path / "c.json")
        assert Calibration.from_json(tmp_path / "c.json") == DEFAULT_CALIBRATION

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("peak_flops", 0),
            ("peak_flops", -1),
            ("peak_flops", "fast"),
            ("peak_flops", True),
            ("peak_flops", 10**400),
            ("peak_flops", 1e51),
            ("peak_flops", 1e-51),
            ("launch_seconds", -1e-6),
            ("workers_per_node", 0),
            ("workers_per_node", 10**30),
            ("source", ""),
            ("source", "  "),
            ("source", "two\nlines"),
            ("source", "\x1b[31m"),
            ("efficiency_rows", [64, 10**30]),
            ("efficiency_rows", [64, 128.5]),
            ("efficiency_heads", [True]),
            ("peak_flops", None),
            ("peak_flops", float("nan")),
            ("peak_flops", float("inf")),
            ("backward_ratio", 0),
            ("launch_seconds", [1]),
            ("workers_per_node", 7.5),
            ("inter_node_beta", -45e9),
            ("source", 3),
            ("efficiency_rows", []),
            ("efficiency_rows", 64),
            ("efficiency_rows", [64, 64]),
            ("efficiency_heads", [2, 1]),
            ("efficiency_heads", [0]),
            ("efficiency", []),
            ("efficiency", [0.5]),
            ("efficiency", [[0.5]]),
            ("efficiency", [["high"]]),
        ],
    )
    def test_a_figure_that_is_none_is_refused_with_file_and_key(self, tmp_path: Path, key: str, value: Any):
        file = tmp_path / "c.json"
        file.write_text(json.dumps(dataclasses.asdict(DEFAULT_CALIBRATION) | {key: value}))
        with pytest.raises(ValueError, match=rf"c\.json: {key}\b") as caught:
            Calibration.from_json(file)
        assert "\n" not in str(caught.value)

    def test_unknown_and_missing_keys_are_refused(self, tmp_path: Path):
        figures = dataclasses.asdict(DEFAULT_CALIBRATION)
        (tmp_path / "more.json").write_text(json.dumps(figures | {"speed": 1}))
        with pytest.raises(ValueError, match=r"more\.json: unknown key speed"):
            Calibration.from_json(tmp_path / "more.json")
        del figures["peak_flops"]
        (tmp_path / "less.json").write_text(json.dumps(figures))
        with pytest.raises(ValueError, match=r"less\.json: missing key peak_flops"):
            Calibration.from_json(tmp_path / "less.json")

    @pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[1]", b"3", b"[" * 100_000, b""])
    def test_what_is_no_object_is_refused(self, tmp_path: Path, content: bytes):
        (tmp_path / "c.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"c\.json") as caught:
            Calibration.from_json(tmp_path / "c.json")
        assert "\n" not in str(caught.value)

    def test_a_file_that_is_not_there_is_named(self, tmp_path: Path):
        with pytest.raises(ValueError, match=r"none\.json cannot be read"):
            Calibration.from_json(tmp_path / "none.json")

    @pytest.mark.parametrize("share", [0, 1.01, 10**400, -0.5, True])
    def test_a_share_of_the_peak_is_above_0_and_at_most_1(self, share: Any):
        with pytest.raises(ValueError, match="efficiency: expected a number from 1e-50 to 1, got"):
            dataclasses.replace(SLOW_KERNEL, efficiency=((share,),))

    def test_what_costs_nothing_may_be_0_but_no_rate(self):
        nothing = dict.fromkeys(("launch_seconds", "intra_node_alpha", "inter_node_alpha"), 0)
        assert dataclasses.replace(DEFAULT_CALIBRATION, **nothing).launch_seconds == 0
        for name in ("peak_flops", "backward_ratio", "intra_node_beta", "inter_node_beta"):
            with pytest.raises(ValueError, match=f"{name}: expected a number from 1e-50 to 1e\\+50, got 0"):
                dataclasses.replace(DEFAULT_CALIBRATION, **{name: 0})

    def test_a_key_that_stands_there_twice_is_refused(self, tmp_path: Path):
        text = json.dumps(dataclasses.asdict(DEFAULT_CALIBRATION))
        (tmp_path / "c.json").write_text(text.replace('"peak_flops"', '"backward_ratio": 2, "peak_flops"'))
        with pytest.raises(ValueError, match=r"c\.json cannot be read .*: key backward_ratio stands there twice"):
            Calibration.from_json(tmp_path / "c.json")
