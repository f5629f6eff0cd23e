"""An engine without a model: the real core over the checking fake device, which tells one story, letter by letter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxinfer.config import LoRAConfig
from jaxinfer.engine_factory import Engine
from jaxinfer.frontend.processor import Processor
from jaxinfer.frontend.token_text import TokenText
from jaxinfer.frontend.tokenizer import Tokenizer
from tests.engine.fake_executor import FakeExecutor
from tests.engine.fake_requests import VOCAB, make_config
from tests.frontend.tokenizers_for_tests import SPECIAL, TEMPLATE

STORY = "once upon a time there was a fox. it was quick. the end"


def letter_tokenizer() -> Tokenizer:
    """A token per letter, within the fake device's vocabulary."""
    letters = "abcdefghijklmnopqrstuvwxyzÃ©ĠĊ.,?!:<|>"
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    assert backend.get_vocab_size() <= VOCAB
    return Tokenizer(backend, {"eos_token": SPECIAL[0]}, {"default": TEMPLATE})


TOKENIZER = letter_tokenizer()
_IDS = TOKENIZER.encode(STORY)


def tell(context: Sequence[int]) -> int:
    """The story's letter at the context's length: a prompt of n letters is followed by `STORY[n:]`, over and over."""
    return _IDS[len(context) % len(_IDS)]


def continuation(prompt_len: int, num_tokens: int) -> str:
    return (STORY * 9)[prompt_len : prompt_len + num_tokens]


def story_engine(
    next_token: Callable[[Sequence[int]], int] = tell,
    *,
    num_blocks: int = 400,
    max_model_len: int = 128,
    max_num_seqs: int = 8,
    generation_config: dict | None = None,
    lora: LoRAConfig | None = None,
) -> tuple[Engine, FakeExecutor]:
    from jaxinfer.engine.core import EngineCore

    config = make_config(
        max_model_len=max_model_len, max_num_seqs=max_num_seqs, budget=32, lora=lora
    )
    executor = FakeExecutor(config, num_blocks, next_token)
    has_adapters = lora is not None
    processor = Processor(config.model, TOKENIZER, generation_config, has_adapters=has_adapters)
    core = EngineCore(config, executor)
    return Engine(config, core, TOKENIZER, processor, TokenText(TOKENIZER)), executor
