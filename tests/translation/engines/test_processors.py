"""The compiled engine on processors with fewer instructions, which the environment makes LLVM believe in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders import fragments, save_ending_transformer

pytest.importorskip("numba")

from nmtkit.translation.engines import compiled_code

AVX2 = "+avx,+avx2,+fma,+bmi,+bmi2"
PROCESSORS = {
    "AVX-512 without VNNI": (
        "skylake-avx512",
        "+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512cd,+avx2,+fma,+bmi,+bmi2",
    ),
    "AVX2 with VNNI": ("alderlake", f"{AVX2},+avxvnni"),
    "AVX2": ("haswell", AVX2),
    "SSE2": ("x86-64", "+sse2"),
}
TRANSLATE = """
import sys
import nmtkit
from builders import fragments
model = nmtkit.load(sys.argv[1], engine="numba", precision="int8")
searches = [{"beam": 1, "nbest": 1}, {"beam": 3, "nbest": 2, "alignment": "soft"}, {"sampling": True, "nbest": 2}]
for search in searches:
    for translation in model.translate(fragments()[:20], max_len_b=6, **search):
        for each in translation.hypotheses:
            print(each.pieces, each.score.hex(), each.alignment)
"""


def environment_of(name: str) -> dict[str, str]:
    cpu, features = PROCESSORS[name]
    missing = {feature for feature in features.split(",") if feature[1:] not in compiled_code.features()}
    if missing:
        pytest.skip(f"this processor lacks {', '.join(sorted(missing))}")
    return os.environ | {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSORS)
def test_the_kernels_work_on_older_processors(name: str) -> None:
    tests = Path(__file__).with_name("test_kernels.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests), "-m", "not slow"]
    done = subprocess.run(command, env=environment_of(name), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def translations(path: Path, environment: dict[str, str]) -> list[str]:
    command = [sys.executable, "-c", TRANSLATE, str(path)]
    environment = environment | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSORS)
def test_translations_in_8_bits_are_equal_bit_for_bit_on_older_processors(name: str, tmp_path: Path) -> None:
    environment = environment_of(name)
    path = save_ending_transformer(tmp_path / "model.pt")
    expected = translations(path, dict(os.environ))
    assert len(expected) == len(fragments()[:20]) * 5
    assert translations(path, environment) == expected


@pytest.mark.slow
def test_products_on_arm_use_its_instruction() -> None:
    """Reads the assembly language only: there is no such processor here."""
    script = """
import llvmlite.binding as llvm
from nmtkit.translation.engines import compiled_attention
from nmtkit.translation.engines.compiled_products import kernels
llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
triple = "aarch64-unknown-linux-gnu"
target = llvm.Target.from_triple(triple)
machine = target.create_target_machine(cpu="neoverse-n1", features="+neon,+dotprod", opt=3)
print(machine.emit_assembly(kernels.optimized(kernels.text(machine, triple), machine)).count("sdot"))
"""
    environment = os.environ | {"NUMBA_CPU_NAME": "neoverse-n1", "NUMBA_CPU_FEATURES": "+neon,+dotprod"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 20
