import json
import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.frontend import gguf_tokenizer
from jaxinfer.frontend.tokenizer import Tokenizer
from jaxinfer.weights.reader import CheckpointError
from jaxinfer.weights.resolve import ModelFiles

TOKEN_IDS = Path(__file__).parent / "data" / "llama_cpp_token_ids.json"


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf) -> Tokenizer:
    return Tokenizer.load(ModelFiles("gguf", smollm2_gguf))


@pytest.fixture(scope="session")
def gemma3(gemma3_gguf) -> Tokenizer:
    return Tokenizer.load(ModelFiles("gguf", gemma3_gguf))


@pytest.mark.real
@pytest.mark.parametrize(
    ("fixture", "model"), [("smollm2", "smollm2-135m"), ("gemma3", "gemma3-270m")]
)
def test_ids_are_those_of_llama_cpp(fixture, model, request):
    tokenizer = request.getfixturevalue(fixture)
    cases = json.loads(TOKEN_IDS.read_text())[model]
    assert len(cases) >= 200
    wrong = [text for text, ids in cases if tokenizer.encode(text, add_special_tokens=False) != ids]
    assert wrong == []
    batch = tokenizer.encode_batch([text for text, _ in cases], add_special_tokens=False)
    assert batch == [ids for _, ids in cases]


@pytest.mark.real
def test_smollm2_splits_digits_one_by_one(smollm2):
    tokens = smollm2.convert_ids_to_tokens(smollm2.encode("in 1984"))
    assert tokens[-4:] == ["1", "9", "8", "4"]


@pytest.mark.real
@pytest.mark.parametrize("fixture", ["smollm2", "gemma3"])
def test_decoding_gives_the_text_back(fixture, request):
    tokenizer = request.getfixturevalue(fixture)
    for text, ids in json.loads(TOKEN_IDS.read_text())["smollm2-135m"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert (
            tokenizer.decode(ids, skip_special_tokens=False) == text or "▁" in text or "<0x" in text
        )


@pytest.mark.real
def test_special_tokens_of_the_packaged_models(smollm2, gemma3):
    assert (smollm2.vocab_size, smollm2.bos_token_id, smollm2.eos_token_id) == (49152, 1, 2)
    assert smollm2.special_tokens["eos_token"] == "<|im_end|>"
    assert smollm2.encode("hi") == smollm2.encode("hi", add_special_tokens=False)
    assert {0, 1, 2} < set(smollm2.all_special_ids)
    assert (gemma3.vocab_size, gemma3.bos_token_id, gemma3.eos_token_id) == (262144, 2, 1)
    assert gemma3.encode("hi") == [2, *gemma3.encode("hi", add_special_tokens=False)]
    ids = smollm2.encode("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert smollm2.decode(ids) == "user\nhi"
    assert smollm2.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>"
    assert smollm2.convert_ids_to_tokens([2, 10**6]) == ["<|im_end|>", None]
    assert smollm2.convert_tokens_to_ids(["<|im_end|>", "no such token"]) == [2, None]


@pytest.mark.real
def test_a_base_model_has_no_chat_template(gemma3):
    with pytest.raises(ValueError, match="no chat template: it may be a base model"):
        gemma3.apply_chat_template([{"role": "user", "content": "hi"}])
    text = gemma3.apply_chat_template(
        [{"role": "user", "content": "hi"}],
        chat_template="{{ bos_token }}{{ messages[0].content }}",
    )
    assert text == "<bos>hi"


@pytest.mark.real
def test_a_saved_tokenizer_comes_back_the_same(smollm2, tmp_path):
    smollm2.save(tmp_path)
    again = Tokenizer.load(ModelFiles("hf", tmp_path))
    assert again.special_tokens == smollm2.special_tokens
    assert again.chat_templates == smollm2.chat_templates
    assert again.all_special_ids == smollm2.all_special_ids
    assert again.decoder == smollm2.decoder
    for text, ids in json.loads(TOKEN_IDS.read_text())["smollm2-135m"]:
        assert again.encode(text, add_special_tokens=False) == ids


@pytest.mark.real
def test_transformers_reads_a_saved_tokenizer(smollm2, tmp_path):
    transformers = pytest.importorskip("transformers")
    smollm2.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "Was war 1984?"}]
    ours = smollm2.apply_chat_template(messages, add_generation_prompt=True)
    assert theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == ours
    assert theirs(ours, add_special_tokens=False)["input_ids"] == smollm2.encode(ours)
    assert theirs.eos_token_id == smollm2.eos_token_id


