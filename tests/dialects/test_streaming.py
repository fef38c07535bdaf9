from bridle.dialects.base import StreamEncoder
from bridle.errors import RequestError
from bridle.types import FinishReason, Reply, ToolCall, Usage


class Plain(StreamEncoder):
    """Writes its pieces as plain words."""

    def open(self) -> bytes:
        return b"<"

    def write_reasoning(self, text: str) -> bytes:
        return f"r:{text};".encode()

    def write_text(self, text: str) -> bytes:
        return f"t:{text};".encode()

    def write_call(self, index: int, call_id: str, name: str, arguments: str) -> bytes:
        return f"c{index}:{call_id}:{name}:{arguments};".encode()

    def finish(self, reply: Reply, usage: Usage) -> tuple[bytes, bytes]:
        return b"!", b">"

    def keepalive(self) -> bytes:
        return b"."

    def error(self, error: RequestError) -> bytes | None:
        return None


CALLS = (ToolCall("1", "f", "{}"), ToolCall(None, "g", "[]"))
REPLY = Reply("abc", "why", CALLS, FinishReason.STOP)


def test_what_was_not_sent_is_sent_at_the_close():
    encoder = Plain()
    sent = encoder.reasoning("why") + encoder.text("a") + encoder.tool_call(0, "1", "f", "{}")
    assert sent == b"r:why;t:a;c0:1:f:{};"
    assert encoder.close(REPLY, Usage(1, 1)) == (b"t:bc;c1::g:[];!", b">")


def test_a_reply_that_was_not_begun_is_sent_whole():
    assert Plain().close(REPLY, Usage(1, 1)) == (b"r:why;t:abc;c0:1:f:{};c1::g:[];!", b">")


def test_empty_pieces_are_no_events():
    encoder = Plain()
    assert encoder.text("") == encoder.reasoning("") == b""


def test_text_that_changed_after_it_left_is_not_repeated():
    encoder = Plain()
    encoder.text("x")
    before, _ = encoder.close(Reply("abc", None, (), FinishReason.STOP), Usage(1, 1))
    assert before == b"!"
