"""Shards of tensors, read without the rest."""

from pathlib import Path

import pytest
from tiny_models import quantized, random_weights, tiny_args, write_folder

from mlx_llama3.checkpoint.folder import Checkpoint
from mlx_llama3.errors import UserError
from mlx_llama3.parallel import slices
from mlx_llama3.parallel.slices import COLUMNS, ROWS, Shard, SlicedCheckpoint

import mlx.core as mx

Q, DOWN, NORM = (f"model.layers.0.{name}.weight" for name in ("self_attn.q_proj", "mlp.down_proj", "input_layernorm"))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_dense_shards_have_the_bits_of_the_whole(dtype: mx.Dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slices, "MAX_READ_BYTES", 100)  # several reads for a shard
    weights = {name: weight.astype(dtype) for name, weight in random_weights(tiny_args()).items()}
    whole = Checkpoint(write_folder(tmp_path / "model", tiny_args(), weights))
    part = SlicedCheckpoint(whole, {Q: Shard(ROWS, 8, 24), DOWN: Shard(COLUMNS, 31, 80), NORM: None})
    assert part.n_weights == 16 * 64 + 64 * 49 + 64
    assert part.nbytes == part.n_weights * dtype.size
    for name, expected in ((Q, weights[Q][8:24]), (DOWN, weights[DOWN][:, 31:80]), (NORM, weights[NORM])):
        assert part.weights[name].shape == expected.shape
        tensor = part.pop(name)
        assert tensor.dtype == dtype and mx.array_equal(tensor, expected)


@pytest.mark.parametrize(("bits", "mode"), [(4, "affine"), (3, "affine"), (8, "affine"), (4, "mxfp4")])
def test_quantized_columns_are_split_between_groups(bits: int, mode: str, tmp_path: Path):
    packed = quantized(random_weights(tiny_args()), bits=bits, group_size=32, mode=mode)
    settings = {"bits": bits, "group_size": 32, "mode": mode}
    folder = write_folder(tmp_path / "model", tiny_args(), packed, quantization=settings)
    part = SlicedCheckpoint(Checkpoint(folder), {DOWN: Shard(COLUMNS, 32, 96), Q: Shard(ROWS, 0, 32)})
    module = DOWN.removesuffix(".weight")
    affine = mode == "affine"
    parts = [part.pop(DOWN), part.pop(f"{module}.scales"), part.pop(f"{module}.biases") if affine else None]
    whole = [packed[DOWN], packed[f"{module}.scales"], packed[f"{module}.biases"] if affine else None]
    expected = mx.dequantize(*whole, group_size=32, bits=bits, mode=mode)[:, 32:96]
    assert mx.array_equal(mx.dequantize(*parts, group_size=32, bits=bits, mode=mode), expected)
    assert mx.array_equal(part.pop(Q), packed[Q][:32])


def test_nan_in_this_shard_is_named_and_nan_in_another_is_not_read(tmp_path: Path):
    weights = random_weights(tiny_args())
    weights[Q][40, 3] = mx.nan
    whole = Checkpoint(write_folder(tmp_path / "model", tiny_args(), weights))
    SlicedCheckpoint(whole, {Q: Shard(ROWS, 0, 32)}).pop(Q)
    with pytest.raises(UserError, match=f"tensor {Q} holds NaN"):
        SlicedCheckpoint(whole, {Q: Shard(ROWS, 32, 64)}).pop(Q)


def test_a_file_that_was_truncated_since_is_named(tmp_path: Path):
    folder = write_folder(tmp_path / "model", tiny_args())
    part = SlicedCheckpoint(Checkpoint(folder), {DOWN: None})
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(part.weights[DOWN].offset + 100)
    with pytest.raises(UserError, match=r"model\.safetensors: the file ends too early"):
        part.pop(DOWN)
