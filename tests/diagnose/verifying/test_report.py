"""The report of verify: its picture."""

from __future__ import annotations

import pytest
from kit.ports import scaled, training

from mxmp.diagnose import plot_verification, verify


@pytest.mark.slow
def test_the_picture_has_losses_and_the_band_of_noise(tmp_path):
    pytest.importorskip("matplotlib")
    found = verify(training(scaled), 4, progress=False)
    figure = plot_verification(found, str(tmp_path / "verify.svg"))
    assert (tmp_path / "verify.svg").exists()
    first, second = figure.axes
    drawn = {text.get_text() for text in first.get_legend().get_texts()}
    assert drawn >= {"plain MXNet", "mxmp in FP32", "float16"}
    assert "noise of one rounding" in [text.get_text() for text in second.get_legend().get_texts()]
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_verification(verify(lambda: None, progress=False))
