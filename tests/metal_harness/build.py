"""Metal source -> C++ for OpenCL -> shared library, with the compiler of the `ziglang` package."""

import hashlib
import inspect
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.metal_harness.host import INSTRUCTIONS, PROCESSOR, UNSUPPORTED
from tests.metal_harness.source import Kernel, Parameter, signature

import mlx.core as mx

HERE = Path(__file__).parent
MAX_BUFFERS = 31  # of a kernel; shapes and strides that the source names are buffers too
MLX_HEADERS = Path(mx.__file__).parent / "include"

# What a host without these instructions could not run; half and bfloat round after each operation, as on the GPU.
TARGET = (
    f"--target={PROCESSOR}-linux-gnu",
    INSTRUCTIONS,
    "-fPIC",
    "-ffp-contract=on",
    "-fno-omit-frame-pointer",  # the executor follows calls by it
    "-fstack-clash-protection",  # a frame larger than the guard page under a thread's stack must not reach over it
)
LANGUAGE = (
    *("-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc", "-nostdinc", "-cl-single-precision-constant"),
    "-fsigned-char",
    *("-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none"),
    "-Xclang",
    "-cl-ext=+cl_khr_fp16,+cl_khr_fp64,+__opencl_c_fp64,+__cl_clang_non_portable_kernel_param_types,"
    "+__cl_clang_function_pointers,+__cl_clang_variadic_functions,"
    "+__opencl_c_generic_address_space,+__opencl_c_program_scope_global_variables",
    *("-I", str(HERE / "shim"), "-I", str(MLX_HEADERS)),
    *("-Wno-unknown-attributes", "-ferror-limit=10"),
)


class BuildError(Exception):
    """The compiler's message, with lines of the Metal source."""


@dataclass(frozen=True)
class Mode:
    """A way to compile: `frontend` flags go with the source; `rewrite` changes the LLVM code made of it, as text (two
    modes with different ones have different names); `optimizer` flags go with that."""

    name: str
    frontend: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()
    rewrite: Callable[[str], str] | None = None


RUN = Mode("run", ("-O2",), ("-O2",))
# Where fast math is on, `exp(-inf)` need not be 0: functions give NaN for infinite arguments or results, except those
# of `metal::precise`. (MLX compiles with safe math unless it is asked, but `metal::fast` stays fast.)
FINITE = Mode("finite", (*RUN.frontend, "-DMETAL_FINITE_MATH"), RUN.optimizer)


def library(kernel: Kernel, mode: Mode = RUN) -> Path:
    """A shared library of `kernel`, from the cache if it was built before. Raises BuildError."""
    text = translated(kernel)
    rewrite = mode.rewrite and inspect.getsource(inspect.getmodule(mode.rewrite))
    key = (text, mode.name, mode.frontend, mode.optimizer, rewrite)
    return _cached(f"{kernel.name}-{mode.name}", ".so", key, lambda path: _build(text, mode, path))


def libraries(kernels: Iterable[Kernel], mode: Mode = RUN) -> list[Path]:
    """As `library` for each, compiled in parallel."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda kernel: library(kernel, mode), kernels))


@cache
def runtime() -> Path:
    """The executor as a shared library (the first time compiles what zig needs of the C library: some seconds)."""
    flags = (f"--target={PROCESSOR}-linux-gnu.2.28", "-O2", "-fno-omit-frame-pointer")
    flags += ("-shared", "-fPIC", "-fvisibility=hidden")
    sources = [HERE / "runtime.c", *sorted((HERE / "instrumented").glob("*.c"))]
    headers = [HERE / "context_switch.h", HERE / "instrumented" / "checks.h"]
    key = [path.read_text() for path in (*sources, *headers)]
    return _cached("runtime", ".so", (key,), lambda path: zig("cc", *flags, *sources, "-lm", "-o", path))


def translated(kernel: Kernel) -> str:
    """`kernel` as C++ for OpenCL, with an entry point for the executor. Line numbers are the Metal source's.

    Raises BuildError if it has more buffers than Metal's compiler takes.
    """
    if len(kernel.buffers) > MAX_BUFFERS:
        raise BuildError(f"{kernel.name}: {len(kernel.buffers)} buffers, Metal takes at most {MAX_BUFFERS}")
    start, parameters, end = signature(kernel.source, kernel.name)
    head = kernel.source[start:parameters]
    declarations = "".join(_template_parameter(*pair) for pair in kernel.template) if "template" in head else ""
    lines = "\n" * head.count("\n")
    body = re.sub(r"\ntemplate \[\[host_name\(.*", "\n", kernel.source[end:])
    source = (
        _respelled(kernel.source[:start])
        + f"{declarations}{lines}__kernel void {kernel.name}("
        + kernel.source[parameters:end]
        + _respelled(body)
    )
    return f"{_PREAMBLE}{_line(1, kernel)}{source}\n{_line(1, 'entry')}{_entry(kernel)}"


def check_syntax(text: str, *flags: str) -> tuple[str, str]:
    """The compiler's warnings for C++ for OpenCL, and what `flags` let it print. Raises BuildError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.clcpp")
        path.write_text(text)
        return zig("clang", *LANGUAGE, *TARGET, *flags, "-fsyntax-only", path)


