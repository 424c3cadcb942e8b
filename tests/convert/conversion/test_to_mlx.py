"""The whole conversion: values, dtypes, quantization, and what is left when it fails or is killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from meta_checkpoint import PARAMS, hf_rows, meta_weights, write_meta
from tiny_models import ARGS, quantized, random_weights, tiny_args, write_folder

from convert.conversion import to_mlx as module
from convert.conversion.plan import PlanStep
from convert.conversion.recipe import make_recipe
from convert.conversion.to_mlx import convert
from mlx_llama3.checkpoint.config_json import from_hf
from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.checkpoint.tensor_names import hf_to_official
from mlx_llama3.errors import UserError

import mlx.core as mx

DATA = Path(__file__).parents[2] / "data"
WEIGHTS = random_weights(ARGS)
HALF = {name: array.astype(mx.bfloat16) for name, array in WEIGHTS.items()}


def load(folder: Path) -> dict[str, mx.array]:
    weights: dict[str, mx.array] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= mx.load(str(path))
    return weights


def config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def same(actual: dict[str, mx.array], expected: dict[str, mx.array]) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype and mx.array_equal(actual[name], array).item(), name


@pytest.mark.parametrize("name", ["llama3-1shard", "llama31-2shards", "llama31-long", "llama31-4shards-fp16"])
def test_golden_folders_agree_with_metas_code(tmp_path, name):
    """Logits of the converted folder, float32, within 2e-4 of the reference's."""
    report = convert(DATA / name, tmp_path / "out", dtype="float32", progress=False)
    assert report.packing == "float32" and report.checksums > 0
    expected = mx.load(str(DATA / name / "expected.safetensors"))
    logits = load_model(tmp_path / "out")(expected["tokens"])[:, -expected["logits"].shape[1] :]
    assert mx.abs(logits - expected["logits"]).max().item() < 2e-4


@pytest.mark.parametrize("name", ["gqa2", "tied-rope32", "rope8-mha", "mqa-odd-vocabulary", "gqa8-head-dim"])
def test_folders_of_transformers_agree_with_its_logits(tmp_path, name):
    """Tied or not, scaled RoPE, groups of 1 to 8, `head_dim` of its own; within 1e-4 of logits around 5."""
    convert(DATA / "transformers" / name, tmp_path / "out", dtype="float32", progress=False)
    expected = mx.load(str(DATA / "transformers" / f"{name}.expected.safetensors"))
    logits = load_model(tmp_path / "out")(expected["tokens"])[:, -24:]
    assert mx.abs(expected["logits"]).max().item() > 1
    assert mx.abs(logits - expected["logits"]).max().item() < 1e-4


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
def test_biases_are_refused_in_a_clear_word(tmp_path, key):
    folder = write_folder(tmp_path / "in", ARGS, HALF, **{key: True})
    assert f"{key} is True, must be False: this model is not of the Llama 3 architecture" in refused(
        folder, tmp_path / "out"
    )


@pytest.mark.parametrize("block", [1 << 24, 64 * 7, 1])
def test_any_size_of_block_gives_the_same_file(tmp_path, monkeypatch, block):
    """Block borders fall inside heads, shards and groups."""
    monkeypatch.setattr("convert.conversion.plan._BLOCK_ELEMENTS", block)
    weights = meta_weights()
    convert(write_meta(tmp_path / "in", 4, weights), tmp_path / "out", progress=False)
    actual = load(tmp_path / "out")
    for name, array in actual.items():
        official = hf_to_official(name)
        assert array.dtype == mx.bfloat16
        np.testing.assert_array_equal(array.astype(mx.float32), hf_rows(official, weights[official], 8))
    convert(tmp_path / "in", tmp_path / "packed", recipe=make_recipe(4, group_size=32), progress=False)
    for name, parts in quantized(actual).items():
        assert mx.array_equal(load(tmp_path / "packed")[name], parts).item()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtypes(tmp_path, dtype):
    convert(write_folder(tmp_path / "in", ARGS, WEIGHTS), tmp_path / "out", dtype=dtype, progress=False)
    expected = {name: array.astype(getattr(mx, dtype)) for name, array in WEIGHTS.items()}
    same(load(tmp_path / "out"), expected)
    assert config(tmp_path / "out")["torch_dtype"] == dtype


