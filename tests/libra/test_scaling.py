"""What more replicas bring, on documents whose work can be counted by hand."""

from __future__ import annotations

import pytest

from odb_libra_lightning.libra.scaling import scaling
from odb_libra_lightning.libra.simulation_results import GridPoint
from tests.libra.simulated_runs import SLOW_KERNEL, run_of, seconds

POINT = GridPoint(pool_size=2, head_shards=2, block_size=4, chunks=2)


def test_even_documents_scale_perfectly():
    scaled = scaling([8] * 16, run=run_of(16, 8, 1), point=POINT, data_parallel=(1, 2, 8), steps=1)
    assert [(one.method, one.data_parallel) for one in scaled] == [
        (method, degree) for degree in (1, 2, 8) for method in ("ulysses", "libra")
    ]
    assert [one.efficiency for one in scaled] == pytest.approx([1] * 6, rel=1e-3)
    assert [one.speedup for one in scaled] == pytest.approx([1, 1, 2, 2, 8, 8], rel=1e-3)


def test_a_heavy_sequence_holds_ulysses_up():
    scaled = scaling(
        [16, *[1] * 48],
        run=run_of(16, 4, 1),
        point=POINT,
        data_parallel=(4, 1),
        methods=("ulysses",),
        linear_seconds=3.0,
        steps=1,
        seed=None,
        calibration=SLOW_KERNEL,
    )
    linear = 3 * 16 / 2
    alone = seconds((136 + 3 * 16) / 2) + 4 * linear
    together = seconds(136 / 2) + linear
    assert [one.step_seconds for one in scaled] == pytest.approx([alone, together])
    assert scaled[1].speedup == pytest.approx(alone / together)
    assert scaled[1].efficiency == pytest.approx(alone / together / 4)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"data_parallel": ()}, "at least one degree"),
        ({"data_parallel": (1, 3)}, "data_parallel=3"),
        ({"linear_seconds": -1.0}, "linear_seconds=-1"),
        ({"linear_seconds": float("nan")}, "linear_seconds=nan"),
        ({"linear_seconds": float("inf")}, "linear_seconds=inf"),
        ({"linear_seconds": 1e300}, "linear_seconds=1e"),
    ],
)
def test_what_does_not_fit_is_refused(settings, sentence):
    asked = {"data_parallel": (1, 2), **settings}
    with pytest.raises(ValueError, match=sentence):
        scaling([8] * 16, run=run_of(16, 8, 1), point=POINT, **asked)
