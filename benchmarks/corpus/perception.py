"""Models of Transformers that see, hear, forecast, or join images and texts."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.corpus.hugging_face import (
    captioned,
    contrastive_loss,
    images,
    larger_images,
    own_loss,
    pairs,
    row,
    series,
    sound,
    spectra,
    spoken,
    token_loss,
)
from benchmarks.corpus.language import Table

_TWO = {"depths": (1, 1), "hidden_sizes": (8, 16)}
_WINDOWS = {"patch_size": 2, "window_size": 4, "depths": (1, 1), "num_heads": (2, 2)}
_FOUR = {"depths": (1, 1, 1, 1), "hidden_sizes": (8, 8, 16, 16)}
_STAGES = {**_FOUR, "num_attention_heads": (1, 1, 2, 2)}

VISION: Table = {
    "vit": ("ViTForImageClassification", {}),
    "deit": ("DeiTForImageClassification", {}),
    "beit": ("BeitForImageClassification", {}),
    "data2vec_vision": ("Data2VecVisionForImageClassification", {}),
    "swin": ("SwinForImageClassification", _WINDOWS),
    "swinv2": ("Swinv2ForImageClassification", {**_WINDOWS, "pretrained_window_sizes": (0, 0)}),
    "convnext": ("ConvNextForImageClassification", {**_TWO, "num_stages": 2, "patch_size": 4}),
    "convnextv2": ("ConvNextV2ForImageClassification", {**_TWO, "num_stages": 2, "patch_size": 4}),
    "resnet": ("ResNetForImageClassification", {**_TWO, "embedding_size": 8}),
    "regnet": ("RegNetForImageClassification", {**_TWO, "embedding_size": 8, "groups_width": 4}),
    "bit": ("BitForImageClassification", {**_TWO, "embedding_size": 8, "num_groups": 2}),
    "mobilenet_v1": ("MobileNetV1ForImageClassification", {"depth_multiplier": 0.25}),
    "mobilenet_v2": ("MobileNetV2ForImageClassification", {"depth_multiplier": 0.25}),
    "poolformer": ("PoolFormerForImageClassification", {**_FOUR, "patch_size": 16}),
    "dinov2": ("Dinov2ForImageClassification", {}),
    "dinov2_with_registers": ("Dinov2WithRegistersForImageClassification", {}),
    "segformer": ("SegformerForImageClassification", _STAGES),
    "pvt_v2": ("PvtV2ForImageClassification", _STAGES),
    "efficientnet": (
        "EfficientNetForImageClassification",
        {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
    ),
    "focalnet": (
        "FocalNetForImageClassification",
        {**_TWO, "patch_size": 4, "focal_levels": (1, 1), "focal_windows": (3, 3)},
    ),
    "ijepa": ("IJepaForImageClassification", {}),
    "siglip_vision": ("SiglipForImageClassification", {}),
    "clip_vision": ("CLIPForImageClassification", {}),
    "vit_msn": ("ViTMSNForImageClassification", {}),
}
LARGER: Table = {
    "mobilevit": (
        "MobileViTForImageClassification",
        {
            "hidden_sizes": (16, 24, 32),
            "neck_hidden_sizes": (4, 8, 8, 16, 16, 24, 32),
            "patch_size": 2,
            "image_size": 64,
        },
    ),
    "mobilevitv2": ("MobileViTV2ForImageClassification", {"width_multiplier": 0.25, "patch_size": 2, "image_size": 64}),
    "levit": (
        "LevitForImageClassification",
        {
            "image_size": 64,
            "patch_size": 16,
            "hidden_sizes": (16, 24, 32),
            "depths": (1, 1, 1),
            "num_attention_heads": (2, 2, 2),
            "key_dim": (4, 4, 4),
        },
    ),
    "cvt": ("CvtForImageClassification", {"embed_dim": (8, 16, 16), "num_heads": (1, 2, 2), "depth": (1, 2, 3)}),
    "pvt": ("PvtForImageClassification", {**_STAGES, "image_size": 64}),
    "swiftformer": (
        "SwiftFormerForImageClassification",
        {"depths": (1, 1, 1, 1), "embed_dims": (8, 8, 16, 16), "image_size": 64},
    ),
}

_EARS: dict[str, Any] = {
    "conv_dim": (8, 8),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 4),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
    "mask_time_length": 2,
}
AUDIO: Table = {
    "wav2vec2": ("Wav2Vec2ForSequenceClassification", _EARS),
    "hubert": ("HubertForSequenceClassification", _EARS),
    "wavlm": ("WavLMForSequenceClassification", _EARS),
    "sew": ("SEWForSequenceClassification", {**_EARS, "squeeze_factor": 2}),
    "unispeech": ("UniSpeechForSequenceClassification", _EARS),
    "unispeech_sat": ("UniSpeechSatForSequenceClassification", _EARS),
    "data2vec_audio": ("Data2VecAudioForSequenceClassification", {**_EARS, "conv_pos_kernel_size": 3}),
    "wav2vec2_conformer": (
        "Wav2Vec2ConformerForSequenceClassification",
        {**_EARS, "conv_depthwise_kernel_size": 3, "max_source_positions": 200},
    ),
    "wav2vec2_conformer_growing": (
        "Wav2Vec2ConformerForSequenceClassification",
        {**_EARS, "conv_depthwise_kernel_size": 3},
    ),
}
_AST = {"patch_size": 8, "frequency_stride": 4, "time_stride": 4, "max_length": 32, "num_mel_bins": 16}
_WHISPER = {"max_source_positions": 16, "suppress_tokens": None, "begin_suppress_tokens": None}
_HEARD = {"conv_channels": 16, "input_feat_per_channel": 8}

_SEEN = {"image_size": 32, "patch_size": 8}
_JOINED = {"vision_config": _SEEN, "text_config": {"pad_token_id": 0, "eos_token_id": 2}}
_AFTER = {"prediction_length": 4, "context_length": 12, "lags_sequence": (1, 2), "input_size": 1}
_PATCHES = {"context_length": 16, "patch_length": 4, "patch_stride": 4, "prediction_length": 4, "num_input_channels": 2}

ROWS = [
    *(row("vision", name, given, images) for name, given in VISION.items()),
    *(row("vision", name, given, larger_images) for name, given in LARGER.items()),
    *(row("audio", name, given, sound) for name, given in AUDIO.items()),
    row(
        "audio",
        "audio_spectrogram_transformer",
        ("ASTForAudioClassification", _AST),
        partial(spectra, 32, 16, "input_values"),
    ),
    row("audio", "whisper", ("WhisperForConditionalGeneration", _WHISPER), partial(spoken, 8, 32), loss=token_loss),
    row(
        "audio",
        "speech_to_text",
        ("Speech2TextForConditionalGeneration", _HEARD),
        partial(spoken, 32, 8),
        loss=token_loss,
    ),
    row("multimodal", "clip", ("CLIPModel", _JOINED), pairs, loss=contrastive_loss, fuse=False),
    row("multimodal", "siglip", ("SiglipModel", _JOINED), pairs, loss=contrastive_loss, fuse=False),
    row("multimodal", "chinese_clip", ("ChineseCLIPModel", _JOINED), pairs, loss=contrastive_loss, fuse=False),
    row(
        "multimodal",
        "llava",
        (
            "LlavaForConditionalGeneration",
            {
                "image_token_index": 63,
                "vision_config": {"model_type": "clip_vision_model", **_SEEN},
                "text_config": {"model_type": "llama"},
                "vision_feature_layer": -1,
            },
        ),
        captioned,
        loss=token_loss,
    ),
    row("time series", "patchtst", ("PatchTSTForPrediction", _PATCHES), partial(series, 16, 4, 2), loss=own_loss),
    row(
        "time series", "patchtsmixer", ("PatchTSMixerForPrediction", _PATCHES), partial(series, 16, 4, 2), loss=own_loss
    ),
]
