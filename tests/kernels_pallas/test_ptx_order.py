"""The order of stores, fences, matmuls and copies in hand-written PTX: right kernels pass, each forgotten step is found."""

from __future__ import annotations

import textwrap

import pytest

from kernels_pallas import ptx_order
from kernels_pallas.ptx_order import violations
from kernels_pallas.ptx_text import parse_kernel

STORE = "st.shared.b32 [%rd1+16], %r1;"
STMATRIX = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%rd1], {%r1, %r2, %r3, %r4};"
FENCE = "fence.proxy.async.shared::cta;"
SYNC = "bar.sync %r9, 128;"
COMMIT = FENCE + SYNC
MATMUL = """
    wgmma.fence.sync.aligned;
    { .reg .pred p; setp.ne.b32 p, 1, 0;
      wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r20,%r21,%r22,%r23}, %rd5, %rd6, p, 1, 1, 0, 0; }
    wgmma.commit_group.sync.aligned;
"""
FROM_REGISTERS = MATMUL.replace("%rd5,", "{%r30,%r31,%r32,%r33},").replace("0, 0; }", "0; }")
WAIT = "wgmma.wait_group.sync.aligned 0;"
COPY_OUT = (
    "@%p9 cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%rd8, {%r1, %r2, %r3} ], [%r7];"
)
COPIED_OUT = "cp.async.bulk.commit_group; cp.async.bulk.wait_group \t0;"
COPY_IN = (
    "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r5], %r6; bar.sync %r9, 128;"
    "@%p9 cp.async.bulk.tensor.4d.shared::cta.global.mbarrier::complete_tx::bytes"
    " [%r7], [%rd8, {%r1,%r2,%r3,%r4}], [%r5];"
)
COPY_IN_ALONE = COPY_IN.partition("bar.sync %r9, 128;")[2]
BARRIER_WAIT = """
    {
    .reg .pred       P1;
    LAB_WAIT:
    mbarrier.try_wait.parity.shared.b64 P1, [%r5], %r8, %r10;
    @P1 bra.uni DONE;
    bra.uni     LAB_WAIT;
    DONE:
    }
"""
ARRIVE = "mbarrier.arrive.release.cta.shared::cta.b64 _, [%r5], 1;"


def kernel(*lines: str, threads: int = 128) -> str:
    body = textwrap.indent("\n".join(lines), "\t")
    return f"""
.version 8.0
.target sm_90a
.visible .entry sample(.param .u64 sample_param_0)
.maxntid {threads}, 1, 1
{{
	.reg .b32 %r<99>;
{body}
	ret;
}}
"""


def rules(*lines: str, threads: int = 128) -> set[str]:
    return {v.rule for v in violations(parse_kernel(kernel(*lines, threads=threads)))}


@pytest.mark.parametrize("store", [STORE, STMATRIX, "@%p1 " + STORE, "st.b32 [%rd1], %r1;"])
@pytest.mark.parametrize("between", ["", FENCE, SYNC, SYNC + FENCE, "@%p2 " + FENCE + SYNC])
def test_a_store_must_be_fenced_and_then_met_before_a_matmul(store, between):
    assert rules(store, COMMIT, MATMUL, WAIT) == set()
    assert rules(store, between, MATMUL, WAIT) == {ptx_order.STORE_TO_MATMUL}


def test_stores_elsewhere_do_not_matter():
    stores = "st.global.b32 [%rd1], %r1; st.local.b32 [%rd2], %r1; fence.proxy.async.global;"
    assert rules(stores, MATMUL, WAIT) == set()
    assert rules(STORE, "fence.proxy.async.global;", SYNC, MATMUL, WAIT) == {
        ptx_order.STORE_TO_MATMUL
    }


def test_an_address_without_a_space_is_traced():
    store = "st.v2.b32 [%rd3+16], {%r1, %r2};"
    to_global = (
        "ld.param.b64 %rd1, [sample_param_0]; cvt.s64.s32 %rd2, %r1; add.s64 %rd3, %rd1, %rd2;"
    )
    index = "ld.global.b32 %r1, [%rd7];"
    assert rules(index, to_global, store, MATMUL, WAIT) == set()
    to_shared = "mov.b64 %rd1, scratch; add.s64 %rd3, %rd1, 8;"
    scratch = ".shared .align 16 .b8 scratch[64];"
    assert rules(scratch, to_shared, store, MATMUL, WAIT) == {ptx_order.STORE_TO_MATMUL}
    # One of two addresses.
    either = [scratch, index, to_global, "@%p1 bra $L1;", to_shared, "$L1:", store]
    assert rules(*either, MATMUL, WAIT) == {ptx_order.STORE_TO_MATMUL}


