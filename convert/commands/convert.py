"""The options of `mlx-llama3 convert` and `python -m convert`: one definition for both."""

import argparse
from pathlib import Path

DESCRIPTION = """\
Convert a Llama 3 checkpoint into a folder that mlx-llama3, mlx-lm and LM Studio load, or into a GGUF file.
SOURCE is Meta's download (params.json, consolidated.*.pth), a Hugging Face folder, a GGUF file, or a name to
download: a hub id ORG/NAME[@REVISION], Meta's files in it as ORG/NAME/original, one of its GGUF files as
ORG/NAME/FILE.gguf, an alias such as llama3.2-1b, or demo."""
_EPILOG = """\
examples:
  mlx-llama3 convert ~/Llama3.1-8B-Instruct llama-8b
  mlx-llama3 convert meta-llama/Llama-3.2-1B-Instruct llama-1b-4bit --quantize 4
  mlx-llama3 convert model.Q4_K_M.gguf llama-gguf
  mlx-llama3 convert org/Llama-3.2-1B-GGUF/model.Q4_K_M.gguf llama-gguf
  mlx-llama3 convert ~/Llama3.3-70B-Instruct llama-70b --recipe mixed_4_6
  mlx-llama3 convert llama-8b llama-8b.gguf --to gguf-q8_0

a recipe file (the last matching override decides; layers are numbers or "outer"; bits null: not quantized):
  {"bits": 4, "group_size": 64, "overrides": [{"tensors": ["w2", "wv"], "layers": "outer", "bits": 6},
                                              {"tensors": ["tok_embeddings", "output"], "bits": 8}]}"""
_GGUF = {"gguf": "F16", "gguf-f16": "F16", "gguf-q8_0": "Q8_0", "gguf-q4_1": "Q4_1"}
# Options that `--to gguf-*` refuses.
_MLX_ONLY = ("dtype", "quantize", "group_size", "recipe", "keep_embeddings", "keep_head", "dequantize", "exact_scales")
_BITS = ("2", "3", "4", "5", "6", "8", "mxfp4", "mxfp8", "nvfp4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `run` reads. Imports neither MLX nor numpy."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = DESCRIPTION, _EPILOG
    parser.add_argument("source", metavar="SOURCE", help="checkpoint: folder, .gguf file or hub id")
    parser.add_argument("target", metavar="TARGET", type=Path, help="folder to write (with --to gguf: file)")
    parser.add_argument(
        "--to",
        choices=("mlx", *_GGUF),
        default="mlx",
        help="target format: an MLX folder (default), or a GGUF file for llama.cpp; gguf means gguf-f16",
    )
    parser.add_argument(
        "--dtype",
        choices=("float16", "bfloat16", "float32"),
        help="dtype of values and scales (default: as in the source)",
    )
    parser.add_argument(
        "--quantize", metavar="BITS", choices=_BITS, help=f"quantize all matrices alike: {', '.join(_BITS)}"
    )
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128), help="values that share a scale (default: 64)")
    parser.add_argument(
        "--recipe",
        metavar="NAME|FILE",
        help="mixed bits: mixed_2_6, mixed_3_4, mixed_3_6, mixed_4_6, mixed_4_8 or a JSON file as below",
    )
    parser.add_argument("--keep-embeddings", action="store_true", help="do not quantize the embedding")
    parser.add_argument("--keep-head", action="store_true", help="do not quantize the output head")
    parser.add_argument(
        "--adapter", metavar="FOLDER", type=Path, help="fuse a LoRA adapter of PEFT or mlx-lm into the weights"
    )
    parser.add_argument("--dequantize", action="store_true", help="dequantize what is quantized in the source")
    parser.add_argument(
        "--exact-scales",
        action="store_true",
        help="GGUF Q4_K, Q5_K: float32 scales, exact but slower to run (default: float16, the error is reported)",
    )
    parser.add_argument(
        "--rope-factor",
        type=float,
        metavar="X",
        help="RoPE scaling of Meta's checkpoints (default: 32 for 3.2 1B and 3B, 8 for 3.1 and 3.3)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing model, once all is written")
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no report")


def run(args: argparse.Namespace) -> int:
    """Convert as the parsed options say, print the report on standard output and return the exit code.

    Raises `UserError` for everything that the person can fix.
    """
    report = _to_folder(args) if args.to == "mlx" else _to_gguf(args)
    if not args.quiet:
        print(report)
    return 0


def _to_folder(args: argparse.Namespace) -> object:
    from convert.conversion.recipe import make_recipe
    from convert.conversion.to_mlx import convert
    from convert.sources.find import find_source
    from convert.storage.staged_folder import check_folder_target

    target = args.target.expanduser()
    # Checked before a download that may take hours.
    check_folder_target(target, overwrite=args.overwrite)

    recipe = make_recipe(
        args.quantize,
        group_size=args.group_size,
        recipe=args.recipe,
        quantize_embeddings=not args.keep_embeddings,
        quantize_head=not args.keep_head,
    )
    return convert(
        find_source(args.source, progress=not args.quiet),
        target,
        dtype=args.dtype,
        recipe=recipe,
        dequantize=args.dequantize,
        adapter=args.adapter,
        rope_factor=args.rope_factor,
        exact_scales=args.exact_scales,
        overwrite=args.overwrite,
        progress=not args.quiet,
    )


def _to_gguf(args: argparse.Namespace) -> object:
    from convert.conversion.to_gguf import to_gguf
    from convert.sources.find import find_source
    from convert.storage.staged_file import check_file_target
    from mlx_llama3.errors import UserError

    for option in _MLX_ONLY:
        if getattr(args, option):
            raise UserError(
                f"--{option.replace('_', '-')} is for MLX folders; the type of a GGUF file is part of --to: "
                f"{', '.join(_GGUF)}"
            )
    target = args.target.expanduser()
    check_file_target(target, overwrite=args.overwrite)
    return to_gguf(
        find_source(args.source, progress=not args.quiet),
        target,
        type_name=_GGUF[args.to],
        adapter=args.adapter,
        rope_factor=args.rope_factor,
        overwrite=args.overwrite,
        progress=not args.quiet,
    )
