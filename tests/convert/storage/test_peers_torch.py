"""Checks against torch and transformers: files that torch writes, and folders that transformers loads."""

from pathlib import Path

import numpy as np
import pytest
from tiny_models import random_weights, tiny_args, write_folder

from convert.conversion.to_mlx import convert
from convert.storage.torch_zip import read_pth
from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.errors import UserError
from mlx_llama3.model.config import RopeScaling

import mlx.core as mx

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_files_that_torch_saves(tmp_path, protocol, dtype):
    """Tensors, parameters, views into one storage, a module's state with its metadata."""
    import torch

    linear = torch.nn.Linear(7, 5).to(getattr(torch, dtype))
    linear.weight.data = torch.arange(35, dtype=torch.float32).reshape(5, 7).to(getattr(torch, dtype))
    state = linear.state_dict()
    state |= {"parameter": linear.weight, "turned": linear.weight.detach().T, "part": linear.weight.detach()[1:4, 2:]}
    torch.save(state, tmp_path / "model.pth", pickle_protocol=protocol)
    tensors = read_pth(tmp_path / "model.pth")
    assert tensors.keys() == state.keys()
    for name, expected in state.items():
        rows = tensors[name].rows(0, tensors[name].shape[0])
        rows = (rows.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else rows
        np.testing.assert_array_equal(rows, expected.detach().float().numpy())
        tensors[name].checksum.verify()


@pytest.mark.parametrize(
    "kind, named",
    [
        ("module", "torch.nn.modules.linear.Linear"),
        ("old format", "old format"),
        ("float8", "_rebuild_tensor_v3"),
        ("sparse", "_rebuild_sparse_tensor"),
    ],
)
def test_what_else_torch_saves_is_refused_by_name(tmp_path, kind, named):
    import torch

    linear = torch.nn.Linear(2, 2)
    saved = {
        "module": linear,
        "old format": linear.state_dict(),
        "float8": {"w": torch.zeros(4).to(torch.float8_e4m3fn)},
        "sparse": {"w": torch.eye(3).to_sparse()},
    }
    torch.save(saved[kind], tmp_path / "model.pth", _use_new_zipfile_serialization=kind != "old format")
    with pytest.raises(UserError) as error:
        read_pth(tmp_path / "model.pth")
    assert named in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "rope_scaling": RopeScaling(32.0), "rope_theta": 500000.0},
        {"rope_scaling": RopeScaling(8.0), "n_kv_heads": 1, "head_dim": 32, "vocab_size": 331},
    ],
)
def test_transformers_loads_what_we_write(tmp_path: Path, changes):
    import torch
    from transformers import AutoModelForCausalLM

    args = tiny_args(**changes)
    convert(write_folder(tmp_path / "in", args, random_weights(args)), tmp_path / "out", progress=False)
    tokens = mx.random.randint(0, 256, (1, 300), key=mx.random.key(0))
    peer = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        expected = peer(torch.tensor(np.array(tokens), dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(np.array(load_model(tmp_path / "out")(tokens)), expected, atol=1e-4)
