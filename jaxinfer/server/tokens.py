"""`POST /tokenize` and `/detokenize`, `GET /tokenizer_info`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from jaxinfer.server.chat_prompt import chat_prompt
from jaxinfer.server.errors import BadRequest, json_response
from jaxinfer.server.protocol.tokenize import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from jaxinfer.server.serving import Serving


def router(serving: Serving) -> APIRouter:
    routes = APIRouter()

    @routes.post("/tokenize", response_model=None)
    def tokenize(request: TokenizeChatRequest | TokenizeCompletionRequest) -> Response:
        serving.check_model(request.model)
        tokenizer = serving.llm.get_tokenizer()
        if isinstance(request, TokenizeChatRequest):
            text = chat_prompt(
                serving, request, **({"tools": request.tools} if request.tools else {})
            )
        else:
            text = request.prompt
        try:
            ids = tokenizer.encode(text, add_special_tokens=request.add_special_tokens)
        except ValueError as error:
            raise BadRequest(str(error), param="prompt") from error
        body: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": serving.max_model_len,
            "tokens": ids,
            "token_strs": tokenizer.convert_ids_to_tokens(ids)
            if request.return_token_strs
            else None,
        }
        return json_response(body)

    @routes.post("/detokenize", response_model=None)
    def detokenize(request: DetokenizeRequest) -> Response:
        serving.check_model(request.model)
        vocab_size = serving.llm.config.model.vocab_size
        if any(not 0 <= token_id < vocab_size for token_id in request.tokens):
            raise BadRequest(f"tokens must be in [0, {vocab_size - 1}].", param="tokens")
        text = serving.llm.get_tokenizer().decode(request.tokens, skip_special_tokens=False)
        return json_response({"prompt": text})

    if serving.settings.enable_tokenizer_info_endpoint:

        @routes.get("/tokenizer_info", response_model=None)
        def tokenizer_info() -> Response:
            """For clients that count and cut prompts as this server does, without a copy of the tokenizer."""
            tokenizer, settings = serving.llm.get_tokenizer(), serving.settings
            template = settings.chat_template or tokenizer.chat_templates.get("default")
            body = {"chat_template": template, "vocab_size": tokenizer.vocab_size}
            return json_response(tokenizer.special_tokens | body)

    return routes
