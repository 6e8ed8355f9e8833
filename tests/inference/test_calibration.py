"""A graph is judged by its worst column, with the column's mean taken off, and by the top answers of all scores."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.served_networks import S, filled

import mxmp
from mxmp.inference import calibration
from mxmp.inference.calibration import Statistics, column_sqnr, columns_of, same_answers

RANDOM = np.random.RandomState(0)


def judged(reference: np.ndarray, noise: np.ndarray) -> float:
    return column_sqnr(columns_of(reference), columns_of(reference + noise))


@pytest.mark.parametrize("shape", [(32,), (32, 1), (32, 5), (4, 9, 5), (2, 5, 6, 6), (2, 5, 2, 3, 3)], ids=str)
def test_an_offset_of_a_column_is_no_signal(shape):
    values, noise = RANDOM.normal(0, 8, shape), RANDOM.normal(0, 5, shape)
    assert judged(values, noise) == pytest.approx(judged(values + 288, noise))
    assert judged(values, noise) < 10


@pytest.mark.parametrize(("shape", "axis"), [((16, 5), 1), ((4, 20, 5), 2), ((2, 5, 8, 8), 1), ((2, 5, 2, 4, 4), 1)])
def test_scores_beside_boxes_are_judged_apart(shape, axis):
    large = np.array([500, 500, 500, 500, 1.0]).reshape([-1 if i == axis else 1 for i in range(len(shape))])
    values, noise = RANDOM.uniform(0, large, shape), RANDOM.normal(0, 0.5, shape)
    assert judged(values, noise) < 10
    assert judged(values, noise * (large > 1)) > 40


@pytest.mark.parametrize("rows", [2, 4, 8, 32, 200])
@pytest.mark.parametrize("columns", [1, 5, 1000])
def test_few_rows_of_many_columns_do_not_fail_by_chance(rows, columns):
    """Noise of a tenth is 20 dB; the least of 1000 variances over eight rows alone would say 5."""
    shape = 10, rows, columns
    found = [judged(*pair) for pair in zip(RANDOM.normal(size=shape), RANDOM.normal(0, 0.1, shape))]
    assert np.median(found) > (15 if rows > 2 else 5)
    assert np.median(found) < 25


def test_one_row_is_judged_by_the_spread_of_its_values():
    values, noise = RANDOM.normal(0, 1, (1, 1000)), RANDOM.normal(0, 0.1, (1, 1000))
    assert judged(values, noise) == pytest.approx(20, abs=2)
    assert judged(values + 288, noise) == pytest.approx(judged(values, noise))


def test_a_column_that_does_not_vary_is_compared_with_its_mean():
    varied = RANDOM.normal(0, 1, (16, 1))
    for constant in (np.full((16, 1), 288.0), 288 + RANDOM.normal(0, 1e-5, (16, 1))):
        values = np.concatenate([varied, constant], 1)
        assert judged(values, np.array([0.001, 2.0])) == pytest.approx(43, abs=1)  # 288 to 2
        assert judged(values, np.array([0.001, 200.0])) < 5
    zero = np.concatenate([varied, 0 * varied], 1)
    assert judged(zero, np.array([0.0, 0.01])) > 30
    assert judged(zero, np.array([0.0, 5.0])) < 0
    assert judged(np.full((1, 1), 5.0), np.full((1, 1), 0.5)) == pytest.approx(20)
    assert judged(np.array(5.0), np.array(0.5)) == pytest.approx(20)


def test_equal_outputs_have_no_noise_and_others_that_are_not_finite_no_signal():
    masked = np.array([[1.0, -np.inf], [2.0, -np.inf]])
    assert column_sqnr(masked, masked) == np.inf
    assert column_sqnr(masked, np.array([[1.0, 0.0], [2.0, -np.inf]])) == -np.inf
    assert column_sqnr(np.ones((2, 2)), np.full((2, 2), np.nan)) == -np.inf
    assert column_sqnr(np.zeros((4, 2)), np.zeros((4, 2))) == np.inf


def test_answers_are_those_of_each_row():
    scores = np.eye(4)
    assert same_answers(scores, scores[[0, 1, 2, 2]]) == 0.75
    assert same_answers(scores[:, :1], scores[:, :1]) is None


def test_tensors_whose_values_show_no_range_are_named():
    """INT8 would hold nothing else of them later."""
    statistics = Statistics()
    seen = {
        "zero": [0.0, 0.0],
        "constant": [1.5, 1.5],
        "masked": [0.0, -np.inf],
        "nan": [0.0, np.nan],
        "infinite": [np.inf, np.inf],
        "tiny": [0.0, 1e-8],
        "good": [-1.0, 1.0],
    }
    for name, values in seen.items():
        for value in values:  # each in a batch of its own
            statistics.add(name, np.full(8, value, "float32"))
    assert statistics.unusable([*seen, "unseen"]) == {
        "zero": "was 0 throughout",
        "constant": "was 1.5 throughout",
        "masked": "held infinity or NaN",
        "nan": "held infinity or NaN",
        "infinite": "held infinity or NaN",
        "tiny": "was never beyond 1e-08",
        "unseen": "was never computed",
    }


# -- whole searches ---------------------------------------------------------------------------------


def optimized(symbol, params, data, **options):
    return mxmp.optimize_for_inference(symbol, data, arg_params=params, progress=False, **options)


def candidate(found, name="int8"):
    return next(row for row in found.report.candidates if row.name == name)


@pytest.mark.vnni
@pytest.mark.slow
def test_a_bias_of_the_outputs_changes_no_verdict():
    """The inputs of its first layer have a few values far outside the range of the others, so INT8 loses the others."""
    symbol = S.FullyConnected(S.var("data"), num_hidden=1, name="fc")
    params = {"fc_weight": mx.nd.ones((1, 8)) * mx.nd.array([1] * 7 + [1e-3]), "fc_bias": mx.nd.zeros(1)}
    values = RANDOM.normal(0, 1, (3, 64, 8)).astype("float32")
    values[:, :, 7] *= 300
    found = []
    for bias in (0.0, 288.0):
        report = optimized(symbol, {**params, "fc_bias": mx.nd.full(1, bias)}, [*map(mx.nd.array, values)]).report
        (row,) = [row for row in report.candidates if row.name == "int8"]
        found.append(row)
    assert [row.verdict for row in found] == ["below 20 dB"] * 2
    assert found[0].column_sqnr == pytest.approx(found[1].column_sqnr, abs=2)
    assert found[1].sqnr > 20 > found[0].sqnr
    assert "worst column" in str(report)


def scores_of(shape):
    """A network whose top two scores are near each other, so that INT8 gives other answers."""
    weight = RANDOM.normal(0, 1, (1, 16)) + RANDOM.normal(0, 1e-3, (10, 16))
    data = S.var("data")
    scores = S.Reshape(S.FullyConnected(data, num_hidden=10, name="fc", no_bias=True), shape=shape)
    return [scores, S.sum(data, axis=1, name="other")], {"fc_weight": mx.nd.array(weight)}


@pytest.mark.vnni
@pytest.mark.slow
@pytest.mark.parametrize(("shape", "place"), [((-1, 10), 1), ((-1, 1, 10), 0), ((-1, 10, 1, 1), 1)], ids=str)
def test_top_answers_guard_scores_of_any_shape_in_any_output(shape, place):
    heads, params = scores_of(shape)
    data = [mx.nd.array(RANDOM.normal(size=(64, 16))) for _ in range(3)]
    symbol = S.Group(heads[:: -1 if place else 1])
    row = candidate(optimized(symbol, params, data, dtypes="int8", min_sqnr=0))
    assert row.agreement < 0.9
    assert row.verdict.endswith("of the answers are others")


@pytest.mark.vnni
@pytest.mark.slow
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_layer_of_which_calibration_saw_no_range_stays_out_and_is_named(value):
    layers = [S.FullyConnected(S.var(name), num_hidden=8, name=f"fc_{name}") for name in ("seen", "unseen")]
    symbol = S.FullyConnected(S.relu(layers[0]) + S.relu(layers[1]), num_hidden=4, name="last")
    shapes = {"seen": (32, 16), "unseen": (32, 16)}
    params = filled(symbol, **shapes)
    data = [
        {"seen": mx.nd.array(RANDOM.normal(size=(32, 16))), "unseen": mx.nd.full((32, 16), value)} for _ in range(3)
    ]
    served = []

    def evaluate(candidate):
        served.append(candidate)
        return 1.0

    found = optimized(symbol, params, data, dtypes="int8", evaluate=evaluate)
    (note,) = [note for note in found.report.notes if "range of some values" in note]
    assert "'fc_unseen', as its input 'unseen' was" in note
    assert "fc_seen" not in note
    graph = served[-1].symbol.tojson()
    assert '"quantized_fc_seen"' in graph
    assert "quantized_fc_unseen" not in graph


@pytest.mark.vnni
@pytest.mark.slow
def test_a_network_of_small_operators_ends_the_search_early_and_writes_no_log(capfd):
    cell = mx.rnn.GRUCell(8, prefix="gru_")
    outputs, _ = cell.unroll(12, S.var("data"), layout="NTC", merge_outputs=False)
    symbol = S.FullyConnected(outputs[-1], num_hidden=4, name="fc")
    data = [mx.nd.random.normal(shape=(4, 12, 6)) for _ in range(3)]
    params = {name: value for name, value in filled(symbol, data=(4, 12, 6)).items() if "begin_state" not in name}
    mx.nd.waitall()
    capfd.readouterr()
    report = optimized(symbol, params, data).report
    assert "src/" not in capfd.readouterr().err
    assert report.chosen.startswith("float32")
    assert any("int8: its layers were not tried one by one" in note for note in report.notes)
    assert len(report.candidates) <= 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        ([], "there is no calibration data"),
        (mx.nd.ones((2, 1, 8, 8)), r"calibration is one NDArray: expected an iterable of batches"),
        ([mx.nd.ones((2, 3, 8, 8))], r"calibration batch 0 with shapes .*3, 8, 8.* does not fit the network"),
        ([mx.nd.ones((2, 1, 8, 8)), mx.nd.ones((2, 1, 8, 8)) * np.nan], "calibration batch 1, 'data', holds NaN"),
        ([(mx.nd.ones((2, 1, 8, 8)), mx.nd.ones(2))], "where it holds labels too, leave them out"),
        (["x"], "holds a str: expected arrays"),
        ([mx.nd.ones((2, 1, 8, 8)), (mx.nd.ones((2, 1, 8, 8)),) * 2], "calibration batch 1 has 2 arrays"),
    ],
)
def test_calibration_that_cannot_be_is_refused(net, calibration, message):
    with pytest.raises(ValueError, match=message):
        mxmp.optimize_for_inference(net, calibration)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0.0, 1e-9, 1e-3])
@pytest.mark.parametrize("calibrator", calibration.CALIBRATORS)
def test_a_later_batch_of_far_larger_values_keeps_the_histogram_small(calibrator, first):
    """MXNet adds bins of the same width, to a tensor that was 0 throughout infinitely many."""
    statistics = calibration.Statistics()
    values = np.random.RandomState(0).uniform(-5, 5, 10_000).astype("float32")
    statistics.add("x", np.full(10_000, first, "float32"))
    statistics.add("x", values)
    counts, edges, low, high, end = statistics.histograms["x"]
    assert counts.sum() == 20_000
    assert len(counts) + 1 == len(edges) < 25_000
    assert (low, high) == (values.min(), values.max())
    assert end >= high
    least, most = statistics.ranges(calibrator)["x"]
    assert 4 < most <= high
    assert -4 > least >= low


@pytest.mark.slow
def test_infinite_values_of_a_tensor_do_not_count():
    statistics = calibration.Statistics()
    statistics.add("mask", np.array([0, -np.inf], "float32"))
    statistics.add("mask", np.array([1, np.inf, np.nan], "float32"))
    statistics.add("all", np.array([np.inf], "float32"))
    assert statistics.ranges("min/max") == {"mask": (0.0, 1.0)}
