"""The Gluon door: convert in place, run as a graph in low precision, restore without a trace."""

from __future__ import annotations

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from kit.networks import NETS, convnet, made, mlp
from kit.oracle import assert_same_bits, by_gluon, by_symbol, reference, sqnr, traced, trainable
from kit.twins import assert_same
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp
from mxmp import Policy
from mxmp.gluon.parameter import LowParameter
from mxmp.host import versions

DTYPES = ["float16", "bfloat16"]
# What MXNet itself gives a block in its first trace, and another block has not.
OF_A_TRACE = frozenset() if versions.NOW.clears_graph_arguments else frozenset({"_cached_op_args"})


# -- Numbers ----------------------------------------------------------------------------------------

# One rounding leaves noise 74 dB (float16) or 56 dB (bfloat16) under the signal; n independent ones in a
# row take off 10 log10 n, and what is nearly cancelled, such as a softmax's or a batch norm's gradient,
# some more. Where there are kinks, an activation within the error of zero changes its side of a relu, or
# of a pair its place in a max, and the whole value is noise: its power is near the rounding error itself,
# not its square (33 and 24 dB), before batch norm's gradient takes most of the signal away.
# Lowest of six seeds, measured: outputs 53 and 38 dB; gradients 55 and 34, with kinks 21 and 18.
KINKED = ("convnet", "upscale")
FLOORS = {"float16": (48, 50, 16), "bfloat16": (33, 29, 13)}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_and_gradients_are_near_fp32_through_either_door(name, dtype):
    net, x = made(name)
    want = reference(net, [x])
    symbol, values = traced(net, [x])
    got = by_gluon(mxmp.convert(net, dtype), [x])
    out, grad = FLOORS[dtype][0], FLOORS[dtype][1 + (name in KINKED)]
    assert got.grads.keys() == want.grads.keys()
    for expected, value in zip(want.outputs, got.outputs):
        assert value.dtype == np.float32
        assert sqnr(expected, value) > out
    for parameter, expected in want.grads.items():
        if np.abs(expected).max() > 1e-5:
            assert sqnr(expected, got.grads[parameter]) > grad, parameter
    assert not all(np.array_equal(a, b) for a, b in zip(want.outputs, got.outputs))
    other = by_symbol(mxmp.cast_symbol(symbol, dtype), values, grads_of=trainable(net))
    assert_same_bits(got, other)


# -- What convert keeps -----------------------------------------------------------------------------


def picture(net: gluon.Block, ours: frozenset[str] = frozenset()) -> dict[str, Any]:
    """All that a user may hold of a net: the tree, its objects and their attributes but ours, hooks of their own."""
    blocks: list[Any] = []
    net.apply(blocks.append)
    params = net.collect_params()
    return {
        "blocks": [(id(b), type(b), b.name, b.prefix, sorted(b._children)) for b in blocks],
        "attributes": [sorted(vars(b).keys() - ours - OF_A_TRACE) for b in blocks],
        "hooks": [list(b._forward_hooks.values()) for b in blocks],
        "params": [(name, id(p), p.lr_mult, p.wd_mult, p.grad_req, p.shape) for name, p in params.items()],
        "structural": sorted(net._collect_params_with_prefix()),
    }


@pytest.mark.parametrize("policy", [*DTYPES, "params=float16"])
def test_convert_keeps_objects_names_sharing_settings_and_hooks(policy):
    net, x = made("tied")
    calls: list[str] = []
    net.register_forward_pre_hook(lambda block, args: calls.append("before"))
    net.register_forward_hook(lambda block, args, out: calls.append("after"))
    weight = net[0].weight
    weight.lr_mult, weight.wd_mult, net[0].bias.grad_req = 0.5, 0.25, "null"
    before = picture(net)
    assert mxmp.convert(net, policy) is net
    by_gluon(net, [x])
    ours = frozenset({"forward", "_call_cached_op", "hybridize", "cast", "optimize_for", "mxmp_conversion"})
    assert picture(net, ours=ours) == before
    assert calls == ["before", "after"]
    assert net[1].weight is weight


