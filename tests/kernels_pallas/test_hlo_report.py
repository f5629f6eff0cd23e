"""Counts on small HLO texts, against sums done by hand."""

from __future__ import annotations

import pytest

from kernels_pallas.hlo_report import analyze, inputs_of
from kernels_pallas.hlo_text import Array, parse_module

STEP = """HloModule jit_step, is_scheduled=true, input_output_alias={ {1}: (0, {}, may-alias) }, entry_computation_layout={(bf16[8,16]{1,0})->bf16[8,16]{1,0}}

%fused_scatter (param_0: bf16[64,16], param_1: s32[4,1], param_2: f32[4,16]) -> bf16[64,16] {
  %param_0 = bf16[64,16]{1,0} parameter(0)
  %param_1 = s32[4,1]{1,0} parameter(1)
  %param_2 = f32[4,16]{1,0} parameter(2)
  %convert.1 = bf16[4,16]{1,0} convert(%param_2)
  ROOT %scatter.1 = bf16[64,16]{1,0} scatter(%param_0, %param_1, /*index=2*/%convert.1), update_window_dims={1}, to_apply=%assign
}

%fused_gather (param_0.1: bf16[64,16], param_1.1: s32[4,1]) -> (bf16[4,16], bf16[16,4]) {
  %param_0.1 = bf16[64,16]{1,0} parameter(0)
  %param_1.1 = s32[4,1]{1,0} parameter(1)
  %gather.1 = bf16[4,16]{1,0} gather(%param_0.1, %param_1.1), offset_dims={1}
  %transpose.1 = bf16[16,4]{1,0} transpose(%gather.1), dimensions={1,0}
  ROOT %tuple.1 = (bf16[4,16]{1,0}, bf16[16,4]{1,0}) tuple(%gather.1, %transpose.1)
}

%fused_dot (param_0.2: bf16[4,16], param_1.2: bf16[32,16]) -> f32[4,32] {
  %param_0.2 = bf16[4,16]{1,0} parameter(0)
  %param_1.2 = bf16[32,16]{1,0} parameter(1)
  ROOT %dot.1 = f32[4,32]{1,0} dot(%param_0.2, %param_1.2), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

ENTRY %main (cache: bf16[64,16], slots: s32[4,1], x: f32[4,16], w: bf16[32,16]) -> (f32[4,32], bf16[64,16]) {
  %cache = bf16[64,16]{1,0} parameter(0)
  %slots = s32[4,1]{1,0} parameter(1)
  %x = f32[4,16]{1,0} parameter(2)
  %w = bf16[32,16]{1,0} parameter(3)
  %update = bf16[64,16]{1,0} fusion(%cache, %slots, %x), kind=kInput, calls=%fused_scatter, metadata={op_name="jit(step)/scatter"}
  %read = (bf16[4,16]{1,0}, bf16[16,4]{1,0}) fusion(%update, %slots), kind=kLoop, calls=%fused_gather
  %rows = bf16[4,16]{1,0} get-tuple-element(%read), index=0
  %gemm = f32[4,32]{1,0} fusion(%rows, %w), kind=kCustom, calls=%fused_dot
  ROOT %result = (f32[4,32]{1,0}, bf16[64,16]{1,0}) tuple(%gemm, %update)
}
"""


def kernels_of(text: str, **options):
    report = analyze(text, **options)
    return report, {kernel.name: kernel for kernel in report.kernels}


def test_kernels_bytes_and_flops():
    report, kernels = kernels_of(STEP, watched={"cache": 0, "w": 0})
    assert list(kernels) == ["update", "read", "gemm"]
    update, read, gemm = kernels.values()
    # In place: 4 indices and 4 float32 rows are read, 4 bfloat16 rows written.
    assert (update.bytes_read, update.bytes_written) == (4 * 4 + 4 * 16 * 4, 4 * 16 * 2)
    assert update.source == "jit(step)/scatter"
    assert update.inputs == ("cache", "slots", "x")
    # Four rows come out of the cache, which still is the program's input; both results are written.
    assert (read.bytes_read, read.bytes_written) == (4 * 16 * 2 + 4 * 4, 2 * 4 * 16 * 2)
    assert read.inputs == ("cache", "slots")
    assert (gemm.bytes_read, gemm.bytes_written) == ((4 + 32) * 16 * 2, 4 * 32 * 4)
    assert gemm.flops == report.flops == 2 * 4 * 32 * 16
    assert report.moved == ()
    assert report.aliased_inputs == ("cache",)
    assert report.num_bytes == sum(k.num_bytes for k in kernels.values())


