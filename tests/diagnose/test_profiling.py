"""``profile`` on files made after the published schema."""

from __future__ import annotations

import sqlite3

import pytest

from mxmp.diagnose import profile
from mxmp.diagnose.profiling import is_cast, kind_of_kernel, reads_low_precision

HALF_CAST = (
    "void mshadow::cuda::MapPlanKernel<mshadow::sv::saveto, (int)8, mshadow::expr::Plan<mshadow::Tensor<mshadow::gpu, "
    "(int)1, mshadow::half::half_t>, mshadow::half::half_t>, mshadow::expr::Plan<mshadow::expr::TypecastExp<"
    "mshadow::half::half_t, float, mshadow::Tensor<mshadow::gpu, (int)1, float>, (int)1>, mshadow::half::half_t>>"
)
SCALED = (
    "void mshadow::cuda::MapPlanKernel<mshadow::sv::saveto, (int)8, mshadow::expr::Plan<mshadow::Tensor<mshadow::gpu, "
    "(int)1, float>, float>, mshadow::expr::Plan<mshadow::expr::BinaryMapExp<mshadow::op::mul, "
    "mshadow::expr::TypecastExp<float, mshadow::half::half_t, mshadow::Tensor<mshadow::gpu, 1, float>, 1>>, float>>"
)
DIRECT = "void cudnn::detail::implicit_convolve_sgemm<__half, __half, (int)128, (int)5, (int)5, (int)3>(int)"
BATCH_NORM = "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, (int)512, (bool)1, (int)1>(cudnnTensorStruct)"

# Names as Nsight shows them on V100, T4 and A100.
KERNELS = {
    "volta_h884gemm_64x64_ldg8_nn": ("tensor", True),
    "volta_fp16_s884cudnn_fp16_256x128_ldg8_relu_f2f_exp_small_nhwc_tn_v1": ("tensor", True),
    "turing_h1688cudnn_256x64_ldg8_relu_exp_small_nhwc_tn_v1": ("tensor", True),
    "turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn": ("tensor", True),
    "ampere_fp16_s16816gemm_fp16_64x64_ldg8_f2f_stages_64x5_tn": ("tensor", True),
    "turing_int8_i8816cudnn_int8_128x128_ldg16_relu_small_t1": ("tensor", False),
    "ampere_int8_i16832gemm_int8_256x128_ldg16_stages_64x3_tn": ("tensor", False),
    "void gemm_kernel_hmma<__half>(int)": ("tensor", True),
    "void cutlass_70_tensorop_gemm_64x64(Params)": ("tensor", False),
    "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16_tensor16x8x8_execute": (
        "tensor",
        False,
    ),
    "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x32_execute_kernel__51_cublas": ("tensor", True),
    "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_execute_kernel__5x_cublas": ("matrix", False),
    "sm80_xmma_fprop_implicit_gemm_indexed_f32f32_f32f32_f32_nchwkcrs_nchw_ffma_execute_kernel": ("matrix", False),
    "cutlass_75_simt_sgemm_128x128": ("matrix", False),
    "volta_sgemm_128x64_tn": ("matrix", False),
    "volta_hgemm_128x64_nn": ("matrix", True),
    "volta_fp16_scudnn_fp16_128x64_relu_interior_nn_v1": ("matrix", True),
    DIRECT: ("matrix", True),
    "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(params)": ("matrix", False),
    "void wgrad_alg0_engine<float, (int)512>(int)": ("matrix", False),
    "void RNN_blockPersist_fp_LSTM<__half, float>(params)": ("matrix", True),
    HALF_CAST: ("cast", True),
    SCALED: ("other", True),
    BATCH_NORM: ("other", False),
    "void mxnet::op::mxnet_op::mxnet_generic_kernel<mxnet::op::mxnet_op::op_with_req<mshadow_op::relu>>": (
        "other",
        False,
    ),
    "void SoftmaxedGradKernel<float>(int)": ("other", False),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_by_name(name):
    assert (kind_of_kernel(name), reads_low_precision(name)) == KERNELS[name]


@pytest.mark.parametrize("name", ["amp_cast", "_backward_amp_multicast", "_backward_cast", "Cast"])
def test_operators_that_cast(name):
    assert is_cast(name)


@pytest.mark.parametrize("name", ["Convolution", "BatchNorm", "_backward_broadcast_add", "broadcast_cast", ""])
def test_operators_that_do_not(name):
    assert not is_cast(name)


# -- Nsight Systems ---------------------------------------------------------------------------------

# Columns and types of docs.nvidia.com/nsight-systems, "SQLite Export Schema Reference".
SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
    start INT NOT NULL, end INT NOT NULL, deviceId INT NOT NULL, contextId INT NOT NULL, streamId INT NOT NULL,
    correlationId INT, globalPid INT, demangledName INT NOT NULL, shortName INT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (
    start INT NOT NULL, end INT NOT NULL, eventClass INT NOT NULL, globalTid INT, correlationId INT,
    nameId INT NOT NULL, returnValue INT NOT NULL);
CREATE TABLE NVTX_EVENTS (
    start INT NOT NULL, end INT, eventType INT NOT NULL, rangeId INT, category INT, color INT, text TEXT, globalTid INT,
    endGlobalTid INT, textId INT, domainId INT);
"""
PROCESS = 3 << 24
THREAD, OTHER_THREAD = PROCESS + 7, PROCESS + 8


@pytest.fixture
def export(tmp_path):
    """Kernels (name, us, operator or None), one a launch; the operators' ranges stand in one of the whole step."""

    def make(kernels, schema=SCHEMA):
        path = tmp_path / "report.sqlite"
        database = sqlite3.connect(path)
        database.executescript(schema)
        names = {name: i for i, name in enumerate(dict.fromkeys(name for name, *_ in kernels))}
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", [(i, name) for name, i in names.items()])
        database.execute("INSERT INTO StringIds VALUES (1000, 'Pooling')")
        last = 1000 * len(kernels)
        add = "INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid, textId) VALUES (?, ?, ?, ?, ?, ?)"
        if "NVTX_EVENTS" in schema:
            database.execute(add, (0, last, 59, "step", THREAD, None))
            database.execute(add, (0, last, 59, "another thread", OTHER_THREAD, None))
            database.execute(add, (0, None, 34, "a mark", THREAD, None))
        for number, (name, us, operator) in enumerate(kernels):
            at, late = 1000 * number, 10**6 + 10**6 * number
            if operator:
                by_id = operator == "Pooling"
                text, text_id = (None, 1000) if by_id else (operator, None)
                database.execute(add, (at + 100, at + 300, 60, text, THREAD, text_id))
            if "RUNTIME" in schema:
                database.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, 0, 0)",
                    (at + 200, at + 250, THREAD, number),
                )
            database.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 1, 7, ?, ?, ?, ?)",
                (late, late + us * 1000, number, PROCESS, names[name], names[name]),
            )
        database.commit()
        database.close()
        return str(path)

    return make


