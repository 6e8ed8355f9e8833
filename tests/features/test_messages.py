"""Messages that the manual quotes are those that the code prints; what is typed wrongly is answered with the fix."""

from __future__ import annotations

import ast
import copy
import pickle
import re
import sys
from pathlib import Path

import mxnet as mx
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp
from mxmp.__main__ import main, parser
from mxmp.messages import other_names
from mxmp.messages.other_names import missing

ROOT = Path(mxmp.__file__).parents[1]
ROW = re.compile(r"^\| `+ ?(.+?) ?`+(?: \([^|]*\))? \|", flags=re.MULTILINE)
NOT_OURS = (
    "module 'numpy' has no attribute",
    "np.PZERO",
    "libcuda",
    "libcudart",
    "Package 'mxmp' requires",
    "Deferred initialization failed",
    "CachedOp does not support higher order gradients",
    "is non-differentiable",
    "Unknown input to HybridBlock",
    "Incompatible attr in node",
    "is not used by any computation",
    "must not be hybridized to print summary",
    "Please first call block.hybridize()",
    "dtype incompatible expected",
    "misaligned address",
    "Segmentation fault",
    "Check failed: ret.ptr_->shandle.size",
    "InferShape pass cannot decide shapes",
    "InferType pass cannot decide dtypes",
    "invalid load key, 'P'",
)


