import argparse
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from kit import digits
from kit.exports import write_database

import mxmp
from mxmp.__main__ import main, parser
from mxmp.diagnose import advise, profile


@pytest.fixture
def checkpoint(tmp_path):
    digits.symbol().save(str(tmp_path / "net-symbol.json"))
    params = digits.seeded().collect_params().items()
    mx.nd.save(
        str(tmp_path / "net-0003.params"),
        {("arg:" if p._differentiable else "aux:") + k: p.data() for k, p in params},
    )
    return tmp_path


def run(checkpoint, *arguments):
    return main([a.replace("@", str(checkpoint) + os.sep) for a in arguments])


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_cast_writes_a_checkpoint_that_plain_mxnet_runs(checkpoint, capsys, policy):
    assert run(checkpoint, "cast", "@net-symbol.json", "@net-0003.params", "@low", "--policy", policy) == 0
    assert f"3 of 5 operators in {policy}" in capsys.readouterr().out or policy == "bfloat16"
    answers, data = [], digits.Digits().validation()
    for prefix in ("net", "low"):
        module = mx.mod.Module.load(str(checkpoint / prefix), 3 if prefix == "net" else 0)
        module.bind(data.provide_data, data.provide_label, for_training=False)
        answers.append(module.predict(data).asnumpy())
    assert not np.array_equal(*answers)
    np.testing.assert_allclose(*answers, atol=2e-2)


def test_cast_for_a_gpu_halves_the_parameters_of_matrix_operators(checkpoint, capsys):
    assert run(checkpoint, "cast", "@net-symbol.json", "@net-0003.params", "@low", "--device", "gpu") == 0
    dtypes = {k: v.dtype for k, v in mx.nd.load(str(checkpoint / "low-0000.params")).items()}
    assert dtypes["arg:net_dense0_weight"] == np.float16
    assert dtypes["arg:net_batchnorm0_gamma"] == np.float32
    assert "KiB ->" in capsys.readouterr().out


def test_cast_without_parameters_writes_the_symbol_only(checkpoint):
    assert run(checkpoint, "cast", "@net-symbol.json", "@low") == 0
    assert sorted(os.listdir(checkpoint)) == ["low-symbol.json", "net-0003.params", "net-symbol.json"]


def test_cast_says_where_a_symbol_needs_a_variable_of_mxnet(tmp_path, capsys, monkeypatch):
    x = mx.sym.LayerNorm(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4))
    mx.sym.FullyConnected(x, num_hidden=2).save(str(tmp_path / "net-symbol.json"))
    files = [str(tmp_path / "net-symbol.json"), str(tmp_path / "low")]
    words = ["cast", *files, "--device", "gpu", "--policy", "float16-fast", "--force"]
    said = []
    for value in ("0", "1"):
        monkeypatch.setenv("MXNET_SAFE_ACCUMULATION", value)
        assert main(words) == 0
        said.append("Set MXNET_SAFE_ACCUMULATION=1 where it runs" in capsys.readouterr().out)
    assert said == [False, True]


def test_explain_prints_every_operator_with_its_reason(checkpoint, capsys):
    assert run(checkpoint, "explain", "@net-symbol.json", "--nodes", "--shape", "data=2,1,8,8", "softmax_label=2") == 0
    out = capsys.readouterr().out
    assert "MiB read and written per forward" in out
    assert "float16   Convolution" in out
    assert "float32   SoftmaxOutput" in out


