"""Every shipped kernel compiled for sm_90 and sm_100, where no GPU is needed: no spills, within shared memory, matrix
products on the matrix unit. One process an architecture; the table is printed at the end of the run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

spec = importlib.util.spec_from_file_location("moekit_tests_aot", Path(__file__).with_name("aot.py"))
assert spec is not None and spec.loader is not None
aot = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(aot)


@pytest.fixture(scope="module")
def compiled(aot_tables):
    running = {arch: aot.start(arch) for arch in aot.UNITS}
    found = {arch: aot.collect(process) for arch, process in running.items()}
    aot_tables.append(aot.table([r for reports in found.values() for r in reports]))
    return found


@pytest.mark.parametrize("arch", aot.UNITS, ids="sm_{}".format)
def test_no_spills_and_the_matrix_unit(compiled, arch):
    assert len(compiled[arch]) >= 10
    for r in compiled[arch]:
        assert r.stack == 0, f"{r.name} spills: {r.stack} bytes of stack a thread"
        assert r.shared <= aot.SHARED_LIMIT, f"{r.name}: {r.shared} bytes of shared memory, {aot.SHARED_LIMIT} usable"
        assert r.registers <= 255
        if r.name.endswith("*"):
            assert any(r.instructions.get(unit) for unit in aot.UNITS[arch]), f"{r.name}: {r.instructions}"


def test_tall_bf16_tiles_use_the_unit_of_their_architecture(compiled):
    """Warp-group products on sm_90 and tcgen05 on sm_100 from 64 rows; 16 rows take the older warp instruction."""
    for arch, unit in ((90, "HGMMA"), (100, "UTCHMMA")):
        tall = [
            r
            for r in compiled[arch]
            if r.name.startswith(("grouped_gemm bf16", "grouped_wgrad bf16")) and " 16 " not in r.name
        ]
        assert tall and all(r.instructions.get(unit) for r in tall), tall


def test_a_kernel_that_spills_is_seen():
    """The reader of resources, on code with a known frame: a local array of 400 bytes indexed at run time."""
    import subprocess
    import tempfile

    from triton import knobs

    ptx = """
        .version 8.0
        .target sm_90
        .address_size 64
        .visible .entry k(.param .u64 p) {
        .local .align 4 .b8 a[400];
        .reg .b64 %r<4>;
        .reg .b32 %x<3>;
        ld.param.u64 %r1, [p];
        ld.global.u32 %x1, [%r1];
        mov.u64 %r2, a;
        cvt.u64.u32 %r3, %x1;
        add.u64 %r2, %r2, %r3;
        st.local.u32 [%r2], %x1;
        ld.local.u32 %x2, [%r2+4];
        st.global.u32 [%r1], %x2;
        ret;
        }
        """
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "k.ptx", Path(folder) / "k.cubin"
        source.write_text(ptx)
        subprocess.run([knobs.nvidia.ptxas.path, "--gpu-name=sm_90", str(source), "-o", str(target)], check=True)
        assert aot.resources(target.read_bytes())[1] == 400
