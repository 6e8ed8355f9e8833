"""Two heads with MakeLoss and BlockGrad in one Module."""

import sys

import mxnet as mx
import numpy as np

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

body = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=24, name="body")
body = mx.sym.Activation(body, act_type="relu")
value = mx.sym.FullyConnected(body, num_hidden=1, name="value")
policy_head = mx.sym.log_softmax(mx.sym.FullyConnected(body, num_hidden=3, name="policy"))
reward, action = mx.sym.var("reward"), mx.sym.var("action")
advantage = reward - mx.sym.reshape(value, (-1,))
loss = mx.sym.square(advantage) - mx.sym.pick(policy_head, action) * mx.sym.BlockGrad(advantage)
net = mx.sym.Group([mx.sym.MakeLoss(loss, name="loss"), mx.sym.BlockGrad(mx.sym.exp(policy_head))])
module = mxmp.Module(net, ["data"], ["reward", "action"], policy=policy)
module.bind([("data", (16, 5))], [("reward", (16,)), ("action", (16,))])
module.init_params(mx.init.Xavier())
module.init_optimizer(optimizer="adam", optimizer_params={"learning_rate": 0.01, "rescale_grad": 1 / 16})
for _step in range(20):
    states = np.random.randn(16, 5)
    labels = [mx.nd.array(states[:, 0]), mx.nd.array(np.random.randint(0, 3, 16))]
    module.forward_backward(mx.io.DataBatch([mx.nd.array(states)], labels))
    module.update()
