"""The tokenizer as a value: BOS, batches, decoding, identity, chat templates, refusals."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from kvx.errors import KvxError
from kvx.models.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def words(**options: object) -> Tokenizer:
    backend = Backend(models.WordLevel({"[U]": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}, unk_token="[U]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer.from_tokenizers(backend, **options)


def test_case_25_bos_is_added_once_when_the_model_wants_it(zoo):
    llama = zoo["llama3"]
    assert llama.adds_bos and llama.bos_id == llama.token_id("<|begin_of_text|>")
    encoding = llama.encode("the fox")
    assert encoding.ids.tolist().count(llama.bos_id) == 1 and encoding.ids[0] == llama.bos_id
    assert encoding.offsets[0].tolist() == [0, 0] and encoding.prefix == 1
    without = llama.encode("the fox", bos=False)
    assert without.ids.tolist() == encoding.ids[1:].tolist() and without.prefix == 0
    twice = llama.encode("<|begin_of_text|>the fox")
    assert twice.ids.tolist() == encoding.ids.tolist() and twice.prefix == 1
    behind = llama.encode("<|begin_of_text|>the fox", bos=False)  # what follows a BOS that stands already
    assert behind.ids.tolist() == without.ids.tolist() and behind.prefix == 0
    assert behind.offsets.tolist() == (without.offsets + len("<|begin_of_text|>")).tolist()


def test_case_25_bos_is_not_added_where_the_model_does_not_want_it(zoo):
    gpt2 = zoo["gpt2"]
    assert not gpt2.adds_bos and gpt2.bos_id is not None
    assert gpt2.encode("the").prefix == 0
    asked = gpt2.encode("the", bos=True)
    assert asked.ids[0] == gpt2.bos_id and asked.prefix == 1
    assert asked.ids[1:].tolist() == gpt2.encode("the").ids.tolist()
    turn = zoo["smollm2"].encode("<|im_start|>the", bos=False)  # its BOS opens every turn: it stays
    assert turn.ids[0] == zoo["smollm2"].bos_id and not zoo["smollm2"].adds_bos


def test_prefix_is_bos_else_eos_else_nothing(zoo):
    assert zoo["llama3"].prefix_ids == (zoo["llama3"].bos_id,)
    assert zoo["gpt2"].prefix_ids == (zoo["gpt2"].bos_id,)
    assert zoo["qwen2"].bos_id is None and zoo["qwen2"].prefix_ids == (zoo["qwen2"].token_id("<|im_end|>"),)
    assert zoo["words"].prefix_ids == ()


def test_empty_text(zoo):
    assert zoo["gpt2"].encode("").ids.tolist() == [] and zoo["gpt2"].encode("").tokens.shape == (1, 0)
    assert zoo["gemma"].encode("").ids.tolist() == [zoo["gemma"].bos_id]


def test_encoding_shapes_and_types(zoo):
    encoding = zoo["gemma"].encode("the quick fox")
    assert encoding.ids.dtype == encoding.offsets.dtype == np.int32 and encoding.ends.dtype == np.float64
    assert encoding.offsets.shape == (len(encoding), 2) and encoding.ends.shape == (len(encoding),)
    assert encoding.tokens.shape == (1, len(encoding)) and encoding.tokens.dtype == jnp.int32
    assert repr(encoding) == f"Encoding({len(encoding)} tokens, 1 of them BOS, of 13 characters)"


def test_encode_batch_pads_with_minus_one(zoo):
    texts = ["the quick brown fox", "x", ""]
    tokens = zoo["gemma"].encode_batch(texts)
    rows = [zoo["gemma"].encode(t).ids.tolist() for t in texts]
    assert tokens.dtype == jnp.int32 and tokens.shape == (3, max(map(len, rows)))
    assert [[i for i in row if i >= 0] for row in tokens.tolist()] == rows
    assert zoo["gemma"].encode_batch(texts, length=32).shape == (3, 32)
    assert zoo["gemma"].encode_batch(texts, bos=False).tolist()[2] == [-1] * (tokens.shape[1] - 1)
    with pytest.raises(KvxError, match="more than length=2"):
        zoo["gemma"].encode_batch(texts, length=2)


def test_decode_drops_padding_and_special_tokens(zoo):
    gemma = zoo["gemma"]
    tokens = gemma.encode_batch(["the fox"], length=16)
    assert gemma.decode(tokens) == gemma.decode(tokens[0]) == gemma.decode(tokens[0].tolist()) == "the fox"
    assert gemma.decode(tokens, skip_special=False) == "<s>the fox"
    assert gemma.decode([]) == ""


@settings(max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from(["gpt2", "smollm2", "qwen2", "llama3", "nfkc_unigram"]))
def test_streamed_text_is_the_decoded_text(zoo, data, name):
    """Any token sequence, characters cut anywhere: the pieces join to the decoded text and are never replaced later."""
    tokenizer = zoo[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    assert "".join(tokenizer.decode_stream(ids)) == tokenizer.decode(ids)


def test_streaming_waits_for_whole_characters(zoo):
    ids = zoo["gpt2"].encode("a\U00020bb7b").ids.tolist()
    assert list(zoo["gpt2"].decode_stream(ids)) == ["a", "\U00020bb7", "b"]


def test_digest_follows_what_decides_tokens(zoo):
    assert words().digest == words().digest
    assert words(chat_template="x").digest == words().digest
    digests = {words().digest, words(bos="<s>").digest, words(bos="<s>", adds_bos=True).digest, zoo["gpt2"].digest}
    assert len(digests) == 4
    assert len(words().digest) == 64


def test_the_given_backend_is_left_alone():
    backend = Backend(models.WordLevel({"[U]": 0, "<s>": 1, "a": 2}, unk_token="[U]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    before = backend.to_str()
    tokenizer = Tokenizer.from_tokenizers(backend)
    assert backend.to_str() == before
    assert (tokenizer.bos_id, tokenizer.adds_bos) == (1, True)
    assert tokenizer.encode("a a a a").ids.tolist() == [1, 2, 2, 2, 2]


def test_an_eos_in_the_template_is_never_added():
    backend = Backend(models.WordLevel({"[U]": 0, "</s>": 1, "a": 2}, unk_token="[U]"))
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = Tokenizer.from_tokenizers(backend, eos="</s>")
    assert not tokenizer.adds_bos and tokenizer.encode("a").ids.tolist() == [2]


def test_repr_says_what_matters():
    text = repr(words(bos="<s>", eos="</s>", adds_bos=True))
    assert text.startswith("Tokenizer(5 tokens, BOS '<s>' (added), EOS '</s>', no chat template, ")


def test_it_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        words().bos_id = 3


def test_refusals(zoo):
    with pytest.raises(KvxError, match="takes one str, got list"):
        words().encode(["a"])
    with pytest.raises(KvxError, match="no BOS token"):
        words().encode("a", bos=True)
    with pytest.raises(KvxError, match="adds_bos=True needs a BOS"):
        words(adds_bos=True)
    with pytest.raises(KvxError, match="'<x>' is not in this tokenizer's vocabulary"):
        words(bos="<x>")
    with pytest.raises(KvxError, match="9 is not in this tokenizer's vocabulary"):
        words(eos=[2, 9])
    with pytest.raises(KvxError, match="one row of integer ids"):
        words().decode(jnp.zeros((2, 3), jnp.int32))
    with pytest.raises(KvxError, match="one row of integer ids"):
        words().decode([0.5])
    with pytest.raises(KvxError, match="not in this vocabulary of 5"):
        words().piece(77)
    with pytest.raises(KvxError, match="no chat template"):
        words().apply_chat([{"role": "user", "content": "a"}])
    backend = Backend(models.WordLevel({"[U]": 0, "<s>": 1, "<t>": 2, "a": 3}, unk_token="[U]"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    with pytest.raises(KvxError, match="starts texts with '<s>' but bos is '<t>'"):
        Tokenizer.from_tokenizers(backend, bos="<t>")
    both = [("<s>", 1), ("<t>", 2)]
    backend.post_processor = processors.TemplateProcessing(single="<s> <t> $A", special_tokens=both)
    with pytest.raises(KvxError, match="2 special tokens"):
        Tokenizer.from_tokenizers(backend)


def test_chat_template_renders_as_transformers_does(zoo):
    from transformers import PreTrainedTokenizerFast

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Où?\n"}]
    template = "{{ bos_token }}" + CHATML + "{% generation %}{{ messages | tojson }}{% endgeneration %}"
    ours = dataclasses.replace(zoo["smollm2"], chat_template=template)
    theirs = PreTrainedTokenizerFast(tokenizer_object=zoo["smollm2"].backend, bos_token="<|im_start|>")
    for prompt in (True, False):
        expected = theirs.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=prompt
        )
        assert ours.apply_chat(messages, add_generation_prompt=prompt) == expected


def test_chat_text_that_starts_with_bos_gets_no_second_one(zoo):
    llama = dataclasses.replace(zoo["llama3"], chat_template="{{ bos_token }}{{ messages[0].content }}")
    text = llama.apply_chat([{"role": "user", "content": "the fox"}])
    assert llama.encode(text).ids.tolist() == llama.encode("the fox").ids.tolist()


def test_chat_template_extra_variables_and_loop_controls():
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}{{ tone }}"
    )
    chat = words(chat_template=template)
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert chat.apply_chat(messages, tone="!") == "a!"
    assert len(words(chat_template="{{ strftime_now('%Y') }}").apply_chat(messages)) == 4


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "rejects these messages: roles must alternate"),
        ("{% for m in %}", "cannot be parsed"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].content + 1 }}", "failed on these messages"),
    ],
)
def test_bad_templates_end_in_one_sentence(template, message):
    with pytest.raises(KvxError, match=message):
        words(chat_template=template).apply_chat([{"role": "user", "content": "a"}])


@pytest.mark.parametrize("messages", ["hello", [], {"role": "user", "content": "a"}, ["a"], [{"content": "a"}]])
def test_malformed_messages_are_refused(messages):
    with pytest.raises(KvxError, match="a chat is a non-empty list of messages"):
        words(chat_template="x").apply_chat(messages)
