"""The DCGAN example: two trainers in float16, two loss scales, two pictures."""

import dcgan
import matplotlib.pyplot as plt
import numpy as np
import pytest

pytestmark = pytest.mark.slow


def test_it_trains_both_nets_with_scales_of_their_own_and_draws_both_pictures(tmp_path, capsys):
    arguments = ["--epochs", "1", "--batch", "32", "--width", "4", "--growth-interval", "5", "--output", str(tmp_path)]
    trainers = dcgan.main(arguments)
    assert set(trainers) == {"generator", "discriminator"}
    histories = [trainer.scale_history for trainer in trainers.values()]
    assert all(len(history) > 1 for history in histories)
    assert histories[0] != histories[1]
    for trainer in trainers.values():
        assert trainer.skipped_steps == sum(event.skipped for event in trainer.scale_history)
        assert all(np.isfinite(p.data().asnumpy()).all() for p in trainer._params)
    assert "loss scale generator" in capsys.readouterr().out
    assert plt.imread(tmp_path / "digits.png").shape[:2] == (480, 480)
    assert plt.imread(tmp_path / "scales.png").std() > 0


def test_the_generator_learns(tmp_path):
    """After a few epochs its pictures are closer to digits than noise is: dark at the rim, bright inside."""
    dcgan.main(["--epochs", "4", "--width", "8", "--output", str(tmp_path)])
    grid = plt.imread(tmp_path / "digits.png")[4::8, 4::8, 0].reshape(6, 10, 6, 10).transpose(0, 2, 1, 3)
    pictures = grid[:, :, 1:-1, 1:-1].mean(axis=(0, 1))
    assert pictures[:, [0, -1]].mean() < pictures[:, 3:5].mean() - 0.2
