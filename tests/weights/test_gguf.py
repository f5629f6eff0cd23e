import gguf
import ml_dtypes
import numpy as np
import pytest

from jaxinfer.weights.gguf import GGUFReader
from jaxinfer.weights.gguf_file import read_gguf_header
from jaxinfer.weights.reader import CheckpointError
from tests.weights.gguf_files import as_llama_cpp, hugging_face_tensors, write_gguf

QUANTS = gguf.GGMLQuantizationType
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(params=["llama", "gemma3"])
def architecture(request):
    return request.param


def make(path, architecture, **options):
    tensors = as_llama_cpp(architecture, hugging_face_tensors(architecture))
    return write_gguf(path / "model.gguf", architecture, tensors, **options)


def test_tensors_are_those_of_the_original_checkpoint(tmp_path, architecture):
    original = hugging_face_tensors(architecture)
    reader = GGUFReader(make(tmp_path, architecture))
    assert set(reader.names()) == set(original)
    for name, expected in original.items():
        assert reader.shape(name) == expected.shape
        np.testing.assert_array_equal(reader.read(name), expected, err_msg=name)


@pytest.mark.parametrize("matrix_type", [QUANTS.F16, QUANTS.BF16, QUANTS.Q8_0, QUANTS.Q5_0])
def test_tensors_equal_what_transformers_loads(tmp_path, architecture, matrix_type):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    path = make(tmp_path, architecture, matrix_type=matrix_type)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    expected = model.state_dict()
    reader = GGUFReader(path)
    assert set(reader.names()) == set(expected) - {"lm_head.weight"}
    for name in reader.names():
        np.testing.assert_array_equal(reader.read(name), expected[name].numpy(), err_msg=name)


@pytest.mark.real
def test_smollm2_equals_what_transformers_loads(smollm2_gguf):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    )
    expected = model.state_dict()
    reader = GGUFReader(smollm2_gguf)
    assert set(reader.names()) == set(expected) - {"lm_head.weight"}
    for name in reader.names():
        value = expected[name].numpy()
        np.testing.assert_array_equal(reader.read(name), value, err_msg=name)
        np.testing.assert_array_equal(reader.read(name, BFLOAT16), value.astype(BFLOAT16))


@pytest.mark.real
def test_gemma3_is_read_whole(gemma3_gguf):
    reader = GGUFReader(gemma3_gguf)
    assert len(reader.names()) == 2 + 18 * 13
    config = reader.config()
    assert (config["hidden_size"], config["num_hidden_layers"], config["head_dim"]) == (
        640,
        18,
        256,
    )
    assert config["layer_types"].count("full_attention") == 3
    assert config["sliding_window"] == 512
    assert config["query_pre_attn_scalar"] == 256
    assert reader.dtype == "bfloat16"
    assert all(reader.shape(n)[-1] for n in reader.names())
    # Gemma's norm weights lie around 0 before the 1 that the computation adds.
    info = reader.file.tensors["output_norm.weight"]
    stored = np.fromfile(gemma3_gguf, np.float32, 640, offset=info.offset)
    np.testing.assert_array_equal(reader.read("model.norm.weight"), stored - np.float32(1))


def test_config_says_what_the_metadata_says(tmp_path, architecture):
    reader = GGUFReader(make(tmp_path, architecture))
    config = reader.config()
    expected = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "max_position_embeddings": 128,
        "vocab_size": 40,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected
    assert config["model_type"] == {"llama": "llama", "gemma3": "gemma3_text"}[architecture]
    assert reader.generation_config() == {"bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("matrix_type", "dtype"),
    [
        (QUANTS.F32, "float32"),
        (QUANTS.F16, "float16"),
        (QUANTS.BF16, "bfloat16"),
        (QUANTS.Q4_0, "bfloat16"),
    ],
)
def test_dtype_is_that_of_the_matrices(tmp_path, matrix_type, dtype):
    assert GGUFReader(make(tmp_path, "llama", matrix_type=matrix_type)).dtype == dtype


def test_rope_divisors_become_part_of_the_config(tmp_path):
    tensors = as_llama_cpp("llama", hugging_face_tensors("llama"))
    tensors["rope_freqs.weight"] = np.array([1, 1.5, 4, 8], np.float32)
    reader = GGUFReader(write_gguf(tmp_path / "m.gguf", "llama", tensors))
    scaling = reader.config()["rope_scaling"]
    assert scaling["rope_type"] == "longrope"
    assert scaling["short_factor"] == scaling["long_factor"] == [1, 1.5, 4, 8]
    assert scaling["attention_factor"] == 1
    assert "rope_freqs.weight" not in reader.names()


def test_rope_scaling_out_of_the_metadata(tmp_path):
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    config = GGUFReader(make(tmp_path, "llama", metadata=metadata)).config()
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_a_second_end_token_counts(tmp_path):
    reader = GGUFReader(make(tmp_path, "llama", metadata={"tokenizer.ggml.eot_token_id": 7}))
    assert reader.generation_config()["eos_token_id"] == [2, 7]


def test_header_equals_the_gguf_packages_reading(tmp_path, architecture):
    path = make(tmp_path, architecture, matrix_type=QUANTS.Q8_0)
    ours, theirs = read_gguf_header(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    assert {
        (t.name, tuple(reversed(t.shape.tolist())), t.tensor_type.name, t.data_offset, t.n_bytes)
        for t in theirs.tensors
    } == {(t.name, t.shape, t.type_name, t.offset, t.nbytes) for t in ours.tensors.values()}


def test_a_file_cut_short_names_tensor_and_file(tmp_path):
    path = make(tmp_path, "llama")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.gguf is cut short: tensor \S+ ends at byte"):
        GGUFReader(path)
    reader = GGUFReader(make(tmp_path, "llama"))
    path.write_bytes(whole[:-1000])
    last = next(reversed(list(reader.names())))
    with pytest.raises(CheckpointError, match=r"is cut short: tensor blk\."):
        reader.read(last)


def test_a_header_cut_anywhere_is_an_error_that_names_the_file(tmp_path):
    path = make(tmp_path, "llama")
    whole = path.read_bytes()
    end = min(info.offset for info in read_gguf_header(path).tensors.values())
    for size in range(0, end - 32, 37):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"model\.gguf"):
            GGUFReader(path)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK" + bytes(100))
    with pytest.raises(CheckpointError, match="no GGUF file"):
        GGUFReader(path)


def test_unsupported_architecture_names_the_supported_ones(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "mamba", {"token_embd.weight": np.zeros((40, 32), "f4")})
    with pytest.raises(CheckpointError, match="'mamba'; as GGUF, llama, gemma3 are supported"):
        GGUFReader(path)


def test_a_tensor_that_the_architecture_does_not_have_is_named(tmp_path):
    tensors = as_llama_cpp("llama", hugging_face_tensors("llama"))
    tensors["blk.1.ffn_gate_exps.weight"] = np.zeros((4, 64, 32), np.float32)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_gate_exps\.weight in .*m\.gguf"):
        GGUFReader(write_gguf(tmp_path / "m.gguf", "llama", tensors))


def test_missing_metadata_is_named(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(32)
    writer.add_tensor("token_embd.weight", np.zeros((40, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"lacks the metadata llama\.attention\.head_count"):
        GGUFReader(path)


def test_one_part_of_a_split_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="one part of a split GGUF"):
        GGUFReader(make(tmp_path, "llama", metadata={"split.count": 3}))
