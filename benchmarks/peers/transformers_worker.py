"""Hugging Face transformers: `generate` on left-padded batches of up to 64."""

from __future__ import annotations

import argparse

from worker import Engine, Prompts, serve

BATCH = 64


def build(args: argparse.Namespace) -> Engine:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype)
    ).eval()
    pad = model.generation_config.pad_token_id or 0
    model.generation_config.eos_token_id = None  # ignore end-of-sequence
    model.config.eos_token_id = None

    def generate(prompts: Prompts, max_tokens: int) -> Prompts:
        outputs: Prompts = []
        for start in range(0, len(prompts), BATCH):
            batch = prompts[start : start + BATCH]
            width = max(len(prompt) for prompt in batch)
            ids = torch.tensor([[pad] * (width - len(p)) + p for p in batch])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
            with torch.inference_mode():
                result = model.generate(
                    input_ids=ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False
                )
            outputs += result[:, width:].tolist()
        return outputs

    return Engine(
        version=f"{transformers.__version__}, torch {torch.__version__}",
        settings=f"static batches of {BATCH}, {args.threads} threads",
        generate=generate,
    )


if __name__ == "__main__":
    serve(build)
