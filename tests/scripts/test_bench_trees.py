"""Two trees of mxmp are timed in processes that import one each."""

from __future__ import annotations

import pytest
from bench import trees


@pytest.mark.slow
def test_each_process_imports_the_tree_that_it_is_to_time(tmp_path, capsys):
    (tmp_path / "mxmp").mkdir()
    (tmp_path / "mxmp" / "__init__.py").write_text("raise ImportError('this is the other tree')")
    with pytest.raises(SystemExit, match="this is the other tree"):
        trees.main([str(tmp_path), "--nets", "mobilenetv2", "--policies", "float16", "--rounds", "1"])
    found = trees.apart(trees.ROOT, "mobilenetv2", "float16")
    assert tuple(found) == trees.PARTS
    assert all(seconds > 0 for seconds in found.values())


def test_a_folder_without_mxmp_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="expected one folder that holds mxmp/, got"):
        trees.main([str(tmp_path)])
    with pytest.raises(SystemExit, match="got none"):
        trees.main([])
