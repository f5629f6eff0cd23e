"""The engine's steps compiled for an H200 that is not here: nothing large is copied, and the report's sums are right."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from jaxinfer.executor.compile_report import Section, main, render, render_section
from jaxinfer.executor.compile_workload import Workload, model_config
from kernels_pallas.compile_job import run_job
from tests.gpu_compiler import needs_compiler

MEASURE = "jaxinfer.executor.compile_measure:measure"
MIB = 1 << 20

E, M, K, G, H, LAYERS = 4096, 14_336, 8, 4, 128, 32  # llama-8b
LAYER_WEIGHTS = E * K * (G + 2) * H + K * G * H * E + 3 * M * E


def compiled(program: str, *, model: str = "llama-8b", size: int = 1, layers: int | None = None):
    work = Workload(rows=64, context=2048, mixed_tokens=1024)
    arguments = {
        "model": model,
        "target": "h200",
        "tensor_parallel_size": size,
        "workload": asdict(work),
        "programs": [program],
        "num_layers": layers,
    }
    (result,) = run_job(MEASURE, arguments, timeout=240)
    return result


def temporaries_bound(num_tokens: int) -> int:
    """Bytes that a step may need beside weights and cache, whatever the number of layers.

    The float32 outputs of one layer's matmuls (gate and up; queries, keys and values) and four arrays as large as the
    residual stream, all at once; and 16 MiB for the tiles that attention has in flight. What attention gathers of
    the cache must fit in there: a whole layer's context would be 512 MiB.
    """
    return num_tokens * (2 * M + K * (G + 2) * H + 4 * E) * 4 + 16 * MIB


def kernels_of_a_layer(result) -> list[str]:
    """What a layer launches, sums over the devices apart."""
    return [k["name"] for k in result["layer"] if not k["kind"].startswith("all-reduce")]


def check_kernels(result: dict) -> None:
    """Of the library's own kernels: all there, with their instructions, without spills, in order; slices aligned."""
    assert result["problems"] == []
    kernels = {kernel["name"]: kernel for kernel in result["mosaic_kernels"]}
    attention = {
        "paged_decode",
        "paged_decode_merge" if result["program"] == "decode" else "paged_prefill",
    }
    assert kernels.keys() >= attention | {"rope_kv_cache_update"}
    for name in attention - {"paged_decode_merge"}:
        assert kernels[name]["matmuls"] > 0
        assert kernels[name]["loads"] > 0
    for kernel in kernels.values():
        assert kernel["spilled_bytes"] == 0
        assert kernel["shared_memory"] <= 232_448
        assert kernel["blocks_per_core"] >= 1


@needs_compiler
@pytest.mark.parametrize(("program", "num_tokens"), [("decode", 64), ("mixed", 1024)])
def test_a_whole_8b_step_copies_neither_weights_nor_cache(program, num_tokens):
    result = compiled(program)
    cache = LAYERS * 2 * (64 * 32 + 1) * K * 64 * H * 2
    assert result["cache_bytes"] == cache
    memory = result["memory"]
    assert memory["alias"] == cache
    assert result["moved"] == []
    assert memory["temporaries"] < temporaries_bound(num_tokens)
    check_kernels(result)

    # Four matmuls, two norms with the additions before them, the activation, rotation and cache, and two of attention.
    assert len(kernels_of_a_layer(result)) == 10
    assert result["kernels_per_layer"] == 10

    matmuls = 2 * num_tokens * LAYERS * LAYER_WEIGHTS
    assert matmuls <= result["flops"] < 1.2 * result["floor"]["flops"]
    chunk = num_tokens - 63
    pairs = 63 * 2048 + sum(2048 - i for i in range(chunk))
    assert result["floor"]["flops"] == matmuls + LAYERS * 4 * K * G * H * pairs

    weights = 2 * (LAYERS * (LAYER_WEIGHTS + 2 * E) + E)
    keys_and_values = LAYERS * 2 * K * H * 2 * (64 * 2048 + num_tokens)
    assert result["floor"]["num_bytes"] == weights + num_tokens * E * 2 + keys_and_values
    assert result["num_bytes"] > weights
    embedding = 128_256 * E * 2
    assert weights + embedding + cache < memory["arguments"] < weights + embedding + cache + MIB


