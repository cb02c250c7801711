"""Model cards (README.md): made from a template, and never in place of one that a person wrote or edited.

The last line of a card of ours is a digest of the lines above it. Another card replaces it only while that fits.
"""

import functools
import hashlib
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache
from huggingface_hub.utils import HFValidationError, validate_repo_id

from .files import write_text

logger = logging.getLogger(__name__)

CARD_NAME = "README.md"
TAGS = ("wedlm", "diffusion-language-model", "parallel-decoding")
# Metadata of the base that holds for what was made of it.
INHERITED = ("license", "license_name", "license_link", "language")
TEMPLATE = Path(__file__).with_name("model_card.jinja")
_PATH = re.compile(r"(?<![\w/.])(?:/[\w.-]+){2,}")  # absolute, of two names or more; no part of an address
_SIGNATURE = re.compile(r"\n<!-- wedlm-hf wrote this card .* -->$")


def model_card(
    model: Any,
    folder: str | os.PathLike[str],
    *,
    repo_id: str | None = None,
    metadata: dict[str, Any] | None = None,
) -> str:
    """The card of a model of this package, by its config and the card of what it was made from. With a chat template
    in the folder where it is saved, the example is a chat. Fields of `metadata` go before those of the base."""
    base, inherited = provenance(str(model.config.name_or_path or ""))
    fields = {"library_name": "transformers", "pipeline_tag": "text-generation", "base_model": base}
    return render(
        TEMPLATE,
        fields | inherited | (metadata or {}),
        title=repo_id.rpartition("/")[2] if repo_id else "A WeDLM model",
        base=base,
        config=model.config,
        place=json.dumps(repo_id or "."),
        is_chat=Path(folder, "chat_template.jinja").is_file(),
    )


def render(template: Path, metadata: dict[str, Any], **names: Any) -> str:
    """A signed card from a Jinja template whose `card_data` is the metadata, without fields of None, and our tags."""
    tags = list(dict.fromkeys([*TAGS, *(metadata.get("tags") or ())]))
    data = ModelCardData(**{name: value for name, value in metadata.items() if value is not None} | {"tags": tags})
    return signed(str(ModelCard.from_template(data, template_str=template.read_text(encoding="utf-8"), **names)))


def signed(text: str) -> str:
    """A card with a last line that fits the lines above it."""
    text = _SIGNATURE.sub("", text.rstrip()).rstrip()
    digest = hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:12]
    return f"{text}\n\n<!-- wedlm-hf wrote this card ({digest}) and replaces it unless it is edited. -->\n"


def is_written_by_a_person(text: str | None) -> bool:
    """Whether a card must be kept: not one of ours as it was written, nor an empty form of transformers or PEFT."""
    if text is None or not text.strip() or text.split() == signed(text).split():
        return False
    body = re.sub(r"### Framework versions\s+(- PEFT \S+\s*)+$", "", text.split("\n---\n", 1)[-1])
    said = re.search(r"This is the model card of a .* has been automatically generated\.", body)
    form: Any = ModelCard.from_template(ModelCardData(), model_description=said and said[0])
    return bool(body.split() != form.text.split())


def read_card(folder: str | os.PathLike[str]) -> str | None:
    """The card in a folder, if there is one."""
    path = Path(folder, CARD_NAME)
    return path.read_text(encoding="utf-8") if path.is_file() else None


def write_card(folder: str | os.PathLike[str], text: str) -> bool:
    """Writes a card, whole or not at all, unless a person's is there. Returns whether it was written."""
    if is_written_by_a_person(read_card(folder)):
        return False
    write_text(Path(folder, CARD_NAME), text)
    check_card(folder)
    return True


def check_card(folder: str | os.PathLike[str]) -> None:
    """Warns of what nobody else could follow, once the folder is uploaded: paths of this machine in the card, and an
    adapter whose base is not on the Hub."""
    text, config = read_card(folder) or "", Path(folder, "adapter_config.json")
    if paths := sorted({path for path in _PATH.findall(text) if os.path.exists(path)}):
        logger.warning(
            "%s names %s, a path of this machine: change it before you share the folder.", CARD_NAME, paths[0]
        )
    base = json.loads(config.read_bytes()).get("base_model_name_or_path") if config.is_file() else None
    if base and not is_hub_id(base):
        logger.warning(
            "%s names the base %r, which nobody else can load: before you share the adapter, write the base's Hub id "
            "there, OWNER/NAME, as `base_model_name_or_path`.",
            config.name,
            base,
        )


def provenance(source: str) -> tuple[str | None, dict[str, Any]]:
    """What a model was made from: the Hub id of the base, if there is one, and what its card states for both. A folder
    that was made from a Hub id passes it on."""
    folder, is_id = source, is_hub_id(source)
    if is_id:  # nothing is fetched while a model is saved
        cached = try_to_load_from_cache(source, CARD_NAME)
        folder = os.path.dirname(cached) if isinstance(cached, str) else ""
    stated = metadata_of(read_card(folder)) if folder else {}
    base = source if is_id else stated.get("base_model")
    inherited = {name: stated[name] for name in INHERITED if stated.get(name) is not None}
    return base if isinstance(base, str) else None, inherited


def is_hub_id(name: str) -> bool:
    """Whether a name can be one of the Hub and is no folder or file here."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1 and not os.path.exists(name)


def metadata_of(card: str | None) -> dict[str, Any]:
    """The metadata of a card; nothing where there is none or it cannot be read."""
    if card is None or not card.lstrip().startswith("---"):  # for which huggingface_hub warns
        return {}
    try:
        return dict(ModelCard(card, ignore_metadata_errors=True).data.to_dict())
    except Exception:  # YAML's own kinds, and values of a wrong type
        return {}


def write_cards_on_save(model_class: Any) -> None:
    """Makes saves and uploads of a model class write its card."""
    save, upload = model_class.save_pretrained, model_class._upload_modified_files

    @functools.wraps(save)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        card = read_card(save_directory)
        result = save(self, save_directory, *args, **kwargs)
        if is_written_by_a_person(card):
            if read_card(save_directory) != card:  # an upload has put the repository's here
                write_text(Path(save_directory, CARD_NAME), str(card))
        elif kwargs.get("is_main_process", args[0] if args else True):
            write_card(save_directory, model_card(self, save_directory))
        return result

    @functools.wraps(upload)
    def upload_modified_files(self: Any, working_dir: Any, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        # transformers has put the repository's card here, or an empty form where there is none.
        tags = metadata_of(read_card(working_dir)).get("tags")
        write_card(working_dir, model_card(self, working_dir, repo_id=repo_id, metadata={"tags": tags}))
        return upload(self, working_dir, repo_id, *args, **kwargs)

    model_class.save_pretrained, model_class._upload_modified_files = save_pretrained, upload_modified_files