STEP = [
    ("volta_fp16_s884cudnn_fp16_256x64_ldg8_nhwc_tn_v1", 50, "Convolution"),
    ("void cudnn::ops::nchwToNhwcKernel<__half>(int)", 10, "Convolution"),
    (DIRECT, 20, "Convolution"),
    (HALF_CAST, 5, "amp_cast"),
    ("void kernel_of_another_name(int)", 3, "_backward_amp_cast"),
    (BATCH_NORM, 8, "BatchNorm"),
    ("volta_hgemm_128x64_nn", 2, "FullyConnected"),
    ("void pool<float>(int)", 1, "Pooling"),
    ("void memset(int)", 1, None),
]


def test_shares_of_the_gpus_time(export):
    found = profile(export(STEP))
    assert found.devices == ("gpu/0",)
    assert found.seconds == pytest.approx(100e-6)
    assert found.share("tensor") == pytest.approx(0.50)
    assert found.share("matrix") == pytest.approx(0.22)
    assert found.share("cast") == pytest.approx(0.08)
    assert found.share("other") == pytest.approx(0.20)
    with pytest.raises(ValueError, match="kind must be one of 'tensor', 'matrix', 'cast', 'other'"):
        found.share("casts")


def test_kernels_are_named_with_their_operators(export):
    found = profile(export([*STEP, *STEP]))
    by_operator = [(kernel.operator, kernel.kind, kernel.calls) for kernel in found.kernels]
    assert by_operator == [
        ("Convolution", "tensor", 2),
        ("Convolution", "matrix", 2),
        ("Convolution", "other", 2),
        ("BatchNorm", "other", 2),
        ("amp_cast", "cast", 2),
        ("_backward_amp_cast", "cast", 2),
        ("FullyConnected", "matrix", 2),
        ("Pooling", "other", 2),
        ("step", "other", 2),
    ]
    assert found.kernels[0].seconds == pytest.approx(100e-6)


def test_low_precision_products_off_the_tensor_cores(export):
    found = profile(export(STEP))
    assert [(kernel.operator, kernel.name) for kernel in found.missed] == [
        ("Convolution", DIRECT),
        ("FullyConnected", "volta_hgemm_128x64_nn"),
    ]
    assert "volta_hgemm_128x64_nn  of FullyConnected" in str(found)


def test_fp32_products_are_not_missed(export):
    assert profile(export([("volta_sgemm_128x64_tn", 4, "FullyConnected")])).missed == ()


def test_without_nvtx_no_operator_is_known(export):
    only = SCHEMA[: SCHEMA.index("CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME")]
    found = profile(export([(name, us, None) for name, us, _ in STEP], only))
    assert {kernel.operator for kernel in found.kernels} == {""}
    assert found.share("cast") == pytest.approx(0.05)  # the one whose name says so


def test_an_older_schema_without_text_ids(export):
    found = profile(export([STEP[0]], SCHEMA.replace("endGlobalTid INT, textId INT", "textId INT")))
    assert found.kernels[0].operator == "Convolution"


def test_an_export_without_kernels_says_how_to_record_them(export, tmp_path):
    path = tmp_path / "empty.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
    for empty in (path, export([])):
        with pytest.raises(ValueError, match=r"holds no kernels .* nsys profile --trace=cuda,nvtx"):
            profile(empty)


def test_another_schema_says_what_is_missing(export, tmp_path):
    path = export([("a_kernel", 1, None)])
    with sqlite3.connect(path) as database:
        database.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL RENAME COLUMN demangledName TO name")
    with pytest.raises(ValueError, match="of another schema: no such column: demangledName"):
        profile(path)


def test_a_damaged_database(export):
    path = export(STEP)
    with open(path, "r+b") as file:
        file.truncate(5000)
    with pytest.raises(ValueError, match="damaged SQLite"):
        profile(path)


# -- Anything else ----------------------------------------------------------------------------------

BAD = {
    "text.txt": b"hello\nworld\n",
    "binary.bin": bytes(range(256)) * 20,
    "empty": b"",
    "report.nsys-rep": b"\x00NSYS",
    "trace.json": b'{"traceEvents": []}',
}


@pytest.mark.parametrize("name", BAD)
def test_unknown_files_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(BAD[name])
    with pytest.raises(ValueError, match=f"{name}' is no SQLite export of Nsight Systems: nsys export --type sqlite"):
        profile(tmp_path / name)


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        profile(tmp_path / "none.sqlite")
