"""Reading compilers' output: lines as Triton 3.9 printed them for the gate/up kernel, shortened."""

from typing import Any

import pytest

from piper_kernels.triton.offline.assembly import Resources, read_amd, read_nvidia

PTX = """
	ld.global.b32 { %r53 }, [ %rd16 + 0 ];
	@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
	ld.global.L1::evict_last.v2.b64 { %rd5, %rd6 }, [ %rd2 + 0 ];
	ld.global.v2.b32 { %r5, %r6 }, [ %rd3 + 0 ];
	ld.shared.v4.b32 { %r7, %r8, %r9, %r10 }, [ %r11 + 0 ];
	cp.async.cg.shared.global [ %r81 + 0 ], [ %rd26 + 0 ], 0x10, %r79;
	cp.async.ca.shared.global [ %r81 + 0 ], [ %rd26 + 0 ], 0x4, %r79;
	cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];
	wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, %rd7, %rd8, 1, 1, 1, 0, 1;
	wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, %rd9, %rd8, 1, 1, 1, 0, 1;
	wgmma.wait_group.sync.aligned 0;
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r663 }, { %r148 }, { %r146 }, { %r663 };
	@%p9 tcgen05.mma.cta_group::1.kind::f16 [ %r4 + 0 ], %rd1, %rd2, %r3, %p1;
	tcgen05.ld.sync.aligned.32x32b.x64.b32 {%r1}, [%r2 + 0];
"""  # noqa: E501
USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function _gate_up_kernel:
  REG:182 STACK:16 SHARED:0 LOCAL:8 CONSTANT[0]:456 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
SASS = """
        /*0c60*/                   LDGSTS.E.BYPASS.LTC128B.128 [R158], [R6.64], P3 ;
        /*0c70*/                   STL [R1+0x10], R4 ;
        /*0c80*/              @!P0 LDL.64 R4, [R1+0x18] ;
        /*0c90*/                   LDG.E.128 R4, [R6.64] ;
"""
AMDGCN = """
	buffer_load_dwordx4 v[2:5], v26, s[24:27], 0 offen
	buffer_load_dwordx4 v31, s[8:11], 0 offen lds
	global_load_dwordx4 v[2:5], v[6:7], off
	global_load_dwordx2 v[2:3], v[6:7], off
	v_mfma_f32_32x32x8_bf16 v[2:17], v[116:117], v[68:69], v[2:17]
	v_mfma_f32_32x32x8_bf16 v[18:33], v[136:137], v[80:81], v[18:33]
	v_mfma_f32_16x16x16_bf16 v[18:21], v[136:137], v[80:81], v[18:21]
; Occupancy: 4
  - .agpr_count:     0
    .private_segment_fixed_size: 12
    .sgpr_spill_count: 3
    .vgpr_count:     184
    .vgpr_spill_count: 2
"""


def nvidia(**texts: str) -> Resources:
    given: dict[str, Any] = {"ptx": PTX, "usage": USAGE, "sass": SASS} | texts
    return read_nvidia(given.pop("ptx"), **given, num_warps=8, shared_bytes=65536)


def test_read_nvidia_counts_each_kind() -> None:
    assert nvidia() == Resources(
        registers=182,
        stack_bytes=24,
        num_spills=2,
        shared_bytes=65536,
        num_warps=8,
        waves_per_simd=0,
        matrix={"wgmma": 2, "tcgen05": 1, "mma.sync": 1},
        num_wide_loads=3,
        num_descriptor_loads=1,
    )


def test_read_nvidia_of_a_kernel_without_any() -> None:
    found = nvidia(ptx="ret;", sass="EXIT ;")
    assert (found.matrix, found.num_wide_loads, found.num_spills) == ({}, 0, 0)
    assert found.matrix_text() == ""


def test_read_nvidia_refuses_what_it_cannot_read() -> None:
    with pytest.raises(ValueError, match="cuobjdump printed no registers: 'cuobjdump fatal'"):
        nvidia(usage="cuobjdump fatal")


def test_read_amd_counts_each_kind() -> None:
    assert read_amd(AMDGCN, num_warps=8, shared_bytes=32768) == Resources(
        registers=184,
        stack_bytes=12,
        num_spills=2,
        shared_bytes=32768,
        num_warps=8,
        waves_per_simd=4,
        matrix={"mfma_f32_32x32x8_bf16": 2, "mfma_f32_16x16x16_bf16": 1},
        num_wide_loads=3,
    )


def test_read_amd_counts_scratch_instructions() -> None:
    text = AMDGCN + 3 * "\tscratch_load_dwordx4 v[2:5], off, s32\n"
    found = read_amd(text, num_warps=8, shared_bytes=0)
    assert (found.num_spills, found.num_wide_loads) == (3, 3)


def test_read_amd_refuses_what_it_cannot_read() -> None:
    with pytest.raises(ValueError, match=r"the assembly has no .*vgpr_count"):
        read_amd(AMDGCN.replace(".vgpr_count", ".count"), num_warps=8, shared_bytes=0)


def test_matrix_text_sums_over_shapes() -> None:
    found = read_amd(AMDGCN, num_warps=8, shared_bytes=0)
    assert found.matrix_text() == "3 mfma"
    assert nvidia().matrix_text() == "2 wgmma 1 tcgen05 1 mma.sync"
