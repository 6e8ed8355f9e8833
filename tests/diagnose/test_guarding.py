"""guard moves the layer that was built to overflow, no other, says so, and training goes on as if it had been so."""

from __future__ import annotations

import logging

import mxnet as mx
import numpy as np
import pytest
from kit.frontends import Chain, Run, batch, dense, gluon_run, gluon_step, module_step, three, values
from kit.twins import LOSS, assert_same
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp
from mxmp.diagnose import guard, watch
from mxmp.diagnose.blaming.recording import Recording

DOORS = ["gluon", "module"]
STORED = ["float16", "params=float16"]


def overflowing(middle=1.2e5, first=1.0):
    """Activations of the middle layer are beyond float16, on some batches or on all, and are divided right after it."""
    down = ("down", lambda ops, x: ops.broadcast_mul(x, ops.ones((1, 1)) * 1e-6, name="down"))
    relu = ("relu", lambda ops, x: ops.relu(x, name="relu"))
    net = Chain(dense("first", 8, 6), dense("middle", 8, 8), relu, down, dense("last", 4, 8))
    return values(net, middle=middle, first=first)


def always():
    return overflowing(first=60.0)


@pytest.mark.parametrize("policy", STORED)
@pytest.mark.parametrize("door", DOORS)
def test_a_layer_that_overflows_goes_to_fp32_by_itself_and_that_is_said(door, policy, caplog):
    run = Run(door, overflowing(), policy)
    with caplog.at_level(logging.WARNING, "mxmp"), guard(*run.target) as guarded:
        skipped = [run.step(i) for i in range(40)]
    assert skipped.count(True) >= 3
    assert not all(skipped[:20])
    (moved,) = guarded.moved
    assert not any(skipped[moved.step :])
    assert (moved.operators, moved.overflows) == (("middle_fwd",), 3)
    assert (moved.blame.where, moved.blame.name) == ("forward", "middle_fwd")
    assert str(moved) in [record.getMessage() for record in caplog.records]
    assert guarded.policy == mxmp.Policy.parse(f"{mxmp.Policy.parse(policy)},exclude=middle_fwd")
    assert not run.plan().decisions["middle_fwd"].low
    assert run.plan().decisions["first_fwd"].low
    if door == "gluon":
        mxmp.restore(run.target[0])
        assert guarded.policy.exclude == ("middle_fwd",)


@pytest.mark.parametrize("policy", STORED)
@pytest.mark.parametrize("door", DOORS)
def test_the_move_changes_nothing_but_the_graph(door, policy, tmp_path):
    """Up to the move all steps are skipped, so the run equals one under the policy that was found, bit for bit."""
    run = Run(door, always(), policy)
    with guard(*run.target, patience=2) as guarded:
        skipped = [run.step(i) for i in range(12)]
    start = guarded.moved[0].step
    assert skipped == [True] * start + [False] * (12 - start)
    control = Run(door, always(), guarded.policy)
    assert not any(map(control.step, range(start, 12)))
    assert_same(run.weights(), control.weights())
    assert run.plan().to_json() == control.plan().to_json()
    run.plan().save(tmp_path / "plan.json")
    again = Run(door, always(), mxmp.Plan.load(tmp_path / "plan.json"))
    assert not any(map(again.step, range(start, 12)))
    assert_same(run.weights(), again.weights())


@pytest.mark.slow
def test_all_doors_and_ways_to_store_weights_give_the_same_run_through_skips_and_the_move():
    runs = [Run(door, overflowing(), policy) for door in DOORS for policy in STORED]
    for run in runs:
        with guard(*run.target):
            for i in range(40):
                run.step(i)
    for run in runs[1:]:
        assert_same(run.weights(), runs[0].weights())


@pytest.mark.parametrize("policy", STORED)
@pytest.mark.parametrize("door", DOORS)
def test_a_parameter_that_float16_cannot_hold_takes_its_layer_along(door, policy):
    run = Run(door, overflowing(middle=2e6), policy)
    with guard(*run.target) as guarded:
        skipped = [run.step(i) for i in range(8)]
    assert skipped == [True] * 3 + [False] * 5
    assert guarded.moved[0].operators == ("middle_fwd",)
    assert (guarded.moved[0].blame.where, guarded.moved[0].blame.name) == ("parameter", "middle_weight")
    assert "middle_weight" not in run.plan().low_variables


