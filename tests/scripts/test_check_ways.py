"""How far a reader walks who follows a conversion."""

import pytest
from checks import ways

from mxmp.precision.graph import Graph


@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ways.WAYS)
def test_a_way_is_no_longer_than_it_was(name, policy):
    made, most, most_returns = ways.WAYS[name]
    stays = ways.followed(made(policy))
    more = ways.MORE[policy]
    assert 20 < len(stays) <= most + more
    assert sum(stay.returns for stay in stays) <= most_returns + more
    assert all(first.file != second.file for first, second in zip(stays, stays[1:]))


def test_each_function_is_read_once_and_a_file_that_was_left_is_a_return():
    symbol = ways.symbol()
    first, numpy = ways.followed(lambda: [Graph.from_symbol(symbol).names() for _ in range(2)])[:2]
    assert first.functions[:2] == ["from_symbol", "from_json"]
    assert (first.file, first.returns, numpy) == (
        "precision/graph.py",
        False,
        ways.Stay("precision/_mxnet.py", ["is_numpy"], False),
    )
    found = ways.followed(lambda: [Graph.from_symbol(symbol).names() for _ in range(2)])
    assert found[2:] == [ways.Stay("precision/graph.py", ["names"], True)]
