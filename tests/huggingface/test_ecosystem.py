"""Wrapped models under the libraries that change modules, and in a pipeline."""

import copy

import pytest
import torch
import transformers

import varlen_graphs as vg
from tests.support.encoders import UNVERIFIED, VERIFIED
from tests.support.towers import distance, pooled
from tests.support.whole_models import END, IMAGE, START, VIDEO, WORDS, prompt, tokens, whole_model

IMAGES = [(1, 8, 8), (1, 4, 6)]
BUDGETS = [128]
HERE = torch.device("cpu")
"""Where the tape runs; a copy to "cpu" by name would be one to the host for it."""


def wrapped(model, verify=UNVERIFIED):
    return vg.wrap(model, BUDGETS, backend="tape", verify=verify)


def only_encoder(model):
    (encoder,) = vg.encoders(model).values()
    return encoder


def vision_features(model):
    """What the vision tower gives for the images, through its own call."""
    inputs = prompt(model, IMAGES)
    tower = next(module for path, module in model.named_modules() if path.endswith("visual"))
    with torch.no_grad():
        return tower(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])


# accelerate


def dispatched(model):
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    parts = dict.fromkeys(("model", "lm_head"), HERE)
    return accelerate.dispatch_model(model, parts, main_device="cpu", force_hooks=True)


def on_its_own(model):
    """The tower in an entry of its own of the device map, as on a machine with several GPUs."""
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    parts = dict.fromkeys(("model.visual", "model.language_model", "lm_head"), HERE)
    return accelerate.dispatch_model(model, parts, main_device="cpu", force_hooks=True)


@pytest.mark.parametrize("dispatch", [dispatched, on_its_own])
def test_a_device_map_before_the_wrap(dispatch):
    model = whole_model()
    expected = tokens(model, prompt(model, IMAGES))
    dispatch(model)
    hooked = vars(model.model.visual).get("forward")
    before = dict(vars(model.model.visual))
    wrapped(model)
    assert vars(model.model.visual).get("_hf_hook") is before.get("_hf_hook")
    assert torch.equal(tokens(model, prompt(model, IMAGES)), expected)
    assert only_encoder(model).stats.replays.total() == 1
    vg.unwrap(model)
    assert vars(model.model.visual).get("forward") is hooked
    assert vars(model.model.visual).keys() == before.keys()
    assert torch.equal(tokens(model, prompt(model, IMAGES)), expected)


@pytest.mark.parametrize("dispatch", [dispatched, on_its_own])
def test_a_device_map_after_the_wrap(dispatch):
    model = whole_model()
    expected = tokens(model, prompt(model, IMAGES))
    dispatch(wrapped(model))
    assert torch.equal(tokens(model, prompt(model, IMAGES)), expected)
    assert only_encoder(model).stats.replays.total() == 1
    vg.unwrap(model)
    assert torch.equal(tokens(model, prompt(model, IMAGES)), expected)


def test_hooks_may_go_again():
    from accelerate.hooks import remove_hook_from_submodules

    model = on_its_own(wrapped(whole_model()))
    remove_hook_from_submodules(model)
    vision_features(model)
    assert only_encoder(model).stats.replays.total() == 1
    vg.unwrap(model)
    assert "forward" not in vars(model.model.visual)


