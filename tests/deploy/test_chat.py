"""`baton chat` as a process, in front of a proxy with fake servers."""

import asyncio
import contextlib
import fcntl
import io
import json
import os
import re
import signal
import subprocess
import sys
import termios
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from deploy.chat.conversation import MAX_MESSAGES, Conversation
from deploy.chat.endpoint import Answer
from deploy.chat.program import main
from deploy.chat.rendering import end_of_complete_blocks
from tests.proxy.fakes import Behave, Call, Fake, Rig, Waits, answers, drops, streams
from tests.rigs.programs import ROOT, environment

USAGE = {"prompt_tokens": 9, "completion_tokens": 3}
KV = {"transferred": 7, "recomputed": 0, "skipped": 2}

DEADLINE_S = 120.0  # the machine may be busy
PROMPT = "<prompt>"  # stands for the control sequence with which a prompt begins


def event(**members: Any) -> bytes:
    return b"data: " + json.dumps(members).encode() + b"\n\n"


def delta(text: str) -> bytes:
    return event(choices=[{"delta": {"content": text}}])


LAST = [event(choices=[], usage=USAGE, baton_kv=KV), b"data: [DONE]\n\n"]


def roles(messages: list[dict[str, str]]) -> list[str]:
    return [message["role"] for message in messages]


class Chats:
    """A behaviour that streams an answer in Markdown and records the requests."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, call: Call) -> None:
        self.bodies.append(call.body)
        await streams(*map(delta, self.texts), *LAST)(call)


def contents(chats: Chats) -> list[str]:
    """Return the texts of the messages in the last request."""
    return [message["content"] for message in chats.bodies[-1]["messages"]]


def rig_of(behave: Behave, **settings: Any) -> Rig:
    details = {"model": "m", "max_model_len": 100}
    return Rig([], [Fake(behave, details=details)], fixed_series=False, **settings)


@contextlib.asynccontextmanager
async def running(fake: Fake) -> AsyncIterator[None]:
    """Run a fake endpoint. It ends with the block, even if a request still waits."""
    fake.start()
    try:
        yield
    finally:
        await fake.stop()


@pytest.fixture
def pipe_question(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that answers a question from a pipe, in this process."""

    async def answer(rig: Rig, question: str, *argv: str) -> tuple[int, str, str]:
        """Return the exit status, the standard output and the standard error."""
        monkeypatch.setattr(sys, "stdin", io.StringIO(question))
        status = await asyncio.to_thread(main, ["--url", rig.url, *argv])
        output, errors = capsys.readouterr()
        return status, output, errors

    return answer


