"""Compilation of code for this processor, with machine code that is kept in files. Needs the package numba.

Kernels are written in the language of LLVM, and compiled together once. All other functions are Python functions that
Numba compiles; they call kernels by their addresses. Numba would otherwise compile a kernel again for each function
that reaches it.
"""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba import types

from nmtkit.config.files import atomic_write, cache_folder
from nmtkit.translation.engines.compiled_vectors import FLOAT, SIZE, Vectors

F = TypeVar("F", bound=Callable[..., Any])
NUMBER, REAL, NOTHING = types.intp, types.float32, types.void  # kinds of arguments; an address is a number
KINDS = {NUMBER: SIZE, REAL: FLOAT, NOTHING: ir.VoidType()}
# without this attribute, LLVM divides vectors of 16 numbers on some processors with AVX-512
WHOLE_VECTORS = 'attributes #0 = { nounwind "prefer-vector-width"="512" "min-legal-vector-width"="512" }'


def compiled(function: F) -> F:
    """Compiles a function at its first call for a combination of types. Keeps the machine code in files."""
    return with_machine_code(function)


def inner(function: F) -> F:
    """Does the same as `compiled` for a function that only compiled functions call."""
    return with_machine_code(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def with_machine_code(function: F, **options: Any) -> F:
    """Compiles a function like `numba.njit`, and keeps its machine code in a folder for this version of the sources.

    With one folder for all versions, Numba would use old machine code after a change in a file with a called function.
    """
    config: Any = numba.config
    usual = config.CACHE_DIR  # not empty if the user has set NUMBA_CACHE_DIR
    config.CACHE_DIR = str(folder() / f"numba-{fingerprint()}")
    try:
        return cast(F, numba.njit(cache=True, nogil=True, error_model="numpy", **options)(function))
    finally:
        config.CACHE_DIR = usual


def folder() -> Path:
    config: Any = numba.config
    return Path(config.CACHE_DIR or cache_folder())


@functools.cache
def fingerprint() -> str:
    """Returns a digest of the source files of all compiled functions of nmtkit. Their names begin with `compiled`."""
    sources = sorted(Path(__file__).parent.glob("compiled*.py"))
    return hashlib.blake2b(b"".join(path.read_bytes() for path in sources), digest_size=8).hexdigest()


@functools.cache
def processor() -> tuple[str, str]:
    """Returns the name and the features of the processor for which code is compiled, in the notation of LLVM.

    Like Numba, the function follows NUMBA_CPU_NAME and NUMBA_CPU_FEATURES.
    """
    config: Any = numba.config
    features = llvm.get_host_cpu_features().flatten() if config.CPU_FEATURES is None else config.CPU_FEATURES
    return config.CPU_NAME or llvm.get_host_cpu_name(), features


@functools.cache
def features() -> frozenset[str]:
    return frozenset(name[1:] for name in processor()[1].split(",") if name.startswith("+"))


class Kernels:
    """A collection of kernels, which are compiled together by `build`."""

    def __init__(self, name: str) -> None:
        self.module = ir.Module(name)
        self.symbols: dict[str, str] = {}  # symbol for the linker -> name in the module
        self.engine: Any = None

    def kernel(self, *kinds: Any, result: Any = NOTHING) -> Callable[[Callable[..., Any]], Any]:
        """Adds a function that writes vector code. `kinds` are the kinds of its arguments after the `Vectors`.

        Returns the kernel, which compiled code can call.
        """

        def decorate(write: Callable[..., Any]) -> Any:
            function = ir.Function(
                self.module, ir.FunctionType(KINDS[result], [KINDS[kind] for kind in kinds]), write.__name__
            )
            builder = ir.IRBuilder(function.append_basic_block())
            value = write(Vectors(builder), *function.args)
            builder.ret_void() if result is NOTHING else builder.ret(value)
            symbol = f"{self.module.name}_{write.__name__}"
            self.symbols[symbol] = write.__name__
            return types.ExternalFunction(symbol, result(*kinds))

        return decorate

    def function(self, name: str) -> ir.Function:
        """Returns a kernel in the language of LLVM, so that another kernel can call it."""
        return self.module.get_global(name)

    def text(self, machine: Any, triple: str) -> str:
        """Returns the kernels in the language of LLVM, for a machine."""
        self.module.triple, self.module.data_layout = triple, str(machine.target_data)
        return str(self.module).replace("\n{\n", " #0\n{\n") + "\n" + WHOLE_VECTORS

    def optimized(self, text: str, machine: Any) -> Any:
        parsed = llvm.parse_assembly(text)
        parsed.verify()
        passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
        passes.getModulePassManager().run(parsed, passes)
        return parsed

    def assembly(self, triple: str, processor: str, features: str) -> str:
        """Returns the kernels in the assembly language of any processor. Tests read it; it is not executed."""
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        machine = llvm.Target.from_triple(triple).create_target_machine(cpu=processor, features=features, opt=3)
        return str(machine.emit_assembly(self.optimized(self.text(machine, triple), machine)))

    def build(self) -> None:
        """Compiles the kernels, or reads their machine code from a file. Must precede calls of compiled functions."""
        name, features = processor()
        triple = llvm.get_default_triple()
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=name, features=features, opt=3, reloc="default", codemodel="jitdefault", jit=True
        )
        text = self.text(machine, triple)
        facts = f"{llvm.llvm_version_info} {name} {features} {text}"
        path = folder() / f"kernels-{hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()}.o"

        def write(_: Any, code: bytes) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as file:
                file.write(code)

        def read(_: Any) -> bytes | None:
            return path.read_bytes() if path.exists() else None

        module = llvm.parse_assembly(text) if path.exists() else self.optimized(text, machine)
        self.engine = llvm.create_mcjit_compiler(module, machine)
        self.engine.set_object_cache(write, read)
        self.engine.finalize_object()
        for symbol, function in self.symbols.items():
            llvm.add_symbol(symbol, self.engine.get_function_address(function))
