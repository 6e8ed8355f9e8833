"""Calls of a converted block: many threads, modes and structures on one net; files beside it."""

from __future__ import annotations

import copy
import gc
import json
import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import mxnet as mx
import numpy as np
import pytest
from kit.examples import examples
from kit.modules import SHAPES
from kit.processes import run_program
from kit.twins import FLAGS, array, assert_same, convert, equal_or_refused, seeded, sequence
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp
from mxmp.gluon import _mxnet
from mxmp.gluon.graphs import engine_lock

Pair = namedtuple("Pair", ["left", "right"])


class Shifting(gluon.HybridBlock):
    """Another number and nesting of outputs in each mode and for each number of inputs, as detectors have."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.body = nn.Dense(6, in_units=6)
            self.norm = nn.BatchNorm(in_channels=6, momentum=1.0)

    def hybrid_forward(self, F, x, more=None):  # noqa: N803
        x = self.norm(self.body(x))
        if more is None:
            return (x * 2, [x, x + 1]) if autograd.is_training() else x
        if autograd.is_training():
            return [x + more[0], more[1]]
        return Pair(x, (more[0] + more[1],))


KINDS = [(training, inputs) for training in (True, False) for inputs in (1, 2)]


def rows(seed, count=4):
    return array(seed, count, 6)


def flat(out):
    return [a for item in out for a in flat(item)] if isinstance(out, (list, tuple)) else [out.asnumpy()]


def call(net, kind, seed):
    training, inputs = kind
    x, *more = (rows(seed + i, 1 + seed % 3) for i in range(3))
    args = (x,) if inputs == 1 else (x, more)
    with autograd.record(training) if training else autograd.pause():
        return flat(net(*args))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "flags"),
    [("float16", "not hybridized"), ("bfloat16", "hybridized"), ("compute=float16,params=float16", "static")],
)
def test_eight_threads_make_two_thousand_calls_of_one_net_as_one_thread_makes_them(policy, flags):
    net = mxmp.convert(seeded(Shifting()), policy)
    if FLAGS[flags] is not None:
        net.hybridize(**FLAGS[flags])
    jobs = [(KINDS[(i * 7 + i // 8) % 4], i % 12) for i in range(examples(2000))]
    twin = mxmp.convert(seeded(Shifting()), policy)
    expected = {job: call(twin, *job) for job in dict.fromkeys(jobs)}
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda job: call(net, *job), jobs, chunksize=5))
    for job, result in zip(jobs, found):
        assert len(result) == len(expected[job])
        assert_same(result, expected[job])


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("beside", ["inference", "inference in training mode"])
def test_one_thread_trains_while_others_predict(beside, flags):
    """MXNet's backward keeps its notes on the Parameters: one thread at a time may train a net, in FP32 too.

    By ``trainer.backward``: a plain ``loss.backward()`` does not wait for the others' turns in the engine.
    """
    net = mxmp.convert(seeded(Shifting()))
    net.collect_params().setattr("grad_req", "null")
    if FLAGS[flags] is not None:
        net.hybridize(**FLAGS[flags])

    trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=None)

    def gradient(seed):
        x = rows(seed, 1 + seed % 3)
        x.attach_grad()
        with autograd.record():
            first, rest = net(x)
            loss = (first * rest[0]).sum()
        trainer.backward(loss)
        return [x.grad.asnumpy()]

    def prediction(seed):
        with autograd.pause(train_mode=beside != "inference"):
            return flat(net(rows(seed, 1 + seed % 3)))

    runs = [gradient, *[prediction] * 7]
    expected = [[run(seed) for seed in range(8)] for run in runs[:2]]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda run: [run(i % 8) for i in range(50)], runs))
    for i, results in enumerate(found):
        for seed, result in enumerate(results):
            assert_same(result, expected[min(i, 1)][seed % 8])


@pytest.mark.parametrize(
    ("by", "flags"), [*(("another thread", flags) for flags in FLAGS), ("a hook of the net's own", "not hybridized")]
)
@pytest.mark.parametrize("inner", KINDS)
@pytest.mark.parametrize("outer", KINDS)
def test_a_call_in_the_middle_of_another_call_changes_neither(outer, inner, flags, by):
    """The second call falls between the first one's hooks and its forward."""
    net = mxmp.convert(seeded(Shifting()))
    if FLAGS[flags] is not None:
        net.hybridize(**FLAGS[flags])
    expected = {kind: call(net, kind, 0) for kind in KINDS}
    between = []

    def meanwhile(block, args):
        if threading.current_thread() is not threading.main_thread() or between:
            return
        between.append(None)
        if by == "another thread":
            with ThreadPoolExecutor(1) as pool:
                between[0] = pool.submit(lambda: call(net, inner, 0)).result(timeout=60)
        else:
            with autograd.pause(train_mode=False):
                between[0] = call(net, inner, 0)

    handle = net.register_forward_pre_hook(meanwhile)
    assert_same(call(net, outer, 0), expected[outer])
    handle.detach()
    assert_same(between[0], expected[inner])


