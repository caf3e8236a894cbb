"Ids to text: deltas that join to the decode of all ids, stop strings as on the whole text, a flat cost."
import pytest
from hypothesis import HealthCheck, event, given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pagedlm.models import load_tokenizer
from pagedlm.text import Detokenizer, TextStream, find_stop, held_back

FFFD = "\ufffd"
CORPUS = ["Night owls are naïve, said the fox: never trust an owl.", "  def f(x):\n    return x  # two", "日本語の文章です。これは長い。",
          "ภาษาไทยไม่มีช่องว่าง", "👩‍👩‍👧‍👦 and 🏳️‍🌈 and 🇫🇷", "e\u0301 a\u0308 n\u0303 zażółć", "🦉🦉🦉 🦉 🦉", "the the the of of and"] * 3
TEXTS = sorted(set(CORPUS)) + ["", " ", "  lead", "x 🦉", "👩‍👩‍👧‍👦" * 5, "မြန်မာစာ", "ᚠᛇᚻ runes", "a\u0301\u0302\u0303", "\ufffd real", "𝒳𝒴"]
ACROSS = b"\xa6\x89\xf0\x9f", b"x\xf0", b"\xac\xe2\x82", b"\x80\x80\x80\x80\x80"
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
        t.add_tokens(["".join(byte_letters()[b] for b in part) for part in ACROSS])
    return wrapped(t)

def byte_letters():
    "The letter that a byte-level vocabulary writes for each byte, in the order of the bytes."
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(b if b in printable else next(others)) for b in range(256)]

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
    fallback = tok.decode([tok.convert_tokens_to_ids("<0x41>") or 0]) == "A"
    ids = tok.convert_tokens_to_ids(BYTES if fallback else byte_letters())
    return {b: i for b, i in enumerate(ids) if i is not None and i != tok.unk_token_id}

def drawn_text(draw, tok): return tok(draw(st.sampled_from(TEXTS)), add_special_tokens=False)["input_ids"]

def drawn_ids(draw, tok):
    "Any ids: also ones that the vocabulary does not have, and often an added token."
    return draw(st.lists(st.integers(0, len(tok) + 2) | st.integers(len(tok) - 12, len(tok) - 1), max_size=6))

def drawn_bytes(draw, tok):
    "Byte tokens: a character, whole or cut at an end, or just bytes."
    raw = byte_ids(tok)
    data = draw(st.sampled_from(["🦉", "€", "é", "字", "ก", "👩‍👧", " ", "A", "\u0301"]).map(str.encode) | st.binary(max_size=6))
    first, last = draw(st.sampled_from([(0, 0), (0, 0), (0, 1), (0, 2), (1, 0), (2, 0)]))
    return [raw[b] for b in data[first:len(data) - last] if b in raw]

def drawn_specials(draw, tok):
    "Special tokens, sometimes more than a window holds."
    return [tok.convert_tokens_to_ids("</s>" if tok is not MADE.get("smollm2") else "<|im_end|>")] * draw(st.sampled_from([1, 1, 5, 10]))

@st.composite
def answers(draw, kinds=tuple(KINDS), most=30):
    "(tokenizer, ids, skip): parts of texts, bytes whole and cut, special tokens, and any ids at all."
    tok = made(draw(st.sampled_from(kinds)))
    parts = draw(st.lists(st.sampled_from([drawn_text, drawn_ids, drawn_bytes, drawn_bytes, drawn_specials]), max_size=8))
    ids = [i for part in parts for i in part(draw, tok)]
    return tok, ids[:most], draw(st.booleans())

anything = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

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

@pytest.mark.parametrize("kind", KINDS)
def test_whole_characters_and_their_spaces(kind):
    "What the tokenizer writes for a text, with its spaces; no replacement character at any time."
    tok = made(kind)
    for text in TEXTS:
        for special in (False, True):
            ids = tok(text, add_special_tokens=False)["input_ids"]
            if special: ids = tok.convert_tokens_to_ids([SPECIAL[0] if kind != "smollm2" else "<|im_start|>"]) + ids
            for skip in (False, True):
                whole, stream, shown = tok.decode(ids, skip_special_tokens=skip), TextStream(tok, skip), ""
                for i in ids:
                    stream.add(i)
                    assert stream.text.startswith(shown) and (FFFD not in stream.text or FFFD in whole)
                    shown = stream.text
                stream.finish()
                assert stream.text == whole

