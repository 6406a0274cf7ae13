"""Compiles code for this processor, and keeps the machine code in files. Needs the package numba.

Kernels are written in LLVM IR, and compiled together once. All other functions are Python functions that Numba
compiles; they call kernels by their addresses. Otherwise, Numba would compile a kernel again for each function that
calls the kernel.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import llvmlite.binding as llvm
import numba
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import caching
from numba.core.runtime.nrt import rtsys

from nmtkit.config.files import write_atomically
from nmtkit.jobs import machine_code
from nmtkit.translation.engines.compiled_vectors import FLOAT, SIZE, Vectors

Array = npt.NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])
NUMBER, REAL, NOTHING = types.intp, types.float32, types.void  # kinds of values: integer or address, fp32, none
KINDS = {NUMBER: SIZE, REAL: FLOAT, NOTHING: ir.VoidType()}
# without this attribute, LLVM divides vectors of 16 numbers on some processors with AVX-512
WHOLE_VECTORS = 'attributes #0 = { nounwind "prefer-vector-width"="512" "min-legal-vector-width"="512" }'


class Locator(caching._CacheLocator):
    """Tells Numba to keep the machine code of a function in `machine_code.folder()`, which may be read-only."""

    @classmethod
    def from_function(cls, function: Any, path: str) -> "Locator":
        return cls()

    def get_cache_path(self) -> str:
        return str(machine_code.folder())

    def get_source_stamp(self) -> str:
        return machine_code.folder_name()

    def get_disambiguator(self) -> str:
        return ""


class CacheOfResults(caching.CompileResultCacheImpl):
    _locator_classes = [Locator]  # type: ignore[list-item]  # noqa: RUF012  # the base class has no types


class MachineCodeCache(caching.FunctionCache):
    _impl_class = CacheOfResults

    def load_overload(self, signature: Any, context: Any) -> Any:
        """Returns cached machine code, or None. Unlike Numba's method, imports no modules for the compiler."""
        rtsys.initialize(context)
        with self._guard_against_spurious_io_errors():
            return self._load_overload(signature, context)

    def save_overload(self, signature: Any, data: Any) -> None:
        if not machine_code.is_closed():
            with contextlib.suppress(OSError):  # the machine code stays in the memory of this process
                super().save_overload(signature, data)


def compiled(function: F) -> F:
    """Compiles a function at its first call for a combination of types. Keeps the machine code in a file."""
    dispatcher = inner(function, no_cpython_wrapper=False)
    dispatcher._cache = MachineCodeCache(function)
    return cast(F, dispatcher)


def inner(function: F, **options: Any) -> Any:
    """Compiles a function that only compiled functions call. The files of the callers contain its machine code."""
    settings: Any = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    dispatcher: Any = numba.njit(**settings | options)(function)
    for_types = dispatcher.get_call_template

    def for_plain_types(arguments: Sequence[Any], keywords: Any) -> Any:
        return for_types(tuple(map(types.unliteral, arguments)), keywords)

    dispatcher.get_call_template = for_plain_types  # else Numba compiles a function again for a literal 0
    return dispatcher


@functools.cache
def features() -> frozenset[str]:
    return frozenset(name[1:] for name in machine_code.processor()[1].split(",") if name.startswith("+"))


class Kernels:
    """A collection of kernels, which are compiled together by `build`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.written: dict[str, tuple[Callable[..., Any], ir.FunctionType]] = {}  # name -> writer of the code, type
        self.engine: Any = None

    def kernel(self, *kinds: Any, result: Any = NOTHING) -> Callable[[Callable[..., Any]], Any]:
        """Returns a decorator for a function that writes the vector code of a kernel.

        `kinds` are the kinds of the arguments after the `Vectors`. The decorator returns the kernel, which compiled
        code can call. If a file has the machine code, the function is not called.
        """

        def decorate(write: Callable[..., Any]) -> Any:
            self.written[write.__name__] = write, ir.FunctionType(KINDS[result], [KINDS[kind] for kind in kinds])
            return types.ExternalFunction(f"{self.name}_{write.__name__}", result(*kinds))

        return decorate

    def function(self, name: str) -> ir.Function:
        """Returns a kernel in LLVM IR, so that another kernel can call it."""
        return self.module.get_global(name)

    @functools.cached_property
    def module(self) -> ir.Module:
        """The kernels in LLVM IR."""
        self.module = module = ir.Module(self.name)  # set early: kernels that call `function` read `self.module`
        for name, (write, kind) in self.written.items():
            function = ir.Function(module, kind, name)
            builder = ir.IRBuilder(function.append_basic_block())
            value = write(Vectors(builder), *function.args)
            builder.ret_void() if value is None else builder.ret(value)
        return module

    def text(self, machine: Any, triple: str) -> str:
        """Returns the text of the kernels in LLVM IR, for a target machine."""
        self.module.triple, self.module.data_layout = triple, str(machine.target_data)
        return str(self.module).replace("\n{\n", " #0\n{\n") + "\n" + WHOLE_VECTORS

    def optimized(self, text: str, machine: Any) -> Any:
        parsed = llvm.parse_assembly(text)
        parsed.verify()
        passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
        passes.getModulePassManager().run(parsed, passes)
        return parsed

    def build(self) -> None:
        """Compiles the kernels, or reads their machine code from a file. No compiled function may be called earlier."""
        name, features = machine_code.processor()
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=name, features=features, opt=3, reloc="default", codemodel="jitdefault", jit=True
        )
        path = machine_code.folder() / "kernels.o"

        def write(_: Any, code: bytes) -> None:
            if not machine_code.is_closed():
                with contextlib.suppress(OSError):  # the machine code stays in the memory of this process
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_atomically(path, code)

        if path.exists():
            self.engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
            self.engine.add_object_file(llvm.ObjectFileRef.from_data(path.read_bytes()))
        else:
            module = self.optimized(self.text(machine, llvm.get_default_triple()), machine)
            self.engine = llvm.create_mcjit_compiler(module, machine)
            self.engine.set_object_cache(write)
        self.engine.finalize_object()
        for function in self.written:
            llvm.add_symbol(f"{self.name}_{function}", self.engine.get_function_address(function))
