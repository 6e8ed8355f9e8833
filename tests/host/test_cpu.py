import platform

import pytest

from mxmp.host import cpu

# Two processors each, as Linux lists an x86-64 server, AWS's Graviton and a board with two kinds of cores.
X86 = "processor : 0\nmodel name : EPYC 9R14\nflags : fpu avx512_bf16 avx512_vnni\n\n" * 2
ARM = "processor : 0\nFeatures : fp asimd bf16\nCPU implementer : 0x41\nCPU part : 0xd0c\n\n" * 2
MIXED = ARM + "processor : 2\nCPU implementer : 0x41\nCPU part : 0xd05\n"


@pytest.fixture
def linux(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "CPUINFO", str(tmp_path / "cpuinfo"))
    return tmp_path / "cpuinfo"


@pytest.mark.parametrize(("text", "model"), [(X86, "EPYC 9R14"), (ARM, "0x41 0xd0c"), (MIXED, "0x41 0xd0c 0xd05")])
def test_processors_of_other_designs_have_other_models(linux, text, model):
    linux.write_text(text)
    assert cpu.model() == model


def test_instructions_are_missing_only_if_a_list_is_known_that_has_none_of_them(linux):
    linux.write_text(X86)
    assert not cpu.lacks("avx_vnni", "avx512_vnni")
    assert cpu.lacks("avx_vnni", "amx_int8")
    assert cpu.lacks("avx512")  # a part of a name is not the name
    linux.write_text(ARM)
    assert not cpu.lacks("amx_int8")


def test_another_system_has_platforms_model_and_lacks_nothing_that_is_known(linux):
    assert cpu.model() == (platform.processor() or platform.machine())
    assert not cpu.lacks("avx512_bf16")


@pytest.mark.parametrize(
    ("vendor", "flags", "isa", "is_slow"),
    [
        ("GenuineIntel", "avx512_bf16 avx512_fp16 amx_bf16", "", True),  # Sapphire Rapids, Emerald Rapids
        ("GenuineIntel", "avx512_bf16 avx512_fp16 amx_bf16", "AVX512_CORE_AMX", False),
        ("GenuineIntel", "avx512_bf16 avx512_fp16", "AVX512_CORE_AMX", True),  # the same in a virtual machine
        ("GenuineIntel", "avx512_bf16", "", False),  # Cooper Lake
        ("AuthenticAMD", "avx512_bf16", "", False),  # Zen 4
        ("AuthenticAMD", "avx512_bf16 avx512_fp16", "", False),
    ],
)
def test_intels_bfloat16_products_are_slow_from_sapphire_rapids_on(linux, monkeypatch, vendor, flags, isa, is_slow):
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", isa)
    linux.write_text(f"processor : 0\nvendor_id : {vendor}\nflags : fpu {flags}\n\n" * 2)
    assert cpu.multiplies_bfloat16_slowly() is is_slow
