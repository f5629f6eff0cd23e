"""A model that has no idea of what it says: two layers of noise, with SmolLM2's vocabulary and special tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxinfer.frontend.tokenizer import Tokenizer
from tests.tiny_checkpoints import randomize


@contextmanager
def noise_checkpoint(smollm2_gguf: Path, max_len: int) -> Iterator[str]:
    """Its directory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = Tokenizer.from_gguf(smollm2_gguf)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=max_len,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with tempfile.TemporaryDirectory() as name:
        randomize(LlamaForCausalLM(config)).save_pretrained(name)
        tokenizer.save(Path(name))
        yield name
