"""Slices handed to kernels where they lie: offsets, and calls that update in place, in small HLO texts."""

from __future__ import annotations

import pytest

from kernels_pallas.hlo_slices import sliced_operands

STEP = """HloModule jit_step

%fused_call (p0: s32[512], p1: bf16[8,64], p2: bf16[4,8,64]) -> bf16[8,64] {
  %p0 = s32[512]{0} parameter(0)
  %p1 = bf16[8,64]{1,0} parameter(1)
  %p2 = bf16[4,8,64]{2,1,0} parameter(2)
  %slice.1 = s32[64]{0} slice(%p0), slice={[START:END]}
  %bitcast.1 = s32[8,8]{1,0} bitcast(%slice.1)
  %slice.2 = bf16[1,8,64]{2,1,0} slice(%p2), slice={[3:4], [0:8], [0:64]}
  ROOT %call = bf16[8,64]{1,0} custom-call(%bitcast.1, %p1, %slice.2), custom_call_target="mosaic_gpu_v2", ALIASINGmetadata={op_name="jit(step)/attend"}
}

ENTRY %main (packed: s32[512], q: bf16[8,64], pages: bf16[4,8,64]) -> bf16[8,64] {
  %packed = s32[512]{0} parameter(0)
  %q = bf16[8,64]{1,0} parameter(1)
  %pages = bf16[4,8,64]{2,1,0} parameter(2)
  ROOT %fusion.3 = bf16[8,64]{1,0} fusion(%packed, %q, %pages), kind=kCustom, calls=%fused_call
}
"""


def step(start: int = 128, aliasing: str = "") -> str:
    text = STEP.replace("START:END", f"{start}:{start + 64}")
    return text.replace("ALIASING", aliasing)


def test_offsets_in_bytes():
    integers, pages = sliced_operands(step(start=65))
    assert (integers.fusion, integers.source) == ("fusion.3", "jit(step)/attend")
    assert (integers.operand, integers.offset) == (0, 65 * 4)
    assert (pages.operand, pages.offset) == (2, 3 * 8 * 64 * 2)


@pytest.mark.parametrize(("start", "is_safe"), [(0, True), (64, True), (65, False), (32, False)])
def test_a_slice_must_start_where_mosaic_takes_it(start, is_safe):
    assert sliced_operands(step(start))[0].is_safe == is_safe


def test_a_call_that_updates_in_place_must_stand_alone():
    aliasing = "output_to_operand_aliasing={{}: (1, {})}, "
    assert [s.updates_in_place for s in sliced_operands(step(aliasing=aliasing))] == [True, True]
    assert not any(s.is_safe for s in sliced_operands(step(aliasing=aliasing)))


def test_an_offset_that_only_the_running_program_knows_is_not_safe():
    text = step().replace(
        "slice(%p0), slice={[128:192]}", "dynamic-slice(%p0, %p1), dynamic_slice_sizes={64}"
    )
    assert sliced_operands(text)[0].offset is None
    assert not sliced_operands(text)[0].is_safe


def test_calls_without_slices_are_not_listed():
    text = step().replace("custom-call(%bitcast.1, %p1, %slice.2)", "custom-call(%p0, %p1, %p2)")
    assert sliced_operands(text) == []