EXPLAIN, CAST = ["explain", "@net-symbol.json"], ["cast", "@net-symbol.json"]
OPTIMIZE = ["optimize", "@net-symbol.json", "@net-0003.params"]
BAD = {
    "no such file": (["explain", "@none.json"], "no file"),
    "corrupt JSON": (["explain", "@bad.json"], "no Symbol in JSON"),
    "params for a symbol": (["explain", "@net-0003.params"], "no Symbol in JSON"),
    "symbol for params": ([*CAST, "@net-symbol.json", "@low"], "no MXNet parameters"),
    "truncated params": ([*CAST, "@short.params", "@low"], "damaged"),
    "params of another net": ([*CAST, "@other.params", "@low"], "does not fit"),
    "unknown dtype": ([*EXPLAIN, "--policy", "float8"], "'float8' is no recipe; there are float16, float16-fast"),
    "bfloat16 on a GPU": ([*EXPLAIN, "--policy", "bfloat16", "--device", "gpu"], "use 'float16'"),
    "bad shape": ([*EXPLAIN, "--shape", "data=a"], "NAME=N,C,H,W"),
    "misspelt input": ([*EXPLAIN, "--shape", "dta=2,1,8,8"], "no input 'dta'; did you mean 'data'"),
    "shapes that do not fit": ([*EXPLAIN, "--shape", "data=2,3,8,8"], "do not fit"),
    "misspelt input of cast": ([*CAST, "@low", "--shape", "dta=2,1,8,8"], "no input 'dta'"),
    "missing folder": ([*CAST, "@net-0003.params", "@none/low"], "none/low-symbol.json"),
    "a file for a folder": ([*CAST, "@net-0003.params", "@bad.json/low"], "bad.json/low-symbol.json"),
    "a symbol over itself": ([*CAST, "@net"], "net-symbol.json' is read and would be overwritten"),
    "parameters over themselves": (
        ["cast", "@other-symbol.json", "@net-0000.params", "@net"],
        "net-0000.params' is read and would be overwritten",
    ),
    "a plan over a symbol": (["tune", "@net-symbol.json", "--out", "@net-symbol.json"], "is read and would be"),
    "no folder for a plan": (["tune", "@net-symbol.json", "--out", "@none/plan.json"], "none/plan.json"),
    "no folder for a report": ([*OPTIMIZE, "@x.npy", "@fast", "--save", "@none/report.json"], "none/report.json"),
    "no picture": ([*OPTIMIZE, "@x.npy", "@fast", "--plot", "@x.bmp"], "is no picture"),
    "data of another dtype": ([*OPTIMIZE, "@bytes.npy", "@fast"], "requires uniform type"),
    "parameters for a symbol": (["explain", "@net-0003.params"], "it holds parameters of MXNet; expected NAME-symbol"),
    "a plan for a symbol": (["explain", "@plan.json"], "it holds a precision plan"),
    "a folder for a symbol": (["explain", "@"], "it is a folder"),
    "a symbol for parameters": (
        [*CAST, "@pool-symbol.json", "@low"],
        "it holds a Symbol in JSON; expected NAME-0000.params",
    ),
    "parameters of save_parameters": (
        [*CAST, "@gluon.params", "@low"],
        "got 'weight'; use net.export() instead of net.save_parameters()",
    ),
    "an epoch that is not there": ([*CAST, "@net-0004.params", "@low"], "net-0003.params'?"),
    "a symbol for a plan": ([*EXPLAIN, "--policy", "@net-symbol.json"], "it holds a Symbol in JSON"),
    "parameters for a plan": ([*EXPLAIN, "--policy", "@net-0003.params"], "parameters of MXNet"),
    "a plan without its format": ([*EXPLAIN, "--policy", "@other.json"], "format 'mxmp-plan-1'"),
    "a plan that is not there": ([*EXPLAIN, "--policy", "@plam.json"], "plan.json'?"),
    "a symbol for data": (
        [*OPTIMIZE, "@pool-symbol.json", "@fast"],
        "expected .npy or .npz (it holds a Symbol in JSON)",
    ),
    "no data": ([*OPTIMIZE, "@bites.npy", "@fast"], "bytes.npy'?"),
    "a symbol for a recording": (["profile", "@net-symbol.json"], "it holds a Symbol in JSON"),
    "parameters for a recording": (["profile", "@net-0003.params"], "it holds parameters of MXNet"),
    "a folder that is missing": ([*CAST, "@none/low"], "none' first)"),
    "a file for the folder": ([*CAST, "@net-symbol.json/low"], "net-symbol.json' is a file)"),
    "tune without shapes": (["tune", "@net-symbol.json", "--bytes", "--out", "@p.json"], "--shape data=32,3,224,224"),
    "advise without shapes": (["advise", "@net-symbol.json"], "--shape data=32,3,224,224"),
    "two shapes of one input": ([*EXPLAIN, "--shape", "data=2,1,8,8", "data=3,1,8,8"], "two shapes of data"),
    "another form of a shape": ([*EXPLAIN, "--shape", "data=2x8"], "such as data=32,3,224,224"),
    "a list with commas": (
        [*EXPLAIN, "--policy", "full_ops=Activation,Dropout"],
        "separated by ';', full_ops=Activation;Dropout",
    ),
    "per cent for a share": ([*OPTIMIZE, "@bytes.npy", "@fast", "--max-drop", "5"], "0.05 is 5 %"),
    "everything excluded": ([*CAST, "@low", "--exclude", "*"], "nothing in this Symbol would run"),
    "nothing to do": (["cast", "@pool-symbol.json", "@low"], "no matrix operator"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_that_says_what_is_wrong_and_writes_nothing(checkpoint, capsys, case):
    arguments, message = BAD[case]
    (checkpoint / "bad.json").write_text('{"nodes": [')
    (checkpoint / "short.params").write_bytes((checkpoint / "net-0003.params").read_bytes()[:400])
    mx.nd.save(str(checkpoint / "other.params"), {"arg:elsewhere": mx.nd.zeros((1,))})
    mx.sym.Pooling(mx.sym.var("data"), global_pool=True).save(str(checkpoint / "pool-symbol.json"))
    np.save(str(checkpoint / "bytes.npy"), np.zeros((2, 2, 1, 8, 8), "uint8"))
    mxmp.tune(mx.sym.load(str(checkpoint / "net-symbol.json")), data=(2, 1, 8, 8), measure=False).save(
        checkpoint / "plan.json"
    )
    (checkpoint / "other.json").write_text('{"operators": []}')
    mx.nd.save(str(checkpoint / "gluon.params"), {"weight": mx.nd.zeros((1,))})
    (checkpoint / "low-symbol.json").write_text("kept")
    before = sorted(os.listdir(checkpoint))
    forced = ["--force"] if arguments[0] == "cast" else []  # even then
    assert run(checkpoint, *arguments, *forced) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error
    assert sorted(os.listdir(checkpoint)) == before
    assert (checkpoint / "low-symbol.json").read_text() == "kept"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes into read-only folders")
def test_a_read_only_folder_is_named(checkpoint, capsys):
    (checkpoint / "shut").mkdir(mode=0o500)
    assert run(checkpoint, "cast", "@net-symbol.json", "@net-0003.params", "@shut/low") == 2
    assert "shut/low-symbol.json" in capsys.readouterr().err


def test_tune_writes_a_plan_that_cast_and_explain_take(checkpoint, capsys):
    shape = ["--shape", "data=2,1,8,8"]
    tune = ["tune", "@net-symbol.json", *shape, "--out", "@plan.json", "--no-cache", "--force"]
    assert run(checkpoint, *tune, "--inference") == 0
    assert "inference, ms" in capsys.readouterr().out
    assert run(checkpoint, *tune, "--bytes", "--exclude", "net_dense0*") == 0
    assert "fewest bytes cast" in capsys.readouterr().out
    plan = mxmp.Plan.load(checkpoint / "plan.json")
    assert (plan.policy.compute, plan.policy.exclude) == ("bfloat16", ("net_dense0*",))
    assert run(checkpoint, "explain", "@net-symbol.json", "--nodes", *shape, "--policy", "@plan.json") == 0
    lines = capsys.readouterr().out.splitlines()
    low = {line.split()[2].rstrip(":") for line in lines if line.startswith("bfloat16")}
    assert low == {name for name, decision in plan.decisions.items() if decision.low}
    assert run(checkpoint, "cast", "@net-symbol.json", "@net-0003.params", "@low", "--policy", "@plan.json") == 0
    written = mx.sym.load(str(checkpoint / "low-symbol.json"))
    want = mxmp.cast_symbol(mx.sym.load(str(checkpoint / "net-symbol.json")), plan)
    assert written.tojson(remove_amp_cast=False) == want.tojson(remove_amp_cast=False)


def test_tune_names_what_it_lacks(checkpoint, capsys):
    assert run(checkpoint, "tune", "@net-symbol.json", "--out", "@plan.json", "--no-cache") == 2
    assert "give those of all inputs" in capsys.readouterr().err
    assert run(checkpoint, "cast", "@net-symbol.json", "@low", "--policy", "@none.json") == 2
    assert "No such file" in capsys.readouterr().err


def test_options_of_several_values_may_be_given_again(checkpoint, capsys):
    again = ["--exclude", "net_dense0*", "--exclude", "tail*", "net_conv0*", "--shape", "data=2,1,8,8"]
    assert run(checkpoint, "tune", "@net-symbol.json", *again, "--bytes", "--out", "@again.json", "--force") == 0
    plan = mxmp.Plan.load(checkpoint / "again.json")
    assert plan.policy.exclude == ("net_dense0*", "tail*", "net_conv0*")
    capsys.readouterr()
    assert run(checkpoint, "explain", "@net-symbol.json", *again, "--shape", "more=1") == 2
    assert "more" in capsys.readouterr().err


def test_explain_says_that_a_pattern_matches_nothing(checkpoint, capsys):
    assert run(checkpoint, "explain", "@net-symbol.json", "--exclude", "tail*") == 0
    assert "exclude matched nothing: tail*" in capsys.readouterr().out


def test_a_misspelt_keyword_of_explain_is_an_error():
    with pytest.raises(ValueError, match="no input 'polcy'; did you mean"):
        mxmp.explain(digits.symbol(), polcy=(1, 2))


def test_advise_names_the_network_of_the_file_and_not_its_last_operator(tmp_path, capsys):
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=8, name="last")
    for file, name in (("resnet-symbol.json", "resnet"), ("resnet.json", "resnet.json")):
        symbol.save(str(tmp_path / file))
        assert main(["advise", str(tmp_path / file), "--shape", "data=8,8"]) == 0
        assert capsys.readouterr().out.startswith(f"{name} (compute=float16)")


def stopped(capsys, *arguments):
    """The status, and what was printed, of a command that argparse ends."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code, capsys.readouterr()


COMMANDS = ["cast", "explain", "tune", "optimize", "audit", "verify", "advise", "profile", "launch"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: command"),
        (["cats"], "invalid choice: 'cats' (choose from 'cast'"),
        (["explain"], "required: SYMBOL; an option that takes several values, such as --shape, goes behind them"),
        (["cast", "--shape", "data=2,8", "net-symbol.json", "low"], "such as --shape, goes behind them"),
        (["explain", "net-symbol.json", "--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["tune", "net-symbol.json"], "required: --out"),
        (
            ["optimize", "a", "b", "c", "d", "--max-drop", "little"],
            "argument --max-drop: invalid float value: 'little'",
        ),
        (["cast", "a", "b", "c", "d"], "unrecognized arguments: d"),
        (["launch", "--workers", "two", "true"], "argument --workers: invalid int value: 'two'"),
    ],
)
def test_an_error_of_the_command_line_itself_is_one_line_with_the_program_s_name(capsys, arguments, message):
    code, said = stopped(capsys, *arguments)
    assert code == 2
    assert message in said.err
    assert said.err.count("\n") == 1
    assert said.err.startswith("python -m mxmp")
    assert "--help" in said.err


def test_the_version_is_that_of_the_package(capsys):
    code, said = stopped(capsys, "--version")
    assert (code, said.out) == (0, f"mxmp {mxmp.__version__}, with MXNet {mx.__version__}\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_the_program_and_shows_every_default(capsys, command):
    _, said = stopped(capsys, command, "--help")
    assert said.out.startswith(f"usage: python -m mxmp {command} ")
    subparsers = next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    assert list(subparsers.choices) == COMMANDS
    for action in subparsers.choices[command]._actions:
        if action.option_strings and action.default not in (None, False, [], argparse.SUPPRESS):
            words = " ".join(action.default) if isinstance(action.default, list) else action.default
            assert f"(default: {words})" in " ".join(said.out.split())


@pytest.mark.slow
@pytest.mark.parametrize("command", [["explain", "--nodes"], ["advise", "--shape", "data=2,1,8,8"]], ids=" ".join)
def test_output_into_a_closed_pipe_is_quiet(checkpoint, command):
    read, write = os.pipe()
    os.close(read)
    name, *options = command
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "mxmp", name, str(checkpoint / "net-symbol.json"), *options],
        env={**os.environ, "PYTHONPATH": str(Path(mxmp.__file__).parents[1])},
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert (run.returncode, run.stderr) == (141, "")


def test_ctrl_c_is_one_line(checkpoint, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("mxmp.__main__.explain", interrupted)
    assert run(checkpoint, "explain", "@net-symbol.json") == 130
    assert capsys.readouterr().err == "python -m mxmp explain: interrupted\n"


def test_cast_without_its_last_argument_writes_nothing(checkpoint, capsys):
    before = sorted(os.listdir(checkpoint))
    assert run(checkpoint, "cast", "@net-symbol.json", "@net-0003.params") == 2
    assert "expected the prefix of the files to write, behind PARAMS" in capsys.readouterr().err
    assert sorted(os.listdir(checkpoint)) == before


def test_cast_replaces_a_file_only_if_it_is_told_to(checkpoint, capsys):
    (checkpoint / "low-symbol.json").write_text("mine")
    assert run(checkpoint, "cast", "@net-symbol.json", "@low") == 2
    assert "low-symbol.json' exists" in capsys.readouterr().err
    assert (checkpoint / "low-symbol.json").read_text() == "mine"
    assert run(checkpoint, "cast", "@net-symbol.json", "@low", "--force") == 0
    assert (checkpoint / "low-symbol.json").read_text() != "mine"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=33_278, name="decoder")
    symbol.save(str(tmp_path / "net-symbol.json"))
    monkeypatch.chdir(tmp_path)
    write_database("report.sqlite")
    return tmp_path


ADVISE = ["advise", "net-symbol.json", "--shape", "data=32,64"]


def test_advise_prints_what_python_finds(folder, capsys):
    assert main([*ADVISE, "--device", "a100"]) == 0
    out = capsys.readouterr().out
    found = advise(mx.sym.load("net-symbol.json"), device="a100", data=(32, 64))
    assert out == f"{replace(found, name='net')}\n"  # by the file
    assert "33,278 -> 33,280" in out


def test_advise_follows_the_policy(folder, capsys):
    assert main([*ADVISE, "--exclude", "decoder"]) == 0
    assert "\n  0.0% of them can run on Tensor Cores" in capsys.readouterr().out


def test_profile_prints_what_python_reads(folder, capsys):
    assert main(["profile", "report.sqlite"]) == 0
    out = capsys.readouterr().out
    assert out == f"{profile('report.sqlite')}\n"
    assert "80.0% on Tensor Cores" in out


BAD_OF_DIAGNOSE = {
    "unknown input": (["advise", "net-symbol.json", "--shape", "dta=2,2"], "no input 'dta'; did you mean 'data'"),
    "bfloat16": ([*ADVISE, "--policy", "bfloat16"], "use 'float16'"),
    "no profile": (["profile", "net-symbol.json"], "no SQLite export of Nsight Systems"),
    "no file": (["profile", "none.sqlite"], "none.sqlite"),
}


@pytest.mark.parametrize("case", BAD_OF_DIAGNOSE)
def test_bad_input_is_one_line_and_writes_nothing(folder, capsys, case):
    arguments, message = BAD_OF_DIAGNOSE[case]
    before = sorted(os.listdir(folder))
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error
    assert sorted(os.listdir(folder)) == before
