"""`wedlm generate`: what it prints and streams, where prompts come from, and what a signal ends it with."""

import io
import json
import signal
import sys
import time

import pytest
import torch
from nano_tasks import TASKS
from rich.console import Console
from tiny import MASK, tiny_model, tiny_tokenizer, write_checkpoint, write_stock_checkpoint
from typer.testing import CliRunner

from wedlm_hf import cli
from wedlm_hf.checkpoints.loading import load_model
from wedlm_hf.cli import options
from wedlm_hf.cli.application import console
from wedlm_hf.console.streaming import AnswerStreamer, printable
from wedlm_hf.eval.answers import compare, comparison_table
from wedlm_hf.eval.measure import Decoding, ForwardCounter
from wedlm_hf.eval.prompts import encode
from wedlm_hf.eval.request import AnswerRequest

LABELS = ["new tokens", "forwards", "tokens per forward", "prefix cacheability", "tokens/s", "speed against AR"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    stored = {"suppress_tokens": [MASK], "entropy_threshold": 2.0, "masks_ready": True}
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), **stored)


@pytest.fixture
def generate(checkpoint):
    """Runs the command on the tiny checkpoint and returns (exit code, output, errors)."""

    def run(*arguments, model=checkpoint, stdin=""):
        result = CliRunner().invoke(cli.app, ["generate", "--model", *map(str, (model, *arguments))], input=stdin)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.stdout, result.stderr

    return run


def table_of(output):
    """{row: [cells]} of the table at the end."""
    labels, rows = ["strategy", *LABELS], {}
    for line in output[output.index("  strategy") :].splitlines():
        rows |= {label: line.split(label)[1].split() for label in labels if line.startswith(f"  {label} ")}
    assert list(rows) in (labels, labels[:-1])
    return rows


def prompts_of(output):
    return [line.removeprefix("› ") for line in output.splitlines() if line.startswith("› ")]


def test_an_answer_is_printed_with_what_it_took_next_to_ar_unless_one_decoder_is_enough(generate):
    code, output, errors = generate("1, 2, 3", "--max-new-tokens", 9, "--raw")
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
    assert rows["forwards"] == [str(counter.forwards), rows["new tokens"][1]]
    assert rows["tokens per forward"][0] == f"{len(ids) / counter.forwards:.2f}"
    assert rows["speed against AR"][1] == "1.00×"
    for arguments, name in ((["--no-compare"], "wedlm"), (["--strategy", "ar"], "ar")):
        assert table_of(generate("1, 2, 3", "--max-new-tokens", 5, *arguments)[1])["strategy"] == [name]


def test_a_model_without_masks_decodes_as_ar_and_says_so_in_one_line(generate, tmp_path):
    write_stock_checkpoint(tmp_path / "stock")
    asked = ("1, 2, 3", "--raw", "--max-new-tokens", 9, "--json")
    model, inputs = load_model(tmp_path / "stock"), tiny_tokenizer()("1, 2, 3", return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=9)[0, inputs["input_ids"].shape[1] :].tolist()
    for more in ((), ("--strategy", "ar", "--set", "prompt_lookup_num_tokens=3")):
        code, output, errors = generate(*asked, *more, model=tmp_path / "stock")
        (answer,) = json.loads(output)["answers"]
        assert (code, answer.keys(), answer["ar"]["tokens"]) == (0, {"prompt", "ar"}, tokens)
        assert errors.count("\n") == (not more) and ("decodes token by token" in errors) == (not more)


def test_answers_to_several_prompts_are_counted_together_and_printed_as_json(generate):
    words = ("1, 2, 3", "Sort 4, 3", "--max-new-tokens", 5, "--verification", "exact")
    output = generate(*words)[1]
    assert output.count("same answer") == 2 and table_of(output)["new tokens"] == ["10", "10"]
    results = json.loads(generate(*words, "--json")[1])
    assert [answer["prompt"] for answer in results["answers"]] == ["1, 2, 3", "Sort 4, 3"]
    for answer in results["answers"]:
        assert answer["wedlm"]["text"] == answer["ar"]["text"]
        assert answer["ar"]["forwards"] == len(answer["ar"]["tokens"]) == 5
    assert (results["decoders"]["ar"]["new_tokens"], results["decoders"]["ar"]["speed_against_ar"]) == (10, 1)


def test_sampling_is_a_function_of_the_seed(generate):
    def answer(*options):
        return generate("1, 2", "--raw", "--no-compare", "--max-new-tokens", 9, *options)[1].splitlines()[1]

    assert answer("--sample") == answer("--sample", "--seed", 0) != answer("--sample", "--seed", 1)
    assert answer("--temperature", 1.0) == answer("--sample")
    assert answer("--temperature", 0.01) == answer()


