"""What Apple's compiler would refuse, or what this project does not rely on, found without it.

The kernel is compiled as C++ for OpenCL with true address spaces, syntax only. Errors and warnings of clang are one
part; another are rules over its syntax tree, because C++ for OpenCL gives a pointer without an address space the
generic one, knows `double`, and converts float to bfloat silently, which Metal does not (Metal Shading Language
Specification, sections 2.1 and 4). The rest are rules over the words of the source (words.py).
"""

import re
from collections.abc import Iterable, Iterator

from tests.metal_harness import build
from tests.metal_harness.checking.clang_ast import Node, nodes
from tests.metal_harness.checking.words import (
    Finding,
    bfloat_without_need,
    mlx_names,
    names,
    signature_words,
    without_comments,
)
from tests.metal_harness.source import Kernel

# The syntax tree on stdout, and warnings beside those that clang gives by itself.
FLAGS = (
    *("-Xclang", "-ast-dump", "-fno-color-diagnostics"),
    *("-Wcast-qual", "-Wuninitialized", "-Wsometimes-uninitialized", "-Wvla"),
)
_DIAGNOSTIC = re.compile(
    r"^(?P<file>[^:\n]+):(?P<line>\d+):\d+: (?:fatal )?(?P<grade>error|warning): (?P<text>.*)$", re.M
)

# Of clang's kinds of nodes, those whose construct neither Metal nor MLX's own kernels have.
UNUSED = {
    "LambdaExpr": "a lambda",
    "GotoStmt": "goto",
    "GCCAsmStmt": "assembler",
    "CXXNewExpr": "new",
    "CXXDeleteExpr": "delete",
    "CXXThrowExpr": "an exception",
    "CXXTryStmt": "an exception",
    "CXXDynamicCastExpr": "dynamic_cast",
    "CXXTypeidExpr": "typeid",
    "VAArgExpr": "variadic arguments",
}
DECLARATIONS = ("VarDecl", "ParmVarDecl", "FieldDecl", "TypedefDecl", "TypeAliasDecl")
CASTS = ("CStyleCastExpr", "CXXFunctionalCastExpr", "CXXReinterpretCastExpr", "CXXStaticCastExpr", "CXXConstCastExpr")


def strict(kernel: Kernel) -> list[Finding]:
    """Findings in a kernel's source; empty for a good one.

    Included headers, of MLX and of the stand-in for Metal's library, are not judged. While clang finds an error, the
    rules over the syntax tree wait. They are stricter than Apple's compiler in three: a literal without f, a cast that
    drops const, a reference without an address space; MLX's kernels have a few of each.
    """
    diagnostics, dump = _compile(kernel)
    file = f"{kernel.name}.metal"
    tree = [node for node in nodes(dump) if node.file == file]
    found = [*_told_by_clang(diagnostics, file)]
    for rule in (_no_address_space, _double, _bfloat, _constructs, _reference_results):
        found += [finding for node in tree for finding in rule(node)]
    found += _unknown_names(kernel.source, tree) if tree else ()
    if kernel.name.startswith("custom_kernel_"):  # not MLX's own, whose signature is written by hand
        found += [*signature_words(kernel), *bfloat_without_need(kernel)]
    return sorted(set(found))


def _compile(kernel: Kernel) -> tuple[str, str]:
    """What clang says of the kernel, and its syntax tree, which is empty if there is an error."""
    try:
        return build.check_syntax(build.translated(kernel), *FLAGS)
    except build.BuildError as error:
        return str(error), ""


def _told_by_clang(diagnostics: str, file: str) -> Iterator[Finding]:
    for match in _DIAGNOSTIC.finditer(diagnostics):
        if match["file"] == file:
            yield Finding(int(match["line"]), f"clang: {match['text']}")
        elif match["grade"] == "error":
            yield Finding(0, f"clang: {match[0]}")


def _no_address_space(node: Node) -> Iterator[Finding]:
    """Every pointer and reference names its address space (section 4)."""
    is_written = node.kind in DECLARATIONS + CASTS
    if node.kind in ("FunctionDecl", "CXXMethodDecl"):
        is_written = any("__generic" in written.partition("(")[0] for written in node.types[:1])
    elif is_written:
        is_written = any("__generic" in written for written in node.types)
    if is_written:
        kind = "cast" if node.kind in CASTS else "declaration"
        yield Finding(node.line, f"pointer or reference without an address space in a {kind}: {node.types[0]}")


def _double(node: Node) -> Iterator[Finding]:
    """There is no double; a literal without f is a float in Metal, and a double to every other reader."""
    is_double = any(re.search(r"\bdouble", written) for written in node.types)
    if node.kind == "FloatingLiteral" and node.types[0] == "double":
        yield Finding(node.line, "floating-point literal without f or h")
    elif is_double and node.kind in DECLARATIONS + CASTS + ("BinaryOperator", "FunctionDecl", "CXXMethodDecl"):
        yield Finding(node.line, f"double: {node.types[0]}")


def _bfloat(node: Node) -> Iterator[Finding]:
    """Nothing becomes bfloat by itself: T(x) or static_cast<T>(x) must say so."""
    if not any("__bf16" in written for written in node.types):
        return
    if node.kind == "CompoundAssignOperator" and re.search(r"ComputeResultTy='(float|half)'", node.text):
        yield Finding(node.line, "a compound assignment converts float to bfloat implicitly")
    is_conversion = re.search("<(FloatingCast|IntegralToFloating)>", node.text)
    if node.kind == "ImplicitCastExpr" and is_conversion and "part_of_explicit_cast" not in node.text:
        yield Finding(node.line, "implicit conversion to bfloat")


def _constructs(node: Node) -> Iterator[Finding]:
    if node.kind in UNUSED:
        yield Finding(node.line, f"{UNUSED[node.kind]}: not a construct of MLX's own Metal sources")
    if node.kind == "VarDecl" and re.search(r"' static\b", node.text) and "__constant" not in node.text:
        yield Finding(node.line, "static variable in a function")
    if node.kind in DECLARATIONS and any(re.search(r"\((__\w+ )?\*", written) for written in node.types):
        yield Finding(node.line, f"function pointer or pointer to array: {node.types[0]}")
    if node.kind == "CXXMethodDecl" and re.search(r"\bvirtual\b", node.text):
        yield Finding(node.line, "virtual function")


def _reference_results(node: Node) -> Iterator[Finding]:
    """From Metal 4.1 on, such a method needs an address space of its own, which older compilers do not take."""
    if node.kind == "CXXMethodDecl" and "&" in node.types[0].partition("(")[0]:
        yield Finding(node.line, "a method that returns a reference")


def _unknown_names(msl: str, tree: Iterable[Node]) -> Iterator[Finding]:
    """Names that neither the kernel declares nor MLX's own Metal sources use."""
    code = without_comments(msl)
    known = mlx_names() | _declared(tree) | set(re.findall(r"#define (\w+)", code))
    for number, line in enumerate(code.splitlines(), 1):
        for name in names(line):
            if name not in known and not name.startswith("custom_kernel_"):
                yield Finding(number, f"{name}: not used in MLX's own Metal sources")


def _declared(tree: Iterable[Node]) -> set[str]:
    """Names that the kernel itself declares."""
    found = set()
    for node in tree:
        if node.kind.endswith("Decl"):
            found |= set(re.findall(r"[A-Za-z_]\w*", node.text.partition("'")[0]))
    return found
