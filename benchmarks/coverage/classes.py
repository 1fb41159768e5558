"""The classes of the table, by group."""

from transformers.models.auto import modeling_auto

MULTIMODAL, ENCODERS = "multimodal and speech", "encoders"

TASKS = {
    MULTIMODAL: (
        "MULTIMODAL_LM", "IMAGE_TEXT_TO_TEXT", "VISION_2_SEQ", "VISUAL_QUESTION_ANSWERING", "RETRIEVAL",
        "ZERO_SHOT_IMAGE_CLASSIFICATION", "MASK_GENERATION", "SPEECH_SEQ_2_SEQ", "CTC", "RNNT", "TDT",
        "AUDIO_CLASSIFICATION", "AUDIO_FRAME_CLASSIFICATION", "AUDIO_XVECTOR",
    ),
    ENCODERS: ("IMAGE", "TEXT_ENCODING"),
}  # fmt: skip
"""The tasks that transformers lists classes for, by group."""

KNOWN = {
    "text": (
        "AlbertModel", "BertModel", "CamembertModel", "DebertaModel", "DebertaV2Model", "DistilBertModel",
        "ElectraModel", "EuroBertModel", "GemmaModel", "JinaEmbeddingsV3Model", "ModernBertModel", "MPNetModel",
        "NomicBertModel", "Qwen3Model", "RobertaModel", "T5EncoderModel", "UMT5EncoderModel", "XLMRobertaModel",
    ),
    "vision": (
        "BeitModel", "CLIPVisionModel", "ConvNextModel", "ConvNextV2Model", "DeiTModel", "Dinov2Model",
        "DINOv3ConvNextModel", "DINOv3ViTModel", "HieraModel", "SiglipVisionModel", "SwinModel", "Swinv2Model",
        "VideoMAEModel", "ViTModel",
    ),
    "audio": (
        "ASTModel", "Data2VecAudioModel", "HubertModel", "ParakeetEncoder", "Wav2Vec2BertModel", "Wav2Vec2Model",
        "WavLMModel", "WhisperEncoder",
    ),
}  # fmt: skip
"""The forty encoders that people know best, by what they encode."""


def of_task(task: str) -> set[str]:
    """The classes of a task of transformers."""
    values = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}).values()
    return {name for value in values for name in (value if isinstance(value, tuple | list) else [value])}


def of_sound(task: str) -> set[str]:
    """The classes of a task whose encoders are those of classes that transcribe."""
    stems = tuple(name.removesuffix("ForCTC") for name in of_task("CTC"))
    return {name for name in of_task(task) if name.removesuffix("ForPreTraining") in stems}


def classes(group: str) -> list[str]:
    """The classes of a group, in the order of their names."""
    known = {name for names in KNOWN.values() for name in names} if group == ENCODERS else set()
    others = set(classes(MULTIMODAL)) if group == ENCODERS else set()
    known |= of_sound("PRETRAINING") if group == MULTIMODAL else set()
    return sorted(known.union(*map(of_task, TASKS[group])) - others, key=str.lower)
