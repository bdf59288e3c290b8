"""The chat formats of data/tokenizer/chat.py as Jinja templates, and the tokenizer files of an export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bessemer.data.tokenizer.chat import BOS_NAMES, read_template, special_tokens
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.spec.load import load_spec

# A message's text (a string or a list of parts), and its tool calls.
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
# Tools go into the system message.
_TOOLS = (
    "{%- macro declared() -%}{{ '<tools>' }}{%- for tool in tools -%}{{ '\\n' + tool|tojson }}{%- endfor -%}"
    "{{ '\\n</tools>' }}{%- endmacro -%}{%- if tools and messages[0].role == 'system' -%}{%- set messages = "
    "[{'role': 'system', 'content': text(messages[0]) + '\\n\\n' + declared()}] + messages[1:] -%}{%- elif tools -%}"
    "{%- set messages = [{'role': 'system', 'content': declared()}] + messages -%}{%- endif -%}"
)
_EACH = _TEXT + _CALLS + _TOOLS + "{%- for m in messages -%}"
_END = "{%- endfor -%}{%- if add_generation_prompt -%}"
TEMPLATES = {
    "chatml": _EACH + "{{ '<|im_start|>' + m.role + '\\n' + text(m) + calls(m, 'arguments') + '<|im_end|>\\n' }}"
    + _END + "{{ '<|im_start|>assistant\\n' }}{%- endif -%}",
    "llama3": "{{ '<|begin_of_text|>' }}" + _EACH + "{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else "
    "m.role) + '<|end_header_id|>\\n\\n' + text(m)|trim + calls(m, 'parameters') + '<|eot_id|>' }}"
    + _END + "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}",
    "plain": _EACH + "{{ ('' if loop.first else '\\n\\n') + m.role|capitalize + ': ' + text(m) + calls(m, 'arguments') "
    "+ (eos_token if m.role == 'assistant' else '') }}" + _END + "{{ '\\n\\nAssistant:' }}{%- endif -%}",
    "none": _EACH + "{{ text(m) + calls(m, 'arguments') + (eos_token if m.role == 'assistant' else '') }}"
    + "{%- endfor -%}",
}  # fmt: skip
# Tokenizer files that are no vocabularies.
_SETTINGS = ("tokenizer_config", "special_tokens_map", "chat_template", "additional_chat_templates")
_PADS = ("<pad>", "<|pad|>", "<|padding|>", "[PAD]")


def tokenizer_files(
    tokenizer: Tokenizer, place: Path, longest: int, begins: bool = True
) -> tuple[dict[str, Any], dict[str, int]]:
    """Files by name for a fast tokenizer of transformers, and the token ids for the model's config.

    Documents follow each other's end token, so it also starts a text if there is no BOS token. With `begins` the
    tokenizer puts the end token before every text, as `bessemer generate` does.
    """
    bos, pad = (
        next((name for name in names if name in tokenizer.special), tokenizer.eos) for names in (BOS_NAMES, _PADS)
    )
    names = {"eos": tokenizer.eos, "bos": bos, "pad": pad}
    config: dict[str, Any] = {f"{role}_token": name for role, name in names.items()}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest}
    config |= {"clean_up_tokenization_spaces": False}
    definition = json.loads((place / "tokenizer.json").read_text(encoding="utf-8"))
    definition["post_processor"] = _prepend_eos(tokenizer) if begins else None
    files: dict[str, Any] = {"tokenizer.json": json.dumps(definition, ensure_ascii=False, indent=1)}
    files["tokenizer_config.json"] = config
    if template := _template(tokenizer, place):
        config["chat_template"] = files["chat_template.jinja"] = template
    # A model config's padding token gets no gradient: an end token that also pads would never be learned.
    ids = {role: name for role, name in names.items() if role != "pad" or name != tokenizer.eos}
    return files, {f"{role}_token_id": tokenizer.special[name] for role, name in ids.items()}


def _prepend_eos(tokenizer: Tokenizer) -> dict[str, Any]:
    """The post-processor of a tokenizer.json that puts the end token before a text."""
    end = {"SpecialToken": {"id": tokenizer.eos, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B"))
    token = {"id": tokenizer.eos, "ids": [tokenizer.eos_id], "tokens": [tokenizer.eos]}
    return {
        "type": "TemplateProcessing", "single": [end, first], "pair": [end, first, end, second],
        "special_tokens": {tokenizer.eos: token},
    }  # fmt: skip


def update_tokenizer_files(files: dict[str, Path], tokenizer: Tokenizer, place: Path) -> dict[str, Any]:
    """The tokenizer files of the model that a run started from, with the run's vocabulary (it may have added tokens)
    and its chat template, if it trained on conversations."""
    spec = load_spec(place / "spec.yaml")
    folder = next(iter(files.values())).parent
    if "tokenizer.json" not in files and Tokenizer.load(folder).vocab_size == tokenizer.vocab_size:
        return dict(files)  # a SentencePiece model, which has more detail than its conversion
    result: dict[str, Any] = {name: path for name, path in files.items() if name.startswith(_SETTINGS)}
    result["tokenizer.json"] = place / "tokenizer.json"
    if any(source.is_chat for source in spec.data.sources.values()) and (template := _template(tokenizer, place)):
        config = json.loads(files["tokenizer_config.json"].read_text()) if "tokenizer_config.json" in files else {}
        result["tokenizer_config.json"] = config | {"chat_template": template}
        result["chat_template.jinja"] = template
    return result


def _template(tokenizer: Tokenizer, place: Path) -> str | None:
    """The run's chat template, if its tokenizer has the required tokens."""
    if not (place / "spec.yaml").exists():
        return None
    chat = load_spec(place / "spec.yaml").tokenizer.chat
    if chat not in TEMPLATES:
        return read_template(chat, tuple(TEMPLATES))
    return TEMPLATES[chat] if set(special_tokens(chat)) <= set(tokenizer.special) else None
