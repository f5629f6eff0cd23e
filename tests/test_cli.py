from __future__ import annotations

import argparse
import dataclasses
import io
import json
import subprocess
import sys

import pytest

from jaxinfer import cli, cli_args
from jaxinfer.chat_session import ChatSession
from jaxinfer.engine_args import EngineArgs
from jaxinfer.sampling_params import SamplingParams
from tests.frontend.story_engine import continuation, story_engine, tell


@pytest.fixture
def engine(monkeypatch):
    """Commands get an engine that tells a story; its arguments are kept."""
    seen = []

    def build(args):
        seen.append(args)
        return story_engine()[0]

    monkeypatch.setattr("jaxinfer.llm.build_engine", build)
    monkeypatch.setattr("jaxinfer.async_llm.build_engine", build)
    return seen


def run(*argv, capsys):
    code = cli.main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


def parse(*argv):
    parser = argparse.ArgumentParser()
    cli_args.add_engine_args(parser)
    cli_args.add_sampling_args(parser)
    return parser.parse_args(argv)


# ---- flags -----------------------------------------------------------------------------------------------------------


def test_every_engine_argument_has_a_described_flag():
    described = {name for group in cli_args._GROUPS.values() for name in group}
    assert described == {field.name for field in dataclasses.fields(EngineArgs)} - {"model"}


def test_flags_reach_the_engine_args():
    parsed = parse(
        *("m", "--max-model-len", "2k", "--kv-cache-memory-bytes", "1.5G", "--no-async-scheduling"),
        *("--hf-overrides", '{"rope_theta": 5}', "--gpu-memory-utilization", "0.5", "--seed", "3"),
        *("--scheduling-policy", "priority"),
        *("--logits-processors", "mine:boost", "b=mine:ban"),
    )
    assert cli_args.engine_args(parsed) == EngineArgs(
        model="m",
        max_model_len=2000,
        kv_cache_memory_bytes=3 << 29,
        async_scheduling=False,
        hf_overrides={"rope_theta": 5},
        gpu_memory_utilization=0.5,
        seed=3,
        scheduling_policy="priority",
        logits_processors={"boost": "mine:boost", "b": "mine:ban"},
    )
    assert cli_args.engine_args(parse("m")) == EngineArgs(model="m")


def test_flags_reach_the_sampling_params():
    parsed = parse(
        *("m", "--temperature", "0.5", "--stop", "a", "--stop", "b", "--n", "2", "--ignore-eos"),
        *("--sampling-seed", "9", "--top-k", "-1"),
    )
    params = cli_args.sampling_params(parsed, SamplingParams(top_p=0.5), max_tokens=7)
    assert params == SamplingParams(
        temperature=0.5,
        stop=["a", "b"],
        n=2,
        ignore_eos=True,
        seed=9,
        top_k=-1,
        top_p=0.5,
        max_tokens=7,
    )
    assert cli_args.engine_args(parsed).seed == 0


@pytest.mark.parametrize(
    "flags",
    [
        ["--max-model-len", "many"],
        ["--hf-overrides", "[1]"],
        ["--hf-overrides", "{"],
        ["--warmup", "maybe"],
        ["--unknown", "1"],
        ["--logits-processors", "boost"],
        ["--logits-processors", "a:b", "c:b"],
        ["--max-model", "5"],
    ],
)
def test_unreadable_flags_exit_with_2(flags, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["generate", "m", "--prompt", "x", *flags])
    assert caught.value.code == 2
    assert flags[0].lstrip("-") in capsys.readouterr().err


# ---- generate --------------------------------------------------------------------------------------------------------


def test_generate_prints_the_text(engine, capsys):
    code, out, _ = run("generate", "m", "--prompt", "once", "--max-tokens", "9", capsys=capsys)
    assert (code, out) == (0, continuation(4, 9) + "\n")
    assert engine[0].model == "m"


def test_generate_several_prompts_and_outputs(engine, capsys):
    flags = ["--prompt", "once", "--prompt", "on", "--n", "2", "--max-tokens", "5"]
    code, out, _ = run("generate", "m", *flags, capsys=capsys)
    assert code == 0
    assert out == "".join(
        f"=== {p}\n--- 0\n{continuation(len(p), 5)}\n--- 1\n{continuation(len(p), 5)}\n"
        for p in ("once", "on")
    )


