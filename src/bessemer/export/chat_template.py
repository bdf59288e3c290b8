"""The layouts of conversations that data/tokenizer/chat.py writes, as Jinja templates, and the files of a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bessemer.data.tokenizer.chat import _BOS, read_template, special_tokens
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.spec.load import load_spec

# A message's text (a string or a list of parts), and the calls of tools after it.
_TEXT = (
    "{%- macro text(m) -%}{%- if m.content is string -%}{{ m.content }}"
    "{%- else -%}{%- for part in m.content or [] -%}{{ part.text }}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
)
_CALLS = (
    "{%- macro calls(m, key) -%}{%- for call in m.tool_calls or [] -%}{%- set f = call.function or call -%}"
    "{%- set body = '{\"name\": ' + f.name|tojson + ', \"' + key + '\": ' + "
    "(f.arguments if f.arguments is string else f.arguments|tojson) + '}' -%}"
    "{%- if key == 'arguments' -%}{{ ('' if loop.first and not text(m) else '\\n') + "
    "'<tool_call>\\n' + body + '\\n</tool_call>' }}{%- else -%}{{ body }}{%- endif -%}{%- endfor -%}{%- endmacro -%}"
)
_EACH = _TEXT + _CALLS + "{%- for m in messages -%}"
_END = "{%- endfor -%}{%- if add_generation_prompt -%}"
TEMPLATES = {
    "chatml": _EACH + "{{ '<|im_start|>' + m.role + '\\n' + text(m) + calls(m, 'arguments') + '<|im_end|>\\n' }}"
    + _END + "{{ '<|im_start|>assistant\\n' }}{%- endif -%}",
    "llama3": "{{ '<|begin_of_text|>' }}" + _EACH + "{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else "
    "m.role) + '<|end_header_id|>\\n\\n' + text(m)|trim + calls(m, 'parameters') + '<|eot_id|>' }}"
    + _END + "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}",
    "plain": _EACH + "{{ ('' if loop.first else '\\n\\n') + m.role|capitalize + ': ' + text(m) + calls(m, 'arguments') "
    "+ (eos_token if m.role == 'assistant' else '') }}" + _END + "{{ '\\n\\nAssistant:' }}{%- endif -%}",
}  # fmt: skip
_SETTINGS = (
    "tokenizer_config",
    "special_tokens_map",
    "chat_template",
    "additional_chat_templates",
)  # beside vocabularies
_PADS = ("<pad>", "<|pad|>", "<|padding|>", "[PAD]")


def tokenizer_files(
    tokenizer: Tokenizer, place: Path, longest: int, begins: bool = True
) -> tuple[dict[str, Any], dict[str, int]]:
    """Files by name for a fast tokenizer of transformers, and the ids that a model's config names.

    Documents begin after the end of another, so the end token also begins a text where there is no token for that.
    With `begins` the tokenizer puts the end token before every text, as `bessemer generate` does.
    """
    bos, pad = (next((name for name in usual if name in tokenizer.special), tokenizer.eos) for usual in (_BOS, _PADS))
    names = {"eos": tokenizer.eos, "bos": bos, "pad": pad}
    about: dict[str, Any] = {f"{role}_token": name for role, name in names.items()}
    about |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest}
    about |= {"clean_up_tokenization_spaces": False}
    definition = json.loads((place / "tokenizer.json").read_text(encoding="utf-8"))
    definition["post_processor"] = _begin_with(tokenizer) if begins else None
    files: dict[str, Any] = {"tokenizer.json": json.dumps(definition, ensure_ascii=False, indent=1)}
    files["tokenizer_config.json"] = about
    if template := _template(tokenizer, place):
        about["chat_template"] = files["chat_template.jinja"] = template
    # In a config, padding's embedding gets no gradient: an end token that pads too would never be learnt there.
    ids = {role: name for role, name in names.items() if role != "pad" or name != tokenizer.eos}
    return files, {f"{role}_token_id": tokenizer.special[name] for role, name in ids.items()}


def _begin_with(tokenizer: Tokenizer) -> dict[str, Any]:
    """The part of a tokenizer.json that puts the end token before a text."""
    end = {"SpecialToken": {"id": tokenizer.eos, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B"))
    token = {"id": tokenizer.eos, "ids": [tokenizer.eos_id], "tokens": [tokenizer.eos]}
    return {
        "type": "TemplateProcessing", "single": [end, first], "pair": [end, first, end, second],
        "special_tokens": {tokenizer.eos: token},
    }  # fmt: skip


def with_tokens_of_the_run(files: dict[str, Path], tokenizer: Tokenizer, place: Path) -> dict[str, Any]:
    """The tokenizer's files of the model that a run started from, with the run's own vocabulary, which may have more
    tokens, and its layout of conversations, if it was trained on some."""
    spec = load_spec(place / "spec.yaml")
    source = next(iter(files.values())).parent
    if "tokenizer.json" not in files and Tokenizer.load(source).vocab_size == tokenizer.vocab_size:
        return dict(files)  # a SentencePiece model, which says more than what is made of it
    kept: dict[str, Any] = {name: path for name, path in files.items() if name.startswith(_SETTINGS)}
    kept["tokenizer.json"] = place / "tokenizer.json"
    if any(one.messages_field for one in spec.data.sources.values()) and (template := _template(tokenizer, place)):
        about = json.loads(files["tokenizer_config.json"].read_text()) if "tokenizer_config.json" in files else {}
        kept["tokenizer_config.json"] = about | {"chat_template": template}
        kept["chat_template.jinja"] = template
    return kept


def _template(tokenizer: Tokenizer, place: Path) -> str | None:
    """The run's layout of conversations, if its tokenizer has the tokens for it."""
    if not (place / "spec.yaml").exists():
        return None
    chat = load_spec(place / "spec.yaml").tokenizer.chat
    if chat not in TEMPLATES:
        return read_template(chat, tuple(TEMPLATES))
    return TEMPLATES[chat] if set(special_tokens(chat)) <= set(tokenizer.special) else None
