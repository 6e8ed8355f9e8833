"""The versions of MXNet: what is refused and what is warned of at import."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import mxnet as mx
import pytest

from mxmp import versions
from mxmp.precision.graph import Graph


@pytest.mark.parametrize("version", ["1.6.0", "1.5.1.post0", "0.12.1", "2.0.0b1", "2.0.0", "unknown"])
def test_a_version_that_lacks_what_mxmp_needs_is_refused_in_words(version):
    with pytest.raises(ImportError, match=rf"1\.7\.0, 1\.8\.0, 1\.9\.0 or 1\.9\.1, and this is MXNet {version} .*pip"):
        versions.find(version)


@pytest.mark.parametrize("version", ["1.9.2", "1.10.0", "1.8.1b20210101"])
def test_a_version_that_was_not_tried_is_warned_of_and_runs_as_the_newest(version):
    with pytest.warns(UserWarning, match=rf"not on MXNet {version}, which it takes for 1\.9\.1"):
        assert versions.find(version)[1] == versions.find("1.9.1")[1]


@pytest.mark.parametrize("version", ["1.7.0", "1.8.0", "1.9.0", "1.9.1", "1.8.0.post0"])
def test_the_versions_that_were_tried_are_neither(version, recwarn):
    assert versions.find(version)[0] == tuple(map(int, version.split(".")[:3]))
    assert list(recwarn) == []


@pytest.mark.slow
def test_an_import_with_another_version_ends_in_these_words():
    code = "import mxnet; mxnet.__version__ = '1.6.0'; import mxmp"
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: mxmp runs on Apache MXNet 1.7.0, 1.8.0, 1.9.0 or 1.9.1" in run.stderr


def test_a_graph_has_the_number_of_the_version_that_runs():
    """As MXNet itself writes it; a newer number makes it warn of each file that it loads."""
    made = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2)
    attributes = json.loads(made.tojson())["attrs"]
    assert {name: attributes[name] for name in versions.GRAPH_ATTRIBUTES} == versions.GRAPH_ATTRIBUTES
    assert Graph.from_symbol(made).attrs == attributes
    assert re.match(r"\d+\.\d+\.\d+", mx.__version__)[0] == ".".join(map(str, versions.NUMBERS))
