"""The law of the house: which room may import which, what a room's face holds, and how large a room may grow.

A room is a folder. Its files and rooms are neighbours, and imports between neighbours run one way. So every room can be
read from the bottom up, and nothing imports itself through others.
"""

import ast
import graphlib
from collections.abc import Iterator
from os.path import commonprefix
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ("mlx_llama3", "convert", "app")  # from the lowest to the highest
# Their faces hold no more than a docstring: `--help` may not import MLX, and BLAS comes before MLX.
EMPTY_FACES = ("mlx_llama3.system", "convert.commands", "app")
MOST_ENTRIES = 13
# `mlx_llama3/__main__.py` opens the door of the command line, which lies above.
ENTRANCES = {"mlx_llama3.__main__"}


def sources(root: Path) -> dict[str, str]:
    """The text of every module by its dotted name; a room's face has the room's name."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path.read_text("utf-8")
        for floor in FLOORS
        for path in sorted((root / floor).rglob("*.py"))
    }


MODULES = sources(ROOT)
ROOMS = {name for name in MODULES if (ROOT / name.replace(".", "/")).is_dir()}
FILES = MODULES.keys() - ROOMS


def imported(text: str, known: set[str]) -> Iterator[str]:
    """The modules that a text imports at any place, those for type checkers too.

    `from a.b import c` means the module a.b.c where there is one, else a.b.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in known else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def check_order(modules: dict[str, str]) -> None:
    """Raise AssertionError for an import that runs up between floors, or in a circle between neighbours."""
    graphs: dict[str, dict[str, set[str]]] = {}
    for name, text in modules.items():
        if name in ROOMS or name in ENTRANCES:  # a face hands on what its room holds
            continue
        for other in imported(text, set(modules)):
            if other not in modules or other == name or other.split(".")[0] == other == "mlx_llama3":
                continue
            here, there = name.split("."), other.split(".")
            shared = len(commonprefix([here, there]))
            if shared == 0:
                assert FLOORS.index(there[0]) < FLOORS.index(here[0]), f"{name} imports upwards: {other}"
            else:
                graph = graphs.setdefault(".".join(here[:shared]), {})
                graph.setdefault(here[shared], set()).add(there[shared])
    for room, graph in graphs.items():
        try:
            tuple(graphlib.TopologicalSorter(graph).static_order())
        except graphlib.CycleError as error:
            raise AssertionError(f"{room}: its neighbours import in a circle: {' <- '.join(error.args[1])}") from None


def test_imports_run_one_way():
    check_order(MODULES)


@pytest.mark.parametrize(
    ("module", "planted", "named"),
    [
        ("mlx_llama3.model.transformer", "from app.stats import Meter", "imports upwards: app.stats"),
        ("convert.sources.meta", "def f():\n    from app.options.options import option", "imports upwards"),
        ("mlx_llama3.model.layers.rope", "from mlx_llama3.model.cache.kv_cache import KVCache", "mlx_llama3.model: .*"),
        ("mlx_llama3.system.files", "if TYPE_CHECKING:\n    from mlx_llama3.api import load", "in a circle"),
        ("app.options.stdin", "from app.chat import loop", "app: its neighbours import in a circle: "),
        ("mlx_llama3.model.residual", "import mlx_llama3.model.transformer", "mlx_llama3.model: "),
    ],
)
def test_an_import_that_runs_up_is_found(module, planted, named):
    with pytest.raises(AssertionError, match=named):
        check_order(MODULES | {module: f"{MODULES[module]}\n{planted}\n"})


@pytest.mark.parametrize("module", sorted(FILES))
def test_code_imports_from_files_and_not_from_faces(module):
    assert not set(imported(MODULES[module], set(MODULES))) & (ROOMS - {"mlx_llama3"})


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_face_says_what_its_room_is_for(room):
    face = ast.parse(MODULES[room])
    assert ast.get_docstring(face), "two sentences say what the room is for"
    if room in ("convert", "mlx_llama3"):
        return  # the first loads BLAS, the second is the public API, looked up on first use
    if room.startswith(EMPTY_FACES):
        assert len(face.body) == 1, "this face must stay empty"
        return
    names = [alias.name for node in face.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    (handed_on,) = (ast.literal_eval(node.value) for node in face.body if isinstance(node, ast.Assign))
    assert sorted(handed_on) == sorted(names) and names
    assert not {f"{room}.{name}" for name in names} & MODULES.keys(), "a name would hide a module of the room"


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_can_be_seen_at_a_glance(room):
    entries = [each.name for each in (ROOT / room.replace(".", "/")).iterdir()]
    assert len([name for name in entries if name not in ("__init__.py", "__pycache__")]) <= MOST_ENTRIES


@pytest.mark.parametrize("module", sorted(FILES))
def test_files_and_functions_stay_small_and_named_for_what_they_own(module):
    assert MODULES[module].count("\n") <= 450
    for node in ast.walk(ast.parse(MODULES[module])):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 70, f"{node.name} needs a second name"
    assert module.split(".")[-1] not in {"utils", "util", "helpers", "helper", "common", "misc"}
