"""The tokenizer trained on the spot: any text comes back, digits stay single, special tokens are distinct."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from moekit.data.tokenizer import train_tokenizer
from moekit.errors import DataError


def test_any_text_comes_back(tokenizer):
    rng = np.random.default_rng(0)
    texts = ["", " ", "hello  world\n\n", "é 東京 🙂\x00\t", "<|endless|>"]
    texts += ["".join(chr(c) for c in rng.integers(1, 0x2FFF, 40)) for _ in range(50)]
    for text in texts:
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_digits_are_single_tokens(tokenizer, tmp_path):
    eager = train_tokenizer(["12 + 12 = 24 and 3412"] * 50, 280, tmp_path)
    assert eager.convert_ids_to_tokens(eager("3412").input_ids) == ["3", "4", "1", "2"]
    assert [tokenizer.decode([i]) for i in tokenizer("1234 + 56").input_ids if i] == [*"1234", " ", "+", " ", *"56"]


def test_special_tokens(tokenizer):
    ids = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id]
    ids += tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>", "<|system|>"])
    assert len(set(ids)) == 6 and max(ids) < len(tokenizer) <= 400
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|begin|><|user|>hi<|end|><|assistant|>"


def test_training_is_reproducible(tmp_path):
    texts = ["the cat sat on the mat", "the dog sat on the log"] * 3
    a, b = (train_tokenizer(texts, 290, tmp_path / name) for name in "ab")
    assert a.get_vocab() == b.get_vocab() == AutoTokenizer.from_pretrained(tmp_path / "a").get_vocab()
    assert len(a("the cat sat").input_ids) < len("the cat sat")  # there are merges


def test_refusals(tmp_path):
    with pytest.raises(DataError, match="vocab_size=261 is too small.*262"):
        train_tokenizer(["a"], 261, tmp_path)
    with pytest.raises(DataError, match="no text"):
        train_tokenizer([""], 300, tmp_path)
    assert len(train_tokenizer(["a"], 262, tmp_path)) == 262
