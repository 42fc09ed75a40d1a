"""A Llama of a few thousand weights with a tokenizer of single characters, as a model directory."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ALPHABET = [chr(code) for code in range(32, 127)] + ["\n", "中", "文"]
TEXT = "the quick brown fox jumps over the lazy dog. " * 40


def tiny_model(directory: Path, *, seed: int = 0) -> Path:
    """Writes the model; its weights are random but not alike, so that layers and columns differ in size."""
    vocabulary = {"<unk>": 0, "</s>": 1} | {character: number for number, character in enumerate(ALPHABET, start=2)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = Fuse()
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                spread = torch.rand(parameter.shape[1]) * 2 + 0.1
                parameter.copy_(torch.randn_like(parameter) * spread * (0.5 if "embed" in name else 0.15))
    model.half().save_pretrained(directory)
    fast.save_pretrained(directory)
    return directory
