"""Low precision within the noise, or not."""

from __future__ import annotations

from mxmp.diagnose.verifying.judging import Course
from mxmp.diagnose.verifying.rounding import low_departure_of


def test_low_precision_leaves_the_noise_for_good_or_not_at_all():
    nan = float("nan")
    noise = [Course((), (nan, 0.01, 0.02, 0.01), 0.01)]

    def leaves(*runs):
        found = low_departure_of([Course((), *run) for run in runs], noise)
        return found and (found.step, found.what)

    assert leaves(((nan, 0.9, 0.9, 0.9),)) == (2, "gradients")
    assert leaves(((nan, 0.01, 0.01, 0.9),)) is None  # of the last update none can say
    assert leaves(((nan, 0.9, 0.9, 0.9),), ((nan, 0.9, 0.01, 0.01),)) is None  # from other weights it does not
    assert leaves(((nan, 0.01, 0.01, 0.01), 0.6)) == (4, "weights")
    wide = [Course((), (nan, 0.1, 0.4, 0.4))]
    assert low_departure_of([Course((), (nan, 0.2, 0.9, 0.9))], wide) is None