@pytest.mark.parametrize("policy", [*DTYPES, "params=float16", "norm=compute"])
@pytest.mark.parametrize("hybridize", [False, True])
def test_restore_leaves_nothing_behind(policy, hybridize):
    net, x = made("convnet", hybridize=hybridize)
    kinds = [type(p) for p in net.collect_params().values()]
    attributes = [sorted(vars(p)) for p in net.collect_params().values()]
    before, want = picture(net), net(mx.nd.array(x)).asnumpy()
    mxmp.convert(net, policy)
    assert not np.array_equal(net(mx.nd.array(x)).asnumpy(), want)
    assert mxmp.restore(net) is net
    np.testing.assert_array_equal(net(mx.nd.array(x)).asnumpy(), want)
    assert picture(net) == before
    assert [type(p) for p in net.collect_params().values()] == kinds
    assert [sorted(vars(p)) for p in net.collect_params().values()] == attributes
    blocks: list[Any] = []
    net.apply(blocks.append)
    assert all(not b._forward_pre_hooks for b in blocks)
    assert all(b._active is hybridize for b in blocks if isinstance(b, nn.HybridBlock))
    assert mxmp.restore(net) is net


# -- Hybridize --------------------------------------------------------------------------------------

FLAGS = [{}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True}, {"inline_limit": 0}]


