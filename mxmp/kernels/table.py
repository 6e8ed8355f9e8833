"""The table of workarounds: what is wrong in the kernels, where, and the rewrite that makes it right.

They are applied from top to bottom. ``MXMP_WITHOUT=name,name`` in the environment leaves rows out, which shows faults.
"""

from __future__ import annotations

from . import cuda, emulation, layouts, norms, padding, rounding, unwritten
from .workaround import Workaround

__all__ = ["WORKAROUNDS"]

_BFLOAT16 = ("bfloat16",)
_FLOAT16 = ("float16",)
_ALL = ("float32", "bfloat16", "float16")
_TESTS = "tests/kernels"

WORKAROUNDS: tuple[Workaround, ...] = (
    # -- bfloat16 -----------------------------------------------------------------------------------
    Workaround(
        name="amp_cast",
        dtypes=_BFLOAT16,
        effect="wrong",
        fault="Cast to bfloat16 truncates instead of rounding, which is a bias; and it is slower than oneDNN's cast",
        source="MXNet 1.9.1, 3rdparty/mshadow/mshadow/bfloat.h: the constructor drops the lower 16 bits",
        test=f"{_TESTS}/test_fit.py::test_bfloat16_casts_are_amp_casts",
        where=rounding.inserted_casts,
        rewrite=rounding.into_amp_casts,
    ),
    Workaround(
        name="rounding_operators",
        dtypes=_BFLOAT16,
        effect="wrong",
        fault="sigmoid, tanh and elemwise_sub truncate their bfloat16 results",
        source="MXNet 1.9.1, mshadow's bfloat16 arithmetic (mshadow/bfloat.h); oneDNN's kernels round",
        test=f"{_TESTS}/test_fit.py::test_bfloat16_computes_truncating_operators_by_ones_that_round",
        where=rounding.truncating_operators,
        rewrite=rounding.into_rounding_operators,
    ),
    Workaround(
        name="clip_by_bounds",
        dtypes=_BFLOAT16,
        effect="slow",
        fault="clip in FP32 (ReLU6) branches for every element",
        source="MXNet 1.9.1, src/operator/tensor/matrix_op-inl.h: struct clip",
        test=f"{_TESTS}/test_fit.py::test_clip_is_computed_in_two_and_is_its_own_again",
        where=rounding.slow_clips,
        rewrite=rounding.into_bounds,
    ),
    Workaround(
        name="split_casts",
        dtypes=_BFLOAT16,
        effect="wrong",
        fault="the gradients of a tensor's readers are summed in its dtype: 1,000 equal ones in bfloat16 stop at 256",
        source="MXNet 1.9.1, src/executor/graph_executor.cc: AggregateGradient",
        test=f"{_TESTS}/test_fit.py::test_bfloat16_sums_the_gradients_of_a_shared_weight_in_fp32",
        where=rounding.shared_casts,
        rewrite=rounding.split_shared_casts,
    ),
    Workaround(
        name="plain_grouped_weights",
        dtypes=_BFLOAT16,
        effect="fails",
        fault="FP32 inference leaves a grouped weight in a blocked layout, from which there is no reorder to bfloat16",
        source='oneDNN 2.4: "could not create a primitive descriptor for a reorder primitive"',
        test=f"{_TESTS}/test_fit.py::test_bfloat16_runs_grouped_convolutions_after_inference_in_fp32",
        where=layouts.grouped_low_weights,
        rewrite=layouts.copied_weights,
    ),
    Workaround(
        name="small_channel_blocks",
        dtypes=_BFLOAT16,
        effect="slow",
        fault="a convolution with 4, 8, 12... channels a group works in blocks of 4 or 8 channels, for which BatchNorm "
        "before and after it has a reference kernel only",
        source="oneDNN 2.4, src/cpu/ref_batch_normalization.cpp; figures: scripts/dev.py bench layouts",
        test=f"{_TESTS}/test_layouts.py::test_which_convolutions_keep_their_layout_to_themselves",
        where=layouts.small_block_convolutions,
        rewrite=layouts.copied_outputs,
    ),
    Workaround(
        name="unused_taps",
        dtypes=_BFLOAT16,
        effect="wrong",
        fault="the weight gradient of taps that read padding alone is not written: NaN among what was in memory",
        source="oneDNN 2.4, src/cpu/x64/jit_avx512_core_bf16_conv_kernel.cpp; a 5x5 kernel padded by 2 on a 1x1 input",
        test=f"{_TESTS}/test_padding.py::test_nothing_reads_memory_that_was_never_written",
        where=padding.unused_taps,
        rewrite=padding.select_used_taps,
    ),
    Workaround(
        name="copies_before_casts",
        dtypes=_BFLOAT16,
        effect="wrong",
        fault='the backward of amp_cast ignores grad_req="add" and leaves the gradient as it was',
        source="MXNet 1.9.1, src/operator/tensor/amp_cast.cc",
        test=f"{_TESTS}/test_fit.py::test_bfloat16_loses_no_gradient_of_a_tensor_that_many_read",
        where=rounding.losing_casts,
        rewrite=rounding.copy_before_casts,
    ),
    Workaround(
        name="reshaped_volumes",
        dtypes=_BFLOAT16,
        effect="fails",
        fault="a bfloat16 reshape after a 3-D convolution has no reorder from its blocked layout",
        source='oneDNN 2.4: "could not create a primitive descriptor for a reorder primitive"',
        test=f"{_TESTS}/test_cpu_kernels.py::test_a_3d_convolution_and_a_reshape",
        where=layouts.reshaped_volumes,
        rewrite=layouts.plain_inputs,
    ),
    Workaround(
        name="reshaped_gradients",
        dtypes=_BFLOAT16,
        effect="fails",
        fault="the backward of a bfloat16 reshape from five axes to four has no reorder from the blocked layout of a "
        "convolution's gradient",
        source='oneDNN 2.4: "could not create a primitive descriptor for a reorder primitive"',
        test=f"{_TESTS}/test_layouts.py::test_a_reshape_to_four_axes_before_a_convolution_trains",
        where=layouts.reshapes_before_convolutions,
        rewrite=layouts.copied_reshapes,
    ),
    # -- float16, emulated --------------------------------------------------------------------------
    Workaround(
        name="norms_as_in_kernels",
        dtypes=_FLOAT16,
        effect="wrong",
        fault="a GPU's BatchNorm rounds its output for every reader and its gradient before that is summed; casts that "
        "an operator in FP32 shares with it do not",
        source="our own emulation; src/operator/nn/cudnn/cudnn_batch_norm-inl.h of MXNet 1.9.1",
        test=f"{_TESTS}/test_norms.py::test_readers_in_fp32_get_what_a_gpus_kernel_rounds",
        where=norms.sharing_casts,
        rewrite=norms.as_in_kernels,
    ),
    Workaround(
        name="emulated_float16",
        dtypes=_FLOAT16,
        effect="fails",
        fault="MXNet has no float16 matrix kernels on a CPU; each operator is computed as a Tensor Core does",
        source="MXNet 1.9.1, src/operator/nn/convolution.cc and others; NVIDIA, Volta architecture whitepaper (2017)",
        test=f"{_TESTS}/test_emulation.py::test_followers_round_their_own_output",
        where=emulation.low_nodes,
        rewrite=emulation.round_every_node,
    ),
    Workaround(
        name="deconvolution_in_float64",
        dtypes=_FLOAT16,
        effect="fails",
        fault="the backward of an FP32 Deconvolution whose weight is computed, as by a cast, fails",
        source='oneDNN 2.4: "could not execute a primitive"',
        test=f"{_TESTS}/test_emulation.py::test_matrix_operators_equal_numpy_with_one_rounding_forward_and_backward",
        where=emulation.failing_deconvolutions,
        rewrite=emulation.in_float64,
    ),
    Workaround(
        name="maxima_of_padding",
        dtypes=_FLOAT16,
        effect="wrong",
        fault="the maximum of a window in padding alone is FP32's lowest value: -inf in float16, NaN after a product",
        source="MXNet 1.9.1, src/operator/nn/pool.h: the maximum starts from MinValue of the dtype",
        test=f"{_TESTS}/test_emulation.py::test_a_pooling_window_wholly_in_padding_gives_the_lowest_float16_and_no_nan",
        where=emulation.maxima_of_padding,
        rewrite=emulation.not_below_lowest,
    ),
    Workaround(
        name="needless_roundings",
        dtypes=_FLOAT16,
        effect="slow",
        fault="two casts around an operator that only selects values change nothing",
        source="our own emulation",
        test=f"{_TESTS}/test_emulation.py::test_the_shortcut_of_exact_operators_changes_no_bit",
        where=emulation.selecting_nodes,
        rewrite=emulation.skip_needless_roundings,
    ),
    Workaround(
        name="unblocked_norms",
        dtypes=_FLOAT16,
        effect="slow",
        fault="casts leave the plain layout, in which BatchNorm is five times slower than in blocks of channels",
        source="oneDNN 2.4, src/cpu/ref_batch_normalization.cpp",
        test=f"{_TESTS}/test_layouts.py::test_a_batch_norm_after_a_rounded_convolution_reads_blocks_of_channels",
        where=layouts.unblocked_norms,
        rewrite=layouts.blocked_inputs,
    ),
    # -- plain FP32 has these too -------------------------------------------------------------------
    Workaround(
        name="padded_volumes",
        dtypes=_ALL,
        effect="wrong",
        fault="taps along the depth (in bfloat16 rows too) are counted as if padding at both ends never met: the "
        "weight gradient of a 3-D convolution with small inputs reads beyond them",
        source="oneDNN 2.4, src/cpu/x64/jit_avx512_core_bf16_conv_kernel.cpp: compute_od_loop_common, "
        "compute_oh_loop_common",
        test=f"{_TESTS}/test_padding.py::test_3d_convolutions_are_padded_apart_only_where_padding_is_not_small_beside_the_input",
        where=padding.padded_volumes,
        rewrite=padding.pad_apart,
    ),
    Workaround(
        name="volume_norms",
        dtypes=_ALL,
        effect="fails",
        fault="the backward of BatchNorm takes no blocked 3-D layout, of its input or of its gradient",
        source='MXNet 1.9.1, src/operator/nn/mkldnn/mkldnn_batch_norm-inl.h: "Check failed: !is_view"',
        test=f"{_TESTS}/test_layouts.py::test_batch_norm_behind_a_volume_trains",
        where=layouts.volume_norms,
        rewrite=layouts.copies_around,
    ),
    Workaround(
        name="unassigned_regions",
        dtypes=_ALL,
        effect="wrong",
        fault="for region n of batch -1, which belongs to another level of a feature pyramid, ROIAlign writes one zero "
        "over value n of the whole output, and leaves the region itself unwritten",
        source="MXNet 1.9.1, src/operator/contrib/roi_align.cc: top_data[n] = 0",
        test=f"{_TESTS}/test_cpu_kernels.py::test_nothing_reads_memory_that_was_never_written",
        where=unwritten.regions_of_interest,
        rewrite=unwritten.zero_unassigned_regions,
    ),
    Workaround(
        name="untrained_weights",
        dtypes=_ALL,
        effect="wrong",
        fault="the gradient of a bias is not written where that of the weight is not requested (a frozen weight); "
        "attention's products have the like",
        source="MXNet 1.9.1, src/operator/nn/mkldnn/mkldnn_fully_connected.cc",
        test=f"{_TESTS}/test_cpu_kernels.py::test_nothing_reads_memory_that_was_never_written",
        where=unwritten.untrained_weights,
        rewrite=unwritten.request_both_gradients,
    ),
    # -- on a GPU -----------------------------------------------------------------------------------
    Workaround(
        name="fp32_inside_the_kernel",
        dtypes=_FLOAT16,
        effect="slow",
        fault="casts around a BatchNorm do a second time what its kernel does: cuDNN reads float16, sums and "
        "normalizes in FP32 with FP32 parameters, and rounds once. They cost five times the launches and FP32 copies",
        source="cuDNN, cudnnBatchNormalizationForwardTraining: FP32 parameters beside half tensors; MXNet 1.9.1, "
        "src/operator/nn/cudnn/cudnn_batch_norm-inl.h: dtype_param_",
        test=f"{_TESTS}/test_cuda.py::test_the_casts_around_a_norm_are_inside_its_kernel_on_a_gpu",
        where=norms.between_casts,
        rewrite=norms.into_kernels,
        device="gpu",
    ),
    Workaround(
        name="global_averages",
        dtypes=_FLOAT16,
        effect="wrong",
        fault="AdaptiveAvgPooling2D, of squeeze-and-excitation for one, sums a window in float16",
        source="MXNet 1.9.1, src/operator/contrib/adaptive_avg_pooling.cu: T sum",
        test=f"{_TESTS}/test_cuda.py::test_an_adaptive_average_of_everything_is_cudnns_on_a_gpu",
        where=cuda.global_averages,
        rewrite=cuda.into_global_poolings,
        device="gpu",
    ),
    Workaround(
        name="norms_with_relu",
        dtypes=_ALL,
        effect="fails",
        fault="BatchNormWithReLU has no kernel for a GPU, of any dtype: the process ends",
        source="MXNet 1.9.1, src/operator/contrib/batch_norm_relu.cc: FCompute<cpu> alone",
        test=f"{_TESTS}/test_cuda.py::test_batch_norm_with_relu_is_two_operators_on_a_gpu",
        where=cuda.norms_with_relu,
        rewrite=cuda.into_norm_and_relu,
        device="gpu",
    ),
    Workaround(
        name="fused_slices",
        dtypes=_FLOAT16,
        effect="fails",
        fault="fused with a cast, the code of a slice of one axis does not compile; that of one with fewer axes than "
        "its input has takes the others to end at 0, and reads the wrong elements",
        source="MXNet 1.9.1, src/operator/fusion/fused_op.cu; load_slice in fused_op-inl.h",
        test=f"{_TESTS}/test_cuda.py::test_a_step_keeps_a_slice_out_of_the_fusion_on_a_gpu",
        where=cuda.fused_slices,
        rewrite=cuda.with_steps,
        device="gpu",
    ),
)