def test_a_roofline_takes_the_slower_side_of_each_kernel():
    report, kernels = kernels_of(STEP)
    seconds = report.seconds(bytes_per_second=1.0, flops_per_second=1.0)
    flops = kernels["gemm"].flops
    assert flops > kernels["gemm"].num_bytes
    assert seconds == kernels["update"].num_bytes + kernels["read"].num_bytes + flops


MOVES = {
    "copy(%w)": "bf16[32,16]{0,1}",
    "transpose(%w), dimensions={1,0}": "bf16[16,32]{1,0}",
    "slice(%w), slice={[0:8], [0:16]}": "bf16[8,16]{1,0}",
    "convert(%w)": "f32[32,16]{1,0}",
    "add(%w, %w)": "bf16[32,16]{1,0}",
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("op", MOVES)
def test_a_weight_written_out_again_is_reported_fused_or_not(op, fused):
    shape = MOVES[op]
    if fused:
        inside = f"""%fused (w: bf16[32,16]) -> {shape} {{
  %w = bf16[32,16]{{1,0}} parameter(0)
  ROOT %moved = {shape} {op}
}}
"""
        launch = f"ROOT %launch = {shape} fusion(%w), kind=kLoop, calls=%fused"
    else:
        inside, launch = "", f"ROOT %launch = {shape} {op}"
    text = f"""HloModule m
{inside}
ENTRY %main (w: bf16[32,16]) -> {shape} {{
  %w = bf16[32,16]{{1,0}} parameter(0)
  {launch}
}}
"""
    report = analyze(text, watched={"w": 0})
    assert [(m.kernel, m.label) for m in report.moved] == [("launch", "w")]
    size = report.moved[0].num_bytes
    assert analyze(text, watched={"w": size + 1}).moved == ()
    assert analyze(text).moved == ()


LOOP = """HloModule m
%body (state: (s32[], bf16[64,16], bf16[64,16])) -> (s32[], bf16[64,16], bf16[64,16]) {
  %state = (s32[], bf16[64,16]{1,0}, bf16[64,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %a = bf16[64,16]{1,0} get-tuple-element(%state), index=1
  %b = bf16[64,16]{1,0} get-tuple-element(%state), index=2
  %row = bf16[1,16]{1,0} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={1,16}
  %written = bf16[64,16]{1,0} dynamic-update-slice(%b, %row, %i, %i)
  ROOT %next = (s32[], bf16[64,16]{1,0}, bf16[64,16]{1,0}) tuple(%i, %a, %written)
}
%condition (state: (s32[], bf16[64,16], bf16[64,16])) -> pred[] {
  %state = (s32[], bf16[64,16]{1,0}, bf16[64,16]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}
ENTRY %main (i: s32[], a: bf16[64,16], b: bf16[64,16]) -> bf16[64,16] {
  %i = s32[] parameter(0)
  %a = bf16[64,16]{1,0} parameter(1)
  %b = bf16[64,16]{1,0} parameter(2)
  %start = (s32[], bf16[64,16]{1,0}, bf16[64,16]{1,0}) tuple(%i, %a, %b)
  %loop = (s32[], bf16[64,16]{1,0}, bf16[64,16]{1,0}) while(%start), condition=%condition, body=%body%TRIPS
  %result = bf16[64,16]{1,0} get-tuple-element(%loop), index=2
  ROOT %copied = bf16[64,16]{1,0} copy(%result)
}
"""


def test_loops_multiply_and_carry_their_inputs_along():
    trips = ', backend_config={"known_trip_count":{"n":"7"}}'
    report, kernels = kernels_of(LOOP.replace("%TRIPS", trips), watched={"a": 0, "b": 0})
    assert (kernels["row"].count, kernels["row"].num_bytes) == (7, 2 * 16 * 2 + 4)
    assert kernels["written"].bytes_written == 16 * 2
    assert report.num_kernels == 7 * 2 + 1
    # The slice of a, and the copy of b, which the loop had only updated in place.
    assert [(m.kernel, m.label) for m in report.moved] == [("row", "a"), ("copied", "b")]
    assert report.num_open_loops == 0


def test_loops_of_unknown_length_are_counted_once_and_said_to_be_open():
    report, kernels = kernels_of(LOOP.replace("%TRIPS", ""))
    assert kernels["row"].count == 1
    assert report.num_open_loops == 1


CALLS = """HloModule m
ENTRY %main (pages: bf16[1000,16], q: bf16[4,16], w: bf16[32,16]) -> bf16[4,32] {
  %pages = bf16[1000,16]{1,0} parameter(0)
  %q = bf16[4,16]{1,0} parameter(1)
  %w = bf16[32,16]{1,0} parameter(2)
  %attend = bf16[4,16]{1,0} custom-call(%q, %pages), custom_call_target="mosaic_gpu_v2"
  %write = bf16[1000,16]{1,0} custom-call(%attend, %pages), custom_call_target="mosaic_gpu_v2", output_to_operand_aliasing={{}: (1, {})}
  %gemm = (bf16[4,32]{1,0}, s8[4096]{0}) custom-call(%attend, %w), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}}
  %again = bf16[1000,16]{1,0} copy(%write)
  ROOT %out = bf16[4,32]{1,0} get-tuple-element(%gemm), index=0
}
"""


def test_library_calls_and_kernels_that_read_through_indices():
    report, kernels = kernels_of(CALLS, watched={"pages": 0})
    assert kernels["attend"].opcode == "mosaic_gpu_v2"
    assert kernels["attend"].bytes_read == (4 + 1000) * 16 * 2
    assert (kernels["write"].bytes_read, kernels["write"].bytes_written) == (4 * 16 * 2, 0)
    assert kernels["gemm"].flops == 2 * 4 * 32 * 16
    # The scratch space of the library isn't data.
    assert kernels["gemm"].bytes_written == 4 * 32 * 2
    assert [m.kernel for m in report.moved] == ["again"]
    _, kernels = kernels_of(CALLS, indexed_reads={"pages": 640})
    assert kernels["attend"].bytes_read == 4 * 16 * 2 + 640


def test_started_collectives_count_once():
    text = """HloModule m
ENTRY %main (x: f32[8,16]) -> f32[8,16] {
  %x = f32[8,16]{1,0} parameter(0)
  %start = (f32[8,16]{1,0}, f32[8,16]{1,0}) all-reduce-start(%x), to_apply=%add
  ROOT %done = f32[8,16]{1,0} all-reduce-done(%start)
}
"""
    report, kernels = kernels_of(text)
    assert list(kernels) == ["start"]
    assert (kernels["start"].bytes_read, kernels["start"].bytes_written) == (512, 512)
    assert report.collective_bytes == 512


def test_inputs_go_by_the_names_that_jax_gave_them():
    text = """HloModule m
ENTRY %main (p0: bf16[4,2], p1: s32[3]) -> bf16[4,2] {
  %p0 = bf16[4,2]{1,0} parameter(0), metadata={op_name="params[\\'w\\']"}
  %p1 = s32[3]{0} parameter(1)
  ROOT %copied = bf16[4,2]{1,0} copy(%p0)
}
"""
    assert inputs_of(text) == {"params['w']": 16, "p1": 12}
    assert analyze(text).kernels[0].inputs == ("params['w']",)


def test_text_that_is_no_module():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse_module("HloModule m\n")


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("bf16[3,5]", 30), ("s4[10]", 5), ("pred[7]", 7), ("f8e4m3fn[9]", 9)]
)
def test_sizes_of_element_types(text, num_bytes):
    dtype, dims = text.rstrip("]").split("[")
    assert Array(dtype, tuple(int(d) for d in dims.split(","))).num_bytes == num_bytes
