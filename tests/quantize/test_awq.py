"""What a layer is calibrated on, and that its scales change nothing before rounding: both against transformers."""

from __future__ import annotations

import copy
import shutil

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from jaxinfer.quantize.awq import rounded_matrices, scaled_layer
from jaxinfer.quantize.calibration import CalibrationRun, calibration_samples
from jaxinfer.quantize.linears import NormProducer, find_folds
from tests.quantize.models import make_model, opened, tiny_dir
from tests.quantize.unpacked import read_tensors
from tests.tiny_llm import BOS, TOKENIZER

FAMILIES = ("llama", "llama_biased", "mistral", "qwen2", "qwen3", "gemma3", "phi3")
SAMPLES = np.random.default_rng(0).integers(3, 90, (3, 21)).astype(np.int32)


def inputs_by_transformers(name: str, changed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What each Linear got, [T, I] float64, by its name, in the model with some of its tensors `changed`."""
    model, seen, hooks = copy.deepcopy(make_model(name)), {}, []
    state = {tensor: torch.from_numpy(value) for tensor, value in changed.items()}
    assert not model.load_state_dict(state, strict=False).unexpected_keys
    for module_name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):

            def keep(_, args, of=module_name):
                seen[of] = args[0].double().numpy().reshape(-1, args[0].shape[-1])

            hooks.append(module.register_forward_pre_hook(keep))
    with torch.no_grad():
        model(torch.from_numpy(SAMPLES).long())
    return seen


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_are_calibrated_on_what_their_matrices_get(name):
    reader, description, plan = opened(tiny_dir(name))
    run = CalibrationRun(description, plan, reader, SAMPLES)
    first = find_folds(description.spec, plan, 0)
    halved = {fold.consumers[0]: 0.5 * reader.read(fold.consumers[0]) for fold in first}
    # A layer has its own tensors when it is looked at, and goes on with those that it is given.
    inputs = inputs_by_transformers(name, {}), inputs_by_transformers(name, halved)
    for i in range(len(description.spec.layers)):
        expected, moments = inputs[i > 0], run.moments()
        run.advance({} if i else halved)
        for fold in find_folds(description.spec, plan, i):
            for consumer in fold.consumers:
                x = expected[consumer.removesuffix(".weight")]
                found = moments[fold.input]
                scale = np.abs(x.T @ x).max()
                np.testing.assert_allclose(found.products, x.T @ x, atol=1e-4 * scale)
                np.testing.assert_allclose(found.magnitudes, np.abs(x).sum(0), rtol=2e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_scales_change_nothing_before_rounding(name, tmp_path):
    directory = tiny_dir(name)
    reader, description, plan = opened(directory)
    run = CalibrationRun(description, plan, reader, SAMPLES)
    tensors, scaled_inputs = read_tensors(directory), 0
    for i in range(len(description.spec.layers)):
        folds = find_folds(description.spec, plan, i)
        assert all(fold.producer is not None for fold in folds)
        layer = scaled_layer(reader.read, folds, run.moments(), 32)
        changed = layer.matrices | layer.others
        run.advance(changed)
        for fold in folds:
            changes = (changed[name] / tensors[name] for name in fold.consumers)
            scaled_inputs += any(np.abs(change - 1).max() > 0.1 for change in changes)
        assert all(changed[key].dtype == tensors[key].dtype for key in changed)
        tensors |= changed
    assert scaled_inputs > len(description.spec.layers)
    shutil.copytree(directory, tmp_path / "model")
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    import transformers

    model = make_model(name)
    scaled = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation="eager"
    )
    ids = torch.from_numpy(SAMPLES).long()
    with torch.no_grad():
        expected, found = model(ids).logits, scaled(ids).logits
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize(("clip", "compensate"), [(True, False), (False, True), (True, True)])
def test_what_rounding_is_told_reduces_the_errors_of_outputs(clip, compensate):
    reader, description, plan = opened(tiny_dir("uneven"))
    moments = CalibrationRun(description, plan, reader, SAMPLES).moments()
    folds = find_folds(description.spec, plan, 0)
    layer = scaled_layer(reader.read, folds, moments, 32)
    half = np.dtype(np.float16)

    def errors(**options: bool) -> dict[str, float]:
        rounded = rounded_matrices(layer, folds, 32, half, **options)
        found = {}
        for fold in folds:
            products = np.asarray(layer.moments[fold.input].products, np.float64)
            for name in fold.consumers:
                difference = np.asarray(rounded[name].values(), np.float64) - layer.matrices[name]
                found[name] = np.trace(difference @ products @ difference.T)
        return found

    plain, better = errors(clip=False, compensate=False), errors(clip=clip, compensate=compensate)
    for name in plain:
        assert better[name] < (0.85 if compensate else 1.0) * plain[name], name


def test_a_norm_in_16_bits_gives_the_scale_that_it_was_divided_by():
    directory = tiny_dir("gemma3")
    reader, description, plan = opened(directory)
    moments = CalibrationRun(description, plan, reader, SAMPLES).moments()
    [fold, *_] = find_folds(description.spec, plan, 0)
    assert isinstance(fold.producer, NormProducer) and fold.producer.offset == 1

    def read(name: str) -> np.ndarray:
        tensor = reader.read(name).astype(np.float16)
        if name == fold.producer.tensor:
            tensor[3] = -1  # a channel that the norm puts out
        return tensor

    layer = scaled_layer(read, [fold], moments, 32)
    before, after = read(fold.producer.tensor), layer.others[fold.producer.tensor]
    assert after.dtype == np.float16
    expected = (1 + before.astype(np.float32))[None] * read(fold.consumers[0]).astype(np.float32)
    found = (1 + after.astype(np.float32))[None] * layer.matrices[fold.consumers[0]]
    # Rounded norms and exact scales: float32's rounding is all that is left.
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_samples_are_pieces_of_the_text_that_begin_as_texts_do():
    text = "".join(chr(ord("a") + i % 23) for i in range(100))
    samples = calibration_samples(TOKENIZER, text, 3, 30)
    for row, start in zip(samples, (0, 33, 66), strict=True):
        assert row.tolist() == TOKENIZER.encode(text)[start : start + 30]
    with pytest.raises(ValueError, match=r"has 100 tokens, too few for num_samples \(4\)"):
        calibration_samples(TOKENIZER, text, 4, 26)


class _WithBos:
    """The tokenizer, were it one that puts a token before each text."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + TOKENIZER.encode(text)


def test_the_first_token_of_texts_is_counted():
    samples = calibration_samples(_WithBos(), "abcdefgh" * 10, 4, 21)
    assert samples.shape == (4, 21) and (samples[:, 0] == BOS).all()
    assert samples[1, 1:].tolist() == TOKENIZER.encode("efgh" + "abcdefgh" * 2)
    with pytest.raises(ValueError, match="sample_length must be at least 2, got 1"):
        calibration_samples(_WithBos(), "abc", 1, 1)