@needs_compiler
def test_a_shared_prefix_is_read_where_it_lies():
    """Half the context of 64 requests, once for all of them. Two layers say it for 32."""
    result = compiled("shared_prefix", layers=2)
    cache = 2 * 2 * (64 * 32 + 1) * K * 64 * H * 2
    assert result["memory"]["alias"] == result["cache_bytes"] == cache
    assert result["moved"] == []
    assert result["memory"]["temporaries"] < temporaries_bound(64)
    # Both phases are kernels: XLA's attention has loops whose length depends on the batch.
    assert result["num_open_loops"] == 0
    weights = 2 * (2 * (LAYER_WEIGHTS + 2 * E) + E)
    keys_and_values = 2 * 2 * K * H * 2 * (64 * 1024 + 1024 + 64)
    assert result["floor"]["num_bytes"] == weights + 64 * E * 2 + keys_and_values


@needs_compiler
def test_a_deterministic_step_has_one_attention_kernel_and_no_loops():
    result = compiled("deterministic", layers=1)
    assert result["problems"] == []
    names = {kernel["name"] for kernel in result["mosaic_kernels"]}
    assert {name for name in names if name.startswith("paged")} == {"paged_prefill"}
    assert result["num_open_loops"] == 0
    assert result["memory"]["alias"] == result["cache_bytes"]
    assert result["moved"] == []


@needs_compiler
def test_sampling_reads_the_head_where_it_lies():
    result = compiled("sample_greedy", layers=1)
    head = 128_256 * E * 2
    assert result["moved"] == []
    assert result["floor"] == {"num_bytes": head + 64 * E * 2, "flops": 2 * 64 * 128_256 * E}
    assert result["flops"] == result["floor"]["flops"]
    assert result["num_bytes"] < 1.2 * result["floor"]["num_bytes"]


@needs_compiler
def test_verifying_drafts_reads_the_head_once_for_all_positions():
    result = compiled("sample_drafts", layers=1)
    head = 128_256 * E * 2
    assert result["moved"] == []
    assert result["floor"] == {"num_bytes": head + 320 * E * 2, "flops": 2 * 320 * 128_256 * E}
    assert result["flops"] == result["floor"]["flops"]


@needs_compiler
def test_each_of_four_devices_has_a_quarter_of_a_70b_step():
    result = compiled("decode", model="llama-70b", size=4, layers=3)
    cache = 3 * 2 * (64 * 32 + 1) * 8 * 64 * 128 * 2 // 4
    assert result["memory"]["alias"] == result["cache_bytes"] == cache
    assert result["moved"] == []
    check_kernels(result)
    layer = 8192 * 8 * 10 * 128 + 8192 * 8192 + 3 * 28_672 * 8192
    matmuls = 2 * 64 * 3 * layer // 4
    assert matmuls <= result["flops"] < 1.2 * result["floor"]["flops"]
    # Two sums over the devices a layer, and one for the embedding that is cut along its rows.
    sums = 7 * 64 * 8192
    assert 2 * sums <= result["collective_bytes"] <= 4 * sums
    assert len(kernels_of_a_layer(result)) <= 10


@needs_compiler
@pytest.mark.parametrize("program", ["decode", "mixed", "verify"])
def test_a_1b_step_updates_its_cache_in_place_with_kernels_in_order(program):
    result = compiled(program, model="llama-1b", layers=2)
    cache = 2 * 2 * (64 * 32 + 1) * 8 * 64 * 64 * 2
    assert result["memory"]["alias"] == result["cache_bytes"] == cache
    assert result["moved"] == []
    check_kernels(result)


@needs_compiler
def test_the_command_reports_a_model_by_its_directory(tmp_path, capsys):
    config = {**model_config("llama-1b"), "hidden_size": 128, "intermediate_size": 256}
    config |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"head_dim": 32, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = tmp_path / "report.md"
    options = ["--model", str(tmp_path), "--rows", "8", "--context", "128", "--output", str(out)]
    status = main([*options, "--mixed-tokens", "32", "--programs", "decode", "sample_greedy"])
    assert status == 0
    text = out.read_text()
    assert text.startswith("# The engine's programs, compiled for the NVIDIA H200")
    assert capsys.readouterr().out.strip() in text
    rows = [line for line in text.splitlines() if line.startswith(("| decode", "| sample_greedy"))]
    assert len(rows) == 2
    assert all("| none |" in row for row in rows)
    assert "1.attention.qkv" in text


