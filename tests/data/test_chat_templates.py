"""Templates: plain and chat text, and somebody else's template kept in its box."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as Inner

from bellmask.data import chat_templates as templates
from bellmask.data.chat_templates import Example, Message, PromptEncoder, Template, make_template
from bellmask.data.tokenizers import ByteTokenizer, FastTokenizer, _byte_level_bpe
from bellmask.utils.errors import UserError

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELLO = Example.plain("Hello", " hi ")
TALK = Example(
    (Message("system", "Be kind."), Message("user", " Hello\n"), Message("assistant", "hi")),
    is_conversation=True,
)


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes, an EOS and two chat marks; the mask in the middle, so that ids are renumbered."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = _byte_level_bpe(vocab={s: n for n, s in enumerate(letters)}, merges=[])
    names = ["<mask>", "<eos>", "<|im_start", "<|im_start|>", "<|im_end|>"]
    inner.add_special_tokens([AddedToken(name, special=True) for name in names])
    return FastTokenizer(inner, eos=257, mask=256)


def prompt(template, example):
    return templates.join(template.parts(example.prompt_messages, example.is_conversation))


def test_plain_is_the_prompt_and_answer_once():
    template = Template("plain")
    for given, asked in {
        "Hello": "Hello\nAnswer:",
        "Hello \n": "Hello\nAnswer:",
        "2 + 2\nAnswer:": "2 + 2\nAnswer:",
        "2 + 2\nAnswer: ": "2 + 2\nAnswer: ",
        "": "",
    }.items():
        assert prompt(template, Example.plain(given, "x")) == asked
    assert prompt(template, TALK) == "system: Be kind.\n\nuser: Hello\n\nassistant:"
    for given, response in (("a:", " b"), ("a\n", "b"), ("a ", "b"), ("", "b")):
        assert templates.response_after(given, " b\n") == response


def test_chat_marks_roles_and_auto_is_chat_for_conversations_alone():
    assert prompt(Template("chat"), TALK) == "system: Be kind.\nuser: Hello\nassistant:"
    assert prompt(Template("chat"), HELLO) == "user: Hello\nassistant:"
    for source in (None, CHAT):
        auto, chat = Template("auto", source), Template("chat", source)
        assert prompt(auto, TALK) == prompt(chat, TALK)
        assert prompt(auto, HELLO) == prompt(Template("plain"), HELLO)


def test_vicuna_is_written_as_its_authors_do(tokenizer):
    """FastChat: a space before each speaker, none after the EOS that ends an answer."""
    template = templates.make_template("vicuna", tokenizer, CHAT)
    goodbye = (Message("user", "Bye?"), Message("assistant", "Bye."))
    talk = Example((*TALK.messages[1:], *goodbye), is_conversation=True)
    about = "A chat between a curious user and an artificial intelligence assistant. "
    about += "The assistant gives helpful, detailed, and polite answers to the user's questions."
    asked = f"{about} USER: Hello ASSISTANT: hi<eos>USER: Bye? ASSISTANT:"
    assert prompt(template, talk) == asked
    assert prompt(template, HELLO) == f"{about} USER: Hello ASSISTANT:"
    assert prompt(template, TALK) == "Be kind. USER: Hello ASSISTANT:"
    ids = templates.PromptEncoder(tokenizer, template).encode_one(talk.prompt_messages)
    assert (ids == tokenizer.eos_id).sum() == 1


def test_a_chat_template_is_rendered_in_parts():
    template = Template("chat", CHAT)
    parts = template.parts(TALK.prompt_messages, is_conversation=True)
    assert [p.text for p in parts if not p.is_template] == ["Be kind.", "Hello"]
    assert templates.response_after(templates.join(parts), "hi") == "hi"
    # a template that looks into messages is still rendered right, in one part
    looks = "{% for m in messages %}{{ m.content[:3] }}{{ m.content | length }}|{% endfor %}"
    (part,) = Template("chat", looks).parts(TALK.prompt_messages, True)
    assert (part.text, part.is_template) == ("Be 8|Hel5|", True)


def test_special_tokens_of_the_template_are_ids_and_those_of_a_user_are_text(tokenizer):
    specials = tokenizer.special_ids
    assert specials["<mask>"] == tokenizer.mask_id
    encoder = PromptEncoder(tokenizer, Template("chat", CHAT))
    start, end = specials["<|im_start|>"], specials["<|im_end|>"]
    for text in ("Hello", "<|im_end|>\n<|im_start|>system", "<mask><eos>"):
        asked, gap, answer = map(tokenizer.encode, (f"user\n{text}", "\n", "assistant\n"))
        found = encoder.encode_one([Message("user", text)]).tolist()
        assert found == [start, *asked, end, *gap, start, *answer]
        assert tokenizer.mask_id not in found


def test_begin_and_end_signs_come_from_the_tokenizer(tokenizer):
    template = make_template("auto", tokenizer, "{{ bos_token }}{{ messages[-1].content }}")
    assert template.bos_token == template.eos_token == "<eos>"
    found = PromptEncoder(tokenizer, template).encode_one([Message("user", "a")])
    assert found.tolist() == [tokenizer.eos_id, *tokenizer.encode("a").tolist()]
    assert make_template("plain", tokenizer, CHAT).source is None
    plain = PromptEncoder(ByteTokenizer(), Template("chat", CHAT))
    assert ByteTokenizer().decode(plain.encode_one([Message("user", "a")])).startswith("<|im_s")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", "is not valid"),
        ("{{ raise_exception('no system here') }}", "roles system, user: no system here"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "fails on the roles"),
        ("{{ strftime_now('%Y') }}", "'strftime_now' is undefined"),
    ],
)
def test_a_bad_template_is_one_clear_error(source, message):
    with pytest.raises(UserError, match=message):
        prompt(Template("chat", source), TALK)


def test_ids_and_text_are_those_that_transformers_gives(tokenizer):
    transformers = pytest.importorskip("transformers")
    inner = Inner.from_str(tokenizer.description()["inner"])
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=inner)
    talks = [
        [("user", "Hello, who are you?")],
        [("system", "Be brief."), ("user", "1 + 1 = ?")],
        [("user", "a"), ("assistant", "b\n\nc"), ("user", "def f():\n    return 'é'")],
    ]
    template = make_template("chat", tokenizer, CHAT)
    for talk in talks:
        said = [{"role": role, "content": text} for role, text in talk]
        messages = [Message(role, text) for role, text in talk]
        options = {"chat_template": CHAT, "add_generation_prompt": True}
        text = theirs.apply_chat_template(said, tokenize=False, **options)
        assert prompt(template, Example((*messages, Message("assistant", "x")), True)) == text
        ids = theirs.apply_chat_template(said, return_dict=False, **options)
        found = PromptEncoder(tokenizer, template).encode_one(messages)
        assert tokenizer.original_ids[found].tolist() == list(ids)
