"""Model cards (README.md): written with every save, replaced by the next one, and never in place of a person's own.

A card that was written here carries a digest of itself. Where the digest still fits, the card is as it was written and
may be replaced; a card that was edited, on the disk or on the Hub, stays as it is.
"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache
from huggingface_hub.utils import HFValidationError, validate_repo_id

from ..generation.settings import WeDLMGenerationSettings
from .files import write_text

CARD_NAME = "README.md"
TAGS = ("wedlm", "diffusion-language-model", "parallel-decoding")
# Metadata of the base that holds for what was made of it.
INHERITED = ("license", "license_name", "license_link", "language")

_MARKER = "<!-- wedlm-hf wrote this card ({}) and replaces it when the model is saved again, unless it is edited. -->"
_MARKED = re.compile(_MARKER.replace("(", r"\(").replace(")", r"\)").format("([0-9a-f]{12})") + "\n*")
_MEASURED = re.compile(r"(<!-- measured: \w+ -->\n).*?(?=<!-- /measured -->)", flags=re.DOTALL)
_SHOWN = {"window_size": "slots", "entropy_threshold": "nats", "distance_penalty": "nats per position"}
_TITLE, _NO_LICENSE = "A WeDLM model", "Not stated: set `license` at the top of this file."

_TEMPLATE = """---
{{ card_data }}
---

# {{ title }}

