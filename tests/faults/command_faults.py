"""Every command of `wedlm` under faults: prints how often each was tried, and how often all was well afterwards.

    python tests/faults/command_faults.py --trials 20 [--commands trace,train] [--faults SIGINT,limit]

All was well: the exit code is the one for it, there is no traceback, the cursor is shown, what was in the folder
before is whole (the old files, or new ones that are complete), and the same command then runs to its end.

Importing torch takes seconds, so it is done once: each trial is a fork that runs the command line as it is.
"""

import argparse
import errno
import json
import os
import pty
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", TERM="xterm", COLUMNS="90")
TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "../examples/wedlm-nano"), str(TESTS / "training")]

import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402
from tiny import LINES, MASK, write_checkpoint, write_stock_checkpoint  # noqa: E402

from wedlm_hf.cli import main  # noqa: E402

torch.set_num_threads = lambda count: None  # a fork has no thread pool to change; OMP_NUM_THREADS says 1
TIME_LIMIT = 120.0  # seconds, for what should take two
SERVING = 15.0  # seconds after which a server is stopped whose words a fault has kept from us
# Exit codes of each fault. A negative one: the signal came before the command line was there to take it.
CODES = {"SIGINT": {130, 0, -2}, "SIGTERM": {143, 0, -15}, "limit": {2, 0}, "pipe": {141, 0}, "twice": {2, 0}}


@dataclass
class Run:
    """A command that was started in a process of its own, on a terminal of its own."""

    pid: int
    terminal: int
    output: bytes = b""
    code: int | None = None
    started: float = field(default_factory=time.monotonic)
    until: bytes = b""  # it goes on until it is stopped: by Ctrl-C, once it has said this

    def wait(self, seconds: float | None = None) -> None:
        """Reads what it says until it ends, or for so long."""
        end = time.monotonic() + (TIME_LIMIT if seconds is None else seconds)
        while self.code is None and (left := end - time.monotonic()) > 0:
            self._read(min(left, 0.05))
            if self.until and (self.until in self.output or time.monotonic() - self.started > SERVING):
                self.until = b""
                os.kill(self.pid, signal.SIGINT)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                while self._read(0):
                    pass
        if seconds is None and self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.code = -9
        if self.code is not None:
            os.close(self.terminal)

    def _read(self, seconds: float) -> bool:
        """Whether it said something within so long."""
        if not select.select([self.terminal], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self.terminal, 65536)
        except OSError as error:
            if error.errno != errno.EIO:  # the other side is closed
                raise
            return False
        self.output += data
        return bool(data)


def start(
    words: list[str], folder: Path, *, limit: int | None = None, pipe: tuple[int, int] | None = None,
    until: str = "",
) -> Run:  # fmt: skip
    """Starts `wedlm WORDS` in a folder; `limit`: the size of its files; `pipe`: both ends, for what it prints;
    `until`: see [`Run`]."""
    pid, terminal = pty.fork()
    if pid:
        return Run(pid, terminal, until=until.encode())
    code = 1
    try:
        os.chdir(folder)
        sys.argv = ["wedlm", *words]
        random.seed()
        if pipe is not None:
            os.dup2(pipe[1], 1)
            os.close(pipe[0])
            os.close(pipe[1])
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY), closefd=False)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def run_here(words: list[str], folder: Path) -> None:
    """Runs it in this process, so that all that it imports is there for the forks."""
    before = os.getcwd()
    os.chdir(folder)
    sys.argv = ["wedlm", *words]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise RuntimeError(words) from end
    finally:
        os.chdir(before)


@dataclass(frozen=True)
class Command:
    """What a command is asked for, and what must be whole afterwards.

    `check(folder)` raises if a file is not whole; `earlier` are the words of the run that made what was there before.
    """

    words: str
    check: Callable[[Path], None]
    earlier: str = ""
    until: str = ""  # what it says when it serves, until Ctrl-C

    def start(self, folder: Path, **fault: Any) -> Run:
        """Starts it."""
        return start(self.words.split(), folder, until=self.until, **fault)

    @property
    def codes(self) -> set[int]:
        """Exit codes that may end it without a fault."""
        return {130} if self.until else {0}


