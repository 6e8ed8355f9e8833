"""What the comparison of two trees' decisions says of operators that are in another dtype."""

import json

import mxnet as mx
import pytest
from sweep import decisions

S = mx.sym


def decided(low, moved=8):
    operators = {f"0: {name}": ["exp", name in low, f"why {name in low}"] for name in ("a", "b", "c")}
    return {"net": {" ".join(each): {"operators": operators, "bytes": moved} for each in decisions.VARIANTS}}


def test_operators_in_another_dtype_are_counted_by_both_reasons():
    found = decisions.compared(decided("abc"), decided("c", moved=9))
    assert found["networks"] == 1
    assert found["bytes"]["float16 gpu"] == [8, 9]
    assert found["other bytes"]["float16 gpu"] == {"net": [8, 9]}
    first = found["changes"][0]
    assert (first["count"], first["first"], first["low"]) == (2, "0: a", False)
    assert (first["before"], first["now"]) == ("why True", "why False")


def test_equal_trees_change_nothing():
    found = decisions.compared(decided("a"), decided("a"))
    assert found["changes"] == []
    assert not any(found["other bytes"].values())


def test_trees_that_see_other_operators_are_refused():
    with pytest.raises(SystemExit, match="other operators"):
        decisions.differences({"0: a": ["exp", True, ""]}, {"0: b": ["exp", True, ""]})


def test_this_tree_decides_a_traced_graph(tmp_path):
    symbol = S.FullyConnected(S.var("data"), num_hidden=4, name="fc")
    graph = {"json": symbol.tojson(), "numpy": False, "shapes": {"data": (2, 3), "fc_weight": (4, 3), "fc_bias": (4,)}}
    traced = {"learned": ["fc_weight", "fc_bias"], "graphs": [graph]}
    (tmp_path / "net.json").write_text(json.dumps(traced))
    (tmp_path / "none.json").write_text(json.dumps({"error": "it cannot"}))
    found = decisions.decide_all(tmp_path)
    assert list(found) == ["net"]
    assert found["net"]["float16 gpu"]["operators"]["0: fc"][:2] == ["FullyConnected", True]
