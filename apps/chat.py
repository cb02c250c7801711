"""The work of `wedlm chat`: a conversation on a terminal, or with lines that are piped in."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..checkpoints.files import check_output, write_text
from ..console.prompts import is_unicode
from ..console.streaming import printable, writer_to
from ..eval.decoders import DECODERS, decoder_of, with_asked
from ..generation.settings import SETTING_NAMES
from .conversation import AnswerStopped, Conversation, Turn

PROMPT = "> "


class Chat:
    """What a line means: a message to the model, or a command."""

    def __init__(self, conversation: Conversation, console: Console):
        self.conversation = conversation
        self.console = console
        self.is_over = False
        self.first_options = conversation.options
        self.commands: dict[str, tuple[Callable[[str], None], str]] = {
            "/system": (self._set_system, "TEXT  give the model a system message; without a text, take it away"),
            "/reset": (self._reset, "  forget all turns"),
            "/strategy": (self._set_strategy, f"NAME  decode by {', '.join(DECODERS)}; without a name, say by which"),
            "/stats": (self._show_stats, "  what the answers took so far"),
            "/save": (self._save, "FILE  write the conversation to a new file, as a line of JSON"),
            "/help": (self._show_help, "  this list"),
            "/exit": (self._exit, "  end (also Ctrl-D)"),
        }

    def handle(self, line: str) -> None:
        """Does what a line asks for; says in one line what is wrong with it."""
        text = line.strip()
        try:
            if not is_unicode(text):
                raise ValueError("The line is not UTF-8 text.")
            if line.startswith("/"):
                name, _, argument = text.partition(" ")
                if name not in self.commands:
                    raise ValueError(
                        f"There is no command {name}: /help lists them. A message may begin with a space."
                    )
                self.commands[name][0](argument.strip())
            elif text:
                self._answer(text)
        except (OSError, ValueError) as error:
            self.say(f"Error: {' '.join(str(error).split())}", style="red")

    def say(self, text: str, style: str = "dim") -> None:
        """Prints what is not the model's."""
        self.console.print(Text(printable(text), style=style), soft_wrap=not self.console.is_terminal)

    def _answer(self, text: str) -> None:
        turn = self.conversation.ask(text, writer_to(self.console))
        if turn.text and not turn.text.endswith("\n"):
            self.console.out(highlight=False)
        if turn.ended_by == "stop":
            self.say("Stopped." if turn.new_tokens else "Stopped before the answer began; the message is dropped.")
        elif turn.ended_by == "limit":
            self.say(f"Cut off after {turn.new_tokens} tokens.")
        if turn.new_tokens:
            self.say(summary([turn]))

    def _set_system(self, text: str) -> None:
        self.conversation.system = text or None
        self.say("The system message is set." if text else "There is no system message.")

    def _reset(self, _: str) -> None:
        self.conversation.reset()
        self.say("All turns are forgotten." + (" The system message stays." if self.conversation.system else ""))

    def _set_strategy(self, name: str) -> None:
        if name and name not in DECODERS:
            raise ValueError(f"Unknown decoder {name!r}: choose among {', '.join(DECODERS)}.")
        if name:  # of the settings of parallel decoding, it gets those that were chosen for it
            others = dict(self.first_options)
            ours = {key: others.pop(key) for key in SETTING_NAMES if key in others}
            self.conversation.options = others | with_asked(ours, DECODERS[name], self.conversation.model)
        self.say(f"Decoding by {decoder_of(self.conversation.options, self.conversation.model)}.")

    def _show_stats(self, _: str) -> None:
        turns = self.conversation.turns
        count = f"{len(turns)} answer{'s' * (len(turns) > 1)}"
        self.say(f"{count}: {summary(turns)}" if turns else "There is no answer yet.")

    def _save(self, name: str) -> None:
        if not name:
            raise ValueError("/save needs the name of a file.")
        path = Path(name).expanduser()
        if path.exists():
            raise ValueError(f"{name!r} is there already: choose another name.")
        check_output(path)
        write_text(path, json.dumps({"messages": self.conversation.all_messages}, ensure_ascii=False) + "\n")
        self.say(f"The conversation is in {path}.")

    def _show_help(self, _: str) -> None:
        self.say("\n".join(f"{name} {text}" for name, (_, text) in self.commands.items()))
        self.say("Ctrl-C stops an answer.")

    def _exit(self, _: str) -> None:
        self.is_over = True