def byte_level_metadata(pre: str, **more) -> dict:
    """A vocabulary of the 256 bytes and a few merges."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "12 3"]
    tokens = ["<s>", "</s>", *alphabet, *(merge.replace(" ", "") for merge in merges), "word"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3, 3] + [1] * (len(tokens) - 2)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **more,
    }


def tokens_of(metadata, text, **options):
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text, **options))


@pytest.mark.parametrize(
    ("pre", "digits"),
    [
        ("gpt-2", ["123", "123"]),
        ("smollm", list("123123")),
        ("qwen2", list("123123")),
        ("llama-bpe", ["123"] * 2),
    ],
)
def test_the_pre_tokenizer_decides_how_digits_are_split(pre, digits):
    metadata = byte_level_metadata(pre, **{"tokenizer.ggml.add_bos_token": False})
    assert tokens_of(metadata, "123123") == digits


@given(
    text=st.text(max_size=40)
    | st.from_regex(re.compile(r"[A-Za-z0-9' \n.,!é世]{0,40}"), fullmatch=True)
)
@settings(max_examples=200, deadline=None)
def test_llama3_splits_as_its_own_tokenizer_json_does(text):
    original = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = tokenizers.pre_tokenizers.Split
    ours, theirs = (
        split(tokenizers.Regex(pattern), "isolated").pre_tokenize_str(text)
        for pattern in (gguf_tokenizer._SPLITS["llama-bpe"][0], original)
    )
    # "ſ" is an s to a case-insensitive match, but not to llama.cpp.
    assert ours == theirs or "ſ" in text


def test_words_that_are_tokens_come_before_merges_where_the_model_says_so():
    assert tokens_of(byte_level_metadata("llama-bpe"), "word") == ["<s>", "word"]
    assert tokens_of(byte_level_metadata("qwen2"), "word") == list("word")


def test_begin_and_end_tokens_follow_the_metadata():
    flags = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    metadata = byte_level_metadata("gpt-2", **flags)
    assert tokens_of(metadata, "hello") == ["<s>", "hello", "</s>"]
    assert tokens_of(metadata, "hello", add_special_tokens=False) == ["hello"]
    assert tokens_of(byte_level_metadata("gpt-2"), "hello") == ["hello"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tokenizer.ggml.pre": "klingon"},
            "f: tokenizer.ggml.pre 'klingon' is not supported; .*smollm",
        ),
        ({"tokenizer.ggml.model": "bert"}, "f: tokenizer.ggml.model 'bert' is not supported"),
    ],
)
def test_unsupported_tokenizers_are_named(change, message):
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_gguf_metadata(byte_level_metadata("gpt-2") | change, "f")
    with pytest.raises(CheckpointError, match=r"f lacks the metadata tokenizer\.ggml\.tokens"):
        Tokenizer.from_gguf_metadata({"tokenizer.ggml.model": "gpt2"}, "f")


def sentencepiece_metadata(**more) -> dict:
    pieces = ["▁", "a", "b", "c", "ab", "bc", "▁a", "abc"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    scores = [0.0] * 259 + [-9, -9, -9, -9, -2, -1, -3, -4]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(pieces)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **more,
    }


def test_sentencepiece_joins_the_best_score_first_and_falls_back_to_bytes():
    bare = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    metadata = sentencepiece_metadata(**bare)
    # "bc" scores higher than "ab"; then nothing joins "a" and "bc" but "abc".
    assert tokens_of(metadata, "abcab") == ["abc", "ab"]
    assert tokens_of(metadata, "aé") == ["a", "<0xC3>", "<0xA9>"]
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    assert tokenizer.decode(tokenizer.encode(" a é")) == " a é"


def test_sentencepiece_begins_with_bos_and_a_space_unless_told_otherwise():
    metadata = sentencepiece_metadata()
    assert tokens_of(metadata, "a b") == ["<s>", "▁a", "▁", "b"]
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"


def write_directory(directory: Path, config: dict, **files: str) -> Path:
    Tokenizer.from_gguf_metadata(byte_level_metadata("gpt-2")).save(directory)
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)
    return directory


def test_a_directory_gives_roles_as_strings_or_objects(tmp_path):
    roles = {"bos_token": {"content": "<s>", "lstrip": False}, "pad_token": None}
    write_directory(tmp_path, roles, special_tokens_map__json='{"eos_token": "</s>"}')
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, None)
    assert tokenizer.all_special_ids == [0, 1]


def test_templates_in_files_win_and_named_ones_are_kept(tmp_path):
    named = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "tools"}]
    write_directory(tmp_path, {"chat_template": named})
    chat = [{"role": "user", "content": "hi"}]
    assert Tokenizer.from_directory(tmp_path).apply_chat_template(chat) == "old"
    (tmp_path / "chat_template.jinja").write_text("new")
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.apply_chat_template(chat) == "new"
    assert tokenizer.apply_chat_template(chat, tools=[{"type": "function"}]) == "tools"
    assert tokenizer.apply_chat_template(chat, chat_template="tool_use") == "tools"


def test_truncation_and_padding_of_a_tokenizer_json_are_not_applied(tmp_path):
    write_directory(tmp_path, {})
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_directory(tmp_path).encode("abcdef")) == 6


def test_directories_without_a_readable_tokenizer_are_named(tmp_path):
    write_directory(tmp_path, {})
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is no tokenizer that can be read"):
        Tokenizer.from_directory(tmp_path)


def test_importing_loads_nothing_heavy(run_python):
    loaded = run_python(
        "import sys, jaxinfer.frontend.tokenizer, jaxinfer.weights.loader, jaxinfer.weights.gguf, "
        "jaxinfer.weights.orbax\n"
        "heavy = ['jax', 'gguf', 'tokenizers', 'transformers', 'torch', 'orbax', 'jinja2', 'huggingface_hub']\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    assert loaded == "[]"


@pytest.fixture
def run_python():
    import subprocess
    import sys

    def run(code: str) -> str:
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        return result.stdout.strip()

    return run
