"""The `jaxinfer` command. Exit codes: 0, 1 when a request or the engine failed, 2 for bad input, 130 on Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxinfer.bench.args import add_bench_commands
from jaxinfer.cli_args import add_engine_args, add_sampling_args, engine_args, sampling_params
from jaxinfer.config_file import add_config_flag, read_config
from jaxinfer.engine.errors import EngineDeadError
from jaxinfer.outputs import RequestFailedError, RequestOutput
from jaxinfer.quantize.options import add_quantize_args, quantize_options
from jaxinfer.sampling_params import RequestOutputKind, SamplingParams
from jaxinfer.server.args import (
    add_batch_args,
    add_server_args,
    batch_settings,
    listen_args,
    server_settings,
)

_GENERATE_MAX_TOKENS = 128
_CHAT_MAX_TOKENS = 1024
_SERVE_DEFAULTS: dict[str, Any] = dict(warmup="all")


def main(argv: Sequence[str] | None = None) -> int:
    parser, commands = _parser()
    argv = sys.argv[1:] if argv is None else list(argv)
    # Where modules may lie that flags name, also when this wasn't started by `python -m`.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        read_config(commands, argv)
    except (ValueError, OSError) as error:
        return _complain(error, 2)
    parsed = parser.parse_args(argv)
    if parsed.version:
        print(_version())
        return 0
    if parsed.command is None:
        parser.print_help()
        return 2
    logging.basicConfig(
        level=parsed.log_level.upper(), format="%(levelname)s %(name)s: %(message)s"
    )
    command: Callable[[argparse.Namespace], int] = parsed.run
    try:
        return command(parsed)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has left; Python would complain once more while it exits.
        sys.stdout = None
        return 1
    except (EngineDeadError, RequestFailedError) as error:
        return _complain(error, 1)
    except (ValueError, OSError) as error:
        return _complain(error, 2)


def _complain(error: Exception, code: int) -> int:
    logging.getLogger(__name__).debug("Details:", exc_info=error)
    print(f"jaxinfer: error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser, and those of the commands by their names."""
    parser = argparse.ArgumentParser(
        prog="jaxinfer", description="LLM inference in JAX.", allow_abbrev=False
    )
    parser.add_argument(
        "--version", action="store_true", help="print the version and exit", dest="version"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")

    serve = _command(commands, "serve", _serve, "answer OpenAI-compatible HTTP requests")
    serve.set_defaults(log_level="info")
    add_config_flag(serve)
    add_engine_args(serve, leave_out={"served_model_name"}, **_SERVE_DEFAULTS)
    add_server_args(serve)

    batch = _command(commands, "run-batch", _run_batch, "answer the requests of a batch file")
    add_config_flag(batch)
    add_engine_args(batch, leave_out={"served_model_name"}, model_is_flag=True)
    add_batch_args(batch)

    generate = _command(commands, "generate", _generate, "complete prompts")
    add_engine_args(generate)
    prompts = generate.add_argument_group("input and output")
    prompts.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="may be repeated; without, one per line of stdin",
    )
    prompts.add_argument("--json", action="store_true", help="one JSON object per prompt and line")
    add_sampling_args(generate)

    chat = _command(commands, "chat", _chat, "talk to a model in the terminal")
    add_engine_args(chat)
    talk = chat.add_argument_group("conversation")
    talk.add_argument("--system", metavar="TEXT", help="system message")
    talk.add_argument("--message", metavar="TEXT", help="answer this one message and exit")
    add_sampling_args(chat)

    bench = commands.add_parser("bench", help="measure an engine or a server", allow_abbrev=False)
    kinds = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    add_bench_commands(partial(_command, kinds))

    convert = _command(commands, "convert", _convert, "write a checkpoint that loads faster")
    convert.add_argument("model", help="model id, folder or file")
    convert.add_argument("out", help="folder to be written; must not exist")
    convert.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="auto keeps the checkpoint's",
    )
    _add_download_args(convert)

    quantize = _command(commands, "quantize", _quantize, "write a checkpoint with smaller weights")
    quantize.set_defaults(log_level="info")
    quantize.add_argument("model", help="model id, folder or file")
    quantize.add_argument("out", help="folder to be written; must not exist")
    add_quantize_args(quantize)
    _add_download_args(quantize)
    return parser, dict(commands.choices)


def _add_download_args(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--revision", help="branch, tag or commit of a model on the hub")
    parser.add_argument("--download-dir", help="where downloads are kept")


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--log-level",
        default="warning",
        choices=("debug", "info", "warning", "error"),
        help="of the log on stderr (default: warning)",
    )
    return parser


