"""How models write their messages: the forms of thoughts and tool calls that chat templates teach."""

from types import SimpleNamespace
from typing import Any

from transformers.cli.serving.utils import get_response_template
from transformers.utils.chat_parsing.content_parsers import CONTENT_PARSERS

SPACE = r"\s*"
STOCK_TYPE = {"wedlm": "qwen3"}  # whose messages a model writes
_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


def _form(start: str, calls: dict[str, Any], end: str) -> dict[str, Any]:
    content = {"close_pattern": end, "content": "text"}
    calls = {"repeats": True, "content": "json"} | calls
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": start,
        "fields": {"tool_calls": calls, "content": content},
    }


# In the order in which they are looked for: a mark in the chat template, and the form or the type of models that
# transformers knows to have it. A call of Llama's is bare JSON; Mistral's newer ones name the function in front.
_FORMS: dict[str, str | dict[str, Any]] = {
    "<|tool_call>": "gemma4",
    "<function=": "qwen3_5",
    "<tool_call>": "qwen3",  # and Hermes, SmolLM2, SmolLM3
    "<|tool_call_start|>": _form(
        "<|im_start|>assistant\n",
        {
            "open": "<|tool_call_start|>",
            "close": "<|tool_call_end|>",
            "content": "python-call-list" if "python-call-list" in CONTENT_PARSERS else "json",
        },
        r"<\|im_end\|>",
    ),
    "[TOOL_CALLS]": _form(
        "[/INST]",
        {"open": "[TOOL_CALLS]", "close_pattern": r"(?#[ARGS][CALL_ID])(?=\[TOOL_CALLS\])|</s>"},
        "</s>",
    ),
    "<start_function_call>": _form(
        "<start_of_turn>model\n",
        {
            "open_pattern": r"<start_function_call>call:(?P<name>\w+)",
            "close": "<end_function_call>",
            "content_args": {"unquoted_keys": True, "string_delims": [["<escape>", "<escape>"]]},
            "transform": _CALL,
        },
        "<end_of_turn>",
    ),
    '"parameters": ': _form(
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        {
            "open_pattern": r'(?:<\|python_tag\|>\s*)?(?=(?:\[\s*)?\{\s*"(?:name|type|function)"\s*:)',
            "close_pattern": r"\s*(?:<\|eot_id\|>|<\|eom_id\|>)",
        },
        r"<\|eot_id\|>|<\|eom_id\|>",
    ),
    "<|channel|>": {  # of gpt-oss: each part of a message has a header, of which people see nothing
        "defaults": {"role": "assistant"},
        "start_anchor": "<|start|>assistant",
        "fields": {
            "reasoning_content": {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
                "close_pattern": r"<\|end\|>|(?=<\|start\|>)",
                "content": "text",
            },
            "tool_calls": {
                "open_pattern": r"(?:<\|start\|>assistant)?(?: to=functions\.(?P<name>[\w.-]+)<\|channel\|>\w+"
                r"|<\|channel\|>\w+ to=functions\.(?P<name>[\w.-]+))\s*+(?:<\|constrain\|>)?\w*+\s*+<\|message\|>",
                "close": ["<|call|>", "<|end|>"],
                "repeats": True,
                "content": "json",
                "transform": _CALL,
            },
            "content": {
                "close_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)\s*<\|message\|>"
                r"|<\|return\|>|<\|end\|>|<\|call\|>",
                "content": "text",
            },
        },
    },
    "</think>": "qwen3",  # and DeepSeek-R1's distilled models
}


def message_form(tokenizer: Any, model_type: str) -> dict[str, Any] | None:
    """The `response_template` of a model: its own, or else by marks in its chat template, or by its type."""
    form: Any = None
    if getattr(tokenizer, "response_template", None) is None:
        written = str(tokenizer.chat_template or "")
        form = next((form for mark, form in _FORMS.items() if mark in written), STOCK_TYPE.get(model_type, model_type))
    if not isinstance(form, dict):
        config = SimpleNamespace(model_type=form)
        form = get_response_template(tokenizer, SimpleNamespace(config=config))  # type: ignore[arg-type]
    return form and form | {"fields": {name: _linear(field) for name, field in form["fields"].items()}}


def _linear(field: dict[str, Any]) -> dict[str, Any]:
    """A field whose text is read in a time that grows with it alone: patterns would try white space, as much as a
    model may write, anew from each of its characters."""
    rests = {
        key: field[key].removeprefix(SPACE)
        for key in ("open_pattern", "close_pattern")
        if field.get(key, "").startswith(SPACE)
    }
    field = field | {key: rf"(?<!\s)\s++(?:{rest})|{rest}" for key, rest in rests.items()}
    if tags := field.get("content_args", {}).get("tag_pattern"):
        tags = tags.replace(rf".*?){SPACE}", r".*?)(?:(?<!\s)\s++)?").replace(r">\s*(?P<value>", r">\s*+(?P<value>")
        field["content_args"] = field["content_args"] | {"tag_pattern": tags}
    return field
