"""The command `wedlm`: what it prints, where prompts come from, and one line for what is wrong."""

import io
import json
import signal
import subprocess
import sys
import time

import pytest
import torch
from nano_tasks import TASKS
from rich.console import Console
from tiny import MASK, tiny_model, tiny_tokenizer, write_checkpoint
from typer.testing import CliRunner

from wedlm_hf import cli
from wedlm_hf.apps.generate import compare, comparison_table
from wedlm_hf.cli import options
from wedlm_hf.cli.application import console
from wedlm_hf.console.streaming import AnswerStreamer, printable
from wedlm_hf.eval.measure import Decoding, ForwardCounter
from wedlm_hf.eval.prompts import encode
from wedlm_hf.eval.request import AnswerRequest

LABELS = ["new tokens", "forwards", "tokens per forward", "prefix cacheability", "tokens/s", "speed against AR"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), suppress_tokens=[MASK], entropy_threshold=2.0)


@pytest.fixture
def wedlm(checkpoint):
    """Runs the command on the tiny checkpoint and returns (exit code, output, errors)."""

    def run(*arguments, model=checkpoint, stdin=""):
        options = ["--model", str(model)] if arguments[0] == "generate" else []
        result = CliRunner().invoke(cli.app, [arguments[0], *options, *map(str, arguments[1:])], input=stdin)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.stdout, result.stderr

    return run


def table_of(output):
    """{row: [cells]} of the table at the end."""
    lines = output[output.index("  strategy") :].splitlines()
    labels = ["strategy", *LABELS]
    rows = {
        label: line.split(label)[1].split() for line in lines for label in labels if line.startswith(f"  {label} ")
    }
    assert list(rows) in (labels, labels[:-1])
    return rows


def prompts_of(output):
    return [line.removeprefix("› ") for line in output.splitlines() if line.startswith("› ")]


# --- help ---------------------------------------------------------------------------------------------------------


def test_help_needs_neither_torch_nor_transformers():
    check = (
        "import sys; from typer.testing import CliRunner; from wedlm_hf import cli\n"
        "for command in ([], ['generate'], ['convert']):\n"
        "    result = CliRunner().invoke(cli.app, [*command, '--help'])\n"
        "    assert result.exit_code == 0 and 'Usage' in result.stdout\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# --- generate -----------------------------------------------------------------------------------------------------


def test_an_answer_is_printed_with_what_it_took_next_to_ar(wedlm):
    code, output, errors = wedlm("generate", "1, 2, 3", "--max-new-tokens", 9, "--raw")
    assert (code, errors) == (0, "")
    model, tokenizer = tiny_model(), tiny_tokenizer()
    inputs = tokenizer("1, 2, 3", return_tensors="pt")
    options = {"strategy": "wedlm", "entropy_threshold": 2.0, "suppress_tokens": [MASK], "max_new_tokens": 9}
    with ForwardCounter(model) as counter:
        ids = model.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :]
    assert f"› 1, 2, 3\n{tokenizer.decode(ids, skip_special_tokens=True)}\n" in output
    rows = table_of(output)
    assert rows["strategy"] == ["wedlm", "ar"]
    assert rows["new tokens"][0] == str(len(ids))
    assert rows["forwards"][0] == str(counter.forwards)
    assert rows["forwards"][1] == rows["new tokens"][1]
    assert rows["tokens per forward"][0] == f"{len(ids) / counter.forwards:.2f}"
    assert rows["speed against AR"][1] == "1.00×"
    _, output, _ = wedlm("generate", "1, 2, 3", "Sort 4, 3", "--max-new-tokens", 9, "--verification", "exact")
    assert output.count("same answer") == 2
    assert table_of(output)["new tokens"] == ["18", "18"]  # over both prompts


def test_without_comparison_only_one_decoder_runs(wedlm):
    for arguments, names in ((["--no-compare"], ["wedlm"]), (["--strategy", "ar"], ["ar"])):
        _, output, _ = wedlm("generate", "1, 2, 3", "--max-new-tokens", 5, *arguments)
        assert table_of(output)["strategy"] == names


