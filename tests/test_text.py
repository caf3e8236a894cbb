"Ids to text: deltas that join to the decode of all ids, stop strings as on the whole text, a flat cost."
import pytest
from hypothesis import HealthCheck, event, example, given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pagedlm.models import load_tokenizer
from pagedlm.text import Detokenizer, TextStream, find_stop, held_back

FFFD = "\ufffd"
CORPUS = ["Night owls are naïve, said the fox: never trust an owl.", "  def f(x):\n    return x  # two", "日本語の文章です。これは長い。",
          "ภาษาไทยไม่มีช่องว่าง", "👩‍👩‍👧‍👦 and 🏳️‍🌈 and 🇫🇷", "e\u0301 a\u0308 n\u0303 zażółć", "🦉🦉🦉 🦉 🦉", "the the the of of and"] * 3
TEXTS = sorted(set(CORPUS)) + ["", " ", "  lead", "x 🦉", "👩‍👩‍👧‍👦" * 5, "မြန်မာစာ", "ᚠᛇᚻ runes", "a\u0301\u0302\u0303", "\ufffd real", "𝒳𝒴"]
SPECIAL = ["<s>", "</s>", "<|tool|>"]

def wrapped(t):
    t.add_special_tokens([AddedToken(s, special=True) for s in SPECIAL])
    t.add_tokens([AddedToken("<plain>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False)

def gpt2_like(across=False):
    "Byte-level BPE; `across`: with tokens that hold the end of one character and the start of the next."
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not across), decoders.ByteLevel()
    t.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    if across:
        to = {b: c for b, c in zip(bytes_in_order(), bytes_alphabet())}
        t.add_tokens(["".join(to[b] for b in part) for part in (b"\xa6\x89\xf0\x9f", b"x\xf0", b"\xac\xe2\x82", b"\x80\x80\x80\x80\x80")])
    return wrapped(t)

def bytes_in_order():
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return printable + [b for b in range(256) if b not in printable]

def bytes_alphabet():
    rest = 256 - len([*range(33, 127), *range(161, 173), *range(174, 256)])
    return [chr(b) for b in bytes_in_order()[:256 - rest]] + [chr(256 + n) for n in range(rest)]

BYTES = [f"<0x{b:02X}>" for b in range(256)]

def llama_like():
    "SentencePiece's BPE as in Llama: ▁ for spaces, byte fallback, one leading space stripped."
    pieces = ["<unk>", *BYTES, "▁", "▁▁", "▁▁▁▁", *"etaoinshr", "▁t", "▁the", "▁owl", "owl", "s", "日", "本", "é", FFFD, "\u200d", "\u0301", "🦉"]
    vocab = {p: i for i, p in enumerate(dict.fromkeys(pieces))}
    merges = [("▁", "t"), ("▁", "▁")]
    t = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return wrapped(t)

def unigram(byte_fallback):
    "SentencePiece's unigram model: with T5's decoder, or with byte fallback before it."
    pieces = [("<unk>", 0.0), *((b, -9.0) for b in BYTES if byte_fallback), ("▁", -2.0), ("▁▁", -3.0)]
    pieces += [(c, -5.0) for c in sorted(set("".join(CORPUS)) - set(" 🦉語"))] + [("▁the", -1.5), ("▁owl", -1.5), ("ing", -2.5)]
    t = Tokenizer(models.Unigram(pieces, 0, byte_fallback))
    t.pre_tokenizer = pre_tokenizers.Metaspace()
    t.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]) if byte_fallback else decoders.Metaspace()
    return wrapped(t)

def wordpiece():
    t = Tokenizer(models.WordPiece({p: i for i, p in enumerate(["[UNK]", "owl", "##s", "the", ".", "n't", "'s", "##ing", "日"])}, unk_token="[UNK]"))
    t.pre_tokenizer, t.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=True)
    return wrapped(t)

MADE = {}
KINDS = {"smollm2": lambda: load_tokenizer("smollm2"), "gpt2": gpt2_like, "across": lambda: gpt2_like(True), "llama": llama_like,
         "unigram": lambda: unigram(False), "unigram-bytes": lambda: unigram(True), "wordpiece": wordpiece}

def made(kind):
    if kind not in MADE: MADE[kind] = KINDS[kind]()
    return MADE[kind]

def byte_ids(tok):
    "{byte: id} of the tokens that stand for one byte each."
    names = BYTES if tok.convert_tokens_to_ids("<0x41>") is not None and tok.decode([tok.convert_tokens_to_ids("<0x41>")]) == "A" \
        else [c for _, c in sorted(zip(bytes_in_order(), bytes_alphabet()))]
    ids = tok.convert_tokens_to_ids(names)
    return {b: i for b, i in enumerate(ids) if i is not None and i != tok.unk_token_id}

@st.composite
def answers(draw, kinds=tuple(KINDS), most=30):
    "(tokenizer, ids, skip): parts of texts, bytes whole and cut, special tokens, and any ids at all."
    tok = made(draw(st.sampled_from(kinds)))
    raw, ids = byte_ids(tok), []
    some = st.integers(0, len(tok) + 2) | st.integers(len(tok) - 12, len(tok) - 1)
    nasty = st.sampled_from(list("🦉€é字ก") + ["👩‍👧", " ", "\u0301"]).map(str.encode) | st.binary(max_size=6)
    def part(kind):
        if kind == "text": return tok(draw(st.sampled_from(TEXTS)), add_special_tokens=False)["input_ids"]
        if kind == "ids": return draw(st.lists(some, max_size=6))
        if kind == "special": return [draw(st.sampled_from(tok.convert_tokens_to_ids(SPECIAL)))] if kind and tok.unk_token_id != 0 or True else []
        data = draw(nasty)
        cut = data[draw(st.integers(0, 2)):] if draw(st.booleans()) else data[:len(data) - draw(st.integers(0, 2))]
        return [raw[b] for b in cut if b in raw]
    for kind in draw(st.lists(st.sampled_from(["text", "ids", "special", "bytes", "bytes", "bytes"]), max_size=8)): ids += part(kind)
    return tok, [i for i in ids if i is not None][:most], draw(st.booleans())

anything = settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))

# ---- without stop strings: the text is the decode of all ids ---------------------------------

@anything
@given(answers())
def test_the_deltas_join_to_the_decode_of_all_ids(answer):
    tok, ids, skip = answer
    d, stream, shown = Detokenizer(tok, skip), TextStream(tok, skip), ""
    whole = tok.decode(ids, skip_special_tokens=skip)
    for n, i in enumerate(ids, 1):
        shown += d.add(i)
        assert stream.add(i) is None and stream.text == shown and whole.startswith(shown)
        now = tok.decode(ids[:n], skip_special_tokens=skip)
        if d.run is None: assert shown == now or shown + FFFD == now      # only that much is held back
    assert shown + d.finish() == whole
    assert stream.finish() is None and stream.text == whole
