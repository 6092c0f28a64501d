"""Small tokenizers of every kind, trained here, small models with their vocabulary, and the law that holds for both."""

import json

import numpy as np
import torch

TEXT = """The secateur is a small shear with which a gardener prunes roses, hedges and vines: naïve cuts heal badly.
    def prune(rose, amount=0.5):
        return [cane for cane in rose if cane.vigour > amount]

Двенадцать роз, three hedges; 薔薇を剪定する。 Pruning, pruned, prunes, pruner; un-pruned hedges grow 10 cm a week.
It's 3.14159 and 2,718 — “quoted” text\twith tabs, emoji 🌹🌿 and accents: é à ü ß ø.
""" * 3  # fmt: skip
BPES = ("byte level", "ignore merges", "byte fallback", "characters", "suffix")
KINDS = (*BPES, "Unigram", "Unigram bytes", "WordPiece", "WordLevel")
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]


def trained(kind, size=400, text=TEXT):
    """A tokenizer, as the `tokenizers` library has it."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    lines = text.split("\n")
    chosen = {"vocab_size": size, "special_tokens": SPECIAL, "show_progress": False}
    if kind in ("byte level", "ignore merges"):
        tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "ignore merges"))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer.train_from_iterator(lines, trainers.BpeTrainer(initial_alphabet=alphabet, **chosen))
    elif kind in ("byte fallback", "characters"):
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if kind == "byte fallback" else []
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=kind == "byte fallback"))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        chosen["vocab_size"] += len(bytes_)
        chosen["special_tokens"] = [*SPECIAL, *bytes_]
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        tokenizer.train_from_iterator(lines, trainers.BpeTrainer(**chosen))
        values = json.loads(tokenizer.to_str())
        values["added_tokens"] = [each for each in values["added_tokens"] if each["content"] in SPECIAL]
        tokenizer = Tokenizer.from_str(json.dumps(values))
    elif kind == "suffix":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", continuing_subword_prefix="@@", end_of_word_suffix="</w>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.BpeTrainer(continuing_subword_prefix="@@", end_of_word_suffix="</w>", **chosen)
        tokenizer.train_from_iterator(lines, trainer)
    elif kind.startswith("Unigram"):
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if kind == "Unigram bytes" else []
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **chosen)
        tokenizer.train_from_iterator(lines, trainer)
        if bytes_:
            values = json.loads(tokenizer.to_str())
            values["model"]["vocab"][4:4] = [[each, 0.0] for each in bytes_]
            values["model"]["byte_fallback"] = True
            tokenizer = Tokenizer.from_str(json.dumps(values))
    elif kind == "WordPiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        tokenizer.train_from_iterator(lines, trainers.WordPieceTrainer(**chosen))
    else:
        tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.train_from_iterator(lines, trainers.WordLevelTrainer(**chosen))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.add_special_tokens(["<|rose|>"])
    return tokenizer


def wrapped(kind, **more):
    """The same as transformers has it."""
    from transformers import PreTrainedTokenizerFast

    named = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=trained(kind, **more), **named)


def model_of(family, size):
    """A small model of so many tokens; some are longer or wider by as many on purpose."""
    import transformers

    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    llama = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    bert = {"hidden_size": 16, "intermediate_size": size, "num_hidden_layers": 2, "num_attention_heads": 2}
    gpt = {"n_embd": 16, "n_layer": 2, "n_head": 2}
    both = {"d_model": 16, "decoder_start_token_id": 0}
    sizes = {"layers": 1, "attention_heads": 2, "ffn_dim": 24}
    bart = {**both, **{f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in sizes.items()}}
    made = {
        "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**gpt, "n_positions": size}),
        "gptj": ("GPTJForCausalLM", "GPTJConfig", {**gpt, "rotary_dim": 4}),
        "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", llama),
        "llama": ("LlamaForCausalLM", "LlamaConfig", {**llama, "tie_word_embeddings": False}),
        "tied": ("LlamaForCausalLM", "LlamaConfig", {**llama, "tie_word_embeddings": True, "intermediate_size": size}),
        "bert": ("BertForMaskedLM", "BertConfig", bert),
        "encoder": ("BertModel", "BertConfig", bert),
        "roberta": ("RobertaForMaskedLM", "RobertaConfig", {**bert, "max_position_embeddings": size}),
        "t5": (
            "T5ForConditionalGeneration",
            "T5Config",
            {**both, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2},
        ),
        "bart": (
            "BartForConditionalGeneration",
            "BartConfig",
            {**bart, "max_position_embeddings": size, "forced_eos_token_id": 2},
        ),
    }
    kind, config, more = made[family]
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(vocab_size=size, **ids, **more)).eval()


def renamed_alike(old, new, order, texts, *, special=True):
    """How many texts have only tokens that stay; of these both tokenizers make the same, renamed."""
    numbers = {int(number): at for at, number in enumerate(order)}
    right = 0
    for text in texts:
        before = old.encode(text, add_special_tokens=special).ids
        if all(number in numbers for number in before):
            assert new.encode(text, add_special_tokens=special).ids == [numbers[number] for number in before], text
            right += 1
    return right


def hidden_of(model, ids):
    """All that a model has inside of some tokens, and its logits if it has any."""
    with torch.no_grad():
        more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        out = model(input_ids=ids, output_hidden_states=True, **more)
    named = {key: value for key, value in out.items() if "hidden_state" in key}
    inside = [each for value in named.values() for each in (value if isinstance(value, tuple) else (value,))]
    return inside, out.get("logits")


def same_inside(old, new, order, *, length=9):
    """The hidden states of tokens that stay are the same bit for bit, their logits all but for the last bits."""
    rows = old.get_input_embeddings().weight.shape[0]
    stays = np.array([number for number in order if number < rows])
    chosen = torch.from_numpy(np.random.default_rng(0).integers(len(stays), size=(2, length)))
    before, logits = hidden_of(old, torch.from_numpy(stays)[chosen])
    after, smaller = hidden_of(new, chosen)
    assert before
    assert len(before) == len(after)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other)
    assert (logits is None) == (smaller is None)
    if logits is not None:
        torch.testing.assert_close(smaller, logits[..., torch.from_numpy(stays)])
