"""Ctrl-C and errors in functions that MXNet calls reach the code that called MXNet, wherever they come."""

from __future__ import annotations

import gc
import signal
import sys
import threading

import mxnet as mx
import numpy as np
import pytest
from kit.frontends import batch, convolutional, gluon_run, gluon_step, module_of, module_step, three
from kit.measuring import FEW, measured_here
from kit.oracle import S
from kit.twins import LOSS
from mxnet import autograd

import mxmp
from mxmp.diagnose import blame, watch
from mxmp.diagnose.networks.frontends import trained_network
from mxmp.diagnose.networks.probe import Probe
from mxmp.host.callbacks import KeptError, hold_interrupts
from mxmp.precision.graph import Graph
from mxmp.tuning import search
from mxmp.tuning.choices import Task
from mxmp.tuning.clock import Arrays, Timed

IMAGE = (4, 3, 6, 6)


@pytest.fixture(autouse=True)
def _interrupts_are_not_ignored():
    """A shell starts what runs in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupts:
    """While it is entered, counts the bytecodes that run in functions that MXNet calls, and the calls.

    At the bytecode of number ``at``, or the first of the call of number ``call``, it sends SIGINT.
    Python collects no garbage meanwhile: MXNet's ``__del__`` functions would run in one run and not in the next.
    """

    def __init__(self, at: int | None = None, call: int | None = None):
        self.bytecodes = self.calls = 0
        self._at, self._call, self._depth = at, call, 0

    def __enter__(self):
        self._before, self._collected = sys.gettrace(), gc.isenabled()
        gc.disable()
        sys.settrace(self._entered)
        return self

    def __exit__(self, *_):
        sys.settrace(self._before)
        if self._collected:
            gc.enable()

    def _entered(self, frame, event, arg):
        if frame.f_code.co_name == "callback_handle":  # MXNet's function around each callback
            self._depth += 1
            self.calls += 1
        if not self._depth:
            return None
        frame.f_trace_opcodes = True
        return self._runs

    def _runs(self, frame, event, arg):
        if event == "return" and frame.f_code.co_name == "callback_handle":
            self._depth -= 1
        if event == "opcode":
            now, self.bytecodes = self.bytecodes, self.bytecodes + 1
            if now == self._at or (self._call is not None and self.calls > self._call):
                self._at = self._call = None
                signal.raise_signal(signal.SIGINT)
        return self._runs


def count(run):
    """Calls and bytecodes of a run; not of the first, which compiles regular expressions."""
    run()
    with Interrupts() as counted:
        run()
    assert counted.calls > 2
    return counted


def positions(run):
    """The beginning of every callback, and bytecodes that are spread over all of them."""
    counted = count(run)
    spread = range(0, counted.bytecodes, max(counted.bytecodes // 50, 1))
    return [*({"call": call} for call in range(counted.calls)), *({"at": at} for at in spread)]


# -- What starts the work ---------------------------------------------------------------------------


def timed() -> Timed:
    graph = Graph.from_symbol(S.FullyConnected(S.relu(S.var("data")), num_hidden=3, name="fc"))
    plan = Task(graph, mxmp.Policy("bfloat16"), "cpu").plan((), {})
    names = ("fc_weight", "fc_bias")
    return Timed(graph, plan, Arrays(graph, mx.cpu(), dict.fromkeys(names, "write"), {}, {"data": (2, 4)}), True)


def test_tuning_stops_at_every_bytecode_of_its_callback():
    subject = timed()
    for at in range(count(subject.profile).bytecodes):
        with Interrupts(at), pytest.raises(KeyboardInterrupt):
            subject.profile()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert subject.profile()


@pytest.mark.parametrize("call", [0, 1, 5, 10, 20])
def test_an_interrupted_tune_leaves_the_net_and_the_cache_as_they_were(call, tmp_path, monkeypatch):
    """Here in this process, where MXNet calls Python."""
    monkeypatch.setattr(sys.modules["mxmp.tuning.tune"], "measured_apart", measured_here)
    for name, value in FEW.items():
        monkeypatch.setattr(search, name, value)
    net = mx.gluon.nn.Dense(3, prefix="net_")
    net.initialize()
    with Interrupts(call=call), pytest.raises(KeyboardInterrupt):
        mxmp.tune(net, (2, 6), cache=tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []
    assert net.weight.shape == (3, 0)
    assert "forward" not in vars(net)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    mxmp.tune(net, (2, 6), cache=tmp_path, progress=False)
    assert len(list(tmp_path.iterdir())) == 1


def a_net():
    net, (x, y) = three(), batch()
    trainer = gluon_run(net)
    return net, lambda: gluon_step(net, trainer, x, y), lambda: watch(net, trainer, every=1)


def a_module():
    x, y = batch()
    module = module_of(three(), x, y)
    return module, lambda: module_step(module, x, y), lambda: watch(module, every=1)


def values_of(target):
    found = target.get_params()[0] if isinstance(target, mxmp.Module) else target.collect_params()
    return {k: (v.data() if isinstance(v, mx.gluon.Parameter) else v).asnumpy() for k, v in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("make", [a_net, a_module])
def test_a_watched_step_that_is_interrupted_in_a_callback_stops_before_its_update(make):
    target, step, watched = make()
    step()
    with watched():
        where = positions(step)
    for position in where:
        before = values_of(target)
        with watched():
            with Interrupts(**position), pytest.raises(KeyboardInterrupt):
                step()
            for name, value in values_of(target).items():
                np.testing.assert_array_equal(value, before[name])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    step()  # what it interrupts leaves to the next forward
    assert_nothing_stays(target)


def assert_nothing_stays(target):
    if isinstance(target, mxmp.Module):
        assert [type(each) for each in target._exec_group.execs] == [mx.executor.Executor]
        assert target.core.step.observers == []
    else:
        assert all(block._callback is None for block in [target, *target._children.values()])


def blamed_net():
    net, (x, y) = convolutional(dropout=False), batch(0, IMAGE)
    trainer = gluon_run(net)
    gluon_step(net, trainer, x, y)
    arrays = [
        a for p in net.collect_params().values() for a in (p.data(), *(p.list_grad() if p.grad_req != "null" else ()))
    ]
    return net, arrays, lambda: blame(net, trainer, x, loss=lambda out: LOSS(out, y))


def blamed_module():
    net, (x, y) = convolutional(dropout=False), batch(0, IMAGE)
    module = module_of(net, x, y)
    module_step(module, x, y)
    (executor,) = module._exec_group.execs
    arrays = [a for a in (*executor.grad_arrays, *executor.aux_arrays) if a is not None]
    return module, arrays, lambda: blame(module, mx.io.DataBatch([x], [y]))


@pytest.mark.slow
@pytest.mark.parametrize("make", [blamed_net, blamed_module])
def test_an_interrupted_blame_leaves_gradients_and_statistics_as_they_were(make):
    target, arrays, replay = make()
    before = [array.asnumpy() for array in arrays]
    for position in positions(replay)[::12]:
        with Interrupts(**position), pytest.raises(KeyboardInterrupt):
            replay()
        for array, value in zip(arrays, before):
            np.testing.assert_array_equal(array.asnumpy(), value)
        assert_nothing_stays(target)
    assert not replay().reproduced


@pytest.mark.parametrize("call", [0, 3, 6])
def test_ctrl_c_in_a_user_s_own_op_hook_is_not_lost(call):
    net, step, _ = a_net()
    net.register_op_hook(lambda *_: None)
    with Interrupts(call=call), pytest.raises(KeyboardInterrupt):
        step()
    step()


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_what_a_callback_raises_itself_is_raised_by_stop(error):
    net, (x, y) = three(), batch()
    trainer = gluon_run(net)

    def fail(observed, array):
        raise error("stop")

    probe = Probe(trained_network(net, trainer), fail)
    probe.start()
    with autograd.record():
        loss = LOSS(net(x), y)
    trainer.backward(loss)
    with pytest.raises(error, match="stop"):
        probe.stop()
    assert_nothing_stays(net)
    probe.stop()


def test_an_operator_that_fails_while_it_is_timed_is_an_error():
    """A kernel's error comes when its output is waited for: in the callback."""
    graph = Graph.from_symbol(S.relu(S.linalg.potrf(S.var("data"))))
    plan = Task(graph, mxmp.Policy("bfloat16"), "cpu").plan((), {})
    arrays = Arrays(graph, mx.cpu(), {}, {"data": mx.nd.eye(3)}, {})
    subject = Timed(graph, plan, arrays, False)
    arrays.arguments["data"][:] = -1
    with pytest.raises(mx.MXNetError, match="potrf"):
        subject.profile()