def quoted():
    """Every message in the first column of a table of the troubleshooting page."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = [message for cell in ROW.findall(text) for message in cell.split("`, `")]
    return [m for m in messages if not any(other in m for other in NOT_OURS)]


def source():
    """The package's string literals, joined as Python joins them, fields of f-strings as one sign."""
    found = []
    for path in sorted(Path(mxmp.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(v.value if isinstance(v, ast.Constant) else "\0" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


LITERALS = [literal.replace("`", "") for literal in source()]


TOKEN = re.compile(r"\[?\.\.\.\]?|'[^']*'|[\w./]+|\s+|.")


def said_by_the_code(message):
    """Whether a literal can print the message: any of its words may come from a field, "..." is anything."""
    pattern = ""
    for token in TOKEN.findall(message):
        if "..." in token:
            pattern += ".*?"
        elif re.match(r"[\w']", token):
            pattern += rf"(?:{re.escape(token)}|\0[\0.]*)"
        else:
            pattern += r"\s+" if token.isspace() else re.escape(token)
    # A literal that is hardly more than fields says anything: a third of the message must be its own text.
    for literal in LITERALS:
        found = re.search(pattern, literal)
        if found and len(found[0].replace("\0", "").strip()) * 3 >= len(message.replace("...", "").strip()):
            return True
    return False


@pytest.mark.parametrize("message", quoted())
def test_messages_quoted_in_the_manual_are_those_of_the_code(message):
    assert said_by_the_code(message)


# -- what is typed, and what the message must name ----------------------------------------------------

LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
CONVERT = "for a Block use mxmp.convert and mxmp.Trainer"
MODULE = "a Module is converted when it is made, mxmp.Module(symbol, policy='float16')"
LOAD = "load it from its files first"
POLICY = "a policy is given by name, policy='float16'"
WRONG = [
    # another object in the place of the network
    ("mxmp.convert(module)", TypeError, MODULE),
    ("mxmp.convert(mx.mod.Module(symbol, label_names=None))", TypeError, MODULE),
    ("mxmp.convert(symbol)", TypeError, "for a Symbol use mxmp.cast_symbol"),
    ("mxmp.convert('net-symbol.json')", TypeError, f"{LOAD}, gluon.SymbolBlock.imports"),
    ("mxmp.convert(trainer)", TypeError, "pass the network that it trains"),
    ("mxmp.convert(net.collect_params())", TypeError, "pass the net itself"),
    ("mxmp.convert([net])", TypeError, "call it for each network"),
    ("mxmp.convert(nn.Dense)", TypeError, "that is a class, make an object of it, Dense(...)"),
    ("mxmp.convert(x)", TypeError, "the network comes first"),
    (
        "mxmp.convert(lambda x: mx.nd.dot(x, x))",
        TypeError,
        "make it the forward of a Block whose weights are Parameters",
    ),
    ("mxmp.convert(symbol.simple_bind(mx.cpu(), data=(1, 4)))", TypeError, "in place of bind, train mxmp.Module"),
    ("mxmp.Module(symbol.simple_bind(mx.cpu(), data=(1, 4)))", TypeError, "in place of bind, train mxmp.Module"),
    ("mxmp.Trainer([x, x], 'sgd')", ValueError, "got arrays: make what computes with them the forward of a Block"),
    ("mxmp.Trainer({'w': x}, 'sgd')", ValueError, "give this its collect_params()"),
    ("mxmp.restore(module)", TypeError, "cast_symbol and Module leave the FP32 Symbol as it is"),
    ("mxmp.cast_symbol(net)", TypeError, CONVERT),
    ("mxmp.cast_symbol('net-symbol.json')", TypeError, f"{LOAD}, mx.sym.load"),
    ("mxmp.Module(net)", TypeError, CONVERT),
    ("mxmp.tune(module, (8, 20))", TypeError, MODULE),
    ("mxmp.explain(mx.mod.Module(symbol, label_names=None))", TypeError, MODULE),
    ("mxmp.explain(mxmp.restore(net))", ValueError, "is not converted: call mxmp.convert(net) first"),
    ("mxmp.diagnose.advise('net')", TypeError, LOAD),
    ("mxmp.optimize_for_inference(module, [x])", TypeError, MODULE),
    ("mxmp.guard(trainer, net)", TypeError, "pass the network that it trains"),
    ("mxmp.diagnose.watch(net)", TypeError, "pass the net's mxmp.Trainer too: the net comes first"),
    ("mxmp.diagnose.watch(net, 1)", TypeError, "mxmp.Trainer too, got int: the net comes first, then the trainer"),
    ("mxmp.guard(None)", TypeError, "or an mxmp.Module or BucketingModule, got NoneType"),
    (
        "mxmp.diagnose.plot_loss_scale(net)",
        TypeError,
        "or its scale_history, got HybridSequential",
    ),
    # a policy, a shape or a scaler in another's place
    ("mxmp.tune(net, (8, 20), 'float16')", ValueError, POLICY),
    ("mxmp.tune(net, (8, 20), mxmp.Policy())", ValueError, "policy='compute=float16'"),
    ("mxmp.diagnose.advise(net, x, 'float16')", ValueError, POLICY),
    ("mxmp.explain(net, x, 'bfloat16')", ValueError, "mxmp.convert(net, policy)"),
    ("mxmp.Module(symbol, 'float16')", ValueError, "the policy is a keyword, policy='float16'"),
    ("mxmp.Module(symbol, mxmp.Policy('bfloat16'))", ValueError, "the policy is a keyword, policy='compute=bfloat16'"),
    ("mxmp.Module(symbol, ['data'], None, 'bfloat16')", ValueError, "the policy is a keyword, policy='bfloat16'"),
    (
        "mxmp.Module(symbol, mxmp.tune(symbol, data=(8, 20), measure=False))",
        ValueError,
        "the policy is a keyword, policy=plan",
    ),
    ("mxmp.BucketingModule(lambda key: symbol, 1, 'bfloat16')", ValueError, "a keyword, policy='bfloat16'"),
    ("mxmp.Module.load('net', 1, 'bfloat16')", ValueError, "the policy is a keyword, policy='bfloat16'"),
    ("mxmp.BucketingModule.load('net', 1, len, 8, mxmp.Policy())", ValueError, "policy='compute=float16'"),
    ("mxmp.Module(symbol, 'data')", ValueError, "write ['data']"),
    ("mxmp.Module(symbol, label_names='label')", ValueError, "label_names must be a list of names, got 'label'"),
    ("mxmp.tune(net, 8, measure=False)", ValueError, "as one tuple, (8,)"),
    ("mxmp.tune(net, 8, 20, measure=False)", ValueError, "as one tuple, (8, 20)"),
    ("mxmp.tune(symbol, data=8, measure=False)", ValueError, "data=8 is neither an MXNet array nor a shape"),
    ("mxmp.tune(symbol, (8, 20), measure=False)", ValueError, "name the inputs of a Symbol: tune(symbol, data="),
    ("mxmp.tune(symbol, measure=False)", ValueError, "data: give those of all inputs, such as data=(32, 3, 224, 224)"),
    ("mxmp.tune(symbol, measure=False)", ValueError, "--shape data=32,3,224,224 on the command line"),
    ("mxmp.diagnose.advise(symbol)", ValueError, "do not say the shape of data"),
    ("mxmp.optimize_for_inference(net, [x], max_drop=5)", ValueError, "a share of the top answers, 0 to 1"),
    # arrays in another shape or dtype
    ("mxmp.optimize_for_inference(net, x)", ValueError, "that is one batch, put it in a list, [batch]"),
    ("mxmp.optimize_for_inference(net, x.asnumpy())", ValueError, "that is one batch, put it in a list, [batch]"),
    ("mxmp.optimize_for_inference(symbol, {'data': x})", ValueError, "that is one batch, put it in a list, [batch]"),
    ("mxmp.optimize_for_inference(symbol, mx.io.DataBatch([x]))", ValueError, "that is one batch, put it in a list"),
    ("mxmp.optimize_for_inference(two_inputs(), (x, x))", ValueError, "one batch of several inputs is [(x, y)]"),
    ("mxmp.convert(dense(3), 'bfloat16')(x.astype('float64'))", mx.MXNetError, "call x.astype('float32') first"),
    ("mxmp.convert(norm(), 'bfloat16')(x.astype('float64'))", mx.MXNetError, "call x.astype('float32') first"),
    ("mxmp.convert(norm())(x.astype('float64'))", mx.MXNetError, "an input is float64"),
    (
        "bound([mx.io.DataDesc('data', (8, 20), 'float64')], policy='bfloat16')",
        UserWarning,
        "the array that is passed here is float64, which stays so: pass float32",
    ),
    # operators that broadcast arrays
    ("centred_module()", mx.MXNetError, "of (8, 3) and (8, 1), write F.broadcast_add(x, y), broadcast_sub"),
    # exclude
    ("mxmp.convert(net, exclude=[len])", ValueError, "a filter is given by itself, not in a list"),
    ("mxmp.convert(net, exclude=[nn.Dense])", ValueError, "exclude=lambda name, block: isinstance(block, Dense))"),
    ("mxmp.convert(net, exclude=nn.Dense)", ValueError, "exclude=lambda name, block: isinstance(block, Dense))"),
    ("mxmp.convert(net, exclude=net[0])", ValueError, "a block's is block.name"),
    ("mxmp.convert(net, exclude=[net[0]])", ValueError, "a block's is block.name"),
    ("mxmp.Module(symbol, exclude=len)", ValueError, "only mxmp.convert(net, exclude=...) takes a filter"),
    ("mxmp.Module(symbol, exclude=net[0])", ValueError, "of a block its name, ['"),
    ("mxmp.cast_symbol(symbol, exclude=['*'])", ValueError, "its matrix operators stay in FP32 (excluded by '*')"),
    ("mxmp.convert(dense(3), exclude=['*'])(x)", UserWarning, "its matrix operators stay in FP32 (excluded by '*')"),
    ("bound(exclude=['*'])", UserWarning, "its matrix operators stay in FP32 (excluded by '*')"),
    ("bound(policy='full_ops=FullyConnected')", UserWarning, "stay in FP32 (the policy's full_ops names it)"),
    ("mxmp.convert(net, exclude=lambda name: True)", TypeError, "a filter of two arguments, lambda name, block: ..."),
    # low_ops and full_ops
    ("mxmp.convert(net, mxmp.Policy(low_ops=['softmx']))", ValueError, "no operator 'softmx'; did you mean 'softmax'?"),
    ("mxmp.convert(net, mxmp.Policy(full_ops=['dense0']))", ValueError, "blocks and nodes go in exclude"),
    ("mxmp.convert(dense(3), 'full_ops=Convolution')(x)", UserWarning, "full_ops=Convolution (the graph has none)"),
    (
        "mxmp.cast_symbol(symbol, 'low_ops=softmax')",
        UserWarning,
        "low_ops=softmax (the graph has none)",
    ),
    ("bound(policy='full_ops=Activation')", UserWarning, "full_ops=Activation (the graph has none)"),
    # keywords
    ("mxmp.convert(net, low_ops=['exp'])", TypeError, "policy=mxmp.Policy('float16', low_ops=...)"),
    ("mxmp.convert(net, 'float16', ['dense0'])", TypeError, "takes net, policy by position, got ['dense0'] too"),
    ("mxmp.convert(net, 'float16', ['dense0'])", TypeError, "write exclude=... with its name"),
    ("mxmp.Module(symbol, dtype='float16')", TypeError, "the dtype is the policy, policy='float16'"),
    ("mxmp.convert(net, dtype='float16')", TypeError, "convert takes no argument 'dtype'; the dtype is the policy"),
    ("mxmp.convert(net, polcy='float16')", TypeError, "did you mean 'policy'?"),
    ("mxmp.cast_symbol(symbol, dtype='float16')", TypeError, "the dtype is the policy, policy='float16'"),
    ("mxmp.Trainer({}, 'sgd', dtype='float16')", TypeError, "mxmp.convert(net, 'float16') says what a net computes in"),
    (
        "mxmp.Trainer({}, 'sgd', los_scale=8.0)",
        TypeError,
        "no argument 'los_scale'; did you mean 'loss_scale'?",
    ),
    ("mxmp.optimize_for_inference(net, [x], dtype='int8')", TypeError, "did you mean 'dtypes'?"),
    ("mxmp.Module(symbol, polcy='float16')", TypeError, "Module takes no argument 'polcy'; did you mean 'policy'?"),
    ("mxmp.Module(symbol, lable_names=None)", TypeError, "did you mean 'label_names'?"),
    ("mxmp.BucketingModule(None, 1, dtype='float16')", TypeError, "the dtype is the policy, policy='float16'"),
    ("mxmp.BucketingModule(None, 1, loss_scal=1)", TypeError, "did you mean 'loss_scale'?"),
    ("mxmp.tune(net, (8, 20), polcy='float16')", ValueError, "named inputs are for Symbols; did you mean 'policy'?"),
    ("mxmp.tune(net, (8, 20), training=None)", ValueError, "training must be True or False, got None"),
    ("mxmp.tune(net, (8, 20), measure='no')", ValueError, "measure must be True or False, got 'no'"),
    # other objects than those that are drawn, watched or generated
    ("mxmp.BucketingModule(symbol, 1)", TypeError, "a network of one Symbol is mxmp.Module(symbol)"),
    (
        "mxmp.BucketingModule(lambda key: symbol, 1).bind([('data', (8, 20))])",
        TypeError,
        "such as (symbol, ['data'],",
    ),
    ("mxmp.diagnose.watch(net, trainer, callback=3)", TypeError, "callback must be a function of a Snapshot, got int"),
    ("mxmp.diagnose.plot_histograms(None)", TypeError, "a Snapshot, such as watched.latest, got NoneType"),
    ("mxmp.diagnose.plot_loss_scale(None)", TypeError, "or its scale_history, got NoneType"),
    ("mxmp.diagnose.plot_verification(net)", TypeError, "what verify returned, got HybridSequential"),
    ("mxmp.optimize_for_inference(None, [])", TypeError, "takes a gluon Block or Symbol, got NoneType"),
    ("mxmp.optimize_for_inference(symbol, [x])", ValueError, "it lacks fullyconnected"),
    ("mxmp.optimize_for_inference(symbol, [x])", ValueError, "give those that mx.model.load_checkpoint or"),
    # policies
    ("mxmp.Policy.parse('full_ops=Activation,Dropout')", ValueError, "separated by ';', full_ops=Activation;Dropout"),
    ("mxmp.Policy.parse('float16,exclude=a,b,c')", ValueError, "separated by ';', exclude=a;b"),
    ("mxmp.Policy.parse('float16;exclude=a')", ValueError, "fields are separated by ','"),
    ("mxmp.Policy.parse('float16 exclude=a')", ValueError, "fields are separated by ','"),
    ("mxmp.Policy.parse('float16,excldue=a')", ValueError, "did you mean 'exclude'?"),
    ("mxmp.convert(dense(3), 'flaot16')", ValueError, "did you mean 'float16'?"),
    ("mxmp.convert(dense(3), 'int8')", ValueError, "INT8 is for inference, mxmp.optimize_for_inference"),
    ("mxmp.tune(net, (8, 20), policy='fp16', measure=False)", ValueError, "did you mean 'float16'?"),
    ("mxmp.Policy('float6')", ValueError, "did you mean 'float16'?"),
    ("mxmp.Policy(norm='compte')", ValueError, "did you mean 'compute'?"),
    ("mxmp.Policy(output='computed')", ValueError, "did you mean 'compute'?"),
    ("mxmp.Policy(exclude='a,b')", ValueError, "such as ['a', 'b']"),
    ("mxmp.cast_symbol(mx.sym.relu(mx.sym.var('x')))", ValueError, "convolution, dense layer, dot, recurrent layer"),
    # plans
    ("other_net()", ValueError, "No name is in both, so these are counted by type"),
    ("mxmp.Plan.from_json('{}')", ValueError, "expected an object with the format 'mxmp-plan-1', got None"),
    ("mxmp.Plan.from_json('[]')", ValueError, "expected an object with the format"),
    ("plan_with_dtype('flaot16')", ValueError, "of an operator is 'float16' or 'float32', got 'flaot16'"),
    ("plan_with_dtype('bfloat16')", ValueError, "of an operator is 'float16' or 'float32', got 'bfloat16'"),
    # trainers
    ("mxmp.Trainer(net, 'sgd')", ValueError, "net.collect_params(), got a HybridSequential"),
    ("mxmp.Trainer([], 'sgd')", ValueError, "params is empty, so there is nothing to train"),
    ("mxmp.Trainer(nn.HybridSequential().collect_params(), 'sgd')", ValueError, "params is empty"),
    ("mxmp.Trainer([net[0].weight, net[0].bias, net[0].weight], 'sgd')", ValueError, "_weight' twice"),
    ("mxmp.Trainer('sgd', net.collect_params())", TypeError, "params come first, then the optimizer"),
    ("mxmp.Trainer(net.collect_params(), 'sdg')", ValueError, "Cannot find optimizer sdg; did you mean 'sgd'"),
    ("mxmp.Trainer(net.collect_params(), mx.optimizer.SGD)", ValueError, "got the class SGD"),
    ("mxmp.Trainer(net.collect_params(), 'sgd', 0.1)", TypeError, "must be a dict, such as {'learning_rate': 0.1}"),
    ("mxmp.Trainer(net.collect_params(), 'sgd', {'lr': 1})", TypeError, "did you mean 'learning_rate'?"),
    ("mxmp.Trainer(net.collect_params(), 'adam', {'beta': 1})", TypeError, "Adam takes no 'beta'; did you mean"),
    ("mxmp.Trainer(net.collect_params(), 'sgd', None, scaler)", ValueError, "loss_scale=scaler"),
    ("initialized().init_optimizer(optimizer='sdg')", ValueError, "did you mean 'sgd'"),
    ("initialized().init_optimizer(optimizer_params={'lr': 1})", TypeError, "did you mean 'learning_rate'?"),
    ("second_trainer().step(8)", RuntimeError, "the same scaler object (scaler = mxmp.DynamicLossScaler()"),
    ("second_trainer().unscale()", RuntimeError, "the same scaler object"),
    ("second_trainer().clip_global_norm(1)", RuntimeError, "the same scaler object"),
    ("trainer_of_another_net().step(8)", UserWarning, "the loss reaches none of its parameters"),
    ("trained(copy.deepcopy(net))", RuntimeError, "the net is a copy (copy.deepcopy, pickle)"),
    ("trained(pickle.loads(pickle.dumps(net)))", RuntimeError, "the net is a copy (copy.deepcopy, pickle)"),
    ("mxmp.FeedForward", AttributeError, "mxmp.Module(symbol) trains it"),
    ("trainer.unscale_()", AttributeError, "no attribute 'unscale_': trainer.unscale()"),
    ("trainer.zero_grad()", AttributeError, "net.collect_params().zero_grad(), which only grad_req='add' needs"),
    ("trainer.skip_step()", AttributeError, "trainer.discard() leaves a step out"),
    ("trainer.scale(x)", AttributeError, "trainer.backward(loss) scales the loss"),
    ("trainer.get_scale()", AttributeError, "the scale is trainer.loss_scale"),
    ("trainer.state_dict()", AttributeError, "trainer.save_states(file)"),
    ("trainer.reject_step()", AttributeError, "trainer.discard() leaves a step out"),
    ("trainer.save_checkpoint('run')", AttributeError, "mxmp.save_checkpoint(path, net, trainer)"),
    ("trainer.load_checkpoint('run')", AttributeError, "mxmp.load_checkpoint(path, net, trainer)"),
    ("trainer.lr", AttributeError, "trainer.learning_rate, and trainer.set_learning_rate(value)"),
    ("trainer.backwards(x)", AttributeError, "did you mean 'backward'?"),
    ("scaler.get_scale()", AttributeError, "no attribute 'get_scale': read scaler.loss_scale"),
    ("scaler.update()", AttributeError, "scaler.loss_scale = "),
    ("scaler.step(trainer)", AttributeError, "trainer.step"),
    ("scaler.unscale_(trainer)", AttributeError, "trainer.unscale"),
    ("scaler.get_scaled_loss(x)", AttributeError, "trainer.backward"),
    ("module.unscale_()", AttributeError, "module.update() divides by module.loss_scale"),
    ("module.zero_grad()", AttributeError, "module.discard()"),
    ("module.skip_step()", AttributeError, "module.discard() leaves a step out"),
    ("module.scale_loss(x)", AttributeError, "module.backward() scales by itself"),
    ("module.load_state_dict({})", AttributeError, "module.load_optimizer_states(file)"),
    ("module.load_checkpoint('run')", AttributeError, "mxmp.load_checkpoint(path, module), or mxmp.Module.load"),
    ("module.set_learning_rate(0.1)", AttributeError, "optimizer_params={'learning_rate': value"),
    ("module.update_metrics()", AttributeError, "did you mean 'update_metric'?"),
    # what comes first
    ("module.update()", RuntimeError, "call bind(), init_params() and init_optimizer() first, as fit() does"),
    ("module.init_optimizer()", RuntimeError, "call bind() and init_params() first, as fit() does"),
    ("module.forward(mx.io.DataBatch([x]))", RuntimeError, "call bind() and init_params() first, as fit() does"),
    # masters and checkpoints
    ("mxmp.set_master_weights(net, {'0.weigth': x})", ValueError, "did you mean '0.weight'?"),
    ("mxmp.set_master_weights(net, {net[0].weight.name: x})", ValueError, "own name for it is '0.weight'"),
    ("mxmp.set_master_weights(net, {'other': x})", ValueError, "there are '0.weight', '0.bias', '1.weight', '1.bias'"),
    ("mxmp.set_master_weights(net, {'0.weight': [1.0]})", TypeError, "expected an NDArray or NumPy array, got list"),
    ("mxmp.set_master_weights(net, None)", TypeError, "expected a dict of arrays, as master_weights returns"),
    ("mxmp.save_checkpoint(net, trainer, 'ck')", TypeError, "the order is path, net, trainer"),
    ("mxmp.save_checkpoint(trainer, net, 'ck')", TypeError, "the order is path, net, trainer"),
    ("mxmp.save_checkpoint('ck', trainer, net)", TypeError, "the order is path, net, trainer"),
    ("mxmp.load_checkpoint(module, 'ck')", TypeError, "the order is path, net, trainer"),
    ("mxmp.load_checkpoint('ck', symbol)", TypeError, "got Symbol: for a Symbol use"),
    # sparse weights: Gluon's option means nothing to a Symbol
    ("sparse_module()", ValueError, "mx.sym.var('w') without stype="),
    ("mxmp.Trainer(sparse_parameters(), 'sgd')", ValueError, "a Parameter without stype="),
    # calls of a converted net
    ("net(x, x)", TypeError, "takes the inputs x, and was called with 2 inputs"),
    ("net(x, None)", TypeError, "takes the inputs x, and was called with 2 inputs"),
    ("mxmp.convert(dense_alone())(x, x, x, x)", TypeError, "takes the inputs x, and was called with 4 inputs"),
    ("net([x])", TypeError, "with a list of arrays where"),
    ("net((x,))", TypeError, "write net(x), or net(*arrays)"),
    ("net(x.asnumpy())", TypeError, "with a NumPy array: call it with mx.nd.array(x)"),
    ("images('uint8')", mx.MXNetError, "an input is uint8, and an operator multiplies it by weights of another dtype"),
    ("images('int8')", mx.MXNetError, "x.astype('float32')"),
    ("net.hybridize(backend='MKLDNN')", ValueError, "drop the backend, or call mxmp.restore(net) first"),
    ("net.optimize_for(x, backend='MKLDNN')", ValueError, "mxmp.optimize_for_inference(net, batches) fuses its graph"),
    ("net.cast('float16')", ValueError, "leave it out, or call mxmp.restore(net) first"),
    # names of other libraries
    ("mxmp.autocast", AttributeError, "mxmp.convert(net, 'float16')"),
    ("mxmp.GradScaler()", AttributeError, "trainer.backward(loss)"),
    ("mxmp.init()", AttributeError, "mxmp.convert(net, 'float16')"),
    ("mxmp.amp.init()", AttributeError, "mxmp.convert(net, 'float16')"),
    ("mxmp.initialize()", AttributeError, "mxmp.convert(net, 'float16')"),
    ("mxmp.scale_loss(0, trainer)", AttributeError, "trainer.backward(loss)"),
    ("mxmp.init_trainer(trainer)", AttributeError, "mxmp.Trainer(...)"),
    ("mxmp.convert_model()", AttributeError, "mxmp.cast_symbol(symbol, 'float16')"),
    ("mxmp.convert_hybrid_block(net)", AttributeError, "mxmp.convert(net, 'float16')"),
    ("mxmp.unscale(trainer)", AttributeError, "trainer.unscale()"),
    ("mxmp.skip_step(trainer)", AttributeError, "trainer.discard()"),
    ("mxmp.zero_grad(net)", AttributeError, "net.collect_params().zero_grad()"),
    ("mxmp.master_params(trainer)", AttributeError, "FP32 master weights"),
    ("mxmp.watch(net, trainer)", AttributeError, "mxmp.diagnose.watch"),
    ("mxmp.trainer", AttributeError, "did you mean mxmp.Trainer?"),
]


def dense(*widths, prefix=None):
    net = nn.HybridSequential(prefix=prefix)
    with net.name_scope():
        net.add(*map(nn.Dense, widths))
    net.initialize()
    return net


def trained(net, trainer=None):
    trainer = trainer or mxmp.Trainer(net.collect_params(), "sgd")
    with autograd.record():
        loss = LOSS(net(mx.nd.ones((8, 20))), mx.nd.zeros(8))
    trainer.backward(loss)
    return trainer


def second_trainer():
    """The second of two trainers of one loss, when the first has stepped."""
    net = mxmp.convert(dense(8, 3))
    first, second = (mxmp.Trainer(part.collect_params(), "sgd") for part in net)
    trained(net, first).step(8)
    return second


def trainer_of_another_net():
    net, other = mxmp.convert(dense(3)), mxmp.convert(dense(3))
    other(mx.nd.ones((8, 20)))
    return trained(net, mxmp.Trainer(other.collect_params(), "sgd"))


def other_net():
    plan = mxmp.tune(dense(8, 3, prefix="a_"), (8, 20), measure=False)
    return mxmp.convert(dense(8, 8, 3, prefix="b_"), plan)(mx.nd.ones((8, 20)))


def plan_with_dtype(dtype):
    text = mxmp.tune(dense(3), (8, 20), policy="float16", measure=False).to_json()
    return mxmp.Plan.from_json(text.replace('"FullyConnected", "float16"', f'"FullyConnected", "{dtype}"'))


def images(dtype):
    net = nn.Conv2D(2, 3)
    net.initialize()
    return mxmp.convert(net, "bfloat16")(mx.nd.ones((1, 3, 8, 8)).astype(dtype))


def norm():
    net = nn.HybridSequential()
    net.add(nn.LayerNorm(), nn.Dense(3))
    net.initialize()
    return net


def centred_module():
    x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3)
    mxmp.Module(x - x.mean(axis=1, keepdims=True), label_names=None).bind([("data", (8, 20))])


def two_inputs():
    class Sum(gluon.HybridBlock):
        def hybrid_forward(self, F, a, b):  # noqa: N803
            return a + b

    return Sum()


def bound(shapes=(("data", (8, 20)),), **options):
    module = mxmp.Module(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3), label_names=None, **options)
    module.bind(shapes)


def sparse_module():
    weight = mx.sym.var("w", stype="row_sparse", shape=(20, 4), init=mx.init.Zero())
    product = mx.sym.dot(mx.sym.var("data", stype="csr"), weight)
    module = mxmp.Module(mx.sym.LinearRegressionOutput(product, name="y"), label_names=["y_label"])
    with pytest.warns(UserWarning, match="nothing in this Symbol would run"):
        module.bind([("data", (8, 20))], [("y_label", (8, 4))])
    module.init_params()
    module.init_optimizer()


def sparse_parameters():
    block = gluon.contrib.nn.SparseEmbedding(20, 4)
    block.initialize()
    return block.collect_params()


def initialized():
    module = mxmp.Module(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3), label_names=None)
    module.bind([("data", (8, 20))])
    module.init_params()
    return module


