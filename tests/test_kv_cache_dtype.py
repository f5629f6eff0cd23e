"""An engine whose KV cache has another dtype than its model: how close its logits are, and how many blocks it has."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.engine.stats import SchedulerStats
from jaxinfer.engine_args import EngineArgs
from jaxinfer.executor.kv_scales import make_scales
from jaxinfer.models import attention
from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.weights.resolve import open_checkpoint, resolve_model
from tests.core_harness import executor_of, run, tiny_core
from tests.models.paged_harness import PagedRunner, load_checkpoint
from tests.tiny_checkpoints import tiny_checkpoint


@dataclass(frozen=True)
class Limits:
    vocab_size: int = 100
    max_position_embeddings: int = 2048
    checkpoint_dtype: str = "bfloat16"
    has_attention: bool = True
    has_states: bool = False

    def cache_windows(self, max_model_len):
        return (None,)


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(3, 97, size=(count, length)).tolist()


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def logits(model: FunctionalDecoder, weights: dict) -> np.ndarray:
    """Of 50 tokens of three texts, through chunks and decodes."""
    runner = PagedRunner(model, [weights[path] for path in model.leaves], budget=64)
    return np.stack(runner.greedy(prompts(3, 50), 1)[1])


def in_float8(update):
    """The cache update, and then all numbers of the cache to the nearest that float8_e4m3fn has."""

    def updated(*args, **options):
        q_tnh, pages = update(*args, **options)
        return q_tnh, tuple(
            jnp.clip(x, -448, 448).astype(jnp.float8_e4m3fn).astype(x.dtype) for x in pages
        )

    return updated


def test_logits_of_8_bit_caches(monkeypatch):
    """Those of fp8 are exactly what a float32 cache of rounded numbers gives. How near both types come to a cache that
    rounds nothing: numbers are off by 2.6 % (fp8; at most 1/16) and 1 % (int8; steps of 1.25 / 127 of a head's largest,
    which is four deviations or so) in the mean square. Scores are off by as much of their deviation, about 2 with these
    random weights, and so are the weights of each of three layers."""
    directory = tiny_checkpoint("llama")
    description, plain, leaves = load_checkpoint(directory)
    weights = dict(zip(plain.leaves, leaves, strict=True))
    expected = logits(plain, weights)
    reader = open_checkpoint(resolve_model(str(directory)))
    got = {}
    for kv_dtype, bound in (("uint8", 0.15), ("int8", 0.05)):
        model = FunctionalDecoder.create(description.spec, plain.mesh, "float32", kv_dtype)
        got[kv_dtype] = logits(model, weights | make_scales(model, weights, reader))
        error = np.sqrt(np.mean(np.square(got[kv_dtype] - expected)))
        assert bound / 10 < error / np.sqrt(np.mean(np.square(expected))) < bound
    monkeypatch.setattr(
        attention, "rope_kv_cache_update", in_float8(attention.rope_kv_cache_update)
    )
    jax.clear_caches()
    emulated = logits(plain, weights)
    monkeypatch.undo()
    jax.clear_caches()
    np.testing.assert_allclose(got["uint8"], emulated, atol=1e-5)


def test_a_decoders_cache_is_of_the_dtype_asked_for_and_its_weights_are_not():
    description, model, _ = load_checkpoint(tiny_checkpoint("llama"))
    quantized = FunctionalDecoder.create(description.spec, model.mesh, "bfloat16", "int8")
    assert {x.dtype for layer in quantized.kv_cache_shapes(3, 4) for x in layer} == {
        jnp.dtype("int8")
    }
    assert {x.dtype for path, x in quantized.leaves.items() if path[-1].endswith("_scale")} == {
        jnp.dtype("float32")
    }
    assert {x.dtype for path, x in quantized.leaves.items() if path in model.leaves} == {
        jnp.dtype("bfloat16")
    }


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_eight_bits_take_exactly_twice_the_blocks(name):
    sizes = dict(dtype="bfloat16", num_gpu_blocks_override=None, kv_cache_memory_bytes=300_000)
    with tiny_core(**sizes) as core:
        num_blocks = executor_of(core).num_blocks
    with tiny_core(**sizes, kv_cache_dtype=name) as core:
        assert executor_of(core).num_blocks == 2 * num_blocks
        for pages in jax.tree.leaves(executor_of(core).runner.kv_cache):
            assert pages.dtype.itemsize == 1
            assert pages.shape[0] == 2 * num_blocks


def test_prefix_caching_preemption_and_devices_change_no_tokens():
    beginning = prompts(1, 21)[0]
    mix = [beginning + end for end in prompts(6, 7, seed=1)] + prompts(3, 30, seed=2)
    # Small budgets have few programs.
    args = dict(kv_cache_dtype="fp8", max_model_len=48, max_num_batched_tokens=32)
    with tiny_core(enable_prefix_caching=False, **args) as core:
        expected = [out.token_ids for out in run(core, mix, greedy(10))]
    stats: list[SchedulerStats] = []
    with tiny_core(num_gpu_blocks_override=25, max_num_seqs=4, **args) as core:
        assert [out.token_ids for out in run(core, mix, greedy(10), stats=stats)] == expected
    assert sum(s.num_preemptions for s in stats) > 0
    assert sum(s.prefix_cache_hits for s in stats) > 0
    with tiny_core(tensor_parallel_size=2, **args) as core:
        assert [out.token_ids for out in run(core, mix, greedy(10))] == expected


def test_a_cache_of_another_float_dtype_runs():
    (prompt,) = prompts(1, 30)
    params = SamplingParams(temperature=0.0, logprobs=3, max_tokens=1)
    logprobs = {}
    for name in ("auto", "bfloat16", "float16"):
        with tiny_core(kv_cache_dtype=name) as core:
            (out,) = run(core, [prompt], params)
            (cache,) = {x.dtype.name for x in jax.tree.leaves(executor_of(core).runner.kv_cache)}
        assert cache == ("float32" if name == "auto" else name)
        logprobs[name] = out.logprobs[0].logprobs
    np.testing.assert_allclose(logprobs["bfloat16"], logprobs["auto"], atol=0.1)
    np.testing.assert_allclose(logprobs["float16"], logprobs["auto"], atol=0.02)


def test_names_are_vllms():
    def dtype(name: str) -> str | None:
        return (
            EngineArgs("m", kv_cache_dtype=name).create_engine_config(Limits(), "gpu").cache.dtype
        )

    assert dtype("auto") is None
    assert dtype("fp8") == dtype("fp8_e4m3") == "float8_e4m3fn"
    assert [dtype(n) for n in ("int8", "bfloat16")] == ["int8", "bfloat16"]
    with pytest.raises(ValueError, match=r"kv_cache_dtype must be one of .*'fp8'.*got 'fp8_e5m2'"):
        EngineArgs("m", kv_cache_dtype="fp8_e5m2")
