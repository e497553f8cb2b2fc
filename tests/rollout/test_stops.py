"""When a sequence ends, and what `stop_reason` says then: as in vLLM."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rollout import RolloutClient, SamplingParams
from rollout.stops import StopChecker, cut_at_stop
from rollout.tiny_moe import MODEL_PATH

EOS = 300
# Every byte is a token; beyond them, tokens of several characters, and tokens that hold a part of a character.
PIECES = [
    *(bytes([byte]) for byte in range(256)),
    b"ab",
    b"b;",
    b"ab;a",
    "é".encode(),
    "€".encode()[:2],
    b";" + "é".encode()[:1],
    "é".encode()[1:] + b";",
    "😀".encode()[1:] + b"a",
]


def letters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2): itself if printable, else 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


@pytest.fixture(scope="module")
def tokenizer():
    table = letters()
    vocab = {"".join(table[byte] for byte in piece): index for index, piece in enumerate(PIECES)}
    plain = Tokenizer(models.BPE(vocab, merges=[]))
    plain.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=plain)


def first_end(check, tokens):
    """(number of tokens, finish_reason, stop_reason) when the checker first says stop."""
    for count in range(1, len(tokens) + 1):
        if ended := check(tokens[:count]):
            return count, *ended
    return None


def checker(tokenizer=None, **params):
    return StopChecker(SamplingParams(**{"max_tokens": 50, **params}), (EOS,), tokenizer)


@pytest.mark.parametrize(
    ("params", "tokens", "end"),
    [
        ({"max_tokens": 2}, [7, 8, 9], (2, "length", None)),
        ({}, [7, EOS, 9], (2, "stop", None)),
        ({"stop_token_ids": (8,)}, [7, 8, EOS], (2, "stop", 8)),
        ({"stop_token_ids": (EOS,)}, [7, EOS], (2, "stop", None)),
        ({"ignore_eos": True}, [7, EOS, 9], None),
        ({"ignore_eos": True, "stop_token_ids": (EOS,)}, [7, EOS, 9], (2, "stop", EOS)),
        ({"max_tokens": 2}, [7, EOS], (2, "stop", None)),
        ({"min_tokens": 3}, [EOS, 7, EOS], (3, "stop", None)),
        ({"min_tokens": 2, "stop_token_ids": (8,)}, [8, 7, 8], (3, "stop", 8)),
        ({"min_tokens": 2, "max_tokens": 2, "stop_token_ids": (8,)}, [8, 7], (2, "length", None)),
    ],
)
def test_tokens_and_lengths(params, tokens, end):
    """The end token of the model itself gives no stop_reason, one that the caller named gives its id."""
    assert first_end(checker(**params), tokens) == end


@pytest.mark.parametrize(
    ("params", "forbidden"),
    [({}, {EOS}), ({"stop_token_ids": (8,)}, {EOS, 8}), ({"stop_token_ids": (8,), "ignore_eos": True}, {8})],
)
def test_the_tokens_that_min_tokens_forbids(params, forbidden):
    assert checker(**params).stop_token_ids == forbidden


def pieces(*texts: bytes) -> list[int]:
    return [PIECES.index(text) for text in texts]


@pytest.mark.parametrize(
    ("stop", "texts", "end"),
    [
        (";", [b"a", b";", b"b"], (2, "stop", ";")),
        ("b;", [b"a", b"b", b";"], (3, "stop", "b;")),
        ("b;", [b"a", b"b;"], (2, "stop", "b;")),
        (";", [b"ab;a"], (1, "stop", ";")),
        ("aa", [b"a", b"b", b"a", b"a"], (4, "stop", "aa")),
        ("é", [b"a", b"\xc3", b"\xa9"], (3, "stop", "é")),
        ("😀", [b"\xf0", b"\x9f", b"\x98", b"\x80"], (4, "stop", "😀")),
        ("a€", [b"a", b"\xe2\x82", b"\xac"], (3, "stop", "a€")),
        ("é;", [b"\xc3", b"\xa9;"], (2, "stop", "é;")),
        (";", [b"a", b";\xc3", b"\xa9"], (2, "stop", ";")),
        (("x", "ab"), [b"a", b"b"], (2, "stop", "ab")),
        (("b", "ab"), [b"ab"], (1, "stop", "ab")),
    ],
)
def test_stop_strings_end_at_the_token_that_completes_them(tokenizer, stop, texts, end):
    """Across tokens, in mid-token, in several bytes; of two strings the one that starts first is named."""
    assert first_end(checker(tokenizer, stop=stop), pieces(*texts)) == end


def test_a_stop_string_that_ends_before_min_tokens_does_not_count(tokenizer):
    assert first_end(checker(tokenizer, stop=";", min_tokens=3), pieces(b"a", b";", b"b", b"b", b";")) == (
        5,
        "stop",
        ";",
    )


def test_an_ignored_stop_string_is_not_found_again_when_its_token_began_a_character(tokenizer):
    tokens = pieces(b";\xc3", b"\xa9", b"a", b";")
    assert first_end(checker(tokenizer, stop=";", min_tokens=2), tokens) == (4, "stop", ";")


def test_an_end_token_is_named_before_a_stop_string(tokenizer):
    check = StopChecker(SamplingParams(stop=";", max_tokens=9), tuple(pieces(b";")), tokenizer)
    assert first_end(check, pieces(b"a", b";")) == (2, "stop", None)


@given(data=st.data(), text=st.text("ab;é€😀", max_size=14), min_tokens=st.integers(0, 6))
def test_stop_strings_against_a_search_in_the_bytes(tokenizer, data, text, min_tokens):
    """Truth: an occurrence ends in the token that holds its last byte; UTF-8 makes the bytes as good as the text."""
    raw = text.encode()
    stops = data.draw(st.lists(st.text("ab;é€😀", min_size=1, max_size=3), min_size=1, max_size=3, unique=True))
    tokens, ends = [], []
    while len(raw) > (at := ends[-1] if ends else 0):
        fitting = [index for index, piece in enumerate(PIECES) if raw.startswith(piece, at)]
        tokens.append(data.draw(st.sampled_from(fitting)))
        ends.append(at + len(PIECES[tokens[-1]]))
    assume(tokens)
    found = []  # (tokens, start, stop) of each occurrence
    for stop in (stop.encode() for stop in stops):
        for start in range(len(raw)):
            if raw.startswith(stop, start):
                count = next(n for n, end in enumerate(ends, 1) if end >= start + len(stop))
                found.append((count, start, stop.decode()))
    expected = min((hit for hit in found if hit[0] >= min_tokens), default=None)
    end = first_end(checker(tokenizer, stop=tuple(stops), min_tokens=min_tokens), tokens)
    assert (end and (end[0], end[2])) == (expected and (expected[0], expected[2]))


@pytest.mark.parametrize(
    ("text", "stop", "known", "kept"),
    [
        ("12;34", ";", 0, "12"),
        ("12;34;", ";", 5, "12;34"),
        ("12ab", "ab", 3, "12"),
        ("12\n\n", "\n", 2, "12"),
        ("12", ";", 1, "12"),
    ],
)
def test_text_is_cut_where_the_last_token_completed_the_stop_string(text, stop, known, kept):
    assert cut_at_stop(text, stop, known) == kept


@pytest.fixture(scope="module")
def client():
    with RolloutClient.local(MODEL_PATH, dtype="float32") as client:
        yield client


def greedy(client, **params):
    (trace,) = client.sample(["12+34="], sampling_params=SamplingParams(temperature=0, max_tokens=6, **params))
    return trace


def test_through_the_engine_the_stopping_token_is_kept_and_the_text_is_cut(client):
    free = greedy(client, ignore_eos=True)
    first, second = free.text[:2]
    assert first != second
    trace = greedy(client, stop=second)
    assert (trace.finish_reason, trace.stop_reason) == ("stop", second)
    assert trace.completion_ids == free.completion_ids[:2]
    assert trace.text == first


def test_through_the_engine_an_early_stop_string_does_not_cut_the_text(client):
    """`min_tokens` lets the sequence go on past the string; its text must then be there."""
    free = greedy(client, ignore_eos=True)
    trace = greedy(client, ignore_eos=True, stop=free.text[0], min_tokens=2)
    assert trace.completion_ids[:2] == free.completion_ids[:2]
    assert trace.text.startswith(free.text[:2])
    assert trace.text.count(free.text[0]) == 1


def test_through_the_engine_min_tokens_defers_the_end_token(client):
    normal = greedy(client)
    assert (normal.finish_reason, normal.stop_reason, normal.completion_ids[-1]) == ("stop", None, 1)
    longer = greedy(client, min_tokens=len(normal.completion_ids))
    assert 1 not in longer.completion_ids[: len(normal.completion_ids)]


def test_through_the_engine_a_named_token_is_the_reason(client):
    second = greedy(client, ignore_eos=True).completion_ids[1]
    trace = greedy(client, stop_token_ids=[second])
    assert (trace.finish_reason, trace.stop_reason, trace.completion_ids[-1]) == ("stop", second, second)
    assert trace.num_rows == len(trace.prompt_ids) + len(trace.completion_ids) - 1