@pytest.mark.filterwarnings("ignore:this CPU has neither")
@pytest.mark.parametrize(("typed", "error", "named"), WRONG, ids=[typed for typed, *_ in WRONG])
def test_what_is_typed_wrongly_is_answered_with_the_likely_fix(typed, error, named):
    net, x = mxmp.convert(dense(8, 3)), mx.nd.ones((8, 20))
    net(x)
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3)
    names = {
        "trainer": mxmp.Trainer(net.collect_params(), "sgd"),
        "module": mxmp.Module(symbol, label_names=None),
        "scaler": mxmp.DynamicLossScaler(),
        "dense_alone": lambda: dense(3)[0],
        "copy": copy,
    }
    with pytest.raises(error) as raised:
        eval(typed, {**globals(), **names, "net": net, "x": x, "symbol": symbol})
    assert named in str(raised.value)


def test_a_wrong_call_leaves_a_net_that_runs_as_before():
    net, x = mxmp.convert(dense(8, 3)), mx.nd.ones((8, 20))
    want = net(x).asnumpy()
    for wrong in (lambda: net(x, x), lambda: net([x]), lambda: net.cast("float16"), lambda: net.hybridize(backend="a")):
        with pytest.raises((TypeError, ValueError)):
            wrong()
    assert (net(x).asnumpy() == want).all()


