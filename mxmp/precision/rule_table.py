"""Which precision each operator of MXNet 1.9.1 is safe in: data, one row for operators with the same reason.

A rule says what is *safe*; ``decide.py`` turns rules into a dtype per node, and refuses an operator without a row.
"""

from __future__ import annotations

from typing import Any, Iterator, Mapping

from .rule import Kind, Need, Role, Rule, When

# Sources: "Mixed Precision Training" (Micikevicius et al., ICLR 2018) for the division into matrix, pointwise and
# reducing operators; NVIDIA's mixed-precision guide and ``mxnet.contrib.amp``'s operator lists; issues of apache/mxnet,
# by number. "Measured" means on MXNet 1.9.1's CPU build.

# MXNet 1.9.1 registers kernels of these for float32 and float64 only.
LINEAR_ALGEBRA = """
    _linalg_gemm _linalg_gemm2 _linalg_syrk _linalg_trmm _linalg_trsm _linalg_potrf _linalg_potri _linalg_gelqf
    _linalg_syevd _linalg_det _linalg_slogdet _linalg_inverse _linalg_sumlogdiag _linalg_extractdiag
    _linalg_makediag _linalg_extracttrian _linalg_maketrian _npi_cholesky _npi_svd _npi_eig _npi_eigh
    _npi_eigvals _npi_eigvalsh _npi_solve _npi_pinv _npi_pinv_scalar_rcond _npi_tensorinv _npi_tensorsolve"""

# Operators that return dense arrays whatever the storage of their inputs is; many others keep it.
RETURN_DENSE = """
    FullyConnected Embedding take sum mean norm _square_sum Activation Dropout Reshape Flatten transpose softmax
    log_softmax broadcast_add broadcast_sub"""
# Operators whose first output has as many channels as their first input.
KEEP_CHANNELS = "Activation BatchNorm Dropout LeakyReLU Pooling clip elemwise_add relu"

_DISTANCE, _SMALL, _EXACT = Need.DISTANCE, Need.SMALL, Need.EXACT
# What values stay, where an operator moves, scales, adds, multiplies or selects them.
_SIZES = _SMALL | _EXACT
_MOVED = _SIZES | _DISTANCE
_SATURATES = (
    "its values are bounded, and its slope is at most about 1; near its limit rounding takes the distance to it"
)


def _rows(kind: Kind, reasons: Mapping[str, str], **more: Any) -> Iterator[Rule]:
    """Yield a rule for each reason, with the operators that it stands for; ``more`` is so of all."""
    return (Rule(kind, reason, operators, **more) for reason, operators in reasons.items())