def test_sampling_is_a_function_of_the_seed(wedlm):
    def answer(*options):
        _, output, _ = wedlm("generate", "1, 2", "--raw", "--no-compare", "--max-new-tokens", 9, *options)
        return output.splitlines()[1]

    assert answer("--sample") == answer("--sample", "--seed", 0) != answer("--sample", "--seed", 1)
    assert answer("--temperature", 1.0) == answer("--sample")
    assert answer("--temperature", 0.01) == answer()


def test_prompts_come_from_the_command_line_a_file_or_standard_input(wedlm, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("first\n\n  second \n")
    short = ("--max-new-tokens", 1, "--no-compare")
    assert prompts_of(wedlm("generate", *short, "given", stdin="unread")[1]) == ["given"]
    assert prompts_of(wedlm("generate", *short, "--file", path)[1]) == ["first", "second"]
    assert prompts_of(wedlm("generate", *short, "--file", path, "given")[1]) == ["given", "first", "second"]
    # What is piped in is text, even where it looks like JSON.
    assert prompts_of(wedlm("generate", *short, stdin='{"prompt": "a"}\rb\n')[1]) == ['{"prompt": "a"}', "b"]
    assert prompts_of(wedlm("generate", *short, "--file", "-", "given", stdin="third")[1]) == ["given", "third"]


def test_rows_of_a_file_are_prompts_and_conversations(wedlm, tmp_path):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1, 2"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ({"prompt": "a\nb", "answer": 3}, {"messages": turns})))
    asked = ("generate", "--max-new-tokens", 4, "--strategy", "ar", "--file", path)
    code, output, errors = wedlm(*asked, "--json", "given")
    assert (code, errors) == (0, "")
    found = json.loads(output)["answers"]
    assert [answer["prompt"] for answer in found] == ["given", "a\nb", "Be brief.\n1, 2"]
    ids = torch.tensor([encode(tiny_tokenizer(), turns)])
    wanted = tiny_model().generate(ids, strategy="ar", suppress_tokens=[MASK], max_new_tokens=4)[0, ids.shape[1] :]
    assert found[2]["ar"]["tokens"] == wanted.tolist()
    assert "› Be brief.\n1, 2\n" in wedlm(*asked)[1]
    assert wedlm(*asked, "--raw") == (2, "", "Error: Without a chat template, a row holds one turn, got 2.\n")


@pytest.mark.parametrize(
    ("number", "code", "becomes"),
    [(signal.SIGINT, 130, end) for end in (KeyboardInterrupt, ImportError, "dropped", "swallowed")]
    + [(signal.SIGTERM, 143, end) for end in (RuntimeError, "dropped")],
)
def test_a_signal_gives_the_shells_code_whatever_the_interrupted_code_makes_of_it(number, code, becomes, monkeypatch):
    class Destroyed:
        def __del__(self):
            signal.raise_signal(number)

    def interrupted(*arguments):
        if becomes == "dropped":  # by Python
            Destroyed()
            time.sleep(60)
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            time.sleep(1.2)  # to clean up, which nothing cuts off
            cleaned.append(True)
            if becomes != "swallowed":
                raise becomes from None
        time.sleep(60)

    cleaned = []
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(options.LoadingOptions, "load", interrupted)
    monkeypatch.setattr(sys, "argv", ["wedlm", "generate", "hi"])
    start = time.monotonic()
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == code
    assert cleaned or becomes == "dropped"
    assert time.monotonic() - start < 30
    # Otherwise a second signal would start the timer again, which kills the process while Python shuts down.
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_what_looks_like_markup_is_printed_as_it_is(capsys):
    console().print("build/[/b]/report.html", style="dim")
    assert capsys.readouterr().out == "build/[/b]/report.html\n"


def test_without_prompts_there_is_one_built_in_prompt_for_each_task(wedlm):
    _, output, _ = wedlm("generate", "--max-new-tokens", 1, "--no-compare")
    first_lines = [prompt.splitlines()[0] for prompt in options.DEMO_PROMPTS]
    assert prompts_of(output) == first_lines
    assert len(first_lines) == len(TASKS)


def test_a_checkpoint_without_a_chat_template_continues_the_prompts(wedlm, checkpoint, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    short = ("generate", "1, 2", "--max-new-tokens", 4, "--no-compare", "--entropy-threshold", 2)
    _, output, errors = wedlm(*short, model=tmp_path)
    assert errors == f"{str(tmp_path)!r} has no chat template: the prompts are continued as they are.\n"
    assert output.splitlines()[1] == wedlm(*short, "--raw")[1].splitlines()[1]


# --- streaming ----------------------------------------------------------------------------------------------------


def test_text_is_streamed_run_by_run_and_characters_stay_whole():
    tokenizer, written = tiny_tokenizer(), []
    streamer = AnswerStreamer(tokenizer, lambda text, group: written.append((text, group)))
    ids = tokenizer("a", return_tensors="pt").input_ids
    euro = tokenizer("€", return_tensors="pt").input_ids[0]
    assert len(euro) == 3
    streamer.put(ids)  # the prompt
    for tokens in (ids[0], euro[:1], euro[:0], euro[1:], euro[:1]):
        streamer.put(tokens)
    streamer.end()
    assert written == [("a", 1), ("€", 3), ("\N{REPLACEMENT CHARACTER}", 4)]
    assert streamer.seconds > 0


def test_a_terminal_shows_which_tokens_became_final_together():
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, color_system="standard", width=80)
    model = tiny_model()
    options = {"strategy": "wedlm", "window_size": 1, "max_new_tokens": 12}
    compare(model, tiny_tokenizer(), AnswerRequest(["1, 2, 3"], options), console)
    assert "Neighbours of one colour became final in the same forward." in written.getvalue()
    assert {"\x1b[36m", "\x1b[35m"} <= {f"\x1b[{part.split('m')[0]}m" for part in written.getvalue().split("\x1b[")}


def test_control_characters_of_prompts_and_answers_do_not_reach_the_terminal():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    assert printable("a\x1b[31m\x07\tb\n\x9b\x7f") == "a␛[31m␇\tb\n\ufffd␡"
    kept = tokenizer("\x1b7").input_ids
    others = [token for token in range(model.config.vocab_size) if token not in kept]
    options = {"strategy": "wedlm", "entropy_threshold": 100.0, "max_new_tokens": 24, "suppress_tokens": others}
    console = Console(file=io.StringIO())
    compare(model, tokenizer, AnswerRequest(["hi\x1b[2J"], options, raw=True), console)
    output = console.file.getvalue()
    assert "› hi␛[2J\n" in output and "␛" in output.split("its answer:")[1] and "\x1b" not in output


def test_the_table_fits_a_narrow_terminal():
    console = Console(file=io.StringIO(), width=60)
    console.print(comparison_table({name: [Decoding([0] * 10**6, "", 10**5, 10**7, 1.0)] for name in ("wedlm", "ar")}))
    assert "…" not in console.file.getvalue()
    assert table_of(console.file.getvalue())["speed against AR"] == ["1.00×", "1.00×"]


def test_the_toy_says_what_it_is_and_how_to_ask_a_real_model(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, ["generate", "Why is the sky blue?", "--max-new-tokens", "2"])
    assert "wedlm-nano is a toy" in result.stderr
    assert "wedlm generate 'Why is the sky blue?' --model build/smollm2/SmolLM2-135M-Inst" in result.stderr
    assert "after `make real`" in result.stderr
    assert "toy" not in CliRunner().invoke(cli.app, ["generate", "--max-new-tokens", "2"]).stderr


# --- train --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "needs"),
    [
        (["train"], "Training needs trl"),
        (["adapt", "base", "out", "--tokens", "9"], "`wedlm adapt` needs accelerate, filelock, matplotlib, pandas"),
    ],
)
def test_a_command_says_what_to_install(monkeypatch, words, needs):
    monkeypatch.setattr(cli.application, "find_spec", lambda name: None)
    result = CliRunner().invoke(cli.app, words)
    assert (result.exit_code, result.stderr) == (2, f"Error: {needs}: pip install '.[train]' in the clone.\n")