def _generate(parsed: argparse.Namespace) -> int:
    prompts = parsed.prompt
    if prompts is None:
        if sys.stdin.isatty():
            raise ValueError("no prompt: give --prompt, or one prompt per line on stdin.")
        prompts = [line for line in sys.stdin.read().splitlines() if line.strip()]
    args = engine_args(parsed)
    sampling_params(
        parsed, SamplingParams(), max_tokens=_GENERATE_MAX_TOKENS
    )  # complain before the model is loaded
    from jaxinfer.llm import LLM

    with LLM.from_engine_args(args) as llm:
        defaults = llm.get_default_sampling_params()
        params = sampling_params(parsed, defaults, max_tokens=_GENERATE_MAX_TOKENS)
        outputs = llm.generate(prompts, params, use_tqdm=len(prompts) > 1 and sys.stderr.isatty())
    write = _write_json if parsed.json else _write_text
    for output in outputs:
        write(output, is_only=len(outputs) == 1)
    return 0


def _write_text(output: RequestOutput, is_only: bool) -> None:
    if not is_only:
        print(f"=== {output.prompt}")
    for completion in output.outputs:
        if len(output.outputs) > 1:
            print(f"--- {completion.index}")
        print(completion.text)


def _write_json(output: RequestOutput, is_only: bool) -> None:
    print(
        json.dumps(
            {
                "prompt": output.prompt,
                "num_prompt_tokens": len(output.prompt_token_ids),
                "outputs": [
                    {
                        "index": completion.index,
                        "text": completion.text,
                        "token_ids": completion.token_ids,
                        "finish_reason": completion.finish_reason,
                        "stop_reason": completion.stop_reason,
                    }
                    for completion in output.outputs
                ],
            },
            ensure_ascii=False,
        )
    )


def _chat(parsed: argparse.Namespace) -> int:
    args = engine_args(parsed)
    sampling_params(parsed, SamplingParams(), max_tokens=_CHAT_MAX_TOKENS)
    from jaxinfer.async_llm import AsyncLLM
    from jaxinfer.chat_session import ChatSession

    llm = AsyncLLM.from_engine_args(args)
    try:
        params = sampling_params(
            parsed,
            llm.get_default_sampling_params(),
            max_tokens=_CHAT_MAX_TOKENS,
            output_kind=RequestOutputKind.DELTA,
        )
        with ChatSession(llm, params, parsed.system) as session:
            if parsed.message is None:
                session.run()
            else:
                session.answer(parsed.message)
    finally:
        llm.shutdown()
    return 0


def _serve(parsed: argparse.Namespace) -> int:
    args = engine_args(parsed, **_SERVE_DEFAULTS)
    settings, listen = server_settings(parsed, args), listen_args(parsed)
    with _needs_server_extra():
        from jaxinfer.remote_core import core_command
        from jaxinfer.server.serve import serve
    return serve(args, settings, listen, core_command(parsed.log_level))


def _run_batch(parsed: argparse.Namespace) -> int:
    args = engine_args(parsed)
    settings = batch_settings(parsed, args)
    source, target = Path(parsed.input_file), Path(parsed.output_file)
    if not source.is_file():
        raise ValueError(f"input_file: there is no file {source}.")
    if target.exists() and source.samefile(target):
        raise ValueError("output_file must be another file than input_file.")
    with _needs_server_extra():
        from jaxinfer.server.run_batch import run_batch
    from jaxinfer.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(args)
    try:
        counts = asyncio.run(
            run_batch(
                llm,
                settings,
                source,
                target,
                parsed.max_concurrency,
                show_progress=sys.stderr.isatty(),
            )
        )
    finally:
        llm.shutdown()
    print(f"{counts.num_requests} requests, {counts.num_failed} failed.", file=sys.stderr)
    return 1 if counts.num_failed else 0


@contextlib.contextmanager
def _needs_server_extra() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(
            f"the server needs {error.name}; install it with pip install 'jaxinfer[server]'."
        ) from error


def _convert(parsed: argparse.Namespace) -> int:
    from jaxinfer.convert import convert

    out = convert(
        parsed.model,
        parsed.out,
        dtype=parsed.dtype,
        revision=parsed.revision,
        download_dir=parsed.download_dir,
    )
    print(out)
    return 0


def _quantize(parsed: argparse.Namespace) -> int:
    options = quantize_options(parsed)  # complain before anything is loaded
    from jaxinfer.quantize.run import quantize

    where = {"revision": parsed.revision, "download_dir": parsed.download_dir}
    print(quantize(parsed.model, parsed.out, options, **where))
    return 0


def _version() -> str:
    import jaxinfer

    return f"jaxinfer {jaxinfer.__version__}"
