"""``profile`` on files made after the published schemas, and on what MXNet's profiler writes."""

from __future__ import annotations

import csv
import json
import sqlite3
import subprocess
import sys

import pytest

from mxmp.diagnose import Profile, plot_profile, profile
from mxmp.diagnose.profiling.kernels import kind_of_kernel, kind_of_operator, reads_low

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
    assert (kind_of_kernel(name), reads_low(name)) == KERNELS[name]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Convolution", "matrix"),
        ("_backward_FullyConnected", "matrix"),
        ("_backward_interleaved_matmul_selfatt_qk", "matrix"),
        ("amp_cast", "cast"),
        ("_backward_amp_multicast", "cast"),
        ("_backward_cast", "cast"),
        ("Cast", "cast"),
        ("BatchNorm", "other"),
        ("_backward_broadcast_add", "other"),
    ],
)
def test_operators_by_name(name, kind):
    assert kind_of_operator(name) == kind


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
    assert (found.source, found.devices, found.knows_kernels) == ("Nsight Systems", ("gpu/0",), True)
    assert found.seconds == pytest.approx(100e-6)
    assert found.share("tensor") == pytest.approx(0.50)
    assert found.share("matrix") == pytest.approx(0.22)
    assert found.share("cast") == pytest.approx(0.08)
    assert found.share("other") == pytest.approx(0.20)
    with pytest.raises(ValueError, match="kind must be one of 'tensor', 'matrix', 'cast', 'other', 'bulk'"):
        found.share("casts")


def test_time_by_operator(export):
    found = profile(export([*STEP, *STEP]))
    by_name = {operator.name: operator for operator in found.operators}
    assert list(by_name) == [
        *("Convolution", "BatchNorm", "amp_cast", "_backward_amp_cast", "FullyConnected", "Pooling", "step")
    ]
    convolution = by_name["Convolution"]
    assert convolution.calls == 6
    assert convolution.total == pytest.approx(160e-6)
    assert convolution.seconds["tensor"] == pytest.approx(100e-6)


def test_low_precision_products_off_the_tensor_cores(export):
    found = profile(export(STEP))
    assert [(kernel.operator, kernel.name) for kernel in found.missed] == [
        ("Convolution", DIRECT),
        ("FullyConnected", "volta_hgemm_128x64_nn"),
    ]
    assert "volta_hgemm_128x64_nn  of FullyConnected" in str(found)


def test_fp32_products_are_not_missed(export):
    assert profile(export([("volta_sgemm_128x64_tn", 4, "FullyConnected")])).missed == ()


def test_without_nvtx_time_is_by_kernel(export):
    only = SCHEMA[: SCHEMA.index("CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME")]
    found = profile(export([(name, us, None) for name, us, _ in STEP], only))
    assert found.operators[0].name == STEP[0][0]
    assert found.share("cast") == pytest.approx(0.05)  # the one whose name says so


def test_an_older_schema_without_text_ids(export):
    found = profile(export([STEP[0]], SCHEMA.replace("endGlobalTid INT, textId INT", "textId INT")))
    assert found.operators[0].name == "Convolution"


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


# -- Nsight Compute ---------------------------------------------------------------------------------

COMMON = [
    "ID",
    "Process ID",
    "Process Name",
    "Host Name",
    "Kernel Name",
    "Context",
    "Stream",
    "Block Size",
    "Grid Size",
]
COMMON += ["Device", "CC"]
NAMES = ["volta_h884gemm_64x64_ldg8_nn", "an_unknown_gemm", "volta_sgemm_32x32", HALF_CAST, BATCH_NORM]


def common(number):
    return [str(number), "9", "python", "host", NAMES[number], "1", "7", "(128, 1, 1)", "(64, 1, 1)", "0", "7.0"]


@pytest.fixture
def table(tmp_path):
    def make(header, rows, before="==PROF== Connected to process 9\n"):
        path = tmp_path / "report.csv"
        with open(path, "w", newline="") as file:
            file.write(before)
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows([header, *rows])
        return path

    return make


