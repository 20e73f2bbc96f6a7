"""What an ingress and a replica say to each other survives the wire, however the network cuts it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.errors import HttpError, Overloaded, ProgramMoved, Quarantined, ReplicaLost, TooManyRequests
from cluster.core.frames import Answer, FrameDecoder, TurnCall, decode_call, encode_call, encode_frame
from cluster.core.stream import Begun, Ending, Progress, StreamChunk
from cluster.core.turn import CallDelta, Continuation, PromptMode, TurnBegan, TurnDelta, TurnDone, pack_ids

BEGUN, ENDING = Begun(b"p" * 16, 32), Ending("stop", 5)
PROGRESS = Progress(3, pack_ids([7, 8]), pack_ids([2]), BEGUN, ENDING, "1700000000", output_tokens=2, prompt_tokens=40)
PIECES = (
    TurnBegan(PromptMode.CONTINUED, pack_ids([1, 2]), 300),
    TurnDelta(pack_ids([9]), "content", "reasoning", (CallDelta(0, "id", "search", "{"),)),
    TurnDone("tool_calls", 10, 8, 2),
)
ANSWERS: list[Answer] = [
    StreamChunk(PROGRESS, b"data: {}\n\n"),
    StreamChunk(Progress(), b""),
    StreamChunk(PROGRESS, PIECES),
    b'{"object": "chat.completion"}',
    b"x" * 300_000,
]


def decoded(data: bytes, size: int) -> list[Answer]:
    decoder = FrameDecoder()
    answers = [one for at in range(0, len(data), size) for one in decoder.feed(data[at : at + size])]
    assert decoder.between_frames
    return answers


@pytest.mark.parametrize("size", [1, 3, 4, 5, 1000, 65_536, 10_000_000])
def test_an_answer_survives_being_cut(size: int) -> None:
    data = b"".join(map(encode_frame, ANSWERS[:4] if size == 1 else ANSWERS))
    assert decoded(data, size) == (ANSWERS[:4] if size == 1 else ANSWERS)


@given(st.lists(st.sampled_from(ANSWERS[:4]), max_size=20), st.integers(1, 200))
def test_any_answer_survives_any_cut(answers: list[Answer], size: int) -> None:
    assert decoded(b"".join(map(encode_frame, answers)), size) == answers


def test_what_is_incomplete_is_known() -> None:
    frame = encode_frame(ANSWERS[0])
    decoder = FrameDecoder()
    assert decoder.feed(frame + frame[:-1]) == [ANSWERS[0]]
    assert not decoder.between_frames
    assert decoder.feed(frame[-1:]) == [ANSWERS[0]]
    assert decoder.between_frames


@pytest.mark.parametrize("data", [b"\0\0\0\1\xc1", b"\0\0\0\2\x91\x09", b"\0\0\0\0"])
def test_what_is_no_frame_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        FrameDecoder().feed(data)


def culprit() -> ReplicaLost:
    lost = ReplicaLost("the engine died", at_work=False)
    lost.culprit = True
    return lost


@pytest.mark.parametrize(
    "error",
    [
        HttpError("internal error", code="internal_error"),
        ProgramMoved("it has moved", epoch=7),
        ProgramMoved("it has moved"),
        TooManyRequests("too many", code="tenant_rate", retry_after_s=0.25),
        Overloaded("full", status=503, retry_after_s=1),
        Quarantined("poison", param="prompt"),
        culprit(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_keeps_its_class_and_all_that_it_says(error: HttpError) -> None:
    [told] = decoded(encode_frame(error), 10_000)
    assert type(told) is type(error)
    assert vars(told) == vars(error)
    assert str(told) == str(error)


@pytest.mark.parametrize(
    "call",
    [
        TurnCall("chat", {"messages": [{"role": "user", "content": "ü😀"}], "seed": 10**30}, {"x-request-id": "r"}),
        TurnCall("turn", {}, {}, "default/p", "identity", 3, PROGRESS, Continuation(pack_ids([1]), 2), (3, 4)),
    ],
    ids=["first", "resumed"],
)
def test_a_call_survives(call: TurnCall) -> None:
    assert decode_call(encode_call(call)) == call


def test_what_is_no_call_is_an_error() -> None:
    for data in (b"", b"\xc1", b"\x90", b"{}"):
        with pytest.raises(ValueError, match=r"."):
            decode_call(data)
