"""One worker of a distributed job: ``python module_worker.py STORE PARAMS OUT``, started by ``mxmp.launch``."""

import sys
import warnings

warnings.simplefilter("ignore")

import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402

import mxmp  # noqa: E402


def main(store: str, params: str, out: str) -> None:
    if store == "horovod":
        import horovod.mxnet as hvd

        hvd.init()
        kvstore, rank = store, hvd.rank()
    else:
        kvstore = mx.kv.create(store)
        rank = kvstore.rank
    x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=16, name="fc1")
    x = mx.sym.FullyConnected(mx.sym.relu(x), num_hidden=4, name="fc2")
    module = mxmp.Module(
        mx.sym.SoftmaxOutput(x, mx.sym.var("softmax_label"), name="softmax"),
        policy=mxmp.Policy("float16", params=params),
        loss_scale=mxmp.DynamicLossScaler(64.0),
    )
    module.bind([("data", (6, 8))], [("softmax_label", (6,))])
    mx.random.seed(rank)
    np.random.seed(rank)
    module.init_params(mx.init.Xavier())
    module.init_optimizer(kvstore, "adam", {"learning_rate": 0.01})
    record = [weights(module)]
    skipped = []
    for step in range(4):
        data = np.random.randn(6, 8)
        if step == 2 and rank == 1:
            data[0, 0] = np.inf
        module.forward_backward(mx.io.DataBatch([mx.nd.array(data)], [mx.nd.array(np.arange(6) % 4)]))
        module.update()
        record.append(weights(module))
        skipped.append(bool(module.overflow_params))
    np.savez(f"{out}-{rank}.npz", weights=np.stack(record), skipped=skipped, scale=module.loss_scale)
    if store != "horovod":
        kvstore._barrier()


def weights(module: mxmp.Module) -> np.ndarray:
    args, _ = module.get_params()
    return np.concatenate([args[name].asnumpy().ravel() for name in sorted(args)])


if __name__ == "__main__":
    main(*sys.argv[1:])