def summary(turns: list[Turn]) -> str:
    """What answers took, in one line."""
    tokens, forwards = sum(turn.new_tokens for turn in turns), sum(turn.forwards for turn in turns)
    text = f"{tokens} tokens in {forwards} forwards ({tokens / forwards:.2f} tokens per forward)"
    text += f", {sum(turn.seconds for turn in turns):.2f} s"
    if drafted := sum(turn.drafted for turn in turns):
        text += f"; {sum(turn.accepted for turn in turns)} of {drafted} drafts accepted"
    cached = sum(turn.cached_tokens for turn in turns)
    return f"{text}; {cached} of {sum(turn.prompt_tokens for turn in turns)} prompt tokens from the cache"


def read_piped() -> str | None:
    """The next line of standard input; `None` at its end."""
    line = b"" if sys.stdin is None else sys.stdin.buffer.readline()
    return line.decode("utf-8", "surrogateescape").rstrip("\r\n") if line else None


def terminal_reader() -> Callable[[], str | None]:
    """A function that asks for the next input on the terminal, `None` at its end. A pasted text is one input, of any
    number of lines and any length. Raises `ImportError` without prompt_toolkit."""
    try:
        from prompt_toolkit import PromptSession
    except ImportError:
        raise ImportError("A chat on a terminal needs prompt_toolkit: pip install '.[chat]' in the clone.") from None
    session = PromptSession[str](PROMPT)

    def read() -> str | None:
        try:
            return session.prompt()
        except EOFError:
            return None
        except KeyboardInterrupt:
            raise AnswerStopped from None

    return read


@contextmanager
def _keys_kept(console: Console) -> Iterator[None]:
    """Keeps keys out of the answer during which they are pressed, for the next prompt; a paste as a whole."""
    try:
        import termios

        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
    except (ImportError, OSError, ValueError):  # no Unix; not one's own terminal
        yield
        return
    quiet = [*before[:3], before[3] & ~(termios.ECHO | termios.ICANON), *before[4:]]
    termios.tcsetattr(terminal, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        if not console.is_dumb_terminal:
            console.file.write("\x1b[?2004l")
        termios.tcsetattr(terminal, termios.TCSANOW, before)


@contextmanager
def _ctrl_c_stops_answers(conversation: Conversation) -> Iterator[None]:
    """Ctrl-C ends an answer after its present forward. Pressed again, or where there is no answer, it raises
    [`AnswerStopped`]. SIGTERM ends the program, as in every command."""

    def stop(number: int, frame: object) -> None:
        if not conversation.stop():
            raise AnswerStopped

    before = signal.getsignal(signal.SIGINT)
    if before != signal.SIG_IGN:
        signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run(conversation: Conversation, console: Console) -> None:
    """Talks until /exit or the end of standard input."""
    chat = Chat(conversation, console)
    is_piped = sys.stdin is None or not sys.stdin.isatty()
    read = read_piped if is_piped else terminal_reader()
    if not is_piped:
        chat.say("/help lists the commands; Ctrl-C stops an answer, /exit or Ctrl-D ends.")
    with _ctrl_c_stops_answers(conversation), nullcontext() if is_piped else _keys_kept(console):
        while not chat.is_over:
            try:
                line = read()
                if line is None:
                    return
                if is_piped and line.strip():
                    console.out(f"{PROMPT}{printable(line.strip())}", style="bold", highlight=False)
                if console.is_terminal and not console.is_dumb_terminal:
                    console.file.write("\x1b[?2004h")  # a paste during the answer is marked as one
                chat.handle(line)
            except AnswerStopped:  # outside of an answer
                console.out(highlight=False)
