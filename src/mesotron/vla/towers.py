"""Pretrained image and language models of Transformers as parts of the policy.

Safetensors only, no remote code. B batch, C cameras, P tokens per image, L words, D policy width.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from mesotron.config import PolicyConfig
from mesotron.models.adapters import LORA_ALPHA
from mesotron.runs.extras import require
from mesotron.vla.encoders import ImageTokens, TextTokens

PREPROCESSOR = "preprocessor_config.json"
VISION_FOLDER = "vision_tower"
LANGUAGE_FOLDER = "language_tower"
PIXEL_MEAN = PIXEL_STD = (0.5, 0.5, 0.5)  # without a preprocessor_config.json
IMAGE_SIZE = 224


class VisionTower(nn.Module):
    """A pretrained image model and a projection to the policy's width; `preprocessor` is the
    model's preprocessor_config.json. Cameras are distinguished by a learned vector."""

    def __init__(
        self, tower: Any, width: int, num_cameras: int, preprocessor: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.tower = tower
        self.mean = tuple(preprocessor.get("image_mean", PIXEL_MEAN))
        self.std = tuple(preprocessor.get("image_std", PIXEL_STD))
        size = getattr(tower.config, "image_size", None) or IMAGE_SIZE
        self.pixels = size if isinstance(size, int) else size[0]
        self.project = nn.Linear(_width(tower.config), width)
        self.positions = nn.Parameter(0.02 * torch.randn(num_cameras, 1, width))

    def forward(self, images: Tensor) -> ImageTokens:
        """[B, C, 3, H, W] uint8 -> tokens [B, C * P, D]."""
        B = len(images)
        scaled = images.flatten(0, 1).float() / 255
        scaled = interpolate(scaled, size=(self.pixels, self.pixels), mode="bilinear")
        mean, std = (scaled.new_tensor(x)[:, None, None] for x in (self.mean, self.std))

        features = self.tower(pixel_values=(scaled - mean) / std).last_hidden_state
        if features.ndim == 4:  # the feature map of a convolutional model
            features = features.flatten(2).transpose(1, 2)

        X = self.project(features)
        X = X + self.positions.to(X.dtype).repeat(B, 1, 1)

        return ImageTokens(X.reshape(B, -1, X.shape[-1]), None)

    def save_description(self, folder: Path) -> None:  # without the weights
        self.tower.config.save_pretrained(folder / VISION_FOLDER)
        pixels = {"image_mean": list(self.mean), "image_std": list(self.std)}
        (folder / VISION_FOLDER / PREPROCESSOR).write_text(json.dumps(pixels))


class LanguageTower(nn.Module):
    def __init__(self, tower: Any, tokenizer: Any, width: int, whole: Any) -> None:
        super().__init__()

        # `whole` is the config of the model that has the tower: AutoModel knows few text towers.
        self.tower = tower
        self.tokenizer = tokenizer
        self.whole = whole

        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token

        self.project = nn.Linear(_width(tower.config), width)

    def encode(self, texts: list[str]) -> Tensor:
        """Instructions as token ids, [B, L], -1 for padding."""
        batch = self.tokenizer(
            texts,
            padding=True,
            return_tensors="pt",
            padding_side="right",
        )
        return batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -1)

    def forward(self, ids: Tensor) -> TextTokens:
        mask = ids >= 0
        ids = ids.masked_fill(~mask, self.tokenizer.pad_token_id)
        output = self.tower(input_ids=ids, attention_mask=mask.long())

        return TextTokens(self.project(output.last_hidden_state), mask)

    def save_description(self, folder: Path) -> None:
        self.whole.save_pretrained(folder / LANGUAGE_FOLDER)
        self.tokenizer.save_pretrained(folder / LANGUAGE_FOLDER)


def load_vision_tower(
    config: PolicyConfig, width: int, num_cameras: int, checkpoint: Path | None
) -> VisionTower:
    """The image tower with pretrained weights, or without weights if `checkpoint` describes it."""
    from transformers.image_processing_utils import BaseImageProcessor

    name = config.vision_tower
    assert name is not None

    place = name if checkpoint is None else str(checkpoint / VISION_FOLDER)
    tower = _load_model(place, checkpoint)
    tower = getattr(tower, "vision_model", tower)  # of an image-text model

    is_own = checkpoint is not None and (checkpoint / VISION_FOLDER / PREPROCESSOR).is_file()
    try:
        source = place if is_own else name  # older checkpoints do not have their own
        preprocessor, _ = BaseImageProcessor.get_image_processor_dict(source)
    except OSError:
        preprocessor = {}

    return VisionTower(_freeze_or_adapt(tower, config), width, num_cameras, preprocessor)


def load_language_tower(config: PolicyConfig, width: int, checkpoint: Path | None) -> LanguageTower:
    from transformers import AutoTokenizer

    assert config.language_tower is not None

    if checkpoint is None:
        place = config.language_tower
    else:
        place = str(checkpoint / LANGUAGE_FOLDER)

    model = _load_model(place, checkpoint)
    tower = model.get_encoder() if model.config.is_encoder_decoder else model
    tower = getattr(tower, "text_model", tower)
    tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)

    return LanguageTower(_freeze_or_adapt(tower, config), tokenizer, width, model.config)


def _load_model(place: str, checkpoint: Path | None) -> Any:
    from transformers import AutoConfig, AutoModel

    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": Path(place).is_dir()}
    try:
        if checkpoint is not None:
            return AutoModel.from_config(AutoConfig.from_pretrained(place, **options))
        options |= {"dtype": torch.float32, "use_safetensors": True}
        return AutoModel.from_pretrained(place, **options)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split()).split(". ")[0]
        raise ValueError(f"Transformers cannot load the tower {place}: {reason}") from error


def _freeze_or_adapt(tower: Any, config: PolicyConfig) -> Any:
    if config.freeze_towers and config.lora:
        raise ValueError("--policy.lora and --policy.freeze-towers exclude each other")
    if config.freeze_towers:
        return tower.requires_grad_(False)
    if not config.lora:
        return tower

    require("rlvr", ["peft"], "--policy.lora")
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        r=config.lora,
        lora_alpha=LORA_ALPHA,
        target_modules="all-linear",
    )

    return get_peft_model(tower, lora)


def _width(config: Any) -> int:
    width = getattr(config, "hidden_size", None) or getattr(config, "d_model", None)
    return int(width or config.hidden_sizes[-1])  # convolutional models have one per stage