class Terminal:
    """The user's side of a terminal in which `baton chat` runs."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._output = ""
        self._num_read = 0  # characters of the text that `read_until` has returned
        self._has_more = asyncio.Event()
        asyncio.get_running_loop().add_reader(fd, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # the program has ended
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._fd)
        self._output += data.decode(errors="replace")
        self._has_more.set()

    @property
    def text(self) -> str:
        """The output without control sequences, except that of a prompt."""
        marked = self._output.replace("\x1b[?2004h", PROMPT)
        return re.sub(r"\x1b(\[[0-9;?]*([A-Za-z]|$)|$)|[\r\x07]", "", marked)

    async def type(self, keys: str) -> None:
        """Type at the next prompt."""
        await self.read_until(PROMPT)
        self.press(keys)

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    async def read_until(self, words: str) -> str:
        """Return the new text up to and including `words`."""
        while (start := self.text.find(words, self._num_read)) < 0:
            self._has_more.clear()
            await asyncio.wait_for(self._has_more.wait(), DEADLINE_S)
        begin, self._num_read = self._num_read, start + len(words)
        return self.text[begin : self._num_read]


@contextlib.asynccontextmanager
async def conversation(rig: Rig | Fake, folder: Path) -> AsyncIterator[Terminal]:
    """Run `baton chat` in a terminal. It must end with status 0 when the block ends."""
    master, slave = os.openpty()
    os.set_blocking(master, False)
    extra = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "BATON_CACHE": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", "chat", "--url", rig.url],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**environment(), **extra},
        cwd=folder,
        start_new_session=True,
        # Ctrl-C is a signal only in the controlling terminal of a session.
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    terminal = Terminal(master)
    try:
        await terminal.read_until("/help shows the commands")
        yield terminal
        assert await asyncio.to_thread(process.wait, 60) == 0
    finally:
        process.kill()
        process.wait()
        asyncio.get_running_loop().remove_reader(master)
        os.close(master)


async def test_piped_question_is_answered_as_plain_text(pipe_question):
    chats = Chats("**Bold**\n", "\x1b[31mand", " red")
    async with rig_of(chats) as rig:
        argv = ["--system", "Be brief.", "--max-tokens", "5", "--temperature", "0"]
        status, output, errors = await pipe_question(rig, "Why?\n", *argv)
    assert (status, output, errors) == (0, "**Bold**\n[31mand red\n", "")
    (body,) = chats.bodies
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why?"},
    ]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 5, 0)


async def test_key_from_the_environment_is_sent(pipe_question, monkeypatch):
    async with rig_of(Chats("yes"), api_key=("the first key",)) as rig:
        for key, problem in (("", "is missing"), ("x" * 9, "is refused")):
            monkeypatch.setenv("BATON_API_KEY", key)
            status, output, errors = await pipe_question(rig, "?")
            assert (status, output) == (1, "")
            assert errors.startswith(f"baton chat: error: the API key {problem}")
            assert "set BATON_API_KEY" in errors and errors.count("\n") == 1
        monkeypatch.setenv("BATON_API_KEY", "the first key,another key")
        status, output, _ = await pipe_question(rig, "?")
        assert (status, output) == (0, "yes\n")


@pytest.mark.parametrize(
    ("argv", "behave", "message"),
    [
        (("--model", "other"), drops, 'does not serve the model "other"; choose m'),
        (("--url", "http://127.0.0.1:1"), drops, "(Connection refused); start a clus"),
        ((), answers(400, {"error": {"message": "too\nlong"}}), "error: too long"),
        ((), streams(delta("a"), event(error={"message": "broken"})), "broken"),
        ((), streams(delta("a")), "broke off its answer"),
    ],
)
async def test_failures_end_in_one_line_with_the_cause(
    pipe_question, argv, behave, message
):
    async with rig_of(behave) as rig:
        status, _, errors = await pipe_question(rig, "?", *argv)
    assert status == 1
    assert errors.startswith("baton chat: error: ") and errors.count("\n") == 1
    assert message in errors


async def test_malformed_answers_of_other_endpoints_are_named(pipe_question):
    models = answers(200, {"data": [{"id": "m"}]})
    fake = Fake(streams(b"data: {", b"\n\n"), pages={"/v1/models": models})
    fake.start()
    for events, message in (
        ([b"data: {", b"\n\n"], "is not JSON"),
        ([delta("a")], "the answer ended too early"),
    ):
        fake.behave = streams(*events)
        status, _, errors = await pipe_question(fake, "?")
        assert (status, errors.count("\n")) == (1, 1) and message in errors
    fake.pages["/v1/models"] = answers(200, {"hello": 1})
    status, _, errors = await pipe_question(fake, "?")
    assert status == 1 and "is not an OpenAI-compatible endpoint" in errors
    await fake.stop()


async def test_list_of_models_may_arrive_in_parts(pipe_question):
    document = json.dumps({"data": [{"id": "m"}], "object": "list"}).encode()

    async def lists_models(call: Call) -> None:
        await call.start(200, {"content-type": "application/json"})
        for part in (document[:9], document[9:]):
            await call.write(part)
            await asyncio.sleep(0.05)
        await call.write(b"", more=False)

    fake = Fake(streams(delta("yes"), *LAST), pages={"/v1/models": lists_models})
    async with running(fake):
        status, output, errors = await pipe_question(fake, "?")
    assert (status, output, errors) == (0, "yes\n", "")


async def test_empty_standard_input_is_an_error_with_the_fix(pipe_question):
    async with rig_of(drops) as rig:
        status, _, errors = await pipe_question(rig, " \n")
    assert status == 1 and "standard input is empty; pipe a question" in errors


async def test_conversation_in_a_terminal(tmp_path):
    chats = Chats("# Title\n\n", "one\n", "\n- a list", "\n- of two\n")
    async with rig_of(chats) as rig, conversation(rig, tmp_path) as terminal:
        await terminal.type("Hello\x1b\rthere\r")  # Alt-Enter, then Enter
        text = await terminal.read_until("prompt 9 (7 transferred, 2 cached)")
        assert "Title" in text and "#" not in text and " • of two" in text
        assert "first token " in text and " tokens/s · 3 tokens" in text
        await terminal.type("/system Be kind.\r")
        await terminal.read_until("the system prompt is set")
        await terminal.type("More\r")
        await terminal.read_until("cached)")
        await terminal.type("/save talk.json\r")
        await terminal.read_until("saved in talk.json")
        saved = json.loads((tmp_path / "talk.json").read_text())
        turn = ["user", "assistant"]
        assert roles(saved["messages"]) == ["system", *turn, *turn]
        assert saved["messages"][:4] == chats.bodies[1]["messages"]
        assert saved["messages"][1]["content"] == "Hello\nthere"
        await terminal.type("/rest\r")
        await terminal.read_until("unknown command /rest (did you mean /reset?)")
        await terminal.type("/reset\r")
        await terminal.read_until("a new conversation begins")
        await terminal.type("/model other\r")
        await terminal.read_until('does not serve the model "other"; choose m')
        await terminal.type("Again\r")
        await terminal.read_until("cached)")
        assert roles(chats.bodies[2]["messages"]) == ["system", "user"]
        await terminal.type("/quit\r")
    assert "Again" in (tmp_path / "chat-history").read_text()


async def test_ctrl_c_stops_the_answer_and_keeps_the_session(tmp_path):
    begins = Waits(sends=delta("The beginning"))
    async with rig_of(begins) as rig, conversation(rig, tmp_path) as terminal:
        await terminal.type("Hello\r")
        await terminal.read_until("The beginning")
        terminal.press("\x03")
        await terminal.read_until("stopped, first token")
        await begins.left.wait()  # the server stops computing
        chats = rig.decode[0].behave = Chats("Yes.")
        await terminal.type("Are you there?\r")
        await terminal.read_until("Yes.")
        assert contents(chats) == ["Hello", "The beginning", "Are you there?"]
        rig.decode[0].behave = answers(400, {"error": {"message": "too long"}})
        await terminal.type("Refused\r")
        await terminal.read_until("error: too long")
        rig.decode[0].behave = chats
        await terminal.type("After it\r")
        await terminal.read_until("Yes.")
        assert "Refused" not in contents(chats)
        await terminal.type("\x04")  # Ctrl-D


async def test_ctrl_c_stops_a_command_and_keeps_the_session(tmp_path):
    models = answers(200, {"data": [{"id": "m"}]})
    fake = Fake(drops, pages={"/v1/models": models})
    async with running(fake), conversation(fake, tmp_path) as terminal:
        waits = Waits()
        fake.pages["/v1/models"] = waits
        await terminal.type("/model\r")
        await asyncio.wait_for(waits.begun.wait(), DEADLINE_S)
        terminal.press("\x03")
        await terminal.read_until("stopped")
        await terminal.type("/quit\r")


async def test_ctrl_c_ends_a_piped_question_with_130():
    begins = Waits(sends=delta("The beginning"))
    async with rig_of(begins) as rig:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "deploy.cli", "chat", "--url", rig.url),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment(),
            cwd=ROOT,
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"Hello")
        process.stdin.close()
        assert await process.stdout.readexactly(13) == b"The beginning"
        process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()
        assert (process.returncode, errors) == (130, b"")
        await begins.left.wait()


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("one", ""),
        ("one\n\ntwo", "one\n\n"),
        ("1. a\n\n2. b\n", ""),
        ("a\n```\ncode\n\nmore\n\nof it", "a\n"),
        ("a\n\n```\ncode\n```\nend", "a\n\n```\ncode\n```\n"),
    ],
)
def test_only_complete_blocks_are_printed_for_good(text, complete):
    assert text[: end_of_complete_blocks(text)] == complete


def test_conversation_is_bounded_and_saved_as_markdown(tmp_path):
    talk = Conversation("m")
    for number in range(MAX_MESSAGES):
        talk.add(f"question {number}", Answer(content=f"answer {number}"))
    assert len(talk.messages) == MAX_MESSAGES
    assert len(talk.request("last")["messages"]) == MAX_MESSAGES + 1
    talk.save(tmp_path / "talk.md")
    assert "\n## User\n\nquestion 199\n" in (tmp_path / "talk.md").read_text()
