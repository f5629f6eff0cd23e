import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.engine_args import EngineArgs
from jaxinfer.executor import kv_cache


@dataclasses.dataclass(frozen=True)
class Limits:
    vocab_size: int = 100
    max_position_embeddings: int = 1024
    checkpoint_dtype: str = "bfloat16"
    has_attention: bool = True
    has_states: bool = False

    def cache_windows(self, max_model_len):
        return (None,)


def config(device="gpu", **kwargs):
    return EngineArgs(model="m", block_size=16, max_num_seqs=1000, **kwargs).create_engine_config(
        Limits(), device
    )


def test_device_memory_less_weights_and_temporaries_is_the_caches():
    blocks = kv_cache.num_blocks(
        config(gpu_memory_utilization=0.5),
        block_bytes=1000,
        device_bytes=1_000_000,
        resident_bytes=100_000,
        temp_bytes=50_000,
    )
    assert blocks == (500_000 - 150_000) // 1000


def test_given_sizes_apply_as_they_are():
    sizes = dict(block_bytes=1000, device_bytes=10**6, resident_bytes=0, temp_bytes=0)
    assert kv_cache.num_blocks(config(num_gpu_blocks_override=77), **sizes) == 77
    assert kv_cache.num_blocks(config(kv_cache_memory_bytes=55_999), **sizes) == 55


def test_never_more_than_all_sequences_can_use():
    blocks = kv_cache.num_blocks(
        config(max_model_len=160, max_num_batched_tokens=1000),
        block_bytes=1,
        device_bytes=10**9,
        resident_bytes=0,
        temp_bytes=0,
    )
    assert blocks == 1000 * 10 + 1


def test_too_little_memory_is_no_blocks_and_no_negative_number():
    blocks = kv_cache.num_blocks(
        config(), block_bytes=1000, device_bytes=1000, resident_bytes=5000, temp_bytes=0
    )
    assert blocks == 0


def test_cpu_takes_its_default_but_always_one_request():
    big = 1 << 40
    sizes = dict(device_bytes=big, resident_bytes=0, temp_bytes=0)
    block = 1 << 20
    assert kv_cache.num_blocks(config("cpu"), block_bytes=block, **sizes) == 1024
    block = 1 << 26
    assert kv_cache.num_blocks(config("cpu"), block_bytes=block, **sizes) == 1024 // 16 + 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_allocate_zeroes_each_layer_under_its_sharding(dtype):
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("model",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))
    pages = jax.ShapeDtypeStruct((5, 2, 4, 8), dtype, sharding=sharding)
    cache = kv_cache.allocate([(pages, pages)] * 3)
    assert len(cache) == 3
    for k, v in cache:
        for array in (k, v):
            assert array.shape == (5, 2, 4, 8) and array.dtype == dtype
            assert array.sharding.is_equivalent_to(sharding, 4)
            assert not array.any()