@pytest.mark.parametrize("kind", ["smollm2", "gpt2", "llama"])
def test_an_answer_that_ends_inside_a_character(kind):
    tok = made(kind)
    raw = byte_ids(tok)
    ids = tok("rat", add_special_tokens=False)["input_ids"] + [raw[b] for b in "🦉".encode()[:3]]
    stream = TextStream(tok)
    for i in ids: stream.add(i)
    assert stream.text == "rat"
    stream.finish()
    assert stream.text == tok.decode(ids) and stream.text.startswith("rat" + FFFD)

def test_a_run_of_byte_tokens_is_text_or_not_as_a_whole():
    tok = made("llama")
    raw = byte_ids(tok)
    owls, end = [raw[b] for b in "🦉🦉".encode()], tok.convert_tokens_to_ids("owl")
    for ids in (owls + [end], owls + [raw[0xFF], end], owls + [raw[0xF0]], owls):
        d = Detokenizer(tok)
        pieces = [d.add(i) for i in ids] + [d.finish()]
        assert "".join(pieces[:8]) == "" and "".join(pieces) == tok.decode(ids)

def test_cleaning_up_is_off_since_it_edits_what_was_shown():
    backend = wordpiece().backend_tokenizer
    backend.decoder = decoders.WordPiece(cleanup=False)
    tok = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    ids = tok.convert_tokens_to_ids(["owl", "日", ".", "the", "n't"])
    whole = tok.decode(ids, clean_up_tokenization_spaces=False)
    assert joined(tok, ids) == whole == "owl 日 . the n't" != tok.decode(ids)

def joined(tok, ids, skip=True):
    d = Detokenizer(tok, skip)
    return "".join(map(d.add, ids)) + d.finish()

@pytest.mark.parametrize("kind, parts", [("gpt2", ["ð", "Ł", "¦", "ī"]), ("llama", ["<0xF0>", "<0x9F>", "<0xA6>", "<0x89>"]), ("llama", ["▁the", "▁the"]),
                                         ("llama", ["▁", "▁the"]), ("unigram", ["▁the", "▁the"]), ("unigram-bytes", ["<0xE2>", "<0x82>", "<0xAC>", "▁the"])])
@pytest.mark.parametrize("silent", ["<s>", 10 ** 6])
@pytest.mark.parametrize("times", [1, 4, 20])
def test_tokens_without_text_leave_no_trace(kind, parts, silent, times):
    "Skipped special tokens, and ids that the vocabulary lacks, between any two others."
    tok = made(kind)
    ids, silent = tok.convert_tokens_to_ids(parts), tok.convert_tokens_to_ids(silent) if silent == "<s>" else silent
    for n in range(len(ids) + 1):
        those = ids[:n] + [silent] * times + ids[n:]
        assert joined(tok, those) == tok.decode(those, skip_special_tokens=True) == tok.decode(ids, skip_special_tokens=True)

def test_a_name_does_not_make_a_byte():
    "A token that is called like a byte, in a vocabulary whose decoder shows its name."
    backend = unigram(False).backend_tokenizer
    backend.add_tokens(["<0x41>", "<0xZZ>"])
    tok = PreTrainedTokenizerFast(tokenizer_object=backend)
    ids = tok.convert_tokens_to_ids(["▁the", "<0x41>", "<0xZZ>", "▁owl"])
    assert joined(tok, ids) == tok.decode(ids) and "<0x41>" in tok.decode(ids)

# ---- cost: ids and characters decoded, counted -----------------------------------------------

class Counting:
    "A tokenizer that counts what it decodes."
    def __init__(self, tok): self.tok, self.ids, self.chars = tok, 0, 0
    def convert_ids_to_tokens(self, i): return self.tok.convert_ids_to_tokens(i)
    def decode(self, ids, **options):
        text = self.tok.decode(ids, **options)
        self.ids, self.chars = self.ids + len(ids), self.chars + len(text)
        return text

def endless(kind, name):
    tok = made(kind)
    raw = byte_ids(tok)
    if name == "text": return tok("the owl " * 600, add_special_tokens=False)["input_ids"]
    if name == "continuations": return [raw[0x80]] * 1000
    if name == "leads": return [raw[0xF0]] * 1000
    if name == "owls": return [raw[b] for b in "🦉".encode()] * 250
    if name == "cut owls": return [raw[b] for b in "🦉".encode()[:3]] * 330
    if name == "special": return [tok.convert_tokens_to_ids("<s>")] * 1000
    if name == "unknown": return [len(tok) + 7] * 1000
    if name == "across": return [raw[0xF0], raw[0x9F]] + [tok.convert_tokens_to_ids("".join(byte_letters()[b] for b in ACROSS[0]))] * 1000
    return [tok.convert_tokens_to_ids(FFFD)] * 1000

STREAMS = ["text", "continuations", "leads", "owls", "cut owls", "special", "unknown"]