def test_stores_that_only_threads_read(tmp_path):
    source = tmp_path / "kernel.py"
    source.write_text("\n  scores_s[0] = own\n")
    text = kernel(".loc\t1 2 3", STORE, ARRIVE, MATMUL, WAIT) + f'.file 1 "{source}"\n'
    parsed = parse_kernel(text)
    assert {v.rule for v in violations(parsed)} == {
        ptx_order.STORE_TO_ARRIVAL,
        ptx_order.STORE_TO_MATMUL,
    }
    assert violations(parsed, ["scores_s["]) == []
    assert violations(parsed, ["other_s["]) != []


def test_a_matmul_from_registers_reads_its_right_side_from_shared_memory():
    assert rules(STORE, FROM_REGISTERS, WAIT) == {ptx_order.STORE_TO_MATMUL}


def test_every_path_counts():
    branch = ["setp.lt.s32 %p1, %r1, %r2;", "@%p1 bra $L1;", STORE]
    assert rules(*branch, COMMIT, "$L1:", MATMUL, WAIT) == set()
    # The fence stands on one of two paths only.
    split = [STORE, "@%p1 bra $L1;", COMMIT, "$L1:", MATMUL, WAIT]
    assert rules(*split) == {ptx_order.STORE_TO_MATMUL}
    around = [STORE, COMMIT, "@%p1 bra $L1;", STORE, "bra.uni $L2;", "$L1:", MATMUL, WAIT, "$L2:"]
    assert rules(*around) == set()


def test_a_store_at_the_end_of_a_loop_reaches_the_matmul_of_the_next_round():
    loop = ["$L1:", MATMUL, WAIT, STORE, "{}", "@%p1 bra $L1;"]
    assert rules(*(line.format(COMMIT) if line == "{}" else line for line in loop)) == set()
    open_loop = [line for line in loop if line != "{}"]
    assert rules(*open_loop) == {ptx_order.STORE_TO_MATMUL}


def test_waiting_for_a_barrier_is_no_fence():
    assert rules(STORE, BARRIER_WAIT, MATMUL, WAIT) == {ptx_order.STORE_TO_MATMUL}


@pytest.mark.parametrize(
    "copy",
    [
        COPY_OUT,
        "cp.async.bulk.global.shared::cta.bulk_group [%rd8], [%r7], %r1;",
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%rd8, {%r1, %r2}], [%r7];",
    ],
)
def test_a_store_must_be_fenced_before_a_copy_out(copy):
    assert rules(STORE, COMMIT, copy, COPIED_OUT) == set()
    assert rules(STORE, copy, COPIED_OUT) == {ptx_order.STORE_TO_COPY_OUT}
    assert rules(STORE, SYNC, copy, COPIED_OUT) == {ptx_order.STORE_TO_COPY_OUT}
    assert rules(STORE, FENCE, copy, COPIED_OUT) == {ptx_order.STORE_TO_COPY_OUT}


def test_a_store_must_be_fenced_before_a_copy_into_shared_memory():
    assert rules(STORE, COMMIT, COPY_IN) == set()
    assert rules(STORE, SYNC, COPY_IN) == {ptx_order.STORE_TO_COPY_IN}


def test_a_store_must_be_fenced_before_others_are_told():
    assert rules(STORE, COMMIT, ARRIVE) == set()
    assert rules(STORE, FENCE, ARRIVE) == set()
    assert rules(STORE, SYNC, ARRIVE) == {ptx_order.STORE_TO_ARRIVAL}
    for barrier in ("bar.sync 0;", "bar.sync 1, 256;", "bar.arrive 1, 256;", "bar.sync 1, %r1;"):
        assert rules(STORE, barrier, threads=256) == {ptx_order.STORE_TO_ARRIVAL}
    assert rules(STORE, "bar.sync 0;") == set()


def test_registers_need_a_fence_before_they_go_into_a_matmul():
    unfenced = MATMUL.replace("wgmma.fence.sync.aligned;", "")
    assert rules(unfenced, WAIT) == {ptx_order.NO_MATMUL_FENCE}
    assert rules(MATMUL, unfenced, WAIT) == set(), "matmuls in a row share accumulators"
    use = "add.f32 %r40, %r20, %r21;"
    assert rules(MATMUL, WAIT, use, unfenced, WAIT) == {ptx_order.NO_MATMUL_FENCE}
    left = "mov.b32 %r30, %r50;"
    unfenced_left = FROM_REGISTERS.replace("wgmma.fence.sync.aligned;", left)
    assert rules(left, FROM_REGISTERS, WAIT) == set()
    assert rules("wgmma.fence.sync.aligned;", unfenced_left, WAIT) == {ptx_order.NO_MATMUL_FENCE}