@pytest.mark.parametrize("policy", STORED)
@pytest.mark.parametrize("door", DOORS)
def test_a_gradient_counts_at_a_low_scale_only(door, policy):
    """A loss times 1e5: at 2**16 the scale is to blame, and at 8 the layer is."""
    run = Run(door, three(), policy, mxmp.DynamicLossScaler(), factor=3e5)
    with guard(*run.target, patience=2, low_scale=8.0) as guarded:
        while not guarded.moved:
            assert run.step(0)
            high = run.steps.loss_scale >= 8
            assert not (guarded.overflows and high)
    assert all(moved.blame.loss_scale <= 8 for moved in guarded.moved)
    assert guarded.moved[0].operators == ("last_fwd",)


@pytest.mark.parametrize("door", DOORS)
def test_gradients_that_are_large_everywhere_do_not_count_at_a_low_scale_either(door):
    """At 8 one overflows, and at 4 none: the scale is the cure, and no layer in FP32."""
    run = Run(door, three(), "float16", mxmp.DynamicLossScaler(init_scale=8.0), factor=3e4, learning_rate=1e-9)
    with guard(*run.target, patience=1, low_scale=8.0) as guarded:
        assert [run.step(0) for _ in range(3)] == [True, False, False]
    assert not guarded.overflows
    assert not guarded.moved


@pytest.mark.parametrize("door", DOORS)
def test_what_fp32_cannot_compute_moves_nothing_and_the_error_comes_as_ever(door):
    layers = [dense("first", 8, 6), ("root", lambda ops, x: ops.sqrt(x, name="root")), dense("last", 4, 8)]
    run = Run(door, values(Chain(*layers)))
    with guard(*run.target, patience=1) as guarded:
        run.step(0)
        run.step(1)
        with pytest.raises(FloatingPointError):
            run.step(2)
    assert guarded.moved == []
    assert str(guarded) == "nothing was moved to FP32"


def saturated():
    """A layer beyond float16 whose inf a sigmoid turns into 1, as it does with the finite value in FP32."""
    layers = [dense("first", 8, 6), ("sigmoid", lambda ops, x: ops.sigmoid(x, name="sigmoid")), dense("last", 4, 8)]
    return values(Chain(*layers), first=1e5)


@pytest.mark.parametrize("door", DOORS)
def test_an_overflow_without_consequences_moves_nothing_where_the_step_is_applied(door):
    run = Run(door, saturated())
    assert np.abs(mx.nd.dot(batch(0)[0], run.net.first.weight.data().T).asnumpy()).max() > 65520
    with guard(*run.target, patience=1) as guarded:
        assert not any(run.step(0) for _ in range(3))
    assert guarded.moved == []


@pytest.mark.parametrize("door", DOORS)
def test_an_overflow_without_consequences_moves_nothing_where_the_scale_made_the_step_skip(door):
    run = Run(door, saturated(), loss_scale=mxmp.DynamicLossScaler(2.0**24))
    with guard(*run.target, patience=1) as guarded:
        skipped = [run.step(0) for _ in range(12)]
    assert skipped[:3] == [True] * 3
    assert not skipped[-1]
    assert guarded.moved == []


def test_an_overflow_of_an_output_is_not_without_consequences_if_a_sigmoid_reads_it_too():
    class Both(gluon.HybridBlock):
        def __init__(self):
            super().__init__(prefix="")
            with self.name_scope():
                self.first = nn.Dense(4, in_units=6, use_bias=False, prefix="first_")

        def hybrid_forward(self, F, x):  # noqa: N803
            x = self.first(x)
            return x, F.sigmoid(x, name="sigmoid")

    net, (x, y) = values(Both(), first=1e5), batch()
    trainer = gluon_run(net)
    with guard(net, trainer, patience=1) as guarded:
        with autograd.record():
            loss = sum(LOSS(each, y) for each in net(x))
        trainer.backward(loss)
        trainer.step(4)
    assert [(moved.operators, moved.blame.where) for moved in guarded.moved] == [(("first_fwd",), "forward")]


@pytest.mark.parametrize("door", DOORS)
def test_under_a_plan_what_follows_goes_along(door):
    plan = Run(door, always())
    plan.step(0)
    run = Run(door, always(), plan.plan())
    with guard(*run.target) as guarded:
        skipped = [run.step(i) for i in range(8)]
    assert skipped == [True] * 3 + [False] * 5
    assert guarded.moved[0].operators == ("middle_fwd", "relu")


