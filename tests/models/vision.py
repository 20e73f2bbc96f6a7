"""A tiny checkpoint with random weights that sees images: Idefics 3, which vLLM runs without torchvision."""

import shutil
from pathlib import Path

import torch
from transformers import AutoTokenizer, Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from vllm.model_executor.models.registry import ModelRegistry, _RegisteredModel

from replicas.tiny.model import VOCABULARY
from tests.models.families import BASE

IMAGE = "<image>"
OTHERS = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
"""Tokens that the processor needs beside it."""
SIZE, PATCH, SCALE = 56, 14, 2
PART_TOKENS = (SIZE // PATCH // SCALE) ** 2
"""Tokens of each part of an image in the prompt, without those around them."""

TEXT = {**BASE, "model_type": "llama", "vocab_size": VOCABULARY + 64}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIZE,
    "patch_size": PATCH,
    "initializer_range": 0.3,
}


def write_vision_checkpoint(directory: Path, tokenizer: Path) -> int:
    """Write the checkpoint, and let vLLM know its class. Return the id of the token that stands for an image.

    Args:
        directory: where to write it.
        tokenizer: a directory with the built-in model's tokenizer and chat template.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokens = AutoTokenizer.from_pretrained(tokenizer)
    tokens.add_special_tokens({"additional_special_tokens": [IMAGE, *OTHERS]})
    image = int(tokens.convert_tokens_to_ids(IMAGE))
    config = Idefics3Config(
        text_config=TEXT, vision_config=VISION, image_token_id=image, scale_factor=SCALE, pad_token_id=0
    )
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config).float()
    model.save_pretrained(directory)
    processor = Idefics3Processor(
        Idefics3ImageProcessorPil(
            # In two rows of two parts, and as a whole: without parts, the processor counts none at all.
            size={"longest_edge": 2 * SIZE},
            max_image_size={"longest_edge": SIZE},
        ),
        tokens,
        image_seq_len=PART_TOKENS,
    )
    processor.save_pretrained(directory)
    shutil.copyfile(tokenizer / "chat_template.jinja", directory / "chat_template.jinja")
    for architecture in model.config.architectures:
        known = ModelRegistry.models[architecture]
        if not isinstance(known, _RegisteredModel):
            # vLLM would import all of itself in another process, which takes 20 seconds.
            ModelRegistry.models[architecture] = _RegisteredModel.from_model_cls(known.load_model_cls())
    return image
