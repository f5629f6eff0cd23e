"""A `tokenizers` tokenizer out of a GGUF's metadata, splitting text as llama.cpp does (src/llama-vocab.cpp)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_LLAMA3 = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)

# `tokenizer.ggml.pre`: patterns, each of which splits what the ones before it left.
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"), (_GPT2,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        (r"\p{N}", _GPT2),
    ),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "dbrx", "smaug-bpe"),
        (_LLAMA3,),
    ),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"),
        (_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),),
    ),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"),
    "tekken": (_TEKKEN,),
    "deepseek-v3": _DEEPSEEK3,
}
# A word that is a token as a whole is taken before any merge; the text begins with the bos token unless the file says
# otherwise.
_WHOLE_WORDS_FIRST = {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "tekken"}
_BOS_BY_DEFAULT = _WHOLE_WORDS_FIRST

# Token types (gguf.TokenType).
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6


def build_tokenizer(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Raises `ValueError` for a tokenizer model or a `tokenizer.ggml.pre` that isn't supported."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level_bpe(metadata)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata)
    else:
        raise ValueError(
            f"tokenizer.ggml.model {kind!r} is not supported; supported are gpt2 and llama."
        )
    _add_tokens(tokenizer, metadata)
    _add_template(tokenizer, metadata)
    return tokenizer


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The tokens with a role, by the names that chat templates use: `bos_token`, `eos_token` …"""
    tokens = metadata["tokenizer.ggml.tokens"]
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {role: metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in roles.items()}
    return {
        f"{role}_token": tokens[i] for role, i in ids.items() if i is not None and i < len(tokens)
    }


def chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """By name; the usual one is "default"."""
    prefix = "tokenizer.chat_template"
    named = {
        key.removeprefix(f"{prefix}."): value
        for key, value in metadata.items()
        if key.startswith(f"{prefix}.")
    }
    return named | ({"default": metadata[prefix]} if prefix in metadata else {})


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    tokens = metadata["tokenizer.ggml.tokens"]
    # The first of equal tokens keeps the name, as in llama.cpp.
    return dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))


def _byte_level_bpe(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _SPLITS:
        raise ValueError(
            f"tokenizer.ggml.pre {pre!r} is not supported; supported are {', '.join(sorted(_SPLITS))}."
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_vocabulary(metadata), merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST
        )
    )
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: of the neighbours that form a token, the pair whose token scores highest is joined first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = _vocabulary(metadata)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges_by_score(metadata, vocabulary),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=special_tokens(metadata).get("unk_token"),
        )
    )
    replace, decode = normalizers.Replace(" ", "▁"), [decoders.Replace("▁", " ")]
    decode += [decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        decode.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(decode)
    return tokenizer


def _merges_by_score(
    metadata: Mapping[str, Any], vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, best score of the result first."""
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = np.asarray(metadata["tokenizer.ggml.scores"])
    joinable = ~np.isin(metadata["tokenizer.ggml.token_type"], (_UNKNOWN, _CONTROL, _BYTE))
    merges = []
    for token_id in np.argsort(-scores, kind="stable").tolist():
        if not joinable[token_id]:
            continue
        token = tokens[token_id]
        for cut in range(1, len(token)):
            left = token[:cut]
            if left in vocabulary and (right := token[cut:]) in vocabulary:
                merges.append((left, right))
    return merges


def _add_tokens(tokenizer: tokenizers.Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Tokens that are found in the text before anything else; those of control are special."""
    from tokenizers import AddedToken

    tokens, types = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return
    types = np.asarray(types)
    special = np.flatnonzero((types == _CONTROL) | (types == _UNKNOWN)).tolist()
    tokenizer.add_special_tokens(
        [AddedToken(tokens[i], normalized=False, special=True) for i in special]
    )
    plain = np.flatnonzero(types == _USER_DEFINED).tolist()
    tokenizer.add_tokens([AddedToken(tokens[i], normalized=False) for i in plain])


def _add_template(tokenizer: tokenizers.Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Begin with bos, end with eos, where the file asks for it."""
    from tokenizers import processors

    is_sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
    bos_by_default = is_sentencepiece or metadata.get("tokenizer.ggml.pre") in _BOS_BY_DEFAULT
    wants = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", bos_by_default),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    roles = special_tokens(metadata)
    bos, eos = (roles.get(f"{role}_token") if wants[role] else None for role in ("bos", "eos"))
    if bos is None and eos is None:
        return
    before, after = ([token] if token else [] for token in (bos, eos))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[
            *before,
            "$A",
            *after,
            *(f"{token}:1" for token in before),
            "$B:1",
            *(f"{t}:1" for t in after),
        ],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token],
    )
