"""Which precision each MXNet operator is safe in: data, one row for operators with the same reason.

The table has all operators of MXNet 1.9.1. A rule says what is *safe*; ``decide.py`` turns rules into a dtype per node.

Sources: "Mixed Precision Training" (Micikevicius et al., ICLR 2018) for the division into matrix,
pointwise and reducing operators; NVIDIA's mixed-precision guide and ``mxnet.contrib.amp``'s operator
lists; issues of apache/mxnet, by number. "Measured" means on MXNet 1.9.1's CPU build.

Symbol JSON holds canonical names only; aliases have the rows of their canonical operators.
"""

from __future__ import annotations

from .rule import Kind, Rule, When

__all__ = ["BACKWARD", "CUDA_BUILD_ONLY", "REFUSED", "TABLE"]

TABLE: tuple[Rule, ...] = (
    # -- Convolutions and matrix products -------------------------------------------------------------
    Rule(
        Kind.LOW,
        "a matrix product: Tensor Cores and oneDNN multiply low-precision inputs and accumulate in FP32 "
        "(Mixed Precision Training, ICLR 2018, 3.3)",
        """Convolution _npx_convolution Deconvolution _npx_deconvolution
        FullyConnected _npx_fully_connected _sparse_FullyConnected
        dot _sparse_dot batch_dot _npx_batch_dot _np_dot _npi_matmul _npi_tensordot _npi_tensordot_int_axes""",
    ),
    Rule(
        Kind.LOW,
        "attention's matrix product: batched Tensor Core products with FP32 accumulation",
        """_contrib_interleaved_matmul_selfatt_qk _contrib_interleaved_matmul_selfatt_valatt
        _contrib_interleaved_matmul_encdec_qk _contrib_interleaved_matmul_encdec_valatt""",
    ),
    Rule(
        Kind.LOW,
        "recurrent matrix products: cuDNN accumulates in FP32; MXNet never requests Tensor Cores "
        "(src/operator/rnn-inl.h); an LSTM's lengths stay FP32",
        "RNN _npx_rnn",
        keep=(4,),
    ),
    Rule(
        Kind.FULL,
        "legacy convolution without Tensor Core path; mxnet.contrib.amp keeps it in FP32 too",
        "Convolution_v1",
    ),
    Rule(
        Kind.FULL,
        "samples at learned offsets, which need more than 11 bits, and adds gradients atomically in data's dtype",
        "_contrib_DeformableConvolution _contrib_ModulatedDeformableConvolution",
    ),
    Rule(
        Kind.FULL,
        "sums products of whole patches in data's dtype, without an FP32 accumulator",
        "Correlation _npi_einsum khatri_rao col2im",
    ),
    Rule(
        Kind.FOLLOW,
        "copies patches; its gradient sums at most one value per kernel position",
        "im2col",
    ),
    Rule(
        Kind.FULL,
        "linear algebra: MXNet registers float32 and float64 kernels only",
        """_linalg_gemm linalg_gemm _linalg_gemm2 linalg_gemm2 _linalg_syrk linalg_syrk _linalg_trmm linalg_trmm
        _linalg_trsm linalg_trsm _linalg_potrf linalg_potrf _linalg_potri linalg_potri _linalg_gelqf linalg_gelqf
        _linalg_syevd _linalg_det linalg_det _npi_det _linalg_slogdet linalg_slogdet _npi_slogdet
        _linalg_inverse linalg_inverse _npi_inv _linalg_sumlogdiag linalg_sumlogdiag
        _linalg_extractdiag linalg_extractdiag _linalg_makediag linalg_makediag
        _linalg_extracttrian linalg_extracttrian _linalg_maketrian linalg_maketrian
        _npi_cholesky _npi_svd _npi_eig _npi_eigh _npi_eigvals _npi_eigvalsh _npi_solve _npi_pinv
        _npi_pinv_scalar_rcond _npi_tensorinv _npi_tensorsolve""",
    ),
    Rule(
        Kind.FULL,
        "sums a whole row per output value: a Fourier transform or sketch leaves float16's range",
        "_contrib_fft _contrib_ifft _contrib_count_sketch",
    ),
    # -- Pointwise, range near the input's ------------------------------------------------------------
    Rule(
        Kind.FOLLOW,
        "selects its input or zero, so it rounds nothing",
        "relu _sparse_relu _npx_relu",
        exact=True,
    ),
    Rule(
        Kind.FOLLOW,
        "changes the sign only, so it rounds nothing",
        "abs _sparse_abs _npi_absolute _npi_abs negative _sparse_negative _npi_negative",
        exact=True,
    ),
    Rule(
        Kind.FOLLOW,
        "bounded by its input or by 1, with a bounded slope",
        "Activation _npx_activation",
        when=(When("act_type", ("softrelu",), Kind.FULL, "softrelu is log(1 + exp(x)): the exponential needs FP32"),),
    ),
    Rule(
        Kind.FOLLOW,
        "near its input or bounded by it; gelu's float16 kernel computes in FP32 inside (measured)",
        "LeakyReLU _npx_leaky_relu",
        params=(1,),
        when=(When("act_type", ("elu", "selu"), Kind.FULL, "elu and selu are exp(x) - 1 below zero"),),
    ),
    Rule(
        Kind.FOLLOW,
        "bounded, with a slope of at most about 1",
        """sigmoid _sparse_sigmoid _npx_sigmoid tanh _sparse_tanh _npi_tanh softsign erf _npx_erf
        arctan _sparse_arctan _npi_arctan arcsinh _sparse_arcsinh _npi_arcsinh""",
    ),
    Rule(
        Kind.FOLLOW,
        "a line clipped to 0..1",
        "hard_sigmoid",
        scalars=("alpha", "beta"),
    ),
    Rule(
        Kind.FOLLOW,
        "a sum or product of two activations stays near their range (ICLR 2018, 3.3); the gradient of a "
        "broadcast input is a sum, rounded once (measured)",
        """broadcast_add broadcast_plus _sparse_broadcast_add _sparse_broadcast_plus _npi_add
        broadcast_sub broadcast_minus _sparse_broadcast_sub _sparse_broadcast_minus _npi_subtract
        broadcast_mul _sparse_broadcast_mul _npi_multiply
        broadcast_maximum _npi_maximum broadcast_minimum _npi_minimum""",
    ),
    Rule(
        Kind.FOLLOW,
        "a sum or product of two activations stays near their range (ICLR 2018, 3.3)",
        """elemwise_add _Plus _plus _add _sparse_elemwise_add _grad_add
        elemwise_sub _Minus _minus _sub _sparse_elemwise_sub elemwise_mul _Mul _mul _sparse_elemwise_mul
        add_n ElementWiseSum _sparse_ElementWiseSum _sparse_add_n _npi_copysign _npi_diff _npi_ediff1d""",
    ),
    Rule(
        Kind.FOLLOW,
        "selects one of two values of the same shape",
        "_maximum _Maximum _minimum _Minimum",
        exact=True,
    ),
    Rule(
        Kind.FOLLOW,
        "scales or shifts by a constant; FP32 where the constant leaves float16's range, as -1e18 of masks does",
        """_plus_scalar _PlusScalar _npi_add_scalar _minus_scalar _MinusScalar _npi_subtract_scalar
        _rminus_scalar _RMinusScalar _npi_rsubtract_scalar _mul_scalar _MulScalar _npi_multiply_scalar
        _div_scalar _DivScalar _npi_true_divide_scalar
        _maximum_scalar _MaximumScalar _npi_maximum_scalar _minimum_scalar _MinimumScalar _npi_minimum_scalar
        _npi_copysign_scalar _npi_rcopysign_scalar _contrib_gradientmultiplier""",
        scalars=("scalar",),
    ),
    Rule(
        Kind.FOLLOW,
        "bounds its input; FP32 where float16 would lose a bound, such as 1e-12 before a logarithm",
        "clip _sparse_clip _npi_clip",
        scalars=("a_min", "a_max"),
    ),
    Rule(
        Kind.FOLLOW,
        "divides by a constant of modest size",
        "_contrib_div_sqrt_dim radians _sparse_radians _npi_radians",
    ),
    Rule(
        Kind.FOLLOW,
        "zeroes values at random and scales the rest by 1/(1-p)",
        "Dropout _npx_dropout",
    ),
    # -- Pointwise, range or slope far from the input's -----------------------------------------------
    Rule(
        Kind.FULL,
        "exponentials reach infinity in float16 at x = 11 and zero at x = -17 (NVIDIA's FP32 list)",
        """exp _sparse_exp _npi_exp expm1 _sparse_expm1 _npi_expm1 cosh _sparse_cosh _npi_cosh
        sinh _sparse_sinh _npi_sinh _npi_ldexp _npi_ldexp_scalar _npi_rldexp_scalar""",
    ),
    Rule(
        Kind.FULL,
        "logarithms amplify the rounding of small arguments, and log(0) is -inf (NVIDIA's FP32 list)",
        """log _sparse_log _npi_log log10 _sparse_log10 _npi_log10 log1p _sparse_log1p _npi_log1p
        log2 _sparse_log2 _npi_log2""",
    ),
    Rule(
        Kind.FULL,
        "powers overflow float16 from 256 squared on and underflow below 2e-4 squared (NVIDIA's FP32 list)",
        """square _sparse_square _npi_square _power _Power _npi_power broadcast_power _power_scalar _PowerScalar
        _npi_power_scalar _rpower_scalar _RPowerScalar _npi_rpower_scalar _contrib_quadratic _npi_polyval
        _hypot _Hypot _npi_hypot broadcast_hypot _hypot_scalar _HypotScalar _npi_hypot_scalar""",
    ),
    Rule(
        Kind.FULL,
        "a denominator that underflows in float16 gives infinity, and the gradient divides by its square",
        """elemwise_div _Div _div _sparse_elemwise_div broadcast_div _sparse_broadcast_div _npi_true_divide
        _scatter_elemwise_div _rdiv_scalar _RDivScalar _npi_rtrue_divide_scalar reciprocal _npi_reciprocal
        rsqrt _sparse_rsqrt rcbrt""",
    ),
    Rule(
        Kind.FULL,
        "the slope of a root is unbounded at zero, and roots mostly end a sum of squares that needs FP32",
        "sqrt _sparse_sqrt _npi_sqrt cbrt _sparse_cbrt _npi_cbrt",
    ),
    Rule(
        Kind.FULL,
        "an unbounded slope near the edge of the domain amplifies rounding (mxnet.contrib.amp's FP32 list)",
        """arcsin _sparse_arcsin _npi_arcsin arccos _sparse_arccos _npi_arccos
        arccosh _sparse_arccosh _npi_arccosh arctanh _sparse_arctanh _npi_arctanh
        tan _sparse_tan _npi_tan erfinv _npx_erfinv""",
    ),
    Rule(
        Kind.FULL,
        "float16 rounds an angle of 100 to 1/16, and the phase is lost",
        "sin _sparse_sin _npi_sin cos _sparse_cos _npi_cos",
    ),
    Rule(
        Kind.FULL,
        "a ratio of its inputs, which float16 underflow makes 0/0",
        "_npi_arctan2 _npi_arctan2_scalar _npi_rarctan2_scalar",
    ),
    Rule(
        Kind.FULL,
        "multiplies by 57, so 1144 radians already overflow float16",
        "degrees _sparse_degrees _npi_degrees",
    ),
    Rule(
        Kind.FULL,
        "the gamma function overflows float16 at x = 9.2; its logarithm differences large numbers",
        "gamma _sparse_gamma _npx_gamma gammaln _sparse_gammaln _npx_gammaln",
    ),
    Rule(
        Kind.FULL,
        "a step function: rounding its input first moves values across a step, by 1 or more",
        """floor _sparse_floor _npi_floor ceil _sparse_ceil _npi_ceil round _sparse_round _npi_around
        rint _sparse_rint _npi_rint fix _sparse_fix _npi_fix trunc _sparse_trunc _npi_trunc
        sign _sparse_sign _npi_sign _contrib_round_ste _sparse__contrib_round_ste
        _contrib_sign_ste _sparse__contrib_sign_ste
        _mod _Mod _npi_mod broadcast_mod _mod_scalar _ModScalar _npi_mod_scalar
        _rmod_scalar _RModScalar _npi_rmod_scalar""",
    ),
    Rule(
        Kind.FULL,
        "replaces infinities, and so would hide a float16 overflow from the loss scaler",
        "_npi_nan_to_num",
    ),
    # -- Shape only -----------------------------------------------------------------------------------
    Rule(
        Kind.FOLLOW,
        "moves or renames values without computing",
        """Reshape reshape _np_reshape _npi_reshape _npx_reshape Flatten flatten _npx_batch_flatten
        expand_dims _npi_expand_dims squeeze _np_squeeze transpose _np_transpose
        SwapAxis swapaxes _npi_swapaxes _np_moveaxis depth_to_space space_to_depth
        reverse flip _npi_flip _npi_rot90 _np_roll _np_atleast_1d _np_atleast_2d _np_atleast_3d""",
        exact=True,
    ),
    Rule(
        Kind.FOLLOW,
        "joins tensors without computing",
        """Concat concat _sparse_concat _npi_concatenate stack _npi_stack _npi_vstack _npi_hstack _npi_dstack
        _npi_column_stack _rnn_param_concat _npi_rnn_param_concat""",
        exact=True,
    ),
    Rule(
        Kind.FOLLOW,
        "cuts a part out; the gradient is padded with zeros",
        """slice crop _sparse_slice _npi_slice _npx_slice slice_axis SliceChannel split _split_v2 _npi_split
        _npi_hsplit _npi_dsplit Crop _np_diag diag _np_diagonal _np_diagflat _npi_tril""",
        exact=True,
    ),
    Rule(
        Kind.FOLLOW,
        "shaped like a second input, of which no value is read",
        "slice_like reshape_like _npx_reshape_like",
        keep=(1,),
        exact=True,
    ),
    Rule(
        Kind.FOLLOW,
        "passes values on unchanged",
        """_copy identity _np_copy _copyto _npi_copyto _CrossDeviceCopy
        BlockGrad stop_gradient _sparse_stop_gradient""",
        exact=True,
    ),
    Rule(
        Kind.FOLLOW,
        "passes values on unchanged, with the attributes of a second input",
        "_identity_with_attr_like_rhs",
    ),
    Rule(
        Kind.FOLLOW,
        "0 and 1 are exact in every dtype",
        "zeros_like _sparse_zeros_like ones_like",
        exact=True,
    ),
    Rule(
        Kind.FOLLOW,
        "repeats values; the gradient sums over the copies",
        "broadcast_to _npi_broadcast_to broadcast_axis broadcast_axes tile _npi_tile repeat _np_repeat",
    ),
    Rule(
        Kind.FOLLOW,
        "repeats values to the shape of a second input; the gradient sums over the copies",
        "broadcast_like",
        keep=(1,),
    ),
    Rule(
        Kind.FOLLOW,
        "pads with a constant or copies of the edge, whose gradients are summed",
        "Pad pad _npi_pad",
        scalars=("constant_value",),
    ),
    Rule(
        Kind.FOLLOW,
        "overwrites a part of one tensor with another",
        "_slice_assign _crop_assign _npi_slice_assign",
    ),
    Rule(
        Kind.FOLLOW,
        "overwrites a part of a tensor with a constant",
        "_slice_assign_scalar _crop_assign_scalar _npi_slice_assign_scalar",
        scalars=("scalar",),
    ),
    # -- Selection by index, length or condition ------------------------------------------------------
    Rule(
        Kind.FOLLOW,
        "selects values by index, and indices are never cast; the gradient of repeated indices is a sum",
        "take _npi_take batch_take pick choose_element_0index _npx_pick gather_nd _npi_gather_nd _npx_gather_nd "
        "scatter_nd _contrib_index_copy _npi_delete",
        keep=(1,),
    ),
    Rule(
        Kind.FULL,
        "float16 gradients of repeated indices saturate (4096 duplicates summed to 2048), so the weight keeps "
        "FP32 gradients (#17703)",
        "Embedding _npx_embedding _sparse_Embedding",
        keep=(0,),
    ),
    Rule(
        Kind.FOLLOW,
        "selects one of two values; the condition is never cast",
        "where _sparse_where",
        keep=(0,),
        exact=True,
    ),
    Rule(
        Kind.FOLLOW,
        "selects one of two values, with broadcasting; the condition is never cast",
        "_npi_where",
        keep=(0,),
    ),
    Rule(
        Kind.FOLLOW,
        "selects a value or a constant; the condition is never cast",
        "_npi_where_lscalar _npi_where_rscalar",
        keep=(0,),
        scalars=("scalar",),
    ),
    Rule(
        Kind.FOLLOW,
        "overwrites values beyond each length with a constant; lengths are never cast",
        "SequenceMask _npx_sequence_mask",
        keep=(1,),
        scalars=("value",),
    ),
    Rule(
        Kind.FOLLOW,
        "moves values along the sequence by length; lengths are never cast",
        "SequenceLast SequenceReverse",
        keep=(1,),
        exact=True,
    ),
    # -- Reductions -----------------------------------------------------------------------------------
    Rule(
        Kind.FULL,
        "sums many values: float16 stops growing when a term is below 1/2048 of the sum (ICLR 2018, 3.3)",
        """sum sum_axis _sparse_sum _np_sum nansum mean _sparse_mean _npi_mean _npi_average _np_trace
        _np_cumsum cumsum""",
    ),
    Rule(
        Kind.FULL,
        "sums squares: overflows float16 from values of 256 on (NVIDIA's FP32 list)",
        "norm _sparse_norm _npi_norm _square_sum moments _npi_std _npi_var",
    ),
    Rule(
        Kind.FULL,
        "a product of many values overflows or underflows, and its gradient divides by each of them",
        "prod _np_prod _np_product nanprod",
    ),
    Rule(
        Kind.FOLLOW,
        "selects the extreme value; the gradient goes to where it was",
        "max max_axis _np_max _np_amax min min_axis _np_min _np_amin",
    ),
    Rule(
        Kind.FULL,
        "interpolates between order statistics that float16 rounding would merge",
        "_npi_percentile",
    ),
    # -- Pooling and resampling -----------------------------------------------------------------------
    Rule(
        Kind.FOLLOW,
        "maxima and averages stay in the range of the window, and cuDNN averages in FP32",
        "Pooling _npx_pooling",
        when=(
            When("pool_type", ("sum",), Kind.FULL, "sum pooling grows with the window: a reduction in FP32"),
            When("pool_type", ("lp",), Kind.FULL, "Lp pooling sums powers: FP32 as for norm"),
        ),
    ),
    Rule(
        Kind.FULL,
        "legacy pooling kernel that sums the window in data's dtype",
        "Pooling_v1",
    ),
    Rule(
        Kind.FOLLOW,
        "an average stays in the range of its window",
        "_contrib_AdaptiveAvgPooling2D",
    ),
    Rule(
        Kind.FOLLOW,
        "interpolates between neighbours, with weights computed in FP32",
        "_contrib_BilinearResize2D",
    ),
    Rule(
        Kind.FOLLOW,
        "nearest-neighbour copies; the gradient sums scale x scale values",
        "UpSampling",
        when=(When("sample_type", ("bilinear",), Kind.FULL, "bilinear upsampling is a legacy deconvolution"),),
    ),
    Rule(
        Kind.FULL,
        "sampling coordinates need FP32: at width 224 float16 misplaces them by 1/20 pixel",
        "BilinearSampler GridGenerator SpatialTransformer",
    ),
    # -- Normalisation --------------------------------------------------------------------------------
    Rule(
        Kind.NORM,
        "batch statistics in FP32 (ICLR 2018, 3.3); kernels take low-precision data beside FP32 gamma and beta",
        "BatchNorm _npx_batch_norm _contrib_BatchNormWithReLU CuDNNBatchNorm",
        keep=(1, 2, 3, 4),
        keep_outputs=(1, 2),
        normalized=True,
    ),
    Rule(
        Kind.FULL,
        "batch statistics in FP32, and its kernel reads FP32 data only (float16 raises 'data type do not match')",
        "_contrib_SyncBatchNorm BatchNorm_v1",
        normalized=True,
    ),
    Rule(
        Kind.FULL,
        "mean and variance of large groups need FP32, and the kernel wants gamma and beta in data's dtype",
        "LayerNorm _npx_layer_norm GroupNorm InstanceNorm",
        normalized=True,
    ),
    Rule(
        Kind.FULL,
        "sums squares over channels or rows and divides by the root (mxnet.contrib.amp's FP32 list)",
        "L2Normalization LRN",
        normalized=True,
    ),
    # -- Softmax, losses, heads -----------------------------------------------------------------------
    Rule(
        Kind.FULL,
        "exponentials and their sum need FP32, and small probabilities would underflow (NVIDIA's FP32 list)",
        "softmax _npx_softmax",
        keep=(1,),
        normalized=True,
    ),
    Rule(
        Kind.FULL,
        "exponentials and their sum need FP32 (NVIDIA's FP32 list)",
        "log_softmax _npx_log_softmax softmin SoftmaxActivation",
    ),
    Rule(
        Kind.FULL,
        "a loss sums logarithms of probabilities; labels are never cast",
        "softmax_cross_entropy",
        keep=(1,),
    ),
    Rule(
        Kind.FULL,
        "sums products of probabilities over all alignments in log space; labels and lengths are never cast",
        "CTCLoss ctc_loss _contrib_CTCLoss _contrib_ctc_loss",
        keep=(1, 2, 3),
    ),
    Rule(
        Kind.FULL,
        "a log-likelihood of event times: exponentials and long sums; marks and lengths are never cast",
        "_contrib_hawkesll",
        keep=(5, 6),
    ),
    Rule(
        Kind.FULL,
        "a loss that squares small differences, which underflow in float16",
        "smooth_l1 _npx_smooth_l1",
    ),
    # SoftmaxOutput(out_grad=True) too: the gradient operator of 1.9.1 is not handed the one from above.
    Rule(
        Kind.HEAD,
        "a loss head: its gradient is made from the label and ignores the one from above (measured)",
        """SoftmaxOutput Softmax SVMOutput LinearRegressionOutput _sparse_LinearRegressionOutput
        LogisticRegressionOutput _sparse_LogisticRegressionOutput
        MAERegressionOutput _sparse_MAERegressionOutput""",
        keep=(1,),
    ),
    Rule(
        Kind.HEAD,
        "makes its input a loss: its gradient is a constant and ignores the one from above (measured)",
        "MakeLoss make_loss _sparse_make_loss",
    ),
    Rule(
        Kind.FULL,
        "adds its own, unscaled gradient, which float16 would lose and a scaled one would drown",
        "IdentityAttachKLSparseReg",
    ),
    # -- Detection ------------------------------------------------------------------------------------
    Rule(
        Kind.FULL,
        "rois are pixel coordinates, beyond float16's 11 bits, and the kernel wants them in data's dtype",
        """ROIPooling _npx_roi_pooling _contrib_ROIAlign _contrib_RROIAlign _contrib_PSROIPooling
        _contrib_DeformablePSROIPooling""",
    ),
    Rule(
        Kind.FULL,
        "boxes and anchors need more than float16's 11 bits, and overlap thresholds compare areas (squares)",
        """_contrib_MultiBoxPrior _npx_multibox_prior _contrib_MultiBoxTarget _npx_multibox_target
        _contrib_MultiBoxDetection _npx_multibox_detection _contrib_Proposal _contrib_MultiProposal
        _contrib_box_iou _contrib_box_nms _contrib_box_non_maximum_suppression _contrib_box_encode
        _contrib_box_decode _contrib_mrcnn_mask_target""",
    ),
    Rule(
        Kind.ALONE,
        "matches by sorted score: rounding would change the ranks",
        "_contrib_bipartite_matching",
    ),
    # -- Comparisons, logic, integers, indices --------------------------------------------------------
    Rule(
        Kind.ALONE,
        "a comparison: rounding makes unequal values equal, and its output is a mask",
        """_equal _Equal _npi_equal broadcast_equal _equal_scalar _EqualScalar _npi_equal_scalar
        _not_equal _Not_Equal _npi_not_equal broadcast_not_equal _not_equal_scalar _NotEqualScalar
        _npi_not_equal_scalar _greater _Greater _npi_greater broadcast_greater _greater_scalar _GreaterScalar
        _npi_greater_scalar _greater_equal _Greater_Equal _npi_greater_equal broadcast_greater_equal
        _greater_equal_scalar _GreaterEqualScalar _npi_greater_equal_scalar
        _lesser _Lesser _npi_less broadcast_lesser _lesser_scalar _LesserScalar _npi_less_scalar
        _lesser_equal _Lesser_Equal _npi_less_equal broadcast_lesser_equal
        _lesser_equal_scalar _LesserEqualScalar _npi_less_equal_scalar _contrib_allclose""",
    ),
    Rule(
        Kind.ALONE,
        "logic on masks: what underflows to 0 would turn false",
        """_logical_and _Logical_And broadcast_logical_and _logical_and_scalar _LogicalAndScalar
        _logical_or _Logical_Or broadcast_logical_or _logical_or_scalar _LogicalOrScalar
        _logical_xor _Logical_Xor broadcast_logical_xor _logical_xor_scalar _LogicalXorScalar
        logical_not _npi_logical_not _np_all _np_any _np_sometrue""",
    ),
    Rule(
        Kind.ALONE,
        "tests for infinity and NaN, which a cast to float16 would create",
        "_npi_isfinite _npi_isinf _npi_isnan _npi_isneginf _npi_isposinf _npx_constraint_check",
    ),
    Rule(
        Kind.ALONE,
        "ranks values: rounding makes ties, and its indices exceed float16's 2048",
        "argmax argmax_channel _npi_argmax argmin _npi_argmin argsort _npi_argsort topk _npx_topk sort _npi_sort "
        "_npi_unique",
    ),
    Rule(
        Kind.ALONE,
        "integer arithmetic: float16 holds integers up to 2048 only",
        """_npi_bitwise_and _npi_bitwise_and_scalar _npi_bitwise_or _npi_bitwise_or_scalar _npi_bitwise_xor
        _npi_bitwise_xor_scalar _npi_bitwise_not _npi_lcm _npi_lcm_scalar""",
    ),
    Rule(
        Kind.ALONE,
        "takes or gives indices: float16 holds integers up to 2048 only",
        """one_hot _npx_one_hot _onehot_encode _ravel_multi_index ravel_multi_index _unravel_index unravel_index
        _contrib_index_array _npx_nonzero _npi_nonzero _npi_diag_indices_from _scatter_set_nd _npi_scatter_set_nd
        fill_element_0index _npi_insert_scalar _npi_insert_slice _npi_insert_tensor""",
    ),
    Rule(
        Kind.ALONE,
        "selects by a mask: the number of values depends on it",
        """_contrib_boolean_mask _npi_boolean_mask _npi_boolean_mask_assign_scalar
        _npi_boolean_mask_assign_tensor""",
    ),
    Rule(
        Kind.ALONE,
        "selects between two constants; its input is a condition",
        "_npi_where_scalar2",
    ),
    Rule(
        Kind.ALONE,
        "counts values in bins: rounding moves them across bin edges",
        "_histogram _npi_histogram _npi_bincount",
    ),
    Rule(
        Kind.ALONE,
        "reads a shape, and its integers exceed float16's 2048",
        "shape_array _npx_shape_array size_array _contrib_arange_like _npx_arange_like",
    ),
    # -- Creation, casts, plumbing --------------------------------------------------------------------
    Rule(
        Kind.ALONE,
        "creates a tensor in the dtype that the graph asks for",
        """_zeros _ones _full _npi_full _arange _linspace _npi_linspace _eye _zeros_without_dtype _set_value
        _npi_zeros _npi_ones _npi_arange _npi_eye _npi_identity _npi_indices _npi_logspace _npi_full_like
        _npi_blackman _npi_hamming _npi_hanning""",
    ),
    Rule(
        Kind.ALONE,
        "a cast in the user's graph: its dtype is the user's wish",
        "Cast cast _npi_cast _npx_cast amp_cast amp_multicast",
    ),
    Rule(
        Kind.ALONE,
        "two tensors share memory, so both need one dtype",
        "_npi_share_memory",
    ),
    Rule(
        Kind.ALONE,
        "runs user code, written for FP32",
        "Custom _npi_Custom _CustomFunction _NDArray _Native",
    ),
    Rule(
        Kind.ALONE,
        "part of MXNet's own machinery, never a node of a user's graph",
        "_CachedOp _CachedOpThreadSafe _NoGradient _FusedOp _FusedOpHelper _FusedOpOutHelper",
    ),
    Rule(
        Kind.ALONE,
        "control flow: states keep their dtype between iterations; what its bodies compute in is decided in them",
        "_foreach _while_loop _cond",
    ),
    # -- Random ---------------------------------------------------------------------------------------
    Rule(
        Kind.ALONE,
        "draws random numbers: another dtype draws other numbers",
        """_random_uniform random_uniform uniform _random_normal random_normal normal
        _random_gamma random_gamma _random_exponential random_exponential _random_poisson random_poisson
        _random_negative_binomial random_negative_binomial
        _random_generalized_negative_binomial random_generalized_negative_binomial
        _random_randint random_randint _npi_random_randint
        _random_uniform_like _random_normal_like _random_gamma_like _random_exponential_like _random_poisson_like
        _random_negative_binomial_like _random_generalized_negative_binomial_like
        _sample_uniform sample_uniform _sample_normal sample_normal _sample_gamma sample_gamma
        _sample_exponential sample_exponential _sample_poisson sample_poisson
        _sample_negative_binomial sample_negative_binomial
        _sample_generalized_negative_binomial sample_generalized_negative_binomial
        _sample_multinomial sample_multinomial _sample_unique_zipfian _shuffle shuffle _npi_shuffle
        _npi_bernoulli _npi_choice _npi_exponential _npi_gamma _npi_gumbel _npi_logistic _npi_multinomial
        _npi_normal _npi_normal_n _npi_pareto _npi_powerd _npi_rayleigh _npi_uniform _npi_uniform_n
        _npi_weibull""",
    ),
    Rule(
        Kind.FULL,
        "a probability density: exponentials, powers and gamma functions",
        """_random_pdf_uniform random_pdf_uniform _random_pdf_normal random_pdf_normal
        _random_pdf_gamma random_pdf_gamma _random_pdf_exponential random_pdf_exponential
        _random_pdf_poisson random_pdf_poisson _random_pdf_negative_binomial random_pdf_negative_binomial
        _random_pdf_generalized_negative_binomial random_pdf_generalized_negative_binomial
        _random_pdf_dirichlet random_pdf_dirichlet""",
    ),
    # -- Sparse and graph -----------------------------------------------------------------------------
    Rule(
        Kind.ALONE,
        "sparse storage: MXNet's float16 sparse kernels fail, on the CPU asynchronously",
        """cast_storage _sparse_cast_storage _sparse_retain _contrib_getnnz _scatter_plus_scalar
        _scatter_minus_scalar _contrib_SparseEmbedding""",
    ),
    Rule(
        Kind.ALONE,
        "works on vertex and edge numbers of a sparse graph",
        """_contrib_edge_id _contrib_dgl_adjacency _contrib_dgl_csr_neighbor_non_uniform_sample
        _contrib_dgl_csr_neighbor_uniform_sample _contrib_dgl_graph_compact _contrib_dgl_subgraph""",
    ),
    # -- Optimizer kernels ----------------------------------------------------------------------------
    Rule(
        Kind.ALONE,
        "an optimizer kernel: precision is the trainer's choice, with FP32 masters (ICLR 2018, 3.1)",
        """sgd_update _sparse_sgd_update sgd_mom_update _sparse_sgd_mom_update mp_sgd_update mp_sgd_mom_update
        multi_sgd_update multi_sgd_mom_update multi_mp_sgd_update multi_mp_sgd_mom_update
        preloaded_multi_sgd_update preloaded_multi_sgd_mom_update preloaded_multi_mp_sgd_update
        preloaded_multi_mp_sgd_mom_update nag_mom_update mp_nag_mom_update signsgd_update signum_update
        adam_update _sparse_adam_update _adamw_update _mp_adamw_update _multi_adamw_update _multi_mp_adamw_update
        ftml_update ftrl_update _sparse_ftrl_update rmsprop_update rmspropalex_update
        _sparse_adagrad_update _contrib_group_adagrad_update
        lamb_update_phase1 lamb_update_phase2 mp_lamb_update_phase1 mp_lamb_update_phase2
        _multi_lamb_update _multi_mp_lamb_update multi_lars""",
    ),
    Rule(
        Kind.ALONE,
        "checks, measures or clears gradients between steps",
        "all_finite multi_all_finite multi_sum_sq reset_arrays",
    ),
    # -- Image input ----------------------------------------------------------------------------------
    Rule(
        Kind.ALONE,
        "prepares images in the data pipeline, mostly 8-bit integers",
        """_image_adjust_lighting _image_crop _image_flip_left_right _image_flip_top_bottom _image_normalize
        _image_random_brightness _image_random_color_jitter _image_random_contrast
        _image_random_flip_left_right _image_random_flip_top_bottom _image_random_hue _image_random_lighting
        _image_random_saturation _image_resize _image_to_tensor
        _npx__image_adjust_lighting _npx__image_crop _npx__image_flip_left_right _npx__image_flip_top_bottom
        _npx__image_normalize _npx__image_random_brightness _npx__image_random_color_jitter
        _npx__image_random_contrast _npx__image_random_flip_left_right _npx__image_random_flip_top_bottom
        _npx__image_random_hue _npx__image_random_lighting _npx__image_random_saturation _npx__image_resize
        _npx__image_to_tensor _imdecode _cvimdecode _npi_cvimdecode _cvimread _npi_cvimread
        _cvimresize _npi_cvimresize _cvcopyMakeBorder""",
    ),
    # -- Quantized ------------------------------------------------------------------------------------
    Rule(
        Kind.ALONE,
        "8-bit quantization has its own precision, with FP32 ranges",
        """_contrib_quantize _contrib_quantize_v2 _contrib_quantize_asym _contrib_dequantize _contrib_requantize
        _contrib_calibrate_entropy _contrib_quantized_act _contrib_quantized_batch_norm _contrib_quantized_concat
        _contrib_quantized_conv _contrib_quantized_elemwise_add _contrib_quantized_elemwise_mul
        _contrib_quantized_embedding _contrib_quantized_flatten _contrib_quantized_fully_connected
        _contrib_quantized_pooling _contrib_quantized_rnn""",
    ),
    Rule(
        Kind.ALONE,
        "a fused oneDNN subgraph, made for FP32 or 8-bit inference after all casts are in place",
        "_sg_mkldnn_conv _sg_mkldnn_fully_connected _sg_mkldnn_selfatt_qk _sg_mkldnn_selfatt_valatt",
    ),
)

# Of every operator with "backward" in its name.
BACKWARD = Rule(Kind.ALONE, "autograd makes it from its forward operator, which decides the precision")

# Operators with which no network can be trained with loss scaling, and why.
REFUSED = {
    "IdentityAttachKLSparseReg": "it adds its own gradient, which no loss scale reaches; add the penalty to the loss"
}

# Operators that only MXNet's CUDA build registers.
CUDA_BUILD_ONLY = frozenset(
    ["CuDNNBatchNorm", "_FusedOp", "_FusedOpHelper", "_FusedOpOutHelper", "_contrib_mrcnn_mask_target"]
)
