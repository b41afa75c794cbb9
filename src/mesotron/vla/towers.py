"""Pretrained eyes and ears: image and language models of Transformers as parts of the policy.

A folder or a name on the hub; safetensors only, no remote code. All their weights train, or LoRA
adapters, or none. A checkpoint keeps their configs and tokenizer, so that it is whole by itself.

Legend: B batch, C cameras, P tokens of an image, L words, D width of the policy, E of the tower.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from mesotron.config import PolicyConfig
from mesotron.vla.encoders import Sentence, Sight

VISION_FOLDER, LANGUAGE_FOLDER = "vision_tower", "language_tower"
# What most image models were trained with; those of others stand in their preprocessor_config.json.
_MEAN = _SPREAD = (0.5, 0.5, 0.5)
_PIXELS = 224


class VisionTower(nn.Module):
    """A pretrained image model, and a matrix from its width to the policy's.

    Args:
        tower: any model whose output has `last_hidden_state`, tokens or a map.
        width: D.
        num_cameras: C; a camera is told by a learned vector.
        mean, spread: of the pixels it was trained with, one for each colour.
    """

    def __init__(
        self,
        tower: Any,
        width: int,
        num_cameras: int,
        mean: tuple[float, ...] = _MEAN,
        spread: tuple[float, ...] = _SPREAD,
    ) -> None:
        super().__init__()
        self.tower, self.mean, self.spread = tower, tuple(mean), tuple(spread)
        found = getattr(tower.config, "image_size", None) or _PIXELS
        self.pixels = found if isinstance(found, int) else found[0]
        self.project = nn.Linear(tower_width(tower.config), width)
        self.positions = nn.Parameter(0.02 * torch.randn(num_cameras, 1, width))

    def forward(self, images: Tensor) -> Sight:
        """[B, C, 3, H, W] uint8 -> tokens [B, C * P, D]; a pretrained model looks by itself."""
        B = len(images)
        scaled = images.flatten(0, 1).float() / 255
        scaled = interpolate(scaled, size=(self.pixels, self.pixels), mode="bilinear")
        mean, spread = (scaled.new_tensor(x)[:, None, None] for x in (self.mean, self.spread))
        found = self.tower(pixel_values=(scaled - mean) / spread).last_hidden_state
        if found.ndim == 4:  # a convolutional model's map
            found = found.flatten(2).transpose(1, 2)
        X = self.project(found)
        X = X + self.positions.to(X.dtype).repeat(B, 1, 1)
        return Sight(X.reshape(B, -1, X.shape[-1]), None)

    def save_description(self, folder: Path) -> None:
        """Write what is needed to build the same part again, weights apart."""
        base_model(self.tower).config.save_pretrained(folder / VISION_FOLDER)


class LanguageTower(nn.Module):
    """A pretrained language model as an encoder, and a matrix from its width to the policy's.

    Args:
        tower: any model whose output has `last_hidden_state`.
        tokenizer: its own.
        width: D.
    """

    def __init__(self, tower: Any, tokenizer: Any, width: int) -> None:
        super().__init__()
        self.tower, self.tokenizer = tower, tokenizer
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        self.project = nn.Linear(tower_width(tower.config), width)

    def encode(self, texts: list[str]) -> Tensor:
        """Instructions as token numbers, [B, L], -1 where there is none."""
        found = self.tokenizer(texts, padding=True, return_tensors="pt", padding_side="right")
        return found["input_ids"].masked_fill(found["attention_mask"] == 0, -1)

    def forward(self, numbers: Tensor) -> Sentence:
        """[B, L] -> tokens [B, L, D]."""
        mask = numbers >= 0
        ids = numbers.masked_fill(~mask, self.tokenizer.pad_token_id)
        found = self.tower(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        return Sentence(self.project(found), mask)

    def save_description(self, folder: Path) -> None:
        """Write what is needed to build the same part again, weights apart."""
        base_model(self.tower).config.save_pretrained(folder / LANGUAGE_FOLDER)
        self.tokenizer.save_pretrained(folder / LANGUAGE_FOLDER)


def make_vision(
    config: PolicyConfig, width: int, num_cameras: int, folder: Path | None
) -> VisionTower:
    """The image tower of a config with its pretrained weights, or with those yet to be loaded of a
    checkpoint in `folder`."""
    assert config.vision_tower is not None
    place = config.vision_tower if folder is None else str(folder / VISION_FOLDER)
    tower = load_tower(place, weights=folder is None)
    tower = getattr(tower, "vision_model", tower)  # of a model of images and texts, its eyes
    found = _pixel_statistics(config.vision_tower)
    return VisionTower(_prepare(tower, config), width, num_cameras, *found)


def make_language(config: PolicyConfig, width: int, folder: Path | None) -> LanguageTower:
    """The same for the instruction."""
    from transformers import AutoTokenizer

    assert config.language_tower is not None
    place = config.language_tower if folder is None else str(folder / LANGUAGE_FOLDER)
    tower = load_tower(place, weights=folder is None)
    if tower.config.is_encoder_decoder:
        tower = tower.get_encoder()
    tower = getattr(tower, "text_model", tower)
    tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    return LanguageTower(_prepare(tower, config), tokenizer, width)


def load_tower(place: str, weights: bool) -> Any:
    """A model of Transformers in float32, with its weights or from its config alone."""
    try:
        from transformers import AutoConfig, AutoModel
    except ImportError as error:
        raise ValueError(
            "pretrained towers need Transformers: pip install 'mesotron[vla]'"
        ) from error
    safe: dict[str, Any] = {"trust_remote_code": False, "local_files_only": Path(place).is_dir()}
    try:
        if weights:
            return AutoModel.from_pretrained(
                place, dtype=torch.float32, use_safetensors=True, **safe
            )
        return AutoModel.from_config(AutoConfig.from_pretrained(place, **safe))
    except (OSError, ValueError, KeyError) as error:
        sentence = " ".join(str(error).split()).split(". ")[0]
        raise ValueError(f"{place}: Transformers cannot load this tower: {sentence}") from error


def tower_width(config: Any) -> int:
    """E: the width of a tower's tokens, by its config."""
    width = getattr(config, "hidden_size", None) or getattr(config, "d_model", None)
    if width is None:  # convolutional models have a width for each stage
        width = config.hidden_sizes[-1]
    return int(width)


def base_model(tower: Any) -> Any:
    """The model below LoRA's wrapper, if there is one."""
    return tower.get_base_model() if type(tower).__name__ == "PeftModel" else tower


def _prepare(tower: Any, config: PolicyConfig) -> Any:
    """Freeze a tower, or add LoRA adapters to it, as the config says."""
    if config.freeze_towers and config.lora:
        raise ValueError(
            f"--policy.lora {config.lora} trains what --policy.freeze-towers freezes: leave one out"
        )
    if config.freeze_towers:
        return tower.requires_grad_(False)
    if not config.lora:
        return tower
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError("--policy.lora needs PEFT: pip install 'mesotron[rlvr]'") from error
    lora = LoraConfig(
        r=config.lora,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]
        target_modules="all-linear",
    )
    return get_peft_model(tower, lora)


def _pixel_statistics(place: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and spread of the pixels that an image model was trained with, if it says."""
    from transformers.image_processing_utils import BaseImageProcessor

    try:
        found, _ = BaseImageProcessor.get_image_processor_dict(place)
    except OSError:
        return _MEAN, _SPREAD
    return tuple(found.get("image_mean", _MEAN)), tuple(found.get("image_std", _SPREAD))
