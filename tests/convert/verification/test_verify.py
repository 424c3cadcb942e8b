"""Verification accepts correct folders and detects every kind of damage that leaves a folder loadable."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from meta_checkpoint import PARAMS, write_meta, write_tokenizer_model
from tiny_models import ARGS, random_weights, tiny_args, write_folder

from convert.commands import verify as verify_command
from convert.conversion.recipe import make_recipe
from convert.conversion.to_mlx import convert
from convert.sources.huggingface import open_huggingface
from convert.sources.open import open_source
from convert.verification.compare import compare
from convert.verification.layerwise_logits import run_layerwise
from convert.verification.verify import Verification, verify
from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.errors import UserError
from mlx_llama3.model.config import RopeScaling

import mlx.core as mx

PEFT = Path(__file__).parents[2] / "data" / "peft"
WEIGHTS = random_weights(ARGS)
TOKENS = mx.array([5, 17, 200, 3, 3, 99, 42, 250, 1, 0, 77, 128])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "rope_scaling": RopeScaling(32.0), "rope_theta": 500000.0},
        {"n_kv_heads": 1, "head_dim": 32, "vocab_size": 331},
    ],
)
@pytest.mark.parametrize("block", [1 << 24, 64 * 5])
def test_layer_by_layer_gives_the_models_logits(tmp_path, monkeypatch, changes, block):
    monkeypatch.setattr("convert.conversion.plan._BLOCK_ELEMENTS", block)
    args = tiny_args(**changes)
    folder = write_folder(tmp_path, args, random_weights(args))
    logits = run_layerwise(open_huggingface(folder), TOKENS)
    assert mx.abs(logits - load_model(folder)(TOKENS[None])[0]).max().item() < 1e-5


def check(tmp_path: Path, source: Path, **options) -> Verification:
    convert(source, tmp_path / "out", **options, progress=False)
    return verify(tmp_path / "out", source, adapter=options.get("adapter"), progress=False)


def test_dense_folder(tmp_path):
    verification = check(tmp_path, write_meta(tmp_path / "in", 4), dtype="bfloat16")
    assert verification.ok and all(c.exact for c in verification.comparisons) and len(verification.comparisons) == 21
    assert verification.divergence.kl < 1e-6 and verification.divergence.agreement == 1
    assert "bfloat16: 21 tensors, equal to the source" in str(verification) and str(verification).endswith("verified")


def test_cast_folder_equals_the_cast_source(tmp_path):
    verification = check(tmp_path, write_folder(tmp_path / "in", ARGS, WEIGHTS), dtype="float16")
    assert verification.ok and 0 < verification.divergence.kl < 1e-4


RECIPES = {
    **{f"{bits} bits": make_recipe(bits, group_size=32) for bits in (2, 3, 4, 5, 6, 8)},
    **{mode: make_recipe(mode) for mode in ("mxfp4", "mxfp8", "nvfp4")},
    "mixed": make_recipe(recipe="mixed_4_6"),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_packed_folder(tmp_path, recipe):
    verification = check(tmp_path, write_folder(tmp_path / "in", ARGS, WEIGHTS), recipe=recipe, dtype="float16")
    assert verification.ok, str(verification)
    packed = [c for c in verification.comparisons if "float" not in c.packing]
    assert len(packed) >= 20 and all(not c.exact and 0.01 < c.worst <= 1 for c in packed)
    assert verification.divergence.kl > 0 and "relative RMS error" in str(verification)


def test_more_bits_diverge_less(tmp_path):
    source = write_folder(tmp_path / "in", ARGS, WEIGHTS)
    kl = {}
    for bits in (2, 4, 8):
        convert(source, tmp_path / str(bits), recipe=make_recipe(bits, group_size=32), progress=False)
        kl[bits] = verify(tmp_path / str(bits), source, progress=False).divergence.kl
    assert kl[2] > 5 * kl[4] > 25 * kl[8] > 0


def test_adapter_and_packed_source(tmp_path):
    assert check(tmp_path, PEFT / "base", adapter=PEFT / "lora").ok
    convert(PEFT / "base", tmp_path / "packed", recipe=make_recipe(4, group_size=32), progress=False)
    convert(tmp_path / "packed", tmp_path / "copy", progress=False)
    verification = verify(tmp_path / "copy", tmp_path / "packed", progress=False)
    assert verification.ok and all(c.exact for c in verification.comparisons)


@pytest.fixture
def pair(tmp_path) -> tuple[Path, Path]:
    """A source and its 8-bit folder with dense norms."""
    source = write_folder(tmp_path / "in", ARGS, WEIGHTS)
    convert(source, tmp_path / "out", recipe=make_recipe(8, group_size=32), progress=False)
    return tmp_path / "out", source


def damage(folder: Path, name: str, change) -> None:
    weights = mx.load(str(folder / "model.safetensors"))
    weights[name] = change(weights[name])
    mx.eval(weights)
    (folder / "model.safetensors").unlink()
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def swap_rows(array: mx.array) -> mx.array:
    return array[mx.array([1, 0, *range(2, array.shape[0])])]


def nudge(array: mx.array) -> mx.array:
    array[3] += 1e-3
    return array


DAMAGE = {
    "a norm": ("model.norm.weight", nudge),
    "scales": ("model.layers.1.mlp.up_proj.scales", lambda a: a * 1.5),
    "biases": ("model.layers.1.mlp.up_proj.biases", lambda a: -a),
    "two rows": ("model.layers.2.self_attn.k_proj.weight", swap_rows),
    "a packed word": ("lm_head.weight", lambda a: a ^ mx.array([[1 << 31]] + [[0]] * 319, dtype=mx.uint32)),
    "the RoPE layout": (
        "model.layers.0.self_attn.q_proj.weight",
        lambda a: a.reshape(4, 2, 8, -1).swapaxes(1, 2).reshape(64, -1),
    ),
}


@pytest.mark.parametrize("name, change", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_found_and_named(pair, name, change):
    damage(pair[0], name, change)
    verification = verify(*pair, run=False, progress=False)
    wrong = [line for line in str(verification).splitlines() if line.startswith("WRONG")]
    assert not verification.ok and len(wrong) == 1 and name.rsplit(".", 1)[0] in wrong[0]
    assert str(verification).endswith("NOT VERIFIED")


@pytest.mark.parametrize("part", ["weight", "scales", "biases"])
def test_the_lowest_bit_of_a_copied_packing_counts(tmp_path, pair, part):
    convert(pair[0], tmp_path / "copy", progress=False)
    assert verify(tmp_path / "copy", pair[0], run=False, progress=False).ok

    def flip(array):
        bits = array if part == "weight" else array.view(mx.uint32 if array.dtype.size == 4 else mx.uint16)
        bits[5, 1] ^= 1
        return bits.view(array.dtype)

    damage(tmp_path / "copy", f"model.layers.1.mlp.up_proj.{part}", flip)
    verification = verify(tmp_path / "copy", pair[0], run=False, progress=False)
    assert not verification.ok and "WRONG: model.layers.1.mlp.up_proj.weight" in str(verification)


@pytest.mark.parametrize("key, value", [("rms_norm_eps", 1e-6), ("rope_theta", 5e5), ("tie_word_embeddings", True)])
def test_other_configuration(pair, key, value):
    path = pair[0] / "config.json"
    config = json.loads(path.read_text()) | {key: value}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    path.write_text(json.dumps(config))
    verification = verify(*pair, progress=False)
    assert not verification.ok and "DIFFERS: " in str(verification) and verification.divergence is None


def test_another_model_of_the_same_shape(pair, tmp_path):
    other = write_folder(tmp_path / "other", ARGS, random_weights(ARGS, seed=1))
    verification = verify(pair[0], other, run=False, progress=False)
    assert not verification.ok and sum("WRONG" in line for line in str(verification).splitlines()) == len(WEIGHTS)


def test_perplexities_on_a_text(tmp_path):
    params = PARAMS | {"vocab_size": 556}
    write_tokenizer_model(write_meta(tmp_path / "in", params=params) / "tokenizer.model", 300)
    convert(tmp_path / "in", tmp_path / "out", recipe=make_recipe(4, group_size=32), progress=False)
    verification = verify(tmp_path / "out", tmp_path / "in", text="O thou, whose power", progress=False)
    ids = mx.array([300, *b"O thou, whose power"])
    log_p = load_model(tmp_path / "out", dtype=mx.float32)(ids[None])[0]
    log_p -= mx.logsumexp(log_p, axis=-1, keepdims=True)
    expected = -mx.mean(mx.take_along_axis(log_p[:-1], ids[1:, None], axis=-1)).item()
    assert verification.divergence.tokens == ids.size
    assert verification.divergence.folder_perplexity == pytest.approx(math.exp(expected), rel=1e-4)
    assert f"on {ids.size} tokens of text: perplexity" in str(verification)


def command(*arguments: str | Path) -> int:
    parser = verify_command.argparse.ArgumentParser()
    verify_command.add_arguments(parser)
    return verify_command.run(parser.parse_args(list(map(str, arguments))))


def test_findings_on_the_model_card(pair, capsys):
    for _ in range(2):
        assert command(pair[0], "--against", pair[1], "--no-run", "--write-card") == 0
    card = (pair[0] / "README.md").read_text()
    printed = "".join(f"    {line}\n" for line in capsys.readouterr().out.splitlines()[-4:])
    assert card.count("## Verified") == 1 and card.endswith(printed) and card.startswith("---\nlibrary_name: mlx")
    (pair[0] / "README.md").unlink()
    assert command(pair[0], "--against", pair[1], "--no-run", "--write-card") == 0
    assert (pair[0] / "README.md").read_text().startswith("# out\n")


def test_command_and_its_exit_codes(pair, capsys):
    assert command(pair[0], "--against", pair[1], "--no-run") == 0
    assert capsys.readouterr().out.endswith("\nverified\n")
    damage(pair[0], "model.norm.weight", nudge)
    assert command(pair[0], "--against", pair[1], "--no-run") == 1
    with pytest.raises(UserError, match="no such"):
        command(pair[0], "--against", pair[1] / "nowhere", "--no-run")


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([("affine", bits) for bits in (2, 3, 4, 5, 6, 8)] + [("mxfp4", 4), ("mxfp8", 8), ("nvfp4", 4)]),
    st.sampled_from(["float16", "bfloat16", "float32"]),
    st.sampled_from(["normal", "uniform", "one-sided", "outliers", "constant", "tiny"]),
    st.integers(0, 1 << 30),
)
def test_the_bound_holds_for_any_weights(tmp_path_factory, mode_and_bits, dtype, kind, seed):
    """MLX's own quantization never exceeds the bound, whatever the values."""
    mode, bits = mode_and_bits
    key = mx.random.key(seed)
    args = tiny_args(n_layers=1)
    weights = random_weights(args, seed=seed % 1000)
    shape = weights["lm_head.weight"].shape
    made = {
        "normal": lambda: mx.random.normal(shape, key=key),
        "uniform": lambda: mx.random.uniform(-1, 1, shape, key=key),
        "one-sided": lambda: mx.abs(mx.random.normal(shape, key=key)) + 0.5,
        "outliers": lambda: mx.random.normal(shape, key=key) ** 5,
        "constant": lambda: mx.full(shape, 0.37),
        "tiny": lambda: mx.random.normal(shape, key=key) * 1e-4,
    }
    weights["lm_head.weight"] = made[kind]()
    work = tmp_path_factory.mktemp("bound", numbered=True)
    write_folder(work / "in", args, {n: a.astype(getattr(mx, dtype)) for n, a in weights.items()})
    recipe = make_recipe(bits if mode == "affine" else mode, group_size=32 if mode == "affine" else None)
    convert(work / "in", work / "out", recipe=recipe, progress=False)
    comparisons = {c.name: c for c in compare(open_huggingface(work / "out"), open_source(work / "in"))}
    assert all(c.within for c in comparisons.values()), [c for c in comparisons.values() if not c.within]


def test_bound_of_one_step_is_reached_but_not_by_much(tmp_path):
    """A bound that is never approached would prove nothing."""
    source = write_folder(tmp_path / "in", ARGS, WEIGHTS)
    verification = check(tmp_path, source, recipe=make_recipe(4, group_size=32))
    assert max(c.worst for c in verification.comparisons) > 0.9