@pytest.mark.parametrize("kind, name", [(k, n) for k in ("gpt2", "llama", "unigram-bytes") for n in STREAMS] + [("across", "across"), ("llama", FFFD)])
@pytest.mark.parametrize("skip", [False, True])
def test_a_token_costs_the_same_wherever_it_stands(kind, name, skip):
    ids = endless(kind, name)
    counting, costs, texts = Counting(made(kind)), [], []
    d = Detokenizer(counting, skip)
    for i in ids:
        before = counting.ids, counting.chars
        texts.append(d.add(i))
        costs.append((counting.ids - before[0], counting.chars - before[1]))
    before = counting.ids
    texts.append(d.finish())
    assert "".join(texts) == made(kind).decode(ids, skip_special_tokens=skip)
    assert max(n for n, _ in costs) <= 36 and counting.ids - before <= 9
    assert sum(n for n, _ in costs) <= 18 * len(ids)
    early, late = costs[20:len(ids) // 2], costs[len(ids) // 2:]
    assert max(late)[0] <= max(early)[0] and max(c for _, c in late) <= max(c for _, c in early)

# ---- stop strings ------------------------------------------------------------------------------

class Pieces:
    "A tokenizer whose ids are strings: what an id adds is the id."
    def decode(self, ids, skip_special_tokens=True): return "".join(ids)

def first_match(text, stops, known):
    "By brute force: (start, stop) of the match that starts first and is longest, ending after `known` characters."
    return next(((i, s) for i in range(len(text)) for s in sorted(stops, key=len, reverse=True)
                 if text.startswith(s, i) and i + len(s) > known), None)

def may_begin(text, stops):
    "By brute force: how many characters at the end of `text` a stop may still grow from."
    return max((n for n in range(len(text) + 1) for s in stops if n < len(s) and text.endswith(s[:n])), default=0)

def check_stream(pieces, stops, include, least, stream, add):
    "`pieces`: the certain text that each token adds, and at last that of the end."
    text = before = ""
    for n, piece in enumerate(pieces):
        known, text, last, check = len(text), text + piece, n == len(pieces) - 1, n >= least
        found = first_match(text, stops, known) if check else None
        assert (stream.finish(check) if last else add(n, check)) == (found[1] if found else None)
        if found:
            assert stream.text == text[:found[0]] + (found[1] if include else "")
            break
        assert stream.text == (text if last else text[:len(text) - may_begin(text, stops)])
        assert stream.text.startswith(before)
        before = stream.text
    end = stream.text
    if found: assert add(0, True) == stream.stopped_at == found[1]
    assert stream.finish() == (found[1] if found else None) and stream.text == end
    return found

letters = st.text("ab🦉", max_size=4)

@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(letters, max_size=12), st.lists(letters.filter(len), max_size=4), st.booleans(), st.integers(0, 6))
def test_stops_as_by_brute_force_on_the_whole_text(pieces, stops, include, least):
    stream = TextStream(Pieces(), stop=tuple(stops), include_stop=include)
    found = check_stream(pieces + [""], stops, include, least, stream, lambda n, check: stream.add(pieces[n], check))
    event("stopped" if found else "ran to the end")
    if stops and not least and not include: assert not any(s in stream.text for s in stops)

@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(answers(most=24), st.data())
def test_stops_in_the_text_of_real_tokenizers(answer, data):
    "The stops are pieces of the very text, so that they lie across tokens and inside of characters' bytes."
    tok, ids, skip = answer
    whole = tok.decode(ids, skip_special_tokens=skip)
    place = st.tuples(st.integers(0, len(whole)), st.integers(1, 6)).map(lambda p: whole[p[0]:p[0] + p[1]])
    stops = data.draw(st.lists((place | st.sampled_from(["🦉", "\n", " the"])).filter(len), min_size=1, max_size=3))
    d = Detokenizer(tok, skip)
    pieces = [d.add(i) for i in ids] + [d.finish()]
    include, least = data.draw(st.booleans()), data.draw(st.integers(0, 3))
    stream = TextStream(tok, skip, tuple(stops), include)
    found = check_stream(pieces, stops, include, least, stream, lambda n, check: stream.add(ids[n], check))
    event("stopped" if found else "ran to the end")

def serve(pieces, stop, **options):
    "([text after each token], text at the end, stop)"
    stream, shown = TextStream(Pieces(), stop=stop, **options), []
    for p in pieces:
        found = stream.add(p)
        shown.append(stream.text)
        if found: break
    return shown, (stream.finish(), stream.text)[1], stream.stopped_at