def test_dtype_of_the_source_is_kept_and_strays_follow_the_rest(tmp_path):
    mixed = HALF | {"model.norm.weight": WEIGHTS["model.norm.weight"]}
    convert(write_folder(tmp_path / "in", ARGS, mixed), tmp_path / "out", progress=False)
    same(load(tmp_path / "out"), HALF)


@pytest.mark.parametrize("bits, size", [(2, 32), (3, 32), (4, 32), (5, 32), (6, 32), (8, 32), (4, 64)])
def test_quantized_as_mlx_does(tmp_path, bits, size):
    recipe = make_recipe(bits, group_size=size)
    report = convert(write_folder(tmp_path / "in", ARGS, HALF), tmp_path / "out", recipe=recipe, progress=False)
    actual, settings = load(tmp_path / "out"), {"group_size": size, "bits": bits, "mode": "affine"}
    dense = {n for n, array in HALF.items() if array.shape[-1] % size}
    expected = quantized({n: array for n, array in HALF.items() if n not in dense}, bits=bits, group_size=size)
    same(actual, expected | {n: HALF[n] for n in dense})
    assert config(tmp_path / "out")["quantization"] == config(tmp_path / "out")["quantization_config"] == settings
    assert any("stay dense" in note for note in report.notes) == bool(dense)


@pytest.mark.parametrize("mode, size", [("mxfp4", 32), ("mxfp8", 32), ("nvfp4", 16)])
def test_microscaling_modes(tmp_path, mode, size):
    convert(write_folder(tmp_path / "in", ARGS, HALF), tmp_path / "out", recipe=make_recipe(mode), progress=False)
    bits = 8 if mode == "mxfp8" else 4
    same(load(tmp_path / "out"), quantized(HALF, bits=bits, group_size=size, mode=mode))


def test_mixed_recipe_is_written_into_the_config(tmp_path):
    args = tiny_args(n_layers=4, hidden_dim=128)
    weights = {name: array.astype(mx.float16) for name, array in random_weights(args).items()}
    recipe = make_recipe(recipe="mixed_3_6", quantize_embeddings=False)
    convert(write_folder(tmp_path / "in", args, weights), tmp_path / "out", recipe=recipe, progress=False)
    settings = config(tmp_path / "out")["quantization"]
    more = {"group_size": 64, "bits": 6, "mode": "affine"}
    modules = [f"model.layers.{n}.{m}" for n in (2, 3) for m in ("self_attn.v_proj", "mlp.down_proj")] + ["lm_head"]
    assert settings == {"group_size": 64, "bits": 3, "mode": "affine", **dict.fromkeys(modules, more)}
    actual = load(tmp_path / "out")
    assert actual["model.embed_tokens.weight"].dtype == mx.float16 and "model.embed_tokens.scales" not in actual
    assert actual["lm_head.weight"].shape == (320, 64 * 6 // 32)
    assert load_model(tmp_path / "out")(mx.array([[1, 2, 3]])).shape == (1, 3, 320)


class TestPackedSource:
    """A folder that MLX quantized: 4 bits, groups of 32, float16 scales."""

    @pytest.fixture
    def packed(self) -> dict[str, mx.array]:
        return quantized({name: array.astype(mx.float16) for name, array in WEIGHTS.items()})

    @pytest.fixture
    def folder(self, tmp_path, packed) -> Path:
        settings = {"group_size": 32, "bits": 4}
        return write_folder(tmp_path / "in", ARGS, packed, quantization=settings)

    def unpack(self, packed) -> mx.array:
        """The dequantized head in float16, rounded once."""
        factors = [packed[f"lm_head.{part}"].astype(mx.float32) for part in ("scales", "biases")]
        return mx.dequantize(packed["lm_head.weight"], *factors, group_size=32, bits=4).astype(mx.float16)

    def test_copied_as_it_is(self, folder, packed, tmp_path):
        convert(folder, tmp_path / "out", progress=False)
        same(load(tmp_path / "out"), packed)
        assert config(tmp_path / "out")["quantization"] == {"group_size": 32, "bits": 4, "mode": "affine"}

    def test_same_recipe_changes_nothing(self, folder, packed, tmp_path):
        convert(folder, tmp_path / "out", recipe=make_recipe(4, group_size=32), progress=False)
        same(load(tmp_path / "out"), packed)

    def test_scales_of_another_type(self, folder, packed, tmp_path):
        convert(folder, tmp_path / "out", dtype="bfloat16", progress=False)
        to = lambda array: array.astype(mx.bfloat16) if array.dtype == mx.float16 else array  # noqa: E731
        same(load(tmp_path / "out"), {name: to(array) for name, array in packed.items()})

    def test_unpacked(self, folder, packed, tmp_path):
        convert(folder, tmp_path / "out", dequantize=True, progress=False)
        actual = load(tmp_path / "out")
        assert actual.keys() == WEIGHTS.keys() and "quantization" not in config(tmp_path / "out")
        assert mx.array_equal(actual["lm_head.weight"], self.unpack(packed)).item()

    def test_quantized_anew(self, folder, packed, tmp_path):
        convert(folder, tmp_path / "out", recipe=make_recipe(8), progress=False)
        actual = load(tmp_path / "out")
        again = mx.quantize(self.unpack(packed), group_size=64, bits=8)
        assert mx.array_equal(actual["lm_head.weight"], again[0]).item()
        assert mx.array_equal(actual["lm_head.scales"], again[1]).item()

    def test_both_at_once(self, folder, tmp_path):
        with pytest.raises(UserError, match="contradict"):
            convert(folder, tmp_path / "out", dequantize=True, recipe=make_recipe(8), progress=False)


def test_what_a_folder_holds(tmp_path):
    folder = write_folder(tmp_path / "in", ARGS, HALF, bos_token_id=1, eos_token_id=[2, 3])
    (folder / "LICENSE.txt").write_text("be kind")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    report = convert(folder, tmp_path / "out", progress=False)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "LICENSE.txt", "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    settings = config(tmp_path / "out")
    assert settings["bos_token_id"] == 1 and settings["eos_token_id"] == [2, 3] and "temperature" not in settings
    assert from_hf(settings, source="out") == ARGS
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 3], "temperature": 0.6}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Hugging Face folder, 1 safetensors file" in card and "no NaN and no infinity" in card
    assert "# in, for MLX" in card and "base_model" not in card and "mlx-llama3 generate --model FOLDER" in card
    assert report.parameters == sum(array.size for array in HALF.values()) and report.bits_per_weight == 16
    assert str(report).startswith(f"{tmp_path / 'out'}: 30 tensors, 0.00 GB, bfloat16\n")