def test_two_threads_train_two_nets_while_a_third_net_serves_both():
    """A frozen feature extractor under two heads, each with its thread and its trainer."""

    def train(features, head, seed):
        trainer = mxmp.Trainer(head.collect_params(), "sgd", {"learning_rate": 0.1}, loss_scale=256.0, kvstore=None)
        for i in range(30):
            x = features(rows(seed + i))
            with autograd.record():
                loss = (head(x) ** 2).sum()
            trainer.backward(loss)
            trainer.step(4)
        return head.weight.data().asnumpy()

    found = []
    for threads in (1, 2):
        features, *heads = (mxmp.convert(seeded(nn.Dense(n, in_units=6), seed=i)) for i, n in enumerate((6, 2, 2)))
        with ThreadPoolExecutor(threads) as pool:
            found.append(list(pool.map(lambda i: train(features, heads[i], 100 * i), range(2))))  # noqa: B023
    assert_same(*found)


@pytest.mark.parametrize("kind", ["trainer.backward", "plain backward"])
def test_a_scaled_backward_in_one_thread_is_not_seen_in_another(kind):
    """A loss head under a trainer of scale 1024 here, and under one of scale 2 or none there."""

    class Head(gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.body = nn.Dense(3, in_units=6)

        def hybrid_forward(self, F, x, label):  # noqa: N803
            return F.SoftmaxOutput(self.body(x), label)

    def gradients(job):
        scale, seed = job
        net = mxmp.convert(seeded(Head()))
        trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=scale) if scale else None
        found = []
        for i in range(40):
            with autograd.record():
                out = net(rows(seed + i), mx.nd.array([0, 1, 2, 0]))
            trainer.backward(out) if scale else out.backward()
            found.append(net.body.weight.grad().asnumpy() / (scale or 1.0))
        return found

    jobs = [(1024.0, 0), (2.0 if kind == "trainer.backward" else None, 50)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(gradients, jobs))
    np.testing.assert_allclose(found, list(map(gradients, jobs)), rtol=0, atol=1e-4)


ENDING = """
import threading
import mxnet as mx
from mxnet import autograd
from mxnet.gluon import nn
import mxmp

net = nn.HybridSequential()
for _ in range(100):
    net.add(nn.Dense(4, in_units=4))
net.initialize()
mxmp.convert(net, "float16").hybridize(static_alloc=True, static_shape=True)
together = threading.Barrier(8)

def record():
    with autograd.record():
        net(mx.nd.ones((2, 4))).wait_to_read()
    together.wait()

for _ in range(8):
    threads = [threading.Thread(target=record) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mx.nd.waitall()
"""


@pytest.mark.slow
def test_threads_that_recorded_a_net_end_together():
    """To free a CachedOp writes all parameters: where each freed its own, MXNet's engine waited for ever."""
    run_program("-c", ENDING, MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN="1000")  # one operator writes them all


def cached_ops(monkeypatch, name):
    """mxmp's CachedOps for which MXNet's method of that name was called from now on, by their ids."""
    called, method = [], getattr(mx.nd.CachedOp, name)

    def noted(op, *args):
        if type(op) is not mx.nd.CachedOp:  # that class itself is of a trace
            called.append(id(op))
        method(op, *args)

    monkeypatch.setattr(mx.nd.CachedOp, name, noted)
    return called


def test_a_new_thread_takes_over_the_cached_op_of_one_that_has_ended(monkeypatch):
    net, made = mxmp.convert(seeded(nn.Dense(6, in_units=6))), cached_ops(monkeypatch, "__init__")

    def in_threads(count):
        together = threading.Barrier(count)

        def record():
            with autograd.record():
                net(rows(0)).wait_to_read()
            together.wait()

        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda _: record(), range(count)))

    for count, expected in ((1, 1), (1, 1), (3, 3), (2, 3)):
        in_threads(count)
        assert len(made) == expected


