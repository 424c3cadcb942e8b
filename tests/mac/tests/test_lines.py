"""What only a Mac runs is found in the text, and whether it ran."""

import json

import pytest

from tests.mac import lines
from tests.mac.compute import COMPILED
from tests.mac.tests.conftest import on_a_mac

TEXT = """
def f(a):
    if has_metal():
        return 1
    if not mx.metal.is_available() or a:
        return 2
    if sys.platform == 'darwin' and a:
        return 3
    if mx.default_device() == mx.cpu:
        return 4
    elif a:
        return 5
    return 6
"""


def test_branches_of_a_text():
    assert [(branch.condition_line, branch.line) for branch in lines.of_text(TEXT, "f.py")] == [(3, 4), (9, 11)]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("if on_cpu:\n    a\nb", 3),
        ("if on_cpu:\n    a\nelse:\n    b", 4),
        ("if not on_cpu or x:\n    a", 2),
        ("if on_cpu or x:\n    a", None),
        ("if on_cpu and x:\n    a", None),
        ("if x:\n    a", None),
    ],
)
def test_the_side_of_a_mac(text, line):
    assert [branch.line for branch in lines.of_text(text, "f.py")] == ([] if line is None else [line])


def test_lines_that_ran_are_recorded_in_threads_too(tmp_path):
    code = "import threading\nfrom mlx_llama3.system import memory\n"
    code += "thread = threading.Thread(target=memory.available_memory); thread.start(); thread.join()"
    assert on_a_mac(COMPILED, "-c", code, env={lines.VARIABLE: str(tmp_path)}).returncode == 0
    ran = lines.recorded(tmp_path)["mlx_llama3/system/memory.py"]
    in_memory = [branch for branch in lines.branches() if branch.file == "mlx_llama3/system/memory.py"]
    assert [branch.line in ran for branch in in_memory] == [True, False, False]
    assert lines.main(tmp_path) == 1


def test_all_is_found_when_nothing_is_missed(tmp_path, capsys):
    ran = {}
    for branch in lines.branches():
        ran.setdefault(branch.file, []).append(branch.line)
    (tmp_path / "1.json").write_text(json.dumps(ran))
    assert lines.main(tmp_path) == 0
    assert "NOT RUN" not in capsys.readouterr().out