def test_offloaded_weights_are_refused(tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    on_disk = accelerate.disk_offload(whole_model(), tmp_path, execution_device="cpu")
    with pytest.raises(vg.errors.SpecError, match=r"model\.visual"):
        wrapped(on_disk)
    model = accelerate.cpu_offload(whole_model(), execution_device="cpu")
    with pytest.raises(vg.errors.SpecError, match=r"model\.visual"):
        wrapped(model)
    whole, _ = accelerate.cpu_offload_with_hook(whole_model().model.visual, execution_device="cpu")
    with pytest.raises(vg.errors.SpecError, match=r"accelerate offloads .*its weights move to the GPU for each call"):
        wrapped(whole)


# peft


def adapted(model, **options):
    peft = pytest.importorskip("peft", reason="needs peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=r".*visual.*(qkv|linear_fc1)", init_lora_weights=False, **options)
    return peft.get_peft_model(model, config, adapter_name="first").eval()


def test_adapters_are_part_of_the_graphs():
    model = adapted(whole_model())
    expected = vision_features(model)
    assert distance(vision_features(wrapped(model)), expected) < 1e-5
    assert only_encoder(model).stats.replays.total() == 1
    assert distance(vg.unwrap(model) and vision_features(model), expected) < 1e-6


def test_parts_of_a_tower_that_adapters_replace_are_part_of_the_graphs():
    peft = pytest.importorskip("peft", reason="needs peft")
    model = whole_model()
    options = {"target_modules": r".*language_model.*q_proj", "modules_to_save": ["visual.merger"]}
    model = peft.get_peft_model(model, peft.LoraConfig(**options))
    model.add_adapter("second", peft.LoraConfig(**options))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) / 2)
    original = copy.deepcopy(model.eval())
    wrapped(model)
    outputs = []
    for adapter in ("default", "second", "default"):
        for one in (model, original):
            one.set_adapter(adapter)
            one.eval()
        assert distance(vision_features(model), vision_features(original)) < 1e-5
        outputs.append(pooled(vision_features(original)))
    with model.disable_adapter(), original.disable_adapter():
        assert distance(vision_features(model), vision_features(original)) < 1e-5
    assert not torch.allclose(outputs[0], outputs[1], atol=1e-2)
    assert only_encoder(model).stats.replays.total() == 4


def test_prompts_that_take_the_place_of_others_are_part_of_the_graphs():
    peft = pytest.importorskip("peft", reason="needs peft")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=64, **sizes))

    def config():
        return peft.PrefixTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=4)

    model = peft.get_peft_model(bert, config())
    model.add_adapter("second", config())
    original = copy.deepcopy(model.eval())
    vg.wrap(model, [64], backend="tape")
    ids, mask = torch.randint(1, 64, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    outputs = []
    for adapter in ("default", "second", "default"):
        for one in (model, original):
            one.set_adapter(adapter)
            one.eval()
        with torch.no_grad():
            got, expected = (one(input_ids=ids, attention_mask=mask).last_hidden_state for one in (model, original))
        assert distance(got, expected) < 1e-5
        outputs.append(expected)
    assert distance(outputs[0], outputs[1]) > 1e-2


def test_adapters_may_come_before_the_first_call():
    model = adapted(wrapped(whole_model()))
    got = vision_features(model)
    assert only_encoder(model).stats.replays.total() == 1
    assert distance(got, vision_features(vg.unwrap(model))) < 1e-5


def test_adapters_that_come_after_the_capture_are_told_at_once():
    model = wrapped(whole_model())
    vision_features(model)
    changed = adapted(model)
    with pytest.raises(vg.errors.StaleGraphError, match=r"call encoder.release\(\)"):
        vision_features(changed)
    only_encoder(changed).release()
    got = vision_features(changed)
    assert distance(got, vision_features(vg.unwrap(changed))) < 1e-5


def test_adapters_are_switched_off_and_on_and_merged():
    import peft

    model = adapted(whole_model())
    config = copy.deepcopy(model.peft_config["first"])
    torch.manual_seed(2)
    model.add_adapter("second", config)
    original = copy.deepcopy(model)
    wrapped(model)

    def check():
        got, expected = vision_features(model), vision_features(original)
        assert distance(got, expected) < 1e-5
        return pooled(expected)

    first = check()
    for one in (model, original):
        one.set_adapter("second")
    second = check()
    assert not torch.allclose(first, second, atol=1e-2)
    with model.disable_adapter(), original.disable_adapter():
        none = check()
    assert not torch.allclose(none, second, atol=1e-2)
    for one in (model, original):
        one.set_adapter("first")
    assert torch.equal(check(), first)
    captured = len(only_encoder(model).executor.store)
    for one in (model, original):
        one.base_model.merge_adapter()
    assert distance(check(), first) < 1e-4
    for one in (model, original):
        one.base_model.unmerge_adapter()
    check()
    assert len(only_encoder(model).executor.store) == captured + 1  # back to graphs there were
    assert isinstance(model, peft.PeftModel)
    assert not only_encoder(model).stats.eager


# Quantisers


def test_a_tower_quantised_by_torchao():
    pytest.importorskip("torchao", reason="needs torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = whole_model(dtype=torch.bfloat16)
    quantize_(model.model.visual, Int8WeightOnlyConfig())
    expected = vision_features(model)
    assert distance(vision_features(wrapped(model, VERIFIED)), expected) < 2e-2
    assert only_encoder(model).stats.replays.total() == 1


def quantised(folder, **options):
    """A model as bitsandbytes loads it, and the kinds of layers in its tower."""
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    from transformers import BitsAndBytesConfig

    whole_model().save_pretrained(folder)
    config = BitsAndBytesConfig(**options)
    kind = type(whole_model())
    model = kind.from_pretrained(folder, quantization_config=config, device_map="cpu", dtype=torch.float32)
    return model, {type(module).__name__ for module in model.model.visual.modules()}


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"load_in_4bit": True}, "Linear4bit"),
        ({"load_in_8bit": True, "llm_int8_threshold": 0.0}, "Linear8bitLt"),
        ({"load_in_8bit": True, "llm_int8_skip_modules": ["model.visual", "lm_head"]}, "Linear"),
    ],
    ids=["4 bits", "8 bits", "the rest"],
)
def test_a_tower_quantised_by_bitsandbytes(options, kind, tmp_path):
    model, kinds = quantised(tmp_path, **options)
    assert {name for name in kinds if "Linear" in name} == {kind}
    expected = vision_features(model)
    assert distance(vision_features(wrapped(model, VERIFIED)), expected) < 5e-2
    assert only_encoder(model).stats.replays.total() == 1