def test_a_cached_op_is_freed_once_no_other_thread_passes_operators_to_the_engine(monkeypatch):
    gc.collect()  # what other tests have left
    net, freed = mxmp.convert(seeded(nn.Dense(6, in_units=6))), cached_ops(monkeypatch, "__del__")
    net(rows(0)).wait_to_read()
    held, dropped = threading.Event(), threading.Event()

    def hold():
        with engine_lock():
            held.set()
            dropped.wait(60)
            return list(freed)

    with ThreadPoolExecutor(1) as pool:
        freed_meanwhile = pool.submit(hold)
        held.wait()
        net.hybridize()  # drops the graphs
        gc.collect()
        dropped.set()
    assert freed_meanwhile.result() == []
    assert len(freed) == 1


def test_an_input_is_copied_only_once_its_gradient_may_be_added_to_another():
    """bfloat16's cast cannot add gradients, a copy in front of it can, and takes an input's memory."""
    net = mxmp.convert(seeded(nn.Dense(6, in_units=6)), "bfloat16")

    def copies():
        (built,) = mxmp.gluon.hook.hook_of(net).graphs.values()
        return "data_accumulated_output" in built.op.symbol.get_internals().list_outputs()

    def train(x, earlier=lambda x: x):
        with autograd.record():
            out = net(earlier(x))
        out.backward()

    train(rows(0))
    assert not copies()
    once, added = rows(0), rows(0)
    computed = rows(0)
    computed.attach_grad("add")
    for _ in range(5):  # readers of one array that autograd computed: MXNet sums their gradients itself
        train(computed, lambda x: x * 2)
    assert not copies()
    once.attach_grad()
    train(once)
    assert copies()
    added.attach_grad("add")
    for _ in range(2):
        train(added)
    train(rows(0))
    assert copies()
    np.testing.assert_array_equal(added.grad.asnumpy(), 2 * once.grad.asnumpy())
    np.testing.assert_array_equal(computed.grad.asnumpy(), 10 * once.grad.asnumpy())


def test_many_calls_on_one_array_that_autograd_computed_lose_no_gradient():
    net = mxmp.convert(seeded(nn.Dense(6, in_units=6)), "bfloat16")
    gradients = []
    for calls in (1, 9):
        x = rows(0)
        x.attach_grad()
        with autograd.record():
            hidden = x * 2
            out = sum(net(hidden) for _ in range(calls))
        out.backward()
        gradients.append(x.grad.asnumpy())
    np.testing.assert_allclose(gradients[1], 9 * gradients[0], rtol=1e-6)


@pytest.mark.parametrize("last", KINDS)
def test_block_save_holds_the_graph_of_the_last_call_and_its_structure(last, tmp_path):
    net = mxmp.convert(seeded(Shifting()))
    for kind in [*KINDS, last]:
        call(net, kind, 0)
    net.save(str(tmp_path / "low"))
    plain = seeded(Shifting())
    plain.hybridize()
    call(plain, last, 0)
    plain.save(str(tmp_path / "plain"))
    low, full = (json.loads((tmp_path / f"{n}-model.json").read_text())["shifting0"] for n in ("low", "plain"))
    for what in ("in_format", "out_format", "hybridized"):
        assert low[what] == full[what]


def test_hybridize_in_the_middle_takes_hold_at_once_even_for_forward():
    net = mxmp.convert(seeded(nn.Dense(3, in_units=6)))
    want = net(rows(0)).asnumpy()
    for flags in ({}, {"active": False}, {"static_alloc": True}, {"clear": False}, {"active": False, "clear": False}):
        net.hybridize(**flags)
        np.testing.assert_array_equal(net.forward(rows(0)).asnumpy(), want)
        assert [key for key, _ in mxmp.gluon.hook.hook_of(net).graphs.items()]
    mxmp.restore(net)
    assert net._active is False


def symbol_block():
    data = mx.sym.var("data", dtype="float32")
    x = mx.sym.FullyConnected(data, num_hidden=5, name="fc1")
    x = mx.sym.FullyConnected(mx.sym.tanh(x), num_hidden=3, name="fc2")
    net = gluon.SymbolBlock(x, data)
    for name, param in net.collect_params().items():
        param.shape = SHAPES[name]
    return seeded(net)


BY_FORWARD = {
    "SymbolBlock": symbol_block,
    "leaf": lambda: seeded(nn.Dense(3, in_units=6)),
    "tree": lambda: seeded(sequence(nn.Dense(5, in_units=6, activation="tanh"), nn.Dense(3, in_units=5))),
}


