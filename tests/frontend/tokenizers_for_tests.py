"""Small real tokenizers of the two kinds that language models use."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from jaxinfer.frontend.tokenizer import Tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog. Here is the English alphabet: ABCDEFGHIJ",
    "Le café coûte 3 €, s'il vous plaît; 价格是三欧元。日本語のテキスト。",
    "def f(x):\n    return x + 1  # 🙂👩‍👩‍👧\n" * 3,
]


TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def byte_level_tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    # Not special, and not written in the byte-level alphabet.
    backend.add_tokens([AddedToken("<tool call>"), AddedToken("né")])
    return Tokenizer(backend, {"eos_token": "<|end|>"}, {"default": TEMPLATE})


def sentencepiece_tokenizer(strip: bool = True) -> Tokenizer:
    """As Llama 2's and Mistral's (`strip`), or Gemma's: ▁ for spaces, bytes for what the vocabulary lacks."""
    words = ["▁", "▁The", "▁fox", "e", "é", "a", "b", "c", "▁▁", "日", "本", "\n", ".", "�"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strip)
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})


def metaspace_tokenizer() -> Tokenizer:
    """A kind that is no plain concatenation: the decoder drops the first token's space."""
    pieces = ["<unk>", "</s>", "▁The", "▁fox", "▁a", "b", "c", "▁"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(backend, {"eos_token": "</s>"})
