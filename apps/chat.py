"""The work of `wedlm chat`: a conversation on a terminal, or with lines that are piped in."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ..console.prompts import is_unicode
from ..console.streaming import GROUP_STYLES, printable
from ..eval.decoders import DECODERS, Options, decoder_name, with_asked
from ..eval.files import check_output, write_text
from ..generation.settings import SETTING_NAMES
from .conversation import AnswerStopped, Conversation, Turn

PROMPT = "> "


class AnswerView:
    """Shows an answer while it comes. On a terminal, the row that grows and, below it, tokens per forward are drawn
    anew, and full rows stay; elsewhere text is written as it is.

    Args:
        console: to print on.
    """

    def __init__(self, console: Console):
        self.console = console
        is_live = console.is_terminal and not console.is_dumb_terminal
        self.live = Live(console=console, auto_refresh=False, transient=True) if is_live else None
        self.row = Text()  # the one that is not full

    def __enter__(self) -> AnswerView:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.live:
            self.live.stop()
        if self.live and self.row:
            self.console.print(self.row)
        elif self.row:
            self.console.out(highlight=False)

    def write(self, text: str, group: int, tokens_per_forward: float) -> None:
        """Shows new text.

        Args:
            text: new text.
            group: of tokens that became final at once; neighbours differ in colour.
            tokens_per_forward: so far.
        """
        text, style = printable(text), GROUP_STYLES[group % len(GROUP_STYLES)]
        if not self.live:
            self.console.out(text, style=style, highlight=False, end="")
            self.row = Text(text[-1:].strip("\n")) if text else self.row
            return
        *full, row = self.row.append(text, style=style).wrap(self.console, self.console.width) or [Text()]
        line = self.row.plain.rpartition("\n")[2]
        row.rstrip()  # `wrap` drops spaces at the end of a full row: the next word would go on with the last one
        self.row = row.append(line[len(line.rstrip()) :])
        for row in full:
            self.console.print(row)
        count = Text(f"{tokens_per_forward:.2f} tokens per forward", "dim", no_wrap=True, overflow="ellipsis")
        self.live.update(Group(self.row, count), refresh=True)


class Chat:
    """What a line means: a message to the model, or a command.

    Args:
        conversation: with the model.
        console: to print on.
    """

    def __init__(self, conversation: Conversation, console: Console):
        self.conversation = conversation
        self.console = console
        self.is_over = False
        self.first_options = conversation.options
        self.commands: dict[str, tuple[Callable[[str], None], str]] = {
            "/system": (self.set_system, "TEXT  give the model a system message; without a text, take it away"),
            "/reset": (self.reset, "  forget all turns"),
            "/strategy": (self.set_strategy, f"NAME  decode by {', '.join(DECODERS)}; without a name, say by which"),
            "/stats": (self.show_stats, "  what the answers took so far"),
            "/save": (self.save, "FILE  write the conversation to a new file, as a line of JSON"),
            "/help": (self.show_help, "  this list"),
            "/exit": (self.exit, "  end (also Ctrl-D)"),
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
                self.answer(text)
        except (OSError, ValueError) as error:
            self.say(f"Error: {' '.join(str(error).split())}", style="red")

    def answer(self, text: str) -> None:
        """Asks the model and shows its answer."""
        with AnswerView(self.console) as view:
            turn = self.conversation.ask(text, view.write)
        if turn.ended_by == "stop":
            self.say("Stopped." if turn.new_tokens else "Stopped before the answer began; the message is dropped.")
        elif turn.ended_by == "limit":
            self.say(f"Cut off after {turn.new_tokens} tokens.")
        if turn.new_tokens:
            self.say(summary([turn]))

    def set_system(self, text: str) -> None:
        """Replaces the system message."""
        self.conversation.system = text or None
        self.say("The system message is set." if text else "There is no system message.")

    def reset(self, _: str = "") -> None:
        """Forgets all turns."""
        self.conversation.reset()
        self.say("All turns are forgotten." + (" The system message stays." if self.conversation.system else ""))

    def set_strategy(self, name: str) -> None:
        """Replaces the decoder."""
        if name and name not in DECODERS:
            raise ValueError(f"Unknown decoder {name!r}: choose among {', '.join(DECODERS)}.")
        if name:
            self.conversation.options = _decoding_by(name, self.first_options)
        options = self.conversation.options
        stored = getattr(self.conversation.model.generation_config, "verification", None)
        verification = options.get("verification") or stored or "none"
        strategy = str(options["strategy"])
        self.say(f"Decoding by {decoder_name(strategy, 'none' if strategy == 'ar' else str(verification))}.")

    def show_stats(self, _: str = "") -> None:
        """Says what the answers took."""
        turns = self.conversation.turns
        count = f"{len(turns)} answer{'s' * (len(turns) > 1)}"
        self.say(f"{count}: {summary(turns)}" if turns else "There is no answer yet.")

    def save(self, name: str) -> None:
        """Writes the conversation, as `wedlm train` reads one."""
        if not name:
            raise ValueError("/save needs the name of a file.")
        path = Path(name).expanduser()
        if path.exists():
            raise ValueError(f"{name!r} is there already: choose another name.")
        check_output(path)
        write_text(path, json.dumps({"messages": self.conversation.all_messages}, ensure_ascii=False) + "\n")
        self.say(f"The conversation is in {path}.")

    def show_help(self, _: str = "") -> None:
        """Lists the commands."""
        self.say("\n".join(f"{name} {text}" for name, (_, text) in self.commands.items()))
        self.say("Ctrl-C stops an answer.")

    def exit(self, _: str = "") -> None:
        """Ends the program."""
        self.is_over = True

    def say(self, text: str, style: str = "dim") -> None:
        """Prints what is not the model's."""
        self.console.print(Text(printable(text), style=style), soft_wrap=not self.console.is_terminal)


def summary(turns: list[Turn]) -> str:
    """What answers took, in one line."""
    tokens, forwards, seconds = (sum(getattr(turn, name) for turn in turns) for name in _SUMMED)
    text = f"{tokens} tokens in {forwards} forwards ({tokens / forwards:.2f} tokens per forward), {seconds:.2f} s"
    if drafted := sum(turn.drafted for turn in turns):
        text += f"; {sum(turn.accepted for turn in turns)} of {drafted} drafts accepted"
    cached = sum(turn.cached_tokens for turn in turns)
    return f"{text}; {cached} of {sum(turn.prompt_tokens for turn in turns)} prompt tokens from the cache"


_SUMMED = ("new_tokens", "forwards", "seconds")


def _decoding_by(name: str, options: Options) -> Options:
    """Options with another decoder: of the settings of parallel decoding, those that were chosen for it."""
    ours = {key: value for key, value in options.items() if key in SETTING_NAMES}
    return {key: value for key, value in options.items() if key not in ours} | with_asked(ours, DECODERS[name])


def read_piped() -> str | None:
    """The next line of standard input; `None` at its end."""
    line = b"" if sys.stdin is None else sys.stdin.buffer.readline()
    return line.decode("utf-8", "surrogateescape").rstrip("\r\n") if line else None


def terminal_reader() -> Callable[[], str | None]:
    """A function that asks for the next input on the terminal, `None` at its end. A pasted text is one input, of any
    number of lines and any length.

    Raises:
        ImportError: without prompt_toolkit.
    """
    try:
        from prompt_toolkit import PromptSession
    except ImportError:
        raise ImportError("A chat on a terminal needs prompt_toolkit: pip install 'wedlm-hf[chat]'.") from None
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
    """Talks until /exit or the end of standard input.

    Args:
        conversation: with the model.
        console: to print on.
    """
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
