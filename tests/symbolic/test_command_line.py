import os

import mxnet as mx
import numpy as np
import pytest

import mxmp
from mxmp.__main__ import main


@pytest.fixture
def checkpoint(tmp_path, net, symbol):
    symbol.save(str(tmp_path / "net-symbol.json"))
    params = net.collect_params().items()
    mx.nd.save(
        str(tmp_path / "net-0003.params"),
        {("arg:" if p._differentiable else "aux:") + k: p.data() for k, p in params},
    )
    return tmp_path


def run(checkpoint, *arguments):
    return main([a.replace("@", str(checkpoint) + os.sep) for a in arguments])


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_cast_writes_a_checkpoint_that_plain_mxnet_runs(checkpoint, digits, capsys, policy):
    assert run(checkpoint, "cast", "@net-symbol.json", "@net-0003.params", "@low", "--policy", policy) == 0
    assert f"3 of 5 operators in {policy}" in capsys.readouterr().out or policy == "bfloat16"
    answers = []
    for prefix in ("net", "low"):
        module = mx.mod.Module.load(str(checkpoint / prefix), 3 if prefix == "net" else 0)
        module.bind(digits.validation().provide_data, digits.validation().provide_label, for_training=False)
        answers.append(module.predict(digits.validation()).asnumpy())
    assert not np.array_equal(*answers)
    np.testing.assert_allclose(*answers, atol=2e-2)


def test_cast_for_a_gpu_halves_the_parameters_of_matrix_operators(checkpoint, capsys):
    assert run(checkpoint, "cast", "@net-symbol.json", "@net-0003.params", "@low", "--device", "gpu") == 0
    dtypes = {k: v.dtype for k, v in mx.nd.load(str(checkpoint / "low-0000.params")).items()}
    assert dtypes["arg:net_dense0_weight"] == np.float16
    assert dtypes["arg:net_batchnorm0_gamma"] == np.float32
    assert "MiB ->" in capsys.readouterr().out


def test_cast_without_parameters_writes_the_symbol_only(checkpoint):
    assert run(checkpoint, "cast", "@net-symbol.json", "@low") == 0
    assert sorted(os.listdir(checkpoint)) == ["low-symbol.json", "net-0003.params", "net-symbol.json"]


def test_cast_says_where_a_symbol_needs_a_variable_of_mxnet(tmp_path, capsys, monkeypatch):
    x = mx.sym.LayerNorm(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4))
    mx.sym.FullyConnected(x, num_hidden=2).save(str(tmp_path / "net-symbol.json"))
    files = [str(tmp_path / "net-symbol.json"), str(tmp_path / "low")]
    words = ["cast", *files, "--device", "gpu", "--policy", "float16-fast"]
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


BAD = {
    "no such file": (["explain", "@none.json"], "no file"),
    "corrupt JSON": (["explain", "@bad.json"], "no Symbol in JSON"),
    "params for a symbol": (["explain", "@net-0003.params"], "no Symbol in JSON"),
    "symbol for params": (["cast", "@net-symbol.json", "@net-symbol.json", "@low"], "no MXNet parameters"),
    "truncated params": (["cast", "@net-symbol.json", "@short.params", "@low"], "damaged"),
    "params of another net": (["cast", "@net-symbol.json", "@other.params", "@low"], "does not fit"),
    "unknown dtype": (
        ["explain", "@net-symbol.json", "--policy", "float8"],
        "'float8' is no recipe; there are float16, float16-fast",
    ),
    "bfloat16 on a GPU": (["explain", "@net-symbol.json", "--policy", "bfloat16", "--device", "gpu"], "use 'float16'"),
    "bad shape": (["explain", "@net-symbol.json", "--shape", "data=a"], "NAME=N,C,H,W"),
    "misspelt input": (
        ["explain", "@net-symbol.json", "--shape", "dta=2,1,8,8"],
        "no input 'dta'; did you mean 'data'",
    ),
    "shapes that do not fit": (
        ["explain", "@net-symbol.json", "--shape", "data=2,3,8,8"],
        "do not fit",
    ),
    "misspelt input of cast": (["cast", "@net-symbol.json", "@low", "--shape", "dta=2,1,8,8"], "no input 'dta'"),
    "missing folder": (["cast", "@net-symbol.json", "@net-0003.params", "@none/low"], "none/low-symbol.json"),
    "a file for a folder": (
        ["cast", "@net-symbol.json", "@net-0003.params", "@bad.json/low"],
        "bad.json/low-symbol.json",
    ),
    "a symbol over itself": (["cast", "@net-symbol.json", "@net"], "net-symbol.json' is read and would be overwritten"),
    "parameters over themselves": (
        ["cast", "@other-symbol.json", "@net-0000.params", "@net"],
        "net-0000.params' is read and would be overwritten",
    ),
    "a plan over a symbol": (["tune", "@net-symbol.json", "--out", "@net-symbol.json"], "is read and would be"),
    "no folder for a plan": (["tune", "@net-symbol.json", "--out", "@none/plan.json"], "none/plan.json"),
    "no folder for a report": (
        ["optimize", "@net-symbol.json", "@net-0003.params", "@x.npy", "@fast", "--save", "@none/report.json"],
        "none/report.json",
    ),
    "no picture": (
        ["optimize", "@net-symbol.json", "@net-0003.params", "@x.npy", "@fast", "--plot", "@x.bmp"],
        "is no picture",
    ),
    "data of another dtype": (
        ["optimize", "@net-symbol.json", "@net-0003.params", "@bytes.npy", "@fast"],
        "requires uniform type",
    ),
    "everything excluded": (["cast", "@net-symbol.json", "@low", "--exclude", "*"], "nothing in this Symbol would run"),
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
    (checkpoint / "low-symbol.json").write_text("kept")
    before = sorted(os.listdir(checkpoint))
    assert run(checkpoint, *arguments) == 2
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
    tune = ["tune", "@net-symbol.json", *shape, "--out", "@plan.json", "--no-cache"]
    assert run(checkpoint, *tune, "--inference") == 0
    assert "forward, ms" in capsys.readouterr().out
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


def test_explain_says_that_a_pattern_matches_nothing(checkpoint, capsys):
    assert run(checkpoint, "explain", "@net-symbol.json", "--exclude", "tail*") == 0
    assert "exclude matched nothing: tail*" in capsys.readouterr().out


def test_a_misspelt_keyword_of_explain_is_an_error(symbol):
    with pytest.raises(ValueError, match="no input 'polcy'; did you mean"):
        mxmp.explain(symbol, polcy=(1, 2))


def test_advise_names_the_network_of_the_file_and_not_its_last_operator(tmp_path, capsys):
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=8, name="last")
    for file, name in (("resnet-symbol.json", "resnet"), ("resnet.json", "resnet.json")):
        symbol.save(str(tmp_path / file))
        assert main(["advise", str(tmp_path / file), "--shape", "data=8,8"]) == 0
        assert capsys.readouterr().out.startswith(f"{name} (compute=float16)")