@pytest.mark.parametrize("name", ["attention", "upscale"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_way_to_hybridize_computes_the_same_bits(name, dtype):
    net, x = made(name)
    mxmp.convert(net, dtype)
    want, inference = by_gluon(net, [x]), by_gluon(net, [x], train=False)
    for flags in FLAGS:
        net.hybridize(**flags)
        assert_same_bits(by_gluon(net, [x]), want)
        assert_same_bits(by_gluon(net, [x], train=False), inference)
    net.hybridize(False)
    assert_same_bits(by_gluon(net, [x]), want)


@pytest.mark.parametrize("then", [lambda net: net.cast("float32"), lambda net: net.add(nn.Activation("relu"))])
@pytest.mark.parametrize("active", [False, True])
def test_restore_gives_the_users_choice_back_after_a_cast_or_a_new_child(active, then):
    net, x = made("mlp")
    net.hybridize(active)
    mxmp.convert(net, exclude=lambda name, block: block is net[0])
    net(mx.nd.array(x))
    then(net)
    net(mx.nd.array(x))
    assert mxmp.restore(net)._active is active
    assert by_gluon(net, [x]).outputs


# -- Graphs of their own ----------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prelu_learns_its_slopes_also_after_an_inference(dtype, training):
    """MXNet's graph, unlike its Python mode, gives them a wrong gradient; inference needs no workaround."""
    net = nn.HybridSequential()
    net.add(nn.Dense(8, in_units=4), nn.PReLU(in_channels=8), nn.Dense(3, in_units=8))
    net.initialize(mx.init.Normal(0.5))
    x = mx.nd.random.normal(shape=(6, 4))

    def gradient() -> np.ndarray:
        with autograd.record(train_mode=training):
            loss = (net(x) ** 2).sum()
        loss.backward()
        return net[1].alpha.grad().asnumpy()

    want = gradient()
    mxmp.convert(net, dtype)
    net(x)
    assert "slopes_of_prelu" not in str(mxmp.explain(net))
    assert sqnr(want, gradient()) > (24 if dtype == "bfloat16" else 45)


def test_initialisation_may_come_after_convert():
    def built(late: bool) -> Any:
        mx.random.seed(5)
        net = convnet()
        if late:
            mxmp.convert(net)
        net.initialize(mx.init.Xavier())
        if not late:
            mxmp.convert(net)
        return by_gluon(net, [x])

    x = np.random.normal(0, 1, (2, 3, 8, 8)).astype("float32")
    late, early = built(True), built(False)
    assert_same([*late.outputs, *late.grads.values()], [*early.outputs, *early.grads.values()])


def without_versions(path: str) -> dict:
    """A Symbol file, less MXNet's count of how often a variable has been part of a trace."""
    raw = json.loads(Path(path).read_text())
    for node in raw["nodes"]:
        node["inputs"] = [entry[:2] for entry in node["inputs"]]
    return raw


def exported(net: nn.HybridBlock, x: np.ndarray, path: Any) -> tuple[str, str]:
    if not net._active:
        net.hybridize()
    net(mx.nd.array(x))
    net.export(str(path), remove_amp_cast=False)
    return f"{path}-symbol.json", f"{path}-0000.params"


@pytest.mark.filterwarnings("ignore:Cannot decide type for:UserWarning")  # SymbolBlock(...), of any Symbol
def test_a_symbol_block_keeps_its_name():
    block = gluon.SymbolBlock(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="fc"), [mx.sym.var("data")])
    block.initialize()
    name = block.name
    mxmp.convert(block)(mx.nd.ones((4, 5)))
    assert block.name == name
    mxmp.restore(block)
    assert block.name == name != ""


@pytest.mark.filterwarnings("ignore:Cannot decide type for:UserWarning")  # SymbolBlock.imports, of any file
@pytest.mark.parametrize("policy", [*DTYPES, "params=float16"])
def test_symbol_blocks_convert_and_restore(policy, tmp_path):
    net, x = made("convnet")
    files = exported(net, x, tmp_path / "plain")
    want = net(mx.nd.array(x)).asnumpy()
    block = gluon.SymbolBlock.imports(files[0], ["data"], files[1])
    plain = json.loads(block._cached_graph[1].tojson(remove_amp_cast=False))
    mxmp.convert(block, policy)
    low = block(mx.nd.array(x)).asnumpy()
    np.testing.assert_array_equal(low, mxmp.convert(net, policy)(mx.nd.array(x)).asnumpy())
    assert not np.array_equal(low, want)
    for flags in FLAGS[:3]:
        block.hybridize(**flags)
        np.testing.assert_array_equal(block(mx.nd.array(x)).asnumpy(), low)
    assert json.loads(block._cached_graph[1].tojson(remove_amp_cast=False)) == plain
    mxmp.restore(block)
    np.testing.assert_array_equal(block(mx.nd.array(x)).asnumpy(), want)


# -- Again, and otherwise ---------------------------------------------------------------------------


def test_converting_twice_is_converting_once():
    net, x = made("smooth")
    mxmp.convert(net, "bfloat16")
    once = by_gluon(net, [x])
    hooks = len(net._forward_pre_hooks)
    graph = net._cached_op
    mxmp.convert(net, Policy("bfloat16"))
    assert_same_bits(by_gluon(net, [x]), once)
    assert len(net._forward_pre_hooks) == hooks
    assert net._cached_op is graph


@pytest.mark.parametrize("part", [False, True], ids=["the net", "a child"])
@pytest.mark.parametrize("first", ["bfloat16", "params=float16", "norm=compute"])
def test_another_policy_replaces_the_first(first, part):
    net, x = made("mlp" if part else "smooth")
    want = by_gluon(mxmp.convert(net), [x])
    mxmp.restore(net)
    converted = net[0] if part else net
    mxmp.convert(converted, first)
    by_gluon(converted, [x])
    assert_same_bits(by_gluon(mxmp.convert(net), [x]), want)
    assert not any(isinstance(p, LowParameter) for p in net.collect_params().values())


class Headed(gluon.Block):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.body, self.head = nn.Dense(4, in_units=3), nn.Dense(2, in_units=4)

    def forward(self, x):
        return self.head(self.body(x))


def copied(net: gluon.Block) -> gluon.Block:
    return pickle.loads(pickle.dumps(net))


@pytest.mark.parametrize("policy", [*DTYPES, "params=float16"])
@pytest.mark.parametrize("again", [False, True], ids=["once", "again"])
@pytest.mark.parametrize("of", [lambda net: net, copied], ids=["net", "copy"])
def test_restore_undoes_convert_also_where_a_block_was_replaced_since(policy, again, of):
    net, x = Headed(), mx.nd.random.uniform(shape=(2, 3))
    net.initialize()
    net(x)
    net = of(mxmp.convert(net, policy))
    net(x)
    former, net.head = net.head, nn.Dense(5, in_units=4)
    net.head.initialize()
    if again:
        mxmp.convert(net, policy)
        net(x)
    mxmp.restore(net)
    for block in (net.body, net.head, former):
        assert not vars(block).keys() & {"forward", "_call_cached_op"}
        assert {type(param) for param in block.params.values()} == {gluon.Parameter}
        data = x if block is net.body else net.body(x)
        want = mx.nd.FullyConnected(data, block.weight.data(), block.bias.data(), num_hidden=block.bias.shape[0])
        np.testing.assert_array_equal(block(data).asnumpy(), want.asnumpy())


def test_indices_arrive_exactly():
    net = nn.HybridSequential()
    net.add(nn.Embedding(5000, 2), nn.Dense(2, use_bias=False, flatten=False))
    net.initialize()
    table = np.stack([np.arange(5000) % 64, np.arange(5000) // 64], 1).astype("float32")
    ids = mx.nd.array([[2049, 4097, 4999]], dtype="int32")
    mxmp.convert(net)
    net(ids)
    net[0].weight.set_data(mx.nd.array(table))
    net[1].weight.set_data(mx.nd.eye(2))
    np.testing.assert_array_equal(net(ids).asnumpy(), table[ids.asnumpy()])
    np.testing.assert_array_equal(net(ids.astype("float32")).asnumpy(), table[ids.asnumpy()])


# -- Files ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Cannot decide type for:UserWarning")  # SymbolBlock.imports, of any file
@pytest.mark.parametrize("policy", [*DTYPES, "params=float16"])
def test_files_of_a_converted_net_are_plain_fp32(policy, tmp_path):
    net, x = made("convnet")
    plain_files = exported(net, x, tmp_path / "plain")
    net.save_parameters(str(tmp_path / "plain.params"))
    want = net(mx.nd.array(x)).asnumpy()
    mxmp.convert(net, policy)
    by_gluon(net, [x], train=False)
    files = exported(net, x, tmp_path / "low")
    assert without_versions(files[0]) == without_versions(plain_files[0])
    net.save_parameters(str(tmp_path / "low.params"))
    for low, plain in [(files[1], plain_files[1]), (tmp_path / "low.params", tmp_path / "plain.params")]:
        low, plain = mx.nd.load(str(low)), mx.nd.load(str(plain))
        assert low.keys() == plain.keys()
        for name, value in plain.items():
            assert low[name].dtype == np.float32
            np.testing.assert_array_equal(low[name].asnumpy(), value.asnumpy())
    block = gluon.SymbolBlock.imports(files[0], ["data"], files[1])
    np.testing.assert_array_equal(block(mx.nd.array(x)).asnumpy(), want)


@pytest.mark.filterwarnings("ignore:Cannot decide type for:UserWarning")  # SymbolBlock.imports, of any file
@pytest.mark.parametrize("policy", [*DTYPES, "params=float16"])
def test_a_converted_symbol_block_exports_the_files_it_was_made_of(policy, tmp_path):
    net, x = made("convnet")
    symbol, params = exported(net, x, tmp_path / "plain")
    block = mxmp.convert(gluon.SymbolBlock.imports(symbol, ["data"], params), policy)
    again, found = exported(block, x, tmp_path / "low")
    assert without_versions(again) == without_versions(symbol)
    found, want = mx.nd.load(found), mx.nd.load(params)
    assert found.keys() == want.keys()
    assert_same(found, want)


# -- Parameters in float16 --------------------------------------------------------------------------


# -- Bad input --------------------------------------------------------------------------------------


def float16_net() -> nn.HybridBlock:
    net = mlp()
    net.cast("float16")
    return net


@pytest.mark.parametrize(
    ("build", "policy", "error", "message"),
    [
        (lambda: mx.sym.var("x"), "float16", TypeError, r"gluon Block, got Symbol.*mxmp\.cast_symbol"),
        (lambda: "net", "float16", TypeError, "gluon Block, got str"),
        (gluon.Block, "float16", ValueError, "nothing to convert: Block.*no HybridBlock.*write hybrid_forward"),
        (mlp, "float8", ValueError, "'float8' is no recipe.*float16.*bfloat16"),
        (mlp, 16, ValueError, "policy must be.*16"),
        (mlp, Policy(low_ops=["nonsense"]), ValueError, "low_ops=.*nonsense.*no operator"),
        (float16_net, "float16", ValueError, r"dense\d+_weight.*float16.*FP32 net.*cast\('float32'\)"),
    ],
)
def test_bad_input_is_named_and_leaves_the_net_as_it_was(build, policy, error, message):
    net = build()
    before = picture(net) if isinstance(net, gluon.Block) else None
    with pytest.raises(error, match=message):
        mxmp.convert(net, policy)
    if before:
        assert picture(net) == before
        assert not any(hasattr(p, "_mxmp") for p in net.collect_params().values())


def test_a_bad_second_policy_keeps_the_first():
    net, x = made("mlp")
    want = by_gluon(mxmp.convert(net), [x])
    with pytest.raises(ValueError, match="compute"):
        mxmp.convert(net, "float8")
    assert_same_bits(by_gluon(net, [x]), want)


@pytest.mark.parametrize("dtype", ["float16", np.float16, "bfloat16", "int8"])
def test_a_cast_is_refused_at_once_and_changes_nothing(dtype):
    net, x = made("mlp")
    mxmp.convert(net)
    want = net(mx.nd.array(x)).asnumpy()
    with pytest.raises(ValueError, match=r"cast\('.*'\) of a converted net.*mxmp\.restore"):
        net.cast(dtype)
    net.cast("float32")
    np.testing.assert_array_equal(net(mx.nd.array(x)).asnumpy(), want)
    mxmp.restore(net).cast("float16")
    assert "float16" in {np.dtype(p.dtype).name for p in net.collect_params().values()}


@pytest.mark.parametrize("own", ["float16", "bfloat16"])
def test_a_part_of_a_converted_net_may_be_converted_for_calls_of_its_own(own):
    net, x = made("mlp")
    mxmp.convert(net, "bfloat16")
    want, part = net(mx.nd.array(x)).asnumpy(), net[0](mx.nd.array(x)).asnumpy()
    mxmp.convert(net[0], own)
    assert np.array_equal(net[0](mx.nd.array(x)).asnumpy(), part) is (own == "bfloat16")
    np.testing.assert_array_equal(net(mx.nd.array(x)).asnumpy(), want)
    mxmp.restore(net[0])
    np.testing.assert_array_equal(net(mx.nd.array(x)).asnumpy(), want)
    with pytest.raises(ValueError, match="part of a net that was converted as a whole"):
        mxmp.restore(net[0])


# -- Entries of a policy that change nothing ----------------------------------------------------------


def said_of(net, policy, x):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mxmp.convert(net, policy)(x)
    return [str(each.message) for each in caught if "entries of the policy" in str(each.message)]


@pytest.mark.parametrize("policy", ["low_ops=clip;softmax", "full_ops=softmax,low_ops=clip"])
def test_an_entry_that_loses_to_a_missing_kernel_or_matches_nothing_is_warned_of_once(policy):
    x = mx.nd.ones((2, 4))
    net = nn.HybridSequential()
    net.add(nn.Dense(3), nn.HybridLambda(lambda mod, x: mod.clip(x, 0, 6)), nn.Dense(2))
    net.initialize()
    (said,) = said_of(net, f"bfloat16,{policy}", x)
    assert "low_ops=clip (it stays in FP32, as the bfloat16 CPU kernel of clip is" in said
    assert "softmax (the graph has none)" in said
    assert said_of(net, f"bfloat16,{policy}", x) == []  # the same policy again


def test_an_entry_that_one_graph_of_the_net_has_use_for_is_not_warned_of():
    class Parts(gluon.Block):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.first, self.second = nn.Dense(3), nn.Dense(2, activation="relu")

        def forward(self, x):
            return self.second(self.first(x))

    net, x = Parts(), mx.nd.ones((2, 4))
    net.initialize()
    assert said_of(net, "float16,full_ops=Activation", x) == []
    (said,) = said_of(net, "float16,full_ops=Activation;softmax", x)
    assert "Activation" not in said


def test_a_plan_may_have_its_own_reasons_and_is_not_warned_of():
    net, x = mlp(), mx.nd.ones((2, 8))
    net.initialize()
    net(x)
    plan = mxmp.tune(net, x, policy="bfloat16,full_ops=softmax", measure=False)
    assert said_of(net, plan, x) == []
