"""A model's tokenizer and chat template, from a Hugging Face directory or a GGUF file.

Built on `tokenizers` alone: importing `transformers` takes 3 s and happens only for a directory without a
tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.frontend.chat_template import Message, render_chat
from jaxinfer.weights.reader import CheckpointError
from jaxinfer.weights.resolve import ModelFiles
from jaxinfer.weights.safetensors import read_json

if TYPE_CHECKING:
    import tokenizers

_ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """`special_tokens`: the tokens with a role, by the names that templates use ("bos_token" …); `chat_templates` by
    name, the usual one is "default"."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_templates = dict(chat_templates or {})
        named = (backend.token_to_id(token) for token in self.special_tokens.values())
        added = (i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.all_special_ids: list[int] = sorted({*added, *(i for i in named if i is not None)})
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, files: ModelFiles) -> Tokenizer:
        """Raises `CheckpointError` where the files hold no tokenizer, or one of a kind that isn't supported."""
        return cls.from_gguf(files.path) if files.kind == "gguf" else cls.from_directory(files.path)

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        import tokenizers

        config = read_json(directory / "tokenizer_config.json") or {}
        path = directory / "tokenizer.json"
        if path.is_file():
            try:
                backend = tokenizers.Tokenizer.from_file(str(path))
            except Exception as error:  # tokenizers raises bare Exceptions
                raise CheckpointError(
                    f"{path} is no tokenizer that can be read: {error}."
                ) from error
        else:
            backend = _converted_by_transformers(directory)
        roles = (read_json(directory / "special_tokens_map.json") or {}) | config
        named = {role: _content(roles[role]) for role in _ROLES if roles.get(role)}
        return cls(backend, named, _directory_templates(directory, config))

    @classmethod
    def from_gguf(cls, path: Path) -> Tokenizer:
        from jaxinfer.weights.gguf_file import read_gguf_header

        return cls.from_gguf_metadata(read_gguf_header(path).metadata, str(path))

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any], source: str = "metadata") -> Tokenizer:
        """`source` names the file in error messages."""
        from jaxinfer.frontend import gguf_tokenizer

        try:
            backend = gguf_tokenizer.build_tokenizer(metadata)
            roles = gguf_tokenizer.special_tokens(metadata)
        except KeyError as error:
            raise CheckpointError(f"{source} lacks the metadata {error.args[0]}.") from error
        except ValueError as error:
            raise CheckpointError(f"{source}: {error}") from error
        return cls(backend, roles, gguf_tokenizer.chat_templates(metadata))

    def save(self, directory: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and the chat templates, as `from_directory` reads them."""
        self.backend.save(str(directory / "tokenizer.json"))
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self.special_tokens,
        }
        if self.chat_templates:
            config["chat_template"] = [
                {"name": name, "template": text} for name, text in self.chat_templates.items()
            ]
        text = json.dumps(config, ensure_ascii=False, indent=2)
        (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises `ValueError` for a string that no bytes stand for: it holds half of a surrogate pair."""
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            if not isinstance(text, str):
                raise
            raise ValueError("prompt holds a lone surrogate, which is no character.") from error

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Like `encode` of each, on all cores."""
        found = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in found]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """The vocabulary's spelling of each token; None for ids that name none."""
        return [self.backend.id_to_token(i) for i in ids]

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int | None]:
        return [self.backend.token_to_id(token) for token in tokens]

    def get_vocab(self) -> dict[str, int]:
        return self.backend.get_vocab(with_added_tokens=True)

    @property
    def decoder(self) -> dict[str, Any] | None:
        """The `decoder` section of tokenizer.json: how tokens become text."""
        decoder = self.backend.decoder
        return None if decoder is None else json.loads(decoder.__getstate__())

    def __len__(self) -> int:
        return self.vocab_size

    def _id_of(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self.backend.token_to_id(token)

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._id_of("pad_token")

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The messages as a prompt, special tokens included (encode it with `add_special_tokens=False`).

        `chat_template` is the name of one of the model's templates, or a template itself. Raises `ValueError` where
        the model has none, and for messages that the template refuses.
        """
        return render_chat(
            self._template(chat_template, has_tools=tools is not None),
            messages,
            special_tokens=self.special_tokens,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **variables,
        )

    def _template(self, wanted: str | None, has_tools: bool) -> str:
        if wanted is not None:
            return self.chat_templates.get(wanted, wanted)
        if has_tools and "tool_use" in self.chat_templates:
            return self.chat_templates["tool_use"]
        if "default" in self.chat_templates:
            return self.chat_templates["default"]
        named = (
            f" named 'default' (it has {', '.join(sorted(self.chat_templates))})"
            if self.chat_templates
            else ""
        )
        raise ValueError(
            f"This model's tokenizer has no chat template{named}: it may be a base model. Pass chat_template, or give a "
            "prompt instead of messages."
        )


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _directory_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Newer checkpoints keep templates in files, older ones in tokenizer_config.json; files win."""
    templates: dict[str, str] = {}
    for found in (
        config.get("chat_template"),
        (read_json(directory / "chat_template.json") or {}).get("chat_template"),
    ):
        if isinstance(found, str):
            templates["default"] = found
        elif found:
            templates |= {entry["name"]: entry["template"] for entry in found}
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    if (path := directory / "chat_template.jinja").is_file():
        templates["default"] = path.read_text(encoding="utf-8")
    return templates


def _converted_by_transformers(directory: Path) -> tokenizers.Tokenizer:
    """Raises `CheckpointError` where there is nothing to convert, or transformers isn't installed."""
    try:
        import transformers
    except ImportError as error:
        raise CheckpointError(
            f"{directory} has no tokenizer.json. Install transformers (the extra [transformers]) to convert other formats."
        ) from error
    try:
        return transformers.AutoTokenizer.from_pretrained(
            directory, use_fast=True
        ).backend_tokenizer
    except Exception as error:
        raise CheckpointError(
            f"{directory} holds no tokenizer that can be read: {error}"
        ) from error