def test_generate_reads_lines_and_writes_json(engine, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("once\n\nonce upon\n"))
    code, out, _ = run("generate", "m", "--json", "--max-tokens", "5", capsys=capsys)
    first, second = map(json.loads, out.splitlines())
    assert code == 0 and second["prompt"] == "once upon"
    assert first["outputs"][0]["text"] == continuation(4, 5)
    assert first["outputs"][0]["finish_reason"] == "length"
    assert first["num_prompt_tokens"] == 4 and len(first["outputs"][0]["token_ids"]) == 5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", ""], "prompt must not be empty"),
        (["--prompt", "x", "--top-p", "0"], "top_p"),
        (["--prompt", "x", "--max-tokens", "0"], "max_tokens must be at least 1"),
        (["--prompt", "x", "--block-size", "0"], "block_size must be at least 1"),
        (["--prompt", "x" * 500], "max_model_len"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(engine, capsys, flags, message):
    code, out, err = run("generate", "m", *flags, capsys=capsys)
    assert code == 2 and out == ""
    assert err.startswith("jaxinfer: error: ") and message in err and err.count("\n") == 1


def test_parameters_are_refused_before_a_model_is_loaded(engine, capsys):
    for command in (["generate", "m", "--prompt", "x"], ["chat", "m", "--message", "x"]):
        assert run(*command, "--temperature", "-1", capsys=capsys)[0] == 2
    assert engine == []


def test_an_engine_that_fails_is_exit_code_1(capsys, monkeypatch):
    def broken(context):
        raise RuntimeError("the device fell off")

    monkeypatch.setattr("jaxinfer.llm.build_engine", lambda args: story_engine(broken)[0])
    code, _, err = run("generate", "m", "--prompt", "x", capsys=capsys)
    assert code == 1 and "the device fell off" in err


def test_ctrl_c_is_exit_code_130(capsys, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxinfer.llm.build_engine", interrupted)
    assert run("generate", "m", "--prompt", "x", capsys=capsys)[0] == 130


# ---- chat ------------------------------------------------------------------------------------------------------------


def prompt_len(*turns):
    """Tokens of a conversation in the test template: one per letter and per special token."""
    return sum(1 + len(text) + 1 for _, text in turns) + 1


def test_chat_answers_one_message(engine, capsys):
    flags = ["--message", "hi", "--max-tokens", "8", "--system", "be nice"]
    code, out, _ = run("chat", "m", *flags, capsys=capsys)
    start = prompt_len(("system", "be nice"), ("user", "hi"))
    assert (code, out) == (0, continuation(start, 8) + "\n")


def test_chat_remembers_until_it_is_told_to_forget(engine, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nand\n/clear\nhi\n/quit\nnever\n"))
    code, out, _ = run("chat", "m", "--max-tokens", "4", capsys=capsys)
    first = continuation(prompt_len(("user", "hi")), 4)
    second = continuation(prompt_len(("user", "hi"), ("assistant", first), ("user", "and")), 4)
    assert (code, out) == (0, f"{first}\n{second}\n{first}\n")


def test_chat_goes_on_after_a_message_that_does_not_fit(engine, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n" + "x" * 500 + "\n/clear\nhi\n"))
    code, out, err = run("chat", "m", "--max-tokens", "4", capsys=capsys)
    first = continuation(prompt_len(("user", "hi")), 4)
    assert (code, out) == (0, f"{first}\n{first}\n")
    assert "max_model_len" in err


def test_chat_without_a_template_is_bad_input(engine, capsys, monkeypatch):
    monkeypatch.setattr("tests.frontend.story_engine.TOKENIZER.chat_templates", {})
    code, _, err = run("chat", "m", "--message", "hi", capsys=capsys)
    assert code == 2 and "chat template" in err


def test_ctrl_c_stops_an_answer_and_not_the_conversation(capsys, monkeypatch):
    """The signal comes from within the fourth token of the first answer."""
    import os
    import signal

    from jaxinfer.async_llm import AsyncLLM

    sent = []
    first = prompt_len(("user", "hi"))

    def interrupting(context):
        if len(context) == first + 4 and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGINT))
        return tell(context)

    llm = AsyncLLM.from_engine(story_engine(interrupting, max_model_len=4000, num_blocks=3000)[0])
    params = SamplingParams(max_tokens=None, output_kind=1)
    # A shell's background jobs start with the signal ignored.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n/clear\nagain\n"))
    try:
        with ChatSession(llm, params, None) as session:
            short = ["again"]

            def answer(message, whole=session.answer):
                if message in short:
                    session._params = SamplingParams(max_tokens=4, output_kind=1)
                return whole(message)

            session.answer = answer
            session.run()
    finally:
        signal.signal(signal.SIGINT, handler)
        llm.shutdown()
    out = capsys.readouterr().out
    assert sent and "[stopped]" in out
    assert out.rstrip("\n").endswith(continuation(prompt_len(("user", "again")), 4))


# ---- convert ---------------------------------------------------------------------------------------------------------


def test_convert_passes_its_arguments_on(monkeypatch, capsys):
    seen = {}

    def convert(model, out, **options):
        seen.update(model=model, out=out, **options)
        return out

    monkeypatch.setattr("jaxinfer.convert.convert", convert)
    code, out, _ = run("convert", "m", "there", "--dtype", "float32", capsys=capsys)
    assert (code, out) == (0, "there\n")
    assert seen == {
        "model": "m",
        "out": "there",
        "dtype": "float32",
        "revision": None,
        "download_dir": None,
    }


def test_convert_does_not_overwrite(tmp_path, capsys):
    (tmp_path / "kept").write_text("")
    code, _, err = run("convert", "m", str(tmp_path), capsys=capsys)
    assert code == 2 and str(tmp_path) in err


# ---- the command itself ----------------------------------------------------------------------------------------------


def run_main(*argv):
    code = (
        f"import sys; sys.argv = ['jaxinfer', *{list(argv)}]\n"
        "from jaxinfer.cli import main\n"
        "try: code = main()\n"
        "except SystemExit as exit: code = exit.code\n"
        "heavy = {'jax', 'flax', 'torch', 'transformers', 'tokenizers'} & set(sys.modules)\n"
        "print(heavy or 'light', file=sys.stderr); sys.exit(code)"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["--help"], 0, "generate"),
        (["generate", "--help"], 0, "--kv-cache-memory-bytes"),
        (["chat", "--help"], 0, "--message"),
        (["generate"], 2, "model"),
        (["generate", "m", "--prompt", "x", "--n", "0"], 2, "n must be at least 1"),
        ([], 2, "usage"),
    ],
)
def test_help_and_refusals_load_nothing_heavy(argv, code, text):
    done = run_main(*argv)
    assert done.returncode == code, done.stderr
    assert text in done.stdout + done.stderr
    assert done.stderr.endswith("light\n")


def test_python_m_jaxinfer_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "jaxinfer", "generate", "--help"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0
    for group in ("model:", "memory:", "scheduling:", "execution:", "sampling"):
        assert group in done.stdout
    assert "other engine options" not in done.stdout
