"""The table of workarounds: which kernels are faulty, in which graphs, and the rewrite that avoids them.

The rows are applied from top to bottom. ``MXMP_WITHOUT=name,name`` in the environment leaves some out, to see a fault;
``MXMP_WITH=name,name`` adds optional ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Callable, Sequence

from .. import cpu
from ..precision.casts import LowGraph
from ..precision.graph import Node
from ..versions import NOW
from . import cuda, emulation, layouts, memory, norms, padding, rounding, unwritten


@dataclass(frozen=True)
class Workaround:
    """One entry of the table ``WORKAROUNDS``: a fault in a kernel, and the rewrite of a graph that avoids it."""

    # What explain prints, and MXMP_WITHOUT takes.
    name: str
    # Compute dtypes; "float32" only says that plain FP32 MXNet has the same fault.
    dtypes: tuple[str, ...]
    # "fails", "wrong" or "slow".
    effect: str
    fault: str
    # File, function or issue, with the version of MXNet, oneDNN or cuDNN.
    source: str
    # Rewrites the graph in place, and returns the nodes that the fault concerns.
    rewrite: Callable[[LowGraph], Sequence[Node]]
    # Those that have the fault.
    devices: tuple[str, ...] = ("cpu",)
    # Applied only where ``MXMP_WITH`` names it.
    optional: bool = False
    # Of a fault that not every machine or MXNet has: whether this one has it. ``MXMP_WITH`` applies it anyway.
    here: Callable[[], bool] = lambda: True


_bfloat16, _float16 = partial(Workaround, dtypes=("bfloat16",)), partial(Workaround, dtypes=("float16",))
_any_dtype = partial(Workaround, dtypes=("float32", "bfloat16", "float16"))
_float16_on_gpu = partial(_float16, devices=("gpu",))

WORKAROUNDS: tuple[Workaround, ...] = (
    # -- bfloat16 -----------------------------------------------------------------------------------
    _bfloat16(
        name="amp_cast",
        effect="wrong",
        fault="Cast to bfloat16 truncates instead of rounding to nearest, so that magnitudes shrink; it is also "
        "slower than amp_cast, which oneDNN computes",
        source="MXNet 1.9.1, 3rdparty/mshadow/mshadow/bfloat.h: the constructor drops the lower 16 bits",
        rewrite=rounding.use_amp_cast,
    ),
    _bfloat16(
        name="rounding_operators",
        effect="wrong",
        fault="sigmoid, tanh and elemwise_sub truncate their bfloat16 results instead of rounding to nearest",
        source="MXNet 1.9.1, mshadow's bfloat16 arithmetic (mshadow/bfloat.h); oneDNN's kernels round",
        rewrite=rounding.replace_truncating_operators,
    ),
    _bfloat16(
        name="clip_by_bounds",
        effect="slow",
        fault="the FP32 kernel of clip (ReLU6) branches for every element",
        source="MXNet 1.9.1, src/operator/tensor/matrix_op-inl.h: struct clip",
        rewrite=rounding.clip_by_two_bounds,
    ),
    _bfloat16(
        name="split_casts",
        effect="wrong",
        fault="MXNet sums the gradients of all readers of a tensor in the tensor's dtype: in bfloat16, a sum of 1,000 "
        "gradients of 1 stops at 256",
        source="MXNet 1.9.1, src/executor/graph_executor.cc: AggregateGradient",
        rewrite=rounding.split_shared_casts,
    ),
    _bfloat16(
        name="plain_grouped_weights",
        effect="fails",
        fault="inference in FP32 leaves the weight of a grouped convolution in a blocked layout, from which oneDNN has "
        "no conversion (reorder) to bfloat16",
        source='oneDNN 2.4: "could not create a primitive descriptor for a reorder primitive"',
        rewrite=layouts.copy_weights,
    ),
    _bfloat16(
        name="small_channel_blocks",
        effect="slow",
        fault="the arrays of a convolution with 4, 8, 12, ... channels per group are in blocks of 4 or 8 channels; for "
        "these, oneDNN computes a BatchNorm before or after it by its slow reference kernel",
        source="oneDNN 2.4, src/cpu/ref_batch_normalization.cpp; figures: scripts/dev.py bench layouts",
        rewrite=layouts.copy_around_convolutions,
    ),
    _bfloat16(
        name="unused_taps",
        effect="wrong",
        fault="where a kernel position (tap) of a convolution reads padding alone, its weight gradient is not written, "
        "and holds what was in memory, perhaps NaN",
        source="oneDNN 2.4, src/cpu/x64/jit_avx512_core_bf16_conv_kernel.cpp; a 5x5 kernel padded by 2 on a 1x1 input",
        rewrite=padding.select_used_taps,
    ),
    _bfloat16(
        name="copies_before_casts",
        effect="wrong",
        fault='the backward of amp_cast ignores grad_req="add": it adds nothing to the gradient array',
        source="MXNet 1.9.1, src/operator/tensor/amp_cast.cc",
        rewrite=rounding.copy_before_casts,
    ),
    _bfloat16(
        name="reshaped_volumes",
        effect="fails",
        fault="a bfloat16 reshape after a 3-D convolution fails: oneDNN has no conversion (reorder) from the blocked "
        "layout of the convolution's output",
        source='oneDNN 2.4: "could not create a primitive descriptor for a reorder primitive"',
        rewrite=layouts.copy_inputs,
    ),
    _bfloat16(
        name="reshaped_gradients",
        effect="fails",
        fault="the backward of a bfloat16 reshape from five axes to four fails, and that of a cast in front of an FP32 "
        "reshape: oneDNN has no conversion (reorder) from the blocked layout of the gradient that a convolution behind "
        "it returns",
        source='oneDNN 2.4: "could not create a primitive descriptor for a reorder primitive"',
        rewrite=layouts.copy_reshaped,
    ),
    # -- float16, emulated --------------------------------------------------------------------------
    _float16(
        name="norms_as_in_kernels",
        effect="wrong",
        fault="cuDNN's BatchNorm rounds its output to float16 for every reader, and its gradient before MXNet sums it "
        "with others; on a CPU, casts that BatchNorm shares with an FP32 operator do not",
        source="our own emulation; src/operator/nn/cudnn/cudnn_batch_norm-inl.h of MXNet 1.9.1",
        rewrite=norms.separate_casts,
    ),
    _float16(
        name="emulated_float16",
        effect="fails",
        fault="MXNet has no float16 kernels for matrix operators on a CPU. They are emulated: each operator computes "
        "in FP32 between casts that round as a Tensor Core does",
        source="MXNet 1.9.1, src/operator/nn/convolution.cc and others; NVIDIA, Volta architecture whitepaper (2017)",
        rewrite=emulation.round_every_node,
    ),
    _float16(
        name="deconvolution_in_float64",
        effect="fails",
        fault="the backward of an FP32 Deconvolution fails if its weight is no variable, but computed, as by a cast",
        source='oneDNN 2.4: "could not execute a primitive"',
        rewrite=emulation.compute_in_float64,
    ),
    _float16(
        name="rounded_products",
        effect="wrong",
        fault="a GPU writes the product of a FullyConnected, Convolution or Deconvolution in float16, and a second "
        "kernel adds the bias; an FP32 kernel adds it before anything is rounded",
        source="MXNet 1.9.1, src/operator/nn/fully_connected-inl.h; src/operator/nn/cudnn/cudnn_convolution-inl.h: "
        "cudnnAddTensor; seen on the simulated GPU",
        rewrite=emulation.round_before_biases,
        optional=True,
    ),
    _float16(
        name="rounded_outputs",
        effect="wrong",
        fault="a GPU computes the gradients of tanh and sigmoid from their float16 outputs, so that tanh's is 0 from 5 "
        "on; an FP32 kernel computes them from the outputs before they are rounded",
        source="MXNet 1.9.1, src/operator/tensor/elemwise_unary_op_trig.cc: ElemwiseGradUseOut; cuDNN, "
        "cudnnActivationBackward; seen on the simulated GPU",
        rewrite=emulation.differentiate_rounded_outputs,
        optional=True,
    ),
    _float16(
        name="rounded_constants",
        effect="wrong",
        fault="a GPU's kernel of x * 0.3 and the like rounds the constant to float16; an FP32 kernel does not",
        source="MXNet 1.9.1, src/operator/tensor/elemwise_binary_scalar_op.h: DType(alpha); seen on the simulated GPU",
        rewrite=emulation.round_constants,
    ),
    _float16(
        name="maxima_of_padding",
        effect="wrong",
        fault="max pooling returns FP32's lowest value for a window in padding alone: -inf in float16, NaN after a "
        "product with 0",
        source="MXNet 1.9.1, src/operator/nn/pool.h: the maximum starts from MinValue of the dtype",
        rewrite=emulation.clamp_to_lowest,
    ),
    _float16(
        name="needless_roundings",
        effect="slow",
        fault="two casts around an operator that only selects values, such as relu, change no value but take time",
        source="our own emulation",
        rewrite=emulation.skip_needless_roundings,
    ),
    _float16(
        name="unblocked_norms",
        effect="slow",
        fault="casts of the emulation return arrays in the plain layout, in which BatchNorm is five times slower than "
        "in blocks of channels",
        source="oneDNN 2.4, src/cpu/ref_batch_normalization.cpp",
        rewrite=layouts.block_inputs,
    ),
    # -- plain FP32 has these too -------------------------------------------------------------------
    _any_dtype(
        name="memory_of_loops",
        effect="wrong",
        fault="the thread that calls a graph runs foreach, while_loop and cond by itself, and looks there in which "
        "layout oneDNN keeps their inputs before these are computed. Where the memory of an input held another "
        "tensor, it may read that one: wrong numbers, an error or a crash, in some calls. NNVM_EXEC_MATCH_RANGE=0 in "
        "the environment gives every tensor memory of its own, for the rest of the process; not set where MXNet sees a "
        "GPU",
        source="MXNet 1.9.1, src/imperative/imperative_utils.h: CreateDefaultInputs for kSubgraphExec",
        rewrite=lambda fitted: memory.keep_memory_apart(fitted.graph) if fitted.bodies else [],
    ),
    _any_dtype(
        name="volume_norms",
        effect="fails",
        fault="the backward of BatchNorm fails if its input, or the gradient of its output, has a blocked 3-D layout",
        source='MXNet 1.9.1, src/operator/nn/mkldnn/mkldnn_batch_norm-inl.h: "Check failed: !is_view"',
        rewrite=layouts.copy_around_norms,
        here=lambda: not NOW.trains_norms_of_volumes,
    ),
    _any_dtype(
        name="padded_volumes",
        effect="wrong",
        fault="oneDNN assumes that a 3-D kernel never covers padding at both ends of the depth (in bfloat16: or of the "
        "height) at once. Where it does, around small inputs, the weight gradient reads memory outside the input",
        source="oneDNN 2.4, src/cpu/x64/jit_avx512_core_bf16_conv_kernel.cpp: compute_od_loop_common, "
        "compute_oh_loop_common",
        rewrite=padding.pad_separately,
    ),
    _any_dtype(
        name="unassigned_regions",
        effect="wrong",
        fault="a region with batch index -1 (it belongs to another level of a feature pyramid) gets no output from "
        "ROIAlign: for region n, one zero is written over value n of the whole output, and the region's own output is "
        "left unwritten",
        source="MXNet 1.9.1, src/operator/contrib/roi_align.cc: top_data[n] = 0",
        rewrite=unwritten.zero_unassigned_regions,
    ),
    _any_dtype(
        name="untrained_weights",
        effect="wrong",
        fault="FullyConnected does not write the gradient of its bias if that of its weight is not requested (a frozen "
        "weight). Two matrix products of attention (_contrib_interleaved_matmul_*) have the same fault",
        source="MXNet 1.9.1, src/operator/nn/mkldnn/mkldnn_fully_connected.cc",
        rewrite=unwritten.request_both_gradients,
    ),
    _any_dtype(
        name="shared_gradients",
        effect="wrong",
        fault='with grad_req="add", the gradient array of a variable that elemwise_add reads is also that of the sum: '
        "operators before the sum read what earlier backwards have added there, and a kernel behind it that cannot add "
        "(amp_cast, amp_multicast) leaves both gradients unwritten",
        source="MXNet 1.9.1, src/operator/tensor/elemwise_binary_op_basic.cc: elemwise_add has CloneGradient",
        rewrite=unwritten.copy_summands,
        devices=("cpu", "gpu"),
    ),
    _any_dtype(
        name="overwritten_gradients",
        effect="wrong",
        fault="the backward of clip, mean, reverse, cumsum, linalg_gemm2 and others cannot add to a gradient: it "
        "overwrites what is there, or divides that too. On a GPU those of Activation, Pooling, Dropout, LRN and Pad by "
        'a constant cannot, either. MXNet lets them add to a variable with grad_req="add" and, with static_alloc, to a '
        "tensor with eight or more readers",
        source="MXNet 1.9.1, src/operator/tensor/matrix_op-inl.h: clip_grad; broadcast_reduce_op.h: "
        "ReduceAxesBackwardUseNoneImpl; la_op.h: LaOpBackward; nn/cudnn/cudnn_activation-inl.h; seen on the simulated "
        "GPU",
        rewrite=unwritten.copy_before_kernels_that_cannot_add,
        devices=("cpu", "gpu"),
    ),
    _any_dtype(
        name="slopes_of_prelu",
        effect="wrong",
        fault="in a graph, the backward of PReLU may write the gradient of its input over that of its output, and then "
        "computes the gradient of the slopes from it: the slopes get theirs times themselves (a quarter for 0.25)",
        source="MXNet 1.9.1, src/operator/leaky_relu.cc: FInplaceOption of _backward_LeakyReLU",
        rewrite=unwritten.train_slopes_apart,
        devices=("cpu", "gpu"),
    ),
    _any_dtype(
        name="gradients_of_others",
        effect="wrong",
        fault="the backward of hard_sigmoid writes its result over the gradient that it reads, even if another "
        "operator reads that one next: the gradient of hard_sigmoid(x) + x is 0.4, not 1.2",
        source="MXNet 1.9.1, src/operator/tensor/elemwise_unary_op_basic.cc: FInplaceIdentity of "
        "_backward_hard_sigmoid",
        rewrite=unwritten.keep_gradients_of_others,
        devices=("cpu", "gpu"),
    ),
    # -- bfloat16, emulated: behind the rewrites whose operators it emulates, too ------------------
    _bfloat16(
        name="emulated_bfloat16",
        effect="fails",
        fault="on a CPU without AVX-512, oneDNN has no bfloat16 kernels (of a convolution, a dense layer, an "
        "activation, a pooling, BatchNorm). They are emulated: each computes in FP32 between casts that round",
        source='oneDNN 2.4, src/cpu/x64: avx512_core; "could not create a primitive descriptor iterator"',
        rewrite=emulation.round_onednns_operators,
        here=lambda: not cpu.multiplies_bfloat16(),
    ),
    # -- on a GPU -----------------------------------------------------------------------------------
    _float16_on_gpu(
        name="fp32_inside_the_kernel",
        effect="slow",
        fault="casts around a BatchNorm are needless: cuDNN's kernel itself reads float16, sums and normalizes in FP32 "
        "with FP32 parameters, and rounds once. The casts cost five times the kernel launches, and FP32 copies",
        source="cuDNN, cudnnBatchNormalizationForwardTraining: FP32 parameters beside half tensors; MXNet 1.9.1, "
        "src/operator/nn/cudnn/cudnn_batch_norm-inl.h: dtype_param_",
        rewrite=norms.drop_casts,
    ),
    _float16_on_gpu(
        name="global_averages",
        effect="wrong",
        fault="AdaptiveAvgPooling2D, as in squeeze-and-excitation blocks, sums a window in float16",
        source="MXNet 1.9.1, src/operator/contrib/adaptive_avg_pooling.cu: T sum",
        rewrite=cuda.use_global_pooling,
    ),
    _float16_on_gpu(
        name="sums_of_float16",
        effect="slow",
        fault="sum has no kernel that reads float16 and adds in FP32, so a cast writes an FP32 copy first; that of "
        "MXNet's NumPy interface has one",
        source="MXNet 1.9.1, src/operator/numpy/np_broadcast_reduce_op.h: the parameter dtype",
        rewrite=cuda.sum_float16,
    ),
    _float16_on_gpu(
        name="upsampling_in_steps",
        effect="wrong",
        fault="UpSampling of the nearest value sums the gradients of a value's copies in float16: 64 of them where it "
        "enlarges eightfold, as HRNet does",
        source="MXNet 1.9.1, 3rdparty/mshadow/mshadow/extension/spatial_pool.h",
        rewrite=cuda.double_in_steps,
    ),
    _any_dtype(
        name="norms_with_relu",
        effect="fails",
        fault="BatchNormWithReLU has no GPU kernel for any dtype: the process ends",
        source="MXNet 1.9.1, src/operator/contrib/batch_norm_relu.cc: FCompute<cpu> alone",
        rewrite=cuda.split_norms_with_relu,
        devices=("gpu",),
    ),
    _float16_on_gpu(
        name="fused_slices",
        effect="fails",
        fault="MXNet's pointwise fusion joins a slice and a cast into one generated kernel. For a slice of one axis it "
        "does not compile; for a slice of fewer axes than its input has it reads the wrong elements, as it takes "
        "the other axes to end at 0",
        source="MXNet 1.9.1, src/operator/fusion/fused_op.cu; load_slice in fused_op-inl.h",
        rewrite=cuda.write_steps,
    ),
    _any_dtype(
        name="fused_defaults",
        effect="fails",
        fault="MXNet's pointwise fusion looks act_type of LeakyReLU, and scalar of smooth_l1 in its backward, up among "
        "the parameters that the user has set, and fails if the default is meant (_Map_base::at). In FP32 a smooth_l1 "
        "by itself is not fused; with a cast it is",
        source="MXNet 1.9.1, src/operator/fusion/fused_op.cu; src/executor/pointwise_fusion_pass.cc",
        rewrite=cuda.write_defaults,
        devices=("gpu",),
    ),
    _float16_on_gpu(
        name="fused_rows",
        effect="fails",
        fault="MXNet's pointwise fusion reads and writes two elements at a time where one of its arrays is float16. In "
        "the body of a foreach it does so in rows of arrays, and if a row has an odd number of elements, every second "
        "one begins at an address that a GPU refuses (misaligned address)",
        source="MXNet 1.9.1, src/operator/fusion/fused_op-inl.h: load_index, store_index",
        rewrite=cuda.copy_rows,
    ),
    _float16_on_gpu(
        name="sums_of_gradients",
        effect="slow",
        fault="where five to seven operators read a float16 weight, as in an unrolled cell, MXNet adds its gradients "
        "one by one: a kernel for each, which rounds. Behind a copy of the weight, the pointwise fusion makes it one "
        "kernel, which rounds once; with MXNET_USE_FUSION=0 there is none",
        source="MXNet 1.9.1, src/operator/tensor/elemwise_sum.h; src/executor/graph_executor.cc: AggregateGradient",
        rewrite=cuda.sum_gradients_at_once,
        here=cuda.fuses,
    ),
)