def test_hints_disturb_neither_hasattr_nor_dir_nor_pickling():
    assert not any(hasattr(mxmp, name) for name in ("autocast", "amp", "__wrapped__", "_missing_name"))
    assert getattr(mxmp, "GradScaler", None) is None
    assert not {"autocast", "amp", "init"} & set(dir(mxmp))
    assert pickle.loads(pickle.dumps(mxmp.Policy)) is mxmp.Policy
    assert missing("nothing_like_it", mxmp.__all__) == "module 'mxmp' has no attribute 'nothing_like_it'"
    with pytest.raises(ImportError, match=r"cannot import name 'nothing_like_it' from 'mxmp' \("):
        from mxmp import nothing_like_it  # noqa: F401


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("autocast", "mxmp.convert(net, 'float16')"),
        ("GradScaler", "trainer.backward(loss)"),
        ("amp", "mxmp.convert(net, 'float16')"),
        ("watch", "mxmp.diagnose.watch"),
        ("DynamicLossscaler", "did you mean mxmp.DynamicLossScaler?"),
    ],
)
def test_an_import_from_mxmp_says_what_to_write_too(name, hint):
    for _ in range(2):
        with pytest.raises(ImportError) as raised:
            exec(f"from mxmp import Policy, {name}")
        assert str(raised.value).startswith(f"cannot import name {name!r} from 'mxmp': ")
        assert hint in str(raised.value)
        assert not hasattr(mxmp, name)