def test_a_raw_page(table):
    durations = ["4,000", "3,000", "1,000", "500", "1,500"]
    rows = [[""] * len(COMMON) + ["nsecond"], *([*common(i), durations[i]] for i in range(5))]
    found = profile(table([*COMMON, "gpu__time_duration.sum"], rows))
    assert (found.source, found.devices) == ("Nsight Compute", ("gpu/0",))
    assert found.seconds == pytest.approx(10e-6)
    shares = {kind: found.share(kind) for kind in ("tensor", "matrix", "cast", "other")}
    assert shares == pytest.approx({"tensor": 0.4, "matrix": 0.4, "cast": 0.05, "other": 0.15})


def test_the_tensor_pipes_counter_is_better_than_a_name(table):
    counted = ["0", "1,024", "n/a", "0", "0"]
    header = [*COMMON, "gpu__time_duration.sum", "sm__inst_executed_pipe_tensor.sum"]
    rows = [[""] * len(COMMON) + ["us", "inst"], *([*common(i), "1.5", counted[i]] for i in range(5))]
    kinds = {kernel.name: kernel.kind for kernel in profile(table(header, rows)).kernels}
    assert kinds == dict(zip(NAMES, ["matrix", "tensor", "matrix", "cast", "other"]))


@pytest.mark.parametrize(("unit", "seconds"), [("ns", 2e-9), ("us", 2e-6), ("usecond", 2e-6), ("ms", 2e-3), ("s", 2)])
def test_a_details_page(table, unit, seconds):
    header = [*COMMON, "Section Name", "Metric Name", "Metric Unit", "Metric Value"]
    rows = []
    for i in range(5):
        rows.append([*common(i), "GPU Speed Of Light", "SM Frequency", "cycle/nsecond", "1.2"])
        rows.append([*common(i), "GPU Speed Of Light", "Duration", unit, "2"])
    found = profile(table(header, rows, before=""))
    assert found.seconds == pytest.approx(5 * seconds)
    assert found.share("tensor") == pytest.approx(0.2)


def test_a_table_without_kernels(table):
    with pytest.raises(ValueError, match="without kernels"):
        profile(table([*COMMON, "gpu__time_duration.sum"], []))


def test_a_table_without_durations_says_how_to_get_them(table):
    rows = [[""] * len(COMMON) + ["inst"], [*common(0), "5"]]
    with pytest.raises(ValueError, match=r"has no duration of 'volta_h884gemm.*--metrics gpu__time_duration.sum"):
        profile(table([*COMMON, "sm__inst_executed_pipe_tensor.sum"], rows))
    rows = [[""] * len(COMMON) + ["hour"], [*common(0), "5"]]
    with pytest.raises(ValueError, match="in a unit that is known: 'hour'"):
        profile(table([*COMMON, "gpu__time_duration.sum"], rows))


# -- MXNet's own ------------------------------------------------------------------------------------

RUN = """
import sys
import mxnet as mx
import mxmp
from mxnet.gluon import nn

net = nn.HybridSequential()
net.add(nn.Conv2D(8, 3, in_channels=3), nn.BatchNorm(in_channels=8), nn.Dense(4, in_units=288))
net.initialize()
net.hybridize()
mxmp.convert(net, "float16")
x = mx.nd.ones((2, 3, 8, 8))
mx.profiler.set_config(profile_all=True, aggregate_stats="apart" in sys.argv, filename=sys.argv[1])
mx.profiler.set_state("run")
for _ in range(2):
    with mx.autograd.record():
        loss = net(x).sum()
    loss.backward()
mx.nd.waitall()
mx.profiler.set_state("stop")
mx.profiler.dump()
"""


def recorded(path, *options):
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, str(path), *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return path


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    return recorded(path, "apart")


