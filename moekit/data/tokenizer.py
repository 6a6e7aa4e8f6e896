"""A small tokenizer, trained on the spot, with a chat template that says which tokens are the assistant's."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import DataError

BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("system", "user", "assistant")

# every turn ends with EOS, so that a trained model stops by the token that `generate` looks for
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: str | Path, *, min_frequency: int = 0) -> Any:
    """Train a byte-level BPE tokenizer and save it as a Hugging Face folder; returns it.

    Every byte has a token, so any text can be encoded and decoded again. Digits stay single tokens: a small model
    that computes must see them one by one.
    Args:
        texts: what to learn the merges from.
        vocab_size: at least 262 (256 bytes and 6 special tokens); fewer come out if the texts have no more merges.
        folder: made if need be; usable with `AutoTokenizer.from_pretrained`.
        min_frequency: pairs that occur more rarely are not merged. A high one merges the words that every text repeats
            and leaves rare words in letters, which a small model needs to spell.
    Raises DataError: the vocabulary is too small, or there is no text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, BOS, EOS, *(f"<|{role}|>" for role in ROLES)]
    if vocab_size < 256 + len(special):
        raise DataError(f"vocab_size={vocab_size} is too small; 256 bytes and 6 special tokens take 262")
    texts = [text for text in texts if text]
    if not texts:
        raise DataError("there is no text to train the tokenizer on")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=min_frequency, special_tokens=special, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, additional_special_tokens=special[3:],
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    made.chat_template = TEMPLATE.read_text().strip()
    made.save_pretrained(str(folder))
    return made