def test_outliers_that_bitsandbytes_looks_for_on_the_host_are_refused(tmp_path):
    model, _ = quantised(tmp_path, load_in_8bit=True)
    with pytest.raises(vg.errors.SpecError, match=r"to 8 bits.*looks for outliers on the host.*\['model\.visual', "):
        wrapped(model)


# Pipelines


def processor():
    """A processor for images with a vocabulary of numbered words; that for videos would need torchvision."""
    folder = "transformers.models"
    images = pytest.importorskip(
        f"{folder}.qwen2_vl.image_processing_pil_qwen2_vl",
        reason="this transformers has no processor without torchvision",
    )
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    class ForImages(Qwen3VLProcessor):
        attributes = ("image_processor", "tokenizer")

        def check_argument_for_proper_class(self, name, argument):
            return type(argument)

    special = {"<|image_pad|>": IMAGE, "<|video_pad|>": VIDEO, "<|vision_start|>": START, "<|vision_end|>": END}
    words = {f"w{number}": number for number in range(WORDS)} | special | {"<pad>": WORDS, "<unk>": WORDS + 1}
    vocabulary = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, unk_token="<unk>", pad_token="<pad>", additional_special_tokens=[*special]
    )
    tokenizer.image_token, tokenizer.video_token = "<|image_pad|>", "<|video_pad|>"
    image_processor = images.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=1024
    )
    made = ForImages(image_processor=image_processor, tokenizer=tokenizer, video_processor=None)
    made.chat_template = (
        "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|> <|image_pad|> "
        "<|vision_end|> {% else %}{{ c['text'] }} {% endif %}{% endfor %}{% endfor %}"
    )
    return made


def test_a_pipeline_around_a_wrapped_model():
    import numpy as np
    from PIL import Image
    from transformers import pipeline

    image = Image.fromarray((np.random.default_rng(0).random((32, 48, 3)) * 255).astype("uint8"))
    asked = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "w5 w6"}]}]
    model = whole_model()
    run = pipeline("image-text-to-text", model=model, processor=processor())
    options = {"generate_kwargs": {"do_sample": False, "max_new_tokens": 6}, "return_full_text": False}
    expected = run(text=asked, **options)[0]["generated_text"]
    wrapped(model)
    assert run(text=asked, **options)[0]["generated_text"] == expected
    assert only_encoder(model).stats.replays.total() == 1