def zig(tool: str, *arguments: str | Path) -> tuple[str, str]:
    """Run `python -m ziglang <tool> …`; what it said on stderr and on stdout. Raises BuildError if it failed, and where
    the harness cannot run."""
    if UNSUPPORTED:
        raise BuildError(UNSUPPORTED)
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(cache_folder() / "zig")}
    done = subprocess.run([_zig(), tool, *arguments], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(done.stderr)
    return done.stderr, done.stdout


def _zig() -> Path:
    import ziglang  # here, so that this module can be imported where the package is not installed

    return Path(ziglang.__file__).parent / "zig"


def cache_folder() -> Path:
    """Where compiled kernels are kept: `METAL_ON_CPU_CACHE`, or a folder of the user's cache."""
    of_user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("METAL_ON_CPU_CACHE") or Path(of_user, "metal-on-cpu"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# MLX puts this header before every custom kernel.
_PREAMBLE = '#include <metal_stdlib>\n#include "mlx/backend/metal/kernels/utils.h"\n'


def _line(number: int, of: Kernel | str) -> str:
    return f'#line {number} "{of if isinstance(of, str) else of.name + ".metal"}"\n'


def _template_parameter(declaration: str, value: str) -> str:
    """A kernel cannot be a template here: its parameters become names before it."""
    kind, name = declaration.split("=")[0].strip().rsplit(" ", 1)
    if kind in ("typename", "class"):
        return f"using {name} = {value}; "
    return f"constexpr __constant {kind.removeprefix('const ')} {name} = {value}; "


def _respelled(text: str) -> str:
    """What C++ for OpenCL does not take: `vec<T, 2>(a, b)` becomes a call of the shim's function, and a parameter
    `thread const T& x` is passed as a value, because the reference would not take a temporary, nor a constant."""
    text = re.sub(r"\b(?:metal::)?vec<([^<>]*)>\s*\(", r"metal::make<vec<\1>>(", text)
    return re.sub(r"(?<=[(,])(\s*)(?:thread\s+const|const\s+thread)\s+([\w:<>, ]+?)\s*&\s*(?=\w)", r"\1const \2 ", text)


def _entry(kernel: Kernel) -> str:
    arguments, index = [], 0
    for parameter in kernel.parameters:
        if parameter.space:
            arguments.append(_buffer_argument(parameter, index))
            index += 1
        else:
            arguments.append(f"metal_attribute_{parameter.attribute}<{parameter.type}>(at, of)")
    return (
        "#include <metal_entry>\n"
        'extern "C" void metal_entry(const MetalThread* at, const MetalGroup* of, const ulong* buffers) {\n'
        f"  {kernel.name}({', '.join(arguments)});\n}}\n"
    )


def _buffer_argument(parameter: Parameter, index: int) -> str:
    kind = f"{'const ' * parameter.const}{parameter.space} {parameter.type}*"
    return f"{'*' * parameter.reference}({kind})metal_buffer(buffers, {index})"


def _build(text: str, mode: Mode, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, code, compiled = (Path(folder, f"kernel.{kind}") for kind in ("clcpp", "ll", "o"))
        source.write_text(text)
        zig("clang", *LANGUAGE, *TARGET, *mode.frontend, *_AS_WRITTEN, "-o", code, source)
        adapted = _for_threads(code.read_text())
        code.write_text(mode.rewrite(adapted) if mode.rewrite else adapted)
        zig("clang", "-x", "ir", *TARGET, *mode.optimizer, "-c", "-o", compiled, code)
        zig("ld.lld", "-shared", "-o", path, compiled)


_AS_WRITTEN = ("-S", "-emit-llvm", "-Xclang", "-disable-llvm-passes")


def _for_threads(code: str) -> str:
    """LLVM code with threadgroup variables visible from outside, in one section, and a kernel that C can call.

    The variables are private to the file, and OpenCL says that a kernel does not recur: the optimizer would turn them
    into local variables, each thread with its own.
    """
    variable = re.compile(r"^(@\S+) = internal global (.*?), align", flags=re.M)
    code = variable.sub(r'\1 = protected global \2, section "threadgroup", align', code)
    return re.sub(r"^(define .*?)spir_kernel ", r"\1", code, flags=re.M)


def _cached(name: str, suffix: str, key: tuple, make: Callable[[Path], None]) -> Path:
    """The file for `key`, made if it is not there. Two processes may make it at once: each renames a whole file."""
    digest = hashlib.sha256(repr((key, _tools())).encode()).hexdigest()[:20]
    path = cache_folder() / f"{name[:100]}-{digest}{suffix}"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            made = Path(folder, path.name)
            make(made)
            made.rename(path)
    return path


@cache
def _tools() -> tuple:
    """What a compiled kernel depends on besides its text."""
    shim = [path.read_text() for path in sorted((HERE / "shim").rglob("*")) if path.is_file()]
    return (zig("version")[1], str(_zig()), mx.__version__, shim, LANGUAGE, TARGET)
