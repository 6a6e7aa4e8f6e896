"""Tokenizers for the data tests: one with real merges, and toy ones whose ids are the numbers in the text."""

import pytest
import torch

from moekit.data.source import CHATS, load_examples
from moekit.data.tokenizer import train_tokenizer

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [m["content"] for e in load_examples(CHATS) for m in e.messages]
    train_tokenizer(texts, 400, folder)
    return folder


@pytest.fixture
def tokenizer(tokenizer_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture
def number_tokenizer():
    """`number_tokenizer(template)`: the word "17" has id 17; words are split at white space; 0..99."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def make(template, special=(), **names):
        words = Tokenizer(models.WordLevel({str(i): i for i in range(100)}, unk_token="99"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="99", **names)
        if special:
            made.add_special_tokens({"additional_special_tokens": list(special)})
        made.chat_template = template
        return made

    return make


SPECIAL = ["<|im_start|>", "<|im_end|>", "<|bot|>", "<|header|>", "<|/header|>", "<|eot|>", "<s>", "</s>"]
SPECIAL += ["<|turn|>", "<|/turn|>"]


@pytest.fixture
def with_template(tokenizer):
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})

    def make(template):
        tokenizer.chat_template = template
        return tokenizer

    return make
