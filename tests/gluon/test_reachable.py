"""Which code a graph runs: a global may change wherever a function of the user's reads it."""

from __future__ import annotations

import inspect
from functools import partial
from types import ModuleType

import pytest
from kit.takes import Takes, assert_alike, pair
from mxnet.gluon import nn

from mxmp.gluon.reachable import Reachable
from mxmp.gluon.reads import Reads

FACTOR = 1.0

pytestmark = pytest.mark.filterwarnings("ignore:Parameter .* is not used by any computation")


def set_factor(net, value):
    global FACTOR
    FACTOR = module.FACTOR = value


class OfFactor(nn.HybridBlock):
    def hybrid_forward(self, op, x):
        return x * FACTOR


class OfItsBase(OfFactor):
    def hybrid_forward(self, op, x):
        return super().hybrid_forward(op, x) + 1


class Forward(nn.HybridBlock):
    def forward(self, x):
        return super().forward(x * FACTOR)

    def hybrid_forward(self, op, x):
        return x + 1


class OfKinds(nn.HybridBlock):
    static = staticmethod(lambda x: x * FACTOR)
    of_class = classmethod(lambda cls, x: x * FACTOR)
    factor = property(lambda self: FACTOR)

    def __init__(self, compute):
        super().__init__()
        self.compute = compute

    def hybrid_forward(self, op, x):
        return self.compute(self, x)


class Helper:
    def of(self, x):
        return x * FACTOR

    __call__ = of


class Holder:
    def __init__(self):
        self.inner = Helper()

    def through(self, x):
        return self.inner.of(x)


helper, holder, HELPERS = Helper(), Holder(), {"of": partial(Helper().of)}


def taking_default(block, op, x, of=helper.of):
    return of(x)


module = ModuleType("helpers")
exec("FACTOR = 1.0\ndef of(x):\n    return x * FACTOR", vars(module))


def holding(module):
    return Takes(lambda block, op, x: module.of(x))


CODE = {
    "of a module in a closure": lambda: holding(module),
    "of a module in an attribute": lambda: Takes(lambda b, op, x: b.c.of(x), c=module),
    "of a module in a default": lambda: Takes(lambda b, op, x, m=module: m.of(x)),
    "hybrid_forward": OfFactor,
    "of its base": OfItsBase,
    "of a base by name": lambda: OfKinds(lambda b, x: OfFactor.hybrid_forward(b, None, x)),
    "forward": Forward,
    "static method": lambda: OfKinds(lambda b, x: b.static(x)),
    "class method": lambda: OfKinds(lambda b, x: b.of_class(x)),
    "property": lambda: OfKinds(lambda b, x: x * b.factor),
    "method of an object": lambda: Takes(lambda b, op, x: b.c.of(x), c=Helper()),
    "method of a dict": lambda: Takes(lambda b, op, x: b.c.of(x), c=type("Of", (Helper, dict), {})()),
    "method of a tuple": lambda: Takes(lambda b, op, x: b.c.of(x), c=type("Of", (Helper, tuple), {})()),
    "of an object inside": lambda: Takes(lambda b, op, x: b.c.through(x), c=Holder()),
    "object that is called": lambda: Takes(lambda b, op, x: b.c(x), c=Helper()),
    "bound method": lambda: Takes(lambda b, op, x: b.c(x), c=Helper().of),
    "in a list": lambda: Takes(lambda b, op, x: b.c[0](x), c=[Helper().of]),
    "partial": lambda: Takes(lambda b, op, x: b.c(x), c=partial(lambda x: x * FACTOR)),
    "default": lambda: Takes(taking_default),
    "of a global object": lambda: Takes(lambda b, op, x: helper.of(x)),
    "of one inside": lambda: Takes(lambda b, op, x: holder.through(x)),
    "global object that is called": lambda: Takes(lambda b, op, x: helper(x)),
    "global class": lambda: Takes(lambda b, op, x: Helper().of(x)),
    "in a global dict": lambda: Takes(lambda b, op, x: HELPERS["of"](x)),
}


@pytest.mark.filterwarnings("ignore:nothing in .* computes in bfloat16")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", CODE)
def test_a_global_may_change_wherever_the_code_is_that_reads_it(kind, nested):
    nets, _ = pair(CODE[kind], "bfloat16", nested)
    for value in (1.0, 0.5, 2.0):
        set_factor(None, value)
        assert_alike(nets)
    set_factor(None, 1.0)


def test_what_python_itself_has_in_its_modules_is_not_compared_in_each_call():
    noted = []
    Reachable([], lambda owner, name: noted.append((owner, name))).reach(inspect.signature, inspect.Signature)
    assert [name for owner, name in noted if isinstance(owner, dict)] == []
    reads = Reads()
    reads.note({"signature": inspect.signature(set_factor)}, "signature")
    assert reads.hold()
    assert sum(1 for _ in reads._places._values()) < 50
