"""Where low precision leaves the noise of one rounding, and where nothing can be said."""

from __future__ import annotations

import numpy as np

from mxmp.diagnose.verifying.judging import Course, course
from mxmp.diagnose.verifying.recording import Record, Sketch, Step
from mxmp.diagnose.verifying.rounding import judged_by

NAN = float("nan")


def as_course(*sizes, moved=0.01):
    return Course((), sizes, (moved,) * len(sizes))


def judged(bands, *runs):
    found = judged_by([run if isinstance(run, Course) else as_course(*run) for run in runs], bands)
    return found, found.left and (found.left.step, found.left.what)


def test_equal_infinities_are_no_difference():
    one, other = (Sketch(np.inf, np.array([np.inf, NAN, last])) for last in (1.0, 3.0))
    assert one.distance(one) == 0
    assert one.distance(other) == 2
    assert one.distance(Sketch(np.inf, np.array([-np.inf, NAN, 1.0]))) == np.inf


def test_low_precision_leaves_the_noise_for_good_or_not_at_all():
    def leaves(*runs):
        return judged([as_course(NAN, 0.01, 0.02, 0.01)], *runs)[1]

    assert leaves((NAN, 0.9, 0.9, 0.9)) == (2, "gradients")
    assert leaves((NAN, 0.01, 0.01, 0.9)) is None  # of the last update none can say
    assert leaves((NAN, 0.9, 0.9, 0.9), (NAN, 0.9, 0.01, 0.01)) is None  # from other weights it does not
    assert leaves(as_course(NAN, 0.01, 0.01, 0.01, moved=0.6)) == (4, "weights")
    of_six = [as_course(*(0.01,) * 6)]
    assert judged(of_six, (0.01, 0.01, 1.5, 90.0, 0.01, 0.01))[1] is None  # two of four are not most


def test_low_precision_is_judged_where_the_noise_is_small():
    """A training may grow one rounding to another training: what it was before says how low precision is."""
    noise = [as_course(0.001, 0.002, 0.002, 0.6, 0.8, 0.9), as_course(0.001, 0.003, 0.002, 0.5, 0.7, 0.9)]
    found, left = judged(noise, (0.4, 0.5, 0.6, 0.9, 0.9, 0.9))
    assert left == (1, "gradients")
    assert found.wide == 3
    found, left = judged(noise, (0.001, 0.002, 0.004, 0.7, 0.9, 1.1))
    assert left is None
    assert (found.wide, found.noise, found.low, found.none) == (3, 0.55, 0.7, False)
    assert judged(noise, (0.001, 0.002, 0.002, 0.01, 0.01, 0.01))[0].wide is None  # as plain, whatever the noise does


def test_nothing_is_judged_where_one_rounding_is_as_large_as_all():
    found, left = judged([as_course(NAN, 0.3, 0.001), as_course(NAN, 0.2, 0.001)], (NAN, 0.4, 0.001))
    assert left is None
    assert (found.none, found.wide, found.noise, found.low) == (True, 1, 0.25, 0.4)


def test_a_flip_in_one_run_with_noise_says_nothing_in_two_it_does():
    still, flip = as_course(0.001, 0.001, 0.001), as_course(0.03, 0.001, 0.001)
    low = (0.2, 0.2, 0.2)
    assert judged([still, flip], low)[1] is None  # of two runs neither is left out
    assert judged([flip, *[still] * 5], low)[1] == (1, "gradients")
    assert judged([flip, flip, *[still] * 4], low)[1] is None
    large = as_course(0.3, 0.001, 0.001)
    found, left = judged([large, large, *[still] * 4], (1.1, 1.1, 1.1))
    assert found.wide is None  # in most runs the noise is small
    assert left == (1, "gradients")  # and nothing is left of the gradient, whatever two flips are


def test_each_trainer_is_compared_by_itself():
    """What low precision takes from small gradients shows beside those of another trainer, a million times larger."""

    def record(*sizes, skipped=False):
        steps = [
            Step((), (), {"w": Sketch(abs(s), np.array([s]))}, {"w": Sketch(0.0, np.array([0.0]))}, skipped)
            for s in sizes
        ]
        return Record([[step] for step in steps], [{"w": Sketch(abs(s), np.array([s]))} for s in sizes])

    found = course(record(1e6, 1.0), record(1e6, 0.5))
    assert found.gradients == (0.5,)
    assert found.moved == (0.5,)
    assert np.isnan(course(record(1e6, 1.0), record(1e6, 0.5, skipped=True)).gradients[0])
