"""`/v1/embeddings`, `/pooling`, `/classify`, `/score` and `/rerank`: the fields of OpenAI, vLLM, Cohere and Jina."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from jaxinfer.engine.messages import PoolingTask
from jaxinfer.pooling_params import PoolingParams
from jaxinfer.server.errors import BadRequest
from jaxinfer.server.protocol.chat import ChatTemplateFields
from jaxinfer.server.protocol.common import Float, Int

MAX_INPUTS = 2048
"""Of one request."""
type Input = str | list[Int] | list[list[Int]] | list[str]


class PoolingFields(BaseModel):
    """What all of them take. `use_activation`: see `PoolingParams`; `normalize` is what it was called for embeddings."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: Int | None = Field(default=None, ge=-1)
    use_activation: bool | None = Field(
        default=None, validation_alias=AliasChoices("use_activation", "normalize", "activation")
    )
    priority: Int = 0
    timeout: Float | None = None
    request_id: str | None = None

    def params(self, **more: Any) -> PoolingParams:
        """Raises `ValueError`."""
        return PoolingParams(
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            use_activation=self.use_activation,
            **more,
        )


class InputFields(PoolingFields):
    """`input` is one text or list of token ids, or several of either; or there are `messages`, a conversation that the
    chat template makes a text of."""

    input: Input | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _check_input(self) -> InputFields:
        if (self.input is None) == (self.messages is None):
            raise BadRequest("One of input and messages must be given.", param="input")
        if self.input is not None and not self.input:
            raise BadRequest("input must not be empty.", param="input")
        if len(self.inputs) > MAX_INPUTS:
            raise BadRequest(f"input may hold at most {MAX_INPUTS} texts.", param="input")
        return self

    @property
    def inputs(self) -> list[Any]:
        """Each a string or a list of token ids; none where there are messages."""
        given = self.input
        if given is None:
            return []
        return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)

    def conversation(self) -> ChatTemplateFields | None:
        if self.messages is None:
            return None
        return ChatTemplateFields(
            messages=self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
        )


class EncodedFields(InputFields):
    """ "base64" is of the float32 numbers' bytes, little-endian."""

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Int | None = None


class EmbeddingRequest(EncodedFields):
    """`/v1/embeddings`."""


class PoolingRequest(EncodedFields):
    """`/pooling`. `task`: by default the model's first."""

    task: PoolingTask | None = None


class ClassificationRequest(InputFields):
    """`/classify`."""


class ScoreRequest(PoolingFields):
    """`/score`: one text of the first kind with each of the second, or as many with each other."""

    data_1: str | list[str] = Field(
        validation_alias=AliasChoices("data_1", "text_1", "queries", "query")
    )
    data_2: str | list[str] = Field(
        validation_alias=AliasChoices("data_2", "text_2", "documents", "items")
    )

    @model_validator(mode="after")
    def _check_texts(self) -> ScoreRequest:
        for name in ("data_1", "data_2"):
            _check_texts(name, getattr(self, name))
        return self


class RerankDocument(BaseModel):
    text: str


class RerankRequest(PoolingFields):
    """`/rerank`. `top_n`: only the best so many documents, 0 for all."""

    query: str
    documents: list[str | RerankDocument]
    top_n: Int = Field(default=0, ge=0)
    return_documents: bool = True

    @model_validator(mode="after")
    def _check_texts(self) -> RerankRequest:
        _check_texts("query", self.query)
        _check_texts("documents", self.texts)
        return self

    @property
    def texts(self) -> list[str]:
        return [d if isinstance(d, str) else d.text for d in self.documents]


def _check_texts(name: str, given: str | list[str]) -> None:
    texts = [given] if isinstance(given, str) else given
    if not texts or not all(texts):
        raise BadRequest(f"{name} must not be empty.", param=name)
    if len(texts) > MAX_INPUTS:
        raise BadRequest(f"{name} may hold at most {MAX_INPUTS} texts.", param=name)
