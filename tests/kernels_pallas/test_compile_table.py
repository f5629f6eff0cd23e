"""Every claimed kernel compiled for the H200: a selection here, all of it by `make test-kernels`; and the checks can fail."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest

import kernels_pallas
from kernels_pallas.compile_job import run_job
from kernels_pallas.compile_table.__main__ import compile_cases, main
from kernels_pallas.compile_table.case import Case, Expected, select, spread
from kernels_pallas.compile_table.measure import Row, problems
from kernels_pallas.compile_table.operations import OPERATIONS, claims
from kernels_pallas.compile_table.render import named_cases, problem_lines, render, with_others_of
from kernels_pallas.gpu_target import get_target
from kernels_pallas.kernel_report import KernelReport, sizes_by_kernel
from kernels_pallas.ptx_text import parse_kernel
from tests.gpu_compiler import needs_compiler

HERE = Path(__file__).parent
PACKAGE = Path(kernels_pallas.__file__).parent
TABLE = PACKAGE.parent / "docs" / "gpu_kernels.md"
LONG = bool(os.environ.get("MOSAIC_ATTENTION_LONG"))
COMMIT = "plgpu.commit_smem()"
H200 = get_target("h200")


@cache
def all_claims() -> tuple[Case, ...]:
    return tuple(claims())


def test_what_is_claimed():
    assert len(set(all_claims())) == len(all_claims())
    by_operation = Counter(case.operation for case in all_claims())
    assert by_operation.keys() == OPERATIONS.keys()
    attention = [c for c in all_claims() if c.operation == "ragged_paged_attention"]
    assert {c.size for c in attention} == {64, 80, 96, 128, 256}
    assert {c.page_size for c in attention} == {16, 32, 64, 128}
    assert {"bfloat16", "float16"} <= {c.dtype for c in attention}


def test_every_operation_with_a_kernel_for_hopper_is_in_the_table():
    kernels = [*PACKAGE.glob("*/mosaic_gpu.py"), *PACKAGE.glob("*/mosaic_gpu/__init__.py")]
    assert {path.relative_to(PACKAGE).parts[0] for path in kernels} == OPERATIONS.keys()


def test_the_selection_holds_every_size_dtype_and_option():
    chosen = spread(all_claims())
    assert len(chosen) < len(all_claims()) / 5
    for operation in OPERATIONS:
        features = [
            frozenset().union(*(c.features for c in cases if c.operation == operation))
            for cases in (chosen, all_claims())
        ]
        assert features[0] == features[1]


def test_the_committed_table_names_every_claimed_combination():
    named = named_cases(TABLE.read_text())
    missing = [str(case) for case in all_claims() if case not in named]
    stale = [str(case) for case in named if case not in set(all_claims())]
    advice = f"run python -m kernels_pallas.compile_table --output docs/{TABLE.name}"
    assert not missing, (advice, missing)
    assert not stale, (advice, stale)
    for case, kernels in named.items():
        assert kernels == OPERATIONS[case.operation].expected(case).keys(), case


@needs_compiler
def test_compiled_for_the_h200_nothing_is_wrong():
    cases = list(all_claims()) if LONG else spread(all_claims())
    rows, failures = compile_cases(cases, "h200", jobs=2)
    print(render(rows, "h200"))
    assert failures == []
    assert problem_lines(rows) == []
    assert {row.case for row in rows} == set(cases)


def modules_that_commit() -> list[str]:
    """Of kernels, relative to the package, that make stores to shared memory visible to wgmma and TMA."""
    paths = sorted([*PACKAGE.glob("*/mosaic_gpu*.py"), *PACKAGE.glob("*/mosaic_gpu/*.py")])
    return [str(p.relative_to(PACKAGE)) for p in paths if COMMIT in p.read_text()]


# The modules of the kernels with matmuls, and of one without; the others by `make test-kernels`.
CORE_MODULES = [
    "mla_attention/mosaic_gpu_attend.py",
    "ragged_paged_attention/mosaic_gpu/decode_kernel.py",
    "ragged_paged_attention/mosaic_gpu/prefill_consumer.py",
    "rope_kv_cache_update/mosaic_gpu.py",
]


def case_that_runs(module: str) -> Case:
    cases = [c for c in spread(all_claims()) if c.operation == Path(module).parts[0]]
    if "dequant" in module:
        cases = [c for c in cases if c.cache_dtype != c.dtype]
    if "prefill" in module:
        cases = [c for c in cases if "paged_prefill" in OPERATIONS[c.operation].expected(c)]
    return cases[0]


@needs_compiler
def test_a_forgotten_commit_is_found_in_every_kernel(tmp_path):
    names = modules_that_commit()
    assert set(CORE_MODULES) <= set(names)
    copies = {}
    for name in names if LONG else CORE_MODULES:
        root = tmp_path / name.replace("/", "-")
        shutil.copytree(PACKAGE, root / "kernels_pallas")
        faulty = root / "kernels_pallas" / name
        faulty.write_text(faulty.read_text().replace(COMMIT, "pass"))
        copies[str(root)] = asdict(case_that_runs(name))
    found = run_job(
        "compile_table_jobs:problems_of_copies",
        {"copies": copies},
        timeout=60 + 60 * len(copies),
        env={"JAX_ENABLE_COMPILATION_CACHE": "false"},
        python_path=(str(HERE),),
    )
    for root, lines in found.items():
        assert any("proxy fence" in line for line in lines), (root, lines)


PTX = """
.visible .entry paged_sample_mosaic_gpu_kernel()
.maxntid 128, 1, 1
{
$L1:
	@%p1 cp.async.bulk.tensor.4d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2}], [%r3];
	ld.global.b32 %r1, [%rd1];
	wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r20,%r21}, %rd5, %rd6, p, 1, 1, 0, 0;
	wgmma.commit_group.sync.aligned;
	wgmma.wait_group.sync.aligned 0;
	bar.sync 1, 128;
	INSIDE
	@%p2 bra $L1;
	@%p1 cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%rd1, {%r2}], [%r1];
	cp.async.bulk.wait_group 0;
	ret;
}
"""
EXPECTED = Expected(
    matmuls=True,
    loads=True,
    stores=True,
    stages=3,
    stage_bytes=32 << 10,
    least_in_flight=64 << 10,
    shared_memory=100 << 10,
)


def report(inside: str = "", ptx: str = PTX, **changes) -> KernelReport:
    good = KernelReport(
        name="paged_sample",
        registers=200,
        spilled_bytes=0,
        stack_bytes=0,
        shared_memory=98 << 10,
        barriers=(1, 3),
        ignores_register_counts=False,
        ptx=parse_kernel(ptx.replace("INSIDE", inside)),
    )
    return replace(good, **changes)


def found(kernel: KernelReport, expected: Expected = EXPECTED, in_flight: int = 128 << 10):
    return list(problems(kernel, expected, H200, in_flight))


def test_a_good_kernel_has_no_problems():
    assert found(report()) == []
    assert report().blocks_per_core(H200) == 2
    assert (report().count_in_loops(r"ld\.global"), report().count(r"wgmma\.mma")) == (1, 1)


@pytest.mark.parametrize(
    ("message", "kernel"),
    [
        ("spills 8 bytes", report(spilled_bytes=8)),
        ("16 bytes of stack", report(stack_bytes=16)),
        ("a block has 232448", report(shared_memory=232_449)),
        ("its config accounts for 102400", report(shared_memory=102_401)),
        ("no ring of 3 barriers", report(barriers=(1, 2))),
        ("hold no 3 stages", report(shared_memory=90 << 10)),
        ("stores by threads", report("st.global.b32 [%rd1], %r1;")),
        ("or local memory", report("ld.local.b32 %r1, [%rd1];")),
        ("before its wgmma", report(ptx=PTX.replace("wgmma.wait_group.sync.aligned 0;", ""))),
        ("no wgmma", report(ptx="\n".join(x for x in PTX.splitlines() if "wgmma" not in x))),
        ("no TMA loads", report(ptx=PTX.replace("cp.async.bulk.tensor.4d.shared::cta", "prefetch"))),
        ("no TMA stores", report(ptx=PTX.replace("cp.async.bulk.tensor.4d.global", "prefetch"))),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(message, kernel):
    assert any(message in line for line in found(kernel)), found(kernel)


def test_spills_that_are_known():
    known = replace(EXPECTED, most_spilled=16)
    assert found(report(spilled_bytes=16, stack_bytes=8), known) == []
    assert found(report(spilled_bytes=24, stack_bytes=8), known) != []


def test_too_few_stages_and_bytes_in_flight():
    assert "1 stages" in found(report(barriers=(1,)), replace(EXPECTED, stages=1))
    assert found(report(), in_flight=63 << 10) == ["63 KiB in flight, at least 64 expected"]


@pytest.mark.parametrize(
    ("registers", "shared_memory", "blocks"),
    [(255, 1000, 2), (168, 1000, 3), (32, 100 << 10, 2), (32, 226 << 10, 1), (32, 1000, 16)],
)
def test_blocks_per_core(registers, shared_memory, blocks):
    kernel = report(registers=registers, shared_memory=shared_memory)
    assert kernel.blocks_per_core(H200) == blocks


def row(case: Case, **changes) -> Row:
    good = Row(
        case=case,
        kernel="paged_decode",
        registers=100,
        spilled_bytes=0,
        shared_memory=98 << 10,
        num_threads=128,
        blocks_per_core=2,
        bytes_in_flight=160 << 10,
        stages=6,
        matmuls=8,
        loads=57,
        stores=3,
        loop_loads=8,
        loop_stores=0,
        ignores_register_counts=False,
        seconds=4.0,
        problems=(),
    )
    return replace(good, **changes)


CASES = [
    Case("ragged_paged_attention", 64, page, dtype, cache, "window, cap")
    for page in (16, 32)
    for dtype, cache in (("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "int8"))
]


def test_a_table_can_be_read_back():
    rows = [row(case, registers=90 + case.page_size) for case in CASES]
    text = render(rows, "h200")
    assert named_cases(text) == {case: {"paged_decode"} for case in CASES}
    assert (
        "| paged_decode | 64 | 16, 32 | bfloat16, float16 | same | window, cap | 106 to 122 | 0 | 98 "
        "| 128 | 2 | 160 | 6 | 8 | 57 | 3 | 8 | 0 |"
    ) in text.splitlines()
    assert "Problems" not in text


def test_a_table_with_gaps_names_no_more_than_there_is():
    rows = [row(case) for case in CASES[1:]]
    assert named_cases(render(rows, "h200")) == {case: {"paged_decode"} for case in CASES[1:]}


def test_operations_compiled_anew_replace_their_own_part():
    other = Case("add_rms_norm", 64, 0, "bfloat16", "bfloat16", "one update")
    old = render([row(case) for case in CASES] + [row(other)], "h200")
    for new in (row(CASES[0], registers=7), row(other, kernel="add_rms_norm")):
        text = with_others_of(old, render([new], "h200"), OPERATIONS)
        kept = {c: k for c, k in named_cases(old).items() if c.operation != new.case.operation}
        assert named_cases(text) == kept | {new.case: {new.kernel}}
        assert text.index("## ragged_paged_attention") < text.index("## add_rms_norm")


def test_problems_are_listed_with_their_case():
    line = (
        "ragged_paged_attention, size 64, page size 16, bfloat16, cache int8, "
        "options window, cap, paged_decode: no wgmma"
    )
    rows = [row(CASES[2], problems=("no wgmma",))]
    assert problem_lines(rows) == [line]
    assert f"- {line}" in render(rows, "h200")


def test_selection_by_words(capsys):
    assert select(CASES, ["page size 16,", "cache int8"]) == [CASES[2]]
    assert main(["--list", "--select", "size 80,", "page size 16,", "float16"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed and all("size 80, page size 16" in line for line in listed)
    assert main(["--select", "size 63"]) == 1
    assert "nothing claimed has" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("calls", "sizes", "told"),
    [
        ("abab", "12", {"a": "1", "b": "2"}),
        ("abab", "1212", {"a": "1", "b": "2"}),
        ("abacbd", "12324", {"a": "1", "b": "2", "c": "3", "d": "4"}),
        ("abacbd", "12134", {"a": "1", "b": "2", "c": "3", "d": "4"}),
        ("ab", "1", None),
        ("ab", "123", None),
    ],
)
def test_whose_sizes_mosaic_told(calls, sizes, told):
    assert sizes_by_kernel(list(calls), list(sizes)) == told
