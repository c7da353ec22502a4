# SPDX-License-Identifier: Apache-2.0
"""The parts of a small Lumina-Image 2 checkpoint, in diffusers' own classes, untrained."""

from collections.abc import Iterable
from dataclasses import dataclass

from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
)
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from torch import nn
from transformers import Gemma2Config, Gemma2Model, PreTrainedTokenizerFast

from recipes.demo.image.scenes import SceneSource

LATENTS = 8
"""Channels of a latent pixel, which stands for 8 x 8 pixels."""

LATENT_SIZE = 16
WIDTH = 160
TEXT_WIDTH = 128
SHIFT = 3.0
"""Of the noise levels, in training and in drawing, towards more noise: layouts are made there."""

PAD, END, BEGIN = "<pad>", "<eos>", "<bos>"
PREAMBLE = (
    "You are an assistant designed to generate superior images with the superior degree of "
    "image-text alignment based on textual prompts or user prompts. <Prompt Start> "
)
"""What the pipeline puts before each prompt: one token here."""

SPARE_CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,;:!?'\"()-"


@dataclass(frozen=True)
class Parts:
    """What is trained."""

    vae: AutoencoderKL
    text_encoder: Gemma2Model
    transformer: Lumina2Transformer2DModel

    def named(self) -> dict[str, nn.Module]:
        return {
            "vae": self.vae,
            "text_encoder": self.text_encoder,
            "transformer": self.transformer,
        }


def untrained(vocabulary: int) -> Parts:
    """Weights are random, from PyTorch's default generator."""
    return Parts(_vae(), _text_encoder(vocabulary), _transformer())


def make_tokenizer(captions: Iterable[str]) -> PreTrainedTokenizerFast:
    """Lower-case BPE trained on the captions, whose words become one token each."""
    tokenizer = Tokenizer(models.BPE(unk_token=PAD))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[PAD, END, BEGIN],
        initial_alphabet=list(SPARE_CHARACTERS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(captions, trainer)
    tokenizer.add_tokens([AddedToken(PREAMBLE, normalized=False)])
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, begin)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        bos_token=BEGIN,
        padding_side="right",
        model_max_length=256,
    )


def caption_tokenizer(seed: int = 1) -> PreTrainedTokenizerFast:
    """Of the words that training captions are made of."""
    source = SceneSource(seed)
    return make_tokenizer(source.draw().caption for _ in range(5000))


def pipeline_of(
    parts: Parts, tokenizer: PreTrainedTokenizerFast, *, scaling: float, shift: float
) -> Lumina2Pipeline:
    """The pipeline; a latent is `(encoded - shift) * scaling`."""
    parts.vae.register_to_config(scaling_factor=scaling, shift_factor=shift)
    return Lumina2Pipeline(
        transformer=parts.transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        vae=parts.vae,
        text_encoder=parts.text_encoder,
        tokenizer=tokenizer,
    )


def _vae() -> AutoencoderKL:
    blocks = (16, 32, 32, 48)
    return AutoencoderKL(
        sample_size=LATENT_SIZE * 8,
        block_out_channels=blocks,
        layers_per_block=1,
        latent_channels=LATENTS,
        norm_num_groups=8,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        force_upcast=False,
        down_block_types=["DownEncoderBlock2D"] * len(blocks),
        up_block_types=["UpDecoderBlock2D"] * len(blocks),
    )


def _text_encoder(vocabulary: int) -> Gemma2Model:
    """The pipeline takes what goes into the last layer, which thus does nothing here."""
    return Gemma2Model(
        Gemma2Config(
            vocab_size=vocabulary,
            hidden_size=TEXT_WIDTH,
            intermediate_size=2 * TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            query_pre_attn_scalar=32,
            attn_logit_softcapping=None,
            max_position_embeddings=512,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=2,
        )
    )


def _transformer() -> Lumina2Transformer2DModel:
    transformer = Lumina2Transformer2DModel(
        sample_size=LATENT_SIZE,
        patch_size=2,
        in_channels=LATENTS,
        hidden_size=WIDTH,
        num_layers=7,
        num_refiner_layers=1,
        num_attention_heads=5,
        num_kv_heads=5,
        multiple_of=32,
        ffn_dim_multiplier=0.5,
        axes_dim_rope=(8, 12, 12),
        axes_lens=(300, 64, 64),
        cap_feat_dim=TEXT_WIDTH,
    )
    for block in [*transformer.noise_refiner, *transformer.layers]:
        nn.init.zeros_(block.norm1.linear.weight)
        nn.init.constant_(block.norm1.linear.bias, 0.0)
    nn.init.zeros_(transformer.norm_out.linear_2.weight)
    nn.init.zeros_(transformer.norm_out.linear_2.bias)
    return transformer