@pytest.mark.parametrize("door", DOORS)
def test_operators_that_share_the_weight_move_together(door):
    class Twice(gluon.HybridBlock):
        def __init__(self):
            super().__init__(prefix="")
            with self.name_scope():
                self.weight = self.params.get("shared_weight", shape=(6, 6))
                self.last = nn.Dense(4, in_units=6, use_bias=False, prefix="last_")

        def hybrid_forward(self, F, x, weight):  # noqa: N803
            for name in ("once", "twice"):
                x = F.FullyConnected(x, weight, no_bias=True, num_hidden=6, name=name)
            return self.last(x * 1e-8)

    run = Run(door, values(Twice(), shared=1e3))
    with guard(*run.target) as guarded:
        for i in range(12):
            run.step(i)
    assert guarded.moved[0].operators == ("once", "twice")
    assert not run.steps.last_step_skipped


def assert_sums_in_fp32(gradients, reduce):
    """A key of a store keeps its first dtype: float16 would round the sum."""
    before = [gradient.asnumpy() for gradient in gradients]
    reduce()
    assert {array.dtype for array in before} == {np.dtype("float32")}
    for gradient in gradients:
        np.testing.assert_array_equal(gradient.asnumpy(), before[0] + before[1])


@pytest.mark.parametrize("policy", STORED)
def test_several_devices_and_their_store_go_on_with_gradients_of_another_dtype(policy):
    contexts = [mx.cpu(0), mx.cpu(1)]
    x, y = (mx.nd.concat(*pair, dim=0) for pair in zip(batch(0), batch(1)))
    parts = list(zip(*(gluon.utils.split_and_load(each, contexts) for each in (x, y))))
    net = always()
    net.collect_params().reset_ctx(contexts)
    mxmp.convert(net, policy)
    trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01, "momentum": 0.9}, loss_scale=8)

    def backward():
        with autograd.record():
            losses = [LOSS(net(a), b) for a, b in parts]
        trainer.backward(losses)

    with guard(net, trainer) as guarded:
        for _ in range(8):
            backward()
            trainer.step(8)
    assert guarded.moved[0].operators == ("middle_fwd",)
    assert not trainer.last_step_skipped
    backward()
    assert_sums_in_fp32(net.middle.weight.list_grad(), trainer.allreduce_grads)
    trainer.update(8)

    label = mx.sym.var("label")
    error = mx.sym.square(always()(mx.sym.var("data")) - label) * 0.5
    loss = mx.sym.MakeLoss(mx.sym.mean(error, axis=0, exclude=True))
    module = mxmp.Module(loss, ["data"], ["label"], context=contexts, policy=policy, loss_scale=8)
    module.bind([("data", x.shape)], [("label", y.shape)])
    module.init_params(arg_params={name: p.data() for name, p in always().collect_params().items()})
    module.init_optimizer("device", "sgd", {"learning_rate": 0.01, "momentum": 0.9})
    with guard(module) as guarded:
        for _ in range(8):
            module_step(module, x, y)
    assert guarded.moved[0].operators == ("middle_fwd",)
    assert not module.last_step_skipped
    module.forward_backward(mx.io.DataBatch([x], [y]))
    assert_sums_in_fp32([each.grad_dict["middle_weight"] for each in module._exec_group.execs], module.update)
    for name, value in module.get_params()[0].items():
        found = net.collect_params()[name]
        np.testing.assert_allclose(value.asnumpy(), found.data(contexts[1]).asnumpy(), rtol=2e-3, atol=1e-6)


def test_buckets_move_together_and_share_what_they_shared():
    def sym_gen(key):
        data, label = mx.sym.var("data"), mx.sym.var("label")
        out = always()(mx.sym.reshape(data, shape=(-1, 6)))
        return mx.sym.MakeLoss(mx.sym.mean(mx.sym.square(out - label))), ("data",), ("label",)

    module = mxmp.BucketingModule(sym_gen, default_bucket_key=4, policy="params=float16", loss_scale=8)
    module.bind([("data", (4, 6))], [("label", (4, 4))])
    module.init_params(arg_params={name: p.data() for name, p in always().collect_params().items()})
    module.init_optimizer(optimizer="sgd", optimizer_params={"learning_rate": 0.01, "momentum": 0.9})

    def step(key):
        x, y = batch(0, (key, 6))
        shapes = [mx.io.DataDesc("data", x.shape)], [mx.io.DataDesc("label", y.shape)]
        module.forward_backward(
            mx.io.DataBatch([x], [y], bucket_key=key, provide_data=shapes[0], provide_label=shapes[1])
        )
        module.update()
        return module.last_step_skipped

    assert step(2)
    with guard(module) as guarded:
        skipped = [step(key) for key in (2, 2, 2, 4, 2, 3, 4)]
    assert skipped == [True] * 3 + [False] * 4
    assert guarded.policy.exclude == ("middle_fwd",)
    plans = [module.modules[key].plan for key in (2, 3, 4)]
    assert not any(plan.decisions["middle_fwd"].low for plan in plans)
    values_of = [module.modules[key]._exec_group.execs[0].arg_dict["middle_weight"] for key in (2, 3, 4)]
    assert all((array.asnumpy() == values_of[0].asnumpy()).all() for array in values_of)
    assert {array.dtype for array in values_of} == {np.float32}