def test_submodules_are_imported_from_mxmp_as_from_any_package(monkeypatch):
    monkeypatch.delitem(sys.modules, "mxmp.launch", raising=False)
    monkeypatch.delattr(mxmp, "launch", raising=False)
    monkeypatch.setitem(other_names._HINTS, "not this", "launch")
    from mxmp import launch

    assert launch.__name__ == "mxmp.launch"


def test_a_property_that_fails_keeps_its_own_message():
    trainer = mxmp.Trainer(dense(3).collect_params(), "sgd")
    with pytest.raises(AttributeError, match=r"Leave out amp\.init"):
        trainer._amp_loss_scaler  # noqa: B018
    assert not hasattr(trainer, "unscale_")
    assert copy.deepcopy(mxmp.DynamicLossScaler()).loss_scale == 65536


@pytest.mark.filterwarnings("ignore:losses are scaled")
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("run.params", "write 'run', without the ending"),
        ("run.states", "write 'run', without the ending"),
        ("rum", "did you mean 'run'?"),
        ("only.params", "parameters alone are net.load_parameters(file)"),
        ("none/run", "there is no folder 'none'"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_answered_with_the_name_that_is(given, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = dense(3)
    trainer = trained(net)
    trainer.step(8)
    mxmp.save_checkpoint("run", net, trainer)
    net.save_parameters("only.params")
    with pytest.raises(FileNotFoundError) as raised:
        mxmp.load_checkpoint(given, net, trainer)
    assert named in str(raised.value)


TYPED_COMMANDS = [
    (
        "explain net-symbol.json --polcy float16",
        "mxmp explain: unrecognized arguments: --polcy float16; did you mean '--policy'?",
    ),
    ("tune net-symbol.json --out a.json --shapes data=1,8", "did you mean '--shape'?"),
    ("launch --wrokers 2 -- python a.py", "did you mean '--workers'?"),
    ("explain net-symbol.json --dtype bfloat16", "unrecognized arguments: --dtype bfloat16; did you mean '--policy'?"),
    ("convert net-symbol.json low", "did you mean 'cast'?"),
    ("verify", "the following arguments are required: SCRIPT; see"),
    ("explian net-symbol.json", "did you mean 'explain'?"),
    ("blame net-symbol.json", "; that is for Python: mxmp.diagnose.blame; see"),
    ("watch net-symbol.json", "; that is for Python: mxmp.diagnose.watch; see"),
    ("explain net-symbol.json --device gup", "did you mean 'gpu'?"),
    ("profile nope", "expected what nsys export --type sqlite wrote; there is 'report.sqlite'"),
    ("profile reprot.sqlite", "did you mean 'report.sqlite'?"),
    ("explain nope", "expected a Symbol in JSON, NAME-symbol.json; there is 'net-symbol.json'"),
    ("cast net-symbol.json net-0001.param low", "did you mean 'net-0001.params'?"),
]


@pytest.mark.parametrize(("typed", "named"), TYPED_COMMANDS, ids=[typed for typed, _ in TYPED_COMMANDS])
def test_a_command_that_is_typed_wrongly_is_answered_with_the_right_one(typed, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3).save("net-symbol.json")
    for other in ("report.sqlite", "net-0001.params"):
        Path(other).touch()
    try:
        status = main(typed.split())
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert named in capsys.readouterr().err


def plainly_trained(net):
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    with autograd.record():
        LOSS(net(mx.nd.ones((8, 20))), mx.nd.zeros(8)).backward()
    trainer.step(8)


def read_between(net):
    trained(net)
    next(iter(net.collect_params().values())).grad()


@pytest.mark.parametrize(
    ("used", "said"),
    [
        (plainly_trained, "is trained by a mxnet.gluon.trainer.Trainer"),
        (read_between, "is read between a scaled backward and the step"),
        (lambda net: mxmp.convert(net, exclude=["*"])(mx.nd.ones((8, 20))), "nothing in"),
        (lambda net: mxmp.convert(net, exclude=["none"])(mx.nd.ones((8, 20))), "exclude: no node or block"),
        (lambda net: mxmp.convert(net)(mx.nd.arange(2000, 2160).reshape((8, 20)) * 100), "goes as it is into"),
        (lambda net: bound(exclude=["*"]), "nothing in this Symbol"),
        (lambda net: bound(exclude=["none"]), "exclude: no node or block"),
        (
            lambda net: mxmp.convert(net, "full_ops=dot")(mx.nd.ones((8, 20))),
            "entries of the policy that change nothing",
        ),
        (lambda net: bound(policy="full_ops=dot"), "entries of the policy that change nothing"),
    ],
)
def test_a_warning_names_the_line_of_the_user(used, said):
    net = mxmp.convert(dense(8, 3))
    with pytest.warns(UserWarning, match=said) as caught:
        used(net)
    assert {warning.filename for warning in caught} == {__file__}


def commands():
    """The names of all commands, as the usage lists them."""
    return re.search(r"\{(.*?)\}", parser().format_usage())[1].split(",")


@pytest.mark.parametrize("name", commands())
def test_the_help_of_a_command_has_an_example_and_names_values_as_the_manual(name, capsys):
    with pytest.raises(SystemExit):
        main([name, "--help"])
    text = capsys.readouterr().out
    assert f"\nexample:\npython -m mxmp {name} " in text
    manual = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    # argparse names a value after its option, in capitals, unless it is told another name.
    for option, value in re.findall(r"--([\w-]+) \[?([\w.=,]+)", text.partition("positional")[0]):
        assert value != option.upper().replace("-", "_")
        if value in ("PATTERN", "TEXT", "NAME", "PLAN.json", "SHARE", "DB", "N", "SECONDS", "REPORT.json", "PICTURE"):
            assert f"`--{option} {value}" in manual


def test_cast_prints_sizes_in_a_unit_that_fits_and_reports_name_the_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=64, name="fc")
    symbol.save("net-symbol.json")
    mx.nd.save("net-0001.params", {"arg:fc_weight": mx.nd.ones((64, 20)), "arg:fc_bias": mx.nd.ones(64)})
    assert main(["cast", "net-symbol.json", "net-0001.params", "low", "--device", "gpu"]) == 0
    text = capsys.readouterr().out
    assert "Parameters: 5.2 KiB -> 2.6 KiB" in text
    assert "Stored in float16: fc_bias, fc_weight" in text
    assert "masters" not in text
    for command in ("explain", "advise"):
        assert main([command, "net-symbol.json", "--shape", "data=8,20"]) == 0
        assert capsys.readouterr().out.startswith("net (compute=float16")