TABLE: tuple[Rule, ...] = (
    # -- Convolutions and matrix products -------------------------------------------------------------
    Rule(
        Kind.LOW,
        "it is a matrix product: Tensor Cores and oneDNN multiply low-precision inputs and accumulate in FP32 (Mixed "
        "Precision Training, ICLR 2018, 3.3)",
        "Convolution Deconvolution FullyConnected",
        weights=(1, 2),
        makes=Need.CANCELS,
        passes=_SIZES,
        role=Role.MATRIX,
    ),
    Rule(
        Kind.LOW,
        "it is a matrix product: Tensor Cores and oneDNN multiply low-precision inputs and accumulate in FP32 (Mixed "
        "Precision Training, ICLR 2018, 3.3)",
        "dot batch_dot _np_dot _npi_matmul _npi_tensordot _npi_tensordot_int_axes",
        makes=Need.CANCELS,
        passes=_SIZES,
        role=Role.MATRIX,
    ),
    Rule(
        Kind.LOW,
        "it is a matrix product of attention: batched Tensor Core products accumulate in FP32",
        """_contrib_interleaved_matmul_selfatt_qk _contrib_interleaved_matmul_selfatt_valatt
        _contrib_interleaved_matmul_encdec_qk _contrib_interleaved_matmul_encdec_valatt""",
        makes=Need.CANCELS,
        role=Role.MATRIX,
    ),
    Rule(
        Kind.LOW,
        "it consists of matrix products, which cuDNN accumulates in FP32; MXNet never requests Tensor Cores "
        "(src/operator/rnn-inl.h); an LSTM's lengths are never cast",
        "RNN",
        keep=(4,),
        weights=(1,),
        draws=True,
        share=0.0,
    ),
    # -- Pointwise, range near the input's ------------------------------------------------------------
    Rule(
        Kind.FOLLOW,
        "its values are bounded by its input or by 1, and its slope is bounded",
        "Activation",
        exact_with=("act_type", "relu"),
        passes=_MOVED,
        when=(
            When("act_type", ("softrelu",), Kind.FULL, "softrelu is log(1 + exp(x)), and the exponential needs FP32"),
            When("act_type", ("sigmoid",), Kind.FOLLOW, _SATURATES, makes=_DISTANCE | _SMALL),
            When("act_type", ("tanh", "softsign"), Kind.FOLLOW, _SATURATES, makes=_DISTANCE),
        ),
    ),
    Rule(
        Kind.FOLLOW,
        "its values are near its input or bounded by it, and gelu's float16 kernel computes in FP32 inside (measured)",
        "LeakyReLU",
        params=(1,),
        passes=_MOVED,
        when=(
            When(
                "act_type",
                ("elu", "selu"),
                Kind.FULL,
                "elu and selu are multiples of exp(x) - 1 below zero, and the exponential needs FP32",
            ),
            When("act_type", ("rrelu",), Kind.FOLLOW, "below zero its slope is random", draws=True),
        ),
    ),
    Rule(
        Kind.FOLLOW,
        _SATURATES,
        "sigmoid _npx_sigmoid",
        makes=_DISTANCE | _SMALL,
    ),
    Rule(
        Kind.FOLLOW,
        _SATURATES,
        "tanh _npi_tanh softsign erf arctan _npi_arctan",
        makes=_DISTANCE,
    ),
    Rule(
        Kind.FOLLOW,
        "its values grow slowly, and its slope is at most 1",
        "arcsinh _npi_arcsinh",
        passes=_DISTANCE,
    ),
    Rule(
        Kind.FOLLOW,
        "it is a straight line that is cut off below 0 and above 1",
        "hard_sigmoid",
        scalars=("alpha", "beta"),
        makes=_DISTANCE,
    ),
    Rule(
        Kind.FOLLOW,
        # That sum is about as good as one rounding, up to 300,000 terms (tests/simgpu).
        "the sum of two activations stays near their range (ICLR 2018, 3.3); the gradient of a broadcast input is a "
        "compensated float16 sum",
        "broadcast_add _npi_add broadcast_sub _npi_subtract",
        passes=_SIZES,
        role=Role.SUM,
    ),
    Rule(
        Kind.FOLLOW,
        "the sum of activations stays near their range (ICLR 2018, 3.3)",
        "elemwise_add _grad_add elemwise_sub add_n",
        passes=_SIZES,
        role=Role.SUM,
    ),
    Rule(
        Kind.FOLLOW,
        "it gives a value the sign of another, so its size stays",
        "_npi_copysign",
    ),
    Rule(
        Kind.FOLLOW,
        "it multiplies by a constant; it stays in FP32 where float16 cannot hold the constant, such as 9e-8",
        """_mul_scalar _npi_multiply_scalar _div_scalar _npi_true_divide_scalar _npi_copysign_scalar
        _npi_rcopysign_scalar _contrib_gradientmultiplier""",
        scalars=("scalar",),
        passes=_MOVED,
        role=Role.SCALE,
    ),
    Rule(
        Kind.FOLLOW,
        "it adds a constant; it stays in FP32 where float16 cannot hold that, such as a mask's -1e18, or where it is "
        "above 4, and the input would lose digits",
        "_plus_scalar _npi_add_scalar _minus_scalar _npi_subtract_scalar _rminus_scalar _npi_rsubtract_scalar",
        scalars=("scalar",),
        limits=("scalar",),
        offsets=("scalar",),
        passes=_MOVED,
    ),
    Rule(
        Kind.FOLLOW,
        "it limits by a constant; it stays in FP32 where float16 cannot hold the constant",
        "_maximum_scalar _minimum_scalar",
        scalars=("scalar",),
        limits=("scalar",),
        passes=_MOVED,
    ),
    Rule(
        Kind.FOLLOW,
        "it limits its input; it stays in FP32 where float16 would lose a limit, such as 1e-12 before a logarithm",
        "clip",
        scalars=("a_min", "a_max"),
        limits=("a_min", "a_max"),
        passes=_MOVED,
    ),
    Rule(
        Kind.FOLLOW,
        "it sets random values to zero and multiplies the others by 1/(1-p)",
        "Dropout",
        passes=_MOVED,
        draws=True,
        share=0.5,
    ),
    # -- Pointwise, range or slope far from the input's -----------------------------------------------
    Rule(
        Kind.FULL,
        "squares leave float16's range soon: 256 squared is infinity, and 1e-4 squared is zero (NVIDIA's FP32 list)",
        "square _npi_square",
        passes=_EXACT,
        role=Role.SQUARE,
    ),
    Rule(
        Kind.FULL,
        "powers leave float16's range soon: 256 squared is infinity, and 1e-4 squared is zero (NVIDIA's FP32 list)",
        "_power_scalar _npi_power_scalar",
        makes=_SMALL,
        passes=_EXACT,
        role=Role.SQUARE,
    ),
    Rule(
        Kind.FULL,
        "powers leave float16's range soon: 256 squared is infinity, and 1e-4 squared is zero (NVIDIA's FP32 list)",
        """_power _npi_power broadcast_power _rpower_scalar _npi_rpower_scalar _contrib_quadratic _npi_polyval
        _hypot _npi_hypot broadcast_hypot _hypot_scalar""",
        makes=_SMALL,
        passes=_EXACT,
    ),
    Rule(
        Kind.FULL,
        "a denominator that underflows in float16 gives infinity, and the gradient divides by a higher power of it",
        "elemwise_div broadcast_div _npi_true_divide _scatter_elemwise_div",
        passes=_SIZES,
        needs=_SMALL,
        needs_of=(1,),
    ),
    # -- Shape only -----------------------------------------------------------------------------------
    Rule(
        Kind.FOLLOW,
        "it repeats values to the shape of a second input; the gradient of a value is the sum over its copies, in "
        "float16 with compensation",
        "broadcast_like",
        keep=(1,),
        passes=_MOVED,
    ),
    Rule(
        Kind.FOLLOW,
        "it pads with a constant or with copies of values, whose gradients are summed; copies of an edge stay in FP32",
        "Pad _npi_pad",
        scalars=("constant_value",),
        passes=_MOVED,
    ),
    Rule(
        Kind.FOLLOW,
        "it overwrites a part of a tensor with a constant",
        "_slice_assign_scalar",
        scalars=("scalar",),
        passes=_MOVED,
    ),
    # -- Selection by index, length or condition ------------------------------------------------------
    Rule(
        Kind.FOLLOW,
        "it selects values by index, and indices are never cast; the gradient of a value that is selected twice is a "
        "sum",
        "take batch_take pick gather_nd scatter_nd _contrib_index_copy _npi_delete",
        keep=(1,),
        passes=_MOVED,
        needs=_EXACT,
        needs_of=(1,),
        shrinks=True,
    ),
    Rule(
        Kind.FULL,
        "the gradients of an index that occurs often stop growing in float16 (4096 ones sum to 2048), so the weight "
        "has FP32 gradients (#17703)",
        "Embedding",
        keep=(0,),
        needs=_EXACT,
        needs_of=(0,),
    ),
    Rule(
        Kind.FOLLOW,
        "it selects one of two values; the condition is never cast",
        "where",
        keep=(0,),
        exact=True,
        passes=_MOVED,
    ),
    Rule(
        Kind.FOLLOW,
        "it selects one of two values, with broadcasting; the condition is never cast",
        "_npi_where",
        keep=(0,),
        passes=_SIZES,
    ),
    Rule(
        Kind.FOLLOW,
        "it selects a value or a constant; the condition is never cast",
        "_npi_where_lscalar _npi_where_rscalar",
        keep=(0,),
        scalars=("scalar",),
        passes=_MOVED,
    ),
    Rule(
        Kind.FOLLOW,
        "it overwrites the values beyond each length with a constant; lengths are never cast",
        "SequenceMask",
        keep=(1,),
        scalars=("value",),
        passes=_MOVED,
    ),
    # -- Reductions -----------------------------------------------------------------------------------
    Rule(
        Kind.FULL,
        "it sums squares, which overflow float16 from values of 256 on (NVIDIA's FP32 list)",
        "norm _npi_norm _square_sum moments _npi_std _npi_var",
        role=Role.SQUARE,
    ),
    Rule(
        Kind.FULL,
        "a product of many values overflows or underflows, and its gradient divides by each of them",
        "prod _np_prod nanprod",
        makes=_SMALL,
        passes=_SIZES,
    ),
    # -- Pooling and resampling -----------------------------------------------------------------------
    Rule(
        Kind.FOLLOW,
        "maxima and averages stay in the range of their window, and cuDNN adds in FP32 (without cuDNN, where windows "
        "overlap, it stays in FP32)",
        "Pooling",
        when=(
            When("pool_type", ("sum",), Kind.FULL, "a sum grows with the window, and such reductions need FP32"),
            When("pool_type", ("lp",), Kind.FULL, "Lp pooling sums powers, which need FP32 as in a norm"),
        ),
        passes=_MOVED,
        shrinks=True,
    ),
    Rule(
        Kind.FOLLOW,
        "it copies the nearest value; the gradient of a value is the sum over its copies",
        "UpSampling",
        when=(
            When("sample_type", ("bilinear",), Kind.FULL, "bilinear upsampling is computed by a legacy deconvolution"),
        ),
        passes=_MOVED,
    ),
    # -- Normalisation --------------------------------------------------------------------------------
    Rule(
        Kind.NORM,
        "its batch statistics are computed in FP32 (ICLR 2018, 3.3); kernels take low-precision data beside FP32 "
        "gamma and beta",
        "BatchNorm _contrib_BatchNormWithReLU CuDNNBatchNorm",
        keep=(1, 2, 3, 4),
        keep_outputs=(1, 2),
        normalized=True,
    ),
    Rule(
        Kind.FULL,
        "the mean and variance of large groups need FP32, and its kernel takes gamma and beta only in the dtype of "
        "the data",
        "LayerNorm",
        normalized=True,
        sums_safely=True,
    ),
    # -- Softmax, losses, heads -----------------------------------------------------------------------
    Rule(
        Kind.FULL,
        "its exponentials and their sum need FP32, and small probabilities would underflow (NVIDIA's FP32 list)",
        "softmax",
        keep=(1,),
        normalized=True,
        sums_safely=True,
        reads_either=True,
        makes=_DISTANCE | _SMALL,
    ),
    Rule(
        Kind.FULL,
        "it is a loss that sums logarithms of probabilities; labels are never cast",
        "softmax_cross_entropy",
        keep=(1,),
    ),
    Rule(
        Kind.FULL,
        "it sums products of probabilities over all alignments, as logarithms; labels and lengths are never cast",
        "CTCLoss",
        keep=(1, 2, 3),
    ),
    Rule(
        Kind.FULL,
        "it is a log-likelihood of event times, with exponentials and long sums; marks and lengths are never cast",
        "_contrib_hawkesll",
        keep=(5, 6),
    ),
    # SoftmaxOutput(out_grad=True) too: in 1.9.1 its gradient operator does not receive the gradient of its output.
    Rule(
        Kind.HEAD,
        "it is a loss head: it makes its gradient from the label and ignores the gradient of its output (measured)",
        "SoftmaxOutput SVMOutput LinearRegressionOutput LogisticRegressionOutput MAERegressionOutput",
        keep=(1,),
    ),
    Rule(
        Kind.HEAD,
        "it makes its input a loss: its gradient is a constant and ignores the gradient of its output (measured)",
        "MakeLoss make_loss",
    ),
    # -- Creation, casts, plumbing --------------------------------------------------------------------
    Rule(
        Kind.ALONE,
        "it is a cast in the user's graph, with the dtype that the user chose",
        "Cast amp_cast amp_multicast",
        passes=_MOVED,
    ),
    # -- Several with the same properties --------------------------------------------------------------
    *_rows(
        Kind.FULL,
        {
            "it adds or multiplies many values in the dtype of its data, without an FP32 accumulator": """
                Correlation _npi_einsum khatri_rao col2im""",
            "it multiplies by 57, so 1144 radians already overflow float16": "degrees _npi_degrees",
            "it sums many values, and a float16 sum stops growing when a term is below 1/2048 of it (ICLR "
            "2018, 3.3)": "sum _np_sum nansum mean _npi_mean _npi_average _np_trace _np_cumsum",
        },
        passes=_SIZES,
    ),
    *_rows(
        Kind.FOLLOW,
        {
            "it copies patches; its gradient sums at most one value per position of the kernel": "im2col",
            "it divides by a constant of modest size": "_contrib_div_sqrt_dim radians _npi_radians",
            "it repeats values; the gradient of a value is the sum over its copies, in float16 with compensation": """
                broadcast_to _npi_broadcast_to broadcast_axis tile repeat""",
            "it interpolates between neighbours, with weights that are computed in FP32": "_contrib_BilinearResize2D",
        },
        passes=_MOVED,
    ),
    *_rows(
        Kind.FOLLOW,
        {
            "the product of two activations stays near their range (ICLR 2018, 3.3); the gradient of a broadcast "
            "input is a compensated float16 sum": "broadcast_mul _npi_multiply",
            "the product of two activations stays near their range (ICLR 2018, 3.3)": "elemwise_mul",
        },
        makes=_SMALL,
        passes=_SIZES,
        role=Role.TIMES,
    ),
    *_rows(
        Kind.FOLLOW,
        {
            "it selects one of two values; the gradient of a broadcast input is a compensated float16 sum": """
                broadcast_maximum broadcast_minimum""",
            "the difference of two neighbours stays near their range": "_npi_diff _npi_ediff1d",
            "it passes its first input on unchanged, with the attributes of the second": "_identity_with_attr_like_rhs",
            "it overwrites a part of one tensor with another": "_slice_assign",
        },
        passes=_SIZES,
    ),
    *_rows(
        Kind.FULL,
        {
            "exponentials are infinity in float16 above x = 11.1 and zero below x = -17.3 (NVIDIA's FP32 list)": """
                exp _npi_exp expm1 _npi_expm1 cosh _npi_cosh sinh _npi_sinh _npi_ldexp _npi_ldexp_scalar
                _npi_rldexp_scalar""",
            "its exponentials and their sum need FP32 (NVIDIA's FP32 list)": "log_softmax softmin SoftmaxActivation",
        },
        makes=_SMALL,
    ),
    *_rows(
        Kind.FULL,
        {
            "an argument that underflows in float16 has the logarithm -inf, and the gradient 1/x overflows (NVIDIA's "
            "FP32 list)": "log _npi_log log10 _npi_log10 log1p _npi_log1p log2 _npi_log2",
            "a denominator that underflows in float16 gives infinity, and the gradient divides by a higher power of "
            "it": "_rdiv_scalar _npi_rtrue_divide_scalar reciprocal _npi_reciprocal rsqrt rcbrt",
            "the slope of a root is unbounded at zero, and its argument is mostly a sum of squares, which "
            "needs FP32": "sqrt _npi_sqrt cbrt _npi_cbrt",
            "float16 underflow turns two small numbers into 0 and 0, and their angle is lost": """
                _npi_arctan2 _npi_arctan2_scalar _npi_rarctan2_scalar""",
        },
        needs=_SMALL,
    ),
    *_rows(
        Kind.FULL,
        {
            "its slope is unbounded where a right angle is near": "tan _npi_tan",
            "float16 rounds an angle of about 100 to a multiple of 1/16, which shifts the phase": """
                sin _npi_sin cos _npi_cos""",
            "it jumps: a rounded input can be on the other side of a jump, which changes the result by its full "
            "height": """
                floor _npi_floor ceil _npi_ceil round _npi_around rint _npi_rint fix _npi_fix trunc _npi_trunc sign
                _npi_sign _contrib_round_ste _contrib_sign_ste _mod _npi_mod broadcast_mod _mod_scalar
                _npi_mod_scalar _rmod_scalar _npi_rmod_scalar""",
        },
        needs=_EXACT,
    ),
    *_rows(
        Kind.FOLLOW,
        {
            "its output has the shape of a second input, whose values are not read": "slice_like reshape_like",
            "it selects or reverses values along the sequence by length; lengths are never cast": """
                SequenceLast SequenceReverse""",
        },
        keep=(1,),
        exact=True,
        passes=_MOVED,
    ),
    *_rows(
        Kind.FOLLOW,
        {
            "it selects the largest or smallest value; the gradient goes to where that was": "max _np_max min _np_min",
            "an average stays in the range of its window": "_contrib_AdaptiveAvgPooling2D",
        },
        passes=_MOVED,
        shrinks=True,
    ),
    *_rows(
        Kind.FULL,
        {
            "its batch statistics need FP32, and its kernel reads FP32 data only (float16 raises 'data type do not "
            "match')": "_contrib_SyncBatchNorm BatchNorm_v1",
            "the mean and variance of large groups need FP32, and its kernel takes gamma and beta only in the dtype "
            "of the data": "GroupNorm InstanceNorm",
            "it sums squares over channels or rows and divides by the root (mxnet.contrib.amp's FP32 list)": """
                L2Normalization LRN""",
        },
        normalized=True,
    ),
    *_rows(
        Kind.ALONE,
        {
            "it compares values: rounding makes unequal values equal, and its output is a mask": """
                _equal _npi_equal broadcast_equal _equal_scalar _npi_equal_scalar _not_equal _npi_not_equal
                broadcast_not_equal _not_equal_scalar _npi_not_equal_scalar _greater _npi_greater broadcast_greater
                _greater_scalar _npi_greater_scalar _greater_equal _npi_greater_equal broadcast_greater_equal
                _greater_equal_scalar _npi_greater_equal_scalar _lesser _npi_less broadcast_lesser _lesser_scalar
                _npi_less_scalar _lesser_equal _npi_less_equal broadcast_lesser_equal _lesser_equal_scalar
                _npi_less_equal_scalar _contrib_allclose""",
            "it ranks values: rounding makes ties, and float16 holds indices only up to 2048": """
                argmax argmax_channel _npi_argmax argmin _npi_argmin argsort topk sort _npi_unique""",
        },
        needs=_EXACT,
    ),
    *_rows(
        Kind.ALONE,
        {
            "it returns sizes or positions, which float16 holds exactly only up to 2048": """
                shape_array size_array _contrib_arange_like""",
            "it creates a tensor in the dtype that the graph asks for": """
                _zeros _ones _full _arange _linspace _eye _zeros_without_dtype _set_value _npi_zeros _npi_ones
                _npi_arange _npi_eye _npi_identity _npi_indices _npi_logspace _npi_full_like _npi_blackman
                _npi_hamming _npi_hanning""",
        },
        makes=_EXACT,
    ),
    *_rows(
        Kind.ALONE,
        {
            "it draws random numbers, and another dtype would draw other numbers": """
                _random_uniform _random_normal _random_gamma _random_exponential _random_poisson
                _random_negative_binomial _random_generalized_negative_binomial _random_randint _random_uniform_like
                _random_normal_like _random_gamma_like _random_exponential_like _random_poisson_like
                _random_negative_binomial_like _random_generalized_negative_binomial_like _sample_uniform
                _sample_normal _sample_gamma _sample_exponential _sample_poisson _sample_negative_binomial
                _sample_generalized_negative_binomial _sample_multinomial _sample_unique_zipfian _shuffle
                _npi_bernoulli _npi_choice _npi_exponential _npi_gamma _npi_gumbel _npi_logistic _npi_multinomial
                _npi_normal _npi_normal_n _npi_pareto _npi_powerd _npi_rayleigh _npi_uniform _npi_uniform_n
                _npi_weibull""",
            "it draws vertices of a sparse graph, by their numbers": """
                _contrib_dgl_csr_neighbor_non_uniform_sample _contrib_dgl_csr_neighbor_uniform_sample""",
            "it changes images at random in the data pipeline, mostly 8-bit integers": """
                _image_random_brightness _image_random_color_jitter _image_random_contrast
                _image_random_flip_left_right _image_random_flip_top_bottom _image_random_hue _image_random_lighting
                _image_random_saturation""",
        },
        draws=True,
    ),
    # They compute nothing: each output value is an input value.
    *_rows(
        Kind.FOLLOW,
        {
            "it returns its input or zero, so it rounds nothing": "relu _npx_relu",
            "it changes the sign only, so it rounds nothing": "abs _npi_absolute negative _npi_negative",
            "it selects one of two values, so it rounds nothing": "_maximum _minimum",
            "it rearranges values and computes nothing": """
                Reshape _np_reshape _npx_reshape Flatten expand_dims squeeze _np_squeeze transpose _np_transpose
                SwapAxis _np_moveaxis depth_to_space space_to_depth reverse _npi_flip _npi_rot90 _np_roll
                _np_atleast_1d _np_atleast_2d _np_atleast_3d""",
            "it joins tensors and computes nothing": """
                Concat _npi_concatenate stack _npi_stack _npi_vstack _npi_hstack _npi_dstack _npi_column_stack
                _rnn_param_concat""",
            "it cuts a part out of its input; the gradient is padded with zeros": """
                slice slice_axis SliceChannel _split_v2 _npi_hsplit _npi_dsplit Crop _np_diag diag _np_diagonal
                _np_diagflat _npi_tril""",
            "it passes its input on unchanged": "_copy _np_copy _copyto _CrossDeviceCopy BlockGrad",
            "its output is 0 or 1, which every dtype holds exactly": "zeros_like ones_like",
        },
        exact=True,
        passes=_MOVED,
    ),
    # They compute in FP32, whatever they read and whoever reads them.
    *_rows(
        Kind.FULL,
        {
            "it is a legacy convolution that never uses Tensor Cores; mxnet.contrib.amp keeps it in FP32 too": """
                Convolution_v1""",
            "it samples at learned offsets, which need more than 11 bits, and adds gradients atomically in the dtype "
            "of its data": "_contrib_DeformableConvolution _contrib_ModulatedDeformableConvolution",
            "it is linear algebra, for which MXNet registers float32 and float64 kernels only": LINEAR_ALGEBRA,
            "it sums a whole row for each output value, and such sums leave float16's range": """
                _contrib_fft _contrib_ifft _contrib_count_sketch""",
            "its slope is unbounded near the edge of its domain, which amplifies rounding (mxnet.contrib.amp's FP32 "
            "list)": "arcsin _npi_arcsin arccos _npi_arccos arccosh _npi_arccosh arctanh _npi_arctanh erfinv",
            "the gamma function overflows float16 above x = 9.2, and its logarithm is a difference of large "
            "numbers": "gamma gammaln",
            "it replaces infinities, and so would hide a float16 overflow from the loss scaler": "_npi_nan_to_num",
            "it interpolates between sorted values, and float16 may round neighbours to the same number": """
                _npi_percentile""",
            "it is a legacy kernel that sums the window in the dtype of its data": "Pooling_v1",
            "it samples at coordinates, which float16 rounds to about 1/20 pixel at a width of 224": """
                BilinearSampler GridGenerator SpatialTransformer""",
            "it is a loss that squares small differences, which underflow in float16": "smooth_l1",
            "it adds an unscaled gradient of its own, which float16 would lose and a scaled gradient would "
            "outweigh": "IdentityAttachKLSparseReg",
            "regions of interest are pixel coordinates, beyond float16's 11 bits, and its kernel wants them in the "
            "dtype of the data": """
                ROIPooling _contrib_ROIAlign _contrib_RROIAlign _contrib_PSROIPooling
                _contrib_DeformablePSROIPooling""",
            "boxes and anchors need more than float16's 11 bits, and overlaps are computed from areas, which are "
            "products": """
                _contrib_MultiBoxPrior _contrib_MultiBoxTarget _contrib_MultiBoxDetection _contrib_Proposal
                _contrib_MultiProposal _contrib_box_iou _contrib_box_nms _contrib_box_encode _contrib_box_decode
                _contrib_mrcnn_mask_target""",
            "it is a probability density, of exponentials, powers and gamma functions": """
                _random_pdf_uniform _random_pdf_normal _random_pdf_gamma _random_pdf_exponential _random_pdf_poisson
                _random_pdf_negative_binomial _random_pdf_generalized_negative_binomial _random_pdf_dirichlet""",
        },
    ),
    # They compute in the dtypes of the FP32 graph: on indices, masks or integers, or outside networks.
    *_rows(
        Kind.ALONE,
        {
            "it matches by sorted score, and rounding would change the order": "_contrib_bipartite_matching",
            "it is logic on masks, in which a value that underflows to 0 would turn false": """
                _logical_and broadcast_logical_and _logical_and_scalar _logical_or broadcast_logical_or
                _logical_or_scalar _logical_xor broadcast_logical_xor _logical_xor_scalar logical_not
                _npi_logical_not _np_all _np_any""",
            "it tests for infinity and NaN, and a cast to float16 would make infinities": """
                _npi_isfinite _npi_isinf _npi_isnan _npi_isneginf _npi_isposinf _npx_constraint_check""",
            "it computes with integers, which float16 holds exactly only up to 2048": """
                _npi_bitwise_and _npi_bitwise_and_scalar _npi_bitwise_or _npi_bitwise_or_scalar _npi_bitwise_xor
                _npi_bitwise_xor_scalar _npi_bitwise_not _npi_lcm _npi_lcm_scalar""",
            "it reads or returns indices, which float16 holds exactly only up to 2048": """
                one_hot _onehot_encode _ravel_multi_index _unravel_index _contrib_index_array _npx_nonzero
                _npi_diag_indices_from _scatter_set_nd fill_element_0index _npi_insert_scalar _npi_insert_slice
                _npi_insert_tensor""",
            "it selects by a mask, and how many values it returns depends on the mask": """
                _contrib_boolean_mask _npi_boolean_mask_assign_scalar _npi_boolean_mask_assign_tensor""",
            "it selects one of two constants; its input is a condition": "_npi_where_scalar2",
            "it counts values in bins, and rounding moves values across the edges of bins": "_histogram _npi_bincount",
            "it tests whether two tensors share memory, and a cast would copy one of them": "_npi_share_memory",
            "it runs user code, which is written for FP32": "Custom _CustomFunction _NDArray _Native",
            "it is part of MXNet's own machinery and never a node of a user's graph": """
                _CachedOp _CachedOpThreadSafe _NoGradient _FusedOp _FusedOpHelper _FusedOpOutHelper""",
            "it is control flow: states keep their dtype between iterations, and its bodies have decisions of their "
            "own": "_foreach _while_loop _cond",
            "it works on sparse storage, for which MXNet's float16 kernels fail, on the CPU asynchronously": """
                cast_storage _sparse_retain _contrib_getnnz _scatter_plus_scalar _scatter_minus_scalar
                _contrib_SparseEmbedding""",
            "it works on the numbers of vertices and edges of a sparse graph": """
                _contrib_edge_id _contrib_dgl_adjacency _contrib_dgl_graph_compact _contrib_dgl_subgraph""",
            "it is an optimizer's kernel: the trainer chooses its precision, with FP32 master weights (ICLR 2018, "
            "3.1)": """
                sgd_update sgd_mom_update mp_sgd_update mp_sgd_mom_update multi_sgd_update multi_sgd_mom_update
                multi_mp_sgd_update multi_mp_sgd_mom_update preloaded_multi_sgd_update
                preloaded_multi_sgd_mom_update preloaded_multi_mp_sgd_update preloaded_multi_mp_sgd_mom_update
                nag_mom_update mp_nag_mom_update signsgd_update signum_update adam_update _adamw_update
                _mp_adamw_update _multi_adamw_update _multi_mp_adamw_update ftml_update ftrl_update rmsprop_update
                rmspropalex_update _sparse_adagrad_update _contrib_group_adagrad_update lamb_update_phase1
                lamb_update_phase2 mp_lamb_update_phase1 mp_lamb_update_phase2 _multi_lamb_update
                _multi_mp_lamb_update multi_lars""",
            "it checks, measures or clears gradients between training steps": """
                all_finite multi_all_finite multi_sum_sq reset_arrays""",
            "it prepares images in the data pipeline, mostly 8-bit integers": """
                _image_adjust_lighting _image_crop _image_flip_left_right _image_flip_top_bottom _image_normalize
                _image_resize _image_to_tensor _imdecode _cvimdecode _cvimread _cvimresize _cvcopyMakeBorder""",
            "it is part of 8-bit quantization, which has a precision of its own, with FP32 ranges": """
                _contrib_quantize _contrib_quantize_v2 _contrib_quantize_asym _contrib_dequantize
                _contrib_requantize _contrib_calibrate_entropy _contrib_quantized_act _contrib_quantized_batch_norm
                _contrib_quantized_concat _contrib_quantized_conv _contrib_quantized_elemwise_add
                _contrib_quantized_elemwise_mul _contrib_quantized_embedding _contrib_quantized_flatten
                _contrib_quantized_fully_connected _contrib_quantized_pooling _contrib_quantized_rnn""",
            "it is a fused oneDNN operator, which MXNet makes for inference in FP32 or 8 bits": """
                _sg_mkldnn_conv _sg_mkldnn_fully_connected _sg_mkldnn_selfatt_qk _sg_mkldnn_selfatt_valatt""",
        },
    ),
)

# The rule of every operator with "backward" in its name.
BACKWARD = Rule(Kind.ALONE, "autograd makes it from its forward operator, whose precision it has")

# Operators with which no network can be trained with loss scaling, and why.
REFUSED = {
    "IdentityAttachKLSparseReg": "it adds its own gradient, which no loss scale reaches; add the penalty to the loss"
}

# Operators that only MXNet's CUDA build registers.
CUDA_BUILD_ONLY = frozenset(
    ["CuDNNBatchNorm", "_FusedOp", "_FusedOpHelper", "_FusedOpOutHelper", "_contrib_mrcnn_mask_target"]
)