def sharing(policy, training=(True, True, True)):
    """Three Modules of ``always`` with the arrays of the first."""
    x, y = batch()
    loss = mx.sym.MakeLoss(mx.sym.mean(mx.sym.square(always()(mx.sym.var("data")) - mx.sym.var("label"))))
    first, *others = modules = [mxmp.Module(loss, ["data"], ["label"], policy=policy, loss_scale=8.0) for _ in training]
    shapes = [("data", x.shape)], [("label", y.shape)]
    first.bind(*shapes, for_training=training[0])
    first.init_params(arg_params={name: p.data() for name, p in always().collect_params().items()})
    for module, trains in zip(others, training[1:]):
        module.bind(*shapes, for_training=trains, shared_module=first)
    return modules


@pytest.mark.parametrize("policy", STORED)
@pytest.mark.parametrize("trained", ["the first", "the second"])
def test_modules_that_share_parameters_move_together_and_still_share_them(policy, trained):
    modules = sharing(policy, (True, True, False))
    module = modules[trained == "the second"]
    module.init_optimizer(optimizer_params={"learning_rate": 0.01, "momentum": 0.9})
    with guard(module) as guarded:
        for i in range(6):
            module_step(module, *batch(i))
    assert guarded.moved
    arrays = [each._exec_group.execs[0].arg_dict["middle_weight"] for each in modules]
    assert {array.dtype for array in arrays} == {np.float32}
    module_step(module, *batch(7))
    assert not module.last_step_skipped
    assert all((array.asnumpy() == module.get_params()[0]["middle_weight"].asnumpy()).all() for array in arrays)
    assert not any(each.plan.decisions["middle_fwd"].low for each in modules)


@pytest.mark.parametrize("policy", STORED)
def test_modules_that_share_parameters_keep_an_optimizer_of_their_own(policy):
    first, second, borrower = modules = sharing(policy)
    first.init_optimizer(optimizer_params={"learning_rate": 0.01, "momentum": 0.9})
    second.init_optimizer(optimizer="adam", optimizer_params={"learning_rate": 0.001})
    borrower.borrow_optimizer(second)
    with guard(second) as guarded:
        for i in range(6):
            module_step(second, *batch(i))
    assert guarded.moved
    assert isinstance(first._optimizer, mx.optimizer.SGD)
    assert isinstance(second._optimizer, mx.optimizer.Adam)
    assert borrower.has_optimizer_of(second)
    assert not first.has_optimizer_of(second)
    for module in modules:
        module_step(module, *batch(7))
        assert not module.last_step_skipped


def test_outputs_of_the_step_can_still_be_read_after_the_move():
    run = Run("module", always())
    read = []
    with guard(*run.target) as guarded:
        for i in range(5):
            x, y = batch(i)
            run.steps.forward_backward(mx.io.DataBatch([x], [y]))
            before = run.steps.get_outputs()[0].asnumpy()
            run.steps.update()
            read.append((before, run.steps.get_outputs()[0].asnumpy()))
    assert guarded.moved[0].step == 3
    for before, after in read:
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("door", DOORS)
def test_a_watch_goes_on_after_the_move(door):
    run = Run(door, always())
    with watch(*run.target, every=1) as watched, guard(*run.target) as guarded:
        for i in range(8):
            run.step(i)
    assert guarded.moved[0].operators == ("middle_fwd",)
    assert watched.latest.step == 8
    low = {tensor.name: tensor.low for tensor in watched.latest.of("activation")}
    assert low["first_fwd"]


@pytest.mark.parametrize("door", DOORS)
def test_closed_it_leaves_nothing_behind_and_moves_nothing_more(door):
    run = Run(door, always())
    guarded = guard(*run.target)
    run.step(0)
    guarded.close()
    run.step(1)
    assert guarded.overflows == {"middle_fwd": 1}
    assert run.steps.scaled_step.observers == []
    with pytest.raises(FloatingPointError):
        run.step(2)


