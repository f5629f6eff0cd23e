"""What `make demo` runs: a few conversations at once, the first of them streamed while the others share its batch."""

from __future__ import annotations

import asyncio
import time

from jaxinfer import AsyncLLM, EngineArgs, RequestOutput, RequestOutputKind, SamplingParams

START = time.monotonic()

QUESTIONS = (
    "What is a neural network? Answer in two sentences.",
    "Write a haiku about the sea.",
    "Name three rivers in Europe.",
    "Give me a tip for learning to cook.",
)


async def answer(llm: AsyncLLM, question: str, stream: bool) -> RequestOutput:
    """The finished request; with `stream`, its text appears on the terminal as it is generated."""
    params = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        max_tokens=96,
        seed=1,
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
    )
    text = llm.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True
    )
    whole: RequestOutput | None = None
    async for output in llm.generate(text, params, add_special_tokens=False):
        if stream:
            print(*(completion.text for completion in output.outputs), end="", flush=True)
        if whole is None:
            whole = output
        elif stream:
            whole.add(output)
        else:
            whole = output
    assert whole is not None
    return whole


async def main() -> None:
    llm = AsyncLLM.from_engine_args(EngineArgs("smollm2-135m", max_model_len=512, max_num_seqs=8))
    print(f"Loaded in {time.monotonic() - START:.1f} s. {len(QUESTIONS)} questions, one batch.\n")
    print(f"> {QUESTIONS[0]}")
    try:
        answers = await asyncio.gather(
            *(answer(llm, question, stream=i == 0) for i, question in enumerate(QUESTIONS))
        )
    finally:
        llm.shutdown()
    print("\n")
    for question, output in zip(QUESTIONS[1:], answers[1:], strict=True):
        print(f"> {question}\n{output.outputs[0].text.strip()}\n")

    metrics = [output.metrics for output in answers if output.metrics is not None]
    first = min(m.first_token_time for m in metrics if m.first_token_time is not None)
    last = max(m.finished_time for m in metrics if m.finished_time is not None)
    tokens = sum(m.num_generation_tokens for m in metrics)
    print(
        f"First token {first - START:.1f} s after the start of the program; {tokens} tokens from "
        f"{len(answers)} requests, {tokens / (last - first):.0f} tokens/s."
    )


if __name__ == "__main__":
    asyncio.run(main())