def whole_json(*names: str) -> Callable[[Path], None]:
    def check(folder: Path) -> None:
        for name in names:
            text = (folder / name).read_text()
            assert text.rstrip().endswith("</html>") if name.endswith(".html") else json.loads(text), name

    return check


def whole_weights(file: Path) -> None:
    with safe_open(file, "pt") as weights:
        assert list(weights.keys())


def whole_model(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        json.loads((folder / "config.json").read_text())
        files = list(folder.glob("*.safetensors"))
        assert files, "no weights"
        for file in files:
            whole_weights(file)


def whole_training(folder: Path) -> None:
    from wedlm_hf.training.saving import check_resumable, newest_complete_checkpoint

    whole_model(folder / "out")
    for path in (folder / "out").glob("checkpoint-*"):
        whole_model(path)
        check_resumable(path)
    newest_complete_checkpoint(folder / "out")


def whole_adapter(folder: Path) -> None:
    json.loads((folder / "out" / "adapter_config.json").read_text())
    whole_weights(folder / "out" / "adapter_model.safetensors")
    assert (folder / "out" / "README.md").read_text().startswith("---")


def nothing(folder: Path) -> None:
    """It writes no files."""


TRAIN = (
    "train --model_name_or_path model --dataset chats.jsonl --output_dir out --per_device_train_batch_size 2 "
    "--gradient_accumulation_steps 1 --block_size 4 --max_length 64 --bf16 false --use_cpu true --logging_steps 1 "
    "--save_strategy steps --save_steps 1 --save_total_limit 2 --disable_tqdm true --report_to none "
    "--resume_from_checkpoint auto --max_steps "
)
REPORT = (
    "report model --file prompts.txt --windows 4 --thresholds 0.5 --penalties 0 --draft-thresholds 5 --repeats 1 "
    "--count 2 --sweep-count 1 --timed 1 --sweep-timed 1 --batch-sizes 1 --decoders wedlm --output out "
)
ADAPT = "adapt base out --prompts prompts.txt --rank 2 --head-width 8 --device cpu --tokens "
COMMANDS = {
    "generate": Command("generate Count Sort --model model --max-new-tokens 24", nothing),
    "trace": Command(
        "generate Count --model model --trace page.html --trace trace.json --repeats 1 --max-new-tokens 24",
        whole_json("page.html", "trace.json"),
        "generate Sort --model model --trace page.html --trace trace.json --repeats 1 --max-new-tokens 4",
    ),
    "report": Command(
        REPORT + "--max-new-tokens 8 --max-loss 100 --save-settings",
        whole_json("out/report.json", "out/report.html", "model/generation_config.json", "model/config.json"),
        REPORT + "--max-new-tokens 6",
    ),
    "convert": Command("convert stock new", lambda folder: whole_model(folder / "new")),
    "serve": Command("serve model --port 0", nothing, until="http://"),
    "train": Command(TRAIN + "3", whole_training, TRAIN + "1"),
    "adapt": Command(ADAPT + "200", whole_adapter, ADAPT + "60"),
}


def prepare(folder: Path) -> None:
    """A tiny model, a stock one, prompts and chats."""
    shutil.copytree(write_checkpoint(folder / "model", suppress_tokens=[MASK]), folder / "base")
    write_stock_checkpoint(folder / "stock")
    lines = [line.strip().replace("\n", " ") for line in LINES]
    (folder / "prompts.txt").write_text("\n".join(lines + [f"{line} {line[::-1]}" for line in lines]))
    chat = {"messages": [{"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": "7, of course"}]}
    (folder / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 6)


def run_under(fault: str, command: Command, folder: Path, seconds: float, rng: random.Random) -> list[Run]:
    """Runs the command under a fault, at a random moment of the `seconds` that it takes."""
    if fault in ("SIGINT", "SIGTERM"):
        run = command.start(folder)
        run.wait(rng.uniform(0, seconds))
        if run.code is None:
            os.kill(run.pid, signal.Signals[fault])
            run.wait()
        return [run]
    if fault == "limit":
        run = command.start(folder, limit=int(10 ** rng.uniform(0, 5.5)))
    elif fault == "pipe":
        reader, writer = os.pipe()
        run = command.start(folder, pipe=(reader, writer))
        os.close(writer)
        if rng.random() < 0.7:
            select.select([reader], [], [], TIME_LIMIT)  # `| head -1`; otherwise it is closed from the beginning
        os.close(reader)
    elif fault == "twice":
        run = command.start(folder)
        run.wait(rng.uniform(0, seconds))
        second = command.start(folder)
        if run.code is None:
            run.wait()
        second.wait()
        return [run, second]
    run.wait()
    return [run]


def problem_of(run: Run, fault: str, codes: set[int]) -> str:
    """What is wrong with how a run ended."""
    text = run.output.decode(errors="replace")
    if run.code not in CODES[fault] | codes:
        return f"exit code {run.code}: {text[-300:]!r}"
    if "Traceback" in text or "Exception ignored" in text:
        return f"traceback: {text[-1500:]}"
    if text.rfind("\x1b[?25l") > text.rfind("\x1b[?25h"):
        return "the cursor is hidden"
    return ""


def trial(command: Command, fault: str, template: Path, seconds: float, rng: random.Random) -> tuple[str, str]:
    """Returns `"tried"`, `"early"` (the command ended before its fault), and what went wrong, if anything."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name) / "work"
        folder.mkdir()
        shutil.copytree(template, folder, dirs_exist_ok=True)
        before = {path: path.read_bytes() for path in folder.glob("model/*") if path.name != "generation_config.json"}
        runs = run_under(fault, command, folder, seconds, rng)
        problem = next(filter(None, (problem_of(run, fault, command.codes) for run in runs)), "")
        if not problem and not any(run.code in command.codes for run in runs) and fault == "twice":
            problem = f"both failed: {[run.output[-300:] for run in runs]}"
        try:
            command.check(folder)
            assert all(path.read_bytes() == content for path, content in before.items()), "model changed"
        except Exception as error:
            problem = problem or f"not whole: {type(error).__name__}: {error}"
        if not problem and any(run.code for run in runs):
            again = command.start(folder)
            again.wait()
            text = again.output.decode(errors="replace")
            if again.code not in command.codes and "must be new or empty" not in text:  # a conversion that had ended
                problem = f"the next run ended with {again.code}: {text[-400:]!r}"
            left = [path.name for path in folder.rglob(".*") if path.is_file() and path.name != ".lock"]
            problem = problem or (f"left over: {left}" if left else "")
        return ("tried" if any(run.code for run in runs) else "early"), problem


def template_of(command: Command, folder: Path) -> float:
    """Makes what was there before, and returns the seconds that the command takes."""
    prepare(folder)
    if command.earlier:
        run_here(command.earlier.split(), folder)
    with tempfile.TemporaryDirectory() as name:
        shutil.copytree(folder, name, dirs_exist_ok=True)
        shutil.copytree(folder, f"{name}/here")
        if not command.until:
            run_here(command.words.split(), Path(name) / "here")
        run = command.start(Path(name))
        run.wait()
        assert run.code in command.codes, run.output.decode(errors="replace")
        command.check(Path(name))
        return time.monotonic() - run.started


def table(trials: int, commands: list[str], faults: list[str], seed: int = 0) -> tuple[list[list[str]], list[str]]:
    """Rows of `tried/held` (ended early in brackets), and what went wrong."""
    rng, rows, problems = random.Random(seed), [], []
    for name in commands:
        with tempfile.TemporaryDirectory(prefix="template-") as folder:
            seconds = template_of(COMMANDS[name], Path(folder))
            row = [name]
            for fault in faults:
                found = [trial(COMMANDS[name], fault, Path(folder), seconds, rng) for _ in range(trials)]
                wrong = [f"{name}, {fault}: {problem}" for _, problem in found if problem]
                print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr, flush=True)
                row.append(f"{trials}/{trials - len(wrong)} ({sum(kind == 'early' for kind, _ in found)})")
                problems += wrong
            rows.append(row)
            print(f"| {' | '.join(row)} |", flush=True)
    return rows, problems


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--commands", default=",".join(COMMANDS))
    parser.add_argument("--faults", default=",".join(CODES))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"| command | {' | '.join(options.faults.split(','))} |")
    _, found = table(options.trials, options.commands.split(","), options.faults.split(","), options.seed)
    sys.exit(bool(found))