@pytest.mark.slow
def test_mxnets_profiler(dump):
    found = profile(dump)
    assert (found.source, found.devices, found.knows_kernels) == ("MXNet", ("cpu/0",), False)
    calls = {operator.name: operator.calls for operator in found.operators}
    assert calls["FullyConnected"] == calls["_backward_FullyConnected"] == calls["BatchNorm"] == 2
    assert calls["Convolution"] == calls["_backward_Convolution"] == 4  # the emulation's has one for each gradient
    assert "WaitForVar" not in calls
    assert not any(name.startswith("MX") for name in calls)
    kinds = {kernel.name: kernel.kind for kernel in found.kernels}
    assert kinds["Convolution"] == kinds["_backward_FullyConnected"] == "matrix"
    assert kinds["BatchNorm"] == "other"
    casts = [kernel for kernel in found.kernels if kernel.kind == "cast"]
    assert casts
    assert found.share("cast") == pytest.approx(sum(k.seconds for k in casts) / found.seconds)
    assert sum(found.share(kind) for kind in ("matrix", "cast", "other")) == pytest.approx(1)
    with pytest.raises(ValueError, match="does not say which kernels ran: use Nsight Systems"):
        found.share("tensor")
    assert "matrix operators" in str(found)
    assert "Tensor Cores" not in str(found)
    assert found.share("bulk") == 0


@pytest.mark.slow
def test_times_are_those_of_mxnets_events(dump):
    """Each operator's time from the raw events: what ends minus what begins."""
    events = json.loads(dump.read_text())["traceEvents"]
    signs = {"B": -1, "E": 1}
    spent = sum(signs.get(e["ph"], 0) * e["ts"] for e in events if e.get("name") == "Convolution")
    (convolution,) = [operator for operator in profile(dump).operators if operator.name == "Convolution"]
    assert convolution.total == pytest.approx(spent / 1e6)


@pytest.mark.slow
def test_operators_in_bulk_are_said(tmp_path):
    """As they are by default: which of them took the time is not known."""
    found = profile(recorded(tmp_path / "bulk.json"))
    assert found.share("bulk") > 0.5
    assert "set_config(aggregate_stats=True" in str(found)
    assert kind_of_operator("[Convolution,relu,FullyConnected]") == "bulk"  # a Module's


def test_a_dump_without_operators(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match=r"holds no operators: record with mx.profiler.set_config"):
        profile(path)


# -- Anything else ----------------------------------------------------------------------------------

BAD = {
    "text.txt": (b"hello\nworld\n", "is of no format that can be read: Nsight Systems' SQLite"),
    "binary.bin": (bytes(range(256)) * 20, "is of no format that can be read"),
    "empty": (b"", "is of no format that can be read"),
    "report.nsys-rep": (b"\x00NSYS", "nsys export --type sqlite"),
    "report.ncu-rep": (b"NVR\x00", "ncu --import FILE --csv"),
    "table.csv": (b"a,b\n1,2\n", "is of no format that can be read"),
    "other.json": (b'{"nodes": []}', "no Chrome trace"),
    "cut.json": (b'{"traceEvents": [', "damaged JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_unknown_files_are_refused(tmp_path, name):
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        profile(tmp_path / name)


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        profile(tmp_path / "none.sqlite")


# -- Files and the picture --------------------------------------------------------------------------


def test_a_saved_profile_is_the_same(export, tmp_path):
    found = profile(export(STEP))
    found.save(tmp_path / "profile.json")
    again = Profile.load(tmp_path / "profile.json")
    assert again == found
    assert str(again) == str(found)


def test_the_pictures_bars_are_the_times(export, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'mxmp[plots]'")
    found = profile(export(STEP))
    (axes,) = plot_profile(found, tmp_path / "profile.png").axes
    drawn = {c.get_label().split(":")[0]: sum(bar.get_width() for bar in c) for c in axes.containers}
    assert drawn == pytest.approx(
        {"on Tensor Cores": 0.050, "products without": 0.022, "casts": 0.008, "everything else": 0.020}
    )
    assert (tmp_path / "profile.png").stat().st_size > 10_000
