"""A conversation in the terminal: prompt, commands, and streamed answers."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console

from deploy.chat.conversation import Conversation
from deploy.chat.endpoint import Answer, ChatError, Endpoint, choose_model
from deploy.chat.rendering import AnswerView
from protocol.settings.machine import cache_dir
from protocol.settings.near_names import suggestion

_MAX_HISTORY = 1000  # inputs that each start keeps in the history file
HELP = """/reset            begin a new conversation; the system prompt stays
/system [TEXT]    set the system prompt, or remove it
/model [NAME]     show the models, or choose one
/save FILE        write the conversation as JSON (FILE.json) or as Markdown
/quit             leave (also Ctrl-D)
Enter sends, Alt-Enter begins a new line, Ctrl-C stops an answer."""


class Session:
    """Reads messages and commands in the terminal, and shows the answers of models."""

    def __init__(
        self, endpoint: Endpoint, conversation: Conversation, console: Console
    ) -> None:
        self._endpoint = endpoint
        self._conversation = conversation
        self._console = console
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self._note(HELP),
            "/reset": self._reset,
            "/system": self._set_system,
            "/model": self._choose_model,
            "/save": self._save,
        }

    def run(self) -> None:
        """Read and answer messages until the user leaves."""
        self._note(
            f"{self._conversation.model} at {self._endpoint.url}. Alt-Enter begins a "
            "new line, Ctrl-C stops an answer, /help shows the commands."
        )
        prompt: PromptSession[str] = PromptSession(
            message="> ",
            multiline=True,
            key_bindings=_keys(),
            history=_open_history(),
            prompt_continuation="  ",
        )
        while True:
            try:
                text = prompt.prompt().strip()
            except KeyboardInterrupt:  # Ctrl-C clears the line
                continue
            except EOFError:
                return
            if text in ("/quit", "/exit"):
                return
            if text:
                self.handle(text)

    def handle(self, text: str) -> None:
        """Run a command, or send a message. Reports errors to the user."""
        try:
            if text.startswith("/"):
                self._run_command(text)
            else:
                self._send(text)
        except ChatError as error:
            self._fail(str(error))
        except KeyboardInterrupt:  # Ctrl-C during a command
            self._note("stopped")

    def _run_command(self, text: str) -> None:
        name, _, argument = text.partition(" ")
        command = self._commands.get(name)
        if command is None:
            hint = suggestion(name, [*self._commands, "/quit"])
            raise ChatError(
                f"unknown command {name}{hint}; /help shows the commands. Messages "
                "must not begin with /"
            )
        command(argument.strip())

    def _send(self, text: str) -> None:
        """Send a message and show its answer.

        Ctrl-C stops the answer, and the part that has arrived stays in the
        conversation. A message is not kept if no content of its answer has arrived.
        """
        answer = Answer()
        ending = ""
        try:
            with AnswerView(self._console) as view:
                asyncio.run(self._receive(text, answer, view))
        except KeyboardInterrupt:
            ending = "stopped, "
        except ChatError as error:
            self._fail(str(error))
            ending = "incomplete, "
        if answer.content:
            self._conversation.add(text, answer)
        elif ending:
            ending += "not kept, "
        self._note(f"{ending}{answer.summary()}\n")

    async def _receive(self, text: str, answer: Answer, view: AnswerView) -> None:
        async for event in self._endpoint.stream(self._conversation.request(text)):
            answer.add(event)
            view.update(answer.reasoning, answer.content)

    # commands

    def _reset(self, _: str) -> None:
        self._conversation.reset()
        self._note("a new conversation begins")

    def _set_system(self, prompt: str) -> None:
        self._conversation.system = prompt
        self._note("the system prompt is set" if prompt else "no system prompt")

    def _choose_model(self, name: str) -> None:
        names = asyncio.run(self._endpoint.models())
        if name:
            chosen = choose_model(self._endpoint.url, name, names)
            self._conversation.model = chosen
        current = self._conversation.model
        self._note(
            "\n".join(f"{'*' if each == current else ' '} {each}" for each in names)
        )

    def _save(self, name: str) -> None:
        if not name:
            raise ChatError("/save needs the name of a file, such as /save chat.md")
        path = Path(name).expanduser()
        try:
            self._conversation.save(path)
        except OSError as error:
            raise ChatError(f"cannot write {path} ({error.strerror})") from None
        self._note(f"saved in {path}")

    # output

    def _note(self, text: str) -> None:
        self._console.print(
            text, style="dim", markup=False, highlight=False, soft_wrap=True
        )

    def _fail(self, text: str) -> None:
        self._console.print(
            f"error: {text}", style="red", markup=False, highlight=False, soft_wrap=True
        )


def _keys() -> KeyBindings:
    """Return the key bindings: Enter sends, and Alt-Enter begins a new line."""
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("escape", "c-j")  # Alt-Enter that was typed before the prompt was ready
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _open_history() -> History:
    """Return the history of the user's inputs, which the arrow keys bring back.

    It includes earlier sessions. Without a writable cache folder, it has only the
    inputs of this session, and does not store them.
    """
    try:
        path = cache_dir() / "chat-history"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        messages = list(FileHistory(str(path)).load_history_strings())  # newest first
        if len(messages) > _MAX_HISTORY:
            path.write_text("")
            history = FileHistory(str(path))
            for message in reversed(messages[:_MAX_HISTORY]):
                history.store_string(message)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))