def test_card_without_a_tokenizer_promises_no_text(tmp_path):
    folder = write_meta(tmp_path / "name" / "original", 2)
    convert(folder, tmp_path / "out", recipe=make_recipe(4, group_size=128), progress=False)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# name, for MLX" in card and "- no tokenizer.model in" in card and "--model FOLDER" not in card
    assert "matrices stay dense: their rows are not whole groups of 128" in card


def refused(source: Path, target: Path, **options) -> str:
    before = sorted(target.parent.iterdir())
    with pytest.raises(UserError) as error:
        convert(source, target, progress=False, **options)
    assert sorted(target.parent.iterdir()) == before
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_nan_and_infinity_are_named(tmp_path, value, packed, dtype):
    name = "model.layers.1.mlp.down_proj.weight"
    weights = {key: array.astype(dtype) for key, array in WEIGHTS.items()}
    weights[name][63, 95] = value
    folder = write_folder(tmp_path / "in", ARGS, weights)
    recipe = make_recipe(4, group_size=32) if packed else None
    assert f"model.safetensors: {name}: holds NaN or infinity" in refused(folder, tmp_path / "out", recipe=recipe)


def test_nan_in_scales_that_are_copied(tmp_path):
    packed = quantized(WEIGHTS)
    packed["model.layers.0.mlp.up_proj.scales"][0, 0] = float("nan")
    folder = write_folder(tmp_path / "in", ARGS, packed, quantization={"group_size": 32, "bits": 4})
    assert "model.layers.0.mlp.up_proj.weight: holds NaN" in refused(folder, tmp_path / "out")


def test_value_too_large_for_float16(tmp_path):
    weights = dict(HALF)
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1e5
    folder = write_folder(tmp_path / "in", ARGS, weights)
    message = refused(folder, tmp_path / "out", dtype="float16")
    assert "model.norm.weight: has values too large for" in message and "--dtype bfloat16" in message
    convert(folder, tmp_path / "out", progress=False)