def test_blocks_left_as_python_stay_python():
    net = nn.HybridSequential(prefix="net_")
    net.add(nn.Dense(6, in_units=6, use_bias=False, prefix="python_"), always())
    net[0].initialize(mx.init.Orthogonal(scale=1.0))
    mxmp.convert(net, exclude=lambda name, block: name == "python")
    trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, loss_scale=8)
    python = mxmp.explain(net, batch()[0]).unconverted
    assert "python" in python
    with guard(net, trainer) as guarded:
        for i in range(6):
            gluon_step(net, trainer, *batch(i))
    assert [name for moved in guarded.moved for name in moved.operators] == ["middle_fwd"]
    assert mxmp.explain(net).unconverted == python


def test_a_step_that_nothing_is_wrong_with_is_not_looked_at(monkeypatch):
    looked = []
    monkeypatch.setattr(Recording, "records", lambda self: looked.append(self) or [])
    net = three()
    trainer = gluon_run(net)
    with guard(net, trainer) as guarded:
        gluon_step(net, trainer, *batch())  # the first is
        for i in range(5):
            gluon_step(net, trainer, *batch(i))
            assert not guarded._probe.listens
    assert len(looked) == 1
    assert guarded.overflows == {}


def two_trainers(net, scaler):
    params = net.collect_params()
    parts = [[p for name, p in params.items() if ("last" in name) == last] for last in (False, True)]
    return [mxmp.Trainer(part, "sgd", {"learning_rate": 0.01}, loss_scale=scaler) for part in parts]


@pytest.mark.parametrize("scale", [64.0, 1.0], ids=["falling scale", "lowest scale"])
@pytest.mark.parametrize("guarded", [0, 1])
def test_two_trainers_of_one_net_train_through_the_move_or_are_refused(guarded, scale):
    net, scaler = always(), mxmp.DynamicLossScaler(scale)
    mxmp.convert(net, "float16")
    trainers = two_trainers(net, scaler)
    with guard(net, trainers[guarded]) as found:
        for i in range(8):
            with autograd.record():
                loss = LOSS(net(batch(i)[0]), batch(i)[1])
            trainers[0].backward(loss)
            for trainer in trainers:
                trainer.step(4)
    assert found.moved[0].operators == ("middle_fwd",)
    assert not any(trainer.last_step_skipped for trainer in trainers)
    stored = always()
    mxmp.convert(stored, "params=float16")
    trainers = two_trainers(stored, scaler)
    with pytest.raises(ValueError, match=r"is updated by another trainer.*params='float32'"):
        guard(stored, trainers[guarded])
    assert not any(trainer.scaled_step.observers for trainer in trainers)


def test_a_parameter_in_float16_that_another_net_reads_is_refused():
    net = always()
    other = nn.HybridSequential(prefix="")
    other.add(nn.Dense(8, in_units=8, use_bias=False, prefix="middle_", params=net.middle.params))
    assert other[0].weight is net.middle.weight
    for each in (net, other):
        mxmp.convert(each, "params=float16")
    trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=8)
    with pytest.raises(ValueError, match="'middle_weight' may be stored in float16, and is shared with another"):
        guard(net, trainer)
    mxmp.restore(other)
    guard(net, trainer).close()


def test_wrong_use_is_named(monkeypatch):
    net = three()
    trainer = gluon_run(net)
    with pytest.raises(TypeError, match=r"mxmp\.Trainer"):
        guard(net)
    with pytest.raises(ValueError, match="patience must be at least 1"):
        guard(net, trainer, patience=0)
    with pytest.raises(ValueError, match="low_scale"):
        guard(net, trainer, low_scale=0)
    for name in ("ROLE", "NUM_WORKER", "NUM_SERVER", "PS_ROOT_URI", "PS_ROOT_PORT"):  # as a launcher would
        monkeypatch.setenv(f"DMLC_{name}", "1")
    alone = mxmp.Trainer(three().collect_params(), "sgd", kvstore="dist_sync")
    with pytest.raises(ValueError, match="one worker"):
        guard(net, alone)
    outer = nn.HybridSequential()
    outer.add(three(), nn.Dense(2))
    outer[1].initialize()
    mxmp.convert(outer)
    with pytest.raises(ValueError, match="a part of a net"):
        guard(outer[0], mxmp.Trainer(outer.collect_params(), "sgd"))
