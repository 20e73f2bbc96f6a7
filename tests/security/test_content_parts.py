"""Which parts of messages reach vLLM: no media that it would fetch, no images by an id, and files as their text."""

import base64
from typing import Any

import pytest

from cluster.api.content_parts import READ, check_parts, with_file_texts
from cluster.core.errors import BadRequest


def chat(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi."}, {"role": "user", "content": list(parts)}]}


def file(content: bytes, kind: str | None = "text/plain", **fields: Any) -> dict[str, Any]:
    data = base64.b64encode(content).decode()
    return {"type": "file", "file": {"file_data": f"data:{kind};base64,{data}" if kind else data, **fields}}


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "video_url", "video_url": {"url": "http://169.254.169.254/"}}, ""),
        ({"type": "audio_url", "audio_url": {"url": "http://127.0.0.1/"}}, ""),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, ""),
        ({"type": "image_embeds", "image_embeds": "AAAA"}, ""),
        ({"video_url": "http://169.254.169.254/"}, ""),
        ({"type": ["image_url"]}, ""),
        ({"type": "image_url", "image_url": None, "uuid": "another client's"}, ".uuid"),
        ({"type": "image_url", "image_url": {"url": "data:"}, "uuid": "a"}, ".uuid"),
    ],
)
def test_what_vllm_would_fetch_or_share_is_refused(part: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        check_parts(chat(part))
    assert (refused.value.status, refused.value.param) == (400, f"messages.1.content.0{param}")


def test_texts_and_images_pass() -> None:
    check_parts(
        chat(*({"type": kind} for kind in READ), {"image_url": "data:"}, "text", {"type": "text", "uuid": None})
    )
    for body in ({}, {"messages": "x"}, {"messages": [5, {"content": "x"}]}):
        check_parts(body)


def test_a_file_with_text_is_its_text() -> None:
    body = chat({"type": "text", "text": "Read."}, file(b"a\n\xc3\xa9", filename="notes.txt"), file(b"{}", None))
    read = with_file_texts(body)["messages"][1]["content"]
    assert [part["text"] for part in read] == ["Read.", "[file notes.txt]\na\n\u00e9", "{}"]
    assert body["messages"][1]["content"][1]["type"] == "file"
    plain = chat({"type": "text", "text": "Read."})
    assert with_file_texts(plain) is plain
    sized = file(b"x", "text/plain;charset=utf-8")
    assert with_file_texts(chat(sized))["messages"][1]["content"] == [{"type": "text", "text": "x"}]


@pytest.mark.parametrize(
    ("part", "field", "why"),
    [
        (file(b"%PDF-1.7", None), "file.file_data", "a PDF is not read here"),
        (file(b"x", "application/pdf"), "file.file_data", "a PDF is not read here"),
        (file(b"\xff\xfe\x00", None), "file.file_data", "only text in UTF-8"),
        (file(b"a\0b"), "file.file_data", "only text in UTF-8"),
        (file(b"x", "image/svg+xml"), "file.file_data", "only text in UTF-8"),
        ({"type": "file", "file": {"file_data": "data:text/plain,hello"}}, "file.file_data", "must be `data:"),
        ({"type": "file", "file": {"file_data": "***"}}, "file.file_data", "not base64"),
        ({"type": "file", "file": {"file_id": "file-1"}}, "file", "uploaded files are not read"),
        ({"type": "file"}, "file", "uploaded files are not read"),
    ],
)
def test_another_file_is_refused_by_its_place(part: dict[str, Any], field: str, why: str) -> None:
    with pytest.raises(BadRequest, match=why) as refused:
        with_file_texts(chat(part))
    assert (refused.value.status, refused.value.param) == (400, f"messages.1.content.0.{field}")
