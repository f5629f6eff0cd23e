"""jaxinfer, in-process; with the warm-up policy "all", every program is compiled before the first request."""

from __future__ import annotations

import argparse

from worker import Engine, Prompts, serve


def build(args: argparse.Namespace) -> Engine:
    import jax

    import jaxinfer
    from jaxinfer import LLM, SamplingParams

    compiled = 0

    def count(event: str, duration: float, **_: object) -> None:
        nonlocal compiled
        # Counts whatever goes to the compiler, not only what the engine's own guard knows of.
        compiled += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(count)
    llm = LLM(args.model, dtype=args.dtype, max_model_len=args.max_model_len, warmup=args.warmup)

    def generate(prompts: Prompts, max_tokens: int) -> Prompts:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [
            list(request.outputs[0].token_ids)
            for request in llm.generate(requests, params, use_tqdm=False)
        ]

    return Engine(
        version=jaxinfer.__version__,
        settings=f"jax {jax.__version__}, warmup={args.warmup}",
        generate=generate,
        reset=llm.reset_prefix_cache,
        counters=lambda: {"compilations": compiled},
    )


if __name__ == "__main__":
    serve(build)
