from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from jaxinfer.config import CacheConfig, CascadeConfig
from jaxinfer.engine_args import EngineArgs


@dataclass(frozen=True)
class Limits:
    vocab_size: int = 100
    max_position_embeddings: int = 2048
    checkpoint_dtype: str = "bfloat16"
    has_attention: bool = True
    has_states: bool = False

    def cache_windows(self, max_model_len):
        return (None,)


@dataclass(frozen=True)
class WindowedLimits(Limits):
    def cache_windows(self, max_model_len):
        return (None, max_model_len // 8)


def test_layers_with_windows_have_groups_of_their_own() -> None:
    def windows(**args: Any) -> tuple[int | None, ...]:
        config = EngineArgs("m", **args).create_engine_config(WindowedLimits(), "cpu")
        return config.cache.windows

    assert windows() == (None, 256) and windows(max_model_len=80) == (None, 10)
    assert windows(disable_hybrid_kv_cache_manager=True) == (None,)
    ngram = dict(method="ngram", num_speculative_tokens=2)
    assert windows(speculative_config=ngram) == (None, 256)
    # A drafter's layers have the blocks of the target's, and may look further back.
    drafter = dict(method="draft_model", model="d", num_speculative_tokens=2)
    assert windows(speculative_config=drafter) == (None,)


def test_prefix_caching_is_on_and_can_be_changed() -> None:
    config = EngineArgs("m").create_engine_config(Limits(), "cpu")
    assert config.cache.enable_prefix_caching
    assert config.cache.prefix_caching_hash_algo == "sha256"
    assert not config.scheduler.cache_aware
    config = EngineArgs(
        "m",
        enable_prefix_caching=False,
        prefix_caching_hash_algo="xxhash",
    ).create_engine_config(Limits(), "gpu")
    assert config.cache == CacheConfig(
        64, enable_prefix_caching=False, prefix_caching_hash_algo="xxhash"
    )
    config = EngineArgs(
        "m", cache_aware_scheduling=True, max_cache_overtakes=3
    ).create_engine_config(Limits(), "cpu")
    assert (config.scheduler.cache_aware, config.scheduler.max_overtakes) == (True, 3)


def test_when_a_shared_beginning_is_attended_to_once() -> None:
    args = EngineArgs("m")
    assert args.create_engine_config(Limits(), "cpu").cascade == CascadeConfig(True, 8, 256)
    assert args.create_engine_config(Limits(), "gpu").cascade == CascadeConfig(True, 8, 1024)
    args = EngineArgs("m", disable_cascade_attn=True, cascade_min_rows=3, cascade_min_tokens=64)
    assert args.create_engine_config(Limits(), "gpu").cascade == CascadeConfig(False, 3, 64)


def test_a_deterministic_engine_has_no_shared_attention() -> None:
    config = EngineArgs("m", deterministic=True).create_engine_config(Limits(), "cpu")
    assert config.deterministic
    assert not config.cascade.enabled
    assert not EngineArgs("m").create_engine_config(Limits(), "cpu").deterministic


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"prefix_caching_hash_algo": "md5"}, "prefix_caching_hash_algo must be one of"),
        ({"cascade_min_rows": 1}, "cascade_min_rows must be at least 2, got 1"),
        ({"cascade_min_tokens": 0}, "cascade_min_tokens must be at least 1, got 0"),
        ({"max_cache_overtakes": -1}, "max_cache_overtakes must be at least 0, got -1"),
        (
            {"cache_aware_scheduling": True, "enable_prefix_caching": False},
            "cache_aware_scheduling needs enable_prefix_caching",
        ),
        (
            {"speculative_config": {"method": "ngram"}, "deterministic": True},
            "speculative_config can't be combined with deterministic=True",
        ),
    ],
)
def test_refused(args: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineArgs("m", **args).create_engine_config(Limits(), "cpu")
