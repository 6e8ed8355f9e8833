"""Symbols that MXNet binds for inference without fusing their operators by oneDNN, where it would."""

import mxnet as mx
import numpy as np
import pytest

from mxmp.kernels.fusion import Unfused, unfused


def network():
    x = mx.sym.Convolution(mx.sym.var("data"), kernel=(3, 3), num_filter=4, name="conv")
    return mx.sym.Activation(mx.sym.BatchNorm(x, fix_gamma=False, name="norm"), act_type="relu")


def follows_the_mode(symbol):
    """Return whether an executor without gradients normalizes by the batch in training mode."""
    executor = symbol.simple_bind(mx.cpu(), grad_req="null", data=(4, 3, 6, 6))
    for name, array in executor.arg_dict.items():
        array[:] = mx.nd.array(np.random.RandomState(len(name)).rand(*array.shape))
    executor.aux_dict["norm_moving_var"][:] = 1
    outputs = [executor.forward(is_train=mode)[0].asnumpy() for mode in (True, False)]
    return not np.array_equal(*outputs)


def test_what_is_bound_without_gradients_runs_in_training_mode_which_mxnets_fusion_ignores():
    assert not follows_the_mode(network())
    assert follows_the_mode(unfused(network(), [mx.cpu()]))


@pytest.mark.parametrize("contexts", [[mx.gpu()], [mx.cpu(1)]], ids=str)
def test_a_symbol_that_mxnet_does_not_fuse_stays_as_it_is(contexts):
    symbol = network()
    assert unfused(symbol, contexts) is symbol


def test_the_user_s_choice_of_a_backend_is_followed(monkeypatch):
    assert isinstance(unfused(network(), [mx.cpu()]), Unfused)
    monkeypatch.setenv("MXNET_SUBGRAPH_BACKEND", "MKLDNN")
    assert not isinstance(unfused(network(), [mx.cpu()]), Unfused)