def test_flipped_bit_in_a_shard(tmp_path):
    """Only the zip's checksum detects it; the model would be slightly wrong."""
    folder = write_meta(tmp_path / "in", 2)
    path = folder / "consolidated.01.pth"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert "consolidated.01.pth: the bytes of " in refused(folder, tmp_path / "out")


def test_disk_that_is_too_small(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=50 << 20)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)
    message = refused(write_folder(tmp_path / "in", ARGS, HALF), tmp_path / "out")
    assert "needs 0.07 GB, but the disk has 0.05 GB free" in message


def test_existing_target(tmp_path):
    folder = write_folder(tmp_path / "in", ARGS, HALF)
    convert(folder, tmp_path / "out", progress=False)
    assert "exists already" in refused(folder, tmp_path / "out")
    convert(folder, tmp_path / "out", dtype="float32", overwrite=True, progress=False)
    assert load(tmp_path / "out")["model.norm.weight"].dtype == mx.float32
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_unknown_dtype(tmp_path):
    assert "'int8' is not one of" in refused(write_folder(tmp_path / "in", ARGS, HALF), tmp_path / "out", dtype="int8")


@pytest.mark.parametrize("after", [0, 1, 20])
def test_kill_9_leaves_nothing_and_the_next_run_cleans_up(tmp_path, after):
    """The child stops after some blocks and is killed there, as a person or the system would kill it."""
    write_meta(tmp_path / "in", 2)
    program = f"""
        import time
        from convert.conversion import to_mlx as module
        read_blocks, count = module.read_blocks, 0
        def slow(steps):
            global count
            for block in read_blocks(steps):
                if count == {after}:
                    print("here", flush=True)
                    time.sleep(60)
                count += 1
                yield block
        module.read_blocks = slow
        module.convert({str(tmp_path / "in")!r}, {str(tmp_path / "out")!r})
        """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"here\n"
        os.kill(child.pid, signal.SIGKILL)
    left = [path.name for path in tmp_path.iterdir()]
    assert "out" not in left and any(name.startswith(".out.partial-") for name in left)
    convert(tmp_path / "in", tmp_path / "out", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
    assert load_model(tmp_path / "out").args.dim == PARAMS["dim"]


def test_kill_9_at_any_moment(tmp_path):
    """Killed after delays from zero to a whole conversion: the target is absent, or loads."""
    write_meta(tmp_path / "in", 2)
    command = [sys.executable, "-m", "convert", str(tmp_path / "in"), str(tmp_path / "out"), "--overwrite"]
    started = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    whole = time.monotonic() - started
    shutil.rmtree(tmp_path / "out")
    for part in (0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as child:
            time.sleep(part * whole)
            child.kill()
        if (tmp_path / "out").exists():
            load_model(tmp_path / "out")
    convert(tmp_path / "in", tmp_path / "out", overwrite=True, progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_progress_is_reported_and_can_end_the_conversion(tmp_path):
    folder = write_folder(tmp_path / "in", ARGS, HALF)
    calls: list[tuple[int, int]] = []
    report = convert(folder, tmp_path / "out", progress=False, on_progress=lambda *numbers: calls.append(numbers))
    assert calls == sorted(calls) and calls[-1] == (report.nbytes, report.nbytes) and len(calls) == len(HALF)

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(folder, tmp_path / "again", progress=False, on_progress=stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_memory_of_mlx_is_given_back(tmp_path):
    folder = write_folder(tmp_path / "in", ARGS, HALF)
    before = mx.set_cache_limit(123 << 20)
    convert(folder, tmp_path / "out", progress=False)
    assert mx.set_cache_limit(before) == 123 << 20


def test_blocks_stay_small_whatever_the_matrix():
    """405B: the widest matrix is 53248 x 16384; a block of it is 32 MB in bfloat16, and whole heads."""
    from convert.sources.source import SourceTensor

    for shape in ((53248, 16384), (16384, 53248), (128256, 16384), (16384,), (16384, 16384)):
        step = PlanStep(SourceTensor("w", shape, mx.bfloat16, "", None), mx.bfloat16)
        columns = shape[1] if len(shape) > 1 else 1
        assert 0 < step.block_rows * columns * 2 <= 32 << 20
        assert step.block_rows < 256 or step.block_rows % 256 == 0
