import mxnet as mx
from checks import gpu_graph as check_gpu_graph
from gluoncv.model_zoo import get_model


def test_a_gpus_graph_is_native_float16_throughout_and_infers_its_types():
    found = check_gpu_graph.check(get_model("squeezenet1.1")(mx.sym.var("data")))
    assert found == {"matrix": 26, "native": 26, "casts": 2, "emulated": 0}
