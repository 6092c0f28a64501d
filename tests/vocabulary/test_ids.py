"""Fields that name tokens say the new numbers, and no other field changes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur.vocabulary.ids import numbers_in, renumbered


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 1}),
        ({"eos_token_id": [5, 9, -1, 6]}, {"eos_token_id": [1, 2, -1, 6]}),
        ({"suppress_tokens": [5, 9]}, {"suppress_tokens": [1, 2]}),
        ({"begin_suppress_tokens": [9]}, {"begin_suppress_tokens": [2]}),
        ({"bad_words_ids": [[5, 9], [9]]}, {"bad_words_ids": [[1, 2], [2]]}),
        ({"forced_decoder_ids": [[5, 9], [9, None]]}, {"forced_decoder_ids": [[5, 2], [9, None]]}),
        ({"sequence_bias": [[[5, 9], 5.0]]}, {"sequence_bias": [[[1, 2], 5.0]]}),
        ({"lang_to_id": {"<|de|>": 9}}, {"lang_to_id": {"<|de|>": 2}}),
        ({"image_token_index": 9, "video_token_id": 5}, {"image_token_index": 2, "video_token_id": 1}),
        ({"mask_index": 9, "pad_index": 5}, {"mask_index": 2, "pad_index": 1}),
        ({"added_tokens_decoder": {"9": {"id": 9}}}, {"added_tokens_decoder": {"2": {"id": 9}}}),
        ({"task_specific_params": {"de": {"pad_token_id": 9}}}, {"task_specific_params": {"de": {"pad_token_id": 2}}}),
    ],
)
def test_forms_of_fields(values, expected):
    assert renumbered(values, {5: 1, 9: 2}) == expected
    assert numbers_in(values) & {5, 9}


OTHERS = ["vocab_size", "num_image_tokens", "max_new_tokens", "eos_token", "hidden_size", "id2label", "num_beams"]


@settings(max_examples=25)
@given(st.dictionaries(st.sampled_from(OTHERS), st.integers() | st.text()))
def test_other_fields_stay(values):
    assert renumbered(values, dict.fromkeys(range(99), 1)) == values
    assert numbers_in(values) == set()
