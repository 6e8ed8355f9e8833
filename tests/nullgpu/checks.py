"""What a record of float16 must not hold."""

from __future__ import annotations

import re
from typing import Iterable

from gpu.null.record import Event, Record

HALF = "mshadow::half::half_t"
# MXNet 1.9.1's kernels that add many values up in their own dtype, and the sources that show it.
PLAIN_SUMS = {
    f"AddTakeGradKernel<\\w+, \\d+, {HALF}": "mshadow/cuda/tensor_gpu-inl.cuh: rows are added one by one",
    f"PoolingExp<mshadow::red::sum, .*{HALF}": "mshadow/extension/spatial_pool.h: a window's sum has its dtype",
    f"col2im_gpu_kernel<{HALF}": "operator/nn/im2col.cuh: an element's sum over the windows has its dtype",
    f"backward_gather_nd_gpu,.*{HALF}": "operator/tensor/indexing_op.cu: atomicAdd in its dtype",
    f"adaptiveaverage(pool|gradinput)<{HALF}": "operator/contrib/adaptive_avg_pooling.cu: T sum",
    f"LayerNormFused\\w+<(\\d+, |true, |false, )*{HALF}": "operator/nn/layer_norm.cu: AType is the input's dtype",
    f"softmax\\w*_kernel<(mxnet::[\\w:]+, |\\d+, |true, |false, )+{HALF}": "operator/nn/softmax-inl.h: the same",
    f"caffe_gpu_interp2_kernel_backward<mshadow::gpu, {HALF}": "operator/contrib/bilinear_resize.cu: atomicAdd",
}
# The same with Kahan's compensation (mshadow/base.h, red::sum): as exact as float16 can be, and as small in range.
COMPENSATED_SUMS = (f"reduce_kernel<mshadow::red::sum, \\d+, {HALF}",)
# A step copies running statistics by SGD of size 0, and subtracts float16 arrays from their rounded masters by SGD of
# size 1 after a user has read weights. No test trains weights without momentum and without masters.
COPIES = re.compile(r"MultiSGDKernel<(float|mshadow::half::half_t), false, false>")
OPTIMIZERS = re.compile(r"SGD|Adam|LAMB|Lamb|LARS|NAG|Ftrl|FTML|RMSProp|AdaDelta|Adagrad|Signum|Signsgd|Nadam", re.I)


def wrong_matrix_calls(record: Record) -> list[Event]:
    """Products that are neither float16 with FP32 sums nor FP32 throughout."""
    return [event for event in record.matrix_calls if not _is_right(event)]


def _is_right(event: Event) -> bool:
    return event.details["compute"] == "f32" and event.dtypes in ({"f16"}, {"f32"})


def no_tensor_cores(record: Record) -> list[Event]:
    """Calls of cuDNN in float16 that do not ask for Tensor Cores; cuBLAS 11 takes them by itself."""
    calls = [event for event in record.matrix_calls if event.name.startswith("cudnn") and event.dtypes == {"f16"}]
    return [event for event in calls if event.details["math"] != "TENSOR_OP"]


def plain_float16_sums(record: Record) -> set[str]:
    """The kernels that add many float16 values up in float16, without compensation."""
    return _matching(PLAIN_SUMS, record)


def sums_in_float16(record: Record) -> set[str]:
    """The kernels that add many float16 values up in float16, compensated or not."""
    return _matching([*PLAIN_SUMS, *COMPENSATED_SUMS], record)


def _matching(patterns: Iterable[str], record: Record) -> set[str]:
    return {pattern for pattern in patterns for event in record.launches if re.search(pattern, event.name)}


def updates(record: Record) -> list[Event]:
    """Launches of optimizers."""
    found = [event for event in record.launches if OPTIMIZERS.search(event.name)]
    return [event for event in found if not COPIES.search(event.name)]