class Parent(gluon.Block):
    """Calls its child's ``forward``, as a plain Block may."""

    def __init__(self, child):
        super().__init__()
        self.child = child

    def forward(self, x):
        return self.child.forward(x)


@pytest.mark.parametrize("within", [lambda net: net, Parent], ids=["net", "parent"])
@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("kind", BY_FORWARD)
@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_forward_computes_what_a_call_computes_or_says_to_call(policy, kind, flags, called_before, within):
    x = rows(0)
    expected = mxmp.convert(BY_FORWARD[kind](), policy)(x).asnumpy()
    assert not np.array_equal(expected, BY_FORWARD[kind]()(x).asnumpy())
    net = within(BY_FORWARD[kind]())
    convert(policy, net, flags=FLAGS[flags])
    if called_before:
        net(x)
    equal_or_refused(
        lambda: net.forward(x).asnumpy(), lambda found: np.testing.assert_array_equal(found, expected), saying="call"
    )


class OneStep(gluon.HybridBlock):
    """Prepares its inputs and calls the graph with others, as decoders that take one step at a time do."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.body = nn.Dense(6, in_units=6, flatten=False)

    def forward(self, x, states):
        out, state = super().forward(x.expand_dims(1), states[0] * 2)
        self.steps = getattr(self, "steps", 0) + 1
        return out[:, 0], [state] if len(states) == 1 else None

    def hybrid_forward(self, F, steps, state):  # noqa: N803
        return F.broadcast_add(self.body(steps), state.expand_dims(1)), state


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_a_forward_that_calls_its_parent_s_with_other_arguments(policy, training, flags):
    def run(net):
        with autograd.record(training) if training else autograd.pause():
            out, (state,) = net(rows(0), [rows(1)])
        return out.asnumpy(), state.asnumpy()

    out, state = run(seeded(OneStep()))
    net = mxmp.convert(seeded(OneStep()), policy)
    if FLAGS[flags] is not None:
        net.hybridize(**FLAGS[flags])
    for steps in (1, 2):
        low, same = run(net)
        assert net.steps == steps
        assert 0 < np.abs(low - out).max() < (0.01 if policy == "float16" else 0.1)
        np.testing.assert_array_equal(same, state)
    (graph,) = mxmp.explain(net).graphs
    assert [node.dtype for node in graph.nodes if node.op == "FullyConnected"] == [policy]
    net.hybridize()
    assert mxmp.restore(net)._active


@pytest.mark.parametrize("called", [False, True])
def test_summary_leaves_the_net_as_it_was(called, capsys):
    net = nn.HybridSequential()
    net.add(nn.Dense(5, in_units=6), nn.Dense(3, in_units=5))
    mxmp.convert(seeded(net))
    want = copy.deepcopy(net)(rows(0)).asnumpy()
    if called:
        net(rows(0))
    for _ in range(2):
        net.summary(rows(0))
        assert "Total params: 53" in capsys.readouterr().out
        np.testing.assert_array_equal(net(rows(0)).asnumpy(), want)


class Multiplying(gluon.HybridBlock):
    def __init__(self, **shared):
        super().__init__(**shared)
        with self.name_scope():
            self.dense, self.factor = nn.Dense(4, in_units=3), self.params.get("factor", shape=(4, 4))

    def hybrid_forward(self, F, x, factor):  # noqa: N803
        return F.dot(self.dense(x), factor)


def test_summary_runs_a_block_with_parameters_of_its_own_that_are_stored_in_float16(capsys):
    net = mxmp.convert(seeded(Multiplying()), mxmp.Policy("float16", params="float16"))
    want = net(mx.nd.ones((2, 3))).asnumpy()
    assert net.factor.data().dtype == np.float16
    net.summary(mx.nd.ones((2, 3)))
    assert "Total params: 32" in capsys.readouterr().out
    np.testing.assert_array_equal(net(mx.nd.ones((2, 3))).asnumpy(), want)
    with pytest.raises(ValueError, match="is stored in float16 for a converted net and shared with"):
        Multiplying(prefix=net.prefix, params=net.params)(mx.nd.ones((2, 3)))


def test_arrays_on_two_devices_are_refused():
    net = mxmp.convert(seeded(Shifting()))
    with pytest.raises(ValueError, match=r"cpu\(0\).*cpu\(1\).*one device"):
        net(rows(0), [rows(0).as_in_context(mx.cpu(1)), rows(0)])


def test_a_pattern_that_names_a_block_of_a_user_s_class_and_one_for_its_nodes():
    """The first leaves it as Python, the second in the graph."""

    def net():
        made = nn.HybridSequential(prefix="net_")
        with made.name_scope():
            made.add(nn.Dense(6, in_units=6), Wrapped())
        return seeded(made)

    for pattern, graphs, dtypes in (
        ("net_wrapped0", 1, ["float16"]),
        ("net_wrapped0_*", 1, ["float16", "float32"]),
        ("net_dense0", 1, ["float32", "float16"]),
    ):
        report = mxmp.explain(mxmp.convert(net(), exclude=[pattern]), rows(0))
        assert len(report.graphs) == graphs
        assert [n.dtype for n in report.nodes if n.op == "FullyConnected"] == dtypes
        assert ("net_wrapped0" in report.unconverted) == (pattern == "net_wrapped0")


class Wrapped(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.body = nn.Dense(3, in_units=6)

    def hybrid_forward(self, F, x):  # noqa: N803
        return self.body(x)


def test_a_net_that_is_frozen_in_turn_is_traced_once_for_each_request(monkeypatch):
    """As the nets of a GAN; with other requests, only the graphs of the last two stay."""
    net = mxmp.convert(seeded(nn.Dense(6, in_units=6)), "bfloat16")
    build, built = mxmp.gluon.hook.build, []
    monkeypatch.setattr(mxmp.gluon.hook, "build", lambda *args: built.append(args) or build(*args))
    for request in ("write", "null", "write", "null", "write"):
        net.collect_params().setattr("grad_req", request)
        with autograd.record():
            net(rows(0))
    assert len(built) == 2
    for request in ("add", "null", "write"):
        net.collect_params().setattr("grad_req", request)
        with autograd.record():
            net(rows(0))
    assert len(mxmp.gluon.hook.hook_of(net).graphs) == 2


def test_a_small_first_batch_does_not_keep_a_large_product_in_fp32():
    net = nn.HybridSequential()
    net.add(nn.Dense(2048, in_units=8), nn.Dense(4096, in_units=2048))
    net.initialize()
    mxmp.convert(net, "bfloat16")
    low = []
    for rows in (2, 1, 100, 2):
        with autograd.record():
            net(mx.nd.ones((rows, 8)))
        low.append(mxmp.explain(net).graphs[0].num_low)
    assert low == [1, 1, 2, 2]


@pytest.mark.parametrize(("begin", "aligned"), [(0, True), (1, False), (3, False), (8, True)])
def test_a_part_of_an_array_is_aligned_or_not_by_where_it_begins(begin, aligned):
    """As MXNet's object has it, of which 1.9.1 has no function to ask."""
    whole = mx.nd.ones((9, 5))
    assert _mxnet.is_aligned(whole[begin]) is aligned
    assert _mxnet.is_aligned(whole[begin:].reshape(-1)) is aligned
    assert _mxnet.is_aligned(mx.np.ones((9, 5))[begin]) is aligned
    assert _mxnet.is_aligned(mx.nd.sparse.zeros("row_sparse", (3, 4)))


