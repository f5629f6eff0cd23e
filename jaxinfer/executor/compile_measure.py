"""The engine's own programs for a model, compiled for a GPU that is not here, in numbers.

Nothing is loaded: leaves, cache and inputs are shapes. `measure` returns plain data, so that it can run as a
`kernels_pallas.compile_job` in a process of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import jax

from jaxinfer.executor.buckets import BucketLadder, StepShape
from jaxinfer.executor.compile_workload import Workload, model_config
from jaxinfer.executor.deterministic_programs import DeterministicPrograms
from jaxinfer.executor.program_cache import ProgramCache
from jaxinfer.executor.programs import Programs
from jaxinfer.executor.sampler_features import SamplerFeatures, SamplerLevel
from jaxinfer.executor.sampler_state import SamplerState
from jaxinfer.models.cache_groups import model_groups
from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.models.latent_spec import LatentAttentionSpec
from jaxinfer.models.moe import EXPERT_LEAVES
from jaxinfer.models.moe_spec import MoeSpec
from jaxinfer.models.registry import describe_model
from jaxinfer.models.sharded_dims import ShardedDims
from jaxinfer.models.spec import AnyAttentionSpec, DecoderSpec
from jaxinfer.parallel.mesh import MODEL_AXIS, device_bytes, replicated
from jaxinfer.weights.plan import LeafPath
from kernels_pallas.gpu_target import CompiledReport, GpuTarget, device_mesh, get_target
from kernels_pallas.hlo_report import HloReport, analyze, inputs_of
from kernels_pallas.hlo_slices import sliced_operands
from kernels_pallas.kernel_report import MATMUL, TMA_LOAD, TMA_STORE, KernelCompiler, KernelReport

LEAST_MOVE = 1 << 20
"""Bytes from which a copy of a weight or of the cache is reported: it takes a GPU less than a launch to move fewer."""


_NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
"""XLA's own kernels are refused when they spill."""


@dataclass(frozen=True)
class Floor:
    """What a program can't do without, on one device: bytes and FLOPs."""

    num_bytes: int
    flops: int


def measure(
    model: str,
    target: str,
    tensor_parallel_size: int,
    workload: dict[str, int],
    programs: list[str],
    num_layers: int | None = None,
    kv_dtype: str | None = None,
) -> list[dict[str, Any]]:
    """Compile `programs` (see `compile_workload.PROGRAMS`) of a model and count.

    Args:
        model: A preset's name, a model's directory or file, or whatever else `jaxinfer` finds a model by.
        target: The GPU, a name in `kernels_pallas.gpu_target.TARGETS`.
        workload: Fields of `Workload`.
        num_layers: Cut the model short.
        kv_dtype: Of the KV cache; None for the model's.
    """
    config = model_config(model)
    if num_layers is not None:
        config = {**config, "num_hidden_layers": num_layers}
    work = Workload(**workload)
    mesh = device_mesh(target, tensor_parallel_size, MODEL_AXIS)
    description = describe_model(config)
    longest = work.pages_per_row * work.page_size
    decoder = FunctionalDecoder.create(
        description.spec,
        mesh,
        description.checkpoint_dtype,
        kv_dtype,
        model_groups(description.spec, longest),
    )
    return [_measure_program(decoder, target, work, program) for program in programs]


def _programs(decoder: FunctionalDecoder, work: Workload, program: str) -> Programs:
    vocab_size = decoder.spec.vocab_size
    ladder = BucketLadder.create(work.mixed_tokens, work.rows, work.pages_per_row)
    deterministic = program == "deterministic"
    programs_class = DeterministicPrograms if deterministic else Programs
    return programs_class(
        decoder=decoder,
        ladder=work.tile if deterministic else ladder,
        cache=ProgramCache(num_threads=1),
        sampler_state=SamplerState(work.rows, vocab_size, replicated(decoder.mesh)),
        num_rows=work.rows,
        num_blocks=work.num_pages,
        block_size=work.page_size,
        max_logprobs=0,
        num_drafts=work.drafts,
    )