@needs_compiler
def test_a_program_that_does_not_compile_is_reported_and_fails_the_command(tmp_path, capsys):
    config = {**model_config("llama-1b"), "architectures": ["MysteryForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    status = main(["--model", str(tmp_path), "--programs", "decode"])
    out = capsys.readouterr().out
    assert status == 1
    assert "**decode failed:**" in out
    assert "architecture MysteryForCausalLM is not supported" in out


RESULT = {
    "program": "decode",
    "shape": {},
    "lower_seconds": 0.25,
    "compile_seconds": 7.5,
    "memory": {"arguments": 10 * MIB, "outputs": 0, "alias": 4 * MIB, "temporaries": MIB // 2},
    "cache_bytes": 4 * MIB,
    "flops": 3 * 10**9,
    "num_bytes": 6 * 10**9,
    "floor": {"num_bytes": 4 * 10**9, "flops": 2 * 10**9},
    "roofline_seconds": 0.00125,
    "floor_seconds": 0.001,
    "num_kernels": 45,
    "kernels_per_layer": 10.0,
    "num_open_loops": 0,
    "collective_bytes": 0,
    "moved": [],
    "layer": [],
    "mosaic_kernels": [],
    "problems": [],
}
WORK = Workload(8, 128, 32, 16)


def test_a_row_of_the_table():
    text = render_section(Section("tiny", 1, {"decode": RESULT}), WORK)
    row = next(line for line in text.splitlines() if line.startswith("| decode"))
    assert row == (
        "| decode | 0.2 s | 7.5 s | 10.0 MiB | 4.0 MiB | 0.5 MiB | 6.00 | 1.50 | 3 | 1.50 "
        "| 1.25 ms | 1.00 ms | 45 | 10 | none |"
    )


def test_copies_and_open_loops_stand_out():
    moved = {"kernel": "copy.3", "source": "copy", "label": "layers.0.o", "num_bytes": 2 * MIB}
    result = {**RESULT, "moved": [moved], "num_open_loops": 2}
    text = render([Section("tiny", 2, {"decode": result})], "h200", WORK)
    assert "## tiny, each of 2 devices" in text
    assert "| ≥ 6.00 | ≥ 1.50 |" in text
    assert "| 1, 2.0 MiB |" in text
    assert "- layers.0.o: 2.0 MiB by copy.3 (copy)" in text


def test_kernels_and_what_is_wrong_with_them_stand_in_the_report():
    kernel = {
        "name": "paged_decode",
        "registers": 190,
        "spilled_bytes": 0,
        "shared_memory": 98 << 10,
    }
    kernel |= {"blocks_per_core": 2, "matmuls": 12, "loads": 57, "stores": 0}
    result = {**RESULT, "mosaic_kernels": [kernel], "problems": ["paged_decode spills 8 bytes"]}
    text = render_section(Section("tiny", 1, {"decode": result}), WORK)
    assert "| paged_decode | decode | 190 | 0 | 98.0 KiB | 2 | 12 | 57 |  |" in text
    assert "**Wrong in decode:**\n\n- paged_decode spills 8 bytes\n" in text


def test_presets_have_the_published_sizes():
    def parameters(name: str) -> int:
        c = model_config(name)
        head = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
        q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
        layer = c["hidden_size"] * (2 * q + 2 * kv + 3 * c["intermediate_size"])
        ends = 1 if c.get("tie_word_embeddings") else 2
        return c["num_hidden_layers"] * layer + ends * c["vocab_size"] * c["hidden_size"]

    assert parameters("llama-1b") == pytest.approx(1.236e9, rel=0.01)
    assert parameters("llama-8b") == pytest.approx(8.03e9, rel=0.01)
    assert parameters("llama-70b") == pytest.approx(70.55e9, rel=0.01)