class CallsAnother(nn.HybridBlock):
    """Calls another net on arrays, and lets a child be traced after it."""

    def __init__(self, other, reads_shape):
        super().__init__()
        with self.name_scope():
            self.dense = nn.Dense(4, in_units=5)
        self.call_other, self.reads_shape = (lambda x: other(x)), reads_shape

    def hybrid_forward(self, op, x):
        self.call_other(mx.nd.ones((2, x.shape[1] if self.reads_shape else 5)))
        return self.dense(x) * (x.shape[1] if self.reads_shape else 5)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("reads_shape", [False, True])
@pytest.mark.parametrize("inner_reads_shape", [False, True])
def test_a_converted_net_may_be_called_while_another_is_traced(reads_shape, inner_reads_shape, training):
    innermost = nn.Dense(4, in_units=5)
    inner = CallsAnother(innermost, inner_reads_shape)
    nets = [innermost, inner, CallsAnother(inner, reads_shape)]
    for net in nets:
        net.initialize()
    want = nets[-1](mx.nd.ones((3, 5))).asnumpy()
    for net in nets:
        mxmp.convert(net, "float16")
    for _ in range(2):
        with autograd.record(training):
            found = nets[-1](mx.nd.ones((3, 5)))
        np.testing.assert_allclose(found.asnumpy(), want, rtol=1e-2, atol=1e-3)
