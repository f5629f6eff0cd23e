"""Puts an engine together: model files, tokenizer, executor and core, from the flat arguments that people type."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.config import Device, EngineConfig
from jaxinfer.engine_args import EngineArgs
from jaxinfer.frontend.processor import Processor, eos_token_ids
from jaxinfer.frontend.token_text import TokenText
from jaxinfer.frontend.tokenizer import Tokenizer
from jaxinfer.logits_processors import resolve_processors
from jaxinfer.weights.resolve import ModelFiles, open_checkpoint, resolve_model
from jaxinfer.weights.sentence_transformers import (
    SentenceTransformersFiles,
    read_sentence_transformers,
)

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from jaxinfer.engine.core import EngineCore
    from jaxinfer.engine.grammars import GrammarBackend
    from jaxinfer.weights.reader import CheckpointReader


GPU_DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg")
"""One of these exists where a process can reach an NVIDIA GPU (the last on Windows' Linux)."""


@dataclass(frozen=True, slots=True)
class EngineFrontend:
    """What stands before the core, wherever that runs."""

    config: EngineConfig
    tokenizer: Tokenizer
    processor: Processor
    token_text: TokenText


@dataclass(frozen=True, slots=True)
class Engine:
    """The parts that `LLM` and `AsyncLLM` share; each reaches the core through a client of its own."""

    config: EngineConfig
    core: EngineCore
    tokenizer: Tokenizer
    processor: Processor
    token_text: TokenText

    @property
    def frontend(self) -> EngineFrontend:
        return EngineFrontend(self.config, self.tokenizer, self.processor, self.token_text)


def build_engine(args: EngineArgs) -> Engine:
    """Load a model and everything around it.

    Raises `ValueError` for a model that can't be found, read or run, and for arguments that don't fit it.
    """
    if args.data_parallel_size > 1:
        raise ValueError(
            "data_parallel_size is for `jaxinfer serve`, got "
            f"{args.data_parallel_size}; in Python, start an engine per process."
        )
    files = model_files(args)
    with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as pool:
        # Much of its work is Rust and needs no GIL, while importing JAX and reading weights leave a core idle.
        loading = pool.submit(load_tokenizer, args, files)
        reader = open_checkpoint(files)
        config, core = _build_core(args, reader, loading.result)
        tokenizer = loading.result()
    frontend = build_frontend(args, config, tokenizer, reader)
    return Engine(config, core, tokenizer, frontend.processor, frontend.token_text)


def build_core(args: EngineArgs) -> EngineCore:
    """The part that needs JAX and the device. Raises as `build_engine`."""
    files = model_files(args)
    return _build_core(args, open_checkpoint(files), partial(load_tokenizer, args, files))[1]


def build_frontend(
    args: EngineArgs,
    config: EngineConfig,
    tokenizer: Tokenizer,
    reader: CheckpointReader,
    origin: str = "",
) -> EngineFrontend:
    """The part that needs neither. `origin`: see `Processor`."""
    processor = Processor(
        config.model,
        tokenizer,
        generation_config(args.generation_config, reader),
        use_generation_defaults=args.generation_config != "vllm",
        origin=origin,
        has_adapters=config.lora is not None,
    )
    return EngineFrontend(config, tokenizer, processor, TokenText(tokenizer))


def model_files(args: EngineArgs) -> ModelFiles:
    return _resolve(args, args.model)


def load_tokenizer(args: EngineArgs, files: ModelFiles) -> Tokenizer:
    """The one that was asked for, or that of the model's `files`."""
    return Tokenizer.load(files if args.tokenizer is None else _resolve(args, args.tokenizer))


def generation_config(choice: str, reader: CheckpointReader) -> dict[str, Any] | None:
    """The checkpoint's, or that of the folder named by `choice`."""
    if choice in ("auto", "vllm"):
        return reader.generation_config()
    from jaxinfer.weights.safetensors import read_json

    path = Path(choice).expanduser() / "generation_config.json"
    config = read_json(path)
    if config is None:
        raise ValueError(
            f'generation_config must be "auto", "vllm" or a folder; there is no {path}.'
        )
    return config


def _resolve(args: EngineArgs, model: str) -> ModelFiles:
    return resolve_model(
        model,
        revision=args.revision,
        download_dir=args.download_dir,
        load_format=args.load_format if model == args.model else "auto",
    )


def _build_core(
    args: EngineArgs, reader: CheckpointReader, get_tokenizer: Callable[[], Tokenizer]
) -> tuple[EngineConfig, EngineCore]:
    """`get_tokenizer` is called when the first grammar needs it."""
    import jax

    if "JAX_PLATFORMS" not in os.environ and not any(map(os.path.exists, GPU_DRIVERS)):
        # Without a driver, JAX's CUDA plugin crashes the process where it is installed.
        jax.config.update("jax_platforms", "cpu")
    # JAX takes three quarters of a GPU by default, and `gpu_memory_utilization` is a fraction of what it takes.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")

    from jaxinfer.engine.core import EngineCore
    from jaxinfer.executor.build import build_executor
    from jaxinfer.models.encoders.registry import is_encoder
    from jaxinfer.models.registry import describe_model
    from jaxinfer.pooling_model import (
        causal_config,
        decoder_pooler,
        decoder_purpose,
        pooling_description,
    )

    device: Device = "cpu" if jax.default_backend() == "cpu" else "gpu"
    hf_config = reader.config() | args.hf_overrides
    if is_encoder(hf_config):
        return _build_encoder_core(args, reader, hf_config, device)
    files = read_sentence_transformers(model_files(args).path)
    purpose, pooler = decoder_purpose(args, hf_config, files), None
    if purpose is not None:
        hf_config = causal_config(hf_config)
    model = describe_model(hf_config, args.max_model_len)
    if purpose is not None:
        model = pooling_description(model)
        pooler = decoder_pooler(args, hf_config, model, purpose, files)
        args = _within(args, files, model.max_position_embeddings)
    processors = resolve_processors(args.logits_processors)
    config = args.create_engine_config(model, device, processors, pooler)
    executor = build_executor(config, model, reader, processors, draft_checkpoint(args, config))
    try:
        return config, EngineCore(config, executor, _grammars(args, config, reader, get_tokenizer))
    except BaseException:
        executor.shutdown()
        raise


def _build_encoder_core(
    args: EngineArgs, reader: CheckpointReader, hf_config: dict[str, Any], device: Device
) -> tuple[EngineConfig, EngineCore]:
    from jaxinfer.engine.core import EngineCore
    from jaxinfer.executor.encoder_executor import EncoderExecutor
    from jaxinfer.models.encoders.dtype import quickest_dtype
    from jaxinfer.models.encoders.registry import describe_encoder
    from jaxinfer.pooling_model import encoder_pooler

    model = replace(describe_encoder(hf_config), checkpoint_dtype=quickest_dtype(device))
    files = read_sentence_transformers(model_files(args).path)
    pooler = encoder_pooler(args, hf_config, model, files)
    args = _within(args, files, model.max_position_embeddings)
    config = args.create_engine_config(model, device, pooler=pooler)
    return config, EngineCore(config, EncoderExecutor(config, model, reader))


def _within(args: EngineArgs, files: SentenceTransformersFiles | None, longest: int) -> EngineArgs:
    """With texts as long as sentence-transformers would take, unless somebody says; at most of `longest` tokens."""
    if files is None or files.max_seq_length is None or args.max_model_len is not None:
        return args
    return replace(args, max_model_len=min(files.max_seq_length, longest))


def draft_checkpoint(args: EngineArgs, config: EngineConfig) -> CheckpointReader | None:
    """That of the model that drafts, where one does."""
    if config.speculative is None or config.speculative.model is None:
        return None
    files = resolve_model(
        config.speculative.model,
        download_dir=args.download_dir,
        load_format="dummy" if args.load_format == "dummy" else "auto",
    )
    return open_checkpoint(files)


def _grammars(
    args: EngineArgs,
    config: EngineConfig,
    reader: CheckpointReader,
    get_tokenizer: Callable[[], Tokenizer],
) -> GrammarBackend:
    from jaxinfer.engine.llguidance_grammars import LlguidanceBackend

    def make_tokenizer() -> LLTokenizer:
        from llguidance import LLTokenizer

        tokenizer, vocab_size = get_tokenizer(), config.model.vocab_size
        generation = generation_config(args.generation_config, reader) or {}
        return LLTokenizer(
            tokenizer.backend.to_str(),
            n_vocab=vocab_size,
            eos_token=eos_token_ids(generation, tokenizer, vocab_size) or None,
        )

    return LlguidanceBackend(make_tokenizer)
