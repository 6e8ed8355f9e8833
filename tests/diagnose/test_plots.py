"""The pictures show what was measured: rows, ranges, skips; they are looked at in docs/."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from kit.frontends import batch, gluon_run, gluon_step, three

import mxmp
from mxmp.diagnose import plot_histograms, plot_loss_scale, watch

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def run():
    net, (x, y) = three(middle=2.0**-14, last=2.0**-12), batch()
    scaler = mxmp.DynamicLossScaler(init_scale=1.0, growth_interval=2)
    trainer = gluon_run(net, loss_scale=scaler)
    with watch(net, trainer, every=2) as watched:
        for step in range(7):
            gluon_step(net, trainer, x, y, factor=np.inf if step == 4 else 1.0)
    return net, trainer, watched


def edges(axis):
    return [line.get_xdata()[0] for line in axis.lines if line.get_color() == "firebrick"]


def test_each_tensor_is_a_row_and_float16_is_marked(run, tmp_path):
    _, _, watched = run
    path = tmp_path / "step.png"
    figure = plot_histograms(watched.latest, str(path), kinds=("gradient", "weight"))
    assert path.stat().st_size > 5000
    _, gradients, weights, bar = figure.axes
    assert bar.get_xlabel().startswith("share of a tensor's values")
    assert [tick.get_text() for tick in weights.get_yticklabels()] == ["first_weight", "last_weight", "middle_weight"]
    assert "middle_fwd -> first_fwd" in [tick.get_text() for tick in gradients.get_yticklabels()]
    assert edges(gradients) == [-25, -14, 16]
    # row and column of the image are tensor and exponent
    image = gradients.images[0]
    grid, (low, _, _, _) = image.get_array(), image.get_extent()
    rows = watched.latest.of("gradient", low_only=True)
    assert any(not row.any() for row in np.asarray(grid))  # all of it is zero
    for row, tensor in ((row, tensor) for row, tensor in zip(np.asarray(grid), rows) if row.any()):
        smallest = int(low) + int(np.flatnonzero(row)[0])
        assert 2.0**smallest <= tensor.histogram.smallest < 2.0 ** (smallest + 1)


def test_the_scale_is_drawn_where_it_held_and_skips_at_the_step_that_was_skipped(run):
    _, trainer, watched = run
    figure = plot_loss_scale(trainer, watched=watched)
    scale, share = figure.axes
    curve, skips = scale.lines[:2]
    drawn = dict(zip(curve.get_xdata(), curve.get_ydata()))
    assert drawn == {1: 1.0, 3: 2.0, 5: 4.0, 6: 2.0, 8: 4.0}
    assert (list(skips.get_xdata()), list(skips.get_ydata())) == ([5], [4.0])
    assert list(share.lines[0].get_ydata()) == [100 * s.underflow for s in watched.snapshots]
    assert share.lines[0].get_ydata()[0] > 0
    with pytest.raises(ValueError, match="scale_history is empty"):
        plot_loss_scale([])


def test_without_matplotlib_the_error_names_the_extra(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'mxmp\[plots\]'"):
        plot_histograms(run[2].latest)
    with pytest.raises(ValueError, match="kinds are 'activation'"):
        plot_histograms(run[2].latest, kinds=["weights"])
