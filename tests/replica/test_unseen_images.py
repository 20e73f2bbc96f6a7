"""A model that sees nothing gets a text instead of each image."""

from replicas.unseen_images import UNSEEN, without_images

TEXT = {"type": "text", "text": "Look."}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def test_images_become_texts_and_everything_else_stays() -> None:
    plain = {"role": "user", "content": "Hello."}
    body = {"model": "tiny", "messages": [plain, {"role": "user", "content": [TEXT, IMAGE]}]}
    changed = without_images(body)
    assert changed["messages"] == [plain, {"role": "user", "content": [TEXT, {"type": "text", "text": UNSEEN}]}]
    assert body["messages"][1]["content"] == [TEXT, IMAGE]


def test_a_body_without_images_is_not_copied() -> None:
    for body in ({"messages": [{"role": "user", "content": [TEXT]}]}, {"messages": "junk"}, {"messages": [5, None]}):
        assert without_images(body) is body