@pytest.mark.parametrize("pieces, stop, shown, end, found", [
    (["ABC", "DE", "FGH"], ("DEFG",), ["ABC", "ABC", "ABC"], "ABC", "DEFG"),
    (["ABC", "DE", "FGH"], ("EF", "DEFG"), ["ABC", "ABC", "ABC"], "ABC", "DEFG"),       # complete together: the first start
    (["ABC", "DE", "F", "GH"], ("EF", "DEFG"), ["ABC", "ABC", "ABCD"], "ABCD", "EF"),   # EF is complete before
    (["ABC", "DE", "FX"], ("DEFG",), ["ABC", "ABC", "ABCDEFX"], "ABCDEFX", None),
    (["ABC", "DE"], ("DEFG",), ["ABC", "ABC"], "ABCDE", None),                          # flushed at the end
    (["x", "\n\n"], ("\n", "\n\n"), ["x", "x"], "x", "\n\n"),
    (["aa", "ab"], ("aab",), ["", "a"], "a", "aab"),                                    # the hold-back moves on
    (["é", "🦉", "日"], ("🦉日",), ["é", "é", "é"], "é", "🦉日"),
    (["a", "b"], (), ["a", "ab"], "ab", None)])
def test_stops_over_several_tokens(pieces, stop, shown, end, found):
    assert serve(pieces, stop) == (shown, end, found)
    with_stop = end + (found or "")
    assert serve(pieces, stop, include_stop=True)[1:] == (with_stop, found)

def test_a_stop_inside_the_bytes_of_characters():
    tok = made("gpt2")
    raw = byte_ids(tok)
    ids = [raw[b] for b in "ab🦉日!".encode()]
    stream = TextStream(tok, stop=("🦉日",))
    found = [stream.add(i) for i in ids]
    assert found.index("🦉日") == 8 and stream.text == "ab"

def test_a_stop_that_only_the_end_makes_certain():
    tok = made("llama")
    ids = tok.convert_tokens_to_ids(["owl"]) + [byte_ids(tok)[b] for b in "☃".encode()]
    stream = TextStream(tok, stop=("☃",))
    assert [stream.add(i) for i in ids] == [None] * 4 and stream.finish() == "☃" and stream.text == "owl"

def test_ignored_matches_are_ignored_for_good():
    stream = TextStream(Pieces(), stop=("END", "a b"))
    assert [stream.add(p, check) for p, check in [("x END", False), (" a", False), (" c", True), (" EN", False), ("D", True)]] == [None] * 4 + ["END"]
    assert stream.text == "x END a c "

def test_a_stopping_token_and_its_text():
    "A special token has no text when those are skipped; any other one has."
    for kind in ("gpt2", "llama"):
        tok = made(kind)
        owl, end = tok.convert_tokens_to_ids(["owl" if kind == "llama" else "o", "</s>"])
        for skip, tail in ((True, ""), (False, "</s>")):
            stream = TextStream(tok, skip)
            for i in (owl, end): stream.add(i)
            stream.finish()
            assert stream.text == tok.decode([owl]) + tail

def test_special_tokens_cannot_be_stops_unless_they_are_text():
    tok = made("gpt2")
    ids = tok.convert_tokens_to_ids(["o", "</s>", "a"])
    def text(skip):
        stream = TextStream(tok, skip, ("</s>",))
        found = [stream.add(i) for i in ids]
        return found, stream.text
    assert text(True) == ([None] * 3, "oa") and text(False) == ([None, "</s>", "</s>"], "o")

def test_what_is_held_is_shorter_than_the_longest_stop():
    stop = "ab" * 500 + "c"
    stream = TextStream(Pieces(), stop=(stop, "x"))
    for n in range(3000):
        stream.add("ab"[n % 2])
        assert len(stream.held) < len(stop) and stream.text + stream.held == "ab" * (n // 2) + "ab"[:n % 2 + 1]
    assert stream.add("c") == stop and stream.text == "ab" * 1000

def test_no_tokenizer_no_text_no_stops():
    stream = TextStream(None)
    assert stream.add(5) is None and stream.finish() is None and stream.text == ""
    with pytest.raises(ValueError, match="stop strings need a tokenizer"): TextStream(None, stop=("x",))
    with pytest.raises(ValueError, match="must not be empty"): TextStream(Pieces(), stop=("x", ""))

def test_one_stop_may_be_a_plain_string():
    assert serve(["a", "STOP"], "STOP") == (["a", "a"], "a", "STOP")

def test_the_two_questions_by_themselves():
    assert find_stop("xaab", ("ab", "aab", "b"), 0) == (1, "aab") and find_stop("xaab", ("aa",), 3) is None
    assert held_back("xaab", ("bc", "abx")) == 2 and held_back("xaab", ("aab",)) == 0 and held_back("", ()) == 0
