"""Hugging Face transformers on the same model and shapes: `generate` on a full batch, and its continuous batching."""

from __future__ import annotations

import inspect
import time
from typing import Any

import numpy as np

from benchmarks.gpu.cases import Case, Context
from benchmarks.gpu.model_folder import llama_config
from benchmarks.gpu.once import Once
from benchmarks.gpu.results import NotAvailable
from benchmarks.gpu.torch_attention import torch_here


def cases(context: Context) -> list[Case]:
    bench = Bench(context)
    batches = context.pick((128, 32), (2,))
    return [
        Case("transformers: start", bench.start, limit=60),
        *(
            Case(f"transformers: generate, {n} x 1000 in", lambda n=n: bench.generate(n))
            for n in batches
        ),
        *(
            Case(
                f"transformers: continuous batching, {n} x 256 in",
                lambda n=n: bench.continuous(n),
                limit=45,
            )
            for n in batches
        ),
    ]


class Bench:
    def __init__(self, context: Context) -> None:
        self.context, self._once = context, Once()

    @property
    def model(self) -> Any:
        return self._once.get("model", self._load)

    def _load(self) -> Any:
        torch, device = torch_here(self.context)
        try:
            import transformers
        except ImportError as error:
            raise NotAvailable("transformers is not installed") from error
        values = dict(llama_config(self.context.dry))
        values.pop("architectures")
        dtype = getattr(torch, values.pop("dtype"))
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": values.pop("rope_theta")}
        config = transformers.LlamaConfig(
            **values, eos_token_id=None, bos_token_id=1, pad_token_id=0
        )
        config._attn_implementation = "sdpa"
        previous = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                model = transformers.LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(previous)
        model.generation_config.eos_token_id = None
        return model.eval()

    def start(self) -> dict[str, Any]:
        begin = time.perf_counter()
        parameters = sum(p.numel() for p in self.model.parameters())
        return {"seconds": time.perf_counter() - begin, "parameters": parameters}

    def prompts(self, requests: int, tokens: int) -> Any:
        rng = np.random.default_rng(requests)
        return rng.integers(3, self.model.config.vocab_size, (requests, tokens))

    def generate(self, requests: int) -> dict[str, Any]:
        """The time of a step in the middle of the output: two lengths of output, subtracted."""
        torch, device = torch_here(self.context)
        tokens, few, many = self.context.pick((1500, 4, 24), (12, 2, 4))
        ids = torch.tensor(self.prompts(requests, tokens), device=device)

        def run(count: int) -> float:
            begin = time.perf_counter()
            with torch.inference_mode():
                self.model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=count,
                    do_sample=False,
                )
            if device == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - begin

        run(few)
        step = (run(many) - run(few)) / (many - few)
        return {"seconds": step, "decode_tokens_per_second": requests / step}

    def continuous(self, requests: int) -> dict[str, Any]:
        """Tokens per second between the first token and the last: what comes before is the manager's warm-up."""
        generate = getattr(self.model, "generate_batch", None)
        if generate is None:
            raise NotAvailable("this transformers has no generate_batch")
        import transformers

        tokens, count = self.context.pick((256, 64), (8, 3))
        options: dict[str, Any] = {
            "generation_config": transformers.GenerationConfig(
                max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        }
        if "record_timestamps" in inspect.signature(generate).parameters:
            options["record_timestamps"] = True
        if self.context.dry and hasattr(transformers, "ContinuousBatchingConfig"):
            small = transformers.ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=64)
            options["continuous_batching_config"] = small
        prompts = self.prompts(requests, tokens).tolist()
        begin = time.perf_counter()
        outputs = list(generate(inputs=prompts, **options).values())
        seconds = time.perf_counter() - begin
        written = sum(len(output.generated_tokens) for output in outputs)
        if written != requests * count:
            raise RuntimeError(f"{written} tokens were written, not {requests * count}")
        stamps = [t for output in outputs for t in getattr(output, "timestamps", None) or ()]
        span = max(stamps) - min(stamps) if stamps else seconds
        return {
            "seconds": seconds,
            "output_tokens_per_second": written / span,
            "total_tokens_per_second": (written + requests * tokens) / span,
        }