# -- The two parts ----------------------------------------------------------------------------------


def test_the_first_error_is_kept_and_raised_once():
    kept = KeptError()
    for number in range(3):
        with kept:
            if number:
                raise ValueError(number)
    with pytest.raises(ValueError, match="1"):
        kept.raise_it()
    kept.raise_it()


def test_ctrl_c_waits_for_the_end_of_the_outermost_block():
    went_on = []

    @hold_interrupts()
    def inside():
        signal.raise_signal(signal.SIGINT)
        went_on.append("inside")

    @hold_interrupts()
    def outside():
        inside()
        went_on.append("outside")

    with pytest.raises(KeyboardInterrupt):
        outside()
    assert went_on == ["inside", "outside"]


def test_ctrl_c_comes_before_an_error_of_the_block_which_stays_its_context():
    @hold_interrupts()
    def run():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("first")

    with pytest.raises(KeyboardInterrupt) as caught:
        run()
    assert isinstance(caught.value.__context__, ValueError)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, "own"])
def test_the_user_s_own_way_with_ctrl_c_is_kept(handler):
    came = []
    handler = handler if handler != "own" else lambda *arguments: came.append(arguments[0])
    before = signal.signal(signal.SIGINT, handler)
    try:
        with hold_interrupts():
            signal.raise_signal(signal.SIGINT)
            assert came == []
        assert came == ([signal.SIGINT] if callable(handler) else [])
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_have_nothing_to_hold():
    handlers = []

    def run():
        with hold_interrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
