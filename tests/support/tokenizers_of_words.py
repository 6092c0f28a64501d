"""A tokenizer of one token a word, and the words."""

WORDS = """the secateur is a small shear a gardener prunes roses with and the hedge is cut by another tool""".split()  # noqa: SIM905


VOCABULARY = ["<unk>", "<s>", "</s>", *dict.fromkeys(WORDS)]


def write_tokenizer(folder):
    """One token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    numbers = {word: number for number, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)  # fmt: skip