def _measure_program(
    decoder: FunctionalDecoder, target: str, work: Workload, program: str
) -> dict[str, Any]:
    programs = _programs(decoder, work, program)
    shape = work.shape(program)
    lower: Callable[[], jax.stages.Lowered]
    if not program.startswith("sample"):
        lower, floor = lambda: programs.lower_forward(shape), forward_floor(decoder, work, shape)
    elif program == "sample_drafts":
        positions = work.num_positions
        lower, floor = (
            lambda: programs.lower_verify(positions, SamplerFeatures(SamplerLevel.RANDOM)),
            sample_floor(decoder, positions),
        )
    else:
        level = SamplerLevel.GREEDY if program == "sample_greedy" else SamplerLevel.RANDOM
        features = SamplerFeatures(level)
        lower, floor = (
            lambda: programs.lower_sample(work.rows, features),
            sample_floor(decoder, work.rows),
        )
    compiled, mosaic = KernelCompiler(decoder.mesh).compile_lowered(lower, _NO_SPILLS)
    leaves = {f"leaves[{i}]": ".".join(path) for i, path in enumerate(decoder.leaves)}
    watched = [
        name for name in inputs_of(compiled.hlo) if name.startswith(("leaves", "head", "kv_cache"))
    ]
    report = analyze(compiled.hlo, watched=dict.fromkeys(watched, LEAST_MOVE))
    gpu = get_target(target)
    peaks = gpu.bytes_per_second, gpu.bf16_flops_per_second
    layers = _kernels_by_layer(report, leaves)
    return {
        "program": program,
        "shape": shape._asdict(),
        "lower_seconds": compiled.lower_seconds,
        "compile_seconds": compiled.compile_seconds,
        "memory": asdict(compiled.memory),
        "cache_bytes": cache_bytes(decoder, work),
        "flops": report.flops,
        "num_bytes": report.num_bytes,
        "floor": asdict(floor),
        "roofline_seconds": report.seconds(*peaks),
        "floor_seconds": max(floor.num_bytes / peaks[0], floor.flops / peaks[1]),
        "num_kernels": report.num_kernels,
        "kernels_per_layer": statistics.median(map(len, layers)) if layers else None,
        "num_open_loops": report.num_open_loops,
        "collective_bytes": report.collective_bytes,
        "moved": [{**asdict(m), "label": leaves.get(m.label, m.label)} for m in report.moved],
        "layer": [
            {
                "name": kernel.name,
                "kind": kernel.opcode,
                "source": kernel.source.rsplit("/", 1)[-1],
                "inputs": [leaves.get(name, name) for name in kernel.inputs],
                "flops": kernel.flops,
                "num_bytes": kernel.num_bytes,
            }
            for kernel in (layers[len(layers) // 2] if layers else ())
        ],
        "mosaic_kernels": [_kernel_facts(kernel, gpu) for kernel in mosaic],
        "problems": list(_problems(compiled, mosaic, gpu)),
    }


def _kernel_facts(kernel: KernelReport, gpu: GpuTarget) -> dict[str, Any]:
    return {
        "name": kernel.name,
        "registers": kernel.registers,
        "spilled_bytes": kernel.spilled_bytes,
        "shared_memory": kernel.shared_memory,
        "blocks_per_core": kernel.blocks_per_core(gpu),
        "matmuls": kernel.count(MATMUL),
        "loads": kernel.count(TMA_LOAD),
        "stores": kernel.count(TMA_STORE),
    }


def _problems(
    compiled: CompiledReport, mosaic: list[KernelReport], gpu: GpuTarget
) -> Iterator[str]:
    """What would fail, or be luck, on the GPU."""
    for kernel in mosaic:
        if kernel.spilled_bytes or kernel.stack_bytes:
            yield f"{kernel.name} spills {kernel.spilled_bytes} bytes"
        if kernel.shared_memory > gpu.shared_memory_per_block:
            yield f"{kernel.name} takes {kernel.shared_memory} bytes of shared memory"
    for operand in sliced_operands(compiled.hlo):
        if not operand.is_safe:
            yield (
                f"{operand.source}: operand {operand.operand} is a slice at byte {operand.offset}, "
                + ("of a call that updates in place" if operand.updates_in_place else "not aligned")
            )


def cache_bytes(decoder: FunctionalDecoder, work: Workload) -> int:
    """Bytes of the whole KV cache on one device."""
    shapes = decoder.kv_cache_shapes(work.num_pages, work.page_size)
    return sum(map(device_bytes, jax.tree.leaves(shapes)))


def forward_floor(decoder: FunctionalDecoder, work: Workload, shape: StepShape) -> Floor:
    """Each weight read once, of the embedding the batch's rows; the requests' keys and values read once, those of a
    shared prefix once for all, the new ones written. Of a mixture, no more experts than the
    tokens can take. FLOPs: two per weight and token, four per query, key and dimension that causality leaves."""
    spec, dims = decoder.spec, decoder.dims
    item = decoder.dtype.itemsize
    outside = {("embed",), ("lm_head",)}
    weights = {path: leaf for path, leaf in decoder.leaves.items() if path not in outside}
    contexts = work.rows * work.context
    if shape.num_prefixes:
        contexts -= (work.rows - 1) * work.shared_tokens
    if shape.num_tokens == work.num_positions:
        chunks = [work.drafts + 1] * shape.num_rows
    else:
        chunks = [1] * (shape.num_rows - 1) + [shape.num_tokens - shape.num_rows + 1]
    # A chunk's tokens see each other only as far as they have come.
    seen = sum(chunk * work.context - chunk * (chunk - 1) // 2 for chunk in chunks)
    kv_token = sum(map(device_bytes, jax.tree.leaves(decoder.kv_cache_shapes(1, 1))))
    pair_flops = sum(_pair_flops(attention, dims) for attention in spec.attentions)
    read = sum(
        device_bytes(leaf) * min(1, shape.num_tokens * _share_of_token(spec, path))
        for path, leaf in weights.items()
    )
    multiplied = sum(
        device_bytes(leaf) // leaf.dtype.itemsize * _share_of_token(spec, path)
        for path, leaf in weights.items()
        if leaf.ndim > 1
    )
    return Floor(
        num_bytes=round(read)
        + shape.num_tokens * spec.embed_dim * item
        + kv_token * (contexts + shape.num_tokens),
        flops=round(2 * shape.num_tokens * multiplied) + pair_flops * seen,
    )


def _share_of_token(spec: DecoderSpec, path: LeafPath) -> float:
    """How much of a leaf one token goes through: of a mixture's experts, those that it takes."""
    if path[0] != "layers" or path[2:3] != ("mlp",) or path[3] not in EXPERT_LEAVES:
        return 1
    mlp = spec.layers[int(path[1])].mlp
    if not isinstance(mlp, MoeSpec):
        return 1
    return mlp.routing.experts_per_token / mlp.routing.num_experts


def _pair_flops(attention: AnyAttentionSpec, dims: ShardedDims) -> int:
    """On one device, of one query token and one key."""
    devices = dims.tensor_parallel_size
    if isinstance(attention, LatentAttentionSpec):
        heads = dims.shared_by_devices(attention.num_heads) // devices
        return 2 * heads * (attention.cache_dim + attention.latent_rank)
    sharded = dims.heads(attention)
    heads = sharded.num_kv_heads * sharded.queries_per_kv // devices
    return 4 * heads * attention.head_dim


def sample_floor(decoder: FunctionalDecoder, num_positions: int) -> Floor:
    """The head read once, and its matmul."""
    head = decoder.leaves[("embed",) if decoder.spec.tied_head else ("lm_head",)]
    head_bytes = device_bytes(head)
    item = decoder.dtype.itemsize
    hidden_bytes = num_positions * decoder.spec.embed_dim * item
    return Floor(head_bytes + hidden_bytes, 2 * num_positions * head_bytes // item)


def _kernels_by_layer(report: HloReport, leaves: dict[str, str]) -> list[list]:
    """The kernels between the first to read one layer's weights and the first to read the next one's."""
    first: dict[int, int] = {}
    for position, kernel in enumerate(report.kernels):
        for name in kernel.inputs:
            path = leaves.get(name, "").split(".")
            if path[0] == "layers":
                first.setdefault(int(path[1]), position)
    starts = [first[layer] for layer in sorted(first)]
    return [list(report.kernels[a:b]) for a, b in pairwise(starts)]
