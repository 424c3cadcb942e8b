"""A model gives the same results on 2 and 4 processes as on one."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import rank_program
from ranks import run_program, run_ranks
from tiny_models import random_weights, tiny_args, write_folder

from mlx_llama3.checkpoint.loading import load_model

import mlx.core as mx

# The sums are in another order; the logits are of the order of 3.
TOLERANCE = 1e-4


def assert_same(scenario: str, folder: Path, results: dict) -> None:
    """Check the results of the ranks against those of one process."""
    expected = getattr(rank_program, scenario)(load_model(folder))
    for name, value in expected.items():
        if name in ("greedy", "drawn"):
            assert results[name] == value, name
        else:
            assert np.abs(np.array(results[name]) - np.array(value)).max() < TOLERANCE, name


# MLX spins while a rank waits inside a pass, and on two cores four ranks wait for each other's time slices. So the
# scenarios have as few passes as possible.
@pytest.mark.parametrize(("scenario", "name"), [("few", "dense"), ("passes", "tied 4 bit")])
def test_two_ranks_share_every_matrix(scenario: str, name: str, folders: dict[str, Path], tmp_path: Path):
    (results,) = run_program(tmp_path, 2, "split", scenario, folders[name])
    assert_same(scenario, folders[name], results)


def test_four_ranks_share_every_matrix(folders: dict[str, Path], tmp_path: Path):
    (results,) = run_program(tmp_path, 4, "split", "few", folders["8 bit"])
    assert_same("few", folders["8 bit"], results)


def test_two_ranks_share_the_layers_of_a_model_with_three_heads(folders: dict[str, Path], tmp_path: Path):
    results, other = run_program(tmp_path, 2, "pipeline", "passes", folders["3 heads"], folders["8 bit"])
    assert_same("passes", folders["3 heads"], results)
    assert_same("passes", folders["8 bit"], other)


def test_states_and_lens_are_there_and_what_needs_single_heads_is_refused(folders: dict[str, Path], tmp_path: Path):
    (results,) = run_program(tmp_path, 2, "split", "looking", folders["tied 4 bit"])
    assert_same("looking", folders["tied 4 bit"], results)
    for name in ("heads", "neurons", "edits", "matrix", "weight"):
        assert results[name].startswith("this needs the whole model, which is split over 2 ranks"), name
    assert "do not have this cache" in results["foreign cache"]
    assert results["start"] == "start_pos is 3 but the cache of layer 0 holds 0 positions"


def test_heads_that_do_not_divide_are_refused_before_anything_is_read(folders: dict[str, Path], tmp_path: Path):
    command = [sys.executable, str(rank_program.__file__), "split", "few", str(folders["3 heads"])]
    first, other = run_ranks(tmp_path, 2, command)
    expected = "9 query heads and 3 KV heads cannot be split evenly over 2 ranks"
    assert f"{folders['3 heads']}: {expected}" in first.err.splitlines()[-1]
    assert "--pipeline" in first.err.splitlines()[-1]
    assert other.code == 0 and not other.err


def test_a_process_takes_half_of_the_memory_and_reads_its_half_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = large_model(tmp_path / "model")
    size = (folder / "model.safetensors").stat().st_size
    monkeypatch.setenv("WORKER_REPORT", str(tmp_path / "worker.json"))
    program = [sys.executable, str(rank_program.__file__)]
    alone = subprocess.run([*program, "alone", "memory", str(folder)], capture_output=True, check=True, text=True)
    (whole,) = json.loads(alone.stdout)
    (first,) = run_program(tmp_path, 2, "split", "memory", folder)
    worker = json.loads((tmp_path / "worker.json").read_text())
    for rank in (first, worker):
        assert rank["peak"] <= 0.6 * whole["peak"]
        if whole["read"]:  # if the kernel counts
            assert rank["read"] <= 0.6 * size


def large_model(folder: Path) -> Path:
    """34 MB of bfloat16, which are loaded as 67 MB of float32."""
    args = tiny_args(dim=512, n_layers=4, n_heads=8, n_kv_heads=4, head_dim=64, hidden_dim=1536, vocab_size=4096)
    weights = {name: weight.astype(mx.bfloat16) for name, weight in random_weights(args).items()}
    return write_folder(folder, args, weights)
