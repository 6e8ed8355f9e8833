"""The tests of workarounds, each run without its workaround."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Sequence

from mxmp import cpu
from mxmp.kernels.table import WORKAROUNDS, Workaround
from support.results import ROOT

# MXNet and the tests are loaded once, and each row has a fork of its own: what it breaks does not reach the next.
_FORKS = """
import json, os, sys
import pytest

def run(*arguments):
    # Loaded before the fork, and rewritten there.
    ignored = "ignore::pytest.PytestAssertRewriteWarning"
    return pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-W", ignored, *arguments])

tests_of = json.loads(sys.argv[1])
run("--collect-only", *tests_of[""])
codes = {}
for name, tests in tests_of.items():
    child = os.fork()
    if not child:
        code = pytest.ExitCode.INTERNAL_ERROR
        try:
            os.environ["MXMP_WITHOUT"] = name
            code = run(*tests)
            sys.stdout.flush()
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    codes[name] = "killed" if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
print(json.dumps(codes))
"""
# By file, the test of each workaround that fails without it.
_TESTS = {
    "kernels/test_rounding.py": {
        "amp_cast": "test_bfloat16_casts_are_amp_casts",
        "rounding_operators": "test_bfloat16_computes_truncating_operators_by_ones_that_round",
        "clip_by_bounds": "test_clip_is_computed_in_two_and_is_its_own_again",
        "emulated_float16": "test_followers_round_their_own_output",
        "rounded_constants": "test_a_constant_is_float16",
        "needless_roundings": "test_the_shortcut_of_exact_operators_changes_no_bit",
    },
    "kernels/test_fit.py": {
        "split_casts": "test_bfloat16_sums_the_gradients_of_a_shared_weight_in_fp32",
        "plain_grouped_weights": "test_bfloat16_runs_grouped_convolutions_after_inference_in_fp32",
        "copies_before_casts": "test_bfloat16_loses_no_gradient_of_a_tensor_that_many_read",
        "shared_gradients": "test_a_sum_with_a_variable_to_whose_gradient_backwards_add",
        "overwritten_gradients": "test_a_kernel_that_cannot_add_to_a_gradient",
        "slopes_of_prelu": "test_the_slopes_of_a_prelu_have_their_gradient",
        "gradients_of_others": "test_a_hard_sigmoid_keeps_the_gradient_that_another_operator_reads",
    },
    "kernels/test_layouts.py": {
        "small_channel_blocks": "test_which_convolutions_keep_their_layout_to_themselves",
        "reshaped_gradients": "test_a_reshape_to_four_axes_before_a_convolution_trains",
        "unblocked_norms": "test_a_batch_norm_after_a_rounded_convolution_reads_blocks_of_channels",
        "volume_norms": "test_batch_norm_behind_a_volume_trains",
    },
    "kernels/test_padding.py": {
        "unused_taps": "test_nothing_reads_memory_that_was_never_written",
        "padded_volumes": "test_3d_convolutions_are_padded_apart_only_where_padding_is_not_small_beside_the_input",
    },
    "features/test_wrong_kernels.py": {
        "reshaped_volumes": "test_a_3d_convolution_and_a_reshape",
        "unassigned_regions": "test_nothing_reads_memory_that_was_never_written",
        "untrained_weights": "test_nothing_reads_memory_that_was_never_written",
    },
    "kernels/test_norms.py": {
        "norms_as_in_kernels": "test_readers_in_fp32_get_what_a_gpus_kernel_rounds",
    },
    "kernels/test_emulation.py": {
        "deconvolution_in_float64": "test_matrix_operators_equal_numpy_with_one_rounding_forward_and_backward",
        "rounded_products": "test_a_bias_is_added_to_a_rounded_product",
        "rounded_outputs": "test_the_gradients_of_tanh_and_sigmoid_are_those_of_their_rounded_outputs",
        "maxima_of_padding": "test_a_pooling_window_wholly_in_padding_gives_the_lowest_float16_and_no_nan",
        "emulated_bfloat16": "test_bfloat16_without_avx512_has_one_rounding_forward_and_backward",
    },
    "kernels/test_memory.py": {
        "memory_of_loops": "test_a_loop_behind_convolutions_gives_the_same_numbers_in_each_call",
    },
    "kernels/test_cuda.py": {
        "fp32_inside_the_kernel": "test_the_casts_around_a_norm_are_inside_its_kernel_on_a_gpu",
        "global_averages": "test_an_adaptive_average_of_everything_is_cudnns_on_a_gpu",
        "sums_of_float16": "test_a_sum_reads_float16_and_adds_in_fp32_on_a_gpu",
        "upsampling_in_steps": "test_an_upsampling_doubles_step_by_step_on_a_gpu",
        "norms_with_relu": "test_batch_norm_with_relu_is_two_operators_on_a_gpu",
        "fused_slices": "test_a_step_keeps_a_slice_out_of_the_fusion_on_a_gpu",
        "fused_defaults": "test_a_default_that_the_fusion_looks_up_is_written_on_a_gpu",
        "fused_rows": "test_the_rows_of_a_loop_are_copied_on_a_gpu_unless_a_product_reads_them",
        "sums_of_gradients": "test_five_to_seven_readers_of_a_float16_weight_read_a_copy_on_a_gpu",
    },
}
TESTS = {name: f"tests/{file}::{test}" for file, each in _TESTS.items() for name, test in each.items()}
# Faults of oneDNN's bfloat16 kernels, or of casts beside them, that cannot be seen where these are emulated.
_NEED_AVX512 = {"unused_taps", "copies_before_casts", "reshaped_volumes", "reshaped_gradients"}


def seen_here() -> list[Workaround]:
    """Return the rows whose faults this machine's CPU can show; those of a GPU have their tests in tests/nullgpu."""
    unseen = set() if cpu.multiplies_bfloat16() else _NEED_AVX512
    return [row for row in WORKAROUNDS if "cpu" in row.devices and row.name not in unseen]


def exit_codes(rows: Sequence[Workaround]) -> tuple[dict[str, int | str], str]:
    """Return pytest's exit code, or "killed", of each row's test without the row, of all with all rows as ``""``;
    and what was printed."""
    tests = {row.name: [TESTS[row.name]] for row in rows}
    # The tests of poisoned memory have processes of their own.
    tests[""] = sorted({test for (test,) in tests.values() if "memory_that_was_never_written" not in test})
    command = [sys.executable, "-W", "ignore", "-c", _FORKS, json.dumps(tests)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1]), run.stdout