def test_prompts_come_from_the_command_line_a_file_or_standard_input_or_are_one_of_each_task(generate, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("first\n\n  second \n")

    def prompts(*words, stdin=""):
        return prompts_of(generate("--max-new-tokens", 1, "--no-compare", *words, stdin=stdin)[1])

    assert prompts("given", stdin="unread") == ["given"]
    assert prompts("--file", path, "given") == ["given", "first", "second"]
    # What is piped in is text, even where it looks like JSON.
    assert prompts(stdin='{"prompt": "a"}\rb\n') == ['{"prompt": "a"}', "b"]
    assert prompts("--file", "-", "given", stdin="third") == ["given", "third"]
    assert prompts() == [prompt.splitlines()[0] for prompt in options.DEMO_PROMPTS]
    assert len(options.DEMO_PROMPTS) == len(TASKS)


def test_rows_of_a_file_are_prompts_and_conversations(generate, tmp_path):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1, 2"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ({"prompt": "a\nb", "answer": 3}, {"messages": turns})))
    asked = ("--max-new-tokens", 4, "--strategy", "ar", "--file", path)
    code, output, errors = generate(*asked, "--json", "given")
    assert (code, errors) == (0, "")
    found = json.loads(output)["answers"]
    assert [answer["prompt"] for answer in found] == ["given", "a\nb", "Be brief.\n1, 2"]
    ids = torch.tensor([encode(tiny_tokenizer(), turns)])
    wanted = tiny_model().generate(ids, strategy="ar", suppress_tokens=[MASK], max_new_tokens=4)[0, ids.shape[1] :]
    assert found[2]["ar"]["tokens"] == wanted.tolist()
    assert "› Be brief.\n1, 2\n" in generate(*asked)[1]
    assert generate(*asked, "--raw") == (2, "", "Error: Without a chat template, a row holds one turn, got 2.\n")


def test_a_checkpoint_without_a_chat_template_continues_the_prompts(generate, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    short = ("1, 2", "--max-new-tokens", 4, "--no-compare", "--entropy-threshold", 2)
    _, output, errors = generate(*short, model=tmp_path)
    assert errors == f"{str(tmp_path)!r} has no chat template: the prompts are continued as they are.\n"
    assert output.splitlines()[1] == generate(*short, "--raw")[1].splitlines()[1]


def test_the_toy_says_what_it_is_and_how_to_ask_a_real_model(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, ["generate", "Why is the sky blue?", "--max-new-tokens", "2"])
    for said in (
        "wedlm-nano is a toy",
        "after `make real`",
        "'Why is the sky blue?' --model build/smollm2/SmolLM2-135M",
    ):
        assert said in result.stderr
    assert "toy" not in CliRunner().invoke(cli.app, ["generate", "--max-new-tokens", "2", "--no-compare"]).stderr


@pytest.fixture
def heard():
    """Ctrl-C interrupts, also where a shell began the tests in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize(("number", "code", "becomes"), [
    (signal.SIGINT, 130, KeyboardInterrupt), (signal.SIGINT, 130, "dropped"), (signal.SIGINT, 130, "swallowed"),
    (signal.SIGTERM, 143, ImportError), (signal.SIGTERM, 143, "dropped"),
])  # fmt: skip
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


def test_a_terminal_shows_which_tokens_became_final_together_and_a_narrow_one_the_whole_table():
    shown = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
    request = AnswerRequest(["1, 2, 3"], {"strategy": "wedlm", "window_size": 1, "max_new_tokens": 12})
    compare(tiny_model(), tiny_tokenizer(), request, shown)
    assert "Neighbours of one colour became final in the same forward." in shown.file.getvalue()
    assert "\x1b[36m" in shown.file.getvalue() and "\x1b[35m" in shown.file.getvalue()
    narrow = Console(file=io.StringIO(), width=60)
    narrow.print(comparison_table({name: [Decoding([0] * 10**6, "", 10**5, 10**7, 1.0)] for name in ("wedlm", "ar")}))
    assert "…" not in narrow.file.getvalue()
    assert table_of(narrow.file.getvalue())["speed against AR"] == ["1.00×", "1.00×"]


def test_neither_markup_nor_control_characters_of_prompts_and_answers_reach_the_terminal(capsys):
    console().print("build/[/b]/report.html", style="dim")
    assert capsys.readouterr().out == "build/[/b]/report.html\n"
    model, tokenizer = tiny_model(), tiny_tokenizer()
    assert printable("a\x1b[31m\x07\tb\n\x9b\x7f") == "a␛[31m␇\tb\n\ufffd␡"
    kept = tokenizer("\x1b7").input_ids
    others = [token for token in range(model.config.vocab_size) if token not in kept]
    options = {"strategy": "wedlm", "entropy_threshold": 100.0, "max_new_tokens": 24, "suppress_tokens": others}
    shown = Console(file=io.StringIO())
    compare(model, tokenizer, AnswerRequest(["hi\x1b[2J"], options, raw=True), shown)
    output = shown.file.getvalue()
    assert "› hi␛[2J\n" in output and "␛" in output.split("its answer:")[1] and "\x1b" not in output
