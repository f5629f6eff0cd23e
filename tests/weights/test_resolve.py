import hashlib
import sys
from pathlib import Path

import pytest

from jaxinfer.weights import packaged
from jaxinfer.weights.packaged import PACKAGED_MODELS, PackagedModel, packaged_model
from jaxinfer.weights.resolve import ORBAX_MARKER, ModelFiles, open_checkpoint, resolve_model

PARTS = (b"first half, ", b"second half")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "cache"))
    # No test may reach a network.
    monkeypatch.setattr(packaged, "_installers", list)


def hub_snapshot(cache: Path, model: str, files: dict[str, str]) -> Path:
    """The layout that huggingface_hub leaves behind."""
    root = cache / f"models--{model.replace('/', '--')}"
    snapshot = root / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0123abcd")
    for name, text in files.items():
        (snapshot / name).write_text(text)
    return snapshot


def install_package(site: Path, name: str, files: dict[str, bytes]) -> None:
    """A package that must not be imported."""
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").write_text("raise RuntimeError('imported')")
    for inner, data in files.items():
        path = site / name / inner
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)


@pytest.fixture
def model_in_parts(monkeypatch):
    model = PackagedModel(
        "whole.gguf",
        (
            ("tst-part1", "1.0", "tst_part1/data/x.part00"),
            ("tst-part2", "1.0", "tst_part2/data/x.part01"),
        ),
        hashlib.sha256(b"".join(PARTS)).hexdigest(),
    )
    monkeypatch.setitem(PACKAGED_MODELS, "tst-model", model)


def test_local_files_and_directories(tmp_path):
    hf, converted, lone = (tmp_path / name for name in ("hf", "converted", "lone"))
    for directory in (hf, converted, lone):
        directory.mkdir()
    (hf / "config.json").touch()
    for name in ("config.json", ORBAX_MARKER):
        (converted / name).touch()
    (lone / "m.gguf").touch()
    assert resolve_model(str(hf)) == ModelFiles("hf", hf)
    assert resolve_model(str(converted)) == ModelFiles("orbax", converted)
    assert resolve_model(str(lone)) == ModelFiles("gguf", lone / "m.gguf")
    assert resolve_model(str(lone / "m.gguf")) == ModelFiles("gguf", lone / "m.gguf")


def test_a_directory_without_a_model_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"neither a config\.json nor a \.gguf"):
        resolve_model(str(tmp_path))
    for name in "ab":
        (tmp_path / f"{name}.gguf").touch()
    with pytest.raises(ValueError, match=r"2 \.gguf files \(name one of them\)"):
        resolve_model(str(tmp_path))
    other = tmp_path / "weights.bin"
    other.touch()
    with pytest.raises(ValueError, match=r"is a file, but not a \.gguf file"):
        resolve_model(str(other))


def test_load_format_demands_its_kind(tmp_path):
    (tmp_path / "config.json").touch()
    assert resolve_model(str(tmp_path), load_format="safetensors").kind == "hf"
    for load_format in ("gguf", "orbax"):
        with pytest.raises(ValueError, match=f"load_format is '{load_format}'.*of kind 'hf'"):
            resolve_model(str(tmp_path), load_format=load_format)
    with pytest.raises(ValueError, match="load_format must be auto"):
        resolve_model(str(tmp_path), load_format="pickle")


def test_an_id_in_the_local_hub_cache(tmp_path):
    files = {"config.json": "{}", "model.safetensors": ""}
    snapshot = hub_snapshot(tmp_path, "some/model", files)
    assert resolve_model("some/model", download_dir=str(tmp_path)) == ModelFiles("hf", snapshot)


def test_a_download_that_was_interrupted_is_not_taken_for_the_model(tmp_path):
    index = '{"weight_map": {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}}'
    files = {
        "config.json": "{}",
        "model.safetensors.index.json": index,
        "model-00001.safetensors": "",
    }
    snapshot = hub_snapshot(tmp_path, "some/model", files)
    with pytest.raises(ValueError, match="lacks weights"):
        resolve_model("some/model", download_dir=str(tmp_path))
    assert (
        resolve_model("some/model", download_dir=str(tmp_path), load_format="dummy").path
        == snapshot
    )
    (snapshot / "model-00002.safetensors").touch()
    assert resolve_model("some/model", download_dir=str(tmp_path)).path == snapshot


