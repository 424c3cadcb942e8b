"""A trace is extended, truncated, saved and loaded; a file that is not a trace is refused by name."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mlx_llama3.errors import UserError
from mlx_llama3.model.hooks.norms import POINTS
from mlx_llama3.trace.store import FORMAT, Trace, load_trace


def columns(start: int, count: int) -> np.ndarray:
    """Norms `(5, 3, count)` that encode their position."""
    return np.arange(start, start + count) + np.zeros((5, 3, 1), np.float32) + 1000.0 * np.arange(5)[:, None, None]


def grown(length: int) -> Trace:
    trace = Trace.empty("tiny", 3, {"seed": 7})
    for start in range(length):
        trace.extend([start], [f"<{start}>"], columns(start, 1).astype(np.float32))
    return trace


def test_extending_one_by_one_equals_extending_at_once():
    trace, whole = grown(700), Trace.empty("tiny", 3)
    whole.extend(range(700), [f"<{i}>" for i in range(700)], columns(0, 700).astype(np.float32))
    np.testing.assert_array_equal(trace.norms, whole.norms)
    np.testing.assert_array_equal(trace.tokens, np.arange(700))
    assert trace.pieces == whole.pieces
    assert trace.norm("resid_post")[1, 5] == 4005


def test_earlier_views_never_change():
    trace = grown(10)
    before = trace.norms
    kept = before.copy()
    trace.truncate(4)
    trace.extend([99], ["x"], np.full((5, 3, 1), -1, np.float32))
    np.testing.assert_array_equal(before, kept)
    assert trace.norms.shape == (5, 3, 5) and (trace.norms[..., 4] == -1).all()
    assert trace.tokens.tolist() == [0, 1, 2, 3, 99] and trace.pieces[-1] == "x"


def test_to_disk_and_back(tmp_path):
    trace = grown(6)
    trace.extra["attention/1"] = np.ones((2, 6, 6), np.float32)
    trace.save(tmp_path / "t.safetensors")
    again = load_trace(tmp_path / "t.safetensors")
    for name in ("tokens", "norms"):
        np.testing.assert_array_equal(getattr(again, name), getattr(trace, name))
    assert (again.model, again.pieces, again.settings) == ("tiny", trace.pieces, {"seed": 7})
    np.testing.assert_array_equal(again.extra["attention/1"], 1)
    stored = load_file(tmp_path / "t.safetensors")
    assert set(stored) == {"tokens", "attention/1", *(f"norm/{point}" for point in POINTS)}
    assert stored["norm/mlp_out"].shape == (3, 6)
    assert [file.name for file in tmp_path.iterdir()] == ["t.safetensors"]


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        grown(1).save(tmp_path / "absent" / "t.safetensors")


META = {"format": FORMAT, "model": "m", "pieces": json.dumps(["a", "b"]), "settings": "{}"}
TENSORS = {"tokens": np.zeros(2, np.int32)} | {f"norm/{point}": np.ones((3, 2), np.float32) for point in POINTS}


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({}, {"format": "other"}, "not a trace"),
        ({"tokens": None}, {}, "tensor tokens is missing"),
        ({"norm/mlp_out": None}, {}, "tensor norm/mlp_out is missing"),
        ({"norm/mlp_out": np.ones((3, 3), np.float32)}, {}, "norm/mlp_out"),
        ({"norm/mlp_out": np.ones((3, 2), np.float64)}, {}, "norm/mlp_out"),
        ({}, {"pieces": "[1"}, "no readable pieces"),
        ({}, {"pieces": json.dumps(["a"])}, "2 tokens, but metadata for another number"),
        ({}, {"settings": "[]"}, "2 tokens, but metadata"),
    ],
)
def test_damaged(tmp_path, tensors, metadata, message):
    path = tmp_path / "t.safetensors"
    save_file({k: v for k, v in (TENSORS | tensors).items() if v is not None}, path, META | metadata)
    with pytest.raises(UserError, match=message):
        load_trace(path)


def test_no_trace_at_all(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        load_trace(tmp_path / "absent")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(UserError, match="text: cannot be read as safetensors"):
        load_trace(tmp_path / "text")