def test_accumulators_belong_to_the_matmul_until_it_is_waited_for():
    use = "add.f32 %r40, %r20, %r41;"
    assert rules(MATMUL, WAIT, use) == set()
    assert rules(MATMUL, use, WAIT) == {ptx_order.IN_FLIGHT}
    uncommitted = MATMUL.replace("wgmma.commit_group.sync.aligned;", "")
    assert ptx_order.IN_FLIGHT in rules(uncommitted, WAIT, use)
    overwritten = "mov.b32 %r30, %r50;"
    assert rules(FROM_REGISTERS, overwritten, WAIT) == {ptx_order.IN_FLIGHT}
    as_left = FROM_REGISTERS.replace("%r30", "%r20").replace(
        "{%r20,%r21,%r22", "{%r60,%r61,%r62", 1
    )
    assert ptx_order.IN_FLIGHT in rules(MATMUL, as_left, WAIT)


def test_a_wait_leaves_the_newest_groups_in_flight():
    other = MATMUL.replace("%r2", "%r7")
    wait_one = "wgmma.wait_group.sync.aligned 1;"
    old, new = "add.f32 %r40, %r20, %r41;", "add.f32 %r40, %r70, %r41;"
    assert rules(MATMUL, other, wait_one, old, WAIT, new) == set()
    assert rules(MATMUL, other, wait_one, new, WAIT) == {ptx_order.IN_FLIGHT}
    assert rules(MATMUL, wait_one, old, WAIT) == {ptx_order.IN_FLIGHT}


def test_shared_memory_is_given_back_after_the_wait():
    assert rules(MATMUL, WAIT, ARRIVE) == set()
    assert rules(MATMUL, ARRIVE, WAIT) == {ptx_order.FREED_IN_FLIGHT}
    assert rules(MATMUL, WAIT, COPY_IN) == set()
    assert rules(MATMUL, COPY_IN, WAIT) == {ptx_order.FREED_IN_FLIGHT}
    # The next matmul is meant to run on while the last one's memory is freed.
    pipelined = ["wgmma.wait_group.sync.aligned 1;", ARRIVE, WAIT]
    assert rules(MATMUL, MATMUL.replace("%r2", "%r7"), *pipelined) == set()


def test_a_refill_waits_for_all_warps_that_read():
    assert rules(MATMUL, WAIT, COPY_IN_ALONE) == {ptx_order.REFILL_UNMET}
    assert rules(MATMUL, WAIT, SYNC, COPY_IN_ALONE) == set()


def test_a_kernel_ends_with_nothing_in_flight():
    assert rules(MATMUL) == {ptx_order.ENDS_IN_FLIGHT}
    assert rules(COPY_OUT, "cp.async.bulk.commit_group;") == {ptx_order.ENDS_IN_FLIGHT}
    read_only = "cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;"
    assert rules(COPY_OUT, read_only) == set()
    assert rules(COPY_OUT, "cp.async.bulk.commit_group; cp.async.bulk.wait_group 1;") == {
        ptx_order.ENDS_IN_FLIGHT
    }


def test_a_violation_names_both_lines():
    text = kernel(".loc\t1 7 3", STORE, ".loc\t1 9 3, function_name $L1, inlined_at 1 2 3", MATMUL)
    text += '.file 1 "a/b/attention.py"\n'
    (found,) = [
        v for v in violations(parse_kernel(text)) if v.cause and v.rule == ptx_order.STORE_TO_MATMUL
    ]
    assert str(found) == (
        "store reaches wgmma without proxy fence and barrier: "
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 (attention.py:9) "
        "after st.shared.b32 (attention.py:7)"
    )


def test_loops_within_loops():
    inner = ["$L2:", "ld.global.b32 %r1, [%rd1];", MATMUL, WAIT, BARRIER_WAIT, "@%p2 bra $L2;"]
    text = kernel(
        "$L1:", "ld.global.b64 %rd2, [%rd1];", *inner, "@%p1 bra $L1;", "ld.global.b32 %r3, [%rd3];"
    )
    (loop,) = parse_kernel(text).innermost_loops("wgmma")
    assert [i.opcode for i in loop if i.opcode.startswith("ld.")] == ["ld.global.b32"]
    (spin,) = parse_kernel(text).innermost_loops("mbarrier.try_wait")
    assert [i.opcode for i in spin] == ["mbarrier.try_wait.parity.shared.b64", "bra.uni", "bra.uni"]
    assert parse_kernel(text).innermost_loops("cp.async") == []


def test_labels_of_inline_assembly_may_repeat():
    parsed = parse_kernel(kernel(BARRIER_WAIT, BARRIER_WAIT))
    assert len(parsed.innermost_loops("mbarrier.try_wait")) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bra $nowhere;", "branch to .nowhere"),
        ("brx.idx %r1, $table;", "control flow is not followed"),
        ("call.uni f, (%r1);", "control flow is not followed"),
        ("%r1;", "Not a PTX instruction"),
    ],
)
def test_refuses_what_it_cannot_follow(line, message):
    with pytest.raises(ValueError, match=message):
        parse_kernel(kernel(line))


def test_refuses_text_without_a_kernel():
    with pytest.raises(ValueError, match="holds no kernel"):
        parse_kernel(".version 8.0\n")