def test_an_unknown_id_names_what_was_tried(tmp_path):
    with pytest.raises(ValueError) as caught:
        resolve_model("no/such-model", download_dir=str(tmp_path))
    message = str(caught.value)
    for part in (
        "'no/such-model'",
        "a local path",
        "smollm2-135m",
        "local Hugging Face cache",
        "hub (",
    ):
        assert part in message


@pytest.mark.parametrize("name", ["./no/such/dir", "/no/such/dir", "no/such.gguf", "a b", "a/b/c"])
def test_what_can_be_no_id_is_not_looked_for_in_the_hub(name):
    with pytest.raises(ValueError, match="no such file or directory"):
        resolve_model(name)


def test_an_empty_name_is_refused():
    with pytest.raises(ValueError, match="model must not be empty"):
        resolve_model("")


def test_an_installed_package_is_used_where_it_is_without_being_imported(tmp_path, monkeypatch):
    model = PackagedModel("m.gguf", (("tst-lone", "1.0", "tst_lone/m.gguf"),), "not checked")
    monkeypatch.setitem(PACKAGED_MODELS, "tst-lone", model)
    install_package(tmp_path / "site", "tst_lone", {"m.gguf": b"x"})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    found = resolve_model("tst-lone")
    assert found == ModelFiles("gguf", tmp_path / "site" / "tst_lone" / "m.gguf")
    assert "tst_lone" not in sys.modules


def test_parts_are_joined_once(tmp_path, monkeypatch, model_in_parts):
    for i, data in enumerate(PARTS):
        install_package(tmp_path / "site", f"tst_part{i + 1}", {f"data/x.part0{i}": data})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    path = packaged_model("tst-model")
    assert path.read_bytes() == b"".join(PARTS)
    assert path == tmp_path / "cache" / "models" / "whole.gguf"
    assert [entry.name for entry in path.parent.iterdir()] == ["whole.gguf"]
    path.write_bytes(b"kept")
    assert packaged_model("tst-model").read_bytes() == b"kept"


def test_parts_that_are_not_the_model_are_refused(tmp_path, monkeypatch, model_in_parts):
    for i in range(2):
        install_package(tmp_path / "site", f"tst_part{i + 1}", {f"data/x.part0{i}": b"other"})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(ValueError, match=r"whole\.gguf from its packages has SHA-256"):
        packaged_model("tst-model")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_missing_package_is_fetched_and_unpacked(tmp_path, monkeypatch, model_in_parts):
    install_package(tmp_path / "site", "tst_part1", {"data/x.part00": PARTS[0]})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    script = tmp_path / "installer.py"
    script.write_text(
        "import pathlib, sys\n"
        "target = pathlib.Path(sys.argv[sys.argv.index('--target') + 1]) / 'tst_part2' / 'data'\n"
        "assert sys.argv[-1] == 'tst-part2==1.0' and '--no-deps' in sys.argv\n"
        "target.mkdir(parents=True)\n"
        f"(target / 'x.part01').write_bytes({PARTS[1]!r})\n"
    )
    installers = [["no-such-installer"], [sys.executable, str(script)]]
    monkeypatch.setattr(packaged, "_installers", lambda: installers)
    assert packaged_model("tst-model").read_bytes() == b"".join(PARTS)


def test_a_failing_fetch_says_what_to_install_and_why_it_failed(monkeypatch, model_in_parts):
    failing = [sys.executable, "-c", "import sys; sys.exit('no route to the index')"]
    monkeypatch.setattr(packaged, "_installers", lambda: [failing])
    with pytest.raises(
        ValueError, match=r"'tst-model'.*--no-deps tst-part1==1\.0.*no route to the"
    ):
        packaged_model("tst-model")


@pytest.mark.real
def test_the_packaged_models_are_whole(smollm2_gguf, gemma3_gguf):
    for path, alias in ((smollm2_gguf, "smollm2-135m"), (gemma3_gguf, "gemma3-270m")):
        with path.open("rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == PACKAGED_MODELS[alias].sha256
    files = resolve_model("smollm2-135m")
    assert files == ModelFiles("gguf", smollm2_gguf)
    assert open_checkpoint(files).config()["hidden_size"] == 576
