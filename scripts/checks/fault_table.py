"""Faults that tests must notice: a line of mxmp, what stands there instead, and the tests of which one must fail."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """``file`` is in mxmp/ and ``tests`` are in tests/, several with spaces between; ``old`` stands there once."""

    file: str
    old: str
    new: str
    tests: str


FAULTS = (
    Fault("policy.py", "sorted(set(self.low_ops) & set(self.full_ops))", "[]", "test_policy.py"),
    Fault("host/cpu.py", "known is not None and not any(", "known is not None and any(", "host/test_cpu.py"),
    Fault("host/files.py", "if not os.path.isdir(folder):", "if False:", "test_main.py"),
    Fault("host/callbacks.py", "self._error = self._error or error", "self._error = error", "host/test_callbacks.py"),
    Fault("launch.py", "else 128 - process.returncode", "else 0", "test_launch.py"),
    Fault("checkpoint.py", 'if content["format"] != _FORMAT:', "if False:", "test_checkpoint.py"),
    Fault("pipeline.py", "if plan.device != device:", "if False:", "precision/test_plan.py"),
    # -- precision
    Fault(
        "precision/rule.py",
        'np.float16(value) if dtype == "float16" else np.float32(value)',
        "np.float32(value)",
        "precision/test_rule.py scripts/test_sweep_operators.py",
    ),
    Fault("precision/missing_kernels.py", " and row.where(call)", "", "scripts/test_sweep_operators.py"),
    Fault("precision/rule_table.py", '"softmax"', '"log_softmax_"', "precision/test_rule_table.py"),
    Fault(
        "precision/missing_kernels.py", "int(filters) % CHANNEL_BLOCK != 0", "False", "scripts/test_sweep_operators.py"
    ),
    Fault("precision/casts.py", " or readers >= _ADDED_IN_PLACE", "", "precision/test_casts.py kernels/test_fit.py"),
    Fault("precision/cost.py", " or variable in self._heads:", ":", "precision/test_decide.py precision/test_heads.py"),
    Fault("precision/rules.py", "if op in policy.full_ops:", "if False:", "precision/test_decide.py"),
    Fault("precision/heads.py", "Kind.HEAD else ()", "Kind.LOW else ()", "precision/test_heads.py"),
    Fault("precision/needs.py", "return 0 if rule.role", "return rule.passes if rule.role", "precision/test_needs.py"),
    Fault("precision/needs.py", "each if v in body.castable else each | state", "each", "precision/test_needs.py"),
    Fault("precision/needs.py", " >= MANY]", " >= 10 * MANY]", "precision/test_needs.py"),
    Fault("precision/cost.py", "node in self._needs.full:", "False:", "precision/test_cost.py precision/test_needs.py"),
    Fault(
        "precision/cost.py",
        "if node in self._needs.near and",
        "if False and",
        "precision/test_cost.py precision/test_needs.py",
    ),
    Fault("precision/inputs.py", "if steps[worst] >= _STEPS:", "if True:", "precision/test_inputs.py"),
    Fault(
        "precision/safe_sums.py", 'policy.norm != "compute"', 'policy.norm == "compute"', "precision/test_safe_sums.py"
    ),
    Fault("precision/subgraphs.py", '"_while_loop" and positions', '"_while_loop"', "precision/test_subgraphs.py"),
    Fault("precision/renaming.py", "if len(decisions) != len(plan.decisions):", "if False:", "precision/test_plan.py"),
    # -- kernels
    Fault("kernels/fit.py", " and row.name not in left_out:", ":", "kernels/test_fit.py kernels/test_table.py"),
    Fault("kernels/emulation.py", "return is_max and node", "return node", "kernels/test_emulation.py"),
    Fault(
        "kernels/rounding.py",
        "if number % _SUMMED_LOW == 0:",
        "if number == 0:",
        "kernels/test_rounding.py kernels/test_fit.py",
    ),
    Fault(
        "kernels/rounding.py",
        'inserted("negative"',
        'inserted("identity"',
        "kernels/test_rounding.py kernels/test_fit.py",
    ),
    Fault("kernels/padding.py", "(pad and -pad for pad in front)", "front", "kernels/test_padding.py"),
    Fault(
        "kernels/norms.py",
        " and Entry(node) not in graph.heads",
        "",
        "kernels/test_cuda.py",
    ),
    Fault("kernels/layouts.py", "each % 4 == 0 and each % 16 != 0", "each % 16 != 0", "kernels/test_layouts.py"),
    Fault("kernels/unwritten.py", 'not in (None, "null"):', 'not in ("null",):', "features/test_wrong_kernels.py"),
    Fault("kernels/memory.py", "others[::-1]", "others", "kernels/test_memory.py"),
    Fault(
        "kernels/cuda.py",
        "_LOOKED_UP[n.op][0] not in n.attrs",
        "_LOOKED_UP[n.op][0] in n.attrs",
        "kernels/test_cuda.py",
    ),
    Fault(
        "kernels/channels_last.py", '("1",) if is_last else ("1", "-1")', '("1", "-1")', "kernels/test_channels_last.py"
    ),
    # -- serving
    Fault("serving/folding.py", "if Entry(norm) in heads:", "if False:", "serving/test_folding.py"),
    Fault("serving/fusing.py", "reads[entry.node] > 1 or ", "", "serving/test_fusing.py"),
    Fault("serving/sums.py", 'weight[:, part].T).astype("float16")', "weight[:, part].T)", "serving/test_sums.py"),
    # -- step
    Fault(
        "step/scaler.py",
        "min(self._scale * self.growth_factor, self.max_scale)",
        "self._scale * self.growth_factor",
        "step/test_scaler.py",
    ),
    Fault("step/scaler.py", "if self._tolerance <= 0:", "if self._tolerance < 0:", "step/test_scaler.py"),
    Fault("step/step.py", "if distance != 0]", "if distance == 0]", "features/test_writes_into_float16_arrays.py"),
    Fault("step/step.py", "1 if bad and at_floor else 0", "1 if bad else 0", "step/test_step.py step/test_floor.py"),
    Fault(
        "step/step.py",
        "            statistics.restore()",
        "            statistics.keep()",
        "step/test_statistics.py gluon/test_trainer.py",
    ),
    Fault(
        "step/gradients.py",
        " and not _on_gpu(array) and not exact:",
        " and not _on_gpu(array):",
        "step/test_gradients.py",
    ),
    Fault(
        "step/ledger.py",
        "        Event.UNSCALE: State.UNSCALED_REDUCED,",
        "        Event.UNSCALE: State.UNSCALED,",
        "step/test_ledger.py gluon/test_trainer.py",
    ),
    Fault(
        "step/ledger.py",
        "self._finite = finite and self._finite is not False",
        "self._finite = finite",
        "features/test_drawn_sequences.py",
    ),
    Fault(
        "step/masters.py",
        "value, full, value, out=full",
        "value, value, full, out=full",
        "features/test_writes_into_float16_arrays.py",
    ),
    Fault("step/multi_tensor.py", "rate=-1.0)", "rate=1.0)", "step/test_masters.py features/test_drawn_sequences.py"),
    Fault("step/updater.py", "once.get(u.index, u) is u]", "True]", "features/test_device_equality.py"),
    Fault(
        "step/updater.py",
        "self.optimizer.momentum > 0",
        "self.optimizer.momentum >= 0",
        "step/test_updater.py features/test_optimizers.py",
    ),
    Fault(
        "step/states.py",
        "if not optimizer.multi_precision:",
        "if False:",
        "step/test_states.py step/test_state_layout.py features/test_continuing.py",
    ),
    Fault(
        "step/state_layout.py",
        "int(part) if k % 2 else part",
        "part",
        "step/test_state_layout.py features/test_continuing.py",
    ),
    Fault("step/stores.py", "if name in _WITHIN:", "if True:", "step/test_stores.py"),
    Fault("step/resume.py", " if name not in settings", "", "step/test_resume.py"),
    Fault("step/adaptive.py", " and fits and not self._futile", " and fits", "step/test_adaptive.py"),
    Fault("step/floor.py", "(scale if unscaled else 1.0)", "1.0", "step/test_floor.py"),
    # -- gluon
    Fault("gluon/trainer.py", "factor = 1.0 / self.loss_scale", "factor = 1.0", "features/test_drawn_sequences.py"),
    Fault(
        "gluon/backward.py",
        "            refuse_unscaled_heads(record, scale)\n",
        "",
        "features/test_heads_reached.py",
    ),
    Fault(
        "gluon/scaled_heads.py", 'if getattr(_local, "open", False):', "if False:", "features/test_drawn_sequences.py"
    ),
    Fault("gluon/graphs.py", 'if autograd.is_training() and device == "cpu":', "if False:", "kernels/test_memory.py"),
    Fault(
        "messages/inputs.py",
        'if not (("requires uniform type" in said and odd) or (mixed and {*mixed.groups()} & {*odd})):',
        "if True:",
        "features/test_messages.py",
    ),
    Fault(
        "gluon/static_shape.py",
        "if ctx in self._last and self._last[ctx].is_waiting() and self._last[ctx].is_held():",
        "if False:",
        "gluon/test_static_shape.py",
    ),
    Fault("gluon/scopes.py", 'found[PAUSED] = "1"', "pass", "gluon/test_scopes.py"),
    Fault("gluon/following.py", "_IN_MODE[node.op](node, training)", "True", "gluon/test_scopes.py"),
    Fault("gluon/following.py", 'node.attrs["momentum"] = "1"', "pass", "gluon/test_scopes.py"),
    Fault("gluon/following.py", "node.attrs.update(marks)", "pass", "gluon/test_scopes.py"),
    Fault("gluon/graphs.py", "if name in paused]", "if not name]", "gluon/test_scopes.py"),
    Fault(
        "gluon/as_arrays.py",
        "return reshape(symbol, shape, **kwargs) if is_spread else",
        "return",
        "gluon/test_as_arrays.py",
    ),
    Fault("gluon/as_arrays.py", "and is_called_by_user(through=_KNOWN)", "and False", "gluon/test_as_arrays.py"),
    Fault("gluon/reachable.py", "todo += self._read_by(value)", "pass", "gluon/test_reachable.py"),
    Fault("gluon/nesting.py", "(i, type(each), repr(each),", "(i, repr(each),", "gluon/test_nesting.py"),
    Fault(
        "gluon/conversion.py",
        "not isinstance(param, LowParameter) and any(",
        "not isinstance(param, LowParameter) and not any(",
        "gluon/test_conversion.py gluon/test_convert.py",
    ),
    Fault("gluon/blocks.py", "    if not graphs:", "    if False:", "gluon/test_blocks.py gluon/test_convert.py"),
    Fault("gluon/weights.py", "sum(moved[1:], moved[0]) / len(moved)", "moved[0]", "gluon/test_weights.py"),
    Fault("gluon/scaled_reads.py", "trainer.warn_of_scaled_gradients(param)", "pass", "gluon/test_scaled_reads.py"),
    Fault(
        "gluon/parameter.py",
        "if not {*conversions_of(new)} <= {*old}:",
        "if False:",
        "features/test_shared_nets.py gluon/test_parameter.py",
    ),
    # -- symbolic
    Fault(
        "symbolic/module.py",
        "if self._params_dirty or self.core.masters:",
        "if self._params_dirty:",
        "symbolic/test_bucketing.py",
    ),
    Fault(
        "symbolic/core.py",
        "self.masters[name].mean(arrays[name])",
        "arrays[name][0]",
        "symbolic/test_core.py symbolic/test_module.py",
    ),
    Fault(
        "symbolic/checkpoint.py",
        "if file.read() != end:",
        "if False:",
        "symbolic/test_checkpoint.py host/test_files.py",
    ),
    Fault(
        "symbolic/inference.py", "if not is_train and not kwargs and", "if not kwargs and", "symbolic/test_inference.py"
    ),
    Fault(
        "symbolic/bucketing.py", "if fresh and self._monitor is not None:", "if False:", "precision/test_monitoring.py"
    ),
    Fault("symbolic/cast.py", "if plan.num_low or plan.tuned is not None:", "if True:", "symbolic/test_cast.py"),
    # -- diagnose
    Fault("diagnose/watching/histogram.py", "self.infs + over", "self.infs", "diagnose/watching/test_histogram.py"),
    Fault(
        "diagnose/watching/watch.py",
        "due = (self._step.steps + 1) %",
        "due = self._step.steps %",
        "diagnose/watching/test_watch.py",
    ),
    Fault(
        "diagnose/blaming/verdict.py", "if not found.finite:", "if found.finite:", "diagnose/blaming/test_verdict.py"
    ),
    Fault(
        "diagnose/auditing/audit.py",
        "lambda each: each.times_noise / THRESHOLD)",
        "lambda each: 0.0)",
        "diagnose/auditing/test_audit.py",
    ),
    Fault("diagnose/guarding.py", " or self._has_large_gradients(records)", "", "diagnose/test_guarding.py"),
    Fault("diagnose/guarding.py", "self._step.restart_floor_count()", "pass", "diagnose/test_guarding.py"),
    Fault(
        "diagnose/advising/gemm.py",
        "gemms.append(Gemm(directions, steps * batch, wide, width))",
        "pass",
        "diagnose/advising/test_gemm.py diagnose/advising/test_advise.py",
    ),
    Fault(
        "diagnose/profiling.py",
        "if kind != TENSOR and is_cast(operator):",
        "if False:",
        "diagnose/test_profiling.py",
    ),
    # -- tuning and inference
    Fault("tuning/cut.py", "network.pay(network.LOW, node, math.inf)", "pass", "tuning/test_cut.py"),
    Fault(
        "tuning/search.py", "return best if beats(times, best, full) else full", "return best", "tuning/test_search.py"
    ),
    Fault("tuning/table.py", "more / len(its_casts)", "more", "tuning/test_table.py"),
    Fault(
        "inference/quantizing.py",
        "repr(2 * float(",
        "repr(1 * float(",
        "inference/test_quantizing.py inference/test_optimize.py",
    ),
    Fault("inference/prepared.py", "self._kept.pop(key, None) or", "", "inference/test_prepared.py"),
)
