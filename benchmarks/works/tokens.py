"""Sub-word tokens by Hugging Face's `tokenizers`, whose batches are split among threads of its own (Rust's)."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.utils.data import Dataset

from benchmarks.tables import data_file, write_whole
from benchmarks.works import ENDLESS
from benchmarks.works.text import Corpus, corpus

PASSAGES, LENGTH = 16, 128
VOCABULARY = 8_000
TRAINED_ON = 1_000
"""Documents that the vocabulary is learned from."""


class Passages(Dataset[torch.Tensor]):
    """Sample: int64 of shape (16, 128): tokens of 16 documents, encoded in one call."""

    def __init__(self) -> None:
        self.corpus = corpus()
        self.tokenizer = _tokenizer(self.corpus)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> torch.Tensor:
        documents = [self.corpus.document(PASSAGES * index + number) for number in range(PASSAGES)]
        return torch.tensor([found.ids for found in self.tokenizer.encode_batch(documents)])


def _tokenizer(learned_from: Corpus) -> Tokenizer:
    """The trained tokenizer, from its file if there is one."""
    path = data_file(f"reference-tokens-{learned_from.documents}.json")
    if not path.exists():
        write_whole(path, [_trained(learned_from).to_str().encode()])
    return Tokenizer.from_file(str(path))


def _trained(learned_from: Corpus) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["?"], show_progress=False)
    tokenizer.train_from_iterator((learned_from.document(number) for number in range(TRAINED_ON)), trainer)
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    return tokenizer