A [WeDLM](https://arxiv.org/abs/2512.22737) language model
{%- if base %}, made from [{{ base }}](https://huggingface.co/{{ base }}){% endif %}:
it predicts several tokens in one forward under plain causal attention.
{{ config.num_hidden_layers }} layers of width {{ config.hidden_size }}, a context of
{{ config.max_position_embeddings }} tokens, a vocabulary of {{ config.vocab_size }}.

## Use

The code is beside the weights; it needs torch and transformers.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({{ place }}, trust_remote_code=False)  # needs no code
model = AutoModelForCausalLM.from_pretrained({{ place }}, trust_remote_code=True)
{%- if is_chat %}
chat = [{"role": "user", "content": "Count from 1 to 20."}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
{%- else %}
inputs = tokenizer("Count from 1 to 20: 1, 2,", return_tensors="pt")
{%- endif %}
output = model.generate(**inputs, strategy="wedlm", max_new_tokens=128)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```

## Decoding settings

What `strategy="wedlm"` uses unless it is told otherwise:

| setting | value |
|---|---|
{%- for name, unit in shown.items() %}
| `{{ name }}` | {{ settings[name] }} {{ unit }} |
{%- endfor %}
| `verification` | `"{{ settings.verification }}"` |

With `verification="exact"` the text is that of token-by-token decoding with the same weights. Without, a higher
`entropy_threshold` fills more tokens in one forward and may change the text.

## Measured

<!-- measured: summary -->
Nothing yet: `wedlm report FOLDER --file data.jsonl --fill FOLDER/README.md` measures speed and quality, and writes the
table here.
<!-- /measured -->

<!-- measured: setup -->
<!-- /measured -->
{%- if training %}

## Training

{{ training }}
{%- endif %}

## Licence

{% if license %}{{ license }}.{% else %}{{ no_license }}{% endif %}
"""


def model_card(
    model: Any,
    folder: str | os.PathLike[str] | None = None,
    *,
    repo_id: str | None = None,
    training: str = "",
    metadata: dict[str, Any] | None = None,
) -> str:
    """The text of a card for a model, by its config, its decoding settings, and the card of what it was made from.

    Args:
        model: of this package, or loaded by the code beside a checkpoint.
        folder: where it is saved; with a chat template there, the example is a chat.
        repo_id: of the Hub, for title and example.
        training: Markdown on how it was trained.
        metadata: further fields, in place of those of the base; lists of `tags` are added.
    """
    config = model.config
    base, inherited = provenance(str(config.name_or_path or ""))
    fields = {"base_model": base, **inherited, **(metadata or {})}
    settings = WeDLMGenerationSettings.from_generation_config(getattr(model, "generation_config", None), config)
    has_template = any(Path(folder or ".", name).is_file() for name in ("chat_template.jinja", "chat_template.json"))
    return render(
        _TEMPLATE,
        {"library_name": "transformers", "pipeline_tag": "text-generation"} | fields,
        title=repo_id.rpartition("/")[2] if repo_id else _TITLE,
        base=fields["base_model"],
        config=config,
        place=json.dumps(repo_id or "."),
        is_chat=folder is not None and has_template,
        settings=settings,
        shown=_SHOWN,
        training=training.strip(),
        license=fields.get("license"),
        no_license=_NO_LICENSE,
    )


def render(template: str, metadata: dict[str, Any], **names: Any) -> str:
    """A card with a digest of itself, from a Jinja template whose `card_data` is the metadata.

    Args:
        template: of the text, the metadata block included.
        metadata: fields of [`ModelCardData`]; those that are None are left out, and ours are added to `tags`.
        names: of the template.
    """
    tags = list(dict.fromkeys([*TAGS, *(metadata.get("tags") or ())]))
    data = ModelCardData(**{**{name: value for name, value in metadata.items() if value is not None}, "tags": tags})
    card: Any = ModelCard.from_template(data, template_str=template, **names)
    return _with_digest(str(card))


def is_ours(text: str | None) -> bool:
    """Whether a card was written here and is as it was."""
    return text is not None and _MARKED.search(text) is not None and not is_written_by_a_person(text)


def for_repository(text: str, repo_id: str, *, license: str | None = None) -> str:
    """A card of ours, as it was written, with the name that the model has on the Hub, and with its licence."""
    card: Any = ModelCard(_MARKED.sub("", text))
    if license is not None:
        card.data.license = license
        card.text = card.text.replace(_NO_LICENSE, f"{license}.")
    titled = card.text.replace(f"# {_TITLE}\n", f"# {repo_id.rpartition('/')[2]}\n", 1)
    named = titled.replace('from_pretrained("."', f'from_pretrained("{repo_id}"')
    card.text = re.sub(
        r"PeftModel\.from_pretrained\(model, '[^']*'", f"PeftModel.from_pretrained(model, '{repo_id}'", named
    )
    return _with_digest(str(card))


def _with_digest(text: str) -> str:
    text = text.rstrip() + "\n"
    head, _, body = text.partition("\n---\n")
    return f"{head}\n---\n\n{_MARKER.format(digest(text))}\n\n{body.lstrip()}"


def digest(text: str) -> str:
    """A digest of what a person may have written: without line ends, tags, measured tables and the digest itself."""
    card = ModelCard(text.replace("\r\n", "\n"), ignore_metadata_errors=True)
    metadata = {name: value for name, value in card.data.to_dict().items() if name != "tags"}
    words = _MEASURED.sub(r"\1", _MARKED.sub("", card.text)).split()
    return hashlib.sha256(json.dumps([metadata, words], sort_keys=True, default=str).encode()).hexdigest()[:12]


def is_written_by_a_person(text: str | None) -> bool:
    """Whether a card must be kept: not one of ours as it was written, nor an empty form of transformers or PEFT."""
    if text is None or not text.strip():
        return False
    if marked := _MARKED.search(text):
        try:
            return digest(text) != marked[1]
        except Exception:  # metadata that is no YAML any more, say
            return True
    body = text.split("\n---\n", 1)[-1]
    said = re.search(r"This is the model card of a .* has been automatically generated\.", body)
    form: Any = ModelCard.from_template(ModelCardData(), model_description=said[0] if said else None)
    body = re.sub(r"### Framework versions\s+(- PEFT \S+\s*)+$", "", body)  # what PEFT adds to the form
    return body.split() != form.text.split()


def read_card(folder: str | os.PathLike[str]) -> str | None:
    """The card in a folder, if there is one."""
    try:
        return Path(folder, CARD_NAME).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_card(folder: str | os.PathLike[str], text: str, *, overwrite: bool = False) -> bool:
    """Writes a card, whole or not at all, unless a person's own is there.

    Args:
        folder: where the model is.
        text: of the card.
        overwrite: also in place of a person's own.

    Returns:
        whether it was written.
    """
    if not overwrite and is_written_by_a_person(read_card(folder)):
        return False
    write_text(Path(folder, CARD_NAME), text)
    return True


def provenance(source: str) -> tuple[str | None, dict[str, Any]]:
    """What a model was made from: the Hub id of the base, if there is one, and what its card states for both.

    Args:
        source: folder or Hub id that the model was loaded from. A folder that was made from a Hub id passes it on.
    """
    is_folder = os.path.isdir(source)
    stated = _metadata(read_card(source) if is_folder else _cached_card(source))
    base = stated.get("base_model") if is_folder else source if is_hub_id(source) else None
    return base if isinstance(base, str) else None, {
        name: stated[name] for name in INHERITED if stated.get(name) is not None
    }


def is_hub_id(name: str) -> bool:
    """Whether a name can be one of the Hub and is no folder or file here."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1 and not os.path.exists(name)


def _cached_card(source: str) -> str | None:
    """The card of a Hub id, if it was downloaded before: nothing is fetched while a model is saved."""
    if not is_hub_id(source):
        return None
    path = try_to_load_from_cache(source, CARD_NAME)
    return Path(path).read_text(encoding="utf-8") if isinstance(path, str) else None


def _metadata(text: str | None) -> dict[str, Any]:
    """What the head of a card states; nothing where it cannot be read."""
    if text is None or not text.startswith("---"):
        return {}
    try:
        return dict(ModelCard(text, ignore_metadata_errors=True).data.to_dict())
    except Exception:  # YAML's own kinds, and values of a wrong type
        return {}


class ModelCardMixin:
    """Saves and uploads of a model write its card."""

    _own_card: str | None = None  # a person's, while the folder that it lies in is saved

    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """The parent's, with a model card beside the weights. A card that a person wrote stays as it is."""
        is_writer = bool(kwargs.get("is_main_process", args[0] if args else True))
        card = read_card(save_directory)
        self._own_card = card if is_written_by_a_person(card) else None
        try:
            result = super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
            if self._own_card is not None and read_card(save_directory) != card:
                write_card(save_directory, self._own_card, overwrite=True)  # a push has put the repository's here
            elif self._own_card is None and is_writer and not kwargs.get("push_to_hub"):
                write_card(save_directory, model_card(self, save_directory))
        finally:
            self._own_card = None
        return result

    def _upload_modified_files(self: Any, working_dir: Any, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        # transformers has put the repository's card here, or an empty form where there is none.
        found = read_card(working_dir)
        if not is_written_by_a_person(found):
            tags = _metadata(found).get("tags") or []
            card = self._own_card or model_card(self, working_dir, repo_id=repo_id, metadata={"tags": tags})
            write_card(working_dir, card, overwrite=True)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)  # type: ignore[misc]


__all__ = ["ModelCardMixin"]
